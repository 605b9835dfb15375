// Package kernel is what the families of CUDA kernels, a folder each, have in common. That is the
// Set that loads and launches them, their variants and their binaries. A launch is a structure of its
// family. It has device pointers and sizes, chooses the variant that fits the type, shape and
// alignment, and enqueues it. It returns before the work is done. It refuses sizes and types that
// no kernel takes; pointers are the caller's business.
//
// Numbers are stored as float32, float16 or bfloat16 and computed with as float32. The same inputs
// give the same bits on every run on one model of GPU.
package kernel

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Set is the kernels loaded into a context. It may be used by several goroutines at once.
type Set struct {
	Ctx  gpu.Context
	Info gpu.DeviceInfo

	mu      sync.Mutex
	modules map[string]gpu.Module // by unit; a unit is loaded when its first kernel is asked for
	kernels map[key]*kernel
}

type key struct{ unit, name string }

// kernel is a function, and what launching it needs to know.
type kernel struct {
	*gpu.Function
	shared int // the dynamic shared memory that it may have
	// blocks or clusters on the whole GPU at once, by threads and shared memory
	resident map[[2]int]int
}

// New returns the kernels for a context.
func New(ctx gpu.Context) *Set {
	return &Set{Ctx: ctx, Info: ctx.Device(), modules: map[string]gpu.Module{},
		kernels: map[key]*kernel{}}
}

// Close unloads them. No kernel may be running.
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

// function finds a unit's function, loading the unit at first, and allows it the dynamic shared
// memory, where that is more than needs no leave: 48 KiB together with what the kernel itself
// declares, which is less than 1 KiB.
func (k *Set) function(unit, name string, shared int) (*kernel, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.kernels[key{unit, name}]
	if f == nil {
		m, ok := k.modules[unit]
		if !ok {
			images, _ := units()
			if images[unit] == nil {
				return nil, fmt.Errorf("kernels: there is no unit %q", unit)
			}
			var err error
			if m, err = k.Ctx.LoadModule(images[unit]); err != nil {
				return nil, fmt.Errorf("kernels: loading %s on a GPU of compute capability %.1f "+
					"(8.0 is the least): %w", unit, float64(k.Info.Capability())/10, err)
			}
			k.modules[unit] = m
		}
		fn, err := k.Ctx.Function(m, name)
		if err != nil {
			return nil, fmt.Errorf("kernels: %s: %w", unit, err)
		}
		f = &kernel{fn, 47 << 10, map[[2]int]int{}}
		k.kernels[key{unit, name}] = f
	}

	if shared > f.shared {
		if err := k.Ctx.AllowShared(f.Function, shared); err != nil {
			return nil, fmt.Errorf("kernels: %s with %d bytes of shared memory: %w", name, shared,
				err)
		}
		f.shared = shared
	}

	return f, nil
}

// Queue is launches that go to a stream one after the other. Once something has failed, nothing
// more is enqueued.
type Queue struct {
	*Set
	Stream gpu.Stream
	Err    error // what has failed
}

// Run enqueues a kernel. A grid without blocks is nothing to do.
func (q *Queue) Run(unit, name string, c gpu.LaunchConfig, args ...any) {
	if q.Err == nil && c.Grid.X > 0 {
		q.Err = q.enqueue(unit, name, c, args)
	}
}

func (q *Queue) enqueue(unit, name string, c gpu.LaunchConfig, args []any) error {
	if c.Grid.X > math.MaxInt32 || max(c.Grid.Y, c.Grid.Z) > math.MaxUint16 {
		return fmt.Errorf("kernels: %s: a grid of %v blocks is more than one launch can have", name,
			c.Grid)
	}

	// The binaries of compute capability 9.0 and 10 have such a kernel wait for the one ahead of it
	// (overlap.cuh), the PTX that other GPUs run does not.
	capability := q.Info.Capability()
	c.Overlap = c.Overlap && (capability == 90 || capability/10 == 10)
	var a gpu.Args
	if err := add(&a, args...); err != nil {
		return fmt.Errorf("kernels: %s: %w", name, err)
	}

	f, err := q.function(unit, name, c.Shared)
	if err != nil {
		return err
	}

	return q.Ctx.Launch(f.Function, c, q.Stream, &a)
}

// RunAll enqueues a kernel whose blocks or clusters are as many as run at once.
func (q *Queue) RunAll(unit, name string, c gpu.LaunchConfig, args ...any) {
	c.Grid.X *= q.Resident(unit, name, c)
	q.Run(unit, name, c, args...)
}

// Resident is how many blocks of a launch run at once on the whole GPU, or clusters where it has
// these: the grid of a kernel that works in a loop.
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

// Poison fills with NaN what the copy engine is about to store for a kernel, where gpu.Poison asks
// for that.
func (q *Queue) Poison(p gpu.Ptr, bytes int) {
	if gpu.Poison {
		q.Fill(p, 0xff, bytes)
	}
}

