package llm

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/state"
)

// smallConfig is that of smallCheckpoint.
func smallConfig() Config {
	return Config{Vocab: 3, Dim: 4, Layers: 1, Heads: 2, Seq: 2, FF: 1, Kasmina: []int{0},
		Seeds: 2}.Default()
}

// rewritten saves a checkpoint of smallCheckpoint after a change, with checksums that are right.
func rewritten(t testing.TB, change func(tensors map[string]safetensors.Tensor,
	metadata map[string]string)) string {
	t.Helper()
	tensors, metadata := trainedCheckpoint(t)
	byName := map[string]safetensors.Tensor{}
	for _, x := range tensors {
		byName[x.Name] = x
	}
	change(byName, metadata)
	path := filepath.Join(t.TempDir(), "m.safetensors")
	all := slices.SortedFunc(maps.Values(byName), func(a,
		b safetensors.Tensor) int {
		return strings.Compare(a.Name, b.Name)
	})
	require.NoError(t, safetensors.Save(path, all, metadata))
	return path
}

// trainedCheckpoint is smallCheckpoint after a step, so that there is a state of the optimiser.
func trainedCheckpoint(t testing.TB) ([]safetensors.Tensor, map[string]string) {
	t.Helper()
	tr := smallTrainer(t, smallConfig())
	require.NoError(t, tr.step())
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, tr.Save(path))
	tensors, metadata, err := safetensors.Load(path)
	require.NoError(t, err)
	return tensors, metadata
}

// stateOf is all that a trainer would save.
func stateOf(t testing.TB, tr *Trainer) string {
	t.Helper()
	var b strings.Builder
	for _, p := range tr.Model.Params {
		fmt.Fprintf(&b, "%s %x\n", p.Name, p.Value.Data())
	}
	for _, a := range tr.Model.Kasmina.Arrays() {
		fmt.Fprintln(&b, a.Name, a.Shape, a.Data)
	}
	for _, s := range tr.Optimizer.State() {
		fmt.Fprintln(&b, s.Name, s.Shape, s.Data)
	}
	fmt.Fprintln(&b, tr.Loader.State(), tr.last.Step, tr.last.Loss, tr.Optimizer.LR())
	return b.String()
}

// TestNumbersThatAreNone wants files whose numbers no run can have, under checksums that are right,
// to be refused with what and where, and nothing to have changed.
func TestNumbersThatAreNone(t *testing.T) {
	const weight = "model.layers.0.mlp.up_proj.weight"
	edit := func(name string, at int, v float32) func(map[string]safetensors.Tensor,
		map[string]string) {
		return func(x map[string]safetensors.Tensor,
			_ map[string]string) {
			x[name].Data.([]float32)[at] = v
		}
	}
	inMetadata := func(old, now string) func(map[string]safetensors.Tensor, map[string]string) {
		return func(_ map[string]safetensors.Tensor, m map[string]string) {
			before := m[trainingKey]
			m[trainingKey] = strings.Replace(before, old, now, 1)
			require.NotEqual(t, before, m[trainingKey])
		}
	}
	nan, inf := float32(math.NaN()), float32(math.Inf(-1))
	for name, c := range map[string]struct {
		change func(map[string]safetensors.Tensor, map[string]string)
		want   string
		model  bool // LoadModel refuses it too
		is     error
	}{
		"NaN": {edit(weight, 2, nan), "parameter " + weight + " is NaN at element 2", true,
			ErrDiverged},
		"infinity": {edit(normName, 3, inf), "parameter model.norm.weight is -Inf at element 3",
			true, ErrDiverged},
		"moment of NaN": {edit("optimizer."+weight+".exp_avg", 1, nan), weight +
			`": exp_avg is NaN at element 1`, false, nil},
		"negative square": {edit("optimizer."+weight+".exp_avg_sq", 0, -1), weight +
			`": exp_avg_sq is -1 at element 0`, false, nil},
		"count of steps": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["optimizer."+weight+".step"].Data.([]int64)[0] = math.MaxInt64
		}, "step is [9223372036854775807]", false, nil},
		"epoch": {inMetadata(`"epoch":0,"next"`, `"epoch":9223372036854775807,"next"`),
			"epoch 9223372036854775807", false, nil},
		"window": {inMetadata(`"next":1`, `"next":9223372036854775807`),
			"window 9223372036854775807", false, nil},
		"step": {inMetadata(`"step":1`, `"step":9223372036854775807`),
			"at step 9223372036854775807", false, nil},
		"step of a float": {inMetadata(`"step":1`, `"step":0.5`), "the state of the run", false, nil},
		"a stranger": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["model.layers.1.w"] = zeros("model.layers.1.w", 1)
		}, `such as "model.layers.1.w"`, true, nil},
		"many moments": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["optimizer.w.x"] = zeros("optimizer.w.x", 2<<20)
		}, "bytes are the optimiser's", true, ErrArchitecture},
		"a large lattice": {func(x map[string]safetensors.Tensor, _ map[string]string) {
			x["lattice.0.x"] = zeros("lattice.0.x", 2<<20)
		}, `layer "0" has`, true, ErrArchitecture},
		"an endless state": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[trainingKey] += strings.Repeat(" ", 1<<20)
		}, "bytes of JSON, want at most", false, nil},
		"an endless config": {func(_ map[string]safetensors.Tensor, m map[string]string) {
			m[configKey] = strings.Replace(m[configKey], `"kasmina":[0`, `"kasmina":[0`+strings.Repeat(",0",
				1<<19), 1)
		}, "the configuration: 1", true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			path := rewritten(t, c.change)
			tr := smallTrainer(t, smallConfig())
			require.NoError(t, tr.step())
			before := stateOf(t, tr)
			err := tr.Resume(t.Context(), path, WithNewSettings(nil))
			require.ErrorContains(t, err, c.want)
			require.Equal(t, before, stateOf(t, tr))
			require.NoError(t, tr.usable())
			_, wrong := LoadModel(t.Context(), path)
			require.Equal(t, c.model, wrong != nil, "LoadModel: %v", wrong)
			for _, err := range []error{err, wrong} {
				require.True(t, err == nil || c.is == nil || errors.Is(err, c.is), "%v is no %v", err, c.is)
			}
		})
	}
}

