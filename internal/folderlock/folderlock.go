// Package folderlock reserves a folder for one program at a time.
package folderlock

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// ErrInUse is wrapped by the error for a folder that another program has claimed.
var ErrInUse = errors.New("another program writes to this folder now")

// name is the file that is locked on file systems that cannot lock folders.
const name = ".kasmina.lock"

// A claim is a folder that this program has reserved, however many callers have asked for it.
type claim struct {
	folder os.FileInfo
	users  int
	unlock func() error
}

var (
	mu     sync.Mutex
	claims []*claim
)

// Claim reserves an existing folder for this program until everybody in the program who has claimed
// the folder has called release, or until the program ends, however it ends. Calling release more
// than once has no further effect.
//
// The error is ErrInUse if another program has claimed the folder, and wraps errors.ErrUnsupported
// where neither the folder nor a file in it can be locked.
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

// IsLock reports whether a file has the name that Claim uses for its lock file where folders cannot be
// locked.
func IsLock(file string) bool { return file == name }
