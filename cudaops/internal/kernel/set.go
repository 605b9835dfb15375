// Package kernel loads and launches the CUDA kernels. Each family of kernels has a folder with its
// CUDA sources, binaries and launches; this package has the code that the families share.
//
// A launch is a struct type of a family, such as softmax.Forward, that holds device pointers and
// sizes. [Set.Launch] chooses the variant that fits the type, shape and alignment, and enqueues its
// kernels on a stream. It returns before they have run. It returns an error for sizes and types
// that no kernel accepts, but does not check pointers.
//
// Numbers are stored as float32, float16 or bfloat16, and computations use float32. On the same
// model of GPU, the same inputs give bit-identical results on every run.
package kernel

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Set holds the kernels loaded into a context. It is safe for concurrent use.
type Set struct {
	Ctx  gpu.Context
	Info gpu.DeviceInfo

	mu      sync.Mutex
	modules map[string]gpu.Module // by unit; a unit is loaded when its first kernel is used
	kernels map[key]*kernel
}

type key struct{ unit, name string }

// kernel is a function, together with the data needed to launch it.
type kernel struct {
	*gpu.Function
	shared    int  // the dynamic shared memory that it is allowed to use
	maxShared bool // see gpu.LaunchConfig
	// number of blocks or clusters that run at once on the whole GPU, by threads, shared memory and cluster size
	resident map[[3]int]int
}

// New returns the kernels for a context.
func New(ctx gpu.Context) *Set {
	return &Set{Ctx: ctx, Info: ctx.Device(), modules: map[string]gpu.Module{},
		kernels: map[key]*kernel{}}
}

// Close unloads the kernels. No kernel may be running.
func (k *Set) Close() error {
	var errs []error
	k.mu.Lock()
	defer k.mu.Unlock()
	for unit, m := range k.modules {
		if err := k.Ctx.UnloadModule(m); err != nil {
			errs = append(errs, fmt.Errorf("kernels: unloading %s: %w", unit, err))
		}
	}

	clear(k.modules)
	clear(k.kernels)
	return errors.Join(errs...)
}

// function returns a unit's function for a launch, loading the unit on first use, and allows it to use the
// launch's dynamic shared memory. Up to 48 KiB, including the kernel's static shared memory of less than 1
// KiB, can be used without asking.
func (k *Set) function(unit, name string, c gpu.LaunchConfig) (*kernel, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.kernels[key{unit, name}]
	if f == nil {
		m, ok := k.modules[unit]
		if !ok {
			images, _ := units()
			if images[unit] == nil {
				return nil, fmt.Errorf("kernels: no unit %q", unit)
			}
			var err error
			if m, err = k.Ctx.LoadModule(images[unit]); err != nil {
				return nil, fmt.Errorf("kernels: loading %s on a GPU of compute capability %.1f "+
					"(at least 8.0 is required): %w", unit, float64(k.Info.Capability())/10, err)
			}
			k.modules[unit] = m
		}
		fn, err := k.Ctx.Function(m, name)
		if err != nil {
			return nil, fmt.Errorf("kernels: %s: %w", unit, err)
		}
		f = &kernel{Function: fn, shared: 47 << 10, resident: map[[3]int]int{}}
		k.kernels[key{unit, name}] = f
	}

	if c.Shared > f.shared {
		if err := k.Ctx.AllowShared(f.Function, c.Shared); err != nil {
			return nil, fmt.Errorf("kernels: %s with %d bytes of shared memory: %w", name, c.Shared,
				err)
		}
		f.shared = c.Shared
	}

	if c.MaxShared && !f.maxShared {
		if err := k.Ctx.PreferShared(f.Function); err != nil {
			return nil, fmt.Errorf("kernels: %s: %w", name, err)
		}
		f.maxShared = true
	}

	return f, nil
}

// Queue enqueues launches on a stream, one after another. After the first error it enqueues nothing
// more.
type Queue struct {
	*Set
	Stream gpu.Stream
	Err    error // the first error
}

