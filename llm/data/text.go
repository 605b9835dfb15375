package data

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"path/filepath"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/internal/regular"
)

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

// A document is a span of bytes in a file.
type document struct {
	name     string // relative to the text's root, with slashes
	offset   int64
	size     int64
	fileSize int64 // with modified, as found by Open
	modified time.Time
	identity string // identity of the file, if the system provides one
	// last change of the file or its attributes; zero if the system doesn't provide it
	changed time.Time
}

func newDocument(name string, info fs.FileInfo) document {
	identity, changed := fileIdentity(info)
	return document{name: name, size: info.Size(), fileSize: info.Size(), modified: info.ModTime(),
		identity: identity, changed: changed}
}

// A Text is one part of a Corpus, consisting of its documents one after another with nothing in
// between. It is safe for concurrent use.
type Text struct {
	root string
	docs []document
	ends []int64 // ends[i] is the end of docs[i] in the text

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

// Size returns the number of bytes in the text.
func (t *Text) Size() int64 {
	if len(t.ends) == 0 {
		return 0
	}
	return t.ends[len(t.ends)-1]
}

// Documents returns the number of files or parts of files in the text.
func (t *Text) Documents() int { return len(t.docs) }

// Reader returns a reader of the whole text from its start.
func (t *Text) Reader() io.Reader { return io.NewSectionReader(t, 0, t.Size()) }

// ReadAt reads len(p) bytes from the given offset of the text and implements io.ReaderAt. If a file
// was changed or removed since Open, the error wraps ErrChanged and names the file.
func (t *Text) ReadAt(p []byte, offset int64) (int, error) {
	if offset < 0 {
		return 0, fmt.Errorf("data: Text.ReadAt: the offset is %d, want at least 0", offset)
	}

	read := 0
	first, _ := slices.BinarySearch(t.ends, offset+1)
	for i := first; i < len(t.docs) && read < len(p); i++ {
		d := t.docs[i]
		start := offset + int64(read) - (t.ends[i] - d.size)
		n := int(min(int64(len(p)-read), d.size-start))
		if err := t.readDocument(d, p[read:read+n], d.offset+start); err != nil {
			return read, fmt.Errorf("data: Text.ReadAt: %w", err)
		}
		read += n
	}

	if read < len(p) {
		return read, io.EOF
	}

	return read, nil
}

// readDocument fills p from the given offset of the document's file. It opens the file for every
// read. This takes a few microseconds, but avoids closing files later, sharing them between
// goroutines, and reaching the limit on open files.
func (t *Text) readDocument(d document, p []byte, offset int64) error {
	name := filepath.Join(t.root, filepath.FromSlash(d.name))
	f, _, err := regular.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %q has vanished", ErrChanged, name)
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
		return fmt.Errorf("%w: %q had %d bytes, last modified %v, and now has %d, modified %v",
			ErrChanged, name, d.fileSize, d.modified.Format(time.DateTime), info.Size(),
			info.ModTime().Format(time.DateTime))
	}

	_, err = f.ReadAt(p, offset)
	if err == io.EOF {
		return fmt.Errorf("%w: %q was cut short", ErrChanged, name)
	}

	return err
}

// sampleBlock is the size of the blocks of a Sample. It is twice the window of gzip, so that the
// boundaries between blocks have little effect on gzip.
const sampleBlock = 64 << 10

// Sample returns the whole text if it has at most limit bytes. Otherwise it returns limit bytes in
// blocks of 64 KiB spread evenly over the text. The sample depends only on the text and the limit, so
// several methods can be scored on the same one.
func (t *Text) Sample(limit int) ([]byte, error) {
	if limit < 1 {
		return nil, fmt.Errorf("data: Text.Sample: the limit is %d bytes, want at least 1", limit)
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

// sampleBlocks yields the offsets and sizes in the text of the blocks of a sample of n bytes.
func (t *Text) sampleBlocks(n int) iter.Seq2[int64, int] {
	return func(yield func(at int64, size int) bool) {
		blocks := (n + sampleBlock - 1) / sampleBlock
		for i := range blocks {
			lo, hi := i*sampleBlock, min((i+1)*sampleBlock, n)

			// The gap before a block is proportional to its index, and the last block ends at the
			// end of the text.
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

// SampleDocuments returns the bytes of [Text.Sample], divided where a document ends and where text
// is skipped.
func (t *Text) SampleDocuments(limit int) ([][]byte, error) {
	sample, err := t.Sample(limit)
	if err != nil {
		return nil, err
	}

	var cuts []int
	size, read := 0, int64(0) // size of the blocks so far, and the end of the last one in the text
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
