package parallel

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// engine is the CPU engine of one rank.
type engine struct {
	llm.Inference
	team      *Team
	optimizer optim.Partial
	config    llm.TrainConfig
	train     llm.Runner
	// grads holds the gradients of one batch. Before an update, the parts of this rank hold the
	// gradients of the whole step.
	grads []gorgonia.ValueGrad
	*layout
	parts []optim.Part // the parts of this rank
	ats   []int

	sum                        comm.OrderedSum
	contribution, acc, weights comm.Ptr
	buffers                    []comm.Ptr
	flight                     bool // the contribution is being sent
}

var (
	_ llm.Parallel = (*engine)(nil)
	_ llm.Busier   = (*engine)(nil)

	_ llm.PreferenceMeter = (*engine)(nil)
	_ Judge               = (*engine)(nil)
)

// Engine creates the engine of this rank, for [llm.TrainConfig.Engine]. The optimizer must be an
// [optim.Partial]. If Engine fails on one rank, it fails on all.
func (t *Team) Engine(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
	defer t.Busy("making an engine")()
	e, err := t.newEngine(m, o, c)
	if err = t.Agree(err); err == nil {
		return e, nil
	}
	if e != nil {
		err = errors.Join(err, e.Close())
	}
	return nil, fmt.Errorf("parallel: %w", err)
}

func (t *Team) newEngine(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (*engine, error) {
	if t.host == nil {
		return nil, errors.New("the team's group is on GPUs: gpu.Parallel makes engines for them")
	}

	partial, ok := o.(optim.Partial)
	if !ok {
		return nil,
			fmt.Errorf("%T can only update whole models: use an optimizer such as optim.AdamW", o)
	}

	g, err := c.Graph(m)
	if err != nil {
		return nil, err
	}

	opts := []cpuops.Option{cpuops.WithParams(g.Learning...), cpuops.WithOutputs(g.Outputs()...)}
	if g.Base != nil {
		opts = append(opts, cpuops.WithWeights(g.Base))
	}
	machine, err := cpuops.NewMachine(g.G, opts...)
	if err != nil {
		return nil, err
	}

	e := &engine{Inference: llm.Inference{Model: m, Preference: c.Preference}, team: t, optimizer: partial, config: c,
		train: llm.Runner{Graph: g, Machine: machine}, grads: machine.ValueGrads()}
	if err := o.Declare(e.grads); err != nil {
		return e, err
	}

	if e.layout, err = newLayout(e.grads, partial, t.Size()); err != nil {
		return e, err
	}

	e.parts, e.ats = e.layout.parts(t.Rank())
	return e, e.allocate(m.Dtype())
}

// allocate allocates buffers for the transfer of gradients and weights.
func (e *engine) allocate(dt tensor.Dtype) error {
	typ := comm.Float32
	if dt == tensor.Float64 {
		typ = comm.Float64
	}

	e.sum = comm.OrderedSum{Group: e.team.group, Adder: e.team.host, Shards: e.shards, Type: typ}
	own := e.shards.Len(e.team.Rank())
	for _, b := range []struct {
		at       *comm.Ptr
		elements int
	}{{&e.contribution, e.shards.Count()}, {&e.weights, e.shards.Count()}, {&e.acc, own},
		{&e.sum.Staging, e.sum.StagingLen()}} {
		p, err := e.team.host.Alloc(max(1, b.elements) * typ.Size())
		if err != nil {
			return err
		}
		*b.at = p
		e.buffers = append(e.buffers, p)
	}

	return nil
}

// floats returns n elements of a buffer as numbers of the model's type.
func (e *engine) floats(p comm.Ptr, n int) (any, error) {
	b, err := e.team.host.Bytes(p, n*e.sum.Type.Size())
	if err != nil || n == 0 {
		return []float32(nil), err
	}
	if e.sum.Type == comm.Float64 {
		return unsafe.Slice((*float64)(unsafe.Pointer(&b[0])), n), nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), n), nil
}

// Name returns the CPU engine's name if the results of both engines are bit-identical.
func (e *engine) Name() string {
	name := "cpu"
	if gemm.RoundsToBFloat16() {
		name = "cpu bf16"
	}
	if k := e.Model.KasminaOptions; e.config.Accumulate > 1 &&
		(k.Stability == op.Strict || k.AdaptiveClip > 0) {
		name += ", batches side by side"
	}
	return name
}

func (e *engine) Rank() int  { return e.team.Rank() }
func (e *engine) Ranks() int { return e.team.Size() }

// Busy implements [llm.Busier].
func (e *engine) Busy(what string) (done func()) { return e.team.Busy(what) }

