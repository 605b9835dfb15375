package driver

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"unsafe"
)

// dnnPlan is attention as cuDNN's graph of operations, for which an engine was found.
type dnnPlan struct {
	d         *cudnn
	spec      AttentionSpec
	graph     *dnnGraph
	plan      descriptor
	workspace int

	args     AttentionArgs // of the run under way
	operands []dnnOperand
	scalars  []dnnScalar
}

// dnnOperand is a tensor in memory, and which of args is its address.
type dnnOperand struct {
	id int64
	at *Ptr
}

// dnnScalar is a tensor of one number, which cuDNN reads on the host at every run.
type dnnScalar struct {
	id    int64
	value *float32
}

// cuDNN's ways to list engines, the better first.
const dnnHeuristicA, dnnFallback int32 = 3, 2

// dnnConfigs is how many of the engines that cuDNN lists are tried.
const dnnConfigs = 8

func (d *cudnn) PlanAttention(a AttentionSpec) (AttentionPlan, error) {
	if err := a.Check(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.start(); err != nil {
		return nil, err
	}
	p := &dnnPlan{d: d, spec: a, graph: &dnnGraph{d: d}}
	p.describe()
	if err := p.find(); err != nil {
		return nil, errors.Join(fmt.Errorf("attention %+v: %w", a, err), p.graph.close())
	}
	return p, nil
}

// find takes the first engine that can be made ready.
func (p *dnnPlan) find() error {
	g := p.graph
	graph := g.make(dnnOperationGraph)
	dnnSet(g, graph, graphOperations, ofDescriptor, g.operations...)
	if p.d.handle != 0 {
		dnnSet(g, graph, graphHandle, ofHandle, p.d.handle)
	}
	g.finalize(graph)
	if g.err != nil {
		return g.err
	}
	var failed error
	for _, mode := range []int32{dnnHeuristicA, dnnFallback} {
		for _, config := range g.engines(graph, mode) {
			if p.plan = p.ready(config); g.err == nil {
				return nil
			}
			failed, g.err = errors.Join(failed, g.err), nil
		}
		failed, g.err = errors.Join(failed, g.err), nil
	}
	if failed == nil {
		failed = NewDnnError(p.d.GetAttribute.name, DnnNotSupported, "cuDNN knows no engine for this")
	}
	return failed
}

// engines lists engines for a graph, with their settings.
func (g *dnnGraph) engines(graph descriptor, mode int32) []descriptor {
	h := g.make(dnnHeuristics)
	dnnSet(g, h, heuristicsGraph, ofDescriptor, graph)
	dnnSet(g, h, heuristicsMode, ofHeuristic, mode)
	if g.d.device != 0 {
		dnnSet(g, h, heuristicsDevice, ofDescriptor, g.d.device)
	}
	g.finalize(h)
	configs := make([]descriptor, dnnConfigs)
	for i := range configs {
		configs[i] = g.make(dnnEngineConfig)
	}
	return dnnGet(g, h, heuristicsResults, ofDescriptor, configs)
}

// ready makes a plan of an engine, unless that is known to give other bits from run to run.
func (p *dnnPlan) ready(config descriptor) descriptor {
	const nondeterministic, allNotes = 4, 16
	g := p.graph
	engine := g.make(dnnEngine)
	dnnGet(g, config, configEngine, ofDescriptor, []descriptor{engine}) // which is filled in
	if slices.Contains(dnnGet(g, engine, engineNotes, ofNote, make([]int32, allNotes)), nondeterministic) {
		g.err = NewDnnError(p.d.GetAttribute.name, DnnNotSupported, "the engine gives other bits from run to run")
	}
	plan := g.make(dnnExecutionPlan)
	dnnSet(g, plan, planConfig, ofDescriptor, config)
	g.finalize(plan)
	if bytes := dnnGet(g, plan, planWorkspace, ofInt64, make([]int64, 1)); len(bytes) == 1 {
		p.workspace = int(bytes[0])
	}
	return plan
}

// operand describes a tensor in memory.
func (p *dnnPlan) operand(at *Ptr, t dnnData, dims, strides shape4) dnnTensor {
	x := p.graph.tensor(t, dims, strides, inMemory)
	p.operands = append(p.operands, dnnOperand{p.graph.ids, at})
	return x
}

// rows describes packed rows of heads, [Batch, heads, Seq, HeadDim].
func (p *dnnPlan) rows(at *Ptr, heads, stride int) dnnTensor {
	a := p.spec
	return p.operand(at, dnnTypes[a.Type], shape4{int64(a.Batch), int64(heads), int64(a.Seq), int64(a.HeadDim)},
		shape4{int64(a.Seq * stride), int64(a.HeadDim), int64(stride), 1})
}

// columns describes their transposes.
func (p *dnnPlan) columns(at *Ptr, heads, stride int) dnnTensor {
	a := p.spec
	return p.operand(at, dnnTypes[a.Type], shape4{int64(a.Batch), int64(heads), int64(a.HeadDim), int64(a.Seq)},
		shape4{int64(a.Seq * stride), int64(a.HeadDim), 1, int64(stride)})
}

func (p *dnnPlan) scalar(v float64) dnnTensor {
	value := float32(v)
	x := p.graph.tensor(dnnFloat32, shape4{1, 1, 1, 1}, shape4{1, 1, 1, 1}, byValue)
	p.scalars = append(p.scalars, dnnScalar{p.graph.ids, &value})
	return x
}

// masked is s with −∞ where the key is later than the query.
func (p *dnnPlan) masked(s dnnTensor) dnnTensor {
	if !p.spec.Causal {
		return s
	}
	g := p.graph
	row, column, sees := g.between(dnnInt32, s.dims), g.between(dnnInt32, s.dims), g.between(dnnBoolean, s.dims)
	g.index(row, s, 2)
	g.index(column, s, 3)
	g.pointwise(dnnGreaterEqual, dnnBoolean, sees, row, column, dnnTensor{})
	y := g.between(dnnFloat32, s.dims)
	g.pointwise(dnnSelect, dnnFloat32, y, s, p.scalar(math.Inf(-1)), sees)
	return y
}

// describe adds the operations by which cuDNN knows attention:
//
//	s = mask(Scale·q·kᵀ), m = max s, e = exp(s − m), z = Σ e, lse = m + log z, y = (e/z)·v
func (p *dnnPlan) describe() {
	a, g, x := p.spec, p.graph, &p.args
	batch, heads, seq := int64(a.Batch), int64(a.Heads), int64(a.Seq)
	q, k := p.rows(&x.Q, a.Heads, a.Q), p.columns(&x.K, a.KVHeads, a.K)
	v, y := p.rows(&x.V, a.KVHeads, a.V), p.rows(&x.Y, a.Heads, a.Y)
	one := shape4{batch, heads, seq, 1}
	lse := p.operand(&x.LSE, dnnFloat32, one, one.dense())

	scores := g.between(dnnFloat32, shape4{batch, heads, seq, seq})
	g.matmul(scores, q, k)
	s := p.masked(g.binary(dnnMul, scores, p.scalar(a.Scale)))
	m, z := g.between(dnnFloat32, lse.dims), g.between(dnnFloat32, lse.dims)
	g.reduce(dnnMax, m, s)
	e := g.unary(dnnExp, g.binary(dnnSub, s, m))
	g.reduce(dnnSum, z, e)
	g.pointwise(dnnAdd, dnnFloat32, lse, m, g.unary(dnnLog, z), dnnTensor{})
	share := g.between(dnnTypes[a.Type], s.dims)
	g.pointwise(dnnDiv, dnnFloat32, share, e, z, dnnTensor{})
	g.matmul(y, share, v)
}

func (p *dnnPlan) Workspace() int { return p.workspace }

func (p *dnnPlan) Run(x AttentionArgs, s Stream) error {
	if err := p.spec.CheckArgs(p.Workspace(), x); err != nil {
		return err
	}
	d := p.d
	d.mu.Lock()
	defer d.mu.Unlock()
	p.args = x
	if err := d.call(&d.SetStream, d.handle, uintptr(s)); err != nil {
		return err
	}
	g := &dnnGraph{d: d}
	pack := p.pack(g)
	if g.err == nil {
		g.err = d.call(&d.Execute, d.handle, uintptr(p.plan), uintptr(pack))
	}
	runtime.KeepAlive(p)
	if err := errors.Join(g.err, g.close()); err != nil {
		return fmt.Errorf("attention %+v: %w", p.spec, err)
	}
	d.ledger.Add(s, Stats{Launches: 1})
	return nil
}

// pack describes where the operands are.
func (p *dnnPlan) pack(g *dnnGraph) descriptor {
	var ids []int64
	var at []uintptr
	for _, o := range p.operands {
		ids, at = append(ids, o.id), append(at, uintptr(*o.at))
	}
	for _, s := range p.scalars {
		ids, at = append(ids, s.id), append(at, uintptr(unsafe.Pointer(s.value)))
	}
	pack := g.make(dnnVariantPack)
	dnnSet(g, pack, packIDs, ofInt64, ids...)
	dnnSet(g, pack, packPointers, ofPointer, at...)
	dnnSet(g, pack, packWorkspace, ofPointer, uintptr(p.args.Workspace))
	return g.finalize(pack)
}

func (p *dnnPlan) Close() error {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	return p.graph.close()
}
