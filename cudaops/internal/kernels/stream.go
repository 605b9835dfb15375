package kernels

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// KasminaStream is a kernel that stays on the GPU and computes Y = X + α(t(X) − X), without figures, for one batch after the
// other, as they are submitted: that takes no launch. See stream.cu. It ends when it has seen no new batch for some time,
// whatever has become of the program, and the next batch starts it again. Its methods may be called from several goroutines.
//
// While it runs, calls that wait for the whole GPU wait for it: allocating and freeing memory, loading kernels.
type KasminaStream struct {
	k      *Kernels
	stream gpu.Stream
	layer  KasminaLayer
	name   string
	grid   int
	ring   ringShape
	idle   time.Duration

	pinned  []byte // control, entries, done
	control *streamControl
	entries []streamEntry
	done    []uint64
	device  gpu.Ptr
	gates   gpu.Ptr

	mu      sync.Mutex
	running bool
	closed  bool
	starts  int
}

// KasminaStreamConfig is how a stream works.
type KasminaStreamConfig struct {
	Depth  int           // batches on their way at most
	Idle   time.Duration // without a new batch, after which the kernel ends
	Blocks int           // a multiprocessor: what they do not take is left for other kernels
}

// streamControl is Control of stream.cu.
type streamControl struct {
	head, stop      uint64
	_               [6]uint64
	consumed, ended uint64
	_               [6]uint64
}

// streamEntry is Entry of stream.cu.
type streamEntry struct{ x, y gpu.Ptr }

// ringShape is how the grid is divided among batches.
type ringShape struct{ depth, tiles, parts, teams int }

const (
	streamThreads = 256
	streamRows    = 8 // of a thread, of one batch, where there are so many blocks
)

// NewKasminaStream prepares a stream for batches of a layer's shape; its X is not used. The strict mode has no stream.
func (k *Kernels) NewKasminaStream(s gpu.Stream, l KasminaLayer, c KasminaStreamConfig) (_ *KasminaStream, err error) {
	suf, empty, err := l.check("KasminaStream", KasminaExact)
	switch {
	case err != nil:
		return nil, err
	case empty:
		return nil, fmt.Errorf("kernels.KasminaStream: nothing to do for %d rows of %d seeds of %d columns", l.Rows, l.State.Seeds, l.Chunk)
	case l.Stability == KasminaStrict:
		return nil, errors.New("kernels.KasminaStream: the strict stability mode is not for streams")
	case c.Depth < 1 || c.Idle <= 0 || c.Blocks < 1:
		return nil, fmt.Errorf("kernels.KasminaStream: %+v, want a depth, an idle time and blocks above 0", c)
	}
	st := &KasminaStream{k: k, stream: s, layer: l, name: "kasmina_stream_single" + suf, ring: ringShape{depth: c.Depth}, idle: c.Idle}
	d, perThread := l.State.Seeds*l.Chunk, 1
	if l.Chunk == 4 && d%vector(l.Type) == 0 {
		st.name, perThread = "kasmina_stream_quad"+suf, vector(l.Type)
	}
	resident, err := k.resident("stream", st.name, streamThreads, 0)
	if err != nil {
		return nil, err
	}
	if err := st.divide(min(resident, c.Blocks*k.sms)-1, ceilDiv(d, perThread*streamThreads)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, st.free())
		}
	}()
	return st, st.allocate(perThread == 1)
}

// divide deals so many blocks out to teams, each of which covers a batch.
func (st *KasminaStream) divide(blocks, tiles int) error {
	if blocks < tiles {
		return fmt.Errorf("kernels.KasminaStream: rows of %d columns take %d blocks, and %d fit the GPU",
			st.layer.State.Seeds*st.layer.Chunk, tiles, blocks)
	}
	r := &st.ring
	r.tiles = tiles
	r.parts = min(ceilDiv(st.layer.Rows, streamRows), blocks/tiles)
	r.teams = min(blocks/(r.tiles*r.parts), r.depth)
	st.grid = r.teams*r.tiles*r.parts + 1
	return nil
}

// The device's part of the ring: published, closing, copies, left, bad.
func (st *KasminaStream) copies() gpu.Ptr { return st.device.Offset(16) }
func (st *KasminaStream) left() gpu.Ptr   { return st.copies().Offset(16 * st.ring.depth) }
func (st *KasminaStream) bad() gpu.Ptr    { return st.left().Offset(4 * st.ring.depth) }

func (st *KasminaStream) allocate(gates bool) (err error) {
	ctx, depth := st.k.ctx, st.ring.depth
	control := int(unsafe.Sizeof(streamControl{}))
	if st.pinned, err = ctx.AllocHost(control + (16+8)*depth); err != nil {
		return err
	}
	clear(st.pinned)
	st.control = (*streamControl)(unsafe.Pointer(&st.pinned[0]))
	st.entries = unsafe.Slice((*streamEntry)(unsafe.Pointer(&st.pinned[control])), depth)
	st.done = gpu.View[uint64](st.pinned[control+16*depth:])
	if st.device, err = ctx.Alloc(16 + (16+4)*depth + 8); err != nil {
		return err
	}
	if err := ctx.Memset8(st.bad(), 0, 4, st.stream); err != nil {
		return err
	}
	if !gates {
		return nil
	}
	if st.gates, err = ctx.Alloc(8 * st.layer.State.Slots); err != nil {
		return err
	}
	a := args().Ptr(st.gates).Ptr(st.layer.Weights).Int32(st.layer.State.Slots).Int32(st.layer.Chunk)
	return st.k.launch(st.stream, "kasmina", "kasmina_softmax", line(ceilDiv(st.layer.State.Slots, 8), 256), a)
}

