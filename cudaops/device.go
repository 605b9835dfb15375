// Package cudaops runs Gorgonia graphs on NVIDIA GPUs. It needs NVIDIA's driver, no cgo and no
// build tag. For matrix products it needs the library cuBLASLt, which comes with the CUDA toolkit
// and with PyTorch's pip packages. One binary runs everywhere and finds out when it starts what is
// there. Open says what is missing, and errors.Is(err, ErrNoDevice) tells a machine without a GPU
// from a fault. The environment variables KASMINA_LIBCUDA and KASMINA_LIBCUBLASLT name NVIDIA's
// libraries (a file, or a folder that holds it) where they are in an unusual place. On Windows
// libraries come from System32 and from below absolute paths in variables such as these and
// CUDA_PATH alone. They never come from the working folder or PATH. KASMINA_TUNE and KASMINA_VARIANTS
// say how machines choose among several variants to compute an op ([WithTuning], [WithVariants]).
package cudaops

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// ErrNoDevice means that there is no GPU to use: no driver library, no GPU, or none that
// CUDA_VISIBLE_DEVICES lets this process see. The error around it says which, where was searched,
// and what to do.
var ErrNoDevice = errors.New("no NVIDIA GPU")

// ErrOutOfMemory means that something did not fit into the GPU's memory. The error around it says
// what, how much it asked for and what was free.
var ErrOutOfMemory error = gpu.OutOfMemory

// ErrUnsupportedDevice means that the GPU is too old for this package's kernels.
var ErrUnsupportedDevice = errors.New("unsupported GPU")

// ErrUnsupportedPrecision means that the GPU, or the cuBLASLt found, does not compute in the
// precision that [WithPrecision] asks for. The error around it says what there is, what it takes,
// and what to use instead.
var ErrUnsupportedPrecision = errors.New("unsupported precision")

// The oldest compute capability that the kernels are made for: the first with bfloat16 and
// asynchronous copies.
const minMajor, minMinor = 8, 0

// Device is a GPU in use, from Open to Close. Its methods may be called from any goroutine.
type Device struct {
	ctx     gpu.Context
	info    gpu.DeviceInfo
	version int

	kernels run.Launcher // of all machines, so that only the first one loads them

	workspace gpu.Ptr // of single ops; null before there is one
}

// DeviceOption is an option of Open.
type DeviceOption func(*deviceOptions)

type deviceOptions struct {
	ordinal int
	adopt   bool
	context uintptr
	open    func() (gpu.Driver, error)
}

// WithOrdinal chooses a GPU by its position among those that CUDA_VISIBLE_DEVICES leaves visible.
// The first, 0, is the default.
func WithOrdinal(ordinal int) DeviceOption {
	return func(o *deviceOptions) { o.ordinal = ordinal }
}

// Count is the number of GPUs that CUDA_VISIBLE_DEVICES leaves visible. Where CUDA does not start
// the error is that of [Open].
func Count() (_ int, err error) {
	defer in("Count", &err)
	d, err := driver.Open()
	if err != nil {
		return 0, notStarted(err)
	}
	return len(d.Devices()), nil
}

// notStarted says why there is no driver.
func notStarted(err error) error {
	var missing *gpu.NotFoundError
	if errors.As(err, &missing) || errors.Is(err, gpu.NoDevice) || errors.Is(err, gpu.StubLibrary) {
		return fmt.Errorf("%w: %w", ErrNoDevice, err)
	}
	return fmt.Errorf("CUDA does not start: %w", err)
}

// withDriver takes the place of NVIDIA's driver.
func withDriver(d gpu.Driver) DeviceOption {
	return func(o *deviceOptions) { o.open = func() (gpu.Driver, error) { return d, nil } }
}

