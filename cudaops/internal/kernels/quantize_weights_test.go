package kernels

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
)

// TestQuantizeWeights wants rows and columns of some matrices to be those of each by itself, again and again.
func TestQuantizeWeights(t *testing.T) {
	g := newRig(t)
	var weights []QuantizeWeight
	var checks []func()
	for i, shape := range [][2]int{{16, 16}, {144, 80}, {128, 64}, {272, 336}, {48, 784}, {784, 48}, {2064, 1040}} {
		rows, d := shape[0], shape[1]
		x, xr := g.uploadRows(g.oddRows(rows, d, bf16), d, bf16, 0)
		y, scale := g.rows8Alloc(rows, d, 0)
		w := QuantizeWeight{X: x.Ptr, Y: y.Ptr, Scale: scale.Ptr, Rows: rows, D: d}
		name := fmt.Sprintf("%dx%d", rows, d)
		checks = append(checks, func() { g.rows8(name, y, scale, xr) })
		if i != 2 {
			turned, turnedScale := g.rows8Alloc(d, rows, 0)
			w.Turned, w.TurnedScale = turned.Ptr, turnedScale.Ptr
			columns := make([][]float64, d)
			for _, row := range xr {
				for c, v := range row {
					columns[c] = append(columns[c], v)
				}
			}
			checks = append(checks, func() { g.rows8(name+" turned", turned, turnedScale, columns) })
		}
		weights = append(weights, w)
	}
	table, err := g.NewQuantizeTable(weights)
	g.must(err)
	for range 2 {
		g.must(g.QuantizeWeights(g.stream, table))
		for _, check := range checks {
			check()
		}
	}
	g.must(table.Free())
}

// TestWeightStrips wants every strip twice, and those that round a weight behind all that look for its largest numbers, which they wait for.
func TestWeightStrips(t *testing.T) {
	weights := []QuantizeWeight{{Rows: 16, D: 16}, {Rows: 5120, D: 3072}, {Rows: 144, D: 80}, {Rows: 128, D: 64}, {Rows: 11264, D: 2048}}
	looked := map[weightStrip]bool{}
	rounded := map[weightStrip]bool{}
	strips := func(w QuantizeWeight) int { return ceilDiv(w.Rows, weightRows) * ceilDiv(w.D, weightColumns) }
	left := make([]int, len(weights))
	for i, w := range weights {
		left[i] = strips(w)
	}
	for at, strip := range weightStrips(weights) {
		of, seen := strip, looked
		if of.weight &^= weightRounds; of != strip {
			seen = rounded
			if left[of.weight] != 0 {
				t.Fatalf("strip %d rounds weight %d before %d others have looked for its largest numbers", at, of.weight, left[of.weight])
			}
		} else {
			left[of.weight]--
		}
		if w := weights[of.weight]; seen[of] || int(of.row)*weightRows >= w.Rows || int(of.column)*weightColumns >= w.D {
			t.Fatalf("strip %d, %+v, is there twice or outside of %dx%d", at, strip, w.Rows, w.D)
		}
		seen[of] = true
	}
	want := 0
	for _, w := range weights {
		want += strips(w)
	}
	if len(looked) != want || len(rounded) != want {
		t.Errorf("%d strips are looked at and %d rounded, want %d each", len(looked), len(rounded), want)
	}
}

// TestQuantizeTableRefusals wants errors that say which weight is wrong, and how.
func TestQuantizeTableRefusals(t *testing.T) {
	ctx, err := fake.New(fake.Config{AnyKernel: true}).Retain(0)
	if err != nil {
		t.Fatal(err)
	}
	k := New(ctx)
	good := QuantizeWeight{X: 256, Y: 512, Scale: 1024, Rows: 32, D: 16}
	for want, change := range map[string]func(*QuantizeWeight){
		"weight 1 is 32x24":                      func(w *QuantizeWeight) { w.D = 24 },
		"weight 1 is 0x16":                       func(w *QuantizeWeight) { w.Rows = 0 },
		"weight 1 lacks an address":              func(w *QuantizeWeight) { w.Turned = 256 },
		"weight 1: an address is not a multiple": func(w *QuantizeWeight) { w.Y = 520 },
	} {
		w := good
		change(&w)
		if _, err := k.NewQuantizeTable([]QuantizeWeight{good, w}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	if _, err := k.NewQuantizeTable(nil); err == nil {
		t.Error("no weights, and no error")
	}
	if err := ctx.Close(); err != nil {
		t.Error(err)
	}
}

// TestQuantizeWeightsBandwidth measures a pass over the weights of models of 124M, 350M and 925M, which are read at least once and
// written in as many bytes.
func TestQuantizeWeightsBandwidth(t *testing.T) {
	if !benchmark {
		t.Skip("set KASMINA_GPU_BENCH to measure bandwidths")
	}
	g := newRig(t)
	for _, m := range []struct{ layers, d, f int }{{12, 768, 2048}, {24, 1024, 2816}, {16, 2048, 5632}} {
		g.scope(fmt.Sprintf("%d layers of %d", m.layers, m.d), func(g *rig) {
			var weights []QuantizeWeight
			bytes := 0
			for range m.layers {
				for _, shape := range [][2]int{{3 * m.d, m.d}, {m.d, m.d}, {2 * m.f, m.d}, {m.d, m.f}} {
					y, scale := g.rows8Alloc(shape[0], shape[1], 0)
					turned, turnedScale := g.rows8Alloc(shape[1], shape[0], 0)
					weights = append(weights, QuantizeWeight{X: g.large(shape[0]*shape[1], bf16).Ptr, Y: y.Ptr, Scale: scale.Ptr,
						Turned: turned.Ptr, TurnedScale: turnedScale.Ptr, Rows: shape[0], D: shape[1]})
					bytes += 4 * shape[0] * shape[1]
				}
			}
			table, err := g.NewQuantizeTable(weights)
			g.must(err)
			g.benchSets("weights", bytes, 1, func(int) error { return g.QuantizeWeights(g.stream, table) })
			g.must(table.Free())
		})
	}
}
