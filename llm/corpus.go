package llm

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
	"iter"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// ErrDataChanged is wrapped by errors that report text that is no longer what it was: a file of a Corpus that changed or
// vanished after it was opened, or a LoaderState of other data.
var ErrDataChanged = errors.New("the data has changed")

// A Corpus is the text of a file or of the files of a folder, split into one part to train on and one held out. Only a
// table of the files is kept in memory; their bytes are read when asked for.
//
// The split depends on the files' paths relative to the folder, their number and the split seed, on nothing else, so that
// it is the same in every run and on every machine:
//   - 20 files and more are split by file. A file is held out when a hash of the seed and its path, taken as a number in
//     [0, 1), is less than the held-out share, and the file with the least hash always is: new files leave the others
//     where they are.
//   - Of fewer files, each is cut: its last bytes are held out.
//
// In both parts the files lie in an order drawn from the seed, so that the first bytes are a fair sample of the whole.
type Corpus struct {
	Train   *Text
	HeldOut *Text
}

// minFilesToSplit is the number of files from which on whole files are held out: with fewer, their sizes would make the
// held-out share a matter of luck.
const minFilesToSplit = 20

type corpusConfig struct {
	extensions []string
	heldOut    float64
	seed       uint64
	maxBytes   int64
}

// A CorpusOption changes how OpenCorpus chooses and splits files.
type CorpusOption func(*corpusConfig) error

