// Package cudaops runs Gorgonia graphs on NVIDIA GPUs. A [Device] is a GPU in use, and a [Machine] runs a
// graph on it:
//
//	dev, err := cudaops.Open()
//	m, err := cudaops.NewMachine(dev, g, cudaops.WithParams(weights...))
//	err = m.RunAll()
//	y, err := m.Value(output)
//
// The package needs NVIDIA's driver, but neither cgo nor a build tag. Matrix products also need the
// library cuBLASLt, which is part of the CUDA toolkit and of PyTorch's pip packages. Both libraries are
// loaded when they are first needed, so the same binary runs on computers with and without a GPU. If a
// library is missing, the error says where it was searched, and errors.Is(err, [ErrNoDevice])
// distinguishes a computer without a GPU from a fault.
//
// The environment variables KASMINA_LIBCUDA and KASMINA_LIBCUBLASLT give the location of the two
// libraries, as a file or a folder, if they are in an unusual place. On Windows, libraries are loaded
// only from System32 and from below absolute paths in such variables and in CUDA_PATH, never from the
// working folder or PATH.
//
// KASMINA_TUNE and KASMINA_VARIANTS control how machines choose among several variants of an op: see
// [WithTuning] and [WithVariants].
package cudaops

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// ErrNoDevice means that no GPU can be used: the driver library is missing, the computer has no GPU, or
// CUDA_VISIBLE_DEVICES hides every GPU. The wrapping error gives the reason, the places searched and a
// remedy.
var ErrNoDevice = errors.New("no NVIDIA GPU")

// ErrOutOfMemory means that an allocation did not fit into the GPU's memory. The wrapping error gives the
// purpose and the size of the allocation, and the amount of free memory.
var ErrOutOfMemory error = gpu.OutOfMemory

// ErrUnsupportedDevice means that the GPU is too old for this package's kernels.
var ErrUnsupportedDevice = errors.New("unsupported GPU")

// ErrUnsupportedPrecision means that the GPU or its version of cuBLASLt cannot compute in the precision
// chosen with [WithPrecision]. The wrapping error states the requirements, the versions found and a
// precision that works.
var ErrUnsupportedPrecision = errors.New("unsupported precision")

// The kernels need compute capability 8.0, the first with bfloat16 and asynchronous copies.
const minMajor, minMinor = 8, 0

// Device is a GPU in use, from Open to Close. Its methods may be called from any goroutine.
type Device struct {
	ctx     gpu.Context
	info    gpu.DeviceInfo
	version int

	kernels run.Launcher // shared by all machines, so that each kernel is loaded only once

	workspace gpu.Ptr // for single ops; 0 until the first one needs it
}

// DeviceOption is an option of Open.
type DeviceOption func(*deviceOptions)

type deviceOptions struct {
	ordinal int
	adopt   bool
	context uintptr
	open    func() (gpu.Driver, error)
}

// WithOrdinal selects a GPU by its position among the visible GPUs (see CUDA_VISIBLE_DEVICES). The
// default is 0, the first GPU.
func WithOrdinal(ordinal int) DeviceOption {
	return func(o *deviceOptions) { o.ordinal = ordinal }
}

// Count returns the number of visible GPUs (see CUDA_VISIBLE_DEVICES). If CUDA does not start, it returns
// the same error as [Open].
func Count() (_ int, err error) {
	defer annotate("Count", &err)
	d, err := driver.Open()
	if err != nil {
		return 0, notStarted(err)
	}
	return len(d.Devices()), nil
}

// notStarted explains why the driver could not be opened.
func notStarted(err error) error {
	var missing *gpu.NotFoundError
	if errors.As(err, &missing) || errors.Is(err, gpu.NoDevice) || errors.Is(err, gpu.StubLibrary) {
		return fmt.Errorf("%w: %w", ErrNoDevice, err)
	}
	return fmt.Errorf("CUDA does not start: %w", err)
}

