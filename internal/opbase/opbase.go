// Package opbase holds what every Gorgonia op of this module shares. It has the part of gorgonia.Op
// that does not depend on what an op computes: type, shape, hash, allocation, access to the values'
// memory. It also has packed results and their parts.
//
// An op embeds [Base], which makes it a gorgonia.Op, and adds its configuration, DiffWRT and
// SymDiff. Gorgonia has no op with several results. One that needs them returns them packed one
// behind the other in a flat vector, and [Unpack] gives a node for each.
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

	// An older version makes every program that imports Gorgonia panic at start on current Go.
	// Importing it here makes the version in our go.mod a direct requirement, which reaches every
	// user of this module.
	_ "go4.org/unsafe/assume-no-moving-gc"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// Args are the flat, contiguous, row-major contents of an op's inputs: each a []float32, []float64
// or []int.
type Args []any

// Slice returns argument i of a, whose element type the op's constructor has made certain.
func Slice[T cpu.Float | int](a Args, i int) []T { return a[i].([]T) }

// Kernel computes an op: it writes every element of out, whatever out held before.
type Kernel[O any, T cpu.Float] func(op O, out []T, in Args) error

// Base is the part of a gorgonia.Op that all ops of this module share. It is set by [Init].
type Base struct {
	placement
	name, config string
	in           []operand
	out          operand
	aux          []*Aux
	forward      *Base // of a backward op
	self         gorgonia.Op
	derivative   *derivative
	stop         *cpu.Stop // of the present run
	f32          func(out []float32, in Args) error
	f64          func(out []float64, in Args) error
}

type operand struct {
	typ   hm.Type
	dt    tensor.Dtype
	shape tensor.Shape
}

// Init fills b, the Base embedded in op. name is what errors and graphs show. config is everything
// beside the inputs' shapes that distinguishes two ops of that name. It is part of the hash, so
// that Gorgonia never merges different ops. out is the shape of the result, empty for a scalar, and
// dt its type. f32 and f64 are the op's arithmetic.
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

// Shared returns b: what an op that embeds a Base shares with the others.
func (b *Base) Shared() *Base { return b }

// Op returns the op that embeds b.
func (b *Base) Op() gorgonia.Op { return b.self }

// Run computes the op on flat memory: out and the inputs have the types and sizes that the op was
// made for.
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

// Stop returns what may ask the op's arithmetic to end early, nil outside of a run that may end so.
func (b *Base) Stop() *cpu.Stop { return b.stop }

// RunUntil is Run that ends early when stop asks for it, if the op may take long: the result is
// worth nothing then.
func (b *Base) RunUntil(stop *cpu.Stop, out any, in Args) error {
	b.stop = stop
	defer func() { b.stop = nil }()
	return b.Run(out, in)
}

// Differentiates notes that b is the backward op of forward, whose auxiliary memory it reads.
func (b *Base) Differentiates(forward gorgonia.Op) {
	if f, ok := forward.(interface{ Shared() *Base }); ok {
		b.forward = f.Shared()
	}
}

// Forward returns the forward op that b is the backward op of, nil if it is none.
func (b *Base) Forward() *Base { return b.forward }

// Name returns the op's name.
func (b *Base) Name() string { return b.name }

// InputShape returns the shape of input i, nil if there is none. The caller must not change it.
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

// Type returns the op's signature. Every call builds a new one, since Gorgonia recycles what it
// gets. That of a zero value is nil.
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

// InferShape returns the shape of the result, after checking that the inputs have the shapes the op
// was made for.
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

// OverwritesInput reports that no input's memory becomes the result's.
func (b *Base) OverwritesInput() int { return -1 }

// WriteHash writes what identifies the op: name, configuration, and the types and shapes of inputs
// and result.
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

// String returns name and configuration.
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

// UsePreallocDo computes the op into the memory of prealloc, which must have the result's type and
// shape and be contiguous. What it held does not matter.
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

// errZero is the error of an op that nobody has made.
var errZero = errors.New(
	"the op is a zero value: ops are made by the functions that add them to a graph")

// CheckGradient returns an error unless the nodes given to an op's SymDiff are those of the op.
// They are its inputs, its result and the gradient of that.
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

// Flat returns the elements of v in row-major order, one element for a scalar. They are v's own
// memory where it is contiguous. Otherwise (a view, a lazy transpose, a column-major tensor) they
// are a copy.
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

// sliceOf returns the memory of a contiguous tensor. (tensor.Dense.Data would give a bare element
// for a scalar.)
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

// Size returns the number of elements of a tensor of the given shape: one for a scalar.
func Size(shape tensor.Shape) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// ValueOf returns a value over the memory of flat, a []float32, []float64 or []int; a scalar is a
// copy.
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
