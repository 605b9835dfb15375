package sharedlib

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMajor: the newest major of a library is tried first. Where libraries are searched for is
// tested where they are.
func TestMajor(t *testing.T) {
	for path, want := range map[string]int{"/x/libcublasLt.so.13": 13, "cublasLt64_12.dll": 12,
		"libcublasLt.so": 0} {
		require.Equal(t, want, major(path), path)
	}
}
