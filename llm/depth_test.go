package llm

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// deep returns the tiny model with seeds in depth.
func deep() Config {
	c := tiny()
	c.Depth = 3
	return c
}

// depthCommands holds the commands a run receives, by step.
type depthCommands map[int][]state.Command

func germinate(seed int, k blueprints.Kind, size int) state.Command {
	return state.Command{Action: state.Germinate, Seed: seed,
		Request: state.GerminationRequest{Kind: k, Size: size}}
}

func move(seed int, to state.Stage) state.Command {
	return state.Command{Action: state.Move, Seed: seed, To: to}
}

// commanded returns a callback that carries out commands after steps. It must come before a callback that
// saves.
func commanded(tr *Trainer, commands depthCommands) Callback {
	return func(e Event) error {
		if e.Kind != StepEnd {
			return nil
		}
		all := slices.Clone(commands[e.Step])
		for i := range all {
			all[i].Layer = tr.Model.Kasmina.Layers() - 1
		}
		return tr.Model.Kasmina.Do(all...)
	}
}

// learntBy returns a checksum of each parameter and each moment, by name.
func learntBy(t *testing.T, tr *Trainer) map[string]uint32 {
	t.Helper()
	all := map[string]uint32{}
	put := func(name string, data any) {
		h := crc32.NewIEEE()
		require.NoError(t, binary.Write(h, binary.LittleEndian, data))
		all[name] = h.Sum32()
	}
	for _, p := range tr.Model.Params {
		put(p.Name, p.Value.Data())
	}

	for _, x := range tr.Optimizer.State() {
		put(x.Name, x.Data)
	}

	return all
}

// grownBy grows a trainer's model immediately.
func grownBy(t *testing.T, tr *Trainer, seed int, k blueprints.Kind, size int) {
	t.Helper()
	layer := tr.Model.Kasmina.Layers() - 1
	for _, c := range []state.Command{germinate(seed, k, size), move(seed, state.Training),
		move(seed, state.Grafting)} {
		c.Layer = layer
		require.NoError(t, tr.Model.Kasmina.Do(c))
	}
	require.NoError(t, tr.inTurn(tr.growth.reshape))
}

// TestStackCopies checks that growth preserves parameters, moments, loader and lattices, and that copied
// blocks have the values and the moments of the originals.
func TestStackCopies(t *testing.T) {
	for _, c := range []struct {
		name string
		kind blueprints.Kind
		from []int
	}{{"stack", blueprints.Stack, []int{0, 1, 0, 1}},
		{"interleave", blueprints.Interleave, []int{0, 0, 1, 1}}} {
		for opt, make := range map[string]func() (optim.Optimizer, error){"adamw": adamW, "muon": muon} {
			t.Run(c.name+"/"+opt, func(t *testing.T) {
				tr := newTrainer(t, trainerOptions{config: deep(), steps: 4, optimizer: make})
				require.NoError(t, tr.Run(context.Background()))
				before, loader := learntBy(t, tr), tr.Loader.State()
				lattice, err := tr.Model.Kasmina.Lattice(0).MarshalBinary()
				require.NoError(t, err)
				grownBy(t, tr, 0, c.kind, 2)
				require.Equal(t, 4, tr.Model.Config.Layers)
				require.Equal(t, loader, tr.Loader.State())
				same, err := tr.Model.Kasmina.Lattice(0).MarshalBinary()
				require.NoError(t, err)
				require.Equal(t, lattice, same)
				after, copied := learntBy(t, tr), 0
				for name, bits := range after {
					var block int
					var rest string
					if n, _ := fmt.Sscanf(name, blocksPrefix+"%d.%s", &block, &rest); n == 2 {
						require.Equal(t, before[blockPrefix(c.from[block])+rest], bits, name)
						copied++
					} else {
						require.Equal(t, before[name], bits, name)
					}
				}
				require.Greater(t, copied, 4*9*2)
				require.Equal(t, tr.Model.NumParams(), tr.Last().Params)
			})
		}
	}
}

