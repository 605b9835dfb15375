package cudabench

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// TestMeasure wants the families of the groups that are asked for, each once and in order.
func TestMeasure(t *testing.T) {
	defer func(all []group) { groups = all }(groups)
	family := func(name string) func(*bench.B) {
		return func(b *bench.B) {
			p := b.Alloc(1, gpu.Float32)
			b.Time(Measurement{Name: name}, func() { b.Do(b.Ctx.Memset8(p, 0, 4, b.Stream)) })
		}
	}
	groups = []group{
		{"a", []func(*bench.B){family("a1"), family("a2")}},
		{"b", []func(*bench.B){family("b1")}},
		{"c", []func(*bench.B){family("c1")}},
	}
	require.Equal(t, []string{"a", "b", "c"}, Groups())
	ctx, err := fake.New(fake.Config{}).Retain(0)
	require.NoError(t, err)
	var names []string
	require.NoError(t, measure(ctx, 64, []string{"c", "a"}, func(m Measurement) error {
		require.Positive(t, m.Time)
		names = append(names, m.Name)
		return nil
	}))
	require.Equal(t, []string{"a1", "a2", "c1"}, names)
	require.NoError(t, ctx.Close(), "nothing is left")
}

func TestRefusals(t *testing.T) {
	require.ErrorContains(t, Run(nil, nil, nil), "cudabench.Run: the device or report is nil")
}