func (e *engine) Exchange(value []byte) ([][]byte, error) { return e.team.Exchange(value) }

func (e *engine) Batches(n int, next func() (data.Batch, error)) ([]float64, error) {
	return e.team.Batches(e.Model, e, n, next)
}

// Compute implements [Worker].
func (e *engine) Compute(b data.Batch, _ Round) (float64, error) {
	if err := e.Drop(); err != nil {
		return 0, err
	}
	return e.train.Run(b)
}

// Judged implements [Judge].
func (e *engine) Judged() op.PreferenceFigures { return e.train.TakePreferences() }

// TakePreferences implements [llm.PreferenceMeter].
func (e *engine) TakePreferences() op.PreferenceFigures {
	return e.team.TakePairs().Plus(e.Inference.TakePreferences())
}

// Land waits until the contribution has been sent and the received contributions have been added.
func (e *engine) Land() error {
	if !e.flight {
		return nil
	}
	e.flight = false
	return e.team.sync()
}

// Add starts to send the gradients of a batch to their owners and to add the received gradients to the
// shard of this rank.
func (e *engine) Add(r Round) error {
	if err := e.Land(); err != nil {
		return err
	}

	if e.team.Rank() < r.Contributors {
		size := e.sum.Type.Size()
		buffer, err := e.team.host.Bytes(e.contribution, e.shards.Count()*size)
		if err != nil {
			return err
		}
		if err := e.each(func(s stretch, _, grad any) {
			copy(buffer[s.at*size:], bytesOf(grad))
		}); err != nil {
			return err
		}
	}

	e.flight = true
	return e.sum.Add(e.acc, e.contribution, r.Contributors, r.First, 0)
}

// each calls f with the value and gradient memory of every parameter.
func (e *engine) each(f func(s stretch, value, grad any)) error {
	ps, err := e.reader.Read(e.grads)
	if err != nil {
		return err
	}
	for i, p := range ps {
		f(e.params[i], p.Value, p.Grad)
	}
	return nil
}

func (e *engine) Update() (float64, error) {
	ps, err := e.read()
	if err != nil {
		return 0, err
	}

	acc, err := e.floats(e.acc, e.shards.Len(e.team.Rank()))
	if err != nil {
		return 0, err
	}

	at := make([]int, len(e.ats))
	for i := range at {
		at[i] = e.ats[i] - e.shards[e.team.Rank()]
	}

	copyParts(e.parts, at, bytesOf(acc), e.sum.Type.Size(), func(p optim.Part) any {
		return elements(ps[p.Name].Grad, p)
	}, false)
	host, seeds, err := e.norms(acc)
	if err != nil {
		return 0, err
	}

	for _, p := range e.parts {
		norm := host
		if llm.IsSeedParam(p.Name) {
			norm = seeds
		}
		scale := e.config.Clip / (norm + 1e-6)
		if e.config.Clip == 0 || !(scale < 1) {
			continue
		}
		switch g := ps[p.Name].Grad.(type) {
		case []float32:
			array.ScaleBy(g[p.From:p.To], scale)
		case []float64:
			array.ScaleBy(g[p.From:p.To], scale)
		}
	}

	if !slices.ContainsFunc(e.params, func(s stretch) bool { return !llm.IsSeedParam(s.name) }) {
		host = seeds
	}

	return host, e.updateParts()
}

// norms returns two norms of the whole gradient, given the shard of this rank: the norm for the parameters
// of the host, and the norm for the parameters of seeds. They are clipped separately.
func (e *engine) norms(acc any) (host, seeds float64, err error) {
	var own []byte
	at := 0
	for _, p := range e.parts {
		n := p.To - p.From
		squares := make([]float64, cpu.CeilDiv(n, cpu.VectorGrain))
		switch g := acc.(type) {
		case []float32:
			array.BlockSquares(squares, g[at:at+n])
		case []float64:
			array.BlockSquares(squares, g[at:at+n])
		}
		for _, s := range squares {
			own = binary.LittleEndian.AppendUint64(own, math.Float64bits(s))
		}
		at += n
	}

	all, err := e.team.exchange(own)
	if err != nil {
		return 0, 0, err
	}

	blocks := bytes.Join(all, nil)
	for _, s := range e.params {
		var squares float64
		for range cpu.CeilDiv(s.len, cpu.VectorGrain) {
			if len(blocks) < 8 {
				return 0, 0, errors.New("parallel: the ranks have divided the model differently")
			}
			squares += math.Float64frombits(binary.LittleEndian.Uint64(blocks))
			blocks = blocks[8:]
		}
		if llm.IsSeedParam(s.name) {
			seeds += squares
		} else {
			host += squares
		}
	}

	if sum := host + seeds; math.IsNaN(sum) || math.IsInf(sum, 0) {
		return 0, 0, llm.ErrGradients
	}

	return math.Sqrt(host), math.Sqrt(seeds), nil
}

