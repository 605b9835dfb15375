package opbase

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// PackedSize returns the length of a flat vector that holds tensors of the given shapes.
func PackedSize(shapes ...tensor.Shape) int {
	n := 0
	for _, s := range shapes {
		n += Size(s)
	}
	return n
}

// Unpack returns a node for each of the tensors that packed, a vector of PackedSize(shapes...)
// elements, holds in this order. The nodes are views; no elements are copied.
func Unpack(packed *gorgonia.Node, shapes ...tensor.Shape) (gorgonia.Nodes, error) {
	if want := PackedSize(shapes...); packed.Dims() != 1 || packed.Shape()[0] != want {
		return nil, fmt.Errorf("unpack: got a packed result of shape %v, want (%d)", packed.Shape(),
			want)
	}

	parts := make(gorgonia.Nodes, len(shapes))
	offset := 0
	for i, s := range shapes {
		p := &PartOp{Offset: offset}
		Init(&p.Base, p, "Part", fmt.Sprintf("offset=%d shape=%v", offset, s),
			gorgonia.Nodes{packed}, packed.Dtype(), s,
			copyPart[float32], copyPart[float64])
		n, err := gorgonia.ApplyOp(p, packed)
		if err != nil {
			return nil, fmt.Errorf("unpack: %w", err)
		}
		parts[i] = n
		offset += Size(s)
	}

	return parts, nil
}

// PartOp is a view of one tensor in a packed result: packed[Offset : Offset+size] in its own shape.
type PartOp struct {
	Base
	Offset int
}

// Byproduct implements graph.Byproduct.
func (p *PartOp) Byproduct() {}

// Do returns the part as a view of the packed vector's memory.
func (p *PartOp) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	args, err := p.args(in)
	if err != nil {
		return nil, err
	}

	switch data := args[0].(type) {
	case []float32:
		return ValueOf(part(p, data), p.out.shape), nil
	case []float64:
		return ValueOf(part(p, data), p.out.shape), nil
	}

	return nil, fmt.Errorf("%v: want a float vector, got %T", p, args[0])
}

// part returns the elements of the part.
func part[T cpu.Float](p *PartOp, data []T) []T {
	end := p.Offset + Size(p.out.shape)
	return data[p.Offset:end:end]
}

// copyPart computes the part as a copy.
func copyPart[T cpu.Float](p *PartOp, out []T, in Args) error {
	copy(out, part(p, Slice[T](in, 0)))
	return nil
}

// DoDiff adds the part's gradient to the corresponding part of the packed vector's gradient; see
// [Base.DoDiff].
func (p *PartOp) DoDiff(ctx gorgonia.ExecutionContext, inputs gorgonia.Nodes,
	output *gorgonia.Node) error {
	if err := p.addPart(ctx, inputs, output); err != nil {
		return fmt.Errorf("%s: gradient: %w", p, err)
	}
	return nil
}

// addPart implements DoDiff.
func (p *PartOp) addPart(ctx gorgonia.ExecutionContext, inputs gorgonia.Nodes,
	output *gorgonia.Node) error {
	if ctx.Device != gorgonia.CPU || len(inputs) != 1 {
		return fmt.Errorf("%d inputs on %v, want one on the CPU", len(inputs), ctx.Device)
	}

	grad, err := output.Grad()
	if err != nil {
		return err
	}

	from, err := Flat(grad)
	if err != nil {
		return err
	}

	sum, err := inputs[0].Grad()
	if err != nil {
		return err
	}

	to, err := Flat(sum)
	if err != nil {
		return err
	}

	switch x := from.(type) {
	case []float32:
		return add(part(p, to.([]float32)), x)
	case []float64:
		return add(part(p, to.([]float64)), x)
	}

	return fmt.Errorf("the gradient is a %T", grad)
}
