package gpu_test

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/site"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// repeated is a source of a short repeating sequence, which a model soon learns.
type repeated struct{ randomTokens }

func (repeated) ReadTokens(dst []int, offset int64) error {
	for i := range dst {
		dst[i] = int(offset+int64(i)) % 7
	}
	return nil
}

// squares is the kind t(x) = x + w·x² of a chunk, built as a graph.
var squares = func() blueprints.Kind {
	k, err := site.Register(blueprints.Blueprint{Name: "squares", Identity: func(w []float64, _ int,
		_ *rand.Rand) float64 {
		clear(w)
		return 1
	}}, func(x *gorgonia.Node, params gorgonia.Nodes, _ int) (*gorgonia.Node, error) {
		s, err := gorgonia.Square(x)
		if err == nil {
			s, err = gorgonia.BroadcastHadamardProd(s, params[0], nil, []byte{0})
		}
		if err != nil {
			return nil, err
		}
		return gorgonia.Add(x, s)
	})
	if err != nil {
		panic(err)
	}
	return k
}()

// variants lists the lives of seeds as the stages they enter, one per step. From every stage that
// allows it, some life is rolled back.
var variants = [][]state.Stage{
	{state.Training, state.Grafting, state.Stabilization, state.Evaluating, state.FineTuning,
		state.Fossilized},
	{state.Training, state.Cancelled},
	{state.Training, state.Culled},
	{state.Training, state.Grafting, state.RolledBack},
	{state.Training, state.Grafting, state.Stabilization, state.RolledBack},
	{state.Training, state.Grafting, state.Stabilization, state.Evaluating, state.Culled},
	{state.Training, state.Grafting, state.Stabilization, state.Evaluating, state.FineTuning,
		state.RolledBack},
}

// deepVariants lists the commands for seeds in depth by step. Only one blueprint in depth lives at a
// time, and its gates take epochs.
var deepVariants = map[int][]state.Command{
	2:  {germinated(0, blueprints.Stack)},
	3:  {moved(0, state.Training)},
	4:  {moved(0, state.Grafting)},
	5:  {moved(0, state.Stabilization)},
	6:  {moved(0, state.RolledBack)},
	7:  {germinated(1, blueprints.Interleave), moved(1, state.Training)},
	8:  {moved(1, state.Cancelled), germinated(2, blueprints.NewBlocks), moved(2, state.Training)},
	9:  {moved(2, state.Culled), germinated(3, blueprints.Stack), moved(3, state.Training)},
	10: {moved(3, state.Grafting)},
	11: {moved(3, state.Stabilization)},
	12: {moved(3, state.Evaluating)},
	14: {moved(3, state.FineTuning)},
	16: {moved(3, state.Fossilized)},
}

func germinated(seed int, k blueprints.Kind) state.Command {
	return state.Command{Action: state.Germinate, Seed: seed, Request: state.GerminationRequest{
		Kind: k, Size: 2}}
}

func moved(seed int, to state.Stage) state.Command {
	return state.Command{Action: state.Move, Seed: seed, To: to}
}

// scheduleLives gives a run the commands of all lives, and records the stages of the seeds whenever it
// saves.
func scheduleLives(t *testing.T, tr *llm.Trainer, folder string, seen map[string]bool) {
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.Reshaped {
			require.NoError(t, e.Err)
		}
		if e.Kind != llm.StepEnd {
			return nil
		}
		for layer, l := range tr.Model.Kasmina.Lattices() {
			var all []state.Command
			for _, c := range deepVariants[e.Step] {
				if l.Site() == blueprints.Depth {
					all = append(all, c)
				}
			}
			for seed := range l.Seeds() {
				if l.Site() == blueprints.Depth || seed >= len(variants) {
					continue
				}
				all = append(all, commandsFor(l.Site(), seed, e.Step-seed%2)...)
			}
			for _, c := range all {
				c.Layer = layer
				if err := tr.Model.Kasmina.Do(c); err != nil {
					return fmt.Errorf("step %d: %w", e.Step, err)
				}
			}
			for _, s := range l.Report().Seeds {
				seen[fmt.Sprint(l.Site(), " ", s.Stage)] = true
			}
		}
		if folder == "" {
			return nil
		}
		return tr.Save(checkpointAt(folder, e.Step))
	})
}

