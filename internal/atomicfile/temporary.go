package atomicfile

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
)

// A temporary name consists of the prefix, a hash of the owner's name, a hyphen, random digits and
// the suffix. Its length does not depend on the owner's name.
const (
	namePrefix   = ".kasmina-"
	nameSuffix   = ".tmp"
	hashDigits   = 8
	randomDigits = 16
)

// LongestTemporary is a name as long as the names of temporary files and directories.
const LongestTemporary = ".kasmina-00000000-0000000000000000.tmp"

// prefixOf returns the beginning of the temporary names of an owner, which is the base name of a file
// or directory.
func prefixOf(owner string) string {
	sum := sha256.Sum256([]byte(owner))
	return namePrefix + hex.EncodeToString(sum[:hashDigits/2]) + "-"
}

// newName returns an unused temporary name for an owner.
func newName(owner string) string {
	var random [randomDigits / 2]byte
	rand.Read(random[:]) // never fails
	return prefixOf(owner) + hex.EncodeToString(random[:]) + nameSuffix
}

// IsTemporary reports whether a name has the form that this package uses for temporary files and
// directories.
func IsTemporary(name string) bool {
	hash, random, ok := strings.Cut(strings.TrimPrefix(name, namePrefix), "-")
	random, suffixed := strings.CutSuffix(random, nameSuffix)
	return ok && suffixed && strings.HasPrefix(name, namePrefix) &&
		isHex(hash, hashDigits) && isHex(random, randomDigits)
}

func isHex(s string, digits int) bool {
	_, err := hex.DecodeString(s)
	return err == nil && len(s) == digits
}

// createTemporary creates and claims an owner's temporary file in a directory.
func createTemporary(dir, owner string) (*os.File, error) {
	for {
		name := filepath.Join(dir, newName(owner))
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return nil, err
		}

		claimed, err := claimTemporary(f, name)
		if claimed {
			return f, nil
		}
		f.Close()
		if err != nil {
			os.Remove(name)
			return nil, err
		}
	}
}

// claimTemporary claims the open file or directory f, so that clean doesn't remove it. It returns
// false if another process has just removed f.
func claimTemporary(f *os.File, name string) (bool, error) {
	if !claim(f) {
		return false, nil
	}
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	current, err := os.Stat(name)
	return err == nil && os.SameFile(mine, current), nil
}

// Clean removes the temporary files and directories left by killed writers of the file or directory
// at path, or of its parts. It ignores files that cannot be removed, because no write depends on it.
func Clean(path string) {
	clean(filepath.Dir(path), prefixOf(filepath.Base(path)))
}

// CleanFolder removes the temporary files and directories that killed writers left in a directory,
// whatever they were writing.
func CleanFolder(dir string) { clean(dir, "") }

// clean removes the temporary files and directories that begin with a prefix, or all of them.
func clean(dir, prefix string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) && IsTemporary(e.Name()) {
			removeUnclaimed(filepath.Join(dir, e.Name()), e.IsDir())
		}
	}
}
