package gguf

import (
	"bytes"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/optim"
)

// remoteEngine imitates an engine with parameters on a device: the host's copy of the first parameter is
// stale until Pull, and during an update.
type remoteEngine struct {
	llm.Engine
	first        []float32
	duringUpdate func() // called during an update
}

func (e *remoteEngine) Pull(params ...string) error {
	e.first[0] = 0.25
	return e.Engine.Pull(params...)
}

func (e *remoteEngine) Update() (float64, error) {
	e.first[0] = 77
	e.duringUpdate()
	norm, err := e.Engine.Update()
	e.first[0] = 77
	return norm, err
}

// TestSaveDuringRun checks that files for other programs hold the parameters as of the end of a step,
// even if the parameters live on a device.
func TestSaveDuringRun(t *testing.T) {
	f, m := load(t, tiny)
	loader, err := data.NewLoader(zeros{m.Config.Vocab}, data.LoaderConfig{Batch: 1,
		Seq: m.Config.Seq})
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(1e-4))
	require.NoError(t, err)
	e, dir := &remoteEngine{first: m.Params[0].Value.Float32s()}, t.TempDir()
	file, folder := filepath.Join(dir, "m.gguf"), filepath.Join(dir, "folder")
	saved := make(chan error, 2)
	e.duringUpdate = func() {
		go func() { saved <- Save(t.Context(), file, f, m, F32, nil) }()
		go func() { saved <- hf.SavePretrained(t.Context(), folder, m, hf.Like(f)) }()
		time.Sleep(300 * time.Millisecond) // long enough to finish if they didn't wait
	}
	tr, err := llm.NewTrainer(m, loader, o, llm.TrainConfig{Steps: 1, Batch: 1,
		Schedule: optim.Constant(1e-4),
		Engine: func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
			var err error
			e.Engine, err = llm.CPUEngine()(m, o, c)
			return e, err
		}})

	require.NoError(t, err)
	defer tr.Close()
	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, <-saved)
	require.NoError(t, <-saved)
	_, tensors := read(t, file)
	require.InDelta(t, 0.25, tensors["token_embd.weight"].values()[0], 0)
	again, err := hf.Open(folder)
	require.NoError(t, err)
	defer again.Close()
	back, err := again.Load(t.Context())
	require.NoError(t, err)
	require.InDelta(t, 0.25, back.Params[0].Value.Float32s()[0], 0)
}

// zeros is a source of tokens that are all 0.
type zeros struct{ vocab int }

func (z zeros) Len() int64                          { return 1 << 20 }
func (z zeros) Tokenizer() string                   { return "zeros" }
func (z zeros) VocabSize() int                      { return z.vocab }
func (z zeros) ReadTokens(dst []int, _ int64) error { clear(dst); return nil }
func (z zeros) Fingerprint() string                 { return "zeros" }

// TestTooLarge checks that a number out of a type's range is rejected rather than written as
// infinity.
func TestTooLarge(t *testing.T) {
	f, m := load(t, tiny)
	x := m.Params[0].Value.Float32s()
	for _, c := range []struct {
		at   float32
		kind Type
		name string
	}{{70000, F16, "float16"}, {3.4e38, BF16, "bfloat16"}, {1e7, Q80, "float16"}} {
		x[5] = c.at
		path := filepath.Join(t.TempDir(), "m.gguf")
		require.ErrorContains(t, Save(t.Context(), path, f, m, c.kind, nil), "cannot hold", c.kind)
		require.NoFileExists(t, path)
		dir := filepath.Join(t.TempDir(), "m")
		require.ErrorContains(t, hf.SavePretrained(t.Context(), dir, m, hf.WithDtype(c.name)),
			"cannot hold", c.name)
		require.NoDirExists(t, dir)
	}

	b, fits := appendQ80(nil, make([]float32, blockSize))
	require.True(t, fits)
	require.Equal(t, bytes.Repeat([]byte{0}, blockSize+2), b)
	x32 := make([]float32, blockSize)
	x32[0] = 1e-40 // its scale has no finite inverse
	b, fits = appendQ80(nil, x32)
	require.True(t, fits)
	require.Equal(t, bytes.Repeat([]byte{0}, blockSize+2), b)
}
