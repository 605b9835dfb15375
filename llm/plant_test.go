package llm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/site"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// sited returns the tiny model with seeds at weights and in the stream, and one in depth.
func sited() Config {
	c := tiny()
	c.Weights = append(c.WeightSites("q", "down"), WeightSite{Layer: "head"},
		WeightSite{Block: 1, Layer: "q"})
	c.Streams = []int{0, 0, 1}
	c.LoRAAlpha, c.Depth = 4, 1
	return c
}

// at returns the commands addressed to the lattice of a site.
func (tr *Trainer) at(site blueprints.Site, commands ...state.Command) []state.Command {
	commands = slices.Clone(commands)
	for i := range commands {
		commands[i].Layer = tr.Model.LayerAt(site)
	}
	return commands
}

// siteCommands holds the commands a run receives, by step and site.
type siteCommands map[int]map[blueprints.Site][]state.Command

func (s siteCommands) give(tr *Trainer) Callback {
	return func(e Event) error {
		if e.Kind != StepEnd {
			return nil
		}
		for _, site := range []blueprints.Site{blueprints.Weight, blueprints.Stream,
			blueprints.Depth} {
			if err := tr.Model.Kasmina.Do(tr.at(site, s[e.Step][site]...)...); err != nil {
				return fmt.Errorf("step %d: %w", e.Step, err)
			}
		}
		return nil
	}
}

// lives returns commands that take a seed through all stages, one stage per step from the given step on.
func lives(seed int, k blueprints.Kind, size, from int, last state.Stage) map[int][]state.Command {
	all := map[int][]state.Command{from: {germinate(seed, k, size), move(seed, state.Training)}}
	for i, stage := range []state.Stage{state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, last} {
		all[from+1+i] = []state.Command{move(seed, stage)}
		if stage == state.Grafting {
			all[from+1+i] = append(all[from+1+i],
				state.Command{Action: state.SetAlpha, Seed: seed, Alpha: 0.4})
		}
	}
	return all
}

func together(site blueprints.Site, all ...map[int][]state.Command) siteCommands {
	s := siteCommands{}
	for _, one := range all {
		for step, c := range one {
			if s[step] == nil {
				s[step] = map[blueprints.Site][]state.Command{}
			}
			s[step][site] = append(s[step][site], c...)
		}
	}
	return s
}

// TestSitesResume takes seeds at weights and in the stream through every stage, to fossilization and
// back. It checks that the run can be resumed after any step and then reproduces the uninterrupted
// run bit for bit.
func TestSitesResume(t *testing.T) {
	for name, commands := range map[string]siteCommands{
		"weight": together(blueprints.Weight, lives(0, blueprints.LoRA, 3, 1, state.Fossilized),
			lives(5, blueprints.LoRA, 1, 2, state.RolledBack),
			lives(4, blueprints.LoRA, 2, 4, state.Fossilized)),
		"stream": together(blueprints.Stream,
			lives(0, blueprints.Attention, 1, 1, state.Fossilized),
			lives(2, blueprints.Perceptron, 5, 2, state.Culled),
			lives(1, blueprints.Perceptron, 7, 3, state.Fossilized)),
	} {
		t.Run(name, func(t *testing.T) {
			const steps = 11
			dir := t.TempDir()
			path := func(step int) string { return filepath.Join(dir, fmt.Sprint(step)) }
			options := trainerOptions{config: sited(), steps: steps}
			whole := newTrainer(t, options)
			whole.On(commands.give(whole), func(e Event) error {
				if e.Kind != StepEnd {
					return nil
				}
				return whole.Save(path(e.Step))
			})
			require.NoError(t, whole.Run(context.Background()))
			require.Empty(t, whole.Model.Planted)
			want := learntBy(t, whole)
			for _, step := range randtest.Ints(t, 3, 1, steps-1) {
				tr := newTrainer(t, options)
				require.NoError(t, tr.Resume(context.Background(), path(step)), "step %d", step)
				tr.On(commands.give(tr))
				require.NoError(t, tr.Run(context.Background()), "step %d", step)
				require.Equal(t, want, learntBy(t, tr), "from step %d", step)
				require.Equal(t, whole.Model.Config, tr.Model.Config)
			}
		})
	}
}

