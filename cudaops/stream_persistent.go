package cudaops

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	kasminakernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/cudaops/internal/stream"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/params"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// persistentStream computes batches of a [Stream] by a kernel that stays on the GPU. A nil persistentStream
// has nothing in flight.
type persistentStream struct {
	device *Device
	chain  *streamChain
	stream gpu.Stream
	kernel *stream.Kernel
	dtype  gpu.DType

	batches []byte // pinned; x of every place in the ring, and then y
	staging []byte // pinned; copy of the contents of memory
	memory  gpu.Ptr
	layers  []kasminakernel.Layer // with their addresses in memory
	encoded [][]byte              // states of the lattices

	sent      bool         // memory is up to date, or blocked is set
	snapshots []state.Pass // the lattices as of the last upload
	revisions []uint64     // revisions of the lattices as of the last upload
	blocked   error        // why the kernel cannot compute these snapshots; nil if it can
}

// refresh copies the values of the weights and scales.
func (c *streamChain) refresh() error {
	for _, l := range c.layers {
		for i, to := range [][]float32{l.weights, l.scales} {
			source := l.sources[i]
			if source.Value() == nil {
				return fmt.Errorf("%s has no value: bind one with gorgonia.Let", graph.Describe(source))
			}
			memory, err := params.Memory(source.Value())
			if err != nil {
				return fmt.Errorf("%s: its value %w", graph.Describe(source), err)
			}
			from, ok := memory.([]float32)
			if !ok || len(from) != len(to) {
				return fmt.Errorf("%s has a value of type %v and shape %v", graph.Describe(source),
					source.Value().Dtype(), source.Value().Shape())
			}
			copy(to, from)
		}
	}
	return nil
}

// tensorOver returns a tensor over the given elements.
func tensorOver(x []float32, shape tensor.Shape) *tensor.Dense {
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
}

// launch returns the chain's kernel without addresses.
func (c *streamChain) launch(o StreamOptions) kasminakernel.Stream {
	s := kasminakernel.Stream{Depth: o.Depth}
	for _, l := range c.layers {
		weights := l.sources[0].Shape()
		s.Layers = append(s.Layers, kasminakernel.Layer{
			State: kasminakernel.State{Seeds: l.op.Lattice.Seeds(), Slots: weights[0]},
			Rows:  c.x.Shape()[0], Chunk: l.op.Chunk(), Width: l.op.Chunk(), Eps: l.op.Config.Epsilon,
			Stability: seed.Stability(l.op.Config.Stability), Type: storedAs[o.Precision]})
	}
	return s
}

// newPersistentStream allocates the memory of a stream.
func newPersistentStream(d *Device, c *streamChain, o StreamOptions) (_ *persistentStream, err error) {
	launch := c.launch(o)
	p := &persistentStream{device: d, chain: c, dtype: storedAs[o.Precision], layers: launch.Layers,
		snapshots: make([]state.Pass, len(c.layers)), revisions: make([]uint64, len(c.layers))}
	defer func() {
		if err != nil {
			err = run.Joined(err, p.close())
		}
	}()

	if p.stream, err = d.ctx.NewStream(false); err != nil {
		return nil, err
	}

	var size kernel.Carve
	place := func(base gpu.Ptr) {
		size = kernel.Carve{At: base}
		for i := range p.layers {
			l := &p.layers[i]
			l.State.Ptr = size.Take(l.State.Bytes())
			l.Weights = size.Take(4 * l.State.Slots * l.Chunk)
			l.Scales = size.Take(4 * l.State.Slots)
		}
	}
	place(0)
	if p.staging, err = d.ctx.AllocHost(int(size.At)); err != nil {
		return nil, err
	}

	if p.memory, err = d.ctx.Alloc(int(size.At)); err != nil {
		return nil, err
	}

	place(p.memory)
	for _, l := range p.layers {
		p.encoded = append(p.encoded, gpu.Bytes(make([]uint32, l.State.Bytes()/4)))
	}

	half := launch.BatchBytes() * o.Depth
	if p.batches, err = d.ctx.AllocHost(2 * half); err != nil {
		return nil, err
	}

	x, err := d.ctx.PinnedAddress(p.batches)
	if err != nil {
		return nil, err
	}

	p.kernel, err = stream.New(d.ctx, d.kernels, p.stream, stream.Config{Layers: p.layers,
		Depth: o.Depth, Idle: o.Idle, X: x, Y: x.Offset(half)})
	return p, err
}

