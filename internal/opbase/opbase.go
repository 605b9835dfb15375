// Package opbase provides what all Gorgonia ops of this module share: the parts of gorgonia.Op that
// do not depend on the computation, such as type, shape, hash, allocation and access to the memory
// of values.
//
// An op embeds [Base], which makes it a gorgonia.Op, and adds its configuration, DiffWRT and SymDiff.
// Since Gorgonia does not support ops with several results, such ops pack theirs in a flat vector,
// from which [Unpack] creates a node for each.
package opbase

import (
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"slices"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	// Older versions make every program that imports Gorgonia panic at startup on current Go. This
	// import makes the version in our go.mod a direct requirement, which applies to all users of
	// this module.
	_ "go4.org/unsafe/assume-no-moving-gc"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// Args holds the flat, contiguous, row-major contents of an op's inputs. Each element is a
// []float32, []float64 or []int, or a *gemm.Compact for an op that is a [CompactReader].
type Args []any

// Slice returns argument i of a. The op's constructor has checked the element type.
func Slice[T cpu.Float | int](a Args, i int) []T { return a[i].([]T) }

// CompactReader is an op that can read some of its inputs as a [gemm.Compact] instead of a []float32.
type CompactReader interface {
	// ReadsCompact reports whether the op can read the input with the given index in this form.
	ReadsCompact(input int) bool
}

// CompactWeights returns argument i if it is in compact form, and nil otherwise.
func (a Args) CompactWeights(i int) *gemm.Compact {
	w, _ := a[i].(*gemm.Compact)
	return w
}

// Expanded returns argument i like [Slice]. If the argument is in compact form, Expanded widens it in
// temporary memory, which release returns.
func Expanded[T cpu.Float](a Args, i int) (x []T, release func()) {
	w := a.CompactWeights(i)
	if w == nil {
		return Slice[T](a, i), func() {}
	}

	buf := cpu.GetBuffers[float32]()
	wide := buf.Elements(w.Out * w.In)
	w.Expand(wide)
	return any(wide).([]T), func() { cpu.PutBuffers(buf) }
}

// Kernel computes an op. It must overwrite every element of out.
type Kernel[O any, T cpu.Float] func(op O, out []T, in Args) error

// Base is the part of a gorgonia.Op that all ops of this module share. [Init] initializes it.
type Base struct {
	placement
	name, config string
	in           []operand
	out          operand
	aux          []*Aux
	forward      *Base // only in a backward op
	self         gorgonia.Op
	derivative   *derivative
	stop         *cpu.Stop // set during a run that may return early
	f32          func(out []float32, in Args) error
	f64          func(out []float64, in Args) error
}

// operand is the type and shape of an input or of the result.
type operand struct {
	typ   hm.Type
	dt    tensor.Dtype
	shape tensor.Shape
}

// Init initializes b, the Base embedded in op.
//
// name appears in errors and graphs. config contains everything other than the inputs' shapes that
// distinguishes ops with that name; it is part of the hash, so that Gorgonia never merges different
// ops. out is the shape of the result, empty for a scalar, and dt its type. f32 and f64 compute the
// op.
func Init[O gorgonia.Op](b *Base, op O, name, config string, inputs []*gorgonia.Node,
	dt tensor.Dtype, out tensor.Shape,
	f32 Kernel[O, float32], f64 Kernel[O, float64]) {
	b.place(op)
	b.self, b.derivative = op, &derivative{}
	b.name, b.config = name, config
	for _, n := range inputs {
		b.in = append(b.in, operand{n.Type(), n.Dtype(), n.Shape().Clone()})
	}

	b.out = operand{dt, dt, out.Clone()}
	if len(out) > 0 {
		b.out.typ = gorgonia.TensorType{Dims: len(out), Of: dt}
	}

	b.f32 = func(out []float32, in Args) error { return f32(op, out, in) }
	b.f64 = func(out []float64, in Args) error { return f64(op, out, in) }
}

// Shared returns b, the part of an op that all ops share.
func (b *Base) Shared() *Base { return b }

// Op returns the op that embeds b.
func (b *Base) Op() gorgonia.Op { return b.self }

// Run computes the op on flat memory. out and the inputs must have the types and sizes of the op.
func (b *Base) Run(out any, in Args) error {
	var err error
	switch out := out.(type) {
	case []float32:
		err = b.f32(out, in)
	case []float64:
		err = b.f64(out, in)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", b.name, err)
	}

	return nil
}

// Stop returns the Stop that may interrupt the current run, or nil.
func (b *Base) Stop() *cpu.Stop { return b.stop }

// RunUntil is like Run, but a long-running op returns early, with an undefined result, once stop is
// set.
func (b *Base) RunUntil(stop *cpu.Stop, out any, in Args) error {
	b.stop = stop
	defer func() { b.stop = nil }()
	return b.Run(out, in)
}

// Differentiates records that b is the backward op of forward and reads its auxiliary memory.
func (b *Base) Differentiates(forward gorgonia.Op) {
	if f, ok := forward.(interface{ Shared() *Base }); ok {
		b.forward = f.Shared()
	}
}

// Forward returns the forward op of a backward op, or nil for other ops.
func (b *Base) Forward() *Base { return b.forward }

// Name returns the op's name.
func (b *Base) Name() string { return b.name }

// InputShape returns the shape of input i, or nil if i is out of range. The caller must not modify it.
func (b *Base) InputShape(i int) tensor.Shape {
	if i < 0 || i >= len(b.in) {
		return nil
	}
	return b.in[i].shape
}

// Dtype returns the element type of the result.
func (b *Base) Dtype() tensor.Dtype { return b.out.dt }

// Arity returns the number of inputs.
func (b *Base) Arity() int { return len(b.in) }

// Type returns the op's signature, or nil for a zero value. Every call returns a new one, because
// Gorgonia recycles it.
func (b *Base) Type() hm.Type {
	if b.self == nil {
		return nil
	}
	ts := make([]hm.Type, 0, len(b.in)+1)
	for _, in := range b.in {
		ts = append(ts, in.typ)
	}
	return hm.NewFnType(append(ts, b.out.typ)...)
}

// InferShape returns the shape of the result. It returns an error unless the inputs have the shapes
// given when the op was created.
func (b *Base) InferShape(in ...gorgonia.DimSizer) (tensor.Shape, error) {
	shapes, err := gorgonia.DimSizersToShapes(in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", b.name, err)
	}

	if len(shapes) != len(b.in) {
		return nil, fmt.Errorf("%s: got %d inputs, want %d", b.name, len(shapes), len(b.in))
	}

	for i, s := range shapes {
		if !slices.Equal(s, b.in[i].shape) {
			return nil, fmt.Errorf("%s: input %d has shape %v, want %v",
				b.name, i, s, b.in[i].shape)
		}
	}

	return b.out.shape.Clone(), nil
}

// ReturnsPtr reports that the result is not a copy of an input.
func (b *Base) ReturnsPtr() bool { return true }

// OverwritesInput reports that the result does not reuse an input's memory.
func (b *Base) OverwritesInput() int { return -1 }

// WriteHash writes the identity of the op: its name, configuration, and the types and shapes of
// inputs and result.
func (b *Base) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "kasmina.%s{%s}", b.name, b.config)
	for _, o := range append(slices.Clone(b.in), b.out) {
		fmt.Fprintf(h, "%v%v", o.dt, o.shape)
	}
}

