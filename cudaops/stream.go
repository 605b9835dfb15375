package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/plan"
	"github.com/kasmina-go/kasmina/op"
)

// StreamConfig is how a [Stream] works. Zero values are the defaults.
type StreamConfig struct {
	Depth  int           // batches on their way at most; 64
	Idle   time.Duration // without a new batch, after which the kernel leaves the GPU; 20 ms
	Blocks int           // of 256 threads a multiprocessor at most, so that other kernels find room; 2
	// Way is how batches are computed: persistent, by a kernel that stays, launches, by one launch each, or "" for the one that
	// should be faster.
	Way string
}

// The ways of a stream, and the bytes of a batch up to which a launch takes longer than its work.
const (
	persistentWay = "persistent"
	launchesWay   = "launches"
	streamBytes   = 8 << 20
)

// Stream computes a Kasmina layer for inference over many small batches: y = x + α(t(x) − x), without telemetry. Batches lie in
// pinned memory, which the GPU reads and writes without copies, and small ones are computed by a kernel that stays on the GPU
// and takes them from a queue, which takes no launch. The kernel ends when the stream is closed and when it has seen no batch
// for a while, whatever has become of the program; the next batch starts it again. While it runs, what waits for the whole GPU
// (allocating memory, loading kernels) waits for it, for the idle time at most.
//
// The layer is as it was when the stream was opened or last refreshed. Its methods may be called from several goroutines.
type Stream struct {
	device *Device
	op     *op.KasminaOp
	inputs gorgonia.Nodes
	config StreamConfig
	k      *kernels.Kernels
	layer  kernels.KasminaLayer
	stream gpu.Stream
	memory gpu.Ptr
	pinned []byte // x and y of every slot
	staged []byte // state, weights, scales
	bad    gpu.Ptr
	work   gpu.Ptr

	mu        sync.Mutex
	kernel    *kernels.KasminaStream
	events    []gpu.Event // with launches: of each slot
	waiting   []bool      // slots whose batch nobody has waited for
	submitted uint64
	first     uint64 // the number of the kernel's batch 0
	loaded    bool   // no error of the device has kept the last refresh from being made
	nonFinite int
	closed    bool
}

// OpenStream opens a stream for a node of [op.Kasmina], whose shape is that of a batch, and whose weights and scales have
// values. Blueprints with capacity and the strict stability mode have no stream. The caller closes it, before the device.
func OpenStream(d *Device, layer *gorgonia.Node, c StreamConfig) (_ *Stream, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("cudaops.OpenStream: %w", err)
		}
	}()
	if d == nil || layer == nil {
		return nil, errors.New("device or layer is nil")
	}
	if d.ctx == nil {
		return nil, errNotOpened
	}
	o, ok := layer.Op().(*op.KasminaOp)
	if !ok {
		return nil, fmt.Errorf("%s is no Kasmina layer", describe(layer))
	}
	c.Depth, c.Idle, c.Blocks = cmp.Or(c.Depth, 64), cmp.Or(c.Idle, 20*time.Millisecond), cmp.Or(c.Blocks, 2)
	if c.Depth < 1 || c.Idle < 0 || c.Blocks < 1 || c.Way != "" && c.Way != persistentWay && c.Way != launchesWay {
		return nil, fmt.Errorf("the configuration is %+v, want a depth, idle time and blocks above 0, and the way persistent, "+
			"launches or none", c)
	}
	x, w := o.InputShape(0), o.InputShape(1)
	if o.Config.Stability == op.Strict || w[1] > o.Chunk() {
		return nil, fmt.Errorf("%v: the strict stability mode and slots of %d weights for chunks of %d features have no stream",
			o, w[1], o.Chunk())
	}
	s := &Stream{device: d, op: o, inputs: opbase.Children(layer), config: c, k: kernels.New(d.ctx), loaded: true}
	s.layer = (&kasminaLayer{op: o, rows: x[0], chunk: o.Chunk(), counts: make([]uint32, kasminaHealth*o.Lattice.Seeds())}).shape()
	if s.config.Way == "" {
		s.config.Way = launchesWay
		if 2*4*s.size() <= streamBytes {
			s.config.Way = persistentWay
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release())
		}
	}()
	if err := s.allocate(); err != nil {
		return nil, err
	}
	if err := s.encode(); err != nil {
		return nil, err
	}
	if err := s.load(); err != nil {
		return nil, err
	}
	return s, nil
}

// size is the elements of a batch.
func (s *Stream) size() int { return s.layer.Rows * s.layer.State.Seeds * s.layer.Chunk }

