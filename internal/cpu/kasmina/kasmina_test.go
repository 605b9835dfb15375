package kasmina

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestMomentsMerge(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var all, parts Moments
	for range 20 {
		var part Moments
		for range r.IntN(50) {
			v := 1e6 + r.NormFloat64()
			all.Add(v)
			part.Add(v)
		}
		parts.Merge(part)
	}
	if parts.N != all.N || math.Abs(parts.Mean-all.Mean) > 1e-8 || math.Abs(parts.M2-all.M2) > 1e-7*all.M2 {
		t.Errorf("merged moments are %+v, want %+v", parts, all)
	}
	var none Moments
	none.Merge(Moments{})
	if none != (Moments{}) || none.Variance() != 0 {
		t.Errorf("nothing merged with nothing is %+v", none)
	}
}

// A row whose sum overflows has figures all the same; a row without finite elements has none.
func TestScanExtremes(t *testing.T) {
	huge := []float64{1.5e308, 1.5e308, -1.5e308, -1.5e308, 1.5e308, 1.5e308}
	if s := scan(huge, 1); s.bad != 0 || s.lo != -1.5e308 || s.hi != 1.5e308 || s.m.N != 6 || math.Abs(s.absolute().Mean/0.5e308-1) > 1e-12 {
		t.Errorf("%+v", s)
	}
	nan, inf := math.NaN(), math.Inf(1)
	s := scan([]float64{nan, -inf, inf}, 1)
	if s.bad != 3 || s.m.N != 0 || s.dead != 0 {
		t.Errorf("%+v", s)
	}
	f := newFigures(ReduceExact)
	f.addRow(&s, 0)
	f.finish(ReduceExact, 0)
	if f.Bad != 3 || f.Min != 0 || f.Max != 0 || f.Health(ReduceExact, 1) != [rowFigures]float64{} || f.Gradient(ReduceExact) != [3]float64{} {
		t.Errorf("%+v", f)
	}
	if s := scan([]float32{float32(nan), 3, 5, 4, 1}, 2); s.bad != 1 || s.lo != 1 || s.hi != 5 || s.m.N != 4 || s.dead != 1 || s.absolute().Mean != 3.25 {
		t.Errorf("%+v", s)
	}
}

// Every element belongs to one tile, tiles lie at multiples of their size, and none is larger than intended.
func TestKasminaTiles(t *testing.T) {
	for _, k := range []*Layer[float32]{
		{Rows: 1, Seeds: 1, Chunk: 1}, {Rows: 1000, Seeds: 1, Chunk: 3}, {Rows: 70, Seeds: 3000, Chunk: 2}, {Rows: 300, Seeds: 2, Chunk: 5000},
	} {
		seen := make([]int, k.Rows*k.Seeds)
		rows, seeds := k.tile()
		k.partial = make([]ChunkFigures, k.blocks()*k.Seeds)
		tl := k.takeTile()
		for i := range k.blocks() * k.groups() {
			tl.moveTo(k, i)
			if tl.r0 != tl.block*rows || tl.s0%seeds != 0 || tl.r1-tl.r0 > tileRows || tl.columns > max(tileStrips*stripColumns, k.Chunk) {
				t.Errorf("tile of rows %d to %d and seeds %d to %d in block %d", tl.r0, tl.r1, tl.s0, tl.s1, tl.block)
			}
			for r := tl.r0; r < tl.r1; r++ {
				for s := tl.s0; s < tl.s1; s++ {
					seen[r*k.Seeds+s]++
				}
			}
		}
		for i, n := range seen {
			if n != 1 {
				t.Fatalf("%d rows of %d seeds: chunk %d is in %d tiles", k.Rows, k.Seeds, i, n)
			}
		}
	}
}
