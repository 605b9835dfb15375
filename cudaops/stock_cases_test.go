package cudaops

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// stockCase is a graph made of Gorgonia's own ops.
type stockCase struct {
	name     string
	shapes   []tensor.Shape // of the inputs; one without dimensions is a scalar
	ids      []int          // the value of one more input, of integers
	positive bool           // the inputs are
	build    func(in gorgonia.Nodes) (*gorgonia.Node, error)
	constant bool // it has no derivative
	badDiff  bool // Gorgonia makes a wrong gradient of it: a graph of what is no derivative
	// instead is the same function made of other ops, where Gorgonia's machine computes the op or its gradient wrongly.
	instead func(in gorgonia.Nodes) (*gorgonia.Node, error)
}

type (
	shape = tensor.Shape
	nodes = gorgonia.Nodes
	node  = gorgonia.Node
)

// stockCases are fresh graphs of odd sizes.
func stockCases(r *rand.Rand) []stockCase {
	return slices.Concat(elementwiseCases(), productCases(), reductionCases(), layoutCases(r))
}

func elementwiseCases() []stockCase {
	m, v, s := shape{3, 7}, shape{5}, shape{}
	var cases []stockCase
	for name, f := range map[string]func(*node) (*node, error){
		"Abs": gorgonia.Abs, "Sign": gorgonia.Sign, "Ceil": gorgonia.Ceil, "Floor": gorgonia.Floor, "Sin": gorgonia.Sin, "Cos": gorgonia.Cos,
		"Exp": gorgonia.Exp, "Log": gorgonia.Log, "Log2": gorgonia.Log2, "Neg": gorgonia.Neg, "Square": gorgonia.Square, "Sqrt": gorgonia.Sqrt,
		"Inverse": gorgonia.Inverse, "InverseSqrt": gorgonia.InverseSqrt, "Cube": gorgonia.Cube, "Tanh": gorgonia.Tanh,
		"Sigmoid": gorgonia.Sigmoid, "Log1p": gorgonia.Log1p, "Expm1": gorgonia.Expm1, "Softplus": gorgonia.Softplus,
		"Rectify": gorgonia.Rectify, "Mish": gorgonia.Mish,
		"LeakyRelu": func(x *node) (*node, error) { return gorgonia.LeakyRelu(x, 0.125) },
	} {
		c := stockCase{name: name, positive: slices.Contains([]string{"Log", "Log2", "Sqrt", "Inverse", "InverseSqrt", "Log1p"}, name),
			constant: slices.Contains([]string{"Sign", "Ceil", "Floor"}, name),
			build:    func(in nodes) (*node, error) { return f(in[0]) }}
		c.badDiff = name == "InverseSqrt" || name == "Log2"
		for _, x := range []shape{m, s} {
			c.shapes = []shape{x}
			cases = append(cases, c)
		}
	}
	for name, f := range map[string]func(a, b *node) (*node, error){
		"Add": gorgonia.Add, "Sub": gorgonia.Sub, "Mul": gorgonia.HadamardProd, "Div": gorgonia.HadamardDiv, "Pow": gorgonia.Pow,
		"MinBetween": gorgonia.MinBetween, "MaxBetween": gorgonia.MaxBetween,
	} {
		between := name == "MinBetween" || name == "MaxBetween"
		for _, operands := range [][]shape{{m, m}, {v, v}, {m, s}, {s, m}, {s, s}} {
			if between && len(operands[0])*len(operands[1]) == 0 {
				continue
			}
			cases = append(cases, stockCase{name: name, shapes: operands, positive: true,
				build: func(in nodes) (*node, error) { return f(in[0], in[1]) }})
		}
		for side := range 2 {
			if between {
				continue
			}
			cases = append(cases, stockCase{name: fmt.Sprintf("%s with a constant %d", name, side), shapes: []shape{m}, positive: true,
				build: func(in nodes) (*node, error) {
					operands := nodes{in[0], number1(in[0], 1.75)}
					return f(operands[side], operands[1-side])
				}})
		}
	}
	for name, f := range map[string]func(a, b *node, same bool) (*node, error){
		"Lt": gorgonia.Lt, "Gt": gorgonia.Gt, "Lte": gorgonia.Lte, "Gte": gorgonia.Gte, "Eq": gorgonia.Eq, "Ne": gorgonia.Ne,
	} {
		for _, operands := range [][]shape{{m, m}, {m, s}, {s, m}, {s, s}} {
			cases = append(cases, stockCase{name: name, shapes: operands, constant: true,
				build: func(in nodes) (*node, error) { return f(in[0], in[1], true) }})
		}
	}
	// From the logarithm of a sigmoid Gorgonia makes a softplus, and removes nodes from the graph.
	return append(cases, stockCase{name: "BinaryXent", shapes: []shape{m, m}, positive: true, build: func(in nodes) (*node, error) {
		p, err := gorgonia.Sigmoid(in[0])
		if err != nil {
			return nil, err
		}
		return gorgonia.BinaryXent(p, in[1])
	}})
}

