// Package regular opens files that others may have made. What stands at a path need not be a file.
// Opening a named pipe waits for a writer, and a device such as /dev/zero never ends.
package regular

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// Open opens the regular file at path, or a symbolic link to one, for reading, and returns its
// size. Anything else is an error that says what it is. It never waits. The kind is looked at
// before opening, which some devices take for a command, and again after, in case it was replaced
// between.
func Open(path string) (*os.File, int64, error) {
	if path == "" {
		return nil, 0, errors.New(`the path is "", want that of a file`)
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, 0, err
	}
	if err := check(path, info); err != nil {
		return nil, 0, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|nonBlocking, 0)
	if err != nil {
		return nil, 0, err
	}
	info, err = f.Stat()
	if err == nil {
		err = check(path, info)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, info.Size(), nil
}

// Append opens the regular file at path, or a symbolic link to one, for reading and for writing at
// its end, and returns its size. It makes the file where there is none. Anything else is an error
// that says what it is: a named pipe would wait for somebody to read what is written.
func Append(path string) (*os.File, int64, error) {
	if path == "" {
		return nil, 0, errors.New(`the path is "", want that of a file`)
	}
	if info, err := os.Stat(path); err == nil {
		if err := check(path, info); err != nil {
			return nil, 0, err
		}
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND|nonBlocking, 0o666)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil {
		err = check(path, info)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, info.Size(), nil
}

// Read returns the contents of the regular file at path. A file of more than limit bytes is an
// error; what says how much there ought to be, such as "a byte-pair encoding has".
func Read(path string, limit int64, what string) ([]byte, error) {
	f, size, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if size > limit {
		return nil, fmt.Errorf("%s has %d bytes, and %s at most %d: it is another kind of file",
			path, size, what, limit)
	}
	b := make([]byte, size)
	n, err := io.ReadFull(f, b)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = nil // it became shorter meanwhile
	}
	return b[:n], err
}

func check(path string, info fs.FileInfo) error {
	if info.Mode().IsRegular() {
		return nil
	}
	what := "something else"
	switch mode := info.Mode(); {
	case mode.IsDir():
		what = "a folder"
	case mode&fs.ModeNamedPipe != 0:
		what = "a named pipe"
	case mode&fs.ModeSocket != 0:
		what = "a socket"
	case mode&fs.ModeDevice != 0:
		what = "a device"
	}
	return fmt.Errorf("%s is %s, want a regular file", path, what)
}