// TestSitesWhileDepthGrows checks that seeds at weights and in the stream survive growth in depth, whether
// the growth is fossilized or rolled back, and that the run can be resumed after any step.
func TestSitesWhileDepthGrows(t *testing.T) {
	for _, last := range []state.Stage{state.Fossilized, state.RolledBack} {
		t.Run(last.String(), func(t *testing.T) {
			commands := together(blueprints.Weight,
				lives(0, blueprints.LoRA, 3, 1, state.Fossilized),
				lives(2, blueprints.LoRA, 2, 4, state.RolledBack))
			for site, own := range map[blueprints.Site]siteCommands{
				blueprints.Stream: together(blueprints.Stream,
					lives(0, blueprints.Attention, 1, 1, state.Fossilized),
					lives(2, blueprints.Perceptron, 5, 5, state.Culled)),
				blueprints.Depth: together(blueprints.Depth,
					lives(0, blueprints.Stack, 2, 3, last))} {
				for step, c := range own {
					if commands[step] == nil {
						commands[step] = map[blueprints.Site][]state.Command{}
					}
					commands[step][site] = c[site]
				}
			}
			const steps = 13
			dir := t.TempDir()
			path := func(step int) string { return filepath.Join(dir, fmt.Sprint(step)) }
			options := trainerOptions{config: sited(), steps: steps}
			whole := newTrainer(t, options)
			free, err := state.NewLattice(1, 1, state.At(blueprints.Depth), state.WithoutGates())
			require.NoError(t, err)
			depth := whole.Model.Kasmina.Lattice(whole.Model.LayerAt(blueprints.Depth))
			require.NoError(t, depth.SetArrays(free.Arrays()))
			whole.On(commands.give(whole), func(e Event) error {
				if e.Kind != StepEnd {
					return nil
				}
				return whole.Save(path(e.Step))
			})
			require.NoError(t, whole.Run(context.Background()))
			want := learntBy(t, whole)
			require.Empty(t, whole.Model.Planted)
			require.Empty(t, whole.growth.snapshots)
			require.Equal(t, map[state.Stage]int{state.Fossilized: 5, state.RolledBack: 3}[last],
				whole.Model.Config.Layers)
			for _, step := range randtest.Ints(t, 3, 1, steps-1) {
				tr := newTrainer(t, options)
				require.NoError(t, tr.Resume(context.Background(), path(step)), "step %d", step)
				tr.On(commands.give(tr))
				require.NoError(t, tr.Run(context.Background()), "step %d", step)
				require.Equal(t, want, learntBy(t, tr), "from step %d", step)
				require.Equal(t, whole.Model.Config, tr.Model.Config)
			}
		})
	}
}

