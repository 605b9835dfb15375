package driver

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// proc is a C function. When the signature of a CUDA function changes, CUDA keeps the old function under
// its name and adds the new one with a suffix such as _v2. Headers hide the suffix, but symbols must
// include it.
type proc struct {
	addr uintptr
	name string // without suffix, as in the manual
}

// cudaAPI contains the functions used from libcuda. The tags are the names of the symbols. Drivers for
// CUDA 13, which the kernels' binaries require, export all these functions.
type cudaAPI struct {
	GetErrorName       proc `c:"cuGetErrorName"`
	GetErrorString     proc `c:"cuGetErrorString"`
	Init               proc `c:"cuInit"`
	DriverGetVersion   proc `c:"cuDriverGetVersion"`
	DeviceGet          proc `c:"cuDeviceGet"`
	DeviceGetCount     proc `c:"cuDeviceGetCount"`
	DeviceGetName      proc `c:"cuDeviceGetName"`
	DeviceTotalMem     proc `c:"cuDeviceTotalMem_v2"`
	DeviceGetAttribute proc `c:"cuDeviceGetAttribute"`
	PrimaryCtxRetain   proc `c:"cuDevicePrimaryCtxRetain"`
	PrimaryCtxRelease  proc `c:"cuDevicePrimaryCtxRelease_v2"`
	CtxSetCurrent      proc `c:"cuCtxSetCurrent"`
	CtxGetDevice       proc `c:"cuCtxGetDevice"`
	MemAlloc           proc `c:"cuMemAlloc_v2"`
	MemFree            proc `c:"cuMemFree_v2"`
	MemHostAlloc       proc `c:"cuMemHostAlloc"`
	MemFreeHost        proc `c:"cuMemFreeHost"`
	MemGetInfo         proc `c:"cuMemGetInfo_v2"`
	MemcpyHtoDAsync    proc `c:"cuMemcpyHtoDAsync_v2"`
	MemcpyDtoHAsync    proc `c:"cuMemcpyDtoHAsync_v2"`
	MemcpyDtoDAsync    proc `c:"cuMemcpyDtoDAsync_v2"`
	MemsetD8Async      proc `c:"cuMemsetD8Async"`
	StreamPriority     proc `c:"cuCtxGetStreamPriorityRange"`
	StreamCreate       proc `c:"cuStreamCreateWithPriority"`
	StreamWaitEvent    proc `c:"cuStreamWaitEvent"`
	StreamDestroy      proc `c:"cuStreamDestroy_v2"`
	StreamSync         proc `c:"cuStreamSynchronize"`
	EventCreate        proc `c:"cuEventCreate"`
	EventDestroy       proc `c:"cuEventDestroy_v2"`
	EventRecord        proc `c:"cuEventRecord"`
	EventRecordFlags   proc `c:"cuEventRecordWithFlags"`
	EventSynchronize   proc `c:"cuEventSynchronize"`
	EventQuery         proc `c:"cuEventQuery"`
	EventElapsedTime   proc `c:"cuEventElapsedTime"`
	ModuleLoadData     proc `c:"cuModuleLoadData"`
	ModuleUnload       proc `c:"cuModuleUnload"`
	ModuleGetFunction  proc `c:"cuModuleGetFunction"`
	FuncSetAttribute   proc `c:"cuFuncSetAttribute"`
	Occupancy          proc `c:"cuOccupancyMaxActiveBlocksPerMultiprocessor"`
	OccupancyClusters  proc `c:"cuOccupancyMaxActiveClusters"`
	LaunchKernel       proc `c:"cuLaunchKernelEx"`
	TensorMapEncode    proc `c:"cuTensorMapEncodeTiled"`
	StreamBeginCapture proc `c:"cuStreamBeginCapture_v2"`
	StreamEndCapture   proc `c:"cuStreamEndCapture"`
	GraphInstantiate   proc `c:"cuGraphInstantiateWithFlags"`
	GraphLaunch        proc `c:"cuGraphLaunch"`
	GraphExecDestroy   proc `c:"cuGraphExecDestroy"`
	GraphDestroy       proc `c:"cuGraphDestroy"`
}