// TestGrownIsAPlainModel checks that further training of a grown model is bit-identical to that of a
// model created with the same blocks, and that it can be saved, loaded and sampled from like any
// other.
func TestGrownIsAPlainModel(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: deep(), steps: 4})
	g, err := NewGenerator(tr.Model)
	require.NoError(t, err)
	defer g.Close()
	draw := func(g *Generator) (all []int) {
		s, err := sampler.New(sampler.Config{})
		require.NoError(t, err)
		for token, err := range g.Generate(context.Background(), []int{1, 2}, 20, s) {
			require.NoError(t, err)
			all = append(all, token)
		}
		return all
	}

	draw(g)
	require.NoError(t, tr.Run(context.Background()))
	grownBy(t, tr, 1, blueprints.Stack, 2)
	c := tiny()
	c.Layers = 4
	plain := newTrainer(t, trainerOptions{config: c, steps: 8})
	for i, p := range plain.Model.Params {
		copyNumbers(p.Value, tr.Model.Params[i].Value)
		require.Equal(t, p.Name, tr.Model.Params[i].Name)
	}

	for layer := range 2 {
		l := plain.Model.Kasmina.Lattice(layer)
		require.NoError(t, l.SetArrays(tr.Model.Kasmina.Lattice(layer).Arrays()))
	}

	require.NoError(t, plain.Optimizer.SetState(tr.Optimizer.State()))
	require.NoError(t, plain.Loader.SetState(tr.Loader.State()))
	plain.note(func(e *Event) { e.Step = 4 })
	tr.Config.Steps = 8
	require.NoError(t, errors.Join(tr.Run(context.Background()), plain.Run(context.Background())))
	require.Equal(t, learntBy(t, plain), learntBy(t, tr))

	path := filepath.Join(t.TempDir(), "grown.safetensors")
	require.NoError(t, tr.Model.Save(path))
	m, err := LoadModel(context.Background(), path)
	require.NoError(t, err)
	require.Equal(t, tr.Model.Config, m.Config)
	loaded, err := NewGenerator(m)
	require.NoError(t, err)
	defer loaded.Close()
	require.Equal(t, draw(loaded), draw(g))
}

// TestNewBlocksAreTheIdentity checks that new blocks do not change the loss, and that they learn.
func TestNewBlocksAreTheIdentity(t *testing.T) {
	testNewBlocks(t, deep(), "mlp.down_proj.weight", 0)
	c := deep()
	c.Traits = gemma().Traits
	c.Blocks = c.Blocks[:2]
	testNewBlocks(t, c, "post_attention_layernorm.weight", -1)
	c.NormPlusOne = false
	testNewBlocks(t, c, "post_feedforward_layernorm.weight", 0)
}

// testNewBlocks checks that the named parameter keeps a new block closed.
func testNewBlocks(t *testing.T, c Config, closing string, closed float32) {
	tr := newTrainer(t, trainerOptions{config: c, steps: 4})
	require.NoError(t, tr.Run(context.Background()))
	loss := func() float64 {
		l, err := tr.driver.loss(tr.Loader.InUse())
		require.NoError(t, err)
		return l
	}
	before := loss()
	grownBy(t, tr, 0, blueprints.NewBlocks, 2)
	require.Equal(t, 4, tr.Model.Config.Layers)
	require.Equal(t, before, loss())
	name := blockPrefix(3) + closing
	require.Equal(t, closed, tr.Model.Param(name).Float32s()[0])
	tr.Config.Steps = 8
	require.NoError(t, tr.Run(context.Background()))
	require.NotEqual(t, closed, tr.Model.Param(name).Float32s()[0])
}

