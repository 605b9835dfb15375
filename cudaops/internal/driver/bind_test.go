package driver

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBind loads a library that every Linux has and calls it, as a stand-in for NVIDIA's.
func TestBind(t *testing.T) {
	var found []string
	for _, pattern := range []string{"/lib/*-linux-gnu/libc.so.6", "/lib64/libc.so.6",
		"/usr/lib/libc.so.6"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		found = append(found, files...)
	}
	if len(found) == 0 {
		t.Skip("needs a Linux with the GNU C library")
	}
	var api struct {
		Abs proc `c:"abs"`
	}
	require.NoError(t, bind(found[0], &api))
	minus := int32(-7)
	require.Equal(t, int32(7), int32(api.Abs.call(uintptr(uint32(minus)))))
	require.ErrorContains(t, bind("/no/library", &api), "cannot open")

	t.Setenv(cudaVariable, found[0])
	if d, err := open(); err == nil {
		t.Errorf("the C library passed for CUDA's: %v", d)
	} else if !strings.Contains(err.Error(), found[0]+" has no cuGetErrorName: it is too old") {
		t.Error(err)
	}
}
