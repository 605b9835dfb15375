package driver

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"unsafe"
)

// dnnAPI is what is used of libcudnn; the tags are the names of the symbols.
type dnnAPI struct {
	GetVersion         proc `c:"cudnnGetVersion"`
	GetCudartVersion   proc `c:"cudnnGetCudartVersion"`
	GetErrorString     proc `c:"cudnnGetErrorString"`
	GetLastErrorString proc `c:"cudnnGetLastErrorString"`
	Create             proc `c:"cudnnCreate"`
	Destroy            proc `c:"cudnnDestroy"`
	SetStream          proc `c:"cudnnSetStream"`
	CreateDescriptor   proc `c:"cudnnBackendCreateDescriptor"`
	DestroyDescriptor  proc `c:"cudnnBackendDestroyDescriptor"`
	SetAttribute       proc `c:"cudnnBackendSetAttribute"`
	GetAttribute       proc `c:"cudnnBackendGetAttribute"`
	Finalize           proc `c:"cudnnBackendFinalize"`
	Execute            proc `c:"cudnnBackendExecute"`
}

// cudnn is the real cuDNN on one context.
type cudnn struct {
	dnnAPI
	on      func(func() error) error // [context.on]
	ledger  *Ledger
	path    string
	version int

	mu     sync.Mutex // guards the handle, with the stream that it is set to, and the plans' operands
	handle uintptr    // 0 before the first plan
	device descriptor // the properties of a GPU that is not there; 0 for that of the context
}

// oldestDnn is the first version whose attention needs no care: before 9.15.1 lengths must be padded, and 9.10 is wrong.
const oldestDnn = 91600

func (c *context) Dnn() (Dnn, error) {
	blas, err := c.Blas()
	if err != nil {
		return nil, err
	}
	c.dnnLock.Lock()
	defer c.dnnLock.Unlock()
	if c.dnn == nil && c.dnnErr == nil {
		if c.dnn, c.dnnErr = openDnn(hostFinder(), blas.Version()/10000); c.dnnErr == nil {
			c.dnn.on, c.dnn.ledger = c.on, &c.ledger
		}
	}
	if c.dnnErr != nil {
		return nil, c.dnnErr
	}
	return c.dnn, nil
}

// openDnn loads a cuDNN made for a major version of CUDA, of which cuBLASLt is loaded. cuDNN looks that up by its plain name
// and ends the process when it is not found, but a library that is loaded already is found wherever it lies. In the same way
// it finds the compiler, without which it has no attention.
func openDnn(f finder, cuda int) (*cudnn, error) {
	compiler, tried := load(f, f.nvrtc(cuda), 0, loadOnly)
	if compiler == 0 {
		return nil, &NotFoundError{fmt.Sprintf("NVIDIA's compiler at run time (libnvrtc) of CUDA %d, which cuDNN uses,", cuda), tried,
			"It comes with a CUDA toolkit and as pip install nvidia-cuda-nvrtc."}
	}
	d, tried := load(f, f.cudnn(), 0, func(path string) (*cudnn, error) {
		library, err := loadOnly(path)
		if err != nil {
			return nil, err
		}
		d := &cudnn{path: path}
		if err := bind(library, path, &d.dnnAPI); err != nil {
			return nil, err
		}
		d.version = int(d.GetVersion.call())
		made := int(d.GetCudartVersion.call()) / 1000
		switch {
		case d.version < oldestDnn:
			return nil, fmt.Errorf("is version %d, want %d or later", d.version, oldestDnn)
		case made != cuda:
			return nil, fmt.Errorf("is made for CUDA %d, the cuBLASLt in use is of CUDA %d", made, cuda)
		}
		return d, nil
	})
	if d == nil {
		return nil, &NotFoundError{"NVIDIA's library of networks (libcudnn)", tried, fmt.Sprintf("It is an option: pip install "+
			"nvidia-cudnn-cu%d, or the folder that holds it in LD_LIBRARY_PATH or in %s.", cuda, dnnVariable)}
	}
	return d, nil
}

func loadOnly(path string) (uintptr, error) {
	library, err := openLibrary(path)
	if err != nil {
		return 0, errors.New(strings.TrimPrefix(err.Error(), path+": "))
	}
	return library, nil
}

// call is a call of the library with the context current. See [proc.call] for the directive.
//
//go:uintptrescapes
func (d *cudnn) call(p *proc, args ...uintptr) error {
	return d.on(func() error {
		s := DnnStatus(int32(p.call(args...)))
		if s == 0 {
			return nil
		}
		// The text belongs to the thread, which is still the same.
		text := make([]byte, 1024)
		d.GetLastErrorString.call(uintptr(unsafe.Pointer(&text[0])), uintptr(len(text)))
		detail, _, _ := strings.Cut(string(text), "\x00")
		e := NewDnnError(p.name, s, strings.TrimSpace(detail))
		name := d.GetErrorString.call(uintptr(s))
		e.Name = goString(*(**byte)(unsafe.Pointer(&name)))
		return e
	})
}

func (d *cudnn) Version() int    { return d.version }
func (d *cudnn) Library() string { return d.path }

// start makes the handle. The caller holds the lock.
func (d *cudnn) start() error {
	if d.handle != 0 || d.device != 0 {
		return nil
	}
	return d.call(&d.Create, uintptr(unsafe.Pointer(&d.handle)))
}

func (d *cudnn) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.handle == 0 {
		return nil
	}
	return d.call(&d.Destroy, d.handle)
}
