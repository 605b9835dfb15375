// Package folderlock makes a folder that of one program at a time.
package folderlock

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// ErrInUse is wrapped by the error of a folder that another program has.
var ErrInUse = errors.New("another program writes to this folder now")

// name is of the file that is locked where folders themselves cannot be.
const name = ".kasmina.lock"

// A claim is a folder of this program, however often it has asked for it.
type claim struct {
	folder os.FileInfo
	users  int
	lock   *os.File
}

var (
	mu     sync.Mutex
	claims []*claim
)

// Claim makes an existing folder this program's. It is so until everybody in it who has claimed the
// folder has called release, once, or the program ends, however it does. A folder of another
// program is an ErrInUse. Where neither a folder nor a file in it can be locked, it is an
// errors.ErrUnsupported, and nobody's.
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
	f, err := lock(dir)
	if err != nil {
		return nil, err
	}
	c := &claim{folder, 1, f}
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
	return c.lock.Close()
}
