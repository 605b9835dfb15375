// Package stream is the host side of the persistent kernel that computes Kasmina layers for a sequence of
// small batches; see kernel/kasmina/kasmina_stream.cu.
//
// A [Kernel] announces batches in a ring in pinned memory. It launches the kernel when there is a batch
// and no kernel runs, because it has not been launched yet, has seen no batch for a while, or was stopped.
package stream

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// Launcher launches kernels.
type Launcher interface {
	Launch(s gpu.Stream, params any) error
}

// Config describes a stream. X and Y point to Depth batches, BatchBytes apart (see [kasmina.Stream]), in
// device memory or in pinned memory.
type Config struct {
	Layers []kasmina.Layer
	Depth  int           // batches in flight at most
	Idle   time.Duration // the kernel ends after this time without a new batch
	X, Y   gpu.Ptr
}

// Kernel is a kernel that remains on the GPU between batches. It is not safe for concurrent use.
type Kernel struct {
	ctx      gpu.Context
	launcher Launcher
	stream   gpu.Stream
	ended    gpu.Event // recorded after each launch

	launch  kasmina.Stream
	memory  gpu.Ptr
	pinned  []byte
	control *kasmina.StreamControl
	entries []uint64
	done    []uint64
	figures []float32
	counts  []uint32

	phase    phase
	next     uint64 // number of the next batch
	launches int
	polls    int
	failure  error
}

// New allocates the memory of a stream. Work on the given stream of the device precedes the kernel.
func New(ctx gpu.Context, l Launcher, s gpu.Stream, c Config) (_ *Kernel, err error) {
	k := &Kernel{ctx: ctx, launcher: l, stream: s, launch: kasmina.Stream{Layers: c.Layers,
		Depth: c.Depth, Idle: c.Idle, X: c.X, Y: c.Y}}
	if c.Depth < 1 || c.Idle <= 0 {
		return nil, fmt.Errorf("stream: depth %d and idle time %v, want more than 0", c.Depth, c.Idle)
	}

	if err := k.launch.Check(ctx.Device()); err != nil {
		return nil, fmt.Errorf("stream: %w", err)
	}

	defer func() {
		if err != nil {
			err = errors.Join(err, k.release())
		}
	}()

	if err := k.allocate(); err != nil {
		return nil, err
	}

	k.ended, err = ctx.NewEvent(false)
	return k, err
}

// allocate allocates the device memory, and the pinned memory that the host and the kernel share.
func (k *Kernel) allocate() (err error) {
	depth, seeds := k.launch.Depth, k.launch.Seeds()
	sizes := []int{int(unsafe.Sizeof(kasmina.StreamControl{})), 8 * depth, 8 * depth,
		4 * kasmina.ForwardFigures * seeds * depth, 4 * seeds * depth}
	at := make([]int, len(sizes)+1)
	for i, n := range sizes {
		at[i+1] = at[i] + (n+127)/128*128 // parts share no cache lines
	}

	if k.pinned, err = k.ctx.AllocHost(at[len(sizes)]); err != nil {
		return err
	}

	clear(k.pinned)
	part := func(i int) []byte { return k.pinned[at[i]:][:sizes[i]] }
	k.control = (*kasmina.StreamControl)(unsafe.Pointer(&k.pinned[0]))
	k.entries, k.done = gpu.View[uint64](part(1)), gpu.View[uint64](part(2))
	k.figures, k.counts = gpu.View[float32](part(3)), gpu.View[uint32](part(4))

	base, err := k.ctx.PinnedAddress(k.pinned)
	if err != nil {
		return err
	}

	l := &k.launch
	l.Control, l.Entries, l.Done = base, base.Offset(at[1]), base.Offset(at[2])
	l.Figures, l.Counts = base.Offset(at[3]), base.Offset(at[4])
	k.memory, err = k.ctx.Alloc(l.MemoryBytes(k.ctx.Device()))
	l.Memory = k.memory
	return err
}

// place returns the place of a batch in the ring.
func (k *Kernel) place(batch uint64) int { return int(batch % uint64(k.launch.Depth)) }

// Next returns the number of the next batch.
func (k *Kernel) Next() uint64 { return k.next }

// Launches returns how often the kernel was launched.
func (k *Kernel) Launches() int { return k.launches }

// usable returns an error if the kernel can compute no more batches.
func (k *Kernel) usable() error {
	switch k.phase {
	case failed:
		return k.failure
	case closed:
		return errors.New("stream: the kernel is closed")
	}
	return nil
}

// failedWith records an error of the device.
func (k *Kernel) failedWith(err error) error {
	var device *gpu.Error
	if errors.As(err, &device) && device.Sticky() {
		k.failure = err
		k.phase.on(fail)
	}
	return err
}

// Submit announces the next batch and returns its number. X must be written, and the place in the ring must
// be free: the previous batch there must be done, and its results must have been read. After an error the
// batch is not announced.
func (k *Kernel) Submit(watched bool) (uint64, error) {
	if err := k.usable(); err != nil {
		return 0, err
	}

	batch, entry := k.next, &k.entries[k.place(k.next)]
	atomic.StoreUint64(entry, kasmina.Word(batch, watched))
	k.next++
	if err := k.revive(); err != nil {
		// No kernel runs that could have seen the batch.
		atomic.StoreUint64(entry, 0)
		k.next--
		return 0, err
	}

	return batch, nil
}

