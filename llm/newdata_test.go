package llm

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// onText is a trainer at its start on the text of a file.
func onText(t *testing.T, name, text string) *Trainer {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o666))
	corpus, err := data.Open(path)
	require.NoError(t, err)
	tokens, err := data.Tokenize(t.Context(), corpus.Train, tokenizer.Bytes{})
	require.NoError(t, err)
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 8})
	tr.Loader, err = data.NewLoader(tokens, data.LoaderConfig{Batch: tr.Config.Batch, Seq: tr.Model.Config.Seq, Seed: 5})
	require.NoError(t, err)
	return tr
}

// saved is a checkpoint of a run of four steps on a text.
func savedOn(t *testing.T, text string) string {
	t.Helper()
	tr := onText(t, "text", text)
	for range 4 {
		require.NoError(t, tr.step())
	}
	path := filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, tr.Save(path))
	return path
}

// TestResumeOnOtherText wants a run to go on with the same text, whatever its file is called, and other text of the same name and
// size to be refused unless it is asked for; then as much of the run to be kept as is asked for.
func TestResumeOnOtherText(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	one, two := strings.Repeat("all of one text. ", 60), strings.Repeat("all of two text. ", 60)
	path := savedOn(t, one)

	renamed := onText(t, "renamed", one)
	require.NoError(t, renamed.Resume(t.Context(), path))
	require.Equal(t, 4, renamed.Step())

	other := onText(t, "text", two)
	before := other.Loader.State()
	for _, opts := range [][]ResumeOption{nil, {WithNewSettings(nil)}} {
		err := other.Resume(t.Context(), path, opts...)
		require.ErrorIs(t, err, data.ErrChanged)
		require.ErrorContains(t, err, "WithNewData")
		require.Equal(t, before, other.Loader.State())
		require.Zero(t, other.Step())
	}
	for _, keep := range []Keep{{}, {Optimizer: true}, {Steps: true}, {Optimizer: true, Steps: true}} {
		tr := onText(t, "text", two)
		require.NoError(t, tr.Resume(t.Context(), path, WithNewData(keep)), "%+v", keep)
		require.Equal(t, before, tr.Loader.State(), "%+v", keep)
		require.Equal(t, keep.Steps, tr.Step() == 4, "%+v: step %d", keep, tr.Step())
		require.Equal(t, keep.Optimizer, updates(tr.Optimizer) == 4, "%+v: %d updates", keep, updates(tr.Optimizer))
		require.NoError(t, tr.step())
		again := filepath.Join(t.TempDir(), "again.safetensors")
		require.NoError(t, tr.Save(again))
		require.NoError(t, onText(t, "text", two).Resume(t.Context(), again), "%+v", keep)
	}
}

// updates is how many an optimiser remembers of any parameter.
func updates(o optim.Optimizer) (n int64) {
	for _, s := range o.State() {
		if steps, ok := s.Data.([]int64); ok {
			n = max(n, steps[0])
		}
	}
	return n
}

// TestResumeGrowth wants a run that grew to go on growing in the same way only, unless other settings are asked for, whether Grow is
// called before Resume or after.
func TestResumeGrowth(t *testing.T) {
	validation := func(text string, batch int) *data.Evaluation {
		e, err := data.NewEvaluation([]byte(text), tokenizer.Bytes{}, batch, tiny().Seq)
		require.NoError(t, err)
		return e
	}
	controller := func(active int) state.Controller {
		h := control.NewHeuristic(active, 1<<20)
		h.RampEpochs = 2
		return h
	}
	text := string(texttest.Words(9, 120))
	grown := Growth{Controller: controller(4), Validation: validation(text, 2), Every: 2}
	plain := newTrainer(t, trainerOptions{config: tiny(), steps: 8})
	growing := newTrainer(t, trainerOptions{config: tiny(), steps: 8})
	require.NoError(t, growing.Grow(grown))
	paths := map[bool]string{}
	for grows, tr := range map[bool]*Trainer{false: plain, true: growing} {
		require.NoError(t, tr.step())
		paths[grows] = filepath.Join(t.TempDir(), "run.safetensors")
		require.NoError(t, tr.Save(paths[grows]))
	}
	with := func(change func(*Growth)) *Growth { g := grown; change(&g); return &g }
	for name, c := range map[string]struct {
		grew bool
		now  *Growth
		want string
	}{
		"the same":  {true, with(func(*Growth) {}), ""},
		"never":     {false, nil, ""},
		"no longer": {true, nil, "this trainer does not grow"},
		"only now":  {false, &grown, "the run did not grow"},
		"another budget": {true, with(func(g *Growth) { g.Controller = controller(5) }),
			`the controller's "MaxActive" is 5 here and 4 there`},
		"another interval":   {true, with(func(g *Growth) { g.Every = 1 }), "Growth.Every is 1 here and 2 there"},
		"another text":       {true, with(func(g *Growth) { g.Validation = validation(text[1:], 2) }), "Growth.Validation"},
		"another batch":      {true, with(func(g *Growth) { g.Validation = validation(text, 1) }), "Growth.Validation"},
		"another controller": {true, with(func(g *Growth) { g.Controller = otherController{} }), "llm.otherController"},
	} {
		for _, first := range []bool{true, false} {
			for _, accept := range []bool{false, true} {
				tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
				grow := func() {
					if c.now != nil {
						require.NoError(t, tr.Grow(*c.now))
					}
				}
				var opts []ResumeOption
				told := ""
				if accept {
					opts = append(opts, WithNewSettings(func(d []string) { told = strings.Join(d, "; ") }))
				}
				if first {
					grow()
				}
				err := tr.Resume(t.Context(), paths[c.grew], opts...)
				if err == nil {
					if !first {
						grow()
					}
					err = tr.Run(t.Context()) // which has no step to make
				}
				if accept || c.want == "" {
					require.NoError(t, err, "%s, Grow first: %v", name, first)
					if first || c.now == nil {
						require.Contains(t, told, c.want, "%s, Grow first: %v", name, first)
					}
					continue
				}
				require.ErrorIs(t, err, ErrSettings, "%s, Grow first: %v", name, first)
				require.ErrorContains(t, err, c.want, "%s, Grow first: %v", name, first)
			}
		}
	}
}