// TestRollbackOfDepth checks that a rollback restores the earlier model, and that the run continues.
func TestRollbackOfDepth(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: deep(), steps: 4})
	require.NoError(t, tr.Run(context.Background()))
	before := learntBy(t, tr)
	grownBy(t, tr, 2, blueprints.Stack, 3)
	tr.Config.Steps = 8
	require.NoError(t, tr.Run(context.Background()))
	require.NotEqual(t, before[embedName], learntBy(t, tr)[embedName])
	require.NoError(t, tr.Model.Kasmina.Do(state.Command{Action: state.Move, Layer: 2, Seed: 2,
		To: state.RolledBack}))
	require.NoError(t, tr.inTurn(tr.growth.reshape))
	require.Equal(t, before, learntBy(t, tr))
	require.Empty(t, tr.Model.Config.Grown)
	require.Equal(t, 8, tr.Step())
	tr.Config.Steps = 10
	require.NoError(t, tr.Run(context.Background()))
}

// TestResumeWhileGrowing grows the model, fossilizes or rolls back the growth, and grows again. It
// checks that the run can be resumed after any step and then reproduces the uninterrupted run bit for
// bit.
func TestResumeWhileGrowing(t *testing.T) {
	const steps = 14
	commands := depthCommands{
		2: {germinate(0, blueprints.Interleave, 2)},
		3: {move(0, state.Training), move(0, state.Grafting)},
		5: {move(0, state.Stabilization)}, 6: {move(0, state.Evaluating)},
		7: {germinate(1, blueprints.NewBlocks, 1), move(1, state.Training)},
		8: {move(0, state.RolledBack)}, 9: {move(1, state.Grafting)},
		11: {move(1, state.RolledBack), germinate(2, blueprints.Stack, 2), move(2, state.Training)},
		12: {move(2, state.Grafting)},
	}

	for opt, make := range map[string]func() (optim.Optimizer, error){"adamw": adamW, "muon": muon} {
		t.Run(opt, func(t *testing.T) {
			dir := t.TempDir()
			path := func(step int) string { return filepath.Join(dir, fmt.Sprint(step)) }
			options := trainerOptions{config: deep(), steps: steps, optimizer: make}
			whole := newTrainer(t, options)
			whole.On(commanded(whole, commands), func(e Event) error {
				if e.Kind != StepEnd {
					return nil
				}
				return whole.Save(path(e.Step))
			})
			require.NoError(t, whole.Run(context.Background()))
			require.Equal(t, 4, whole.Model.Config.Layers)
			want := learntBy(t, whole)
			for _, step := range append(randtest.Ints(t, 3, 1, steps-2), steps-1) {
				tr := newTrainer(t, options)
				require.NoError(t, tr.Resume(context.Background(), path(step)), "step %d", step)
				tr.On(commanded(tr, commands))
				require.NoError(t, tr.Run(context.Background()), "step %d", step)
				require.Equal(t, want, learntBy(t, tr), "from step %d", step)
				require.Equal(t, whole.Model.Config, tr.Model.Config)
				if step == steps-1 { // and back to before it grew
					tr.callbacks = nil
					require.NoError(t, tr.Resume(context.Background(), path(1)))
					require.Equal(t, 2, tr.Model.Config.Layers)
					tr.On(commanded(tr, commands))
					require.NoError(t, tr.Run(context.Background()))
					require.Equal(t, want, learntBy(t, tr))
				}
			}
		})
	}
}

