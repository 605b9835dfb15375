package program

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

type rows struct {
	Ptr    gpu.Ptr
	Stride int
}

type launch struct {
	Y    gpu.Ptr
	X    rows
	N    int
	Way  string
	Null gpu.Ptr
}

// TestBind wants addresses and strides in the fields that operands name, and the rest of a launch,
// and the call, as they were.
func TestBind(t *testing.T) {
	p := &Program{}
	y, x := p.NewArray(gpu.Float32, 6, 4), p.NewArray(gpu.BFloat16, 6, 10)
	y.Base, x.Base = 1<<20, 2<<20
	part := x.Columns(3, 4)
	c := p.Add(&Call{Params: launch{N: 24},
		Args: []Arg{Writes("Y", y), Reads("X", part), Reads("", x)}})
	want := launch{Y: 1 << 20, X: rows{2<<20 + 6, 10}, N: 24}
	require.Equal(t, want, c.Bind(c.Params, (*Array).Ptr))
	require.Equal(t, launch{N: 24}, c.Params)
	require.Equal(t, launch{Y: Alignment, X: rows{Alignment + 6, 10}, N: 24},
		c.Bind(c.Params, (*Array).StandIn))
	want.Way = "fused"
	require.Equal(t, want, WithWay(c.Bind(c.Params, (*Array).Ptr), "fused"))
	c.Args = append(c.Args, Reads("Z", x))
	require.PanicsWithValue(t, "program: program.launch has no field Z", func() {
		c.Bind(c.Params, (*Array).Ptr)
	})
}

// TestCallBytes wants operands counted once, and twice where they are read and written.
func TestCallBytes(t *testing.T) {
	p := &Program{}
	a, b := p.NewArray(gpu.Float32, 10), p.NewArray(gpu.BFloat16, 7)
	c := &Call{Args: []Arg{Reads("", a), Reads("", a), Updates("", b)}}
	require.Equal(t, 40+2*14.0, c.Bytes())
	require.True(t, c.Touches(b.Buffer))
	require.False(t, c.Touches(p.NewArray(gpu.Float32, 1).Buffer))
}
