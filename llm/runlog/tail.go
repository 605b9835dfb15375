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

// A Tail reads a log that may still be written, a piece at a time. It notices when another log has
// taken the place of the one that it has read. Make one with [NewTail].
type Tail struct {
	path string
	end  int64 // of what has been read

	// What the log was when it was last read. It is the same log if it is still the same file and
	// still has its first and its last bytes in place.
	info        fs.FileInfo // nil before the log has been read
	first, last []byte
}

// NewTail returns a Tail that has read nothing of the log at path.
func NewTail(path string) *Tail { return &Tail{path: path} }

// markSize is how many bytes a Tail compares at either end. A line with a time in it is shorter.
const markSize = 1 << 12

// Read calls f with the records that have been added to the log since the last Read, in order, and
// returns when the log was last changed.
//
// If the log is not the one of the last Read, because it has been deleted, truncated or overwritten
// since, Read calls restart first, and then f with all of its records. A log that does not exist is
// an error. What was read before then stays valid until there is another log.
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

// continues reports whether a file is the log that was last read, with or without more lines.
func (t *Tail) continues(file *os.File, info fs.FileInfo) (bool, error) {
	if !os.SameFile(t.info, info) || info.Size() < t.end {
		return false, nil
	}
	if info.Size() == t.info.Size() && info.ModTime().Equal(t.info.ModTime()) {
		return true, nil
	}
	first, last, err := marks(file, t.end)
	if errors.Is(err, io.EOF) { // truncated at this moment
		return false, nil
	}
	return bytes.Equal(first, t.first) && bytes.Equal(last, t.last), err
}

// marks returns the first and the last bytes of a file up to a position.
func marks(file *os.File, end int64) (first, last []byte, err error) {
	n := min(end, markSize)
	first, last = make([]byte, n), make([]byte, n)
	if _, err := file.ReadAt(first, 0); err != nil {
		return nil, nil, err
	}
	_, err = file.ReadAt(last, end-n)
	return first, last, err
}
