package opbench_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/opcase"
	"github.com/kasmina-go/kasmina/opbench"
)

// TestTime checks that every op is timed by every peer, and that the results of the peers agree.
func TestTime(t *testing.T) {
	t.Setenv("KASMINA_VARIANTS", "")
	for _, dtype := range []opbench.Dtype{opbench.Float32, opbench.Float64} {
		tolerance := map[opbench.Dtype]float64{opbench.Float32: 1e-5, opbench.Float64: 1e-12}[dtype]
		for _, o := range opcase.All {
			if o.Bench == nil {
				continue
			}
			figures, err := opbench.Time(o.Name, o.Bench.Small, dtype, opbench.WithSpan(0))
			require.NoError(t, err, o.Name)
			at := fmt.Sprintf("%s %s\n%s", o.Name, dtype, opbench.Table(figures))
			last := figures[len(figures)-1]
			require.Equal(t, "cpu", figures[0].Peer, at)
			require.Equal(t, "gorgonia", last.Peer, at)
			if o.Bench.Stock == nil {
				require.ErrorContains(t, last.Err, "no ops of Gorgonia for it", at)
				figures = figures[:len(figures)-1]
			}
			for _, f := range figures {
				require.NoError(t, f.Err, at)
				require.Positive(t, f.Forward, at)
				require.Positive(t, f.Training, at)
				require.LessOrEqual(t, f.Distance, tolerance, at)
				require.Equal(t, figures[0].Bytes, f.Bytes, at)
				require.Positive(t, f.Bandwidth(), at)
			}
		}
	}
}

// TestVariants checks that Time measures every variant that the machine could choose.
func TestVariants(t *testing.T) {
	t.Setenv("KASMINA_VARIANTS", "")
	figures, err := opbench.Time("LinearAdd", []int{64, 96, 32},
		opbench.Float32, opbench.WithSpan(0))
	require.NoError(t, err)
	require.Len(t, figures, 3)
	require.Equal(t, "LinearAdd=fused", figures[0].Variant)
	require.Contains(t, figures[1].Variant, "+ false=")
	require.Equal(t, 2.0*64*96*32, figures[0].FLOPs)
	require.Equal(t, 4.0*(64*96+96*32+2*64*32), figures[0].Bytes)
}

func TestTypes(t *testing.T) {
	figures, err := opbench.Time("Add", []int{4, 4}, opbench.Float16, opbench.WithSpan(0))
	require.NoError(t, err)
	require.Len(t, figures, 2)
	require.ErrorContains(t, figures[0].Err, "does not support float16")
	require.Contains(t, opbench.Table(figures), "does not support float16")
	figures, err = opbench.Time("Linear", []int{128, 128, 128},
		opbench.BFloat16, opbench.WithSpan(0))
	require.NoError(t, err)
	require.ErrorContains(t, figures[0].Err, "cpuops.UseBFloat16(true)")
	if cpuops.UseBFloat16(true) != nil {
		t.Skip("no AVX512-BF16")
	}
	defer cpuops.UseBFloat16(false)

	figures, err = opbench.Time("Linear", []int{128, 128, 128},
		opbench.BFloat16, opbench.WithSpan(0))
	require.NoError(t, err)
	require.NoError(t, figures[0].Err)
	require.Contains(t, figures[0].Variant, "bf16")
	figures, err = opbench.Time("Linear", []int{128, 128, 128},
		opbench.Float32, opbench.WithSpan(0))
	require.NoError(t, err)
	require.ErrorContains(t, figures[0].Err, "UseBFloat16(false)")
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		op    string
		shape []int
		dtype opbench.Dtype
		opt   opbench.Option
		want  string
	}{
		{"Norm", []int{1}, opbench.Float32, nil, "want one of AdaptedLinear, Add, Attention"},
		{"Add", []int{1}, opbench.Float32, nil, "want 2 numbers: rows, features"},
		{"Add", nil, opbench.Float32, nil, "want 2 numbers"},
		{"Add", []int{0, 3}, opbench.Float32, nil, "at least 1"},
		{"Add", []int{1 << 62, 1 << 62}, opbench.Float32, nil, "inputs and result take"},
		{"Add", []int{2, 2}, "int8", nil, "there is no type"},
		{"RoPE", []int{1, 2, 1, 3}, opbench.Float32, nil, "even head size"},
		{"Attention", []int{1, 2, 3, 2, 4}, opbench.Float32, nil,
			"multiple of the key-value heads"},
		{"Kasmina", []int{4, 10, 3}, opbench.Float32, nil, "multiple of the seeds"},
		{"Add", []int{2, 2}, opbench.Float32, opbench.WithSpan(-1), "want at least 0"},
	} {
		opts := []opbench.Option{c.opt}
		if c.opt == nil {
			opts = nil
		}
		_, err := opbench.Time(c.op, c.shape, c.dtype, opts...)
		require.ErrorContains(t, err, c.want)
	}
}
