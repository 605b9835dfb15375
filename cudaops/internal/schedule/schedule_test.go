package schedule

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// TestPutOff checks that products without dependents move to the end and that all other calls keep their
// order.
func TestPutOff(t *testing.T) {
	p := &program.Program{}
	array := func() *program.Array { return p.NewArray(gpu.Float32, 4) }
	g, x, dx, table := array(), array(), array(), array()
	add := func(op string, params any, args ...program.Arg) {
		p.Add(&program.Call{Op: op, Params: params, Args: args})
	}
	w := func(a *program.Array) program.Arg { return program.Writes(program.NoField, a) }
	r := func(a *program.Array) program.Arg { return program.Reads(program.NoField, a) }
	add("early", &program.Matmul{}, w(array()), r(g))
	add("dw of two", &program.Matmul{}, w(array()), r(g), r(x))
	add("dx", &program.Matmul{}, w(dx), r(g))
	add("dw", &program.Matmul{}, w(array()), r(dx), r(x))
	add("norm", nil, program.Updates(program.NoField, dx))
	add("last dw", &program.Matmul{}, w(array()), r(dx), r(x))
	add("embedding", nil, w(table), r(dx))
	DeferProducts(p, 2)
	var order []string
	for _, c := range p.Calls {
		order = append(order, c.Op)
	}

	require.Equal(t, []string{"early", "dx", "dw", "norm", "embedding", "last dw", "dw of two"}, order)
}
