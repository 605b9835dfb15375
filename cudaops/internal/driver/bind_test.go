package driver

import (
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// libc binds functions of the C library, which exists on every Linux, in place of NVIDIA's libraries.
func libc(t *testing.T, api any) (path string) {
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

	require.NoError(t, bind(found[0], api))
	return found[0]
}

// TestBind binds the C library and calls it.
func TestBind(t *testing.T) {
	var api struct {
		Abs proc `c:"abs"`
	}
	path := libc(t, &api)
	minus := int32(-7)
	require.Equal(t, int32(7), int32(api.Abs.call(uintptr(uint32(minus)))))
	require.ErrorContains(t, bind("/no/library", &api), "cannot open")

	t.Setenv(cudaVariable, path)
	if d, err := open(); err == nil {
		t.Errorf("the C library passed for CUDA's: %v", d)
	} else if !strings.Contains(err.Error(), path+" has no cuGetErrorName: it is too old") {
		t.Error(err)
	}
}

// TestCloseTwice checks that concurrent calls of Close release a context only once, even if destroying
// its library takes a while.
func TestCloseTwice(t *testing.T) {
	var api struct {
		Abs   proc `c:"abs"`
		Sleep proc `c:"usleep"`
	}
	libc(t, &api)
	var released atomic.Int32
	c := &context{cuda: &cuda{cudaAPI: cudaAPI{CtxSetCurrent: api.Abs}},
		release: func() error { released.Add(1); return nil }}
	c.blas = &cublasLt{blasAPI: blasAPI{Destroy: api.Sleep}, ctx: c, handle: 20_000}
	var both sync.WaitGroup
	var errs [2]error
	for i := range errs {
		both.Go(func() { errs[i] = c.Close() })
	}

	both.Wait()
	require.NoError(t, errors.Join(errs[:]...))
	require.Equal(t, int32(1), released.Load())
}

// TestScalesThatFail checks that scale pointers are set again if setting them failed before, and only
// then.
func TestScalesThatFail(t *testing.T) {
	var api struct {
		Abs proc `c:"abs"`
	}
	libc(t, &api)
	c := &context{cuda: &cuda{cudaAPI: cudaAPI{CtxSetCurrent: api.Abs}}}
	p := &blasPlan{b: &cublasLt{blasAPI: blasAPI{DescSetAttribute: api.Abs}, ctx: c}}
	for i, status := range []uintptr{7, 7, 0, 7} { // the status, which abs returns unchanged
		p.desc = status
		require.Equal(t, i >= 2, p.pointScales(256, 512) == nil, i)
	}

	require.Error(t, p.pointScales(1024, 2048))
	require.Error(t, p.pointScales(256, 512), "one of the others may have been set")
}
