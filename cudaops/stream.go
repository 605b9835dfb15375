package cudaops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime"
	"slices"
	"sync"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op"
)

// ErrStreamFull is returned by [Stream.Submit] if the maximum number of batches is in flight. Call Wait
// for the oldest batch first.
var ErrStreamFull = errors.New("the stream is full")

// ErrStreamClosed is returned by the methods of a closed [Stream].
var ErrStreamClosed = errors.New("the stream is closed")

// StreamMode selects how a [Stream] computes batches.
type StreamMode uint8

const (
	// StreamAuto uses the persistent kernel if it supports the batch and is expected to be faster than
	// launches.
	StreamAuto StreamMode = iota
	// StreamPersistent uses the persistent kernel even for large batches. Submit returns an error if the
	// kernel does not support the batch.
	StreamPersistent
	// StreamLaunches never uses the persistent kernel.
	StreamLaunches
)

var streamModeNames = []string{"StreamAuto", "StreamPersistent", "StreamLaunches"}

// String returns the mode's name.
func (m StreamMode) String() string { return enum.Name(m, "StreamMode", streamModeNames) }

// StreamOptions configures a [Stream]. Zero values select the defaults.
type StreamOptions struct {
	// Depth is the maximum number of batches that may be submitted before the oldest one is waited for.
	// The default is 16.
	Depth int
	// Idle is the time without a new batch after which the persistent kernel ends. The next batch
	// launches the kernel again. The default is 20 ms.
	Idle time.Duration
	// Precision is the type of the layers' values on a GPU: Float32 (the default), BFloat16 or Float16. A
	// CPU always computes in float32.
	Precision Precision
	Mode      StreamMode
}

// Stream computes a chain of Kasmina layers, forward only, for one small batch after another.
//
// On a GPU, a persistent kernel computes the batches. It takes them from a ring buffer in pinned memory
// and reports completions there, so that a batch needs no launch. The kernel ends when the stream is
// closed, and also when it has received no batch for a while ([StreamOptions].Idle), even if the program
// hangs. While batches keep arriving, it occupies most of the GPU, and other work there has to wait.
//
// If the persistent kernel cannot compute a batch, a [Machine] does, with launches and later with a
// captured graph. Without a GPU, a cpuops.Machine computes all batches. On a GPU, outputs and telemetry
// are bit-identical either way. [Stream.Fallback] returns the reason for a fallback. The persistent
// kernel requires
//   - at most 16 layers, none of them in strict mode,
//   - chunks of the same kind in all layers: chunks of 4 features, chunks that are a multiple of 16 bytes,
//     or chunks of any other size,
//   - only the kinds Residual, AttentionGate, MLPExpansion and ConvFilter,
//   - telemetry that is off or reduced exactly, without histograms ([state.Telemetry]),
//   - batches of at most 4 MiB in the stream's precision, unless the mode is StreamPersistent, and
//   - room for all blocks of the kernel on the GPU.
//
// A batch sees the lattices as of its [Stream.Submit]: a change of a stage, α or slot takes effect with
// the next batch submitted, and batches in flight are not affected. Weights and scales are copied when the
// stream is made and by [Stream.Refresh]. The stream never changes the nodes' values. Telemetry arrives in
// the lattices in the order of batches, at the latest when [Stream.Wait] returns.
//
// The methods of a Stream may be called from several goroutines.
type Stream struct {
	device  *Device // nil to compute on a CPU
	options StreamOptions
	chain   *streamChain

	mu         sync.Mutex
	places     []streamPlace
	submitted  uint64            // batches so far
	recorded   uint64            // batches with telemetry in the lattices
	persistent *persistentStream // nil until first needed
	computer   streamComputer    // for other batches; nil until first needed
	unfit      error             // why the persistent kernel can compute no batch of this stream
	fallback   error             // why it did not compute the last batch
	closed     bool
}

// streamPlace is a batch in flight.
type streamPlace struct {
	busy        bool
	batch       uint64
	persistent  bool
	kernelBatch uint64            // its number among the batches of the persistent kernel
	passes      []*op.KasminaPass // one for each layer
	y           []float32         // the result, unless persistent is set
	err         error
}

// largestStreamBatch is the limit, in bytes, for the persistent kernel in the mode StreamAuto. It is the
// largest size that has been measured; see docs/lab/stream.md.
const largestStreamBatch = 4 << 20