// number1 is a constant of x's type.
func number1(x *node, v float64) *node {
	if x.Dtype() == tensor.Float32 {
		return gorgonia.NewConstant(float32(v))
	}
	return gorgonia.NewConstant(v)
}

func productCases() []stockCase {
	cases := []stockCase{
		{name: "matrices", shapes: []shape{{3, 5}, {5, 7}}, build: func(in nodes) (*node, error) { return gorgonia.Mul(in[0], in[1]) }},
		{name: "matrix and vector", shapes: []shape{{3, 5}, {5}}, build: func(in nodes) (*node, error) { return gorgonia.Mul(in[0], in[1]) }},
		{name: "vector and matrix", shapes: []shape{{3}, {3, 5}}, build: func(in nodes) (*node, error) { return gorgonia.Mul(in[0], in[1]) }},
		{name: "vectors", shapes: []shape{{7}, {7}}, build: func(in nodes) (*node, error) { return gorgonia.Mul(in[0], in[1]) }},
		{name: "outer", shapes: []shape{{3}, {5}}, build: func(in nodes) (*node, error) { return gorgonia.OuterProd(in[0], in[1]) },
			constant: true}, // its gradient multiplies shapes that do not fit
		{name: "transposed used twice", shapes: []shape{{3, 5}, {3, 7}}, build: func(in nodes) (*node, error) {
			t, err := gorgonia.Transpose(in[0])
			if err != nil {
				return nil, err
			}
			y, err := gorgonia.Mul(t, in[1])
			if err != nil {
				return nil, err
			}
			sum, err := gorgonia.Sum(t, 1)
			if err != nil {
				return nil, err
			}
			return gorgonia.BroadcastAdd(y, sum, nil, []byte{1})
		}},
	}
	for i := range 4 {
		ta, tb := i&1 != 0, i&2 != 0
		a, b := shape{3, 5}, shape{5, 7}
		if ta {
			a = shape{5, 3}
		}
		if tb {
			b = shape{7, 5}
		}
		cases = append(cases,
			stockCase{name: fmt.Sprintf("transposed matrices %v %v", ta, tb), shapes: []shape{a, b}, build: func(in nodes) (_ *node, err error) {
				x, y := in[0], in[1]
				if ta {
					if x, err = gorgonia.Transpose(x); err != nil {
						return nil, err
					}
				}
				if tb {
					if y, err = gorgonia.Transpose(y); err != nil {
						return nil, err
					}
				}
				return gorgonia.Mul(x, y)
			}},
			stockCase{name: fmt.Sprintf("batched %v %v", ta, tb), shapes: []shape{append(shape{2}, a...), append(shape{2}, b...)},
				build: func(in nodes) (*node, error) { return gorgonia.BatchedMatMul(in[0], in[1], ta, tb) }},
			stockCase{name: fmt.Sprintf("batched twice %v %v", ta, tb), shapes: []shape{append(shape{2, 3}, a...), append(shape{2, 3}, b...)},
				build: func(in nodes) (*node, error) { return gorgonia.BatchedMatMul(in[0], in[1], ta, tb) }})
	}
	return cases
}

func reductionCases() []stockCase {
	var cases []stockCase
	for name, f := range map[string]func(*node, ...int) (*node, error){"Sum": gorgonia.Sum, "Max": gorgonia.Max, "Mean": gorgonia.Mean} {
		for _, c := range []struct {
			x    shape
			axes []int
		}{
			{shape{7}, nil}, {shape{3, 5}, nil}, {shape{3, 5}, []int{0}}, {shape{3, 5}, []int{1}}, {shape{2, 3, 5}, nil},
			{shape{2, 3, 5}, []int{0}}, {shape{2, 3, 5}, []int{1}}, {shape{2, 3, 5}, []int{2}}, {shape{2, 3, 5}, []int{0, 1}},
			{shape{2, 3, 5}, []int{1, 2}}, {shape{2, 3, 5}, []int{0, 2}},
		} {
			cases = append(cases, stockCase{name: fmt.Sprintf("%s along %v of", name, c.axes), shapes: []shape{c.x},
				build: func(in nodes) (*node, error) { return f(in[0], c.axes...) }})
		}
	}
	for name, f := range map[string]func(*node, ...int) (*node, error){"SoftMax": gorgonia.SoftMax, "LogSoftMax": gorgonia.LogSoftMax} {
		for _, c := range []struct {
			x    shape
			axes []int
		}{
			{shape{7}, nil}, {shape{3, 5}, nil}, {shape{3, 5}, []int{0}}, {shape{3, 5}, []int{1}}, {shape{2, 3, 5}, []int{2}},
			{shape{2, 3, 5}, []int{1}}, {shape{2, 3, 5}, []int{0}},
		} {
			cases = append(cases, stockCase{name: fmt.Sprintf("%s along %v of", name, c.axes), shapes: []shape{c.x},
				build: func(in nodes) (*node, error) { return f(in[0], c.axes...) }})
		}
	}
	return append(cases, stockCase{name: "SoftMax of a column", shapes: []shape{{5, 1}},
		build:   func(in nodes) (*node, error) { return gorgonia.SoftMax(in[0]) },
		instead: func(in nodes) (*node, error) { return gorgonia.SoftMax(in[0], 0) }})
}