func (s *Stream) allocate() (err error) {
	ctx, l := s.device.ctx, &s.layer
	if s.stream, err = ctx.NewStream(); err != nil {
		return err
	}
	weights, scales := plan.Align(l.State.Bytes(), alignment), plan.Align(4*l.State.Slots*l.Chunk, alignment)
	if s.staged, err = ctx.AllocHost(weights + scales + 4*l.State.Slots); err != nil {
		return err
	}
	if s.pinned, err = ctx.AllocHost(s.config.Depth * 2 * s.slotBytes()); err != nil {
		return err
	}
	work := s.k.KasminaForwardWorkspace(*l)
	bad, counts := plan.Align(len(s.staged), alignment), plan.Align(4*l.State.Seeds, alignment)
	if s.memory, err = ctx.Alloc(bad + counts + work); err != nil {
		return err
	}
	l.State.Ptr = s.memory
	l.Weights = s.memory.Offset(weights)
	l.Scales = l.Weights.Offset(scales)
	s.bad = s.memory.Offset(bad)
	s.work = s.bad.Offset(counts)
	s.waiting = make([]bool, s.config.Depth)
	if s.config.Way == launchesWay {
		s.events = make([]gpu.Event, s.config.Depth)
		for i := range s.events {
			if s.events[i], err = ctx.NewEvent(false); err != nil {
				return err
			}
		}
	}
	return ctx.Memset32(s.bad, 0, l.State.Seeds, s.stream)
}

// encode writes the layer as it is to s.staged.
func (s *Stream) encode() error {
	l := &s.layer
	pass := s.op.NewPass()
	pass.Begin()
	var mixes error
	err := l.State.Encode(s.staged, func(i int) kernels.KasminaSeed {
		p := pass.Seed(i)
		k := kernels.KasminaSeed{Kind: uint8(p.Kind), Slot: p.Slot, Blend: p.Blend, Alpha: p.Alpha}
		if k.Blend && k.Mixes() {
			mixes = fmt.Errorf("seed %d has a blueprint with capacity, which has no stream", i)
		}
		return k
	})
	if err = cmp.Or(mixes, err); err != nil {
		return err
	}
	at := plan.Align(l.State.Bytes(), alignment)
	for i, n := range []int{l.State.Slots * l.Chunk, l.State.Slots} {
		v := s.inputs[1+i].Value()
		if v == nil {
			return fmt.Errorf("%s has no value: bind one with gorgonia.Let", describe(s.inputs[1+i]))
		}
		if err := encode(s.staged[at:], float32s, v, n); err != nil {
			return fmt.Errorf("%s: %w", describe(s.inputs[1+i]), err)
		}
		at += plan.Align(4*n, alignment)
	}
	return nil
}

// load sends what encode has written, and prepares the kernel that stays.
func (s *Stream) load() (err error) {
	ctx := s.device.ctx
	if err := errors.Join(ctx.CopyToDevice(s.memory, s.staged, s.stream), ctx.SyncStream(s.stream)); err != nil {
		return err
	}
	if s.config.Way == persistentWay {
		s.first = s.submitted
		c := kernels.KasminaStreamConfig{Depth: s.config.Depth, Idle: s.config.Idle, Blocks: s.config.Blocks}
		s.kernel, err = s.k.NewKasminaStream(s.stream, s.layer, c)
	}
	return err
}

// slotBytes is the memory of an x or a y.
func (s *Stream) slotBytes() int { return (4*s.size() + alignment - 1) / alignment * alignment }

// slot returns the memory of a batch's x and y, as the host sees it and as the device does.
func (s *Stream) slot(batch uint64) (x, y []float32, xAt, yAt gpu.Ptr) {
	i, n := int(batch%uint64(s.config.Depth)), s.slotBytes()
	b := s.pinned[2*i*n:][:2*n]
	at := gpu.Ptr(uintptr(unsafe.Pointer(&b[0]))) // pinned memory has one address for both
	return gpu.View[float32](b)[:s.size()], gpu.View[float32](b[n:])[:s.size()], at, at.Offset(n)
}