// TestForgedSnapshot checks that Resume rejects a checkpoint with an unusable snapshot or an
// impossible state of the run, and changes nothing.
func TestForgedSnapshot(t *testing.T) {
	options := trainerOptions{config: deep(), steps: 9}
	tr := newTrainer(t, options)
	path := filepath.Join(t.TempDir(), "run")
	tr.On(commanded(tr, depthCommands{1: {germinate(0, blueprints.Interleave, 2)},
		2: {move(0, state.Training), move(0, state.Grafting)}}), func(e Event) error {
		if e.Kind == StepEnd && e.Step == 4 {
			return tr.Save(path)
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	const weight = "model.layers.0.mlp.up_proj.weight"
	const grown = "part.growth.snapshot.0." // the snapshot from before the growth
	inState := func(from, to string) func(map[string]safetensors.Tensor, map[string]string) {
		return func(_ map[string]safetensors.Tensor, metadata map[string]string) {
			was := metadata[modelfile.TrainingKey]
			metadata[modelfile.TrainingKey] = strings.Replace(was, from, to, 1)
			require.NotEqual(t, was, metadata[modelfile.TrainingKey])
		}
	}

	for want, change := range map[string]func(map[string]safetensors.Tensor, map[string]string){
		"": func(map[string]safetensors.Tensor, map[string]string) {},
		`exp_avg is NaN at element 1`: func(x map[string]safetensors.Tensor, _ map[string]string) {
			setNaN(x[grown+"optimizer."+weight+".exp_avg"].Data, 1)
		},
		weight + " is NaN at element 2": func(x map[string]safetensors.Tensor,
			_ map[string]string) {
			setNaN(x[grown+weight].Data, 2)
		},
		"there is no exp_avg": func(x map[string]safetensors.Tensor, _ map[string]string) {
			delete(x, grown+"optimizer."+weight+".exp_avg")
		},
		weight + `": tensor not found`: func(x map[string]safetensors.Tensor, _ map[string]string) {
			delete(x, grown+weight)
		},
		`there is no parameter "model.stranger"`: func(x map[string]safetensors.Tensor,
			_ map[string]string) {
			for _, field := range []string{".step", ".exp_avg", ".exp_avg_sq"} {
				moment := x[grown+"optimizer."+normName+field]
				moment.Name = grown + "optimizer.model.stranger" + field
				x[moment.Name] = moment
			}
		},
		"before seed 7 grew": func(_ map[string]safetensors.Tensor, metadata map[string]string) {
			const key = modelfile.PartKey + growthName
			was := metadata[key]
			metadata[key] = strings.Replace(was, `"seeds":[{"layer":2,"seed":0}]`,
				`"seeds":[{"layer":2,"seed":7}]`, 1)
			require.NotEqual(t, was, metadata[key])
		},
		"1 tensors that do not belong to the model": func(x map[string]safetensors.Tensor, _ map[string]string) {
			old := x[grown+weight]
			old.Name = "before." + weight
			x[old.Name] = old
		},
		"spent 2562047h47m16": inState(`"spent":{"tokens":`,
			`"spent":{"time":9223372036854775807,"tokens":`),
		"spent 9223372036854775807": inState(`"spent":{"tokens":`,
			`"spent":{"tokens":9223372036854775807,"tokens_":`),
		"add up to NaN": inState(`"losses":`, `"losses":null,"losses_":`),
	} {
		t.Run(want, func(t *testing.T) {
			tensors, metadata, err := safetensors.Load(path)
			require.NoError(t, err)
			byName := map[string]safetensors.Tensor{}
			for _, x := range tensors {
				byName[x.Name] = x
			}
			change(byName, metadata)
			forged := filepath.Join(t.TempDir(), "forged")
			require.NoError(t, safetensors.Save(forged, inOrder(byName), metadata))
			again := newTrainer(t, options)
			require.NoError(t, again.step())
			before := stateOf(t, again)
			err = again.Resume(t.Context(), forged)
			if want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, want)
			require.Equal(t, before, stateOf(t, again))
			require.NoError(t, again.Run(t.Context()))
		})
	}
}

// setNaN sets an element of a slice to NaN.
func setNaN(data any, at int) {
	switch x := data.(type) {
	case []float32:
		x[at] = float32(math.NaN())
	case []float64:
		x[at] = math.NaN()
	}
}

// TestGrowthWithoutEngine checks that a run continues with the old model if no engine can be created for
// the grown one.
func TestGrowthWithoutEngine(t *testing.T) {
	never := newTrainer(t, trainerOptions{config: deep(), steps: 8})
	require.NoError(t, never.Run(context.Background()))
	tr := newTrainer(t, trainerOptions{config: deep(), steps: 8})
	full := errors.New("out of memory")
	tr.Config.Engine = func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
		if m.Config.Layers > 2 {
			return nil, full
		}
		return CPUEngine()(m, o, c)
	}

	var told []error
	tr.On(commanded(tr,
		depthCommands{2: {germinate(0, blueprints.Stack, 2), move(0, state.Training),
			move(0, state.Grafting)}}),
		func(e Event) error {
			if e.Kind == Reshaped {
				told = append(told, e.Err)
			}
			return nil
		})

	require.NoError(t, tr.Run(context.Background()))
	require.Len(t, told, 1)
	require.ErrorIs(t, told[0], full)
	stage, err := tr.Model.Kasmina.Lattice(2).Stage(0)
	require.NoError(t, err)
	require.Equal(t, state.RolledBack, stage)
	require.Equal(t, learntBy(t, never), learntBy(t, tr))
}

// TestGrownConfig checks that a configuration is rejected if its growths cannot have produced its
// blocks.
func TestGrownConfig(t *testing.T) {
	c := deep()
	grown := c.Grow(Grown{Seed: 1, Kind: "Interleave", Size: 2, Step: 3, Order: []int{0, 0, 1, 1}})
	require.NoError(t, grown.Check())
	require.Equal(t, []int{0, 2}, grown.Kasmina)
	require.Equal(t, c, grown.Origin())
	for _, bad := range []Grown{
		{Seed: 1, Size: 2, Order: []int{0, 0, 1}}, {Seed: 3, Size: 2, Order: []int{0, 0, 1, 1}},
		{Seed: 1, Size: 2, Order: []int{0, 0, 1, 3}}, {Seed: 1, Size: 2, Order: []int{-2, 0, 1, 1}},
		{Seed: 1, Size: 0, Order: []int{0, 0, 1, 1}}, {Seed: 1, Size: 2, Order: nil},
	} {
		grown.Grown = []Grown{bad}
		require.Error(t, grown.Check(), "%+v", bad)
	}

	fresh := deep()
	fresh.Kasmina = []int{0, 2}
	fresh = fresh.Grow(Grown{Seed: 1, Size: 1, Order: []int{0, 1, blueprints.NewBlock}})
	fresh.Kasmina = []int{0, 2}
	require.Error(t, fresh.Check())
	_, err := NewModel(grown, tensor.Float32, 1)
	require.Error(t, err)
}

// quickDepth returns a controller that grows tiny models early in short runs.
func quickDepth() *control.Depth {
	d := control.NewDepth(blueprints.Stack, 2)
	d.Begin, d.End, d.Settle, d.Patience, d.Flat = 0.2, 0.3, 0.2, 0.3, 10
	return d
}

// TestReplay lets a controller grow the model of a run on a time budget. It checks that the record
// repeats the run bit for bit, whatever the speed of the machine.
func TestReplay(t *testing.T) {
	var record bytes.Buffer
	c := Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 2, Seq: 12, Depth: 2}.Default()
	start := func(g Growth, budget time.Duration) *Trainer {
		tr := newTrainer(t, trainerOptions{config: c, steps: unlimitedSteps})
		tr.Config.Budget = Budget{Time: budget}
		var err error
		tr.Config.Annealing, err = optim.CosineAnnealing(0.1)
		require.NoError(t, err)
		require.NoError(t, tr.Grow(g))
		return tr
	}

	// On a busy machine, the time in which the controller may grow the model can pass within a single step.
	var first *Trainer
	for budget := time.Second; ; budget *= 3 {
		record.Reset()
		first = start(Growth{Controller: quickDepth(), Record: &record}, budget)
		require.NoError(t, first.Run(context.Background()))
		if strings.Contains(record.String(), `"action":"Germinate"`) {
			break
		}
		require.Less(t, budget, time.Minute, record.String())
	}

	r, err := ReadRecord(bytes.NewReader(record.Bytes()))
	require.NoError(t, err)
	again := start(Growth{Replay: r}, time.Hour)
	require.NoError(t, again.Run(context.Background()))
	require.Equal(t, first.Step(), again.Step())
	require.Equal(t, learntBy(t, first), learntBy(t, again))
	require.Equal(t, first.Model.Config, again.Model.Config)
	for _, bad := range []string{"{", `{"step":-1}`, `{"step":3,"share":2}`,
		"{\"step\":3}\n{\"step\":2}",
		`{"step":1,"command":{"action":"Grow"}}`} {
		_, err := ReadRecord(strings.NewReader(bad))
		require.ErrorContains(t, err, "line ", bad)
	}
}

