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

// memory is what a GPU does with its memory and that of others, in the context that is current.
type memory interface {
	Alloc(bytes int) (comm.Ptr, error)
	Free(p comm.Ptr) error
	// Fill sets words, and does not wait for any stream.
	Fill(p comm.Ptr, words []uint32) error
	// Allocation is the beginning of the one that an address lies in.
	Allocation(p comm.Ptr) (comm.Ptr, error)
	// Export makes an allocation known to other processes, by a handle; Import is where one lies
	// here, until Forget.
	Export(base comm.Ptr) (handle string, err error)
	Import(handle string) (comm.Ptr, error)
	Forget(base comm.Ptr) error

	Copy(to, from comm.Ptr, bytes int, s comm.Stream) error
	// Write sets a word when all of the stream before is done; Wait has the stream wait until a word
	// is v.
	Write(word comm.Ptr, v uint32, s comm.Stream) error
	Wait(word comm.Ptr, v uint32, s comm.Stream) error
}

// handleBytes is the size of a CUipcMemHandle.
const handleBytes = 64

// handle is a CUipcMemHandle. C passes it by value.
type handle struct{ Words [handleBytes / 8]uint64 }

// api is what is used of libcuda; the tags are the names of the symbols.
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

func load() (memory, error) {
	a, err := loaded()
	if err != nil {
		return nil, err
	}
	return a, nil
}

// check turns a status into an error.
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
		return 0, fmt.Errorf("direct: a handle %.200q: %w", text, err)
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
