package gpu

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// Status is a CUresult. It is an error, so that errors.Is(err, gpu.OutOfMemory) asks for it.
type Status int32

// The statuses that code asks for by name, and those that a fake gives.
const (
	Success              Status = 0
	InvalidValue         Status = 1
	OutOfMemory          Status = 2
	StubLibrary          Status = 34
	NoDevice             Status = 100
	InvalidDevice        Status = 101
	InvalidImage         Status = 200
	InvalidContext       Status = 201
	InvalidPTX           Status = 218
	InvalidHandle        Status = 400
	NotFound             Status = 500
	NotReady             Status = 600
	IllegalAddress       Status = 700
	ContextIsDestroyed   Status = 709
	MisalignedAddress    Status = 716
	LaunchFailed         Status = 719
	NotSupported         Status = 801
	SystemDriverMismatch Status = 803
	CaptureUnsupported   Status = 900
	CaptureInvalidated   Status = 901
	CaptureUnmatched     Status = 903
	CaptureUnjoined      Status = 904
	CaptureIsolation     Status = 905
	CapturedEvent        Status = 907
)

// statusNames are those of statuses that errors are made of without asking the driver.
var statusNames = map[Status]string{
	InvalidValue: "INVALID_VALUE", OutOfMemory: "OUT_OF_MEMORY",
	StubLibrary: "STUB_LIBRARY", NoDevice: "NO_DEVICE", InvalidDevice: "INVALID_DEVICE",
	InvalidImage: "INVALID_IMAGE", InvalidContext: "INVALID_CONTEXT",
	InvalidHandle: "INVALID_HANDLE", NotFound: "NOT_FOUND", NotReady: "NOT_READY",
	IllegalAddress: "ILLEGAL_ADDRESS", ContextIsDestroyed: "CONTEXT_IS_DESTROYED",
	MisalignedAddress: "MISALIGNED_ADDRESS", LaunchFailed: "LAUNCH_FAILED",
	NotSupported: "NOT_SUPPORTED", SystemDriverMismatch: "SYSTEM_DRIVER_MISMATCH",
}

// Error is CUDA's name of the status, as far as this package knows it.
func (s Status) Error() string {
	if name, ok := statusNames[s]; ok {
		return "CUDA_ERROR_" + name
	}
	return fmt.Sprintf("CUresult %d", int32(s))
}

// Sticky reports whether the status means that the context is lost. Every later call on it fails
// too, and only a new process (or a reset of the primary context) helps.
func (s Status) Sticky() bool {
	switch s {
	case 214, 220, 226, // memory or NVLink uncorrectable, an error contained
		702, 710, 714, 715, 717, 718, // a timeout, an assertion, and faults of instructions
		IllegalAddress, ContextIsDestroyed, MisalignedAddress, LaunchFailed:
		return true
	}
	return false
}

// BlasStatus is a cublasStatus_t.
type BlasStatus int32

// The statuses of cuBLASLt that code asks for by name.
const (
	BlasInvalidValue BlasStatus = 7
	BlasNotSupported BlasStatus = 15
)

var blasStatusNames = map[BlasStatus]string{
	1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE",
	8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
	13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR",
}

// Error is cuBLAS's name of the status.
func (s BlasStatus) Error() string {
	if name, ok := blasStatusNames[s]; ok {
		return "CUBLAS_STATUS_" + name
	}
	return fmt.Sprintf("cublasStatus_t %d", int32(s))
}

// Error is a failed call of CUDA or cuBLASLt.
type Error struct {
	Call   string // the C function, as CUDA's manual names it
	Code   error  // a Status or a BlasStatus
	Name   string // the library's name of the code, like CUDA_ERROR_OUT_OF_MEMORY
	Text   string // the library's description of it
	Detail string // what was asked for, or what to do
}

// NewError is a failed call as the library would report it; the name comes from the code.
func NewError(call string, code error, text, detail string) *Error {
	return &Error{Call: call, Code: code, Name: code.Error(), Text: text, Detail: detail}
}

// NewOutOfMemory is the error of an allocation that did not fit.
func NewOutOfMemory(asked int, free, total uint64) *Error {
	return NewError("cuMemAlloc", OutOfMemory, "out of memory",
		fmt.Sprintf("%s asked for, %s of %s free", Size(uint64(asked)), Size(free), Size(total)))
}

func (e *Error) Error() string {
	msg := fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Code)
	for _, s := range []string{e.Text, e.Detail} {
		if s != "" {
			msg += ": " + s
		}
	}

	if e.Sticky() {
		msg += ": the GPU's context is lost; the fault may come from any kernel launched before " +
			"this call"
	}

	return msg
}

// Unwrap gives the library's status.
func (e *Error) Unwrap() error { return e.Code }

// Sticky reports whether the context is lost.
func (e *Error) Sticky() bool {
	s, ok := e.Code.(Status)
	return ok && s.Sticky()
}

// NotFoundError says that a library could not be loaded, and what was tried.
type NotFoundError = sharedlib.NotFoundError
