// Package data finds text, stores it as tokens, and forms batches from it.
//
//	Open  →  Corpus.Train    →  Tokenize, or CacheTokens  →  NewLoader  →  Batch after Batch
//	         Corpus.HeldOut  →  Text.Sample  →  NewEvaluation
//
// Start with [Open]. It returns a [Corpus], which is the text of a file or a directory, divided into
// a part to train on and a held-out part. [Tokens] are the token ids of a text, from files, from
// memory or from a [TokenFile]. A [Loader] returns batches of them in a random order that can be
// resumed, whereas an [Evaluation] always returns its batches in the same order.
package data

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// ErrChanged is wrapped by errors that report changed data: a file of a Corpus that was changed or
// removed after it was opened, or a LoaderState that belongs to other data.
var ErrChanged = errors.New("the data has changed")

// A Corpus is the text of a file or of the files in a directory, split into one part to train on and
// a held-out part. Only a table of the files is kept in memory, while their contents are read on
// demand.
//
// The split depends only on the number of files, their paths relative to the directory, and the split
// seed. It is therefore the same in every run and on every machine:
//   - A corpus of 20 or more files is split by file. A hash of the seed and a file's path is
//     interpreted as a number in [0, 1), and the file is held out if this number is less than the
//     held-out share. The file with the smallest hash is always held out. Adding files does not move
//     existing ones from one part to the other, except a file that was held out only because its hash
//     was the smallest.
//   - With fewer files, the last bytes of each file are held out.
//
// In both parts the order of the files is derived from the seed, so that the first bytes are a fair
// sample of the whole.
type Corpus struct {
	Train   *Text
	HeldOut *Text
}

// minFilesToSplit is the smallest number of files for splitting by file. With fewer, the held-out
// share would depend too much on the sizes of individual files.
const minFilesToSplit = 20

type config struct {
	extensions []string
	heldOut    float64
	seed       uint64
	maxBytes   int64
}

// An Option configures which files Open uses and how it splits them.
type Option func(*config) error

// WithExtensions restricts a directory to files with one of the given extensions, such as ".go" or
// "go".
func WithExtensions(extensions ...string) Option {
	return func(c *config) error {
		if len(extensions) == 0 {
			return errors.New("WithExtensions: no extension given")
		}
		for _, e := range extensions {
			if strings.Trim(e, ".") == "" {
				return fmt.Errorf("WithExtensions: %q is not a file extension", e)
			}
			c.extensions = append(c.extensions, "."+strings.TrimPrefix(e, "."))
		}
		return nil
	}
}

// WithHeldOut sets the share of the text that is held out. It must be greater than 0 and less than
// 1. The default is 0.05.
func WithHeldOut(share float64) Option {
	return func(c *config) error {
		if !(share > 0 && share < 1) {
			return fmt.Errorf("WithHeldOut: the share is %v, want more than 0 and less than 1",
				share)
		}
		c.heldOut = share
		return nil
	}
}

// WithSplitSeed sets the seed of the split and of the order of the files. The default is 0.
func WithSplitSeed(seed uint64) Option {
	return func(c *config) error {
		c.seed = seed
		return nil
	}
}

// WithMaxBytes limits the corpus to about n bytes, divided between the two parts by the held-out
// share. n must be at least 2. Each part consists of its first files in the order derived from the
// seed, the last of which is truncated.
func WithMaxBytes(n int64) Option {
	return func(c *config) error {
		if n < 2 {
			return fmt.Errorf("WithMaxBytes: the limit is %d, want at least 2", n)
		}
		c.maxBytes = n
		return nil
	}
}

// Open finds the text at path, which is a file or a directory. Directories are searched recursively.
// Open skips files and directories whose names start with a dot, symbolic links inside a directory,
// empty files, and binary files, which contain a zero byte among the first 8192. path itself may be a
// symbolic link. A file that path names directly is used even if it is binary.
//
// Open returns an error if path does not exist, if something in it cannot be read, or if there is
// not enough text for both parts.
func Open(path string, options ...Option) (*Corpus, error) {
	c := config{heldOut: 0.05}
	for _, o := range options {
		if err := o(&c); err != nil {
			return nil, fmt.Errorf("data: Open: %w", err)
		}
	}

	root, files, err := findFiles(path, c.extensions)
	if err != nil {
		return nil, fmt.Errorf("data: Open: %w", err)
	}

	train, held := c.split(files)
	if c.maxBytes > 0 {
		maxHeld := max(1, int64(math.Round(c.heldOut*float64(c.maxBytes))))
		held = capDocuments(held, maxHeld)
		train = capDocuments(train, max(1, c.maxBytes-maxHeld))
	}

	corpus := &Corpus{Train: newText(root, train), HeldOut: newText(root, held)}
	if corpus.Train.Size() == 0 || corpus.HeldOut.Size() == 0 {
		return nil, fmt.Errorf("data: Open: %d files with %d bytes in %s are too few to hold "+
			"out a share of %v",
			len(files), corpus.Train.Size()+corpus.HeldOut.Size(), path, c.heldOut)
	}

	return corpus, nil
}

// OpenText finds the text at path like [Open] but doesn't hold out any part.
func OpenText(path string) (*Text, error) {
	root, files, err := findFiles(path, nil)
	if err != nil {
		return nil, fmt.Errorf("data: OpenText: %w", err)
	}
	return newText(root, files), nil
}

