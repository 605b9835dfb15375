package llm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/folderlock"
)

// ErrFolderInUse is wrapped by the error of an output folder that another program has claimed.
var ErrFolderInUse = folderlock.ErrInUse

// ClaimFolder makes an output folder, which must exist, this program's until release is called or
// the program ends, so that no two programs write one run's files: to all others it is an
// ErrFolderInUse. Within the program any number of callers may claim it, from any goroutine, and it
// is the program's until all have released it. A run with a [Checkpoint] claims its folder by
// itself; a program that reads or writes there before the run claims it first.
//
// It works on Linux, macOS, the BSDs and Windows. Where the system or the file system cannot lock,
// it is an errors.ErrUnsupported, and a Checkpoint goes on without.
func ClaimFolder(dir string) (release func() error, err error) {
	release, err = folderlock.Claim(dir)
	if err != nil {
		return nil, fmt.Errorf("llm: ClaimFolder: %s: %w; name another folder for this one, or "+
			"wait for the other program", dir, err)
	}
	return release, nil
}
