// Package fine contains code that maporder must not report.
package fine

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sort"
	"strings"
	"sync"
)

type stats struct {
	sum  float64
	sums []float64
	n    int
}

func (s *stats) add(v float64)                         { s.sum += v }
func (s stats) addToCopy(v float64)                    { s.sum += v }
func addTo(to map[string]float64, k string, v float64) { to[k] += v }

func sorted(m map[string]float64) (x float64) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		x += m[k]
	}
	keys := slices.Collect(maps.Keys(m))
	slices.Sort(keys)
	for _, k := range keys {
		x += m[k]
	}
	for i := range keys {
		x += m[keys[i]]
	}
	return x
}

func exact(m map[string]float64) (n int, x, least, most float64, bits uint64) {
	least = math.Inf(1)
	for k, v := range m {
		n += len(k)
		x += 1
		x -= 2
		x++
		least, most = min(least, v), max(v, most)
		most = math.Max(math.Max(most, v), least)
		least = math.Min(v*2, least)
		bits ^= math.Float64bits(v)
		x = 0
	}
	return n, x, least, most, bits
}

func eachIterationItsOwn(m map[string][]float64, row map[int]float64) map[string]float64 {
	out, byKey := map[string]float64{}, map[string]*stats{}
	dense := make([][]float64, 9)
	for k, vs := range m {
		sum := 0.0
		var s stats
		p := &stats{}
		q := byKey[k]
		for i, v := range vs {
			sum += v
			s.add(v)
			p.sum += v
			q.sum += v
			out[k] += v
			out["all/"+k] += v
			addTo(out, k, v)
			m[k][i] *= 2
			vs[i] /= 2
			byKey[k].add(v)
		}
		out[k] = sum
	}
	for i, v := range row {
		dense[i][0] += v
		dense[i+1][0] -= v
		index := i
		dense[int64(index)][0] += v
	}
	for _, s := range byKey {
		s.sum *= 2 // the values are different variables
		s.addToCopy(1)
	}
	return out
}

func otherFields(m map[string]stats) (s stats, last float64) {
	for _, v := range m {
		s.n += v.n
		last = s.sum * v.sum // depends on the last iteration, but is not a sum
	}
	return s, last
}

func syncMap(m *sync.Map, out map[string]float64) {
	m.Range(func(k, v any) bool {
		out[k.(string)] += v.(float64)
		return true
	})
}

func byName(names []string) []string {
	slices.Sort(names)
	return names
}

func slicesThatAreSorted(m map[string]int) ([]string, []string, []string) {
	var a, b, c []string
	for k := range m {
		a = append(a, k)
		b = append(b, k)
		c = append(c, k)
	}
	slices.SortFunc(a, func(x, y string) int { return cmp.Compare(m[x], m[y]) })
	sort.Sort(sort.Reverse(sort.StringSlice(b)))
	return a, b, byName(c)
}

func groups(m map[string]int) map[int][]string {
	all := map[int][]string{}
	for k, v := range m {
		all[v] = append(all[v], k)
	}
	for _, names := range all {
		slices.Sort(names)
	}
	return all
}

func orderFree(m map[string]float64) bool {
	var values []float64
	var errs []error
	for k, v := range m {
		values = append(values, v)
		errs = append(errs, errors.New(k)) // only visible in a message
	}
	again := maps.Collect(maps.All(m))
	most := 0.0
	for _, v := range values {
		most = max(most, v)
	}
	return len(values) > 3 && slices.Contains(slices.Collect(maps.Values(m)), most) &&
		slices.Max(values) > 2 && len(again) > 1 && errors.Join(errs...) == nil
}

func joined(m map[string]error, last error) error {
	return errors.Join(append(slices.Collect(maps.Values(m)), last)...)
}

func perKey(m map[string]string, dir string) error {
	for name, text := range m {
		var b strings.Builder
		b.WriteString(text)
		line := name
		line += b.String()
		f, err := os.Create(dir + name)
		if err != nil {
			return errors.New("a file cannot be created")
		}
		fmt.Fprintln(f, line)
		_ = f.Close()
		r := rand.New(rand.NewPCG(1, uint64(len(name))))
		_ = r.Float64()
	}
	return nil
}

func has(m map[string]float64, want float64) bool {
	for _, v := range m {
		less := func() bool { return v < want }
		if v == want || less() {
			return true
		}
	}
	return false
}

func iterators(x []float64) (sum float64) {
	seq := slices.Values(x)
	seq = slices.Values(slices.Collect(seq))
	for v := range seq {
		sum += v
	}
	return sum
}

func wrapped(f func(int)) {
	wrap := func(f func(int)) func(int) { return f }
	f = wrap(f)
	g := append([]func(int){}, f)
	h := g[0]
	f, h = h, wrap(f)
	for i := range 3 {
		h(i)
	}
}

func sliceLoops(x []float64, m map[string]float64) (sum float64) {
	var all []string
	for _, v := range x {
		sum += v
		all = append(all, fmt.Sprint(v))
	}
	for range m {
		all = all[:0]
	}
	fmt.Println(m, all)
	return sum
}
