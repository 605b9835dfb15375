package cpuops_test

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/opcase/optest"
)

// TestOps runs the suite of op cases on this package's machine.
func TestOps(t *testing.T) {
	open := func(g *gorgonia.ExprGraph, _, outputs gorgonia.Nodes) (optest.Machine, error) {
		return cpuops.NewMachine(g, cpuops.WithOutputs(outputs...))
	}
	for _, s := range []optest.Setup{
		{Dtype: tensor.Float64, Open: open, Forward: 1e-12, Backward: 1e-13},
		{Dtype: tensor.Float32, Open: open, Forward: 1e-6, Backward: 1e-5},
	} {
		t.Run(s.Dtype.String(), func(t *testing.T) { optest.Run(t, s) })
	}
}
