package sharedlib

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMajor checks that the newest major version of a library is tried first. The places to search
// are tested by the packages that search them.
func TestMajor(t *testing.T) {
	for path, want := range map[string]int{"/x/libcublasLt.so.13": 13, "cublasLt64_12.dll": 12,
		"libcublasLt.so": 0} {
		require.Equal(t, want, major(path), path)
	}
}
