//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package folderlock

import (
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLockFile checks that the file that replaces a directory's lock is removed with the lock, and
// that two simultaneous claims never both succeed while it appears and disappears.
func TestLockFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), name)
	var holders, claimed atomic.Int32
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			for range 200 {
				unlock, err := lockFile(path)
				if errors.Is(err, ErrInUse) {
					continue
				}

				if err != nil {
					t.Error(err)
					return
				}
				claimed.Add(1)
				if holders.Add(1) > 1 {
					t.Error("two have the lock")
				}
				holders.Add(-1)
				if err := unlock(); err != nil {
					t.Error(err)
				}
			}
		})
	}

	wait.Wait()
	require.NotZero(t, claimed.Load())
	require.NoFileExists(t, path)
}