// Hashcode returns the 32-bit hash of WriteHash.
func (b *Base) Hashcode() uint32 {
	h := fnv.New32a()
	b.WriteHash(h)
	return h.Sum32()
}

// String returns the name and the configuration.
func (b *Base) String() string {
	if b.config == "" {
		return b.name
	}
	return b.name + "{" + b.config + "}"
}

// Do computes the op into new memory.
func (b *Base) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	args, err := b.args(in)
	if err != nil {
		return nil, err
	}

	n := Size(b.out.shape)
	switch b.out.dt {
	case tensor.Float32:
		out := make([]float32, n)
		if err := b.f32(out, args); err != nil {
			return nil, fmt.Errorf("%s: %w", b.name, err)
		}
		return ValueOf(out, b.out.shape), nil
	default:
		out := make([]float64, n)
		if err := b.f64(out, args); err != nil {
			return nil, fmt.Errorf("%s: %w", b.name, err)
		}
		return ValueOf(out, b.out.shape), nil
	}
}

// UsePreallocDo computes the op into the memory of prealloc, which must be contiguous and have the
// result's type and shape. Its contents are overwritten.
func (b *Base) UsePreallocDo(prealloc gorgonia.Value,
	in ...gorgonia.Value) (gorgonia.Value, error) {
	args, err := b.args(in)
	if err != nil {
		return nil, err
	}

	fits := prealloc != nil && prealloc.Dtype() == b.out.dt &&
		slices.Equal(prealloc.Shape(), b.out.shape)
	if d, ok := prealloc.(*tensor.Dense); ok {
		fits = fits && !d.IsMaterializable() && !d.DataOrder().IsColMajor()
	}

	if !fits {
		return nil, fmt.Errorf("%s: the preallocated value must be a contiguous %v of shape %v",
			b.name, b.out.dt, b.out.shape)
	}

	switch p := prealloc.(type) {
	case *gorgonia.F32:
		out := []float32{0}
		err = b.f32(out, args)
		*p = gorgonia.F32(out[0])
	case *gorgonia.F64:
		out := []float64{0}
		err = b.f64(out, args)
		*p = gorgonia.F64(out[0])
	case *tensor.Dense:
		switch out := sliceOf(p).(type) {
		case []float32:
			err = b.f32(out, args)
		case []float64:
			err = b.f64(out, args)
		}
	default:
		err = fmt.Errorf("cannot write a result into a %T", prealloc)
	}

	if err != nil {
		return nil, fmt.Errorf("%s: %w", b.name, err)
	}

	return prealloc, nil
}