// revive launches the kernel if none runs and there are batches left.
func (k *Kernel) revive() error {
	if k.phase == running {
		if atomic.LoadUint64(&k.control.Ended) == 0 {
			return nil
		}
		k.phase.on(end)
		k.launch.First = k.control.Consumed
	}

	if k.launch.First >= k.next {
		return nil
	}

	// The stream orders this launch after the end of the previous one.
	atomic.StoreUint64(&k.control.Ended, 0)
	if err := k.launcher.Launch(k.stream, k.launch); err != nil {
		return k.failedWith(err)
	}

	k.phase.on(launch)
	k.launches++
	if err := k.ctx.Record(k.ended, k.stream); err != nil {
		k.failure = err // the kernel runs, but nothing would reveal that it fails
		k.phase.on(fail)
		return err
	}

	return nil
}

// spins is the number of times that Wait polls before it lets other goroutines run.
const spins = 100

// pollsPerCheck is the number of unsuccessful polls between checks that the kernel is still running.
const pollsPerCheck = 1 << 10

// Done reports whether a batch is done. It returns an error if the batch can never complete.
func (k *Kernel) Done(batch uint64) (bool, error) {
	if atomic.LoadUint64(&k.done[k.place(batch)])>>1 >= batch+1 {
		return true, nil
	}

	if err := k.usable(); err != nil {
		return false, err
	}

	if err := k.revive(); err != nil {
		return false, err
	}

	if k.polls++; k.polls%pollsPerCheck != 0 {
		return false, nil
	}

	gone, err := k.ctx.EventDone(k.ended)
	if err != nil {
		return false, k.failedWith(err)
	}

	if gone && atomic.LoadUint64(&k.control.Ended) == 0 {
		k.failure = errors.New("stream: the kernel has ended unexpectedly")
		k.phase.on(fail)
		return false, k.failure
	}

	return false, nil
}

// Figures returns the figures of a layer in a batch that is done and was watched: [ForwardFigures, Seeds].
// They are valid until the batch's place is used again.
func (k *Kernel) Figures(batch uint64, layer int) []float32 {
	seeds := k.launch.Layers[layer].State.Seeds
	at := k.place(batch)*k.launch.Seeds() + k.firstSeed(layer)
	return k.figures[kasmina.ForwardFigures*at:][:kasmina.ForwardFigures*seeds]
}

// Counts returns the numbers of NaN and Inf elements, for each seed of a layer, in a batch that is done. It
// returns nil if no layer has found any.
func (k *Kernel) Counts(batch uint64, layer int) []uint32 {
	if atomic.LoadUint64(&k.done[k.place(batch)])&1 == 0 {
		return nil
	}
	at := k.place(batch)*k.launch.Seeds() + k.firstSeed(layer)
	return k.counts[at:][:k.launch.Layers[layer].State.Seeds]
}

// firstSeed returns the number of the layer's first seed among the seeds of all layers.
func (k *Kernel) firstSeed(layer int) (n int) {
	for _, l := range k.launch.Layers[:layer] {
		n += l.State.Seeds
	}
	return n
}

// Stop waits until all batches are done, and ends the kernel. It may then be given other work on its
// stream, such as changes of its layers. The next batch launches it again. If ctx ends first, Stop returns
// its cause, and the kernel keeps running.
func (k *Kernel) Stop(ctx context.Context) error {
	if k.phase == failed || k.phase == closed {
		return nil
	}

	for batch := k.next - min(k.next, uint64(k.launch.Depth)); batch < k.next; batch++ {
		if err := k.Wait(ctx, batch); err != nil {
			return err
		}
	}

	if k.phase == stopped {
		return nil
	}

	entry := &k.entries[k.place(k.next)]
	atomic.StoreUint64(entry, kasmina.StopWord(k.next))
	if err := k.ctx.SyncStream(k.stream); err != nil {
		return k.failedWith(err)
	}

	atomic.StoreUint64(entry, 0)
	return k.revive()
}

// Wait waits until a batch is done. If ctx ends first, it returns its cause.
func (k *Kernel) Wait(ctx context.Context, batch uint64) error {
	for i := 1; ; i++ {
		if done, err := k.Done(batch); done || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if i%spins == 0 {
			runtime.Gosched()
		}
	}
}

// Close stops the kernel and frees its memory. After an error it waits until the kernel has ended by
// itself.
func (k *Kernel) Close() error {
	if k.phase == closed {
		return nil
	}

	err := k.Stop(context.Background())
	k.phase.on(closing)
	return run.Joined(err, k.ctx.SyncStream(k.stream), k.release())
}

func (k *Kernel) release() error {
	var errs []error
	if k.ended != 0 {
		errs = append(errs, k.ctx.DestroyEvent(k.ended))
	}
	errs = append(errs, k.ctx.Free(k.memory))
	if k.pinned != nil {
		errs = append(errs, k.ctx.FreeHost(k.pinned))
	}
	return run.Joined(errs...)
}
