package llm

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// frozen is the tiny model without Kasmina layers, whose weights are there to get LoRA alone.
func frozen(directed bool) Config {
	c := tiny()
	c.Kasmina, c.Seeds, c.Slots = nil, 0, 0
	c.Weights = c.WeightSites("q", "k", "v", "o", "gate", "up", "down")
	c.Frozen, c.Directed = true, directed
	return c
}

// hostBits are the model's own parameters.
func hostBits(t *testing.T, tr *Trainer) map[string]uint32 {
	all := learntBy(t, tr)
	for name := range all {
		if strings.HasPrefix(name, "kasmina.") {
			delete(all, name)
		}
	}
	return all
}

// TestAdapters wants LoRA to learn in a frozen model that keeps its bits, by each way to place them;
// the run to be resumed behind any of its steps, and to be replayed by its record, with the bits of
// the run that was never interrupted; and all to be merged at its end.
func TestAdapters(t *testing.T) {
	for _, where := range []control.Where{control.Unhealthiest, control.AtRandom, control.AllAtOnce} {
		t.Run("where "+string(where), func(t *testing.T) {
			const steps = 12
			dir := t.TempDir()
			path := func(step int) string { return filepath.Join(dir, fmt.Sprint(step)) }
			options := trainerOptions{config: frozen(where == control.Unhealthiest), steps: steps}
			var record bytes.Buffer
			growth := func() Growth {
				a := control.NewAdapters(700)
				a.Where = where
				if where != control.Unhealthiest {
					a.Rank = 1
				}
				return Growth{Controller: a, Record: &record}
			}
			whole := newTrainer(t, options)
			require.NoError(t, whole.Grow(growth()))
			before := hostBits(t, whole)
			whole.On(MergeAtEnd(whole), func(e Event) error {
				if e.Kind != StepEnd {
					return nil
				}
				require.NotEmpty(t, whole.Model.Config.Planted)
				require.Equal(t, before, hostBits(t, whole), "step %d", e.Step)
				return whole.Save(path(e.Step))
			})
			from := whole.Loader.State()
			b, err := whole.Loader.Next()
			require.NoError(t, err)
			require.NoError(t, whole.Loader.SetState(from))
			b.Inputs, b.Targets = slices.Clone(b.Inputs), slices.Clone(b.Targets)
			first, err := whole.loss(b)
			require.NoError(t, err)
			require.NoError(t, whole.Run(context.Background()))
			last, err := whole.loss(b)
			require.NoError(t, err)
			require.Less(t, last, first)
			require.Empty(t, whole.Model.Config.Planted)
			want := learntBy(t, whole)
			require.NotEqual(t, before, want)
			lines := record.String()
			for step := 1; step < steps; step++ {
				tr := newTrainer(t, options)
				require.NoError(t, tr.Grow(growth()))
				require.NoError(t, tr.Resume(context.Background(), path(step)), "step %d", step)
				tr.On(MergeAtEnd(tr))
				require.NoError(t, tr.Run(context.Background()), "step %d", step)
				require.Equal(t, want, learntBy(t, tr), "from step %d", step)
			}
			again := newTrainer(t, options)
			replay, err := ReadRecord(strings.NewReader(lines))
			require.NoError(t, err)
			require.NoError(t, again.Grow(Growth{Replay: replay}))
			again.On(MergeAtEnd(again))
			require.NoError(t, again.Run(context.Background()))
			require.Equal(t, want, learntBy(t, again))
		})
	}
}

// TestAdaptersBudget wants no more parameters than the budget has, and nearly as many, where
// gradients ask for them.
func TestAdaptersBudget(t *testing.T) {
	const budget = 500
	tr := newTrainer(t, trainerOptions{config: frozen(true), steps: 1})
	require.NoError(t, tr.Grow(Growth{Controller: control.NewAdapters(budget)}))
	host := tr.Model.NumParams()
	require.NoError(t, tr.Run(context.Background()))
	require.InDelta(t, budget, tr.Model.NumParams()-host, 32)
	require.LessOrEqual(t, tr.Model.NumParams()-host, budget)
	for _, p := range tr.Model.Config.Planted {
		square := 0.0
		for _, v := range tr.Model.Param(p.Prefix() + "a").Float32s() {
			square += float64(v) * float64(v)
		}
		require.InEpsilon(t, p.Size, square, 0.2, "rows of length 1, which a step has moved")
	}
}