// NewStream returns a stream that computes y, the result of one or more layers made with [op.Kasmina], one
// applied to the result of the other. The input of the first layer becomes the input of the stream. The
// weights and scales of all layers must have float32 values.
//
// If d is nil, the stream computes on a CPU, so that the same program runs with and without a GPU. The
// caller must close the stream, before the device.
func NewStream(d *Device, y *gorgonia.Node, o StreamOptions) (_ *Stream, err error) {
	defer annotate("NewStream", &err)
	o.Depth, o.Idle = cmp.Or(o.Depth, 16), cmp.Or(o.Idle, 20*time.Millisecond)
	switch {
	case o.Depth < 1:
		return nil, fmt.Errorf("the depth is %d, want at least 1", o.Depth)
	case o.Idle < 0:
		return nil, fmt.Errorf("the idle time is %v, want more than 0", o.Idle)
	case o.Precision > Float16:
		return nil, fmt.Errorf("the precision is %v, want Float32, BFloat16 or Float16", o.Precision)
	case int(o.Mode) >= len(streamModeNames):
		return nil, fmt.Errorf("the mode is %d, want StreamAuto, StreamPersistent or StreamLaunches",
			o.Mode)
	case d == nil && o.Mode == StreamPersistent:
		return nil, fmt.Errorf("the mode is StreamPersistent and the device is nil: %w", ErrNoDevice)
	}

	chain, err := newStreamChain(y)
	if err != nil {
		return nil, err
	}

	s := &Stream{device: d, options: o, chain: chain, places: make([]streamPlace, o.Depth)}
	for i := range s.places {
		for _, l := range chain.layers {
			s.places[i].passes = append(s.places[i].passes, l.op.NewPass())
		}
	}

	if s.unfit = s.persistentFits(); s.unfit != nil && o.Mode == StreamPersistent {
		return nil, s.unfit
	}

	s.fallback = s.unfit
	return s, nil
}

// persistentFits returns an error that says why the persistent kernel can compute no batch, or nil.
func (s *Stream) persistentFits() error {
	switch bytes := s.chain.elements() * storedAs[s.options.Precision].Size(); {
	case s.device == nil:
		return ErrNoDevice
	case s.options.Mode == StreamLaunches:
		return errors.New("the mode is StreamLaunches")
	case s.options.Mode == StreamAuto && bytes > largestStreamBatch:
		return fmt.Errorf("a batch has %d bytes, more than %d", bytes, largestStreamBatch)
	}
	return s.chain.launch(s.options).Check(s.device.info)
}

// Rows returns the number of rows of a batch.
func (s *Stream) Rows() int { return s.chain.x.Shape()[0] }

// Features returns the number of features of a row.
func (s *Stream) Features() int { return s.chain.x.Shape()[1] }

// Fallback returns nil if the persistent kernel computed the last batch, and otherwise an error with the
// reason. Without a GPU, the error wraps [ErrNoDevice]. Before the first batch, it says whether the kernel
// can be used at all.
func (s *Stream) Fallback() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fallback
}

// Submit passes a batch to the stream and returns its number for [Stream.Wait], which must be called once
// for each batch. x contains rows × features numbers in row-major order and may be reused at once.
//
// If the persistent kernel computes the batch, Submit returns without waiting for the result. Before
// submitting, it waits for the batches in flight if a lattice has changed, or if those batches are
// computed by a different method. A batch computed without the persistent kernel is complete when Submit
// returns.
//
// If the stream is full, the error wraps [ErrStreamFull]. If ctx is canceled, Submit returns
// context.Cause(ctx). After an error, the batch has not been submitted.
func (s *Stream) Submit(ctx context.Context, x []float32) (batch uint64, err error) {
	defer annotate("Stream.Submit", &err)
	s.mu.Lock()
	defer s.mu.Unlock()

	p := &s.places[s.submitted%uint64(len(s.places))]
	switch {
	case s.closed:
		return 0, ErrStreamClosed
	case len(x) != s.chain.elements():
		return 0, fmt.Errorf("the batch has %d elements, want %d rows of %d", len(x), s.Rows(),
			s.Features())
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case p.busy:
		return 0, fmt.Errorf("%w: wait for batch %d first", ErrStreamFull, p.batch)
	}

	p.batch, p.err, p.persistent = s.submitted, nil, false
	fallback, err := s.submit(ctx, p, x)
	if err != nil {
		return 0, err
	}

	p.busy, s.fallback = true, fallback
	s.submitted++
	if !p.persistent {
		s.recorded = s.submitted // the machine has recorded the telemetry
	}

	return p.batch, nil
}

