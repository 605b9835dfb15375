package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/rope"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
)

func lowerRoPE(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	x := c.act(n, in[0])
	y := c.like(x)
	c.Add(c.rotate(n, y, x))
	return y, nil
}

// rotate is the rotation of all heads in the rows of x, which node n is of, or is of some of. y may be x.
func (c *compiler) rotate(n *gorgonia.Node, y, x *program.Array) *program.Call {
	o := n.Op().(*op.RoPEOp)
	t := c.rotation(o)
	a := rope.Rotate{Rows: x.Shape[0], Seq: o.Config.Seq, Heads: x.Shape[1] / o.Config.HeadDim,
		HeadDim: o.Config.HeadDim, XStride: x.Stride, YStride: y.Stride, Inverse: o.Inverse, Type: x.Type}
	out := program.Writes("Y", y)
	if y == x {
		out.Role = program.Update
	}
	return c.newCall(n, a, program.Reads("X", x), out, program.Reads("Cos", t.cos), program.Reads("Sin", t.sin))
}

// rotationTables are the cosines and sines of a rotation, which ops with the same angles share, and,
// where a product turns its results, both in the order of that.
type rotationTables struct{ cos, sin, angles *program.Array }

func (c *compiler) rotation(o *op.RoPEOp) *rotationTables {
	key := rotationOf(o)
	if c.rotations[key] == nil {
		cosines, sines := o.Config.Tables()
		c.rotations[key] = &rotationTables{cos: c.NewConstant(narrow(cosines)), sin: c.NewConstant(narrow(sines))}
	}
	return c.rotations[key]
}

// angles is rotation with the table of products.
func (c *compiler) angles(o *op.RoPEOp) *rotationTables {
	t := c.rotation(o)
	if t.angles == nil {
		t.angles = c.NewConstant(gemm.RoPEAngles(t.cos.Data, t.sin.Data, o.Config.HeadDim/2))
	}
	return t
}

func narrow(wide []float64) []float32 {
	s := make([]float32, len(wide))
	for i, v := range wide {
		s[i] = float32(v)
	}
	return s
}

// rotation is the angles of a RoPE, whatever the number of heads.
type rotation struct {
	config  op.RoPEConfig
	scaling op.RoPEScaling
}

func rotationOf(o *op.RoPEOp) rotation {
	r := rotation{config: o.Config}
	r.config.Heads, r.config.Scaling = 0, nil
	if o.Config.Scaling != nil {
		r.scaling = *o.Config.Scaling
	}
	return r
}