// TestIsolation checks that dormant blueprints are not part of a graph, and that blueprints in training
// change their own parameters but not a single bit of the host's steps.
func TestIsolation(t *testing.T) {
	unclipped := 0.0
	run := func(c Config, commands siteCommands) *Trainer {
		tr := newTrainer(t, trainerOptions{config: c, steps: 6, clip: &unclipped})
		tr.On(commands.give(tr))
		require.NoError(t, tr.Run(context.Background()))
		return tr
	}

	none := sited()
	none.Weights, none.Streams = nil, nil
	plain := run(none, nil)
	dormant := run(sited(), nil)
	want := learntBy(t, plain)
	require.Equal(t, want, learntBy(t, dormant))
	nodes := func(tr *Trainer) int {
		g, err := tr.Model.Graph(ForTraining, 2)
		require.NoError(t, err)
		return g.G.AllNodes().Len()
	}
	require.Equal(t, nodes(plain), nodes(dormant))
	train := func(site blueprints.Site, k blueprints.Kind, seeds ...int) siteCommands {
		var all []map[int][]state.Command
		for _, seed := range seeds {
			all = append(all, map[int][]state.Command{1: {germinate(seed, k, 1),
				move(seed, state.Training)}})
		}
		return together(site, all...)
	}

	for _, commands := range []siteCommands{
		train(blueprints.Weight, blueprints.LoRA, 0, 1, 2, 3, 4, 5),
		train(blueprints.Stream, blueprints.Perceptron, 0, 1, 2),
		train(blueprints.Stream, blueprints.Attention, 0, 2)} {
		tr := run(sited(), commands)
		require.NotEmpty(t, tr.Model.Planted)
		got := learntBy(t, tr)
		for name, bits := range want {
			require.Equal(t, bits, got[name], name)
		}
		for _, p := range tr.Model.Planted {
			last := ""
			for _, q := range tr.Model.Params { // the last one writes to the stream or the weight
				if strings.HasPrefix(q.Name, p.Prefix()) {
					last = q.Name
				}
			}
			data := tr.Model.Param(last).Float32s()
			require.NotEqual(t, make([]float32, len(data)), data, last)
			l := tr.Model.Kasmina.Lattice(tr.Model.LayerAt(p.Site))
			s := l.Report().Seeds[p.Seed]
			require.Positive(t, s.Gradient.Norm)
			require.Positive(t, s.Health.Variance)
			require.True(t, s.Mergeable)
		}
	}
}

// TestSitesRefuse checks that blueprints that do not fit are rejected before anything is planted.
func TestSitesRefuse(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: sited(), steps: 2})
	for want, c := range map[string]state.Command{
		"a LoRA of rank 17":              germinate(0, blueprints.LoRA, 17),
		"a Stack grows at site depth":    germinate(0, blueprints.Stack, 2),
		"Size is 0, want 1":              germinate(0, blueprints.LoRA, 0),
		"a Residual grows at site chunk": germinate(0, blueprints.Residual, 1)} {
		err := tr.Model.Kasmina.Do(tr.at(blueprints.Weight, c)...)
		require.ErrorIs(t, err, state.ErrArgument)
		require.ErrorContains(t, err, want)
	}

	for want, c := range map[string]state.Command{
		"an Attention of 3 heads": germinate(0, blueprints.Attention, 3),
		"of 999 hidden features":  germinate(1, blueprints.Perceptron, 999)} {
		err := tr.Model.Kasmina.Do(tr.at(blueprints.Stream, c)...)
		require.ErrorIs(t, err, state.ErrArgument)
		require.ErrorContains(t, err, want)
	}

	require.NoError(t, tr.Run(context.Background()))
	require.Empty(t, tr.Model.Planted)
	for want, change := range map[string]func(*Config){
		"Weights[0].Layer": func(c *Config) { c.Weights[0].Layer = "x" },
		"Weights[1].Block": func(c *Config) { c.Weights[1].Block = 2 },
		"Streams[0]":       func(c *Config) { c.Streams = []int{-1} },
		"LoRAAlpha":        func(c *Config) { c.LoRAAlpha = -1 },
	} {
		c := sited()
		change(&c)
		require.ErrorContains(t, c.Check(), want)
	}

	p := Planted{Site: blueprints.Weight, Seed: 1, Kind: "LoRA", Size: 1}
	elsewhere := p
	elsewhere.Seed = 9
	for want, planted := range map[string][]Planted{
		"planted blueprint 0: seed 9":          {elsewhere},
		"planted blueprint 1 is out of order":  {p, p},
		"planted blueprint 1 is out of order:": {p, {Site: p.Site, Kind: p.Kind, Size: 1}},
	} {
		require.ErrorContains(t, layout{sited(), planted}.Check(), want)
	}
}

// TestSeedGrowsInAnotherSize checks that a seed can grow again at a different size after its
// blueprint was culled, with either optimizer.
func TestSeedGrowsInAnotherSize(t *testing.T) {
	for name, o := range map[string]func() (optim.Optimizer, error){"adamw": adamW, "muon": muon} {
		t.Run(name, func(t *testing.T) { growsInAnotherSize(t, o) })
	}
}