// errZero is the error for the use of a zero op.
var errZero = errors.New(
	"the op is a zero value: use the function that adds the op to a graph")

// CheckGradient returns an error unless the arguments of an op's SymDiff are valid: the number of
// inputs must match, and no node may be nil.
func CheckGradient(b *Base, inputs gorgonia.Nodes, output, grad *gorgonia.Node) error {
	if b.self == nil {
		return errZero
	}
	if len(inputs) != len(b.in) || output == nil || grad == nil || slices.Contains(inputs, nil) {
		return fmt.Errorf("%s: SymDiff got %d inputs, want %d, and none of them, the output or "+
			"the gradient may be nil", b.name, len(inputs), len(b.in))
	}
	return nil
}

// args returns the contents of the inputs after checking their types and sizes.
func (b *Base) args(in []gorgonia.Value) (Args, error) {
	if b.self == nil {
		return nil, errZero
	}

	if len(in) != len(b.in) {
		return nil, fmt.Errorf("%s: got %d inputs, want %d", b.name, len(in), len(b.in))
	}

	args := make(Args, len(in))
	for i, v := range in {
		want := b.in[i]
		if v == nil {
			return nil, fmt.Errorf("%s: input %d has no value: bind one with gorgonia.Let", b.name,
				i)
		}
		if v.Dtype() != want.dt || Size(v.Shape()) != Size(want.shape) {
			return nil, fmt.Errorf("%s: input %d is a %v of shape %v, want %v of shape %v",
				b.name, i, v.Dtype(), v.Shape(), want.dt, want.shape)
		}
		flat, err := Flat(v)
		if err != nil {
			return nil, fmt.Errorf("%s: input %d: %w", b.name, i, err)
		}
		args[i] = flat
	}

	return args, nil
}

// Flat returns the elements of v in row-major order, or the single element of a scalar. For
// contiguous values, it returns v's own memory; for views, lazy transposes and column-major
// tensors, a copy.
func Flat(v gorgonia.Value) (any, error) {
	switch v := v.(type) {
	case *gorgonia.F32:
		return []float32{float32(*v)}, nil
	case *gorgonia.F64:
		return []float64{float64(*v)}, nil
	case *gorgonia.I:
		return []int{int(*v)}, nil
	case *tensor.Dense:
		if v.IsMaterializable() {
			v = v.Materialize().(*tensor.Dense)
		}
		if v.DataOrder().IsColMajor() && v.Dims() > 1 {
			return rowMajor(v), nil
		}
		return sliceOf(v), nil
	}

	return nil, fmt.Errorf("cannot read a %T: want a dense tensor or a float", v)
}

// sliceOf returns the memory of a contiguous tensor. Unlike tensor.Dense.Data, it returns a slice
// even for a scalar.
func sliceOf(d *tensor.Dense) any {
	switch d.Dtype() {
	case tensor.Float32:
		return d.Float32s()
	case tensor.Float64:
		return d.Float64s()
	case tensor.Int:
		return d.Ints()
	}
	return d.Data()
}

// rowMajor returns a row-major copy of the elements of a column-major tensor.
func rowMajor(d *tensor.Dense) any {
	switch data := d.Data().(type) {
	case []float32:
		return gather(data, d.Shape(), d.Strides())
	case []float64:
		return gather(data, d.Shape(), d.Strides())
	case []int:
		return gather(data, d.Shape(), d.Strides())
	default:
		return data
	}
}

// gather returns the elements of a strided tensor in row-major order.
func gather[T any](data []T, shape tensor.Shape, strides []int) []T {
	out := make([]T, 0, Size(shape))
	var walk func(dim, offset int)
	walk = func(dim, offset int) {
		if dim == len(shape) {
			out = append(out, data[offset])
			return
		}
		for i := range shape[dim] {
			walk(dim+1, offset+i*strides[dim])
		}
	}

	walk(0, 0)
	return out
}

// Size returns the number of elements of a tensor with the given shape, which is 1 for a scalar.
func Size(shape tensor.Shape) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// ValueOf returns a value that uses the memory of flat, a []float32, []float64 or []int. A scalar
// is a copy.
func ValueOf(flat any, shape tensor.Shape) gorgonia.Value {
	if len(shape) == 0 {
		switch x := flat.(type) {
		case []float32:
			return gorgonia.NewF32(x[0])
		case []float64:
			return gorgonia.NewF64(x[0])
		case []int:
			return gorgonia.NewI(x[0])
		}
	}

	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(flat))
}
