package modelfile

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/state"
)

// TestBlueprint checks that a blueprint's file returns what was saved, and that it is rejected for slots that
// cannot hold it.
func TestBlueprint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "blueprint")
	s := Slots{Chunk: 2, Width: 4, Dtype: tensor.Float32}
	saved := state.SlotParams{Weights: []float64{1, -2}, Scale: 0.5}
	n, err := blueprints.Size(blueprints.Residual, s.Chunk, s.Width)
	require.NoError(t, err)
	for len(saved.Weights) < n {
		saved.Weights = append(saved.Weights, float64(len(saved.Weights)))
	}
	saved.Weights = saved.Weights[:n]
	require.NoError(t, s.SaveBlueprint(path, blueprints.Residual, saved))

	kind, read, err := s.ReadBlueprint(path)
	require.NoError(t, err)
	require.Equal(t, blueprints.Residual, kind)
	require.Equal(t, saved, read)

	_, _, err = Slots{Chunk: 3, Width: 4, Dtype: tensor.Float32}.ReadBlueprint(path)
	require.ErrorIs(t, err, ErrArchitecture)
	saved.Weights[0] = 1e300
	require.NoError(t, s.SaveBlueprint(path, blueprints.Residual, saved))
	_, _, err = s.ReadBlueprint(path)
	require.ErrorContains(t, err, "is 1e+300, want a number that the model's float32 holds")
}

// saveSet writes a main file and its parts, one for each list of stretches.
func saveSet(t *testing.T, path, id string, parts ...[]Stretch) Parts {
	t.Helper()
	p := Parts{ID: id, Files: len(parts)}
	for rank, stretches := range parts {
		require.NoError(t, p.SavePart(path, rank, stretches))
	}
	text, err := json.Marshal(p)
	require.NoError(t, err)
	w, err := safetensors.New("w", []int{2, 3}, make([]float32, 6))
	require.NoError(t, err)
	require.NoError(t, safetensors.Save(path, []safetensors.Tensor{w},
		map[string]string{PartsKey: string(text), ConfigKey: "{}"}))
	return p
}

// TestMoments checks that moments are assembled from the stretches of all parts, in their order, and that
// missing and misplaced stretches are rejected.
func TestMoments(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	moments := func() ([]Moment, error) {
		f, err := Open(path)
		require.NoError(t, err)
		defer f.Close()
		return f.Moments(t.Context(), Shape{Params: func(yield func(string, []int) bool) { yield("w", []int{2, 3}) }})
	}

	const id = "0123456789abcdef"
	saveSet(t, path, id, []Stretch{{"w.m", 0, 0, []float32{1, 2}}, {"w.scale", 0, 2, []float32{7}}},
		[]Stretch{{"w.m", 2, 0, []float32{3, 4, 5, 6}}, {"w.scale", 1, 2, []float32{8}}})
	all, err := moments()
	require.NoError(t, err)
	require.Equal(t, []Moment{{"w.m", []int{2, 3}, []float32{1, 2, 3, 4, 5, 6}},
		{"w.scale", []int{2}, []float32{7, 8}}}, all)

	for want, stretch := range map[string]Stretch{
		"have 5 of the 6 elements":          {"w.m", 2, 0, []float32{3, 4, 5}},
		"where element 2 of 6 is expected":  {"w.m", 3, 0, []float32{4, 5, 6}},
		"is not a stretch of one of the mo": {"v.m", 2, 0, []float32{3}},
		"as F32 of shape":                   {"w.m", 2, 0, []float64{3, 4, 5, 6}},
	} {
		saveSet(t, path, id, []Stretch{{"w.m", 0, 0, []float32{1, 2}}}, []Stretch{stretch})
		_, err := moments()
		require.ErrorContains(t, err, want)
	}
}

// TestTidy checks that the parts of other sets are removed, and no other files.
func TestTidy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	one := []Stretch{{"w.m", 0, 0, []float32{1, 2, 3, 4, 5, 6}}}
	saveSet(t, path, strings.Repeat("0", 16), one, nil)
	p := saveSet(t, path, strings.Repeat("1", 16), one)
	other := filepath.Join(filepath.Dir(path), "other.safetensors."+strings.Repeat("0", 16)+"-1of2")
	require.NoError(t, os.WriteFile(other, nil, 0o666))
	require.NoError(t, p.Tidy(path))

	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*"))
	require.NoError(t, err)
	require.ElementsMatch(t, []string{path, p.file(path, 0), other}, left)
}

// TestReplaceable checks that a checkpoint never replaces a file of another kind.
func TestReplaceable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	require.NoError(t, Replaceable(path))
	require.NoError(t, os.WriteFile(path, []byte("a letter"), 0o666))
	require.ErrorContains(t, Replaceable(path), "is not a checkpoint")
	require.NoError(t, safetensors.Save(path, nil, nil))
	require.ErrorContains(t, Replaceable(path), "belongs to another program")
	saveSet(t, path, strings.Repeat("0", 16), nil)
	require.NoError(t, Replaceable(path))
}

// TestPartNames checks that parts of long names have names that file systems accept, and that different
// checkpoints have different parts.
func TestPartNames(t *testing.T) {
	p := Parts{ID: strings.Repeat("0", 16), Files: maxParts}
	long := strings.Repeat("a", maxName)
	first := filepath.Base(p.file(long, maxParts-1))
	require.LessOrEqual(t, len(first), maxName)
	require.NotEqual(t, first, filepath.Base(p.file(long[1:]+"b", maxParts-1)))
}
