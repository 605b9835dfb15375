package direct

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// memory is the interface to GPU memory in the current context, including memory of other
// processes.
type memory interface {
	Alloc(bytes int) (comm.Ptr, error)
	Free(p comm.Ptr) error
	// Fill writes words without waiting for any stream.
	Fill(p comm.Ptr, words []uint32) error
	// Allocation returns the base address of the allocation that contains p.
	Allocation(p comm.Ptr) (comm.Ptr, error)
	// Export returns a handle that lets other processes map an allocation. Import maps one and
	// returns its address in this process; Forget unmaps it.
	Export(base comm.Ptr) (handle string, err error)
	Import(handle string) (comm.Ptr, error)
	Forget(base comm.Ptr) error

	// Copy enqueues a copy.
	Copy(to, from comm.Ptr, bytes int, s comm.Stream) error
	// Write enqueues a write to a word after all previous work of the stream. Wait makes the stream
	// wait until a word equals v.
	Write(word comm.Ptr, v uint32, s comm.Stream) error
	Wait(word comm.Ptr, v uint32, s comm.Stream) error
}

// handleBytes is the size of a CUipcMemHandle.
const handleBytes = 64

// handle is a CUipcMemHandle. C passes it by value.
type handle struct{ Words [handleBytes / 8]uint64 }

// api holds the functions used from libcuda. Tags are the names of the symbols.
type api struct {
	ErrorName func(status int32, name **byte) int32                              `c:"cuGetErrorName"`
	MemAlloc  func(p *uintptr, bytes uintptr) int32                              `c:"cuMemAlloc_v2"`
	MemFree   func(p uintptr) int32                                              `c:"cuMemFree_v2"`
	Range     func(base *uintptr, bytes *uintptr, p uintptr) int32               `c:"cuMemGetAddressRange_v2"`
	GetHandle func(h *handle, p uintptr) int32                                   `c:"cuIpcGetMemHandle"`
	OpenIPC   func(p *uintptr, h handle, flags uint32) int32                     `c:"cuIpcOpenMemHandle_v2"`
	CloseIPC  func(p uintptr) int32                                              `c:"cuIpcCloseMemHandle"`
	CopyIn    func(to uintptr, from unsafe.Pointer, bytes, stream uintptr) int32 `c:"cuMemcpyHtoDAsync_v2"`
	CopyAsync func(to, from, bytes, stream uintptr) int32                        `c:"cuMemcpyDtoDAsync_v2"`
	WriteWord func(stream, p uintptr, v uint32, flags uint32) int32              `c:"cuStreamWriteValue32_v2"`
	WaitWord  func(stream, p uintptr, v uint32, flags uint32) int32              `c:"cuStreamWaitValue32_v2"`
	NewStream func(s *uintptr, flags uint32) int32                               `c:"cuStreamCreate"`
	Sync      func(s uintptr) int32                                              `c:"cuStreamSynchronize"`
	EndStream func(s uintptr) int32                                              `c:"cuStreamDestroy_v2"`
}

// loaded loads libcuda once.
var loaded = sync.OnceValues(func() (*api, error) {
	library, err := sharedlib.Open("libcuda.so.1")
	if err != nil {
		return nil, fmt.Errorf("direct: %w", err)
	}

	a := &api{}
	for symbol, f := range sharedlib.Functions(a) {
		address, err := sharedlib.Lookup(library, symbol)
		if err != nil {
			return nil, fmt.Errorf("direct: the driver has no %s: it is too old", symbol)
		}
		purego.RegisterFunc(f, address)
	}

	return a, nil
})

// load returns the functions of libcuda as a memory.
func load() (memory, error) {
	a, err := loaded()
	if err != nil {
		return nil, err
	}
	return a, nil
}

// check converts a status to an error.
func (a *api) check(call string, status int32) error {
	if status == 0 {
		return nil
	}
	var name *byte
	a.ErrorName(status, &name)
	text := []byte{}
	for p := unsafe.Pointer(name); p != nil && *(*byte)(p) != 0; p = unsafe.Add(p, 1) {
		text = append(text, *(*byte)(p))
	}
	return fmt.Errorf("direct: %s: %s (%d)", call, text, status)
}

func (a *api) Alloc(bytes int) (comm.Ptr, error) {
	var p uintptr
	err := a.check("cuMemAlloc", a.MemAlloc(&p, uintptr(bytes)))
	return comm.Ptr(p), err
}

func (a *api) Free(p comm.Ptr) error { return a.check("cuMemFree", a.MemFree(uintptr(p))) }

func (a *api) Fill(p comm.Ptr, words []uint32) error {
	const nonBlocking = 1 // work on the default stream would wait for other streams
	var s uintptr
	if err := a.check("cuStreamCreate", a.NewStream(&s, nonBlocking)); err != nil {
		return err
	}
	return errors.Join(
		a.check("cuMemcpyHtoDAsync", a.CopyIn(uintptr(p), unsafe.Pointer(&words[0]),
			uintptr(4*len(words)), s)),
		a.check("cuStreamSynchronize", a.Sync(s)),
		a.check("cuStreamDestroy", a.EndStream(s)))
}

func (a *api) Allocation(p comm.Ptr) (comm.Ptr, error) {
	var base, bytes uintptr
	err := a.check("cuMemGetAddressRange", a.Range(&base, &bytes, uintptr(p)))
	return comm.Ptr(base), err
}

func (a *api) Export(base comm.Ptr) (string, error) {
	var h handle
	if err := a.check("cuIpcGetMemHandle", a.GetHandle(&h, uintptr(base))); err != nil {
		return "", err
	}
	return fmt.Sprintf("%016x", h.Words), nil
}

func (a *api) Import(text string) (comm.Ptr, error) {
	var h handle
	words := make([]any, len(h.Words))
	for i := range words {
		words[i] = &h.Words[i]
	}

	if _, err := fmt.Sscanf(text, "[%x %x %x %x %x %x %x %x]", words...); err != nil {
		return 0, fmt.Errorf("direct: invalid memory handle %.200q: %w", text, err)
	}

	const enablePeers = 1
	var p uintptr
	err := a.check("cuIpcOpenMemHandle", a.OpenIPC(&p, h, enablePeers))
	return comm.Ptr(p), err
}

func (a *api) Forget(base comm.Ptr) error {
	return a.check("cuIpcCloseMemHandle", a.CloseIPC(uintptr(base)))
}

func (a *api) Copy(to, from comm.Ptr, bytes int, s comm.Stream) error {
	return a.check("cuMemcpyDtoDAsync", a.CopyAsync(uintptr(to), uintptr(from), uintptr(bytes),
		uintptr(s)))
}

func (a *api) Write(word comm.Ptr, v uint32, s comm.Stream) error {
	return a.check("cuStreamWriteValue32", a.WriteWord(uintptr(s), uintptr(word), v, 0))
}

func (a *api) Wait(word comm.Ptr, v uint32, s comm.Stream) error {
	const equal = 1
	return a.check("cuStreamWaitValue32", a.WaitWord(uintptr(s), uintptr(word), v, equal))
}