// Run enqueues a kernel. If the grid has no blocks, it does nothing.
func (q *Queue) Run(unit, name string, c gpu.LaunchConfig, args ...any) {
	if q.Err == nil && c.Grid.X > 0 {
		q.Err = q.enqueue(unit, name, c, args)
	}
}

func (q *Queue) enqueue(unit, name string, c gpu.LaunchConfig, args []any) error {
	if c.Grid.X > math.MaxInt32 || max(c.Grid.Y, c.Grid.Z) > math.MaxUint16 {
		return fmt.Errorf("kernels: %s: a grid of %v blocks is too large for one launch", name,
			c.Grid)
	}

	c.Overlap = c.Overlap && q.Info.Overlaps() // see overlap.cuh
	var a gpu.Args
	if err := add(&a, args...); err != nil {
		return fmt.Errorf("kernels: %s: %w", name, err)
	}

	f, err := q.function(unit, name, c)
	if err != nil {
		return err
	}

	return q.Ctx.Launch(f.Function, c, q.Stream, &a)
}

// RunAll enqueues a kernel with as many blocks or clusters as can run at once.
func (q *Queue) RunAll(unit, name string, c gpu.LaunchConfig, args ...any) {
	c.Grid.X *= q.Resident(unit, name, c)
	q.Run(unit, name, c, args...)
}

// Resident returns the number of blocks or clusters of a launch that can run at once on the whole
// GPU. It is the grid size for persistent kernels.
func (q *Queue) Resident(unit, name string, c gpu.LaunchConfig) (n int) {
	if q.Err == nil {
		n, q.Err = q.resident(unit, name, c)
	}
	return n
}

// Fill sets memory to a byte.
func (q *Queue) Fill(p gpu.Ptr, with uint8, bytes int) {
	if q.Err == nil {
		q.Err = q.Ctx.Memset8(p, with, bytes, q.Stream)
	}
}

// Poison fills memory that the copy engine is about to write with NaN, if gpu.Poison is set.
func (q *Queue) Poison(p gpu.Ptr, bytes int) {
	if gpu.Poison {
		q.Fill(p, 0xff, bytes)
	}
}

// Tiled returns the descriptor of a tensor, for kernels that move its tiles with the copy engine.
func (q *Queue) Tiled(t gpu.TiledTensor) (m gpu.TensorMap) {
	if q.Err == nil {
		m, q.Err = q.Ctx.EncodeTiled(t)
	}
	return m
}

// Carve allocates consecutive pieces of a workspace, each aligned to 256 bytes. Starting from null,
// it computes the size of the workspace.
type Carve struct{ At gpu.Ptr }

// Take returns the next piece.
func (c *Carve) Take(bytes int) gpu.Ptr {
	p := c.At
	c.At = p.Offset(CeilDiv(bytes, 256) * 256)
	return p
}

func (k *Set) resident(unit, name string, c gpu.LaunchConfig) (int, error) {
	f, err := k.function(unit, name, c)
	if err != nil {
		return 0, err
	}

	k.mu.Lock()
	defer k.mu.Unlock()
	key := [3]int{c.Block.Count(), c.Shared, c.Cluster.Count()}
	if f.resident[key] == 0 {
		n, err := k.Ctx.Resident(f.Function, c)
		if err != nil {
			return 0, err
		}
		f.resident[key] = max(n, 1)
	}

	return f.resident[key], nil
}

// Grid returns a launch of x by y blocks with across by down threads each.
func Grid(x, y, across, down int) gpu.LaunchConfig {
	return gpu.LaunchConfig{Grid: gpu.Dim{X: x, Y: y}, Block: gpu.Dim{X: across, Y: down}}
}

// Line returns a one-dimensional launch.
func Line(blocks, threads int) gpu.LaunchConfig { return Grid(blocks, 1, threads, 1) }

// Cover returns a one-dimensional launch with enough blocks for n items if a block takes `each`
// items.
func Cover(n, each, threads int) gpu.LaunchConfig { return Line(CeilDiv(n, each), threads) }

// Vector returns the number of elements in 16 bytes.
func Vector(t gpu.DType) int { return 16 / t.Size() }