// withDriver substitutes d for NVIDIA's driver.
func withDriver(d gpu.Driver) DeviceOption {
	return func(o *deviceOptions) { o.open = func() (gpu.Driver, error) { return d, nil } }
}

// Open starts using a GPU. It shares the GPU's primary context with CUDA's runtime libraries in the same
// process.
//
// If the computer has no GPU, the error wraps ErrNoDevice. If the GPU's compute capability is below 8.0,
// it wraps ErrUnsupportedDevice.
func Open(opts ...DeviceOption) (_ *Device, err error) {
	defer annotate("Open", &err)
	o := deviceOptions{open: driver.Open}
	for _, opt := range opts {
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
		err = gpu.NewError("cuDeviceGet", gpu.InvalidDevice, "", fmt.Sprintf("GPU %d was "+
			"requested, but there are %d, numbered from 0", o.ordinal, len(all)))
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

// supported returns an error for a GPU that the kernels do not support.
func supported(d gpu.DeviceInfo) error {
	if d.Major < minMajor || d.Major == minMajor && d.Minor < minMinor {
		return fmt.Errorf("%w: %s has compute capability %d.%d, want at least %d.%d",
			ErrUnsupportedDevice, d.Name, d.Major, d.Minor, minMajor, minMinor)
	}
	return nil
}

// Name returns the GPU's product name.
func (d *Device) Name() string { return d.info.Name }

// Ordinal returns the GPU's position among the visible GPUs.
func (d *Device) Ordinal() int { return d.info.Ordinal }

// ComputeCapability returns the version of the GPU's architecture, such as 9.0 for an H200.
func (d *Device) ComputeCapability() (major, minor int) { return d.info.Major, d.info.Minor }

// Memory returns the number of free bytes of device memory, taking all processes into account, and the
// total number.
func (d *Device) Memory() (free, total uint64, err error) {
	defer annotate("Device.Memory", &err)
	free, total, err = d.ctx.MemInfo()
	return free, total, d.withName(err)
}

// String describes the GPU in one line.
func (d *Device) String() string {
	i := d.info
	return fmt.Sprintf("%s (GPU %d, compute capability %d.%d, %s, %d multiprocessors, driver for "+
		"CUDA %d.%d)", i.Name, i.Ordinal, i.Major, i.Minor, gpu.Size(i.Memory), i.SMs,
		d.version/1000, d.version%1000/10)
}

// Close releases the GPU. Close the machines on it first; further calls fail. A second Close does
// nothing.
func (d *Device) Close() (err error) {
	defer annotate("Device.Close", &err)
	errs := []error{d.kernels.Close()}
	if d.workspace != 0 {
		errs = append(errs, d.ctx.Free(d.workspace))
		d.workspace = 0
	}
	return d.withName(run.Joined(append(errs, d.ctx.Close())...))
}

// withName adds the GPU's name to an error.
func (d *Device) withName(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("GPU %d, %s: %w", d.info.Ordinal, d.info.Name, err)
}

// Other CUDA libraries in the same process exchange plain handles with this package: a CUcontext, a
// CUstream or a CUdeviceptr, each as a number with the same value as in C. Package cuinterop converts
// them to the types of gorgonia.org/cu.

// WithContext makes Open use the context of another library instead of the GPU's primary context, and
// with it that context's GPU, whatever [WithOrdinal] says. The handle is a CUcontext. [Device.Close] does
// not destroy the context, which must outlive the Device.
//
// The package makes the context current on the calling thread during each call, and does not restore the
// previous one. A goroutine that has locked its thread to work in another context must make that context
// current again after calling into this package.
func WithContext(handle uintptr) DeviceOption {
	return func(o *deviceOptions) { o.adopt, o.context = true, handle }
}

// Context returns the device's CUcontext, so that other libraries can share it. It is valid until Close.
func (d *Device) Context() uintptr {
	return d.ctx.Handle()
}

// Do runs f on a thread on which the device's context is current. Use it for libraries that work in the
// current context, such as NCCL (package comm/nccl).
func (d *Device) Do(f func() error) error {
	return d.ctx.Do(f)
}
