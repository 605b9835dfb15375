// Package found contains code that maporder must report, with the text of the reports.
package found

import (
	"iter"
	"maps"
	"math"
	"reflect"
	"slices"
	"sync"
)

type stats struct {
	sum   float64
	sums  []float64
	inner *stats
}

type pair struct{ a, b float32 }

func (p pair) plus(q pair) pair { return pair{p.a + q.a, p.b + q.b} }

// needs has a fault that once gave two ranks of a run different bits.
func needs(squares, sizes map[string]float64, of func(string) bool) float64 {
	sum, n := 0.0, 0.0
	for p, s := range squares {
		if of(p) {
			sum, n = sum+s, n+sizes[p] // want "sum is accumulated in the order of a map"
		}
	}
	return math.Sqrt(sum / n)
}

func operators(m map[string]float64, c map[int]complex64) (x float64, y float32, z complex64) {
	x = 1
	for _, v := range m {
		x += v          // want "x is accumulated in the order of a map, which rounds differently"
		x -= v          // want "x is accumulated"
		x *= v          // want "x is accumulated"
		x /= v          // want "x is accumulated"
		x = x + v       // want "x is accumulated"
		x = v + 2*(x)   // want "x is accumulated"
		x += 0.1        // want "x is accumulated"
		y += float32(v) // want "y is accumulated"
	}
	for i := range c {
		z += c[i] // want "z is accumulated"
	}
	return x, y, z
}

func functions(m map[string]float64) (x, y float64) {
	for k, v := range m {
		x = math.FMA(v, v, x)         // want "x is accumulated"
		x = math.Hypot(x, v)          // want "x is accumulated"
		x = max(x, 1) + v             // want "x is accumulated"
		y = max(y, y+float64(len(k))) // want "y is accumulated"
	}
	return x, y
}

func throughLocals(m map[string]float64) (x float64) {
	for _, v := range m {
		next := x + v
		rounded := float64(float32(next))
		x = rounded // want "x is accumulated"
	}
	return x
}

func parts(m map[string]float64, group map[string]int, s *stats, p [2]float64) pair {
	var total pair
	byGroup := map[int]*stats{}
	out := make([]float64, 9)
	for k, v := range m {
		s.sum += v                              // want "s.sum is accumulated"
		s.inner.sums[3] += v                    // want "s.inner.sums[3] is accumulated"
		p[len(k)] += v                          // want "p[len(k)] is accumulated"
		out[group[k]] += v                      // want "out[group[k]] is accumulated"
		total = total.plus(pair{a: float32(v)}) // want "total is accumulated"
		g := byGroup[group[k]]
		g.sum += v // want "g.sum is accumulated"
		at := &out[group[k]]
		*at += v // want "*at is accumulated"
		for i := range out {
			out[i] += v // want "out[i] is accumulated"
		}
	}
	return total
}

func nested(m map[string]map[string]float64) map[string]float64 {
	rows, columns := map[string]float64{}, map[string]float64{}
	for row, inner := range m {
		for column, v := range inner {
			rows[row] += v       // want "rows[row] is accumulated"
			columns[column] += v // want "columns[column] is accumulated"
		}
	}
	return columns
}

func iterators(m map[string]float64) (x float64) {
	for v := range maps.Values(m) {
		x += v // want "x is accumulated"
	}
	for k := range maps.Keys(m) {
		x += m[k] // want "x is accumulated"
	}
	for _, v := range maps.All(m) {
		x += v // want "x is accumulated"
	}
	values := maps.Values(m)
	for v := range values {
		x += v // want "x is accumulated"
	}
	for _, v := range slices.Collect(maps.Values(m)) {
		x += v // want "x is accumulated"
	}
	return x
}

func others(m *sync.Map, r reflect.Value) (x float64) {
	m.Range(func(_, v any) bool {
		x += v.(float64) // want "x is accumulated"
		return true
	})
	for _, v := range m.Range {
		x += v.(float64) // want "x is accumulated"
	}
	for it := r.MapRange(); it.Next(); {
		x += it.Value().Float() // want "x is accumulated"
	}
	for _, k := range r.MapKeys() {
		x += r.MapIndex(k).Float() // want "x is accumulated"
	}
	return x
}

func generic[M ~map[string]F, F float32 | float64](m M) (x F) {
	for _, v := range m {
		x += v // want "x is accumulated"
	}
	return x
}

// Functions that accumulate when they are called.

var total float64

func (s *stats) add(v float64)                       { s.sum += v }
func (s *stats) addTo(i int, v float64)              { s.sums[i] += v }
func addAll(to []float64, v float64)                 { addDeeper(to, v) }
func addDeeper(to []float64, v float64)              { to[0] += v }
func addGlobal(v float64)                            { total += v }
func sumOf(to []float64, v float64) (sums []float64) { return append(slices.Clone(to), v) }

func calls(m map[string]float64, s *stats, index map[string]int) {
	x, to, own := 0.0, make([]float64, 1), stats{}
	closure := func(v float64) { x += v }
	for k, v := range m {
		s.add(v)             // want "s.add accumulates s in the order of a map"
		own.add(v)           // want "own.add accumulates own"
		s.addTo(index[k], v) // want "s.addTo accumulates s"
		addAll(to, v)        // want "addAll accumulates to"
		addGlobal(v)         // want "addGlobal accumulates total"
		closure(v)           // want "closure accumulates x"
		to = sumOf(to, v)    // want "to is accumulated"
		func() { x -= v }()  // want "x is accumulated"
	}
}

// Functions that iterate over maps themselves.

type table struct{ m map[string]float64 }

func (t table) each(f func(string, float64)) {
	for k, v := range t.m {
		f(k, v)
	}
}

func (t table) every(f func(string, float64)) { t.each(f) }

func (t table) all() iter.Seq2[string, float64] {
	return func(yield func(string, float64) bool) {
		for k, v := range t.m {
			if !yield(k, v) {
				return
			}
		}
	}
}

func (t table) values() iter.Seq[float64] { return maps.Values(t.m) }

func (t table) sum() (x float64) {
	t.every(func(_ string, v float64) {
		x += v // want "x is accumulated"
	})
	for _, v := range t.all() {
		x += v // want "x is accumulated"
	}
	for v := range t.values() {
		x += v // want "x is accumulated"
	}
	return x
}
