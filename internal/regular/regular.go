// Package regular opens files that other programs may have created. A path may lead to something
// other than a file, and opening a named pipe waits for a writer, while a device such as /dev/zero
// never ends.
package regular

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// Open opens the regular file at path, or a symbolic link to one, for reading, and returns its size.
// For anything else it returns an error that names the kind of file. Open never waits. It checks the
// kind of file before opening it, because opening may be a command to a device, and again afterwards,
// in case the file was replaced in between.
func Open(path string) (*os.File, int64, error) {
	if path == "" {
		return nil, 0, errors.New(`the path is "": name a file`)
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

// Append opens the regular file at path, or a symbolic link to one, for reading and for writing at its
// end, and returns its size. It creates the file if necessary. For anything else, such as a named
// pipe, which would wait for a reader, it returns an error that names the kind of file.
func Append(path string) (*os.File, int64, error) {
	if path == "" {
		return nil, 0, errors.New(`the path is "": name a file`)
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

// Read returns the contents of the regular file at path. It returns an error if the file has more than
// limit bytes. The argument what is a subject and a verb, such as "a byte-pair encoding has"; the message
// continues with the limit: "but a byte-pair encoding has at most 1000".
func Read(path string, limit int64, what string) ([]byte, error) {
	f, size, err := Open(path)
	if err != nil {
		return nil, err
	}

	defer f.Close()

	if size > limit {
		return nil, fmt.Errorf("%s has %d bytes, but %s at most %d: it is another kind of file",
			path, size, what, limit)
	}

	b := make([]byte, size)
	n, err := io.ReadFull(f, b)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = nil // the file has become shorter since Open; return the rest
	}

	return b[:n], err
}

// check returns an error unless info describes a regular file.
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
