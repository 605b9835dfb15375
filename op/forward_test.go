package op_test

import (
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/opcase"
)

// TestBackwardOpsDeclareTheirForward checks that a backward op with a field Forward has declared it with
// Differentiates. Otherwise a machine could reuse the memory of the forward op before the backward op has
// read it.
func TestBackwardOpsDeclareTheirForward(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	checked := 0
	for _, o := range opcase.All {
		if o.Cases == nil {
			continue
		}
		for _, c := range o.Cases(r) {
			in, wrt := c.Nodes(tensor.Float32)
			out, err := c.Build(in)
			require.NoError(t, err, "%s: %v", o.Name, c)
			sum, err := gorgonia.Sum(out)
			require.NoError(t, err)
			if len(wrt) == 0 {
				continue
			}
			if _, err := gorgonia.Grad(sum, wrt...); err != nil {
				continue // an op without a gradient
			}

			for _, n := range sum.Graph().AllNodes() {
				shared, ok := n.Op().(interface{ Shared() *opbase.Base })
				if !ok {
					continue
				}
				field := reflect.ValueOf(n.Op()).Elem().FieldByName("Forward")
				if !field.IsValid() || field.Kind() != reflect.Pointer {
					continue
				}
				forward, ok := field.Interface().(interface{ Shared() *opbase.Base })
				if !ok || len(forward.Shared().Aux()) == 0 {
					continue
				}
				require.Same(t, forward.Shared(), shared.Shared().Forward(), "%T of %s", n.Op(), o.Name)
				checked++
			}
		}
	}

	require.NotZero(t, checked)
}
