// Package fake is a CUDA without a GPU, for testing what is built on the driver package. Device
// memory is host memory behind addresses of its own, so that every access is checked against the
// allocations alive at that moment. New memory is filled with 0xFF bytes (NaN, or −1). A kernel is
// a Go function registered under its name. Nothing runs before something waits for it. A program
// that forgets to wait, or changes pinned memory too early, sees stale or wrong data here as it
// would on a GPU. Time is a clock that each operation moves by a microsecond.
package fake

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Config says what the fake pretends to be.
type Config struct {
	Devices []gpu.DeviceInfo // default: one like an H200 with 1 GiB
	Kernels map[string]Kernel
	// Images lists the kernels of an image for a compute capability (90 for 9.0), with their
	// parameters. They exist, launches are checked against them, and they do nothing. Nor do
	// products. Without Kernels and Images any kernel exists and does nothing.
	Images func(image []byte, capability int) (map[string][]gpu.Param, error)

	NoBlas   bool // cuBLASLt is missing
	Variants [3]Variant

	BlasVersion int // of cuBLASLt, default 13.0.0
}

// Variant is how one of cuBLASLt's variants to compute a product differs from the definition.
type Variant struct {
	Took   time.Duration // how far it moves the clock; zero means a microsecond
	Loaded time.Duration // the same from the third run in a row on, if it is not 0
	Warms  time.Duration // by how much that grows with every run of the product, in any variant
	Wrong  bool          // it computes something else
	Fails  bool          // it cannot be started
}

// Driver is the fake driver.
type Driver struct {
	config Config

	mu       sync.Mutex
	contexts []*Context
	failures map[string][]error // of the next calls of a function; nil for none
}

// New returns a fake driver.
func New(c Config) *Driver {
	if c.Devices == nil {
		c.Devices = []gpu.DeviceInfo{{Name: "Fake GPU", Major: 9, Memory: 1 << 30, SMs: 132,
			L2: 4 << 20, SharedPerBlock: 227 << 10}}
	}
	c.Devices = slices.Clone(c.Devices)
	for i := range c.Devices {
		c.Devices[i].Ordinal = i
	}
	return &Driver{config: c, failures: map[string][]error{}}
}

// Fail makes the nth call from now of a function fail with a Status or a BlasStatus. Functions of
// CUDA and cuBLASLt are named as in the manual. A sticky status loses the context.
func (d *Driver) Fail(call string, n int, code error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.failures[call]) < n {
		d.failures[call] = append(d.failures[call], nil)
	}
	d.failures[call][n-1] = code
}

// Pending returns how many calls of a function are still to come up to the last one that is to fail.
// Cancel has them succeed.
func (d *Driver) Pending(call string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.failures[call])
}

// Cancel takes back what Fail has asked for.
func (d *Driver) Cancel(call string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.failures, call)
}

// injected counts a call and returns the failure that is due, if there is one.
func (d *Driver) injected(call string) *gpu.Error {
	d.mu.Lock()
	defer d.mu.Unlock()
	next := d.failures[call]
	if len(next) == 0 {
		return nil
	}
	if d.failures[call] = next[1:]; next[0] == nil {
		return nil
	}
	return refused(next[0], "injected failure")
}

// Version is CUDA 13.0.
func (d *Driver) Version() int { return 13000 }

// Devices lists the configured GPUs.
func (d *Driver) Devices() []gpu.DeviceInfo { return slices.Clone(d.config.Devices) }

// Retain returns a new context. Unlike a GPU's primary context it shares nothing with others of the
// same GPU.
func (d *Driver) Retain(ordinal int) (gpu.Context, error) {
	const call = "cuDevicePrimaryCtxRetain"
	if due := d.injected(call); due != nil {
		return nil, named(call, due)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	c := newContext(d, d.config.Devices[ordinal], uintptr(len(d.contexts)+1))
	d.contexts = append(d.contexts, c)
	return c, nil
}

// Adopt returns a context given out before, such that closing it leaves the context open.
func (d *Driver) Adopt(handle uintptr) (gpu.Context, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if handle < 1 || int(handle) > len(d.contexts) {
		return nil, gpu.NewError("cuCtxGetDevice", gpu.InvalidContext, "", "")
	}
	return adopted{d.contexts[handle-1]}, nil
}

type adopted struct{ *Context }

func (adopted) Close() error { return nil }

// Op is a call that a context was given.
type Op struct {
	Call   string // the C function
	Name   string // the kernel
	Bytes  int    // of memory that is set or copied
	Config gpu.LaunchConfig
	Args   []byte
}

// Leaks names every object that is still alive.
func (c *Context) Leaks() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []string
	for _, b := range c.blocks {
		if !b.freed {
			found = append(found, fmt.Sprintf("%d bytes of device memory at %#x",
				b.size, uint64(b.base)))
		}
	}

	for _, left := range []struct {
		what string
		n    int
	}{{"streams", len(c.streams) - 1}, {"events", len(c.events)}, {"modules", len(c.modules)},
		{"graphs", len(c.graphs)}, {"bytes of pinned host memory", c.pinnedBytes}} {
		if left.n > 0 {
			found = append(found, fmt.Sprintf("%d %s", left.n, left.what))
		}
	}

	return found
}