// The results of updating the parts of a rank.
const (
	updated = iota
	overflowed
	refused
)

// updateParts updates the parts of this rank and fetches all other weights from their owners.
func (e *engine) updateParts() error {
	err := e.optimizer.StepParts(e.grads, e.parts)
	own := []byte{updated}
	if errors.Is(err, optim.ErrOverflow) {
		own = []byte{overflowed}
	} else if err != nil {
		own = append([]byte{refused}, err.Error()...)
	}

	all, failed := e.team.exchange(own)
	if failed != nil {
		return failed
	}

	for r, answer := range all {
		switch {
		case len(answer) < 1 || answer[0] > refused:
			return fmt.Errorf("parallel: rank %d is not performing an update", r)
		case answer[0] == refused:
			return fmt.Errorf("rank %d: %s", r, answer[1:])
		case answer[0] == overflowed:
			return llm.ErrOverflow
		}
	}

	ps, err := e.read()
	if err != nil {
		return err
	}

	return e.spread(func(p optim.Part) any { return elements(ps[p.Name].Value, p) })
}

// spread copies an array that belongs to every parameter from the owners of its parts to all ranks.
// The function slice returns a part of the array here, or nil if the parameter has none.
func (e *engine) spread(slice func(optim.Part) any) error {
	if e.team.Size() == 1 {
		return nil
	}

	size := e.sum.Type.Size()
	buffer, err := e.team.host.Bytes(e.weights, e.shards.Count()*size)
	if err != nil {
		return err
	}

	copyParts(e.parts, e.ats, buffer, size, slice, true)
	err = comm.GatherShards(e.team.group, e.weights, e.shards, e.sum.Type, 0)
	if err = errors.Join(err, e.team.sync()); err != nil {
		return e.team.blame(err)
	}

	for r := range e.team.Size() {
		if r != e.team.Rank() {
			parts, ats := e.layout.parts(r)
			copyParts(parts, ats, buffer, size, slice, false)
		}
	}

	return nil
}

func (e *engine) Gather() error {
	for k := range e.layout.moments {
		if err := e.spread(func(p optim.Part) any {
			if data := e.optimizer.Moments(p.Name); k < len(data) {
				return e.layout.kernels[p.Name].Moments[k].Slice(data[k], p)
			}
			return nil
		}); err != nil {
			return err
		}
	}

	return nil
}

// Own returns the parts of this rank. Their optimizer state is already in memory.
func (e *engine) Own() ([]optim.Part, error) { return e.parts, nil }

func (e *engine) Gradients(data.Batch) (float64, error) {
	return 0, errors.New("parallel: the batches of a step are computed together: use Batches")
}

// Figures implements [llm.Sensor] for the last batch of this rank.
func (e *engine) Figures() ([]llm.SeedFigures, error) {
	return e.train.Figures(e.train.Machine.Value)
}

func (e *engine) Loss(b data.Batch) (float64, error) {
	if err := e.team.Progress(); err != nil {
		return 0, err
	}
	return e.Inference.Loss(b)
}

// Decoder implements [llm.Engine]. Drawing a token counts as progress.
func (e *engine) Decoder() (func(ctx context.Context, tokens []int) (any, error), error) {
	next, err := e.Inference.Decoder()
	return e.team.Drawing(next), err
}

func (e *engine) Drop() error {
	for _, p := range e.grads {
		if g, err := p.Grad(); err == nil && g != nil {
			gorgonia.ZeroValue(g)
		}
	}
	return nil
}

func (e *engine) FirstNonFinite() (name, kind string, found bool) {
	return autodiff.FirstNonFinite(e.grads)
}

func (e *engine) Pull(...string) error { return nil }
func (e *engine) Push(...string) error { return nil }

func (e *engine) Forget(ranges ...llm.ParamRange) error {
	if err := e.Model.CheckRanges(ranges...); err != nil {
		return err
	}

	for _, r := range ranges {
		if err := e.optimizer.Forget(r.Param, r.From, r.To); err != nil {
			return err
		}
	}
	return nil
}

func (e *engine) Close() error {
	err := errors.Join(e.Land(), e.Inference.Close(), e.train.Machine.Close())
	for _, p := range e.buffers {
		err = errors.Join(err, e.team.host.Free(p))
	}
	e.buffers = nil
	return err
}