// Tiled is the descriptor of a tensor of which the copy engine moves tiles.
func (q *Queue) Tiled(t gpu.TiledTensor) (m gpu.TensorMap) {
	if q.Err == nil {
		m, q.Err = q.Ctx.EncodeTiled(t)
	}
	return m
}

// Carve hands out pieces of a workspace one behind the other, each aligned to 256 bytes. From null
// on it counts the bytes that they take.
type Carve struct{ At gpu.Ptr }

// Take is the next piece.
func (c *Carve) Take(bytes int) gpu.Ptr {
	p := c.At
	c.At = p.Offset(CeilDiv(bytes, 256) * 256)
	return p
}

func (k *Set) resident(unit, name string, c gpu.LaunchConfig) (int, error) {
	f, err := k.function(unit, name, c.Shared)
	if err != nil {
		return 0, err
	}

	k.mu.Lock()
	defer k.mu.Unlock()
	key := [2]int{c.Block.Count(), c.Shared}
	if f.resident[key] == 0 {
		n, err := k.Ctx.Resident(f.Function, c)
		if err != nil {
			return 0, err
		}
		f.resident[key] = max(n, 1)
	}

	return f.resident[key], nil
}

// Grid is a launch of so many blocks in x and in y, of threads across and down.
func Grid(x, y, across, down int) gpu.LaunchConfig {
	return gpu.LaunchConfig{Grid: gpu.Dim{X: x, Y: y}, Block: gpu.Dim{X: across, Y: down}}
}

// Line is a one-dimensional launch.
func Line(blocks, threads int) gpu.LaunchConfig { return Grid(blocks, 1, threads, 1) }

// Cover is a line of blocks of threads, of which each block takes so many of n.
func Cover(n, each, threads int) gpu.LaunchConfig { return Line(CeilDiv(n, each), threads) }

// Vector is how many elements fill 16 bytes.
func Vector(t gpu.DType) int { return 16 / t.Size() }

// Aligned reports whether all addresses are multiples of 16; null is.
func Aligned(ps ...gpu.Ptr) bool {
	var all gpu.Ptr
	for _, p := range ps {
		all |= p
	}
	return all%16 == 0
}

// Packed reports whether rows of n elements at these addresses can be moved 16 bytes at a time.
func Packed(t gpu.DType, n int, ps ...gpu.Ptr) bool { return n%Vector(t) == 0 && Aligned(ps...) }

// RowThreads is the threads of a block that works on a row of d elements: whole warps, at most 512.
func RowThreads(d int) int { return min(512, CeilDiv(d, 32)*32) }

// LongRowThreads is the threads of a block that goes over a row of n elements as rows.cuh does.
// They are whole warps, at most 512, with four accesses each where the row is short.
func LongRowThreads(n int, t gpu.DType) int { return min(512, CeilDiv(n, 4*32*Vector(t))*32) }

func CeilDiv(a, b int) int { return (a + b - 1) / b }

// Suffix is how kernels end that are for some storage types, of which there are float32, float16
// and bfloat16: _bf16_f32 for a result and an argument.
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

// Alloc takes device memory, which its owner gives back.
type Alloc func(bytes int) (gpu.Ptr, error)

// Upload puts tables into memory, one behind the other, and returns where each is.
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

// Rows is a matrix in device memory: Stride elements from one row to the next, of which the first
// few count.
type Rows struct {
	Ptr    gpu.Ptr
	Stride int
}

// With is some words where they hold.
func With(holds bool, words string) string {
	if holds {
		return " " + words
	}
	return ""
}

// Launch is a structure that says what a kernel is to do.
type Launch interface{ Launch(q *Queue) }

// Launch enqueues what a structure says.
func (k *Set) Launch(s gpu.Stream, params any) error {
	l, ok := params.(Launch)
	if !ok {
		return fmt.Errorf("kernels: there is no launch of a %T", params)
	}
	q := &Queue{Set: k, Stream: s}
	l.Launch(q)
	return q.Err
}

// Variants lists the variants that take a launch, the one that should be fastest first. It is empty where
// there is nothing to choose.
func (k *Set) Variants(params any) []Variant {
	if c, ok := params.(interface{ Variants(*Set) []Variant }); ok {
		return c.Variants(k)
	}
	return nil
}

// Variant is one of the implementations of an op: a family of kernels. Where that can be chosen it also
// says how many warps or blocks work. The zero Variant is the one that should be fastest.
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

// Tuned is implemented by launches whose variant is chosen by timing. Tuning returns the name of the op
// and the shape by which the choice is known. The pointer to the launch also has SetWay, which sets
// the variant that was chosen.
type Tuned interface{ Tuning() (op, shape string) }

// Workspaced is implemented by pointers to launches that need scratch memory.
type Workspaced interface {
	// WorkspaceBytes returns the size of the memory on a device.
	WorkspaceBytes(d gpu.DeviceInfo) int
	// WorkspaceField returns the field that takes its address.
	WorkspaceField() *gpu.Ptr
}