// submit computes a batch, or passes it to the persistent kernel. It returns the reason if it does not use
// that kernel.
func (s *Stream) submit(ctx context.Context, p *streamPlace, x []float32) (fallback, err error) {
	ahead := int(s.submitted - s.recorded)
	for _, pass := range p.passes {
		if pass.Current() {
			continue
		}
		pass.BeginAhead(ahead)
		if err := pass.Attached(); err != nil {
			return nil, err
		}
	}

	fallback = s.unfit
	if fallback == nil {
		fallback, err = s.submitPersistent(ctx, p, x)
	}
	if err != nil || fallback == nil {
		return nil, err
	}

	if s.options.Mode == StreamPersistent {
		return nil, fallback
	}

	// Wait for earlier batches: the machine needs room on the GPU, and telemetry must be recorded in
	// order.
	if err := s.record(ctx, s.submitted); err != nil {
		return nil, err
	}

	if err := s.persistent.stop(ctx); err != nil {
		return nil, err
	}

	if s.computer == nil {
		if s.computer, err = s.newComputer(); err != nil {
			return nil, err
		}
	}

	for i, l := range s.chain.layers {
		if err := l.start(p.passes[i]); err != nil {
			return nil, fmt.Errorf("layer %d: %w", i, err)
		}
	}

	p.y = slices.Grow(p.y[:0], len(x))[:len(x)]
	copy(s.chain.input, x)
	return fallback, s.computer.compute(ctx, p.y)
}

// record waits for all batches before the given one and passes their telemetry to the lattices.
func (s *Stream) record(ctx context.Context, before uint64) error {
	for ; s.recorded < before; s.recorded++ {
		p := &s.places[s.recorded%uint64(len(s.places))]
		if err := s.persistent.kernel.Wait(ctx, p.kernelBatch); err != nil {
			return err
		}
		p.err = s.persistent.record(p)
	}
	return nil
}

// spins is the number of times that Wait polls before it lets other goroutines run.
const spins = 100