// Submit hands over a batch, rows × features in row-major order, and returns its number for [Stream.Wait], which must be called
// once for each. It is an error to have more on their way than the stream is deep.
func (s *Stream) Submit(x []float32) (batch uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(x) != s.size() {
		return 0, fmt.Errorf("cudaops.Stream.Submit: the batch has %d elements, want %d", len(x), s.size())
	}
	batch = s.submitted
	i := batch % uint64(s.config.Depth)
	switch {
	case s.closed:
		return 0, errors.New("cudaops.Stream.Submit: the stream is closed")
	case !s.loaded:
		return 0, errors.New("cudaops.Stream.Submit: the last refresh failed: refresh again")
	case s.waiting[i]:
		return 0, fmt.Errorf("cudaops.Stream.Submit: the stream is %d deep, and batch %d has not been waited for", s.config.Depth,
			batch-uint64(s.config.Depth))
	}
	to, _, xAt, yAt := s.slot(batch)
	copy(to, x)
	if s.kernel != nil {
		_, err = s.kernel.Submit(xAt, yAt)
	} else {
		f := kernels.KasminaForward{KasminaLayer: s.layer, Y: yAt, Bad: s.bad, Workspace: s.work}
		f.X = xAt
		err = cmp.Or(s.k.KasminaForward(s.stream, f), s.device.ctx.Record(s.events[i], s.stream))
	}
	if err != nil {
		return 0, fmt.Errorf("cudaops.Stream.Submit: %w", err)
	}
	s.waiting[i] = true
	s.submitted++
	return batch, nil
}

// Wait waits for a batch and copies its result to y.
func (s *Stream) Wait(batch uint64, y []float32) error {
	if err := s.wait(batch, y); err != nil {
		return fmt.Errorf("cudaops.Stream.Wait: %w", err)
	}
	return nil
}

func (s *Stream) wait(batch uint64, y []float32) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := batch % uint64(s.config.Depth)
	switch {
	case s.closed:
		return errors.New("the stream is closed")
	case len(y) != s.size():
		return fmt.Errorf("the result has room for %d elements, want %d", len(y), s.size())
	case batch >= s.submitted || s.submitted-batch > uint64(s.config.Depth) || !s.waiting[i]:
		return fmt.Errorf("batch %d was not submitted, or has been waited for", batch)
	}
	if s.kernel != nil {
		err = s.kernel.Wait(batch - s.first)
	} else {
		err = s.device.ctx.SyncEvent(s.events[i])
	}
	if err != nil {
		return err
	}
	_, from, _, _ := s.slot(batch)
	copy(y, from)
	s.waiting[i] = false
	return nil
}

// Refresh takes over the layer as it is now: lattice, weights and scales. No batch may be on its way. What a stream does not compute
// is an error that leaves it as it was; after an error of the device it takes no batch before another Refresh.
func (s *Stream) Refresh() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errors.New("cudaops.Stream.Refresh: the stream is closed")
	}
	for i, waiting := range s.waiting {
		if waiting {
			return fmt.Errorf("cudaops.Stream.Refresh: the batch in slot %d has not been waited for", i)
		}
	}
	err := s.encode()
	if err == nil {
		err = errors.Join(s.end(), s.load())
		s.loaded = err == nil
	}
	if err != nil {
		return fmt.Errorf("cudaops.Stream.Refresh: %w", err)
	}
	return nil
}

// end ends the kernel and counts what it has counted.
func (s *Stream) end() error {
	if s.kernel == nil {
		return nil
	}
	k := s.kernel
	s.kernel = nil
	n, err := k.Close()
	s.nonFinite += n
	return err
}

// Way is how batches are computed: persistent or launches.
func (s *Stream) Way() string { return s.config.Way }

// Close lets the batches on their way be computed, ends the kernel and gives back the memory. If any input was NaN or infinite
// it says how many were, wrapping [op.ErrNonFinite].
func (s *Stream) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	err := s.end()
	if s.config.Way == launchesWay && err == nil {
		counts := make([]uint32, s.layer.State.Seeds)
		err = errors.Join(s.device.ctx.CopyToHost(gpu.Bytes(counts), s.bad, s.stream), s.device.ctx.SyncStream(s.stream))
		for _, n := range counts {
			s.nonFinite += int(n)
		}
	}
	if s.nonFinite > 0 && err == nil {
		err = fmt.Errorf("%w: %d elements", op.ErrNonFinite, s.nonFinite)
	}
	if err := errors.Join(err, s.release()); err != nil {
		return fmt.Errorf("cudaops.Stream.Close: %w", err)
	}
	return nil
}

func (s *Stream) release() error {
	ctx := s.device.ctx
	var errs []error
	for _, e := range s.events {
		if e != 0 {
			errs = append(errs, ctx.DestroyEvent(e))
		}
	}
	if s.memory != 0 {
		errs = append(errs, ctx.Free(s.memory))
	}
	for _, b := range [][]byte{s.pinned, s.staged} {
		if b != nil {
			errs = append(errs, ctx.FreeHost(b))
		}
	}
	if s.stream != 0 {
		errs = append(errs, ctx.DestroyStream(s.stream))
	}
	return errors.Join(append(errs, s.k.Close())...)
}
