package comm

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
)

// Binary returns a [Fact] that holds a checksum of the executable, for checking that all ranks run
// the same program, byte for byte.
func Binary() (Fact, error) {
	path, err := os.Executable()
	if err != nil {
		return Fact{}, fmt.Errorf("comm: the program's file: %w", err)
	}

	f, err := os.Open(path)
	if err != nil {
		return Fact{}, fmt.Errorf("comm: the program's file: %w", err)
	}

	defer f.Close()

	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return Fact{}, fmt.Errorf("comm: the program's file: %w", err)
	}

	return Fact{"the program's binary", hex.EncodeToString(h.Sum(nil)[:12])}, nil
}