// Open takes a GPU into use. It shares the GPU's primary context with CUDA's runtime libraries in
// the same process. Without a GPU the error is ErrNoDevice, with one before compute capability 8.0
// it is ErrUnsupportedDevice.
func Open(opts ...DeviceOption) (_ *Device, err error) {
	defer in("Open", &err)
	o := deviceOptions{open: driver.Open}
	for _, opt := range opts {
		if opt == nil {
			return nil, errors.New("an option is nil")
		}
		opt(&o)
	}

	nvidia, err := o.open()
	if err != nil {
		return nil, notStarted(err)
	}

	var ctx gpu.Context
	if all := nvidia.Devices(); o.adopt {
		if ctx, err = nvidia.Adopt(o.context); err != nil {
			err = fmt.Errorf("the context %#x: %w", o.context, err)
		}
	} else if o.ordinal < 0 || o.ordinal >= len(all) {
		err = gpu.NewError("cuDeviceGet", gpu.InvalidDevice, "", fmt.Sprintf("GPU %d was asked "+
			"for, there are %d (from 0)", o.ordinal, len(all)))
	} else if err = supported(all[o.ordinal]); err == nil {
		ctx, err = nvidia.Retain(o.ordinal)
	}
	if err != nil {
		return nil, err
	}

	info := ctx.Device()
	if err := supported(info); err != nil {
		return nil, errors.Join(err, ctx.Close())
	}

	return &Device{ctx: ctx, info: info, version: nvidia.Version(), kernels: kernel.New(ctx)}, nil
}

// supported refuses a GPU for which there are no kernels.
func supported(d gpu.DeviceInfo) error {
	if d.Major < minMajor || d.Major == minMajor && d.Minor < minMinor {
		return fmt.Errorf("%w: %s has compute capability %d.%d, at least %d.%d is needed",
			ErrUnsupportedDevice, d.Name, d.Major, d.Minor, minMajor, minMinor)
	}
	return nil
}

// errNotOpened is what a zero Device is good for.
var errNotOpened = errors.New("the device was not made by Open")

// Name is the GPU's product name.
func (d *Device) Name() string { return d.info.Name }

// Ordinal is the GPU's position among the visible ones.
func (d *Device) Ordinal() int { return d.info.Ordinal }

// ComputeCapability is the version of the GPU's architecture: 9.0 for an H200.
func (d *Device) ComputeCapability() (major, minor int) { return d.info.Major, d.info.Minor }

// Memory is the device memory in bytes: what is free now, all processes considered, and all there
// is.
func (d *Device) Memory() (free, total uint64, err error) {
	defer in("Device.Memory", &err)
	if d.ctx == nil {
		return 0, 0, errNotOpened
	}
	free, total, err = d.ctx.MemInfo()
	return free, total, d.naming(err)
}

// String describes the GPU in a line.
func (d *Device) String() string {
	i := d.info
	return fmt.Sprintf("%s (GPU %d, compute capability %d.%d, %s, %d multiprocessors, driver for "+
		"CUDA %d.%d)", i.Name, i.Ordinal, i.Major, i.Minor, gpu.Size(i.Memory), i.SMs,
		d.version/1000, d.version%1000/10)
}

// Close lets go of the GPU. Machines on it must be closed before; further calls fail. A second
// Close does nothing.
func (d *Device) Close() (err error) {
	defer in("Device.Close", &err)
	if d.ctx == nil {
		return errNotOpened
	}
	errs := []error{d.kernels.Close()}
	if d.workspace != 0 {
		errs = append(errs, d.ctx.Free(d.workspace))
		d.workspace = 0
	}
	return d.naming(run.Joined(append(errs, d.ctx.Close())...))
}

// naming is an error with the GPU of which it is.
func (d *Device) naming(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("GPU %d, %s: %w", d.info.Ordinal, d.info.Name, err)
}

// Other CUDA libraries in the same process take part through plain handles. These are a CUcontext,
// a CUstream and a CUdeviceptr, each as the number that it is in C. The package cuinterop gives
// them the types of gorgonia.org/cu.

// WithContext makes Open use a context that the program made elsewhere, and with it that context's
// GPU, whatever [WithOrdinal] says: handle is a CUcontext. [Device.Close] leaves it alone; it must
// outlive the Device, and whoever made it destroys it.
//
// The package makes the context current on the calling thread for the length of each call, and
// leaves it so. A goroutine that locked its thread to work in another context must make that one
// current again after calling into this package.
func WithContext(handle uintptr) DeviceOption {
	return func(o *deviceOptions) { o.adopt, o.context = true, handle }
}

// Context is the CUcontext in which the device's work is done, for other libraries to share. It is
// valid until Close.
func (d *Device) Context() uintptr {
	if d.ctx == nil {
		return 0
	}
	return d.ctx.Handle()
}

// Do runs f on a thread on which the device's context is current. That is for other libraries that
// work in the current context, as NCCL does (package comm/nccl).
func (d *Device) Do(f func() error) error {
	if d.ctx == nil {
		return fmt.Errorf("cudaops.Device.Do: %w", errNotOpened)
	}
	return d.ctx.Do(f)
}
