package runlog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// A Tail follows a log that is still being written. It detects when the log has been replaced by
// another one. Create a Tail with [NewTail].
type Tail struct {
	path string
	end  int64 // offset of the next unread byte

	// The file as it was last read. It still holds the same log if it is the same file and its
	// first and last bytes have not changed.
	info        fs.FileInfo // nil before the first read
	first, last []byte
}

// NewTail returns a Tail at the start of the log at path.
func NewTail(path string) *Tail { return &Tail{path: path} }

// markSize is the number of bytes that a Tail compares at either end of the log. It exceeds the
// length of a "step" record, which contains the time.
const markSize = 1 << 12

// Read calls f for each record that was added to the log since the previous Read, in order. It
// returns the time at which the log was last modified.
//
// If the log has been deleted, truncated or overwritten since the previous Read, Read first calls
// restart and then calls f for all records of the new log. A missing log is an error, after which
// Read may be called again without loss unless the log has been replaced in the meantime.
func (t *Tail) Read(restart func(), f func(Record)) (changed time.Time, err error) {
	file, _, err := regular.Open(t.path)
	if err != nil {
		return changed, fmt.Errorf("runlog: Tail: %w", err)
	}
	defer file.Close()

	info, err := file.Stat()
	if err != nil {
		return changed, fmt.Errorf("runlog: Tail: %w", err)
	}

	if t.info != nil {
		same, err := t.continues(file, info)
		switch {
		case err != nil:
			return changed, fmt.Errorf("runlog: Tail: %w", err)
		case !same:
			t.end, t.first, t.last = 0, nil, nil
			restart()
		case info.Size() == t.end:
			t.info = info
			return info.ModTime(), nil
		}
	}

	end, err := readFrom(file, t.end, f)
	t.end, t.info = end, info

	var unmarked error
	if t.first, t.last, unmarked = marks(file, end); err == nil {
		err = unmarked
	}
	if err != nil {
		return changed, fmt.Errorf("runlog: Tail: %w", err)
	}

	return info.ModTime(), nil
}

// continues reports whether the file holds the log of the previous Read, possibly with more lines.
func (t *Tail) continues(file *os.File, info fs.FileInfo) (bool, error) {
	if !os.SameFile(t.info, info) || info.Size() < t.end {
		return false, nil
	}

	if info.Size() == t.info.Size() && info.ModTime().Equal(t.info.ModTime()) {
		return true, nil
	}

	first, last, err := marks(file, t.end)
	if errors.Is(err, io.EOF) { // truncated just now
		return false, nil
	}

	return bytes.Equal(first, t.first) && bytes.Equal(last, t.last), err
}

// marks returns the first and the last markSize bytes of the file up to an offset.
func marks(file *os.File, end int64) (first, last []byte, err error) {
	n := min(end, markSize)
	first, last = make([]byte, n), make([]byte, n)
	if _, err := file.ReadAt(first, 0); err != nil {
		return nil, nil, err
	}
	_, err = file.ReadAt(last, end-n)
	return first, last, err
}