// Aligned reports whether all addresses are multiples of 16. A null address is.
func Aligned(ps ...gpu.Ptr) bool {
	var all gpu.Ptr
	for _, p := range ps {
		all |= p
	}
	return all%16 == 0
}

// Packed reports whether rows of n elements at these addresses can be moved 16 bytes at a time.
func Packed(t gpu.DType, n int, ps ...gpu.Ptr) bool { return n%Vector(t) == 0 && Aligned(ps...) }

// RowThreads returns the number of threads for a block that processes a row of d elements: whole
// warps, at most 512 threads.
func RowThreads(d int) int { return min(512, CeilDiv(d, 32)*32) }

// LongRowThreads returns the number of threads for a block that loops over a row of n elements as
// in rows.cuh. These are whole warps, at most 512 threads, and few enough for four accesses each.
func LongRowThreads(n int, t gpu.DType) int { return min(512, CeilDiv(n, 4*32*Vector(t))*32) }

func CeilDiv(a, b int) int { return (a + b - 1) / b }

// Suffix returns the suffix that names a kernel's storage types, which may be float32, float16 or
// bfloat16. For example, _bf16_f32 names the types of a result and an argument.
func Suffix(types ...gpu.DType) (s string) {
	for _, t := range types {
		s += "_" + strings.Replace(t.String(), "float", "f", 1)
	}
	return s
}

func Bit(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// Alloc allocates device memory, which the owner of the Alloc frees.
type Alloc func(bytes int) (gpu.Ptr, error)

// Upload copies tables to consecutive pieces of memory and returns their addresses.
func Upload(ctx gpu.Context, alloc Alloc, tables ...[]byte) (at []gpu.Ptr, err error) {
	var c Carve
	for _, b := range tables {
		at = append(at, c.Take(len(b)))
	}

	p, err := alloc(int(c.At))
	if err != nil {
		return nil, err
	}

	all := make([]byte, c.At)
	for i, b := range tables {
		copy(all[at[i]:], b)
		at[i] += p
	}

	return at, errors.Join(ctx.CopyToDevice(p, all, 0), ctx.SyncStream(0))
}

// Rows is a matrix in device memory with Stride elements from the start of one row to the next. A
// row may be shorter than Stride.
type Rows struct {
	Ptr    gpu.Ptr
	Stride int
}

// With returns the words, preceded by a space, if a condition holds.
func With(holds bool, words string) string {
	if holds {
		return " " + words
	}
	return ""
}

// Launch is implemented by the launches of all families.
type Launch interface{ Launch(q *Queue) }

// Launch enqueues a launch, which must implement [Launch].
func (k *Set) Launch(s gpu.Stream, params any) error {
	l, ok := params.(Launch)
	if !ok {
		return fmt.Errorf("kernels: %T is not a launch", params)
	}
	q := &Queue{Set: k, Stream: s}
	l.Launch(q)
	return q.Err
}

// Variants returns the variants that accept a launch, presumably fastest first. It is empty for a
// launch without variants.
func (k *Set) Variants(params any) []Variant {
	if c, ok := params.(interface{ Variants(*Set) []Variant }); ok {
		return c.Variants(k)
	}
	return nil
}

// Variant is one of several implementations of an op: a family of kernels and, if that can be
// chosen, a size such as the number of warps or blocks. The zero Variant selects the presumably
// fastest one.
type Variant struct {
	Family string
	Size   int
}

func (w Variant) String() string {
	if w.Size == 0 {
		return w.Family
	}
	return fmt.Sprintf("%s-%d", w.Family, w.Size)
}

// Tuned is implemented by launches with a variant that is chosen by timing. Tuning returns the name
// of the op and the shape under which the choice is stored. A pointer to the launch also has a
// method SetVariant that sets the chosen variant.
type Tuned interface{ Tuning() (op, shape string) }

// Workspaced is implemented by pointers to launches that need scratch memory.
type Workspaced interface {
	// WorkspaceBytes returns the size of the memory on a device.
	WorkspaceBytes(d gpu.DeviceInfo) int
	// WorkspaceField returns the field that takes its address.
	WorkspaceField() *gpu.Ptr
}