// submitPersistent passes a batch to the persistent kernel, or returns the reason why the kernel cannot
// compute it.
func (s *Stream) submitPersistent(ctx context.Context, p *streamPlace, x []float32) (
	fallback, err error) {
	watched := false
	for i, pass := range p.passes {
		t := pass.Snapshot().Telemetry
		switch {
		case !pass.Measures():
			continue
		case t.Mode == state.Debug:
			return fmt.Errorf("layer %d: the telemetry includes histograms", i), nil
		case seed.Reduction(t.Reduction) != seed.Exact:
			return fmt.Errorf("layer %d: the telemetry is reduced by the %v", i, t.Reduction), nil
		}
		watched = true
	}

	if s.persistent == nil {
		made, err := newPersistentStream(s.device, s.chain, s.options)
		if errors.Is(err, gpu.OutOfMemory) {
			s.unfit = s.device.withName(err)
			return s.unfit, nil
		}
		if err != nil {
			return nil, s.device.withName(err)
		}
		s.persistent = made
	}

	if fallback, err = s.persistent.update(ctx, p.passes); fallback != nil || err != nil {
		return fallback, err
	}

	p.kernelBatch, err = s.persistent.submit(x, watched)
	if errors.Is(err, gpu.CooperativeTooLarge) {
		s.unfit = s.device.withName(err)
		return s.unfit, nil
	}

	p.persistent = err == nil
	return nil, s.device.withName(err)
}

// update makes the kernel compute with the given snapshots from the next batch on. It returns an error as
// fallback if the kernel cannot compute them.
func (p *persistentStream) update(ctx context.Context, passes []*op.KasminaPass) (fallback, err error) {
	same := p.sent
	for i, pass := range passes {
		s := pass.Snapshot()
		unchanged := !s.Record && p.revisions[i] == pass.Revision() // without telemetry there is no α noise
		same = same && (unchanged || sameSeeds(&p.snapshots[i], s))
	}

	if same {
		return p.blocked, nil
	}

	p.sent = false
	p.blocked = nil
	for i, pass := range passes {
		fallback, err := p.encode(i, pass)
		if err != nil {
			return nil, fmt.Errorf("layer %d: %w", i, err)
		}
		if fallback != nil && p.blocked == nil {
			p.blocked = fmt.Errorf("layer %d: %w", i, fallback)
		}
	}

	if p.blocked == nil {
		if err := p.kernel.Stop(ctx); err != nil {
			return nil, err
		}
		if err := p.upload(); err != nil {
			return nil, p.device.withName(err)
		}
	}

	for i, pass := range passes {
		keepSeeds(&p.snapshots[i], pass.Snapshot())
		p.revisions[i] = pass.Revision()
	}

	p.sent = true
	return p.blocked, nil
}

// sameSeeds reports whether two snapshots agree in everything that outputs depend on.
func sameSeeds(a, b *state.Pass) bool {
	return slices.Equal(a.Stage, b.Stage) && slices.Equal(a.Slot, b.Slot) &&
		slices.Equal(a.Kind, b.Kind) && slices.Equal(a.Alpha, b.Alpha)
}

// keepSeeds copies what sameSeeds compares.
func keepSeeds(dst, src *state.Pass) {
	dst.Stage, dst.Slot = append(dst.Stage[:0], src.Stage...), append(dst.Slot[:0], src.Slot...)
	dst.Kind, dst.Alpha = append(dst.Kind[:0], src.Kind...), append(dst.Alpha[:0], src.Alpha...)
}

// start writes the identity start to unwritten slots of the copies, as the op would. A machine that
// computes with the copies cannot do that, because it does not expect Refresh.
func (l *streamLayer) start(pass *op.KasminaPass) error {
	s, width := pass.Snapshot(), l.width()
	for i, stage := range s.Stage {
		slot := int(s.Slot[i])
		if slot == 0 || slot >= len(l.scales) || l.scales[slot] != 0 || !stage.Blends() && !stage.Learns() {
			continue
		}
		if _, err := l.op.Start(s.Kind[i], i, slot, l.weights[slot*width:][:width],
			l.scales[slot:slot+1]); err != nil {
			return fmt.Errorf("seed %d: %w", i, err)
		}
	}
	return nil
}

// width returns the number of weights of a slot.
func (l *streamLayer) width() int { return l.sources[0].Shape()[1] }

// encode encodes the state of a layer. It returns an error as fallback if the kernel cannot compute a
// seed's kind.
func (p *persistentStream) encode(i int, pass *op.KasminaPass) (fallback, err error) {
	l, layer := p.chain.layers[i], p.layers[i]
	if err := l.start(pass); err != nil {
		return nil, err
	}

	err = layer.State.Encode(p.encoded[i], func(n int) seed.Seed {
		k := pass.Seed(n)
		if kasminakernel.Mixes(k) && fallback == nil {
			fallback = fmt.Errorf("seed %d has a blueprint of kind %v, which mixes features", n,
				blueprints.Kind(k.Kind))
		}
		return k
	})
	var kind *kasminakernel.KindError
	if errors.As(err, &kind) {
		return err, nil
	}
	return fallback, err
}