// commandsFor returns the commands for a seed after a step of its life.
func commandsFor(where blueprints.Site, seed, step int) (all []state.Command) {
	kinds := map[blueprints.Site][]blueprints.Kind{blueprints.Chunk: {squares, blueprints.ConvFilter},
		blueprints.Weight: {blueprints.LoRA},
		blueprints.Stream: {blueprints.Attention, blueprints.Perceptron}}[where]
	switch at := step - 3; {
	case at == -1:
		c := germinated(seed, kinds[seed%len(kinds)])
		if where == blueprints.Chunk {
			c.Request.Size, c.Request.Slot = 0, 1+seed
		}
		return []state.Command{c}
	case at < 0 || at >= len(variants[seed]):
		return nil
	default:
		all = append(all, moved(seed, variants[seed][at]))
		if variants[seed][at] == state.Grafting {
			all = append(all, state.Command{Action: state.SetAlpha, Seed: seed, Alpha: 0.4})
		}
		return all
	}
}

// stagesTrainer returns a trainer for a model with seeds at all sites.
func stagesTrainer(t *testing.T, device *cudaops.Device, p cudaops.Precision,
	steps int) *llm.Trainer {
	t.Helper()
	c := llm.Config{Vocab: 32, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 16, Untied: true,
		Kasmina: []int{0}, Seeds: 8, Depth: 4}.Default()
	c.Weights = c.WeightSites("q", "k", "up", "down")
	c.Streams = []int{0, 1, 0, 1, 1, 0, 1}
	m := must[*llm.Model](t)(llm.NewModel(c, tensor.Float32, 3, state.WithoutGates(),
		state.WithAlphaNoise(0.5)))
	text := repeated{randomTokens{make([]int, 1<<12), c.Vocab}}
	loader := must[*data.Loader](t)(data.NewLoader(text, data.LoaderConfig{Batch: 2, Seq: c.Seq,
		Seed: 1}))
	o := must[*optim.AdamW](t)(optim.NewAdamW(optim.WithGroup(optim.NameContains("kasmina"),
		optim.Decay(0))))
	config := llm.TrainConfig{Steps: steps, Batch: 2, Clip: 1, Epoch: 1,
		Schedule: optim.Constant(3e-3)}
	if device != nil {
		config.Engine = gpu.Engine(device, p)
	}

	tr := must[*llm.Trainer](t)(llm.NewTrainer(m, loader, o, config))
	t.Cleanup(func() { require.NoError(t, tr.Close()) })
	return tr
}

// TestStagesResume saves checkpoints that together contain seeds of every site in every stage. It
// checks that resuming from each of them reproduces an uninterrupted run bit for bit, including lives
// that are cut short later. On chunks every other kind is a graph, and α is drawn at random around
// its schedule. The test runs on the CPU, and on a GPU if there is one.
func TestStagesResume(t *testing.T) {
	for _, where := range []string{"cpu", "gpu"} {
		t.Run(where, func(t *testing.T) {
			var device *cudaops.Device
			if where == "gpu" {
				device = open(t)
			}
			const steps = 18
			folder, seen := t.TempDir(), map[string]bool{}
			whole := stagesTrainer(t, device, cudaops.BFloat16, steps)
			scheduleLives(t, whole, folder, seen)
			require.NoError(t, whole.Run(t.Context()))
			want := saved(t, whole)
			for _, site := range []blueprints.Site{blueprints.Chunk, blueprints.Weight,
				blueprints.Stream, blueprints.Depth} {
				for stage := state.Dormant; stage <= state.RolledBack; stage++ {
					if site != blueprints.Depth || stage != state.Dormant {
						require.True(t, seen[fmt.Sprint(site, " ", stage)], "%v %v", site, stage)
					}
				}
			}
			for _, step := range randtest.Ints(t, 3, 1, steps-1) {
				tr := stagesTrainer(t, device, cudaops.BFloat16, steps)
				require.NoError(t, tr.Resume(t.Context(), checkpointAt(folder, step)))
				scheduleLives(t, tr, filepath.Join(t.TempDir()), map[string]bool{})
				require.NoError(t, tr.Run(t.Context()))
				require.Equal(t, want, saved(t, tr), "from step %d", step)
			}
		})
	}
}

// TestChunkGraphsOnGPU trains seeds at all sites, with a kind that is a graph on chunks. It checks that
// the losses on a GPU equal those on a CPU, and that no layer runs on the host.
func TestChunkGraphsOnGPU(t *testing.T) {
	device := open(t)
	const steps = 18
	var all [2][]float64
	for i, d := range []*cudaops.Device{nil, device} {
		tr := stagesTrainer(t, d, cudaops.Float32, steps)
		scheduleLives(t, tr, "", map[string]bool{})
		all[i] = losses(t, tr)
	}
	require.InDeltaSlice(t, all[0], all[1], 1e-4)
}