func growsInAnotherSize(t *testing.T, o func() (optim.Optimizer, error)) {
	tr := newTrainer(t, trainerOptions{config: sited(), steps: 16, optimizer: o,
		lattice: []state.Option{state.WithEmbargo(0)}})
	tr.On(func(e Event) error {
		if e.Kind == Reshaped {
			require.NoError(t, e.Err)
		}
		if e.Kind != StepEnd {
			return nil
		}
		c := map[int][]state.Command{
			1:  {germinate(0, blueprints.LoRA, 3), move(0, state.Training)},
			4:  {move(0, state.Culled)},
			8:  {{Action: state.Recycle, Seed: 0}},
			9:  {germinate(0, blueprints.LoRA, 2), move(0, state.Training)},
			12: {move(0, state.Grafting)},
		}[e.Step]
		return tr.Model.Kasmina.Do(tr.at(blueprints.Weight, c...)...)
	})

	require.NoError(t, tr.Run(context.Background()))
	require.Equal(t, 2, tr.Model.Param("kasmina.weight.0.a").Shape()[0])
}

// atZero sets the initial weights to 0.
func atZero(w []float64, _ int, _ *rand.Rand) float64 {
	clear(w)
	return 1
}

// squareKind registers t(x) = x + w·x² as a graph or as arithmetic.
func squareKind(t *testing.T, name string, asGraph bool) blueprints.Kind {
	t.Helper()
	if k, ok := blueprints.ByName(name); ok {
		return k
	}

	b := blueprints.Blueprint{Name: name, Identity: atZero}
	if !asGraph {
		b.F32, b.F64 = squareOf[float32](), squareOf[float64]()
		k, err := blueprints.Register(b)
		require.NoError(t, err)
		return k
	}

	k, err := site.Register(b, func(x *gorgonia.Node, params gorgonia.Nodes,
		_ int) (*gorgonia.Node, error) {
		s, err := gorgonia.Square(x)
		if err != nil {
			return nil, err
		}
		if s, err = gorgonia.BroadcastHadamardProd(s, params[0], nil, []byte{0}); err != nil {
			return nil, err
		}
		return gorgonia.Add(x, s)
	})

	require.NoError(t, err)
	return k
}

func squareOf[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Forward: func(t, x, w []T, _ T) {
			for i, v := range x {
				t[i] = v + w[i]*v*v
			}
		},
		Backward: func(dx, dw, g, x, w []T, _ T) float64 {
			for i, v := range x {
				dx[i] = g[i] * (1 + 2*w[i]*v)
				dw[i] += g[i] * v * v
			}
			return 0
		}}
}

// squared trains a model with three chunk seeds of a kind, two in the same slot. It returns the losses
// and the final report of the lattice.
func squared(t *testing.T, kind blueprints.Kind, opts ...state.Option) (losses []float64,
	report state.Report) {
	t.Helper()
	c := tiny()
	c.Seeds, c.Slots = 4, 3
	tr := newTrainer(t, trainerOptions{config: c, steps: 12, dormant: true, lattice: opts})
	life := []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, state.Fossilized}
	tr.On(func(e Event) error {
		if e.Kind != StepEnd {
			return nil
		}
		losses = append(losses, e.Loss)
		if e.Step == 1 {
			slots := map[int]int{0: 1, 2: 2, 3: 1}
			for _, seed := range slices.Sorted(maps.Keys(slots)) {
				if err := tr.Model.Germinate(0, seed, state.GerminationRequest{Slot: slots[seed],
					Kind: kind}); err != nil {
					return err
				}
			}
		}
		if at := e.Step - 2; at >= 0 && at < len(life) {
			for _, seed := range []int{0, 2, 3} {
				if err := tr.Model.Kasmina.Do(move(seed, life[at])); err != nil {
					return err
				}
				if life[at] != state.Grafting {
					continue
				}
				if err := tr.Model.Kasmina.Do(state.Command{Action: state.SetAlpha, Seed: seed,
					Alpha: 0.5}); err != nil {
					return err
				}
			}
		}
		return nil
	})

	require.NoError(t, tr.Run(context.Background()))
	return losses, tr.Model.Kasmina.Report()[0]
}

