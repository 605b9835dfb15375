package cpuops_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optime"
)

// residual returns the graph of tanh(x + x·wᵀ) ⊙ x with the gradient of the parameter w.
func residual(t *testing.T) (g *gorgonia.ExprGraph, w, y *gorgonia.Node) {
	t.Helper()
	must := check[*gorgonia.Node](t)
	g = gorgonia.NewGraph()
	r := random(t)
	x := gorgonia.NodeFromAny(g, normal(r, tensor.Float32, 32, 64), gorgonia.WithName("x"))
	w = gorgonia.NodeFromAny(g, normal(r, tensor.Float32, 64, 64), gorgonia.WithName("w"))
	sum := must(gorgonia.Add(x, must(op.Linear(x, w))))
	y = must(gorgonia.HadamardProd(must(gorgonia.Tanh(sum)), x))
	_, err := gorgonia.Grad(must(gorgonia.Sum(y)), w)
	require.NoError(t, err)
	return g, w, y
}

// TestVariants checks that all rules give bit-identical results, and that Choices reports the
// variants.
func TestVariants(t *testing.T) {
	t.Setenv("KASMINA_VARIANTS", "")
	g, w, y := residual(t)
	var want, wantGrad any
	for _, c := range []struct {
		rules        []string
		environment  string
		fused, stock bool
	}{
		{nil, "", true, false},
		{[]string{"LinearAdd=separate"}, "", false, false},
		{nil, "LinearAdd!=fused", false, false},
		{[]string{"LinearAdd=separate"}, "LinearAdd=fused", true, false},
		{[]string{"+*=gorgonia", "⊙*=gorgonia"}, "", false, true},
		{[]string{"RMSNorm=any", "LinearAdd=ring"}, "", true, false}, // no variant matches
	} {
		t.Setenv("KASMINA_VARIANTS", c.environment)
		m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithVariants(c.rules...),
			cpuops.WithOutputs(y, w.Deriv())))
		for range 2 {
			require.NoError(t, m.RunAll())
			got, grad := flat(t, check[gorgonia.Value](t)(m.Value(y))),
				flat(t, check[gorgonia.Value](t)(m.Value(w.Deriv())))
			if want == nil {
				want, wantGrad = got, grad
			}
			require.Equal(t, want, got, c.rules)
			require.Equal(t, wantGrad, grad, c.rules)
		}
		named := map[string]optime.Choice{}
		for _, choice := range m.Choices() {
			named[choice.Op] = choice
			require.Contains(t, choice.Variants, choice.Variant)
			require.Len(t, choice.Variants, choice.Of)
		}
		fused, ok := named["LinearAdd"]
		require.Equal(t, c.fused, ok, "%v", named)
		if ok {
			require.Equal(t, "32x64, 32x64, 64x64 float32", fused.Shape)
			require.Equal(t, c.environment != "", fused.Source == "forced")
		}
		require.Equal(t, c.stock, named["⊙ false"].Variant == "gorgonia", "%v", named)
		require.Equal(t, "gorgonia", named["tanh"].Variant)
		require.NotEqual(t, "gorgonia", named["LinearGrad"].Variant)
		require.NoError(t, m.Close())
		require.Empty(t, m.Choices())
	}

	_, err := cpuops.NewMachine(g, cpuops.WithVariants("LinearAdd"))
	require.ErrorContains(t, err, "want OP=VARIANT")
	t.Setenv("KASMINA_VARIANTS", "[=any")
	_, err = cpuops.NewMachine(g)
	require.ErrorContains(t, err, "KASMINA_VARIANTS")
}

// TestMonitor checks that every third run is timed, and that the times include every op.
func TestMonitor(t *testing.T) {
	t.Setenv("KASMINA_VARIANTS", "")
	g, w, y := residual(t)
	_, err := cpuops.NewMachine(g, cpuops.WithMonitor(1))
	require.ErrorContains(t, err, "at least 2")
	m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithMonitor(3), cpuops.WithParams(w),
		cpuops.WithOutputs(y)))
	plain := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithParams(w),
		cpuops.WithOutputs(y)))
	var before time.Duration
	for run := 1; run <= 6; run++ {
		start := time.Now()
		require.NoError(t, m.RunAll())
		took := time.Since(start)
		got := flat(t, check[gorgonia.Value](t)(m.Value(y)))
		times := m.Monitor()
		require.Equal(t, run < 3, times == nil)
		var whole time.Duration
		for _, o := range times {
			whole += o.Time
		}
		if run == 3 {
			require.LessOrEqual(t, whole, took)
			require.Positive(t, whole)
		} else if run == 4 || run == 5 {
			require.Equal(t, before, whole, "a run that was not timed counts")
		}
		before = whole
		require.NoError(t, plain.RunAll())
		require.Equal(t, flat(t, check[gorgonia.Value](t)(plain.Value(y))), got)
	}

	require.Empty(t, plain.Monitor())
	times := m.Monitor()
	require.True(t, slices.IsSortedFunc(times, func(a, b optime.OpTime) int {
		return int(b.Time - a.Time)
	}))
	at := func(name string) optime.OpTime {
		i := slices.IndexFunc(times, func(o optime.OpTime) bool { return o.Op == name })
		require.GreaterOrEqual(t, i, 0, "%s is not among %v", name, times)
		return times[i]
	}
	require.Equal(t, 2.0*32*64*64, at("LinearAdd").FLOPs)
	require.Equal(t, 4.0*(3*32*64+64*64), at("LinearAdd").Bytes)
	require.Equal(t, 4.0*32*64*64, at("LinearGrad").FLOPs)
	require.Equal(t, 1, at("Accumulate").Tasks)
	require.Zero(t, at("Accumulate").FLOPs)
	require.Contains(t, optime.Table(times), "LinearAdd")
	require.NoError(t, m.Close())
	require.Empty(t, m.Monitor())
}
