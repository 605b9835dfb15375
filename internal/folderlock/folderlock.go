// Package folderlock reserves a directory for one program at a time.
package folderlock

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// ErrInUse is wrapped by the error for a directory that another program has claimed.
var ErrInUse = errors.New("another program writes to this folder now")

// name is the file to lock on file systems that cannot lock directories.
const name = ".kasmina.lock"

// A claim is a directory reserved by this program, possibly for several callers.
type claim struct {
	folder os.FileInfo
	users  int
	unlock func() error
}

var (
	mu     sync.Mutex
	claims []*claim
)

// Claim reserves an existing directory for this program until every caller that claimed it has called
// release, or until the program exits for any reason. Calling release more than once has no further
// effect.
//
// The error is ErrInUse if another program has claimed the directory. It wraps errors.ErrUnsupported
// if neither the directory nor a file in it can be locked.
func Claim(dir string) (release func() error, err error) {
	mu.Lock()
	defer mu.Unlock()

	folder, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}

	if !folder.IsDir() {
		return nil, fmt.Errorf("%s is no folder", dir)
	}

	for _, c := range claims {
		if os.SameFile(c.folder, folder) {
			c.users++
			return sync.OnceValue(c.release), nil
		}
	}

	unlock, err := lock(dir)
	if err != nil {
		return nil, err
	}

	c := &claim{folder, 1, unlock}
	claims = append(claims, c)
	return sync.OnceValue(c.release), nil
}

func (c *claim) release() error {
	mu.Lock()
	defer mu.Unlock()

	if c.users--; c.users > 0 {
		return nil
	}

	for i := range claims {
		if claims[i] == c {
			claims = append(claims[:i:i], claims[i+1:]...)
			break
		}
	}

	return c.unlock()
}

// IsLock reports whether a file name is the one Claim uses for its lock file where directories cannot
// be locked.
func IsLock(file string) bool { return file == name }