// TestForecastIsRecorded checks that a run with a Forecast states its plan, its predictions and its verdict,
// in the record and to callbacks, and that the record repeats the run bit for bit.
func TestForecastIsRecorded(t *testing.T) {
	c := Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 2, Seq: 12, Depth: 1}.Default()
	var record bytes.Buffer
	var notes []string
	run := func(g Growth) *Trainer {
		tr := newTrainer(t, trainerOptions{config: c, steps: 600})
		require.NoError(t, tr.Grow(g))
		tr.On(func(e Event) error {
			if e.Kind == Noted {
				notes = append(notes, e.Text)
			}
			return nil
		})
		require.NoError(t, tr.Run(context.Background()))
		return tr
	}

	first := run(Growth{Controller: control.NewForecast(blueprints.Stack, 2), Record: &record})
	require.Greater(t, len(notes), 8)
	require.Contains(t, notes[0], "growth: the 1-block model would reach")
	require.Regexp(t, `^growth: when it grew from 1 to 2 blocks at a share of 0\.\d+, the predicted final loss was `+
		`\d\.\d+; the run ended at \d\.\d+, \d+\.\d% (above|below) it$`, notes[len(notes)-1])
	for _, note := range notes {
		require.Contains(t, record.String(), note)
	}
	require.Contains(t, record.String(), `"action":"Germinate"`)
	require.Contains(t, record.String(), `"why":"since it has settled, the loss is`)

	notes = nil
	r, err := ReadRecord(bytes.NewReader(record.Bytes()))
	require.NoError(t, err)
	again := run(Growth{Replay: r})
	require.Empty(t, notes)
	require.Equal(t, learntBy(t, first), learntBy(t, again))
	require.Equal(t, first.Model.Config, again.Model.Config)
}

