// Package data finds text, keeps it as tokens and deals out batches of it.
//
//	Open  →  Corpus.Train    →  Tokenize, or CacheTokens  →  NewLoader  →  Batch after Batch
//	         Corpus.HeldOut  →  Text.Sample  →  NewEvaluation
//
// A [Corpus] is the text of a file or a folder, split into a part to train on and one held out.
// [Tokens] are text as ids, from files, from memory or from a [TokenFile]. A [Loader] deals them
// out in a random order that it can take up again, and an [Evaluation] always in the same.
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

// ErrChanged is wrapped by errors that report text that is no longer what it was. A file of a
// Corpus that changed or vanished after it was opened, or a LoaderState of other data.
var ErrChanged = errors.New("the data has changed")

// A Corpus is the text of a file or of the files of a folder. It is split into one part to train on
// and one held out. Only a table of the files is kept in memory; their bytes are read when asked
// for.
//
// The split depends on the files' paths relative to the folder, their number and the split seed. So
// it is the same in every run and on every machine:
//   - 20 files and more are split by file. A hash of the seed and a file's path is taken as a
//     number in [0, 1). A file is held out when that is less than the held-out share. The file with
//     the least hash always is. New files leave the others where they are.
//   - Of fewer files, each is cut: its last bytes are held out.
//
// In both parts the files lie in an order drawn from the seed, so that the first bytes are a fair
// sample of the whole.
type Corpus struct {
	Train   *Text
	HeldOut *Text
}

// minFilesToSplit is the number of files from which on whole files are held out. With fewer, their
// sizes would make the held-out share a matter of luck.
const minFilesToSplit = 20

type config struct {
	extensions []string
	heldOut    float64
	seed       uint64
	maxBytes   int64
}

// An Option changes how Open chooses and splits files.
type Option func(*config) error

// WithExtensions takes only files whose names end in one of the extensions, such as ".go" (or
// "go"), out of a folder.
func WithExtensions(extensions ...string) Option {
	return func(c *config) error {
		if len(extensions) == 0 {
			return errors.New("WithExtensions: no extension given")
		}
		for _, e := range extensions {
			if strings.Trim(e, ".") == "" {
				return fmt.Errorf("WithExtensions: %q is no file extension", e)
			}
			c.extensions = append(c.extensions, "."+strings.TrimPrefix(e, "."))
		}
		return nil
	}
}

// WithHeldOut sets the share of the text that is held out, between 0 and 1, both excluded; the
// default is 0.05.
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

// WithSplitSeed sets the seed of the split and of the files' order; the default is 0.
func WithSplitSeed(seed uint64) Option {
	return func(c *config) error {
		c.seed = seed
		return nil
	}
}

// WithMaxBytes takes about n bytes only, the held-out share of them from the held-out part and the
// rest from the part to train on. From both it takes the first files in the order drawn from the
// seed, the last of them cut short.
func WithMaxBytes(n int64) Option {
	return func(c *config) error {
		if n < 2 {
			return fmt.Errorf("WithMaxBytes: the limit is %d, want at least 2", n)
		}
		c.maxBytes = n
		return nil
	}
}

// Open finds the text at path, a file or a folder. A folder is searched with all folders in it.
// Files and folders whose names start with a dot are passed over, and so are symbolic links (path
// itself may be one). Empty files and binary ones, with a zero byte among the first 8192, are
// passed over too. A file that is named directly is always taken.
//
// It is an error when path does not exist, something in it cannot be read, or no text is found.
func Open(path string, options ...Option) (*Corpus, error) {
	c := config{heldOut: 0.05}
	for _, o := range options {
		if o == nil {
			return nil, errors.New("data: Open: an option is nil")
		}
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
		return nil, fmt.Errorf("data: Open: %d files with %d bytes in %s are too little to hold "+
			"out a share of %v",
			len(files), corpus.Train.Size()+corpus.HeldOut.Size(), path, c.heldOut)
	}
	return corpus, nil
}

// OpenText finds the text at path, as [Open] does, and holds none of it out.
func OpenText(path string) (*Text, error) {
	root, files, err := findFiles(path, nil)
	if err != nil {
		return nil, fmt.Errorf("data: OpenText: %w", err)
	}
	return newText(root, files), nil
}

// findFiles returns the folder that the files' names are relative to and the files in lexical
// order.
func findFiles(path string, extensions []string) (root string, files []document, err error) {
	if path == "" { // which EvalSymlinks takes for the present folder
		return "", nil, errors.New(`the path is "", want that of a file or a folder with text`)
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

// A search collects the text files of a folder, and counts what it passes over.
type search struct {
	root       string
	extensions []string
	files      []document

	seen, matched, empty, binary int
}

// visit is called for each file and folder, in lexical order.
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

// found says why there are no files.
func (s *search) found() string {
	wanted := "of any extension"
	if len(s.extensions) > 0 {
		wanted = "ending in " + strings.Join(s.extensions, " or ")
	}
	if s.seen == 0 {
		return "there are no files in it, hidden ones aside"
	}
	return fmt.Sprintf("of %d files, %d %s, %d of these empty and %d binary", s.seen, s.matched,
		wanted, s.empty, s.binary)
}

// isBinary reports whether there is a zero byte among the file's first 8192.
func isBinary(name string) (bool, error) {
	f, _, err := regular.Open(name)
	if err != nil {
		return false, err
	}
	defer f.Close()
	head, err := io.ReadAll(io.LimitReader(f, 8192))
	return bytes.IndexByte(head, 0) >= 0, err
}

// split returns the documents to train on and those held out, each in the order drawn from the
// seed.
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

// hash returns 64 uniform bits for a purpose and a name. SHA-256 is here for its even spread and
// because it is the same everywhere.
func (c *config) hash(purpose, name string) uint64 {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00%s", purpose, c.seed, name))
	return binary.BigEndian.Uint64(sum[:])
}

// GoSource returns the folder with the source of Go's standard library and tools, which every Go
// installation has: some 80 MB of .go files. It looks where `go env GOROOT` points to.
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