// upload copies the encoded states, the weights and the scales to the device. The kernel must be stopped.
func (p *persistentStream) upload() error {
	for i, l := range p.chain.layers {
		layer := p.layers[i]
		at := func(address gpu.Ptr) []byte { return p.staging[address-p.memory:] }
		copy(at(layer.State.Ptr), p.encoded[i])
		copy(at(layer.Scales), gpu.Bytes(l.scales))
		width := l.width()
		for slot := range layer.State.Slots { // pointwise kinds use the first weights of a wide slot
			copy(at(layer.Weights)[4*slot*layer.Chunk:], gpu.Bytes(l.weights[slot*width:][:layer.Chunk]))
		}
	}

	return run.InOrder(
		func() error { return p.device.ctx.CopyToDevice(p.memory, p.staging, p.stream) },
		func() error { return p.device.ctx.SyncStream(p.stream) })
}

// place returns the memory of x and y of a batch.
func (p *persistentStream) place(batch uint64) (x, y []byte) {
	half := len(p.batches) / 2
	step := kasminakernel.Stream{Layers: p.layers}.BatchBytes()
	at := int(batch%uint64(half/step)) * step
	bytes := p.chain.elements() * p.dtype.Size()
	return p.batches[at:][:bytes], p.batches[half+at:][:bytes]
}

// submit announces a batch to the kernel, and returns the kernel's number for it.
func (p *persistentStream) submit(x []float32, watched bool) (uint64, error) {
	to, _ := p.place(p.kernel.Next())
	if p.dtype == gpu.Float32 {
		copy(to, gpu.Bytes(x))
	} else {
		gpu.Encode(to, p.dtype, x)
	}
	return p.kernel.Submit(watched)
}

// result copies the result of a batch.
func (p *persistentStream) result(y []float32, batch uint64) {
	_, from := p.place(batch)
	if p.dtype == gpu.Float32 {
		copy(gpu.Bytes(y), from)
	} else {
		gpu.Decode(y, p.dtype, from)
	}
}

// record passes the measurements of a batch that is done to the lattices.
func (p *persistentStream) record(place *streamPlace) error {
	var errs []error
	for i, pass := range place.passes {
		counts, measured := p.kernel.Counts(place.kernelBatch, i), pass.Measures()
		if counts == nil && !pass.Snapshot().Record {
			continue
		}
		figures := p.kernel.Figures(place.kernelBatch, i)
		seeds, elements := p.layers[i].State.Seeds, p.layers[i].Rows*p.layers[i].Chunk
		errs = append(errs, pass.RecordHealth(func(n int) (h state.HealthSample) {
			if counts != nil {
				h.NonFinite = int(counts[n])
			}
			if measured {
				h = kasmina.Health(figures, seeds, n, elements, h.NonFinite)
			}
			return h
		}))
	}
	return errors.Join(errs...)
}

// stop ends the kernel, so that other work finds room on the GPU.
func (p *persistentStream) stop(ctx context.Context) error {
	if p == nil {
		return nil
	}
	return p.device.withName(p.kernel.Stop(ctx))
}

func (p *persistentStream) close() error {
	if p == nil {
		return nil
	}

	ctx := p.device.ctx
	var errs []error
	if p.kernel != nil {
		errs = append(errs, p.kernel.Close())
	}

	if p.stream != 0 {
		errs = append(errs, ctx.DestroyStream(p.stream))
	}

	for _, b := range [][]byte{p.batches, p.staging} {
		if b != nil {
			errs = append(errs, ctx.FreeHost(b))
		}
	}

	return p.device.withName(run.Joined(append(errs, ctx.Free(p.memory))...))
}

// newComputer returns a computer for batches that the persistent kernel cannot compute.
func (s *Stream) newComputer() (streamComputer, error) {
	if s.device == nil {
		m, err := cpuops.NewMachine(s.chain.graph, cpuops.WithOutputs(s.chain.y), cpuops.WithEvalMode())
		if err != nil {
			return nil, err
		}
		return cpuComputer{m, s.chain.y}, nil
	}

	m, err := NewMachine(s.device, s.chain.graph, WithPrecision(s.options.Precision),
		WithOutputs(s.chain.y))
	if err != nil {
		return nil, err
	}
	return machineComputer{m, s.chain.y}, nil
}

// machineComputer computes batches on the GPU, with launches at first and with a captured graph later.
type machineComputer struct {
	m *Machine
	y *gorgonia.Node
}

func (c machineComputer) compute(ctx context.Context, y []float32) error {
	if err := c.m.Run(ctx); err != nil {
		return err
	}
	a, err := retained(c.m, c.y)
	if err != nil {
		return err
	}
	return run.InOrder(func() error { return c.m.runner.FetchFloats(a, y) }, c.m.layers.Flush)
}

func (c machineComputer) close() error { return c.m.Close() }

// cpuComputer computes batches on the CPU.
type cpuComputer struct {
	m *cpuops.Machine
	y *gorgonia.Node
}

func (c cpuComputer) compute(ctx context.Context, y []float32) error {
	if err := c.m.Run(ctx); err != nil {
		return err
	}
	copy(y, c.y.Value().Data().([]float32))
	return nil
}

func (c cpuComputer) close() error { return c.m.Close() }