// TestFrozenAlone wants a frozen model without a blueprint to say that nothing can learn, and one
// that is planted by hand to learn.
func TestFrozenAlone(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: frozen(false), steps: 2})
	require.ErrorContains(t, tr.Run(context.Background()), "nothing is planted")
	layer := tr.Model.LayerAt(blueprints.Weight)
	commands := []state.Command{germinate(3, blueprints.LoRA, 2), move(3, state.Training)}
	for i := range commands {
		commands[i].Layer = layer
	}
	require.NoError(t, tr.Model.Kasmina.Do(commands...))
	require.NoError(t, tr.Run(context.Background()))
	require.Len(t, tr.Model.Config.Planted, 1)

	for want, change := range map[string]func(*Config){
		"Config.Frozen is set":   func(c *Config) { c.Weights = nil },
		"Config.Directed is set": func(c *Config) { c.Frozen = false },
		"1 seeds in Depth":       func(c *Config) { c.Depth = 1 },
	} {
		c := frozen(true)
		change(&c)
		require.ErrorContains(t, c.Check(), want)
	}
}

// TestBudgets wants budgets that no blueprint fits, sizes that fit nowhere, and epochs that are over
// before they begin, to be refused with what would be needed; and that much to be enough.
func TestBudgets(t *testing.T) {
	text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, tiny().Seq)
	require.NoError(t, err)
	stream := tiny()
	stream.Kasmina, stream.Seeds, stream.Slots, stream.Streams = nil, 0, 0, []int{0, 1}
	heuristic := func(change func(*control.Heuristic)) state.Controller {
		h := control.NewHeuristic(4, 1<<20)
		h.Features = 8
		change(h)
		return h
	}
	adapters := func(most, rank int, where control.Where) state.Controller {
		a := control.NewAdapters(most)
		a.Rank, a.Where = rank, where
		return a
	}
	for name, c := range map[string]struct {
		config Config
		by     state.Controller
		want   string
	}{
		"stream": {stream, heuristic(func(h *control.Heuristic) { h.MaxParameters = 399 }),
			"MaxParameters is 399, and the smallest blueprint that it could plant has 400"},
		"stream, enough": {stream, heuristic(func(h *control.Heuristic) { h.MaxParameters = 400 }), ""},
		"stream, wide": {stream, heuristic(func(h *control.Heuristic) { h.Features = 1000 }),
			"no blueprint of its size fits any of the 2 seeds: lower its Features, 1000"},
		"epochs": {stream, heuristic(func(h *control.Heuristic) { h.Begin, h.End = 5, 5 }),
			"End is 5 and Begin is 5"},
		"nothing": {stream, heuristic(func(h *control.Heuristic) { h.MaxActive = 0 }), ""},
		"chunks": {tiny(), heuristic(func(h *control.Heuristic) { h.MaxParameters = 4 }),
			"MaxParameters is 4, and the smallest blueprint that it could plant has 5"},
		"adapters": {frozen(true), adapters(23, 4, control.Unhealthiest),
			"MaxParameters is 23, and the smallest blueprint that it could plant has 24"},
		"adapters, enough": {frozen(true), adapters(24, 4, control.Unhealthiest), ""},
		"adapters at random": {frozen(true), adapters(24, 4, control.AtRandom),
			"the smallest blueprint that it could plant has 96"},
		"adapters of a high rank": {frozen(true), adapters(1e6, 17, control.AllAtOnce),
			"no blueprint of its size fits any of the 14 seeds: lower its Rank, 17"},
	} {
		tr := newTrainer(t, trainerOptions{config: c.config, steps: 1000})
		err := tr.Grow(Growth{Controller: c.by, Validation: text})
		if c.want == "" {
			require.NoError(t, err, name)
			continue
		}
		require.ErrorIs(t, err, state.ErrArgument, name)
		require.ErrorContains(t, err, c.want, name)
	}
}