// bind loads the library at path and fills a struct of procs from it.
func bind(path string, api any) error {
	library, err := sharedlib.Open(path)
	if err != nil {
		return errors.New(strings.TrimPrefix(err.Error(), path+": "))
	}

	for symbol, field := range sharedlib.Functions(api) {
		addr, err := sharedlib.Lookup(library, symbol)
		if err != nil {
			return fmt.Errorf("%s has no %s: it is too old", path, symbol)
		}
		*field.(*proc) = proc{addr, strings.TrimSuffix(symbol, "_v2")}
	}

	return nil
}

// call calls the C function with integers and pointers. The directive keeps objects passed as pointers
// alive and on the heap, where they don't move. It only works if unsafe.Pointer is converted within the
// argument list.
//
//go:uintptrescapes
func (p *proc) call(args ...uintptr) uintptr {
	r, _, _ := purego.SyscallN(p.addr, args...)
	return r
}

// cuda is NVIDIA's driver.
type cuda struct {
	cudaAPI
	version int
	devices []gpu.DeviceInfo
	handles []int32 // CUdevice of each device
}

// Open loads NVIDIA's driver library and lists its GPUs. If the library can't be found, the error is a
// *NotFoundError. If this process has no GPU to use, the error has status NoDevice. The library stays
// loaded, and a call after an error tries again.
func Open() (gpu.Driver, error) {
	opened.Lock()
	defer opened.Unlock()
	if opened.Driver == nil {
		d, err := open()
		if err != nil {
			return nil, err
		}
		opened.Driver = d
	}
	return opened.Driver, nil
}

var opened struct {
	sync.Mutex
	gpu.Driver
}

func open() (gpu.Driver, error) {
	f := sharedlib.Host()
	c, tried := sharedlib.Load(f, cudaPlaces(f), 0, func(path string) (*cuda, error) {
		c := &cuda{}
		return c, bind(path, &c.cudaAPI)
	})
	if c == nil {
		help := "It comes with NVIDIA's display driver: install that, or give a container access " +
			"to the GPU (docker run --gpus all). To use a library elsewhere, " +
			"set " + cudaVariable + "."
		if f.GOOS == "darwin" {
			help = "CUDA does not exist for macOS."
		}
		return nil, &gpu.NotFoundError{Library: "NVIDIA's driver library (libcuda)",
			Tried: tried, Help: help}
	}

	return c, c.start()
}

func (c *cuda) start() error {
	if err := c.do(&c.Init, 0); err != nil {
		return noDevice(err)
	}

	var version, count int32
	if err := c.do(&c.DriverGetVersion, uintptr(unsafe.Pointer(&version))); err != nil {
		return err
	}

	if err := c.do(&c.DeviceGetCount, uintptr(unsafe.Pointer(&count))); err != nil {
		return noDevice(err)
	}

	if count == 0 {
		return noDevice(gpu.NewError("cuDeviceGetCount", gpu.NoDevice, "", ""))
	}

	c.version = int(version)
	for i := range int(count) {
		d, handle, err := c.describe(i)
		if err != nil {
			return err
		}
		c.devices, c.handles = append(c.devices, d), append(c.handles, handle)
	}

	return nil
}

// noDevice adds advice to an error during initialization.
func noDevice(err error) error {
	var e *gpu.Error
	if !errors.As(err, &e) {
		return err
	}

	switch e.Code {
	case gpu.NoDevice:
		e.Detail = "this process sees no NVIDIA GPU; nvidia-smi lists the GPUs of the machine"
		if v, ok := os.LookupEnv("CUDA_VISIBLE_DEVICES"); ok {
			e.Detail = fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q hides all NVIDIA GPUs", v)
		}
	case gpu.StubLibrary:
		e.Detail = "the library found is the toolkit's stub for linking; put the real driver's " +
			"folder before it in the search"
	case gpu.SystemDriverMismatch:
		e.Detail = "the driver was updated and is not yet loaded: restart the machine"
	}

	return e
}

