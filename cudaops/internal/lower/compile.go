// Package lower compiles a Gorgonia graph into a program. Each node is lowered to calls by a function
// registered for the type of its op; some groups of nodes are lowered together to save passes over
// memory. The package needs a description of the device, but not the device itself.
package lower

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/quant"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

func init() {
	register[*autodiff.RecomputeOp](lowerRecompute, nil)
	register[*autodiff.RecomputeGradOp](lowerRecomputeGrad, linearIn(-2))
}

// Options configures the compilation of a program.
type Options struct {
	graph.Asked
	Frozen gorgonia.Nodes // parameters that never change
	// Packed returns the matrix of an input that is held in float8 or NF4, or nil; the function may be nil.
	Packed     func(*gorgonia.Node) *quant.Matrix
	Device     gpu.DeviceInfo
	Activation gpu.DType // type of activations
	Gradient   gpu.DType // type of weight gradients that only an update reads
	Float8     bool      // linear layers use float8 products
	Scaled     bool      // gradients carry a loss scale
	Accumulate bool      // gradients accumulate over runs
	Strict     bool      // a node without a kernel is an error
	Room       int       // bytes that may be used to save time
	Draws      Draws     // the tokens to draw
	Decoding   Decoding  // the kernels of graphs that continue texts
	Timed      bool      // allow timing Kasmina layers without telemetry, which needs extra memory

	Shared       *program.Program // program that owns the shared parameters; nil if there are none
	SharedParams gorgonia.Nodes

	// PageMemory returns the memory of a kvcache.Pages with the given number and size, allocating it when it
	// is first asked for.
	PageMemory func(pages *kvcache.Pages, number, bytes int) (gpu.Ptr, error)

	OnHost func(op string) bool // reports whether a rule requests an op on the host
	Warn   func(message string)
	program.Chooser
}

// compiler lowers a graph to a program.
type compiler struct {
	*program.Program
	o Options
	// data passed from lowering a forward op to lowering its backward op
	saved   map[gorgonia.Op]any
	lasting map[*gorgonia.Node]bool           // nodes with values that outlive a run
	users   map[*gorgonia.Node]gorgonia.Nodes // users of each node among the nodes to lower

	inputOf map[*program.Buffer]*program.Input
	// the inputs that each resident array of parameters or constants derives from
	sources    map[*program.Buffer][]*program.Input
	rotations  map[string]*rotationTables // keyed by rotationKey
	counters   map[string]*program.Array  // zeros that launches leave as zeros
	documents  map[documentKey]*program.Array
	codebook   *program.Array                  // of the scales of NF4; nil until needed
	projected  map[*gorgonia.Node]*projections // keyed by linear nodes, and by the queries
	gradients  map[gorgonia.Op]gorgonia.Nodes  // gradient nodes of each forward op
	updateOnly map[*gorgonia.Node]bool         // gradients that only an update reads
	layers     graph.Layers
	err        error // first error; everything lowered after it is invalid
}

// fail records err if it is the first error.
func (c *compiler) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

// Lower compiles a graph. It lowers every node that the graph's results depend on, and returns these
// results along with the program. Where it saves time, the program may use up to o.Room bytes more than
// necessary; Program.Spent reports how many.
func Lower(g *gorgonia.ExprGraph, o Options) (*program.Program, gorgonia.Nodes, error) {
	c := &compiler{o: o, Program: &program.Program{Values: map[*gorgonia.Node]*program.Array{},
		Caches: map[*gorgonia.Node]program.Cache{}, Conversions: o.Shared.BorrowConversions()},
		saved: map[gorgonia.Op]any{}, lasting: map[*gorgonia.Node]bool{},
		users:     map[*gorgonia.Node]gorgonia.Nodes{},
		inputOf:   map[*program.Buffer]*program.Input{},
		sources:   map[*program.Buffer][]*program.Input{},
		rotations: map[string]*rotationTables{},
		counters:  map[string]*program.Array{},
		documents: map[documentKey]*program.Array{},
		projected: map[*gorgonia.Node]*projections{},
		gradients: map[gorgonia.Op]gorgonia.Nodes{}, updateOnly: o.updateOnly(),
		layers: graph.Layers{IsParam: func(n *gorgonia.Node) bool {
			return slices.Contains(o.Params, n) || o.sharedParam(n) != nil
		}}}

	lasting, gradients := o.Asked.Results(g)
	lasting = append(lasting, gradients...)
	for _, n := range lasting {
		c.lasting[n] = true
	}

	if o.Scaled {
		if err := c.scale(g); err != nil {
			return nil, nil, err
		}
	}

	if c.lowerAll(lasting); c.err != nil {
		return nil, nil, c.err
	}

	if o.Accumulate {
		c.accumulate()
	}

	if o.Draws.Logits != nil {
		c.draw(o.Draws)
	}

	c.decoding()
	if c.err != nil {
		return nil, nil, c.err
	}

	c.Narrow(c.lasting)
	return c.Program, lasting, nil
}