// TestForecastResumes checks that runs resumed before and after a growth by a Forecast make the decisions of
// the whole run, and end bit-identical.
func TestForecastResumes(t *testing.T) {
	c := Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 2, Seq: 12, Depth: 2}.Default()
	options := trainerOptions{config: c, steps: 600}
	grow := func(tr *Trainer, record *bytes.Buffer) {
		f := control.NewForecast(blueprints.Stack, 4)
		f.Growths = 2
		require.NoError(t, tr.Grow(Growth{Controller: f, Record: record}))
	}

	var record bytes.Buffer
	dir, grown := t.TempDir(), 0
	saved := func(step int) string { return filepath.Join(dir, fmt.Sprint(step)) }
	steps := []int{301, 200, 450}
	whole := newTrainer(t, options)
	grow(whole, &record)
	whole.On(func(e Event) error {
		if e.Kind == Reshaped {
			grown++
		}
		if e.Kind == StepEnd && slices.Contains(steps, e.Step) {
			return whole.Save(saved(e.Step))
		}
		return nil
	})
	require.NoError(t, whole.Run(t.Context()))
	require.Positive(t, grown)

	for _, step := range randtest.SampleOf(t, 1, steps) {
		var rest bytes.Buffer
		resumed := newTrainer(t, options)
		grow(resumed, &rest)
		require.NoError(t, resumed.Resume(t.Context(), saved(step)))
		require.NoError(t, resumed.Run(t.Context()))
		require.Equal(t, learntBy(t, whole), learntBy(t, resumed), "step %d", step)
		require.True(t, strings.HasSuffix(record.String(), rest.String()), "step %d", step)
	}
}