func zeros(name string, n int) safetensors.Tensor {
	return safetensors.Tensor{Name: name, DType: safetensors.U8, Shape: []int{n}, Data: make([]uint8,
		n)}
}

// readers are all that read a file at a path that they are given.
func readers(t *testing.T) map[string]func(path string) error {
	tr := smallTrainer(t, smallConfig())
	return map[string]func(path string) error{
		"LoadModel":     func(path string) error { return errorOf(LoadModel(t.Context(), path)) },
		"Resume":        func(path string) error { return tr.Resume(t.Context(), path) },
		"ReadNotes":     func(path string) error { return errorOf(ReadNotes(path)) },
		"ReadBlueprint": func(path string) error { return errorOf(tr.Model.ReadBlueprint(path, 0, 0)) },
		"LoadBlueprint": func(path string) error { return tr.Model.LoadBlueprint(path, 0, 0) },
	}
}

// TestWhatIsNoFile gives readers what has no end, or never begins.
func TestWhatIsNoFile(t *testing.T) {
	for name, read := range readers(t) {
		for _, path := range texttest.NoFiles(t) {
			err := read(path)
			require.Error(t, err, "%s of %s", name, path)
			require.Contains(t, err.Error(), path, name)
		}
	}
}

// TestHoles gives readers files of 40 GB of which next to nothing is stored.
func TestHoles(t *testing.T) {
	const size = texttest.HoleSize
	_, metadata := smallCheckpoint(t)
	config, err := json.Marshal(metadata[configKey])
	require.NoError(t, err)
	one := func(name, config string) []byte {
		return appendHeader(nil,
			fmt.Sprintf(`{"__metadata__":{"kasmina.config":%s,"kasmina.blueprint":"LowRank","kasmina.chunk":"2"},`+
				`"%s":{"dtype":"F32","shape":[%d],`+
				`"data_offsets":[0,%d]}}`, config, name, size/4, size))
	}
	for what, content := range map[string][]byte{
		"nothing": nil, "a parameter": one(embedName, string(config)), "a lattice": one("lattice.0.stage",
			string(config)),
		"moments": one("optimizer.w.x", string(config)), "a large model": one(embedName,
			strings.Replace(string(config), `\"vocab\":3`, `\"vocab\":16777216`, 1)),
		"a scale": one("scale",
			string(config)),
	} {
		path := texttest.Hole(t, content)
		for name, read := range readers(t) {
			bounded.Run(t, 0, func() {
				err := read(path)
				require.Error(t, err, "%s of %s", name, what)
				require.Contains(t, err.Error(), path, name)
			})
		}
	}
}

// appendHeader appends a safetensors header and its length.
func appendHeader(b []byte, header string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(header))), header...)
}

