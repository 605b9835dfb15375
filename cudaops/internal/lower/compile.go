// Package lower turns a Gorgonia graph into a program: each node into calls, by a table of the ops'
// types. Several nodes become calls together where that takes fewer passes over memory. It knows no
// device but what describes it.
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
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*autodiff.RecomputeOp](lowerRecompute, nil)
	register[*autodiff.RecomputeGradOp](lowerRecomputeGrad, inInput(-2))
}

// Options says what a program is for.
type Options struct {
	graph.Asked
	Frozen     gorgonia.Nodes // parameters that never change
	Device     gpu.DeviceInfo
	Activation gpu.DType // what activations are stored as
	Gradient   gpu.DType // what gradients of weights are stored as that only updates read
	Float8     bool      // linear layers multiply float8
	Scaled     bool      // gradients carry a loss scale
	Accumulate bool      // gradients add up from run to run
	Strict     bool      // a node without a kernel is an error
	Room       int       // bytes that may be spent to save time
	Timed      bool      // passes of Kasmina layers also run without telemetry, which takes memory

	Shared       *program.Program // whose parameters are used; nil for none
	SharedParams gorgonia.Nodes

	OnHost func(op string) bool // whether a rule wants an op computed there
	Warn   func(message string)
	program.Chooser
}

// compiler turns a graph into a program.
type compiler struct {
	*program.Program
	o Options
	// results of lowering a forward op, for lowering its backward op
	saved   map[gorgonia.Op]any
	lasting map[*gorgonia.Node]bool           // what outlives a run
	users   map[*gorgonia.Node]gorgonia.Nodes // those that are lowered

	inputOf map[*program.Buffer]*program.Input
	// what own parameters and constants, and copies and stacks of them, are made of
	sources   map[*program.Buffer][]*program.Input
	rotations map[string]*rotationTables // by rotationOf
	documents map[packing]*program.Array
	projected map[*gorgonia.Node]*projections // by their linear functions, and by the queries
	gradients map[gorgonia.Op]gorgonia.Nodes  // those of a forward op that the graph has
	updating  map[*gorgonia.Node]bool         // gradients that nobody asks for but an update
	layers    graph.Layers
	err       error // the first, behind which nothing that is lowered counts
}

// fail notes an error, if it is one.
func (c *compiler) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

// Lower lowers every node of a graph that those whose values outlive a run depend on, which it
// returns too. Up to the options' Room the program takes more memory than it needs where that saves
// time, and says how much.
func Lower(g *gorgonia.ExprGraph, o Options) (*program.Program, gorgonia.Nodes, error) {
	c := &compiler{o: o, Program: &program.Program{Values: map[*gorgonia.Node]*program.Array{},
		Caches: map[*gorgonia.Node]program.Cache{}, Made: o.Shared.Borrow()},
		saved: map[gorgonia.Op]any{}, lasting: map[*gorgonia.Node]bool{},
		users:     map[*gorgonia.Node]gorgonia.Nodes{},
		inputOf:   map[*program.Buffer]*program.Input{},
		sources:   map[*program.Buffer][]*program.Input{},
		rotations: map[string]*rotationTables{},
		documents: map[packing]*program.Array{},
		projected: map[*gorgonia.Node]*projections{},
		gradients: map[gorgonia.Op]gorgonia.Nodes{}, updating: o.updating(),
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
		c.gather()
	}

	c.Narrow(c.lasting)
	return c.Program, lasting, nil
}

// lowerAll lowers the nodes that the given ones of one graph depend on, and these, but for those
// that have a value already.
func (c *compiler) lowerAll(results gorgonia.Nodes) {
	sorted, err := graph.Order(results...)
	c.fail(err)
	for _, n := range sorted {
		after := -1 // the input that a node has only to come behind it
		switch o := n.Op().(type) {
		case *op.LinearCrossEntropyGradOp:
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

// gather adds the gradient of each parameter to a sum that outlives runs. That comes last, so that a
// run which an op on the host ends has added nothing.
func (c *compiler) gather() {
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

// newCall returns a call of a node. It adds the workspace of launches that need one.
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

// addCall adds a call of a node to the program.
func addCall[L any](c *compiler, n *gorgonia.Node, launch *L, args ...program.Arg) *program.Call {
	return c.Add(newCall(c, n, launch, args...))
}

// named gives a call the names of the node that it computes.
func (c *compiler) named(n *gorgonia.Node, call *program.Call) *program.Call {
	call.Op, call.Node, call.Layer = graph.OpName(n), graph.Describe(n), c.layers.Of(n)
	return call
}

// bound makes the integers of an input that a node reads be checked when they are sent.
func (c *compiler) bound(n *gorgonia.Node, a *program.Array, r program.IDRange) {
	r.Op = graph.OpName(n)
	if in := c.inputOf[a.Buffer]; in != nil {
		in.IDs = append(in.IDs, r)
	}
}

// sharedParam returns the parameter of that program that n is an image of, nil if there is none.
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

// The graph within a RecomputeOp is lowered as if it stood in the op's place. Nothing of it but the
// result is used outside. So the memory of what is in between serves other nodes as soon as the
// result is there. The graph within its backward op has nodes of its own, which compute all that
// again.

func lowerRecompute(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*autodiff.RecomputeOp)
	return c.inline(n, o.Inputs, in, gorgonia.Nodes{o.Output})[0]
}

func lowerRecomputeGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*autodiff.RecomputeGradOp)
	inputs := append(append(gorgonia.Nodes{}, o.Inputs...), o.OutputGrad)
	offset, asked := 0, map[*gorgonia.Node]bool{}
	for _, g := range o.Grads { // what is asked for outside is within
		part := c.partOf(n, offset)
		asked[g] = asked[g] || !c.updating[part] || len(c.users[part]) > 0
		c.updating[g] = !asked[g]
		offset += opbase.Size(g.Shape())
	}
	return packed(c.inline(n, inputs, in[:len(inputs)], o.Grads)...)
}

// inline lowers what the results depend on, in the graph within a node, whose inputs have the given
// values. The graph's nodes lose their values: an op that two nodes of the outer graph share is
// lowered for each.
func (c *compiler) inline(around *gorgonia.Node, inputs gorgonia.Nodes, values []*program.Array,
	results gorgonia.Nodes) (out []*program.Array) {
	outside := graph.Children(around)
	for i, n := range inputs {
		c.Values[n] = values[i]
		c.layers.Join(n, outside[i])
	}

	for _, n := range results { // none may be left to those that use it
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