// Wait waits for a batch and copies its result to y, which must have room for rows × features numbers. It
// also waits for all batches submitted before.
//
// If a layer made with [op.StopOnNonFinite] has met NaN or Inf in the batch, the error wraps
// [op.ErrNonFinite]. If ctx is canceled, Wait returns context.Cause(ctx); the batch continues, and Wait
// can be called again.
func (s *Stream) Wait(ctx context.Context, batch uint64, y []float32) (err error) {
	defer annotate("Stream.Wait", &err)
	for i := 1; ; i++ {
		done, err := s.tryWait(batch, y)
		if done || err != nil {
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

// tryWait is like Wait, but it does not block.
func (s *Stream) tryWait(batch uint64, y []float32) (done bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	p := &s.places[batch%uint64(len(s.places))]
	switch {
	case s.closed:
		return false, ErrStreamClosed
	case len(y) != s.chain.elements():
		return false, fmt.Errorf("the result has room for %d elements, want %d rows of %d", len(y),
			s.Rows(), s.Features())
	case !p.busy || p.batch != batch:
		return false, fmt.Errorf("batch %d has not been submitted, or has been waited for", batch)
	}

	for ; s.recorded <= batch; s.recorded++ {
		q := &s.places[s.recorded%uint64(len(s.places))]
		if done, err := s.persistent.kernel.Done(q.kernelBatch); err != nil || !done {
			return false, s.device.withName(err)
		}
		q.err = s.persistent.record(q)
	}

	if p.persistent {
		s.persistent.result(y, p.kernelBatch)
	} else {
		copy(y, p.y)
	}

	p.busy = false
	return true, p.err
}

// Run computes a single batch: it submits x, waits, and copies the result to y. x and y may be the same
// slice. If ctx is canceled while the batch is in flight, its result is discarded.
func (s *Stream) Run(ctx context.Context, x, y []float32) error {
	batch, err := s.Submit(ctx, x)
	if err != nil {
		return err
	}
	if err = s.Wait(ctx, batch, y); err != nil {
		s.discard(batch)
	}
	return err
}

// discard drops the result of a batch and frees its place.
func (s *Stream) discard(batch uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.places[batch%uint64(len(s.places))]
	if s.closed || !p.busy || p.batch != batch {
		return
	}

	// The next call reports any error of the device.
	if s.record(context.Background(), batch+1) == nil {
		p.busy = false
	}
}

// Process computes a sequence of batches and yields their results in the same order. It keeps up to
// [StreamOptions].Depth batches in flight, so it takes several batches from the sequence before it yields
// the first result. Use [Stream.Run] if a batch depends on the result of the one before.
//
// A result is valid until the next one is yielded. If a batch fails or ctx is canceled, Process yields the
// error and ends.
func (s *Stream) Process(ctx context.Context, batches iter.Seq[[]float32]) iter.Seq2[[]float32, error] {
	return func(yield func([]float32, error) bool) {
		var flying []uint64
		defer func() {
			for _, batch := range flying {
				s.discard(batch)
			}
		}()

		y := make([]float32, s.chain.elements())
		next := func() bool {
			if err := s.Wait(ctx, flying[0], y); err != nil {
				yield(nil, err)
				return false
			}
			flying = flying[1:]
			return yield(y, nil)
		}

		for x := range batches {
			if len(flying) == len(s.places) && !next() {
				return
			}
			batch, err := s.Submit(ctx, x)
			if err != nil {
				yield(nil, err)
				return
			}
			flying = append(flying, batch)
		}

		for len(flying) > 0 && next() {
		}
	}
}

// Refresh makes the stream use the current values of the weights and scales, from the next batch on. It
// waits for the batches in flight. Lattices need no Refresh.
func (s *Stream) Refresh(ctx context.Context) (err error) {
	defer annotate("Stream.Refresh", &err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrStreamClosed
	}

	if err := s.record(ctx, s.submitted); err != nil {
		return err
	}

	if err := s.chain.refresh(); err != nil {
		return err
	}

	if s.persistent != nil {
		s.persistent.sent = false
	}
	return nil
}

// Close waits for the batches in flight, passes their telemetry to the lattices, ends the kernel and frees
// the memory. Further calls return ErrStreamClosed. A second Close does nothing.
func (s *Stream) Close() (err error) {
	defer annotate("Stream.Close", &err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}

	s.closed = true
	errs := []error{s.record(context.Background(), s.submitted), s.persistent.close()}
	if s.computer != nil {
		errs = append(errs, s.computer.close())
	}

	return run.Joined(errs...)
}

// streamComputer computes batches one at a time.
type streamComputer interface {
	// compute computes the chain's input and copies the result to y.
	compute(ctx context.Context, y []float32) error
	close() error
}

// streamChain is a copy of the layers in a separate graph, with copies of their weights and scales. If a
// slot in the user's graph has not been written, its copy starts as the identity.
type streamChain struct {
	graph  *gorgonia.ExprGraph
	x, y   *gorgonia.Node
	input  []float32 // the value of x
	layers []*streamLayer
}

type streamLayer struct {
	op              *op.KasminaOp
	sources         [2]*gorgonia.Node // weights and scales of the user's graph
	weights, scales []float32         // the copies
}

// elements returns the number of elements of a batch.
func (c *streamChain) elements() int { return len(c.input) }

// newStreamChain copies the layers that end with y.
func newStreamChain(y *gorgonia.Node) (*streamChain, error) {
	var nodes gorgonia.Nodes // from the last layer to the first
	for n := y; n != nil; n = graph.Children(n)[0] {
		if o, ok := n.Op().(*op.KasminaOp); !ok || o.Replaying {
			break
		}
		nodes = append(nodes, n)
	}

	switch {
	case y == nil:
		return nil, errors.New("the node is nil")
	case len(nodes) == 0:
		return nil, fmt.Errorf("%s is not a Kasmina layer: make one with op.Kasmina", graph.Describe(y))
	case y.Dtype() != gorgonia.Float32:
		return nil, fmt.Errorf("%s has type %v, want float32", graph.Describe(y), y.Dtype())
	}

	slices.Reverse(nodes)
	c := &streamChain{graph: gorgonia.NewGraph(), input: make([]float32, y.Shape().TotalSize())}
	c.x = gorgonia.NewMatrix(c.graph, gorgonia.Float32, gorgonia.WithName("input of the stream"),
		gorgonia.WithShape(y.Shape()...), gorgonia.WithValue(tensorOver(c.input, y.Shape())))
	c.y = c.x
	copies := map[*gorgonia.Node]*gorgonia.Node{}
	for _, n := range nodes {
		if err := c.add(n, copies); err != nil {
			return nil, err
		}
	}

	return c, c.refresh()
}

// add applies a copy of a layer to the result so far. Layers that share weights also share the copies.
func (c *streamChain) add(n *gorgonia.Node, copies map[*gorgonia.Node]*gorgonia.Node) (err error) {
	l := &streamLayer{sources: [2]*gorgonia.Node(graph.Children(n)[1:3])}
	for i, source := range l.sources {
		if copies[source] == nil {
			value := tensorOver(make([]float32, source.Shape().TotalSize()), source.Shape())
			copies[source] = gorgonia.NewTensor(c.graph, gorgonia.Float32, source.Shape().Dims(),
				gorgonia.WithName(source.Name()), gorgonia.WithShape(source.Shape()...),
				gorgonia.WithValue(value))
		}
		elements := copies[source].Value().Data().([]float32)
		if i == 0 {
			l.weights = elements
		} else {
			l.scales = elements
		}
	}

	original := n.Op().(*op.KasminaOp)
	if c.y, err = op.Kasmina(c.y, copies[l.sources[0]], copies[l.sources[1]], original.Lattice,
		func(config *op.KasminaConfig) error {
			*config = original.Config
			return nil
		}); err != nil {
		return err
	}

	l.op = c.y.Op().(*op.KasminaOp)
	c.layers = append(c.layers, l)
	return nil
}