// TestReadingStops wants what reads large files to end with its context, and nothing to have
// changed.
func TestReadingStops(t *testing.T) {
	path := rewritten(t, func(map[string]safetensors.Tensor, map[string]string) {})
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(enough)
	_, err := LoadModel(ctx, path)
	require.ErrorIs(t, err, enough)
	tr := smallTrainer(t, smallConfig())
	before := stateOf(t, tr)
	require.ErrorIs(t, tr.Resume(ctx, path), enough)
	require.Equal(t, before, stateOf(t, tr))
	require.NoError(t, tr.Resume(t.Context(), path))
}

// TestNotesOfAnySize wants notes that could not be read again to be refused before the run begins.
func TestNotesOfAnySize(t *testing.T) {
	tr := smallTrainer(t, smallConfig())
	c := tr.Config
	c.Notes = map[string]string{"text": strings.Repeat("x", maxNotes)}
	_, err := NewTrainer(tr.Model, tr.Loader, tr.Optimizer, c)
	require.ErrorContains(t, err, "TrainConfig.Notes takes 262155 bytes as JSON, want at most 262144")
	c.Notes["text"] = strings.Repeat("x", maxNotes-11)
	_, err = NewTrainer(tr.Model, tr.Loader, tr.Optimizer, c)
	require.NoError(t, err)
}

// withoutChecksums returns the bytes of a file whose header no longer has any, so that altered ones
// are not refused for them.
func withoutChecksums(t testing.TB, tensors []safetensors.Tensor,
	metadata map[string]string) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, safetensors.Save(path, tensors, metadata))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	n := 8 + binary.LittleEndian.Uint64(b)
	var header map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(b[8:n], &header))
	header["__metadata__"], err = json.Marshal(metadata)
	require.NoError(t, err)
	plain, err := json.Marshal(header)
	require.NoError(t, err)
	return append(appendHeader(nil, string(plain)), b[n:]...)
}

// FuzzCheckpoint gives LoadModel, ReadNotes and Resume any bytes, of which some are a checkpoint
// without checksums. What a refused Resume leaves is what was there.
func FuzzCheckpoint(f *testing.F) {
	tensors, metadata := trainedCheckpoint(f)
	whole := withoutChecksums(f, tensors, metadata)
	f.Add(whole)
	f.Add(whole[:len(whole)-1])
	f.Add(appendHeader(nil, "{}"))
	f.Add([]byte{})
	path, tr := filepath.Join(f.TempDir(), "m.safetensors"), smallTrainer(f, smallConfig())
	require.NoError(f, tr.step())
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(path, b, 0o666))
		size := int64(len(b))
		bounded.Run(t, size, func() { _, _ = LoadModel(t.Context(), path) })
		bounded.Run(t, size, func() { _, _ = ReadNotes(path) })
		checkRefusal(t, tr, path, size)
	})
}

// checkRefusal resumes from a file. If that is refused nothing has changed, and if not a step comes
// to an end.
func checkRefusal(t *testing.T, tr *Trainer, path string, size int64) {
	before := stateOf(t, tr)
	var err error
	bounded.Run(t, size, func() { err = tr.Resume(t.Context(), path, WithNewSettings(nil)) })
	if err != nil {
		require.True(t, before == stateOf(t, tr), "refused with %v, something has changed", err)
		return
	}
	if tr.last.Step < tr.Config.Steps {
		if err := tr.step(); err == nil {
			require.NoError(t, tr.probe())
		}
	}
}

// FuzzBlueprint gives ReadBlueprint any bytes, of which some are a blueprint without checksums.
func FuzzBlueprint(f *testing.F) {
	c := smallConfig()
	c.SlotWidth = 4
	tr := smallTrainer(f, c)
	for i, kind := range []blueprints.Kind{blueprints.LowRank, blueprints.Residual} {
		require.NoError(f, tr.Model.Germinate(0, i, state.GerminationRequest{Slot: 1 + i, Kind: kind}))
		path := filepath.Join(f.TempDir(), "blueprint")
		require.NoError(f, tr.Model.SaveBlueprint(path, 0, i))
		tensors, metadata, err := safetensors.Load(path)
		require.NoError(f, err)
		f.Add(withoutChecksums(f, tensors, metadata))
	}
	path := filepath.Join(f.TempDir(), "blueprint")
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(path, b, 0o666))
		for seed := range 2 {
			before := stateOf(t, tr)
			var err error
			bounded.Run(t, int64(len(b)), func() { err = tr.Model.LoadBlueprint(path, 0, seed) })
			if err != nil {
				require.True(t, before == stateOf(t, tr), "refused with %v, something has changed", err)
			}
		}
	})
}

func errorOf(_ any, err error) error { return err }
