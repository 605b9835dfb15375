package program

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

type launch struct {
	Y       gpu.Ptr
	X       kernel.Rows
	N       int
	Variant kernel.Variant
	Null    gpu.Ptr
}

func (l launch) Tuning() (op, shape string)   { return "Launch", fmt.Sprint(l.X.Stride) }
func (l *launch) SetVariant(w kernel.Variant) { l.Variant = w }

// TestBind checks that Bind returns a copy of the launch with the addresses and strides of the
// operands, and doesn't modify the call's launch.
func TestBind(t *testing.T) {
	p := &Program{}
	y, x := p.NewArray(gpu.Float32, 6, 4), p.NewArray(gpu.BFloat16, 6, 10)
	y.Base, x.Base = 1<<20, 2<<20
	part := x.Columns(3, 4)
	l := launch{N: 24}
	c := p.Add(NewCall(&l, Writes(&l.Y, y), Reads(&l.X, part), Reads(NoField, x),
		Reads(&l.Null, nil)))
	require.Len(t, c.Args, 3, "an operand without an array")

	want := launch{Y: 1 << 20, X: kernel.Rows{Ptr: 2<<20 + 6, Stride: 10}, N: 24}
	require.Equal(t, want, c.Bind((*Array).Ptr))
	require.Equal(t, launch{N: 24}, l)
	require.Equal(t, launch{Y: Alignment, X: kernel.Rows{Ptr: Alignment + 6, Stride: 10}, N: 24},
		c.Bind((*Array).StandIn))

	c.SetVariant(kernel.Variant{Family: "fused"})
	want.Variant = kernel.Variant{Family: "fused"}
	require.Equal(t, want, c.Bind((*Array).Ptr))
}

// TestOperand checks that operands are found by the field that takes them, and that operands without
// a field are not.
func TestOperand(t *testing.T) {
	p := &Program{}
	a, b := p.NewArray(gpu.Float32, 4), p.NewArray(gpu.Float32, 4)
	var l launch
	c := NewCall(&l, Reads(NoField, a), Writes(&l.Y, b))
	require.Equal(t, b, c.Operand(&l.Y).Array)
	require.Nil(t, c.Operand(&l.Null))
	require.Nil(t, c.Operand(NoField))
}

// TestPrepared checks that a launch that already contains its addresses is not modified.
func TestPrepared(t *testing.T) {
	p := &Program{}
	c := Prepared(launch{Y: 7}, Writes(NoField, p.NewArray(gpu.Float32, 4)))
	require.Equal(t, launch{Y: 7}, c.Bind((*Array).Ptr))
	require.Len(t, c.Args, 1)
}

// TestVariantsOf checks that VariantsOf queries the variants with a launch that shows the alignment and
// strides of its operands.
func TestVariantsOf(t *testing.T) {
	p := &Program{}
	x, y := p.NewArray(gpu.Float32, 6, 10), p.NewArray(gpu.Float32, 6, 4)
	var l launch
	c := NewCall(&l, Reads(&l.X, x.Columns(2, 4)), Writes(&l.Y, y))
	a, b := kernel.Variant{Family: "a"}, kernel.Variant{Family: "b", Size: 2}
	g, variants := VariantsOf(c, func(params any) []kernel.Variant {
		require.Equal(t, kernel.Rows{Ptr: Alignment + 8, Stride: 10}, params.(launch).X)
		return []kernel.Variant{a, b}
	})
	require.Equal(t, []kernel.Variant{a, b}, variants)
	require.Equal(t, Group{Op: "Launch", Shape: "10", Results: []*Array{y},
		Alternatives: []Alternative{{"a", []*Call{c}, &a}, {"b-2", []*Call{c}, &b}}}, g)
}

// TestCallBytes checks that Bytes counts repeated operands once, and updated operands twice.
func TestCallBytes(t *testing.T) {
	p := &Program{}
	a, b := p.NewArray(gpu.Float32, 10), p.NewArray(gpu.BFloat16, 7)
	c := &Call{Args: []Arg{Reads(NoField, a), Reads(NoField, a), Updates(NoField, b)}}
	require.Equal(t, 40+2*14.0, c.Bytes())
	require.True(t, c.Touches(b.Buffer))
	require.False(t, c.Touches(p.NewArray(gpu.Float32, 1).Buffer))
}
