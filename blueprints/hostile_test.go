package blueprints_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
)

// TestMeaninglessNumbers checks that meaningless numbers result in errors or in no weights, and that
// nothing panics.
func TestMeaninglessNumbers(t *testing.T) {
	for _, c := range []int{0, -1, math.MinInt, 1 << 62} {
		for _, width := range []int{0, -1, 8, math.MinInt} {
			require.Zero(t, blueprints.Mixing(c, width), "Mixing(%d, %d)", c, width)
			for _, kind := range builtin {
				_, err := blueprints.Size(kind, c, width)
				require.Error(t, err, "Size(%v, %d, %d)", kind, c, width)

				// a vector, whatever c is
				if parts, err := blueprints.Parts(kind, c, width); err == nil {
					require.Equal(t, []blueprints.Part{{Name: "weights", Shape: []int{width}}},
						parts,
						"Parts(%v, %d, %d)", kind, c, width)
				}
			}
		}
	}

	for _, kind := range builtin {
		_, err := blueprints.Parts(kind, 4, -8)
		require.ErrorIs(t, err, blueprints.ErrInvalid, kind)
		require.Error(t, blueprints.Apply[float64](kind, nil, nil, nil, 1), kind)
		require.Error(t, blueprints.Apply(kind, []float32{}, []float32{}, []float32{1, 2}, 1), kind)
		require.Error(t, blueprints.Apply(kind, []float32{1}, []float32{1}, nil, 1), kind)
	}

	require.Nil(t, blueprints.For[float32](nil))
}

// register adds a blueprint with a unique name and the given functions.
func register(t *testing.T, b blueprints.Blueprint) blueprints.Kind {
	t.Helper()
	b.Name = fmt.Sprintf("%s %d", t.Name(), blueprints.Kinds())
	if b.Identity == nil {
		b.Identity = func([]float64, int, *rand.Rand) float64 { return 1 }
	}
	b.F32, b.F64 = pass[float32](), pass[float64]()
	k, err := blueprints.Register(b)
	require.NoError(t, err)
	return k
}

func pass[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Forward:  func(t, x, p []T, a T) { copy(t, x) },
		Backward: func(dx, dp, g, x, p []T, a T) float64 { copy(dx, g); return 0 },
	}
}

// TestPanickingFunctions checks that a panic in a function of a registered kind is an error that
// names the kind and the function, and that no parameter changes.
func TestPanickingFunctions(t *testing.T) {
	size := register(t, blueprints.Blueprint{Size: func(c, width int) int { panic("boom") }})
	parts := register(t, blueprints.Blueprint{Parts: func(c, n int) []blueprints.Part {
		panic("boom")
	}})
	identity := register(t,
		blueprints.Blueprint{Identity: func(w []float64, _ int, _ *rand.Rand) float64 {
			w[0] = 7
			panic("boom")
		}})
	late := pass[float64]()
	late.Forward = func([]float64, []float64, []float64, float64) { panic("boom") }
	forward, err := blueprints.Register(blueprints.Blueprint{Name: t.Name(), F64: late,
		F32:      pass[float32](),
		Identity: func([]float64, int, *rand.Rand) float64 { return 1 }})
	require.NoError(t, err)
	_, err = blueprints.Size(size, 2, 4)
	checkPanic(t, err, size, "Size")
	_, err = blueprints.Parts(parts, 2, 4)
	checkPanic(t, err, parts, "Parts")
	for kind, function := range map[blueprints.Kind]string{size: "Size", parts: "Parts",
		identity: "Identity"} {
		w, a := []float64{1, 2, 3, 4}, []float64{5, 6}
		checkPanic(t, blueprints.Identity(kind, 1, 2, 0, w, a), kind, function)
		require.Equal(t, []float64{1, 2, 3, 4}, w)
		require.Equal(t, []float64{5, 6}, a)
	}

	err = blueprints.Apply(forward, make([]float64, 2), make([]float64, 2), make([]float64, 2), 1)
	checkPanic(t, err, forward, "arithmetic")
}

func checkPanic(t *testing.T, err error, kind blueprints.Kind, function string) {
	t.Helper()
	require.ErrorIs(t, err, blueprints.ErrPanic)
	for _, want := range []string{kind.String(), function, "boom", "hostile_test.go"} {
		require.ErrorContains(t, err, want)
	}
}

// TestClashingParts checks that parts that a file could not store are rejected before a seed grows
// them.
func TestClashingParts(t *testing.T) {
	var parts []blueprints.Part
	kind := register(t, blueprints.Blueprint{Parts: func(c, n int) []blueprints.Part {
		return parts
	}})
	part := func(name string, shape ...int) blueprints.Part {
		return blueprints.Part{Name: name, Shape: shape}
	}
	for what, clash := range map[string][]blueprints.Part{
		"one name twice":       {part("w", 1), part("w", 1)},
		"the scale's name":     {part("scale", 2)},
		"no name":              {part("", 2)},
		"too few elements":     {part("w", 1)},
		"too many elements":    {part("w", 3)},
		"none":                 {},
		"negative dimensions":  {part("w", -1, -2)},
		"an overflowing shape": {part("w", 1<<32, 1<<32), part("u", 2)},
	} {
		parts = clash
		_, err := blueprints.Parts(kind, 2, 2)
		require.ErrorIs(t, err, blueprints.ErrInvalid, what)
		w, a := []float64{1, 2, 3, 4}, []float64{5, 6}
		require.ErrorIs(t, blueprints.Identity(kind, 1, 2, 0, w, a), blueprints.ErrInvalid, what)
		require.Equal(t, []float64{1, 2, 3, 4}, w, what)
	}
}

// TestInfiniteIdentity checks that an identity start with non-finite values is rejected.
func TestInfiniteIdentity(t *testing.T) {
	v := 0.0
	kind := register(t,
		blueprints.Blueprint{Identity: func(w []float64, _ int, _ *rand.Rand) float64 {
			w[1] = v
			return 1
		}})
	for _, v = range []float64{math.NaN(), math.Inf(1), 1e300} {
		w, a := make([]float32, 4), make([]float32, 2)
		require.ErrorIs(t, blueprints.Identity(kind, 1, 2, 0, w, a), blueprints.ErrInvalid)
		require.Zero(t, a[1])
	}
}