// FuzzRecord passes arbitrary text to ReadRecord and the resulting commands to a model. A rejected
// command must not change the model.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"step":2,"share":0.5,"loss":3,"command":{"action":"Germinate","layer":0,` +
		`"seed":1,"slot":1,"kind":"Residual","why":"x"}}` + "\n" +
		`{"step":3,"share":0.5,"command":{"action":"Move","layer":0,"seed":1,"to":"Training"}}`))
	f.Add([]byte(`{"step":1,"share":1,"command":{"action":"Load","kind":"Residual",` +
		`"weights":[1,2],"scale":1e300}}`))
	f.Add([]byte(`{"step":1,"command":{"action":"Germinate","kind":"Stack","layer":1,"size":2,` +
		`"strategy":{"name":"Linear","params":{"epochs":-1}}}}` + "\n" +
		`{"step":1,"command":{"action":"SetAlpha","alpha":-3}}`))
	c := smallConfig()
	c.Depth = 2
	f.Fuzz(func(t *testing.T, text []byte) {
		var r *Record
		var err error
		bounded.Run(t, int64(len(text)), func() { r, err = ReadRecord(bytes.NewReader(text)) })
		if err != nil {
			return
		}
		tr := smallTrainer(t, c)
		for step := range 1000 {
			for _, command := range r.Commands(step) {
				before := stateOf(t, tr)
				if err := tr.steering.obey([]state.Command{command}); err != nil {
					require.Equal(t, before, stateOf(t, tr), "refused with %v", err)
				}
				again, err := json.Marshal(command)
				require.NoError(t, err)
				require.NoError(t, new(state.Command).UnmarshalJSON(again))
			}
		}
	})
}

// TestControllerGrows checks that a controller grows a model within its planned share of the run, lets it
// settle, and keeps or rolls back the growth.
func TestControllerGrows(t *testing.T) {
	c := Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 2, Seq: 12, Depth: 2}.Default()
	tr := newTrainer(t, trainerOptions{config: c, steps: 600})
	require.NoError(t, tr.Grow(Growth{Controller: quickDepth()}))
	grown := 0
	tr.On(func(e Event) error {
		if e.Kind == Reshaped {
			require.NoError(t, e.Err)
			if grown == 0 {
				require.Contains(t, e.Text, "1 blocks to 2")
				grown = e.Step
			}
		}
		return nil
	})

	require.NoError(t, tr.Run(context.Background()))
	require.InDelta(t, 0.25*600, grown, 0.06*600)
	s := tr.Model.Kasmina.Lattice(0).Report().Seeds[0]
	require.Contains(t, []state.Stage{state.Fossilized, state.RolledBack}, s.Stage)
	t.Logf("%v, delta %v", s.Stage, s.Delta)

	short := newTrainer(t, trainerOptions{config: c, steps: 60})
	require.ErrorContains(t, short.Grow(Growth{Controller: quickDepth()}), "plan at least")
}

// TestRewarm checks that the learning rate climbs back from near 0 after each scheduled growth, and
// that a run resumed during the climb ends bit-identical.
func TestRewarm(t *testing.T) {
	const steps, rewarm = 40, 4
	c := Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 2, Seq: 12, Depth: 2}.Default()
	growth := Growth{Rewarm: rewarm, Controller: &control.Schedule{Growths: []control.Planned{
		{Share: 0.25, Kind: blueprints.Stack, Size: 2}, {Share: 0.5, Kind: blueprints.Stack, Size: 2}}}}
	options := trainerOptions{config: c, steps: steps}

	path := filepath.Join(t.TempDir(), "checkpoint")
	var rates []float64
	whole := newTrainer(t, options)
	require.NoError(t, whole.Grow(growth))
	whole.On(func(e Event) error {
		if e.Kind != StepEnd {
			return nil
		}
		rates = append(rates, e.LearningRate/whole.Config.Schedule(e.Step-1))
		if e.Step == 12 {
			return whole.Save(path)
		}
		return nil
	})

	require.NoError(t, whole.Run(t.Context()))
	require.Equal(t, 4, whole.Model.Config.Layers)

	want := make([]float64, steps)
	for step := range want {
		want[step] = 1
	}

	require.Len(t, whole.Model.Config.Grown, 2)
	for _, g := range whole.Model.Config.Grown {
		for i := range rewarm {
			want[g.Step+i] = float64(i+1) / (rewarm + 1)
		}
	}

	require.InDeltaSlice(t, want, rates, 1e-12)

	resumed := newTrainer(t, options)
	require.NoError(t, resumed.Grow(growth))
	require.NoError(t, resumed.Resume(t.Context(), path))
	require.NoError(t, resumed.Run(t.Context()))
	require.Equal(t, learntBy(t, whole), learntBy(t, resumed))

	other := newTrainer(t, options)
	growth.Rewarm = 0
	require.NoError(t, other.Grow(growth))
	require.ErrorContains(t, other.Resume(t.Context(), path), "Growth.Rewarm is 0 here and 4 there")
}