// WithExtensions takes only files whose names end in one of the extensions, such as ".go" (or "go"), out of a folder.
func WithExtensions(extensions ...string) CorpusOption {
	return func(c *corpusConfig) error {
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

// WithHeldOut sets the share of the text that is held out, between 0 and 1, both excluded; the default is 0.05.
func WithHeldOut(share float64) CorpusOption {
	return func(c *corpusConfig) error {
		if !(share > 0 && share < 1) {
			return fmt.Errorf("WithHeldOut: the share is %v, want more than 0 and less than 1", share)
		}
		c.heldOut = share
		return nil
	}
}

// WithSplitSeed sets the seed of the split and of the files' order; the default is 0.
func WithSplitSeed(seed uint64) CorpusOption {
	return func(c *corpusConfig) error {
		c.seed = seed
		return nil
	}
}

// WithMaxBytes takes about n bytes only, the held-out share of them from the held-out part and the rest from the part to
// train on: in both, the first files in the order drawn from the seed, the last of them cut short.
func WithMaxBytes(n int64) CorpusOption {
	return func(c *corpusConfig) error {
		if n < 2 {
			return fmt.Errorf("WithMaxBytes: the limit is %d, want at least 2", n)
		}
		c.maxBytes = n
		return nil
	}
}

// OpenCorpus finds the text at path, a file or a folder. A folder is searched with all folders in it, but files and
// folders whose names start with a dot are passed over, and so are symbolic links (path itself may be one), empty files
// and binary ones: those with a zero byte among the first 8192. A file that is named directly is always taken.
//
// It is an error when path does not exist, something in it cannot be read, or no text is found.
func OpenCorpus(path string, options ...CorpusOption) (*Corpus, error) {
	c := corpusConfig{heldOut: 0.05}
	for _, o := range options {
		if o == nil {
			return nil, errors.New("llm: OpenCorpus: an option is nil")
		}
		if err := o(&c); err != nil {
			return nil, fmt.Errorf("llm: OpenCorpus: %w", err)
		}
	}
	root, files, err := findFiles(path, c.extensions)
	if err != nil {
		return nil, fmt.Errorf("llm: OpenCorpus: %w", err)
	}
	train, held := c.split(files)
	if c.maxBytes > 0 {
		maxHeld := max(1, int64(math.Round(c.heldOut*float64(c.maxBytes))))
		held = capDocuments(held, maxHeld)
		train = capDocuments(train, max(1, c.maxBytes-maxHeld))
	}
	corpus := &Corpus{Train: newText(root, train), HeldOut: newText(root, held)}
	if corpus.Train.Size() == 0 || corpus.HeldOut.Size() == 0 {
		return nil, fmt.Errorf("llm: OpenCorpus: %d files with %d bytes in %s are too little to hold out a share of %v",
			len(files), corpus.Train.Size()+corpus.HeldOut.Size(), path, c.heldOut)
	}
	return corpus, nil
}

// findFiles returns the folder that the files' names are relative to and the files in lexical order.
func findFiles(path string, extensions []string) (root string, files []document, err error) {
	root, err = filepath.EvalSymlinks(path)
	if err != nil {
		return "", nil, err
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
		return "", nil, fmt.Errorf("%s is neither a file nor a folder", path)
	case info.Size() == 0:
		return "", nil, fmt.Errorf("%s is empty", path)
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
	return fmt.Sprintf("of %d files, %d %s, %d of these empty and %d binary", s.seen, s.matched, wanted, s.empty, s.binary)
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

// split returns the documents to train on and those held out, each in the order drawn from the seed.
func (c *corpusConfig) split(files []document) (train, held []document) {
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
		return cmp.Or(cmp.Compare(c.hash("split", a.name), c.hash("split", b.name)), cmp.Compare(a.name, b.name))
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

// hash returns 64 uniform bits for a purpose and a name. SHA-256 is here for its even spread and because it is the same
// everywhere.
func (c *corpusConfig) hash(purpose, name string) uint64 {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00%s", purpose, c.seed, name))
	return binary.BigEndian.Uint64(sum[:])
}

// capDocuments returns the first limit bytes of the documents.
func capDocuments(docs []document, limit int64) []document {
	for i := range docs {
		if docs[i].size >= limit {
			docs[i].size = limit
			return docs[:i+1]
		}
		limit -= docs[i].size
	}
	return docs
}

// A document is a span of bytes of one file.
type document struct {
	name     string // relative to the text's root, with slashes
	offset   int64
	size     int64
	fileSize int64 // with modified, as found by OpenCorpus
	modified time.Time
	identity string    // of the file, as far as the system tells
	changed  time.Time // the last change of the file, its times included; zero where the system does not tell
}

func newDocument(name string, info fs.FileInfo) document {
	identity, changed := fileIdentity(info)
	return document{name: name, size: info.Size(), fileSize: info.Size(), modified: info.ModTime(), identity: identity, changed: changed}
}

// A Text is one part of a Corpus: its documents, one after the other without anything between them. It may be read by
// several goroutines at once.
type Text struct {
	root string
	docs []document
	ends []int64 // ends[i] is the offset in the text at which docs[i] ends

	known fingerprinted
}

func newText(root string, docs []document) *Text {
	t := &Text{root: root}
	var end int64
	for _, d := range docs {
		if d.size == 0 {
			continue
		}
		end += d.size
		t.docs, t.ends = append(t.docs, d), append(t.ends, end)
	}
	return t
}

// Size returns the number of bytes.
func (t *Text) Size() int64 {
	if len(t.ends) == 0 {
		return 0
	}
	return t.ends[len(t.ends)-1]
}

// Documents returns the number of files, parts of files included, that the text consists of.
func (t *Text) Documents() int { return len(t.docs) }

// Reader returns a reader of the whole text from its start.
func (t *Text) Reader() io.Reader { return io.NewSectionReader(t, 0, t.Size()) }

// ReadAt reads len(p) bytes from the given offset of the text, as io.ReaderAt says. A file that changed or vanished since
// OpenCorpus is an ErrDataChanged that names it.
func (t *Text) ReadAt(p []byte, offset int64) (int, error) {
	if offset < 0 {
		return 0, fmt.Errorf("llm: Text.ReadAt: the offset is %d, want at least 0", offset)
	}
	read := 0
	first, _ := slices.BinarySearch(t.ends, offset+1)
	for i := first; i < len(t.docs) && read < len(p); i++ {
		d := t.docs[i]
		start := offset + int64(read) - (t.ends[i] - d.size)
		n := int(min(int64(len(p)-read), d.size-start))
		if err := t.readDocument(d, p[read:read+n], d.offset+start); err != nil {
			return read, fmt.Errorf("llm: Text.ReadAt: %w", err)
		}
		read += n
	}
	if read < len(p) {
		return read, io.EOF
	}
	return read, nil
}

// readDocument fills p from the given offset of the document's file. The file is opened for each read: that costs some
// microseconds and leaves nothing to close, to run out of or to share between goroutines.
func (t *Text) readDocument(d document, p []byte, offset int64) error {
	name := filepath.Join(t.root, filepath.FromSlash(d.name))
	f, _, err := regular.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s has vanished", ErrDataChanged, name)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() != d.fileSize || !info.ModTime().Equal(d.modified) {
		return fmt.Errorf("%w: %s had %d bytes, last modified %v, and now has %d, modified %v", ErrDataChanged, name,
			d.fileSize, d.modified.Format(time.DateTime), info.Size(), info.ModTime().Format(time.DateTime))
	}
	_, err = f.ReadAt(p, offset)
	if err == io.EOF {
		return fmt.Errorf("%w: %s was cut short", ErrDataChanged, name)
	}
	return err
}

// sampleBlock is the size of the pieces that Sample puts together: twice gzip's window, so that what a seam costs gzip
// is little.
const sampleBlock = 64 << 10

// Sample returns the whole text when it has at most limit bytes, else limit bytes in 64 KiB blocks spread evenly over it.
// The same text and limit give the same bytes, so that whatever is scored on them is scored on the same ones.
func (t *Text) Sample(limit int) ([]byte, error) {
	if limit < 1 {
		return nil, fmt.Errorf("llm: Text.Sample: the limit is %d bytes, want at least 1", limit)
	}
	n := int(min(int64(limit), t.Size()))
	sample := make([]byte, 0, n)
	for at, size := range t.sampleBlocks(n) {
		block := sample[len(sample):][:size]
		if _, err := t.ReadAt(block, at); err != nil {
			return nil, err
		}
		sample = sample[:len(sample)+size]
	}
	return sample, nil
}

// sampleBlocks yields where the blocks of a sample of n bytes are in the text, and their sizes.
func (t *Text) sampleBlocks(n int) iter.Seq2[int64, int] {
	return func(yield func(at int64, size int) bool) {
		blocks := (n + sampleBlock - 1) / sampleBlock
		for i := range blocks {
			lo, hi := i*sampleBlock, min((i+1)*sampleBlock, n)
			// The gap before a block grows in proportion to its number, and the last block ends where the text ends.
			gap := int64(0)
			if blocks > 1 {
				gap = (t.Size() - int64(n)) * int64(i) / int64(blocks-1)
			}
			if !yield(int64(lo)+gap, hi-lo) {
				return
			}
		}
	}
}

// SampleDocuments returns what Sample does, cut where documents end and where text is left out.
func (t *Text) SampleDocuments(limit int) ([][]byte, error) {
	sample, err := t.Sample(limit)
	if err != nil {
		return nil, err
	}
	var cuts []int
	size, read := 0, int64(0) // of the blocks so far, and where in the text the last one ends
	for at, n := range t.sampleBlocks(len(sample)) {
		if at > read {
			cuts = append(cuts, size)
		}
		read = at + int64(n)
		first, _ := slices.BinarySearch(t.ends, at)
		for i := first; t.ends[i] < read; i++ {
			cuts = append(cuts, size+int(t.ends[i]-at))
		}
		size += n
	}
	var documents [][]byte
	start := 0
	for _, cut := range append(cuts, size) {
		if cut > start {
			documents = append(documents, sample[start:cut:cut])
		}
		start = cut
	}
	return documents, nil
}

// GoSource returns the folder with the source of Go's standard library and tools, which every Go installation has: some
// 80 MB of .go files. It looks where `go env GOROOT` points to.
func GoSource() (string, error) {
	root := os.Getenv("GOROOT")
	if root == "" {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
		if err != nil {
			return "", fmt.Errorf("llm: GoSource: GOROOT is not set and `go env GOROOT` fails: %w", err)
		}
		root = strings.TrimSpace(string(out))
	}
	dir := filepath.Join(root, "src")
	if _, err := os.Stat(filepath.Join(dir, "fmt", "print.go")); err != nil {
		return "", fmt.Errorf("llm: GoSource: %s does not hold Go's source: %w", dir, err)
	}
	return dir, nil
}