// TestGrowthIsNotForgotten wants a run that was resumed to be told from one that grows in another
// way, also where Grow is called a second time, and by what is saved before it has gone on.
func TestGrowthIsNotForgotten(t *testing.T) {
	validation, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, tiny().Seq)
	require.NoError(t, err)
	grown := Growth{Controller: control.NewHeuristic(4, 1<<20), Validation: validation, Every: 2}
	other := Growth{Controller: control.NewHeuristic(4, 1<<20), Validation: validation, Every: 3}
	build := func(growths ...Growth) *Trainer {
		tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
		for _, g := range growths {
			require.NoError(t, tr.Grow(g))
		}
		return tr
	}
	dir := t.TempDir()
	path, again := filepath.Join(dir, "run.safetensors"), filepath.Join(dir, "again.safetensors")
	require.NoError(t, build(grown).Save(path))

	twice := build(grown)
	require.NoError(t, twice.Resume(t.Context(), path))
	require.NoError(t, twice.Grow(other))
	require.ErrorIs(t, twice.Run(t.Context()), ErrSettings)
	require.NoError(t, twice.Grow(grown))
	require.NoError(t, twice.Run(t.Context()))
	require.NoError(t, twice.Grow(other), "a run may change as it goes on")
	require.NoError(t, twice.Run(t.Context()))

	idle := build()
	require.NoError(t, idle.Resume(t.Context(), path))
	require.NoError(t, idle.Save(again))
	err = build(other).Resume(t.Context(), again)
	require.ErrorIs(t, err, ErrSettings)
	require.ErrorContains(t, err, "Growth.Every is 3 here and 2 there")
	require.ErrorContains(t, err, "WithNewSettings")
	require.NoError(t, build(grown).Resume(t.Context(), again))
}

// TestOldFingerprint wants the user of an older checkpoint, which knows names and sizes of files
// alone, to hear how its run goes on.
func TestOldFingerprint(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	text := strings.Repeat("all of one text. ", 60)
	path := savedOn(t, text)
	tensors, metadata, err := safetensors.Load(path)
	require.NoError(t, err)
	var run map[string]any
	require.NoError(t, json.Unmarshal([]byte(metadata[trainingKey]), &run))
	run["loader"].(map[string]any)["data"] = "0123456789abcdef"
	delete(run["settings"].(map[string]any), "growth")
	old, err := json.Marshal(run)
	require.NoError(t, err)
	metadata[trainingKey] = string(old)
	require.NoError(t, safetensors.Save(path, tensors, metadata))

	err = onText(t, "text", text).Resume(t.Context(), path)
	require.ErrorIs(t, err, data.ErrChanged)
	require.ErrorContains(t, err, "names and sizes")
	tr := onText(t, "text", text)
	require.NoError(t, tr.Resume(t.Context(), path, WithNewData(Keep{Optimizer: true, Steps: true})))
	require.Equal(t, 4, tr.Step())
}

type otherController struct{}

func (otherController) Decide([]state.Report) []state.Command { return nil }