// TestFreshMoments checks that the second copy of each block starts without moments, and that
// everything else keeps them.
func TestFreshMoments(t *testing.T) {
	for opt, newOptimizer := range map[string]func() (optim.Optimizer, error){"adamw": adamW, "muon": muon} {
		t.Run(opt, func(t *testing.T) {
			c := Config{Vocab: 256, Dim: 16, Layers: 2, Heads: 2, Seq: 12, Depth: 1}.Default()
			tr := newTrainer(t, trainerOptions{config: c, steps: 400, optimizer: newOptimizer})
			require.NoError(t, tr.Grow(Growth{FreshMoments: true,
				Controller: control.NewDepth(blueprints.Middle, 2)}))
			for range 3 {
				require.NoError(t, tr.step())
			}
			grownBy(t, tr, 0, blueprints.Middle, 2)
			require.Equal(t, 4, tr.Model.Config.Layers)

			fresh := 0
			for _, x := range tr.Optimizer.State() {
				var zero, numbers bool
				switch data := x.Data.(type) {
				case []float32:
					numbers = true
					zero = !slices.ContainsFunc(data, func(v float32) bool { return v != 0 })
				}
				var block int
				var rest string
				n, _ := fmt.Sscanf(x.Name, blocksPrefix+"%d.%s", &block, &rest)
				if !numbers || strings.HasSuffix(x.Name, ".step") || strings.Contains(x.Name, "kasmina") {
					continue
				}
				require.Equal(t, n == 2 && block >= 2, zero, x.Name)
				if zero {
					fresh++
				}
			}
			require.Positive(t, fresh)
		})
	}
}

// TestDivergedGrowth checks that growth is undone if the loss is no longer finite, and that the run
// then continues bit-identical to one that never grew.
func TestDivergedGrowth(t *testing.T) {
	c := deep()
	c.Kasmina, c.Seeds, c.Slots = nil, 0, 0
	never := newTrainer(t, trainerOptions{config: c, steps: 12})
	require.NoError(t, never.Run(context.Background()))
	tr := newTrainer(t, trainerOptions{config: c, steps: 12})
	grow := commanded(tr,
		depthCommands{4: {germinate(0, blueprints.Stack, 2), move(0, state.Training),
			move(0, state.Grafting)}})
	tr.On(grow)
	tr.Config.Engine = func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
		e, err := CPUEngine()(m, o, c)
		if m.Config.Layers > 2 {
			e = &diverging{Engine: e}
		}
		return e, err
	}

	require.NoError(t, tr.Run(context.Background()))
	require.Equal(t, 2, tr.Model.Config.Layers)
	stage, err := tr.Model.Kasmina.Lattice(0).Stage(0)
	require.NoError(t, err)
	require.Equal(t, state.RolledBack, stage)
	require.Equal(t, learntBy(t, never), learntBy(t, tr))
}

// diverging is an engine that returns a loss of NaN.
type diverging struct{ Engine }

func (d *diverging) Gradients(b data.Batch) (float64, error) {
	_, err := d.Engine.Gradients(b)
	return math.NaN(), err
}
