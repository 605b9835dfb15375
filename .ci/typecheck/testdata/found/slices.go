package found

import (
	"errors"
	"maps"
	"slices"
)

type list struct{ names []string }

func returned(m map[string]int) []string {
	var names []string
	for k := range m {
		names = append(names, k)
	}
	return names // want "names has the order of a map: sort it before it is used here"
}

func named(m map[string]int) (names []string) {
	for k := range m {
		names = append(names, k) // want "names has the order of a map and is not sorted in this function"
	}
	return
}

func usedFirst(m map[string]float64, use func([]float64)) {
	var values []float64
	for _, v := range m {
		values = append(values, v)
	}
	use(values) // want "values has the order of a map"
	slices.Sort(values)
}

func summed(m map[string]float64) (x float64) {
	var values []float64
	for _, v := range m {
		values = append(values, v)
	}
	for _, v := range values {
		x += v // want "x is accumulated in the order of a map"
	}
	for i := range values {
		x += values[i] // want "x is accumulated"
	}
	return x
}

func filtered(m map[string]float64) []float64 {
	var all, some []float64
	for _, v := range m {
		all = append(all, v)
	}
	for _, v := range all {
		if v > 0 {
			some = append(some, v)
		}
	}
	return some // want "some has the order of a map"
}

func counted(m map[string]int) []string {
	names, i := make([]string, len(m)), 0
	for k := range m {
		names[i] = k
		i++
	}
	return names // want "names has the order of a map"
}

func (l *list) collect(m map[string]int, byLength map[int][]string) {
	for k := range m {
		l.names = append(l.names, k)                   // want "l.names has the order of a map and is not sorted"
		byLength[len(k)] = append(byLength[len(k)], k) // want "byLength[len(k)] has the order of a map and is not sorted"
	}
}

func collected(m map[string]int, use func(...string)) (first string) {
	use(slices.Collect(maps.Keys(m))...) // want "slices.Collect(maps.Keys(m)) has the order of a map"
	keys := slices.AppendSeq([]string{"x"}, maps.Keys(m))
	other := keys  // other has the same order
	use(other...)  // want "other has the order of a map"
	return keys[0] // want "keys has the order of a map"
}

func stillErrors(m map[string]error) (err error) {
	var errs []error
	var texts []string
	for k, e := range m {
		errs = append(errs, e)
		texts = append(texts, k)
	}
	return errors.Join(append(errs, errors.New(texts[0]))...) // want "texts has the order of a map"
}
