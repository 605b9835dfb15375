// Package fake implements CUDA without a GPU, for testing code built on package gpu.
//
// Device memory is host memory with separate addresses, so that every access is checked against the
// allocations that are alive at the time. New memory is filled with 0xFF bytes (NaN, or −1). Kernels are
// Go functions registered by name.
//
// Work doesn't run until something waits for it. A program that forgets to wait, or that modifies pinned
// memory too early, therefore reads stale or wrong data, just as it could on a real GPU. Time is
// simulated by a clock that advances by a microsecond per operation.
package fake

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Config configures a fake driver.
type Config struct {
	Devices []gpu.DeviceInfo // default: one GPU like an H200, with 1 GiB of memory
	Kernels map[string]Kernel
	// Images lists the kernels in an image for a compute capability (90 for 9.0), with their parameters.
	// Launches of these kernels are checked but do nothing, and neither do products. If both Kernels and
	// Images are nil, any kernel exists and does nothing.
	Images func(image []byte, capability int) (map[string][]gpu.Param, error)

	NoBlas   bool // pretend that cuBLASLt is missing
	Variants [3]Variant

	BlasVersion int // version of cuBLASLt; default 13.0.0
}

// Variant changes the behavior of one of cuBLASLt's variants.
type Variant struct {
	Took   time.Duration // simulated duration; zero means a microsecond
	Loaded time.Duration // simulated duration from the third consecutive run on, unless 0
	Warms  time.Duration // increase of Loaded with every run of the product, in any variant
	Wrong  bool          // compute a wrong result
	Fails  bool          // fail to start
}

// Driver is the fake driver.
type Driver struct {
	config Config

	mu       sync.Mutex
	contexts []*Context
	failures map[string][]error // for upcoming calls, by function; nil entries succeed
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

// Fail makes the nth next call of a function fail with a Status or BlasStatus. Functions are named as in
// the manuals of CUDA and cuBLASLt. A sticky status destroys the context.
func (d *Driver) Fail(call string, n int, code error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.failures[call]) < n {
		d.failures[call] = append(d.failures[call], nil)
	}
	d.failures[call][n-1] = code
}

// Pending returns the number of calls of a function up to and including the last one scheduled to fail.
func (d *Driver) Pending(call string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.failures[call])
}

// Cancel removes all failures scheduled for a function.
func (d *Driver) Cancel(call string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.failures, call)
}

// injected counts a call and returns the failure scheduled for it, if any.
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

// Version returns the version of CUDA 13.0.
func (d *Driver) Version() int { return 13000 }

// Devices lists the configured GPUs.
func (d *Driver) Devices() []gpu.DeviceInfo { return slices.Clone(d.config.Devices) }

// Retain returns a new context. Unlike a primary context, it isn't shared with other users of the GPU.
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

// Adopt returns a context created by Retain. Closing the result doesn't close the context.
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

// Op is a call that enqueued work.
type Op struct {
	Call   string // the C function
	Name   string // the kernel
	Bytes  int    // bytes set or copied
	Config gpu.LaunchConfig
	Args   []byte
}

// Leaks describes every object that is still alive.
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