// lowerAll lowers the given nodes, which belong to one graph, and all nodes they depend on, except nodes
// that already have a value.
func (c *compiler) lowerAll(results gorgonia.Nodes) {
	sorted, err := graph.Order(results...)
	c.fail(err)
	for _, n := range sorted {
		after := -1 // index of an input that the node depends on only for its order
		switch o := n.Op().(type) {
		case *op.LinearCrossEntropyGradOp:
			c.gradients[o.Forward] = append(c.gradients[o.Forward], n)
		case *op.LinearLogProbsGradOp:
			c.gradients[o.Forward] = append(c.gradients[o.Forward], n)
		case *op.SiLUMLPGradOp:
			c.gradients[o.Forward] = append(c.gradients[o.Forward], n)
			after = 4
		}
		for i, child := range graph.Children(n) {
			if i != after {
				c.users[child] = append(c.users[child], n)
			}
		}
	}

	for _, n := range sorted {
		if attends(n) {
			c.project(n)
		}
	}

	c.layers.Add(sorted)
	for _, n := range sorted {
		if c.Values[n] == nil && !c.fuseNorm(n) {
			c.lower(n)
		}
		if c.err != nil {
			c.err = fmt.Errorf("%s: %w", graph.Describe(n), c.err)
			return
		}
	}
}

// accumulate adds the gradient of each parameter to a resident sum. The additions come last, so that a
// run that fails in an op on the host adds nothing.
func (c *compiler) accumulate() {
	c.Sums = map[*gorgonia.Node]*program.Array{}
	for _, p := range c.o.Params {
		g := c.Values[p.Deriv()]
		if g == nil {
			continue
		}
		sum := c.NewResident(gpu.Float32, g.Shape...)
		c.Sums[p] = sum
		a := elementwise.Axpby{Alpha: 1, Beta: 1, N: g.Len(), YType: gpu.Float32, XType: g.Type}
		addCall(c, p.Deriv(), &a, program.Updates(&a.Y, sum), program.Reads(&a.X, g))
	}
}

// newCall returns a call that computes a node, with workspace if its launch requires it.
func newCall[L any](c *compiler, n *gorgonia.Node, launch *L, args ...program.Arg) *program.Call {
	switch w := any(launch).(type) {
	case kernel.Workspaced:
		args = append(args, program.Uses(w.WorkspaceField(),
			c.Workspace(w.WorkspaceBytes(c.o.Device))))
	case interface{ WorkspaceBytes(gpu.DeviceInfo) int }:
		panic(fmt.Sprintf("lower: a %T needs a workspace, but has no WorkspaceField", launch))
	}
	return c.named(n, program.NewCall(launch, args...))
}

// addCall adds a call that computes a node to the program.
func addCall[L any](c *compiler, n *gorgonia.Node, launch *L, args ...program.Arg) *program.Call {
	return c.Add(newCall(c, n, launch, args...))
}

// named labels a call with the node that it computes.
func (c *compiler) named(n *gorgonia.Node, call *program.Call) *program.Call {
	call.Op, call.Node, call.Layer = graph.OpName(n), graph.Describe(n), c.layers.Of(n)
	return call
}

// constrain requires that the integers of an input satisfy r whenever they are sent to the device.
func (c *compiler) constrain(n *gorgonia.Node, a *program.Array, r program.IDRange) {
	r.Op = graph.OpName(n)
	if in := c.inputOf[a.Buffer]; in != nil {
		in.IDs = append(in.IDs, r)
	}
}

// sharedParam returns the parameter of the shared program that n mirrors, or nil.
func (o Options) sharedParam(n *gorgonia.Node) *program.Input {
	if o.Shared == nil {
		return nil
	}
	for _, in := range o.Shared.Inputs {
		if slices.Contains(o.SharedParams, in.Node) && in.Node.Name() == n.Name() &&
			n.Dtype() == in.Node.Dtype() && slices.Equal(n.Shape(), in.Node.Shape()) {
			return in
		}
	}
	return nil
}

// The graph within a RecomputeOp is lowered as if it replaced the op. Only its result is used outside, so
// memory for its intermediate values is free as soon as the result is computed. The graph within the
// backward op has separate nodes that compute the intermediate values again.

func lowerRecompute(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*autodiff.RecomputeOp)
	return c.inline(n, o.Inputs, in, gorgonia.Nodes{o.Output})[0]
}

func lowerRecomputeGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*autodiff.RecomputeGradOp)
	inputs := append(append(gorgonia.Nodes{}, o.Inputs...), o.OutputGrad)
	offset, asked := 0, map[*gorgonia.Node]bool{}
	for _, g := range o.Grads { // use outside the op counts as use within
		part := c.partOf(n, offset)
		asked[g] = asked[g] || !c.updateOnly[part] || len(c.users[part]) > 0
		c.updateOnly[g] = !asked[g]
		offset += opbase.Size(g.Shape())
	}
	return packed(c.inline(n, inputs, in[:len(inputs)], o.Grads)...)
}

// inline lowers the graph within node around, given the values of its inputs, and returns the values of
// results. It clears the values of the inner nodes afterwards, because two outer nodes may share an op,
// and each needs a separate lowering.
func (c *compiler) inline(around *gorgonia.Node, inputs gorgonia.Nodes, values []*program.Array,
	results gorgonia.Nodes) (out []*program.Array) {
	outside := graph.Children(around)
	for i, n := range inputs {
		c.Values[n] = values[i]
		c.layers.Join(n, outside[i])
	}

	for _, n := range results { // results must not be fused into the nodes that use them
		c.lasting[n] = true
	}

	c.lowerAll(results)
	for _, n := range results {
		out = append(out, c.Values[n])
		delete(c.lasting, n)
	}

	for _, n := range inputs[0].Graph().AllNodes() {
		delete(c.Values, n)
	}

	return out
}