// TestChunkGraphs checks that a chunk kind computed as a graph gives the same losses and measurements as
// the same kind computed as arithmetic.
func TestChunkGraphs(t *testing.T) {
	want, wanted := squared(t, squareKind(t, "square, arithmetic", false))
	got, measured := squared(t, squareKind(t, "square, graph", true))
	require.InDeltaSlice(t, want, got, 1e-6)
	require.NotEqual(t, got[5], got[6])
	for i, s := range measured.Seeds {
		require.Equal(t, wanted.Seeds[i].Stage, s.Stage)
		require.InDelta(t, wanted.Seeds[i].Health.Variance, s.Health.Variance, 1e-6)
		require.InDelta(t, wanted.Seeds[i].Gradient.Norm, s.Gradient.Norm, 1e-6)
	}

	noisy, _ := squared(t, squareKind(t, "square, graph", true),
		state.WithAlphaNoise(0.5))
	again, _ := squared(t, squareKind(t, "square, graph", true),
		state.WithAlphaNoise(0.5))
	require.Equal(t, noisy, again)
	require.Equal(t, got[:3], noisy[:3])
	require.NotEqual(t, got, noisy)
}

// TestInvalidChunkGraphs checks that a graph that fails, or has the wrong shape, cancels the seed but
// not the run, and that an existing graph rejects a kind that it does not contain.
func TestInvalidChunkGraphs(t *testing.T) {
	for name, build := range map[string]site.Build{
		"fails": func(*gorgonia.Node, gorgonia.Nodes, int) (*gorgonia.Node, error) {
			return nil, errors.New("no such graph")
		},
		"panics": func(x *gorgonia.Node, p gorgonia.Nodes, _ int) (*gorgonia.Node, error) {
			return p[7], nil
		},
		"shape": func(x *gorgonia.Node, p gorgonia.Nodes, _ int) (*gorgonia.Node, error) {
			return p[0], nil
		}} {
		t.Run(name, func(t *testing.T) {
			kind, ok := blueprints.ByName("chunk that " + name)
			if !ok {
				var err error
				kind, err = site.Register(blueprints.Blueprint{Name: "chunk that " + name,
					Identity: atZero}, build)
				require.NoError(t, err)
			}
			tr := newTrainer(t, trainerOptions{config: tiny(), steps: 4,
				dormant: true})
			var told error
			tr.On(func(e Event) error {
				if e.Kind == Reshaped {
					told = e.Err
				}
				return nil
			})
			require.NoError(t, tr.Model.Germinate(0, 1, state.GerminationRequest{Slot: 1,
				Kind: kind}))
			require.NoError(t, tr.Model.Kasmina.Do(move(1, state.Training)))
			require.NoError(t, tr.Run(context.Background()))
			require.Error(t, told)
			require.Equal(t, state.Cancelled, tr.Model.Kasmina.Report()[0].Seeds[1].Stage)
		})
	}

	m, err := NewModel(tiny(), tensor.Float32, 1, state.WithoutGates())
	require.NoError(t, err)
	g, err := m.Graph(ForLoss, 1)
	require.NoError(t, err)
	require.NoError(t, m.Germinate(0, 1, state.GerminationRequest{Slot: 1,
		Kind: squareKind(t, "square, graph", true)}))
	require.NoError(t, m.Kasmina.Do(move(1, state.Training), move(1, state.Grafting)))
	r, err := runnerOnCPU(g, g.Loss)
	require.NoError(t, err)
	_, err = r.Run(data.Batch{Inputs: make([]int, m.Config.Seq),
		Targets: make([]int, m.Config.Seq), Count: m.Config.Seq})
	require.ErrorIs(t, err, blueprints.ErrInvalid)
	require.ErrorContains(t, err, "llm.Trainer adds it before a step")
}
