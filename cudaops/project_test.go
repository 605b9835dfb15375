package cudaops

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/op"
)

// projected is an attention whose queries, keys and values are linear functions of one input.
type projected struct {
	batch, d int
	op.AttentionConfig
}

// graph returns such an attention of random numbers, with queries and keys turned, and its gradients. The attention comes first
// of the nodes to keep, the queries before they are turned last, if these are asked for.
func (p projected) graph(t *testing.T, seed uint64, keepQueries bool) (*gorgonia.ExprGraph, gorgonia.Nodes, gorgonia.Nodes) {
	t.Helper()
	g := gorgonia.NewGraph()
	matrix := randomMatrices(g, seed, 2, 1.0/4)
	must := func(n *gorgonia.Node, err error) *gorgonia.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	rows, wide, narrow := p.batch*p.Seq, p.Heads*p.HeadDim, p.KVHeads*p.HeadDim
	in := gorgonia.Nodes{matrix("x", rows, p.d), matrix("q", wide, p.d), matrix("k", narrow, p.d), matrix("v", narrow, p.d)}
	queries := must(op.Linear(in[0], in[1]))
	q := must(op.RoPE(queries, op.RoPEConfig{Seq: p.Seq, Heads: p.Heads, HeadDim: p.HeadDim}))
	k := must(op.RoPE(must(op.Linear(in[0], in[2])), op.RoPEConfig{Seq: p.Seq, Heads: p.KVHeads, HeadDim: p.HeadDim}))
	y := must(op.Attention(q, k, must(op.Linear(in[0], in[3])), p.AttentionConfig))
	keep := withGradients(t, y, matrix("with", rows, wide), in)
	if keepQueries {
		keep = append(keep, queries)
	}
	return g, in[1:], keep
}

// ropeWay is the way in which a machine has chosen to compute products whose results are turned, "" if it has none.
func ropeWay(m *Machine) string {
	for _, c := range m.Choices() {
		if c.Op == "RoPEProduct" {
			return c.Way
		}
	}
	return ""
}

// TestProjectionWays wants the same attention and gradients, whether one kernel multiplies and turns or not.
func TestProjectionWays(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	check := func(t *testing.T, device *Device, p projected, tolerance float64, fuses bool, opts ...MachineOption) {
		t.Helper()
		var values []gorgonia.Value
		for i, way := range []string{"separate", "fused"} {
			g, params, keep := p.graph(t, seed, false)
			m := newFuseMachine(t, device, g, params, keep, append(opts, WithWays("RoPEProduct="+way)))
			values = valuesOf(t, m, keep, values, tolerance)
			fused := i > 0 && fuses
			if got := ropeWay(m); fused && got != way {
				t.Errorf("%s: the way is %q", way, got)
			}
			want := map[bool]int{false: 1}[fused]
			if got := tasksOf(m)["RoPE"]; got != want {
				t.Errorf("%s: %d tasks of RoPE, want %d", way, got, want)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		check(t, device, projected{2, 5, op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 4, Causal: true}}, 1e-5, true, fakeOption)
	})
	for _, headDim := range []int{64, 96, 128} {
		t.Run(fmt.Sprint("bfloat16/", headDim), func(t *testing.T) {
			p := projected{3, 520, op.AttentionConfig{Seq: 67, Heads: 4, KVHeads: 2, HeadDim: headDim, Causal: true}}
			device := openGPU(t)
			check(t, device, p, 2e-2, device.info.Capability() == 90, WithPrecision(BFloat16), WithTuning(TuneOff))
		})
	}
}

// TestProjectionNeedsQueries wants no kernel that turns at once where the queries are asked for as they were before.
func TestProjectionNeedsQueries(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	p := projected{2, 5, op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 4}}
	for _, keepQueries := range []bool{false, true} {
		device, _, fakeOption := openFake(t, fake.Config{})
		g, params, keep := p.graph(t, 1, keepQueries)
		m := newFuseMachine(t, device, g, params, keep, []MachineOption{fakeOption, WithWays("RoPEProduct=fused")})
		if way := ropeWay(m); (way == "") != keepQueries {
			t.Errorf("queries kept %v: the way is %q", keepQueries, way)
		}
	}
}

// TestProjectionTuned wants products that are worth timing timed with what turns their results, and no others, and all ways to give
// the same in the timer's memory as well.
func TestProjectionTuned(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	check := func(t *testing.T, device *Device, p projected, least float64, want int, opts ...MachineOption) {
		t.Helper()
		var log strings.Builder
		g, params, keep := p.graph(t, 1, false)
		private := func(c *machineConfig) error {
			c.tuneLeast, c.tunePath = least, filepath.Join(t.TempDir(), "tune.json")
			return nil
		}
		m := newFuseMachine(t, device, g, params, keep, append(opts, private, WithTuning(TuneCached),
			WithLogger(slog.New(slog.NewTextHandler(&log, nil)))))
		timed := 0
		for _, c := range m.Choices() {
			if c.Op == "RoPEProduct" {
				if timed++; c.Source != Measured || c.Of != 2 {
					t.Errorf("%+v", c)
				}
			}
		}
		if timed != want || strings.Contains(log.String(), "RoPEProduct") {
			t.Errorf("least %g: %d timed, want %d; log %q", least, timed, want, log.String())
		}
	}
	for least, want := range map[float64]int{1: 1, 1e9: 0} {
		device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
		check(t, device, projected{2, 5, op.AttentionConfig{Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 4}}, least, want, fakeOption)
	}
	for _, headDim := range []int{64, 96, 128} {
		t.Run(fmt.Sprint("bfloat16/", headDim), func(t *testing.T) {
			p := projected{3, 520, op.AttentionConfig{Seq: 67, Heads: 4, KVHeads: 2, HeadDim: headDim, Causal: true}}
			device, want := openGPU(t), 0
			if device.info.Capability() == 90 {
				want = 1
			}
			check(t, device, p, 1, want, WithPrecision(BFloat16))
		})
	}
}
