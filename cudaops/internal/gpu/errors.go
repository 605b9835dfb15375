package gpu

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// Status is a CUresult. It implements error, so that errors.Is(err, gpu.OutOfMemory) works.
type Status int32

// Statuses that callers test for or that a fake returns.
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
	CooperativeTooLarge  Status = 720
	NotSupported         Status = 801
	SystemDriverMismatch Status = 803
	CaptureUnsupported   Status = 900
	CaptureInvalidated   Status = 901
	CaptureUnmatched     Status = 903
	CaptureUnjoined      Status = 904
	CaptureIsolation     Status = 905
	CapturedEvent        Status = 907
)

// statusNames contains the names of statuses used in errors that don't come from the driver.
var statusNames = map[Status]string{
	InvalidValue: "INVALID_VALUE", OutOfMemory: "OUT_OF_MEMORY",
	StubLibrary: "STUB_LIBRARY", NoDevice: "NO_DEVICE", InvalidDevice: "INVALID_DEVICE",
	InvalidImage: "INVALID_IMAGE", InvalidContext: "INVALID_CONTEXT",
	InvalidHandle: "INVALID_HANDLE", NotFound: "NOT_FOUND", NotReady: "NOT_READY",
	IllegalAddress: "ILLEGAL_ADDRESS", ContextIsDestroyed: "CONTEXT_IS_DESTROYED",
	MisalignedAddress: "MISALIGNED_ADDRESS", LaunchFailed: "LAUNCH_FAILED",
	CooperativeTooLarge: "COOPERATIVE_LAUNCH_TOO_LARGE",
	NotSupported:        "NOT_SUPPORTED", SystemDriverMismatch: "SYSTEM_DRIVER_MISMATCH",
}

// Error returns CUDA's name of the status, if known.
func (s Status) Error() string {
	if name, ok := statusNames[s]; ok {
		return "CUDA_ERROR_" + name
	}
	return fmt.Sprintf("CUresult %d", int32(s))
}

// Sticky reports whether the status means that the context is lost. Every later call with the context
// then fails as well, and only a new process or a reset of the primary context helps.
func (s Status) Sticky() bool {
	switch s {
	case 214, 220, 226, // uncorrectable errors of memory or NVLink, and contained errors
		702, 710, 714, 715, 717, 718, // timeouts, assertions, and instruction faults
		IllegalAddress, ContextIsDestroyed, MisalignedAddress, LaunchFailed:
		return true
	}
	return false
}

// BlasStatus is a cublasStatus_t.
type BlasStatus int32

// Statuses of cuBLASLt that callers test for.
const (
	BlasInvalidValue BlasStatus = 7
	BlasNotSupported BlasStatus = 15
)

var blasStatusNames = map[BlasStatus]string{
	1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE",
	8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
	13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR",
}

// Error returns cuBLAS's name of the status.
func (s BlasStatus) Error() string {
	if name, ok := blasStatusNames[s]; ok {
		return "CUBLAS_STATUS_" + name
	}
	return fmt.Sprintf("cublasStatus_t %d", int32(s))
}

// Error is a failed call of CUDA or cuBLASLt.
type Error struct {
	Call   string // name of the C function in CUDA's manual
	Code   error  // a Status or a BlasStatus
	Name   string // the library's name of the code, such as CUDA_ERROR_OUT_OF_MEMORY
	Text   string // the library's description of the code
	Detail string // the failed request, or advice on what to do
}

// NewError returns an error in the form that the library would report. The name derives from the code.
func NewError(call string, code error, text, detail string) *Error {
	return &Error{Call: call, Code: code, Name: code.Error(), Text: text, Detail: detail}
}

// NewOutOfMemory returns the error of an allocation that did not fit.
func NewOutOfMemory(asked int, free, total uint64) *Error {
	return NewError("cuMemAlloc", OutOfMemory, "out of memory",
		fmt.Sprintf("%s requested, %s of %s free", Size(uint64(asked)), Size(free), Size(total)))
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

// Unwrap returns the library's status.
func (e *Error) Unwrap() error { return e.Code }

// Sticky reports whether the context is lost.
func (e *Error) Sticky() bool {
	s, ok := e.Code.(Status)
	return ok && s.Sticky()
}

// NotFoundError reports that a library could not be loaded, and lists the attempts.
type NotFoundError = sharedlib.NotFoundError