func layoutCases(r *rand.Rand) []stockCase {
	var cases []stockCase
	one := func(name string, x shape, build func(x *node) (*node, error)) {
		cases = append(cases, stockCase{name: name, shapes: []shape{x}, build: func(in nodes) (*node, error) {
			h, err := gorgonia.Tanh(in[0]) // so that it is of an activation's type
			if err != nil {
				return nil, err
			}
			return build(h)
		}})
	}
	for _, to := range []shape{{15}, {5, 3}, {3, 5, 1}, {1, 15}} {
		one(fmt.Sprintf("Reshape %v", to), shape{3, 5}, func(x *node) (*node, error) { return gorgonia.Reshape(x, to.Clone()) })
	}
	for _, axes := range [][]int{{1, 0, 2}, {2, 1, 0}, {0, 2, 1}, {1, 2, 0}, {2, 0, 1}} {
		one(fmt.Sprintf("Transpose %v", axes), shape{2, 3, 5}, func(x *node) (*node, error) {
			return gorgonia.Transpose(x, slices.Clone(axes)...)
		})
	}
	one("Transpose of four", shape{2, 3, 5, 4}, func(x *node) (*node, error) { return gorgonia.Transpose(x, 0, 2, 1, 3) })
	for _, c := range []struct {
		name  string
		x     shape
		parts []tensor.Slice
	}{
		{"rows", shape{5, 3}, []tensor.Slice{gorgonia.S(1, 4)}}, {"a row", shape{5, 3}, []tensor.Slice{gorgonia.S(2)}},
		{"columns", shape{5, 7}, []tensor.Slice{nil, gorgonia.S(2, 5)}}, {"a column", shape{5, 7}, []tensor.Slice{nil, gorgonia.S(3)}},
		{"a block", shape{5, 7}, []tensor.Slice{gorgonia.S(1, 3), gorgonia.S(2, 6)}}, {"an element", shape{5}, []tensor.Slice{gorgonia.S(2)}},
		{"a part", shape{9}, []tensor.Slice{gorgonia.S(2, 7)}}, {"everything", shape{5, 3}, []tensor.Slice{gorgonia.S(0, 5)}},
		{"the middle", shape{2, 5, 3}, []tensor.Slice{nil, gorgonia.S(1, 4)}},
		{"a row, then columns", shape{5, 7}, []tensor.Slice{gorgonia.S(1), gorgonia.S(2, 6)}},
		{"every other row", shape{6, 3}, []tensor.Slice{gorgonia.S(0, 6, 2)}},
	} {
		one("Slice: "+c.name, c.x, func(x *node) (*node, error) { return gorgonia.Slice(x, c.parts...) })
	}
	cases = append(cases, stockCase{name: "At", shapes: []shape{{3, 5}}, constant: true,
		build:   func(in nodes) (*node, error) { return gorgonia.At(in[0], 1, 3) },
		instead: func(in nodes) (*node, error) { return gorgonia.Slice(in[0], gorgonia.S(1), gorgonia.S(3)) }})
	for _, c := range []struct {
		axis   int
		shapes []shape
	}{
		{0, []shape{{2, 5}, {3, 5}}}, {1, []shape{{3, 5}, {3, 2}, {3, 4}}}, {1, []shape{{2, 3, 5}, {2, 4, 5}}}, {0, []shape{{2}, {5}}},
		{1, []shape{{3, 1}, {3, 4}}}, {2, []shape{{2, 3, 5}, {2, 3, 2}}},
	} {
		cases = append(cases, stockCase{name: fmt.Sprintf("Concat along %d", c.axis), shapes: c.shapes,
			build: func(in nodes) (*node, error) { return gorgonia.Concat(c.axis, in...) }})
	}
	for _, c := range []struct {
		x    shape
		axis int
	}{{shape{5, 3}, 0}, {shape{5, 3}, 1}, {shape{7}, 0}, {shape{4, 3, 2}, 0}, {shape{4, 3, 2}, 1}, {shape{4, 3, 2}, 2}} {
		ids := make([]int, 6)
		for i := range ids {
			ids[i] = r.IntN(c.x[c.axis])
		}
		pick := stockCase{name: fmt.Sprintf("ByIndices along %d of", c.axis), shapes: []shape{c.x}, ids: ids,
			build: func(in nodes) (*node, error) { return gorgonia.ByIndices(in[0], in[1], c.axis) }}
		if len(c.x) == 1 || c.axis > 0 {
			pick.instead = func(in nodes) (*node, error) { return pickFirst(in[0], in[1], c.axis) }
		}
		cases = append(cases, pick)
	}
	cases = append(cases, stockCase{name: "ByIndices of a part", shapes: []shape{{5, 3}}, ids: []int{0, 4, 2, 4, 1},
		build: func(in nodes) (*node, error) {
			ids, err := gorgonia.Slice(in[1], gorgonia.S(1, 4))
			if err != nil {
				return nil, err
			}
			return gorgonia.ByIndices(in[0], ids, 0)
		}})
	cases = append(cases, stockCase{name: "Repeat of rows", shapes: []shape{{4, 3}, {8, 3}, {2, 3}, {1, 3}},
		build: func(in nodes) (*node, error) {
			one, _, err := gorgonia.Broadcast(in[3], in[2], gorgonia.NewBroadcastPattern([]byte{0}, nil))
			if err != nil {
				return nil, err
			}
			x, err := gorgonia.ApplyOp(one.Op(), in[0], gorgonia.Must(gorgonia.SizeOf(0, in[2])))
			if err != nil {
				return nil, err
			}
			return gorgonia.HadamardProd(x, in[1])
		}, constant: true})
	cases = append(cases, stockCase{name: "Repeat, times a number", shapes: []shape{{1, 3}, {2, 3}}, build: func(in nodes) (*node, error) {
		x, y, err := gorgonia.Broadcast(in[0], in[1], gorgonia.NewBroadcastPattern([]byte{0}, nil))
		if err != nil {
			return nil, err
		}
		return gorgonia.Add(y, gorgonia.Must(gorgonia.HadamardProd(x, number1(x, 3))))
	}})
	for name, f := range map[string]func(a, b *node, left, right []byte) (*node, error){
		"Add": gorgonia.BroadcastAdd, "Sub": gorgonia.BroadcastSub, "Mul": gorgonia.BroadcastHadamardProd, "Div": gorgonia.BroadcastHadamardDiv,
	} {
		for _, c := range []struct {
			a, b        shape
			left, right []byte
		}{
			{shape{3, 5}, shape{5}, nil, []byte{0}}, {shape{3, 5}, shape{3}, nil, []byte{1}}, {shape{3, 5}, shape{1, 5}, nil, []byte{0}},
			{shape{3, 1}, shape{3, 5}, []byte{1}, nil}, {shape{2, 3, 5}, shape{2, 1, 5}, nil, []byte{1}}, {shape{3, 5}, shape{1, 1}, nil, []byte{0, 1}},
			{shape{3, 1}, shape{1, 5}, []byte{1}, []byte{0}},
		} {
			cases = append(cases, stockCase{name: "Broadcast" + name, shapes: []shape{c.a, c.b}, positive: true,
				build: func(in nodes) (*node, error) { return f(in[0], in[1], c.left, c.right) }})
		}
	}
	return cases
}

// pickFirst is ByIndices with the axis brought to the front of a matrix, which Gorgonia does right.
func pickFirst(x, ids *node, axis int) (*node, error) {
	swap := make([]int, x.Dims())
	for i := range swap {
		swap[i] = i
	}
	swap[0], swap[axis] = axis, 0
	first, err := gorgonia.Transpose(x, swap...)
	if err != nil {
		return nil, err
	}
	s := first.Shape()
	if first, err = gorgonia.Reshape(first, shape{s[0], program.Size(s[1:])}); err != nil {
		return nil, err
	}
	if first, err = gorgonia.ByIndices(first, ids, 0); err != nil {
		return nil, err
	}
	s[0] = ids.Shape()[0]
	if first, err = gorgonia.Reshape(first, s); err != nil {
		return nil, err
	}
	return gorgonia.Transpose(first, slices.Clone(swap)...)
}