// start launches the kernel, which begins with the batch of that number. The stream is idle.
func (st *KasminaStream) start(first uint64) error {
	ctx, r := st.k.ctx, st.ring
	atomic.StoreUint64(&st.control.ended, 0)
	if err := ctx.Memset8(st.device, 0, 16+(16+4)*r.depth, st.stream); err != nil {
		return err
	}
	address := func(p unsafe.Pointer) gpu.Ptr { return gpu.Ptr(uintptr(p)) } // pinned memory has one for host and device
	ring := args().Ptr(address(unsafe.Pointer(st.control))).Ptr(address(unsafe.Pointer(&st.entries[0]))).
		Ptr(address(unsafe.Pointer(&st.done[0]))).Ptr(st.device).Ptr(st.copies()).Ptr(st.left()).Uint64(first).Uint64(uint64(st.idle.Nanoseconds())).
		Int32(r.depth).Int32(r.tiles).Int32(r.parts)
	packed := append(ring.Packed(), 0, 0, 0, 0) // to a multiple of 8, as C has it
	a := args().Struct(st.layer.bytes(st.gates, false), 8).Struct(packed, 8).Ptr(st.bad())
	c := line(st.grid, streamThreads)
	c.Cooperative = true // all blocks at once, or an error
	err := st.k.launch(st.stream, "stream", st.name, c, a)
	st.running = err == nil
	st.starts++
	return err
}

// Submit hands over a batch, X and Y [Rows, Seeds·Chunk] in device or pinned memory, aligned to 16 bytes, and returns its
// number. It waits while as many are on their way as the stream is deep.
func (st *KasminaStream) Submit(x, y gpu.Ptr) (uint64, error) {
	if !aligned(x, y) {
		return 0, errors.New("kernels.KasminaStream: a batch is not aligned to 16 bytes")
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed {
		return 0, errors.New("kernels.KasminaStream: the stream is closed")
	}
	k := st.control.head
	if depth := uint64(st.ring.depth); k >= depth {
		if err := st.wait(k - depth); err != nil {
			return 0, err
		}
	}
	st.entries[k%uint64(st.ring.depth)] = streamEntry{x, y}
	atomic.StoreUint64(&st.control.head, k+1)
	err := st.revive()
	if err != nil && st.control.consumed <= k { // the kernel has ended without it
		atomic.StoreUint64(&st.control.head, k)
	}
	return k, err
}

// Wait returns when a batch's Y is there.
func (st *KasminaStream) Wait(k uint64) error {
	if st.isDone(k) { // which needs no lock
		return nil
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if k >= st.control.head {
		return fmt.Errorf("kernels.KasminaStream: batch %d of %d", k, st.control.head)
	}
	if st.closed {
		return errors.New("kernels.KasminaStream: the stream is closed")
	}
	return st.wait(k)
}

func (st *KasminaStream) isDone(k uint64) bool {
	return atomic.LoadUint64(&st.done[k%uint64(st.ring.depth)]) > k
}

// wait is Wait for one who holds the lock. Now and then it asks whether the GPU is still there.
func (st *KasminaStream) wait(k uint64) error {
	const often = 1 << 12
	for i := 1; !st.isDone(k); i++ {
		if err := st.revive(); err != nil {
			return err
		}
		if i%often != 0 {
			continue
		}
		done, err := st.k.ctx.StreamDone(st.stream)
		if err != nil {
			return err
		}
		if done && !st.isDone(k) && atomic.LoadUint64(&st.control.ended) == 0 {
			return errors.New("kernels.KasminaStream: the kernel is gone, and has not said why")
		}
		runtime.Gosched()
	}
	return nil
}

// revive starts the kernel, at first or again, if it does not run and there are batches left for it.
func (st *KasminaStream) revive() error {
	if st.running {
		if atomic.LoadUint64(&st.control.ended) == 0 {
			return nil
		}
		if err := st.k.ctx.SyncStream(st.stream); err != nil {
			return err
		}
		st.running = false
	}
	if from := st.control.consumed; from < st.control.head {
		return st.start(from)
	}
	return nil
}

// Running reports whether the kernel has not ended.
func (st *KasminaStream) Running() (bool, error) {
	done, err := st.k.ctx.StreamDone(st.stream)
	return !done, err
}

// Starts is how often the kernel was started.
func (st *KasminaStream) Starts() int {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.starts
}

// Close lets the batches that were submitted be computed, ends the kernel, and returns how many of their elements were NaN or
// infinite.
func (st *KasminaStream) Close() (bad int, err error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed {
		return 0, nil
	}
	st.closed = true
	if head := st.control.head; head > 0 {
		err = st.wait(head - 1)
	}
	atomic.StoreUint64(&st.control.stop, 1)
	counted := make([]uint32, 1)
	err = errors.Join(err, st.k.ctx.SyncStream(st.stream))
	if err == nil {
		err = st.k.ctx.CopyToHost(gpu.Bytes(counted), st.bad(), st.stream)
	}
	return int(counted[0]), errors.Join(err, st.free())
}

func (st *KasminaStream) free() error {
	ctx := st.k.ctx
	var errs []error
	for _, p := range []gpu.Ptr{st.device, st.gates} {
		if p != 0 {
			errs = append(errs, ctx.Free(p))
		}
	}
	if st.pinned != nil {
		errs = append(errs, ctx.FreeHost(st.pinned))
	}
	return errors.Join(errs...)
}
