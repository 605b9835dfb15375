// Package nvml reads what the GPUs of this computer draw and hold, by NVIDIA's management library.
// It comes with the driver and is looked for when it is needed.
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

// Card is a GPU as it is now. What it does not tell is 0.
type Card struct {
	Index       int // among all of the computer, whichever CUDA shows to programs
	Name, UUID  string
	Power       float64 // W
	PowerLimit  float64 // W
	Used, Total uint64  // bytes of memory
	Busy        float64 // share of the time in which some kernel ran, 0 to 1
}

// Library is the library, in use.
type Library struct{ api *api }

// result is 0 where a function has succeeded.
type result int32

const notSupported result = 3

// memory is nvmlMemory_t, and utilization nvmlUtilization_t.
type memory struct{ Total, Free, Used uint64 }
type utilization struct{ GPU, Memory uint32 }

// api is the functions that are used here.
type api struct {
	initialise func() result
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

// symbols are the functions' names.
func (a *api) symbols() map[string]any {
	return map[string]any{"nvmlInit_v2": &a.initialise, "nvmlShutdown": &a.shutdown,
		"nvmlDeviceGetCount_v2": &a.count, "nvmlDeviceGetHandleByIndex_v2": &a.handle,
		"nvmlDeviceGetName": &a.name, "nvmlDeviceGetUUID": &a.uuid,
		"nvmlDeviceGetPowerUsage": &a.power, "nvmlDeviceGetEnforcedPowerLimit": &a.limit,
		"nvmlDeviceGetMemoryInfo": &a.memory, "nvmlDeviceGetUtilizationRates": &a.busy}
}

// Open finds the library and starts it. Close it after use.
func Open() (*Library, error) {
	a, tried := sharedlib.Load(sharedlib.Host(), places(sharedlib.Host()), 0, load)
	if a == nil {
		return nil, &sharedlib.NotFoundError{Library: "NVIDIA's management library (NVML)",
			Tried: tried, Help: "It comes with the driver of NVIDIA GPUs."}
	}
	return start(a)
}

// places lists where it may be.
func places(f sharedlib.Finder) []sharedlib.Place {
	switch f.GOOS {
	case "linux":
		return []sharedlib.Place{"libnvidia-ml.so.1"}
	case "windows":
		return []sharedlib.Place{"nvml.dll"}
	}
	return nil
}

// load binds the functions of a library.
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
			return nil, fmt.Errorf("it has no %s", symbol)
		}
		purego.RegisterFunc(functions[symbol], address)
	}
	return a, nil
}

func start(a *api) (*Library, error) {
	if r := a.initialise(); r != 0 {
		return nil, fmt.Errorf("nvml: nvmlInit: error %d: is the driver loaded?", r)
	}
	return &Library{a}, nil
}

// Close ends the use of the library.
func (l *Library) Close() error {
	if r := l.api.shutdown(); r != 0 {
		return fmt.Errorf("nvml: nvmlShutdown: error %d", r)
	}
	return nil
}

// Cards reads all GPUs. One that cannot be read is left out, with an error.
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

// card reads one.
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

// text is a C string.
func text(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return string(before)
}