// findFiles returns the files in lexical order, and the directory that their names are relative to.
func findFiles(path string, extensions []string) (root string, files []document, err error) {
	if path == "" { // EvalSymlinks returns the current directory for it.
		return "", nil, errors.New(`the path is "": name a file or a folder with text`)
	}

	root, err = filepath.EvalSymlinks(path)
	if err != nil {
		return "", nil, fmt.Errorf("%w: want a file or a folder with text", err)
	}

	info, err := os.Stat(root)
	switch {
	case err != nil:
		return "", nil, err
	case info.IsDir():
		s := search{root: root, extensions: extensions}
		if err := filepath.WalkDir(root, s.visit); err != nil {
			return "", nil, err
		}
		if len(s.files) == 0 {
			return "", nil, fmt.Errorf("no text in %s: %s", path, s.found())
		}
		return root, s.files, nil
	case !info.Mode().IsRegular():
		return "", nil, fmt.Errorf("%s is neither a file nor a folder: copy its text to a file",
			path)
	case info.Size() == 0:
		return "", nil, fmt.Errorf("%s is empty, want text", path)
	}

	if _, err := isBinary(root); err != nil { // it may be binary, but it must be readable
		return "", nil, err
	}

	return filepath.Dir(root), []document{newDocument(filepath.Base(root), info)}, nil
}

// A search collects the text files in a directory and counts the files it skips.
type search struct {
	root       string
	extensions []string
	files      []document

	seen, matched, empty, binary int
}

// visit is called for every file and directory in lexical order.
func (s *search) visit(name string, entry fs.DirEntry, err error) error {
	if err != nil {
		return err
	}

	if name != s.root && strings.HasPrefix(entry.Name(), ".") {
		if entry.IsDir() {
			return fs.SkipDir
		}
		return nil
	}

	if !entry.Type().IsRegular() {
		return nil
	}

	s.seen++
	hasSuffix := func(e string) bool { return strings.HasSuffix(name, e) }
	if len(s.extensions) > 0 && !slices.ContainsFunc(s.extensions, hasSuffix) {
		return nil
	}

	s.matched++
	info, err := entry.Info()
	if err != nil {
		return err
	}

	if info.Size() == 0 {
		s.empty++
		return nil
	}

	skip, err := isBinary(name)
	if err != nil {
		return err
	}

	if skip {
		s.binary++
		return nil
	}

	relative, err := filepath.Rel(s.root, name)
	if err != nil {
		return err
	}

	s.files = append(s.files, newDocument(filepath.ToSlash(relative), info))
	return nil
}

// found explains why the search found no text.
func (s *search) found() string {
	wanted := "of any extension"
	if len(s.extensions) > 0 {
		wanted = "ending in " + strings.Join(s.extensions, " or ")
	}
	if s.seen == 0 {
		return "it has no files except hidden ones"
	}
	return fmt.Sprintf("of %d files, %d %s, %d of these empty and %d binary", s.seen, s.matched,
		wanted, s.empty, s.binary)
}

// isBinary reports whether the first 8192 bytes of the file contain a zero byte.
func isBinary(name string) (bool, error) {
	f, _, err := regular.Open(name)
	if err != nil {
		return false, err
	}
	defer f.Close()
	head, err := io.ReadAll(io.LimitReader(f, 8192))
	return bytes.IndexByte(head, 0) >= 0, err
}

// split returns the documents to train on and the held-out ones, each in the order derived from the seed.
func (c *config) split(files []document) (train, held []document) {
	order := make(map[string]uint64, len(files))
	for _, d := range files {
		order[d.name] = c.hash("order", d.name)
	}

	slices.SortFunc(files, func(a, b document) int {
		return cmp.Or(cmp.Compare(order[a.name], order[b.name]), cmp.Compare(a.name, b.name))
	})
	if len(files) < minFilesToSplit {
		for _, d := range files {
			n := int64(math.Round(c.heldOut * float64(d.size)))
			if n == 0 && len(files) == 1 {
				n = 1
			}
			head, tail := d, d
			head.size -= n
			tail.offset, tail.size = head.size, n
			train, held = append(train, head), append(held, tail)
		}
		return train, held
	}

	least := slices.MinFunc(files, func(a, b document) int {
		return cmp.Or(cmp.Compare(c.hash("split", a.name), c.hash("split", b.name)),
			cmp.Compare(a.name, b.name))
	})
	for _, d := range files {
		if d.name == least.name || float64(c.hash("split", d.name))*0x1p-64 < c.heldOut {
			held = append(held, d)
		} else {
			train = append(train, d)
		}
	}

	return train, held
}

// hash returns 64 uniformly distributed bits for a purpose and a name. SHA-256 distributes evenly,
// and its result doesn't depend on the machine.
func (c *config) hash(purpose, name string) uint64 {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00%s", purpose, c.seed, name))
	return binary.BigEndian.Uint64(sum[:])
}

// GoSource returns the directory with the source of Go's standard library and tools, about 80 MB of
// .go files, which every Go installation contains. GoSource uses the environment variable GOROOT or,
// if that is not set, the output of `go env GOROOT`. It returns an error if the command fails or the
// directory does not contain the source.
func GoSource() (string, error) {
	root := os.Getenv("GOROOT")
	if root == "" {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
		if err != nil {
			return "", fmt.Errorf("data: GoSource: GOROOT is not set and `go env GOROOT` fails: %w",
				err)
		}
		root = strings.TrimSpace(string(out))
	}

	dir := filepath.Join(root, "src")
	if _, err := os.Stat(filepath.Join(dir, "fmt", "print.go")); err != nil {
		return "", fmt.Errorf("data: GoSource: %s does not hold Go's source: %w", dir, err)
	}

	return dir, nil
}