// describe returns the description of a GPU and its CUdevice.
func (c *cuda) describe(ordinal int) (d gpu.DeviceInfo, dev int32, err error) {
	d.Ordinal = ordinal
	var memory uintptr
	name := make([]byte, 256)
	if err = c.do(&c.DeviceGet, uintptr(unsafe.Pointer(&dev)), uintptr(ordinal)); err != nil {
		return d, dev, err
	}

	if err = errors.Join(
		c.do(&c.DeviceGetName, uintptr(unsafe.Pointer(&name[0])), uintptr(len(name)), uintptr(dev)),
		c.do(&c.DeviceTotalMem, uintptr(unsafe.Pointer(&memory)), uintptr(dev))); err != nil {
		return d, dev, err
	}

	d.Name, _, _ = strings.Cut(string(name), "\x00")
	d.Memory = uint64(memory)
	for attribute, to := range map[uintptr]*int{75: &d.Major, 76: &d.Minor, 16: &d.SMs,
		38: &d.L2, 97: &d.SharedPerBlock} {
		var v int32
		if err = c.do(&c.DeviceGetAttribute, uintptr(unsafe.Pointer(&v)), attribute,
			uintptr(dev)); err != nil {
			return d, dev, err
		}
		*to = int(v)
	}

	return d, dev, nil
}

// do calls a driver function that needs no context. See [proc.call] for the directive.
//
//go:uintptrescapes
func (c *cuda) do(p *proc, args ...uintptr) error { return c.check(p, p.call(args...)) }

// check converts a CUresult to an error with the driver's name and description.
func (c *cuda) check(p *proc, result uintptr) error {
	s := gpu.Status(int32(result))
	if s == gpu.Success {
		return nil
	}

	e := gpu.NewError(p.name, s, "", "")
	var name, text *byte
	if c.GetErrorName.call(uintptr(s), uintptr(unsafe.Pointer(&name))) == 0 {
		e.Name = goString(name)
	}

	if c.GetErrorString.call(uintptr(s), uintptr(unsafe.Pointer(&text))) == 0 {
		e.Text = goString(text)
	}

	return e
}

// goString copies a C string.
func goString(p *byte) string {
	if p == nil {
		return ""
	}
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}

func (c *cuda) Version() int { return c.version }

func (c *cuda) Devices() []gpu.DeviceInfo { return slices.Clone(c.devices) }

func (c *cuda) Retain(ordinal int) (gpu.Context, error) {
	dev := uintptr(c.handles[ordinal])
	ctx := &context{cuda: c, info: c.devices[ordinal],
		release: func() error { return c.do(&c.PrimaryCtxRelease, dev) }}
	if err := c.do(&c.PrimaryCtxRetain, uintptr(unsafe.Pointer(&ctx.handle)), dev); err != nil {
		return nil, fmt.Errorf("%s: %w", ctx.info.Name, err)
	}
	return ctx, nil
}

func (c *cuda) Adopt(handle uintptr) (gpu.Context, error) {
	var dev int32
	ctx := &context{cuda: c, handle: handle, release: func() error { return nil }}
	if err := ctx.call(&c.CtxGetDevice, uintptr(unsafe.Pointer(&dev))); err != nil {
		return nil, err
	}

	i := slices.Index(c.handles, dev)
	if i < 0 {
		return nil, gpu.NewError("cuCtxGetDevice", gpu.InvalidDevice, "",
			"the context's GPU is not among the visible ones")
	}

	ctx.info = c.devices[i]
	return ctx, nil
}

// Environment variables that specify a library, either as a file or as the folder that contains it. If
// one is set, no other location is searched.
const (
	cudaVariable = "KASMINA_LIBCUDA"
	blasVariable = "KASMINA_LIBCUBLASLT"
)

// cudaPlaces lists the possible locations of NVIDIA's driver library. Normally the system's loader finds
// it; the folders are used in containers and by WSL and NixOS, where the loader may not search them.
func cudaPlaces(f sharedlib.Finder) []sharedlib.Place {
	name := "libcuda.so.1"
	if f.GOOS == "windows" {
		name = "nvcuda.dll"
	}

	if v := f.Getenv(cudaVariable); v != "" {
		return []sharedlib.Place{f.Override(v, name)}
	}

	switch f.GOOS {
	case "windows":
		return []sharedlib.Place{sharedlib.Place(name)}
	case "linux":
		places := []sharedlib.Place{sharedlib.Place(name), "libcuda.so"}
		for _, dir := range []string{"/usr/lib/" + f.Multiarch(), "/usr/lib64",
			"/usr/lib", "/usr/lib/wsl/lib",
			"/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/run/opengl-driver/lib",
			"/usr/local/cuda/compat"} {
			places = append(places, sharedlib.Place(dir+"/"+name))
		}
		return places
	}

	return nil
}
