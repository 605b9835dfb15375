// Package nvml reads the power and memory of this computer's GPUs with NVIDIA's management library.
// The library is part of the driver and is loaded when it is first needed.
package nvml

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/ebitengine/purego"

	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// Card is the current state of a GPU. Values that the GPU does not report are 0.
type Card struct {
	Index       int // among all GPUs of the computer, even if CUDA hides some from programs
	Name, UUID  string
	Power       float64 // W
	PowerLimit  float64 // W
	Used, Total uint64  // bytes of memory
	Busy        float64 // fraction of the time during which a kernel ran, 0 to 1
}

// A Library is the loaded management library.
type Library struct{ api *api }

// result is the result of a function, 0 for success.
type result int32

const notSupported result = 3

// memory has the layout of nvmlMemory_t.
type memory struct{ Total, Free, Used uint64 }

// utilization has the layout of nvmlUtilization_t.
type utilization struct{ GPU, Memory uint32 }

// An api holds the functions of the library that this package uses.
type api struct {
	initialize func() result
	shutdown   func() result
	count      func(n *uint32) result
	handle     func(index uint32, to *uintptr) result
	name       func(card uintptr, to *byte, bytes uint32) result
	uuid       func(card uintptr, to *byte, bytes uint32) result
	power      func(card uintptr, milliwatts *uint32) result
	limit      func(card uintptr, milliwatts *uint32) result
	memory     func(card uintptr, to *memory) result
	busy       func(card uintptr, to *utilization) result
}

// symbols maps the names of the functions to the fields that hold them.
func (a *api) symbols() map[string]any {
	return map[string]any{"nvmlInit_v2": &a.initialize, "nvmlShutdown": &a.shutdown,
		"nvmlDeviceGetCount_v2": &a.count, "nvmlDeviceGetHandleByIndex_v2": &a.handle,
		"nvmlDeviceGetName": &a.name, "nvmlDeviceGetUUID": &a.uuid,
		"nvmlDeviceGetPowerUsage": &a.power, "nvmlDeviceGetEnforcedPowerLimit": &a.limit,
		"nvmlDeviceGetMemoryInfo": &a.memory, "nvmlDeviceGetUtilizationRates": &a.busy}
}

// Open finds and initializes the library. The caller must close it.
func Open() (*Library, error) {
	a, tried := sharedlib.Load(sharedlib.Host(), places(sharedlib.Host()), 0, load)
	if a == nil {
		return nil, &sharedlib.NotFoundError{Library: "NVIDIA's management library (NVML)",
			Tried: tried, Help: "It comes with the driver of NVIDIA GPUs."}
	}
	return start(a)
}

// places lists the possible locations of the library.
func places(f sharedlib.Finder) []sharedlib.Place {
	switch f.GOOS {
	case "linux":
		return []sharedlib.Place{"libnvidia-ml.so.1"}
	case "windows":
		return []sharedlib.Place{"nvml.dll"}
	}
	return nil
}

// load loads a library and binds its functions.
func load(path string) (*api, error) {
	library, err := sharedlib.Open(path)
	if err != nil {
		return nil, err
	}
	a := &api{}
	functions := a.symbols()
	for _, symbol := range slices.Sorted(maps.Keys(functions)) {
		address, err := sharedlib.Lookup(library, symbol)
		if err != nil {
			return nil, fmt.Errorf("it has no function %s", symbol)
		}
		purego.RegisterFunc(functions[symbol], address)
	}
	return a, nil
}

// start initializes the library.
func start(a *api) (*Library, error) {
	if r := a.initialize(); r != 0 {
		return nil, fmt.Errorf("nvml: nvmlInit: error %d: is the driver loaded?", r)
	}
	return &Library{a}, nil
}

// Close shuts the library down.
func (l *Library) Close() error {
	if r := l.api.shutdown(); r != 0 {
		return fmt.Errorf("nvml: nvmlShutdown: error %d", r)
	}
	return nil
}

// Cards returns the state of all GPUs. It omits unreadable GPUs and reports them in the error.
func (l *Library) Cards() (all []Card, err error) {
	var n uint32
	if r := l.api.count(&n); r != 0 {
		return nil, fmt.Errorf("nvml: nvmlDeviceGetCount: error %d", r)
	}

	for i := range n {
		c, failed := l.api.card(i)
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("nvml: GPU %d: %w", i, failed))
			continue
		}
		all = append(all, c)
	}
	return all, err
}

// card reads the state of a GPU.
func (a *api) card(i uint32) (Card, error) {
	var h uintptr
	if r := a.handle(i, &h); r != 0 {
		return Card{}, fmt.Errorf("nvmlDeviceGetHandleByIndex: error %d", r)
	}

	var name, uuid [96]byte
	var power, limit uint32
	var m memory
	var busy utilization
	for _, asked := range []struct {
		what string
		r    result
	}{
		{"Name", a.name(h, &name[0], uint32(len(name)))},
		{"UUID", a.uuid(h, &uuid[0], uint32(len(uuid)))},
		{"PowerUsage", a.power(h, &power)},
		{"EnforcedPowerLimit", a.limit(h, &limit)},
		{"MemoryInfo", a.memory(h, &m)},
		{"UtilizationRates", a.busy(h, &busy)},
	} {
		if asked.r != 0 && asked.r != notSupported {
			return Card{}, fmt.Errorf("nvmlDeviceGet%s: error %d", asked.what, asked.r)
		}
	}

	return Card{Index: int(i), Name: text(name[:]), UUID: text(uuid[:]),
		Power: float64(power) / 1e3, PowerLimit: float64(limit) / 1e3, Used: m.Used,
		Total: m.Total, Busy: float64(busy.GPU) / 100}, nil
}

// text converts a C string.
func text(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return string(before)
}
