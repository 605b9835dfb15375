package parallel_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// patience is far longer than anything in these tests takes.
const patience = 100 * time.Second

// sizes returns the numbers of ranks to test, up to more than a step has batches: a small and a large one, which
// vary from run to run. In short mode, used with the race detector, one is enough.
func sizes() []int {
	switch {
	case testing.Short():
		return []int{3}
	case randtest.Long():
		return []int{1, 2, 3, 4, 5, 6, 7, 8}
	}
	return []int{1 + rand.IntN(4), 5 + rand.IntN(4)}
}

// setup describes a run. All ranks have the same setup unless a test changes it.
type setup struct {
	config     llm.Config
	kasmina    llm.KasminaOptions
	dt         tensor.Dtype
	optimizer  func() (optim.Optimizer, error)
	steps      int
	accumulate int
	grow       bool // a controller grows the model
	record     io.Writer
	commands   bool   // commands are submitted at ranks in turn
	resume     string // checkpoint to resume
	save       string // the last checkpoint
	every      int    // steps between checkpoints
	epoch      int    // steps in an epoch; 0 means 3
	text       uint64 // random seed of the text
	batch      int
	background bool
	parts      bool               // each rank saves its own part
	more       func(*llm.Trainer) // adds callbacks
	stop       int                // step after which the last rank is asked to stop
}

func adamW() (optim.Optimizer, error) { return optim.NewAdamW(optim.WithLR(0.01)) }
func lion() (optim.Optimizer, error)  { return optim.NewLion(optim.WithLR(0.001)) }

// adamW8bit quantizes the moments of all matrices to 8 bits. Several matrices end in an incomplete
// block.
func adamW8bit() (optim.Optimizer, error) {
	return optim.NewAdamW8bit(optim.WithLR(0.01), optim.WithMin8bitSize(100),
		optim.WithFloatMomentsFor(func(string, []int) bool { return false }))
}

func muon() (optim.Optimizer, error) { return optim.NewMuon(optim.WithAdamW(optim.WithLR(0.01))) }

// small returns a model with a Kasmina layer after each block and seeds in depth. Its largest parameter
// is divided among ranks.
func small() llm.Config {
	return llm.Config{Vocab: 1100, Dim: 16, Layers: 2, Heads: 2, KVHeads: 1, Seq: 12,
		Kasmina: []int{0, 1}, Seeds: 4,
		SlotWidth: 16, Depth: 2}.Default()
}

// train creates a rank's model and trains it. rank is -1 for a single process without a team.
func (s setup) train(ctx context.Context, rank, size int, engine func(*llm.Model, optim.Optimizer,
	llm.TrainConfig) (llm.Engine, error)) error {
	dt := s.dt
	if dt == (tensor.Dtype{}) {
		dt = tensor.Float32
	}

	m, err := llm.NewModel(s.config, dt, 7, state.WithoutGates())
	if err != nil {
		return err
	}
	m.KasminaOptions = s.kasmina

	batch := max(s.batch, 2)
	loader, err := data.NewLoader(newWords(3+s.text), data.LoaderConfig{Batch: batch,
		Seq: s.config.Seq, Seed: 5})
	if err != nil {
		return err
	}

	newOptimizer := s.optimizer
	if newOptimizer == nil {
		newOptimizer = adamW
	}

	o, err := newOptimizer()
	if err != nil {
		return err
	}

	schedule, err := optim.WarmupCosine(o.LR(), o.LR()/10, 2, 40)
	if err != nil {
		return err
	}

	tr, err := llm.NewTrainer(m, loader, o, llm.TrainConfig{Steps: s.steps, Batch: batch,
		Accumulate: s.accumulate,
		Schedule:   schedule, Clip: 1, Epoch: cmp.Or(s.epoch, 3), Engine: engine})
	if err != nil {
		return err
	}
	defer tr.Close()

	if s.grow {
		held, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, s.config.Seq)
		if err != nil {
			return err
		}
		h := control.NewHeuristic(4, 1<<20)
		h.Patience, h.RampEpochs, h.Hunger = 3, 2, 0.01
		if err := tr.Grow(llm.Growth{Controller: h, Validation: held,
			Refused: func(state.Command, error) {}, Record: s.record}); err != nil {
			return err
		}
	}

	if s.resume != "" {
		if err := tr.Resume(ctx, s.resume); err != nil {
			return err
		}
	}

	if s.more != nil {
		s.more(tr)
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	tr.On(func(e llm.Event) error {
		// Submitted commands take effect after the step's checkpoint, so a resumed run submits them again
		// when it starts.
		if s.commands && (e.Kind == llm.StepEnd || e.Kind == llm.RunStart) {
			for _, c := range commandsAt(e.Step) {
				if rank < 0 || e.Step%size == rank { // a different rank at each step
					tr.Model.Kasmina.Submit(c...)
				}
			}
		}
		if e.Kind == llm.StepEnd && e.Step == s.stop && (rank < 0 || rank == size-1) {
			cancel(errStop)
		}
		return nil
	})

	if s.save != "" {
		var opts []llm.CheckpointOption
		if s.background {
			opts = append(opts, llm.InBackground())
		}
		if s.parts {
			opts = append(opts, llm.InParts())
		}
		tr.On(llm.Checkpoint(tr, s.save, s.every, opts...))
	}

	return tr.Run(ctx)
}

var errStop = errors.New("asked to stop")

// commandsAt returns the commands after a step. They grow a blueprint on a chunk, one in depth that is
// grafted and rolled back, and another in depth that remains.
func commandsAt(step int) [][]state.Command {
	const depth = 2
	move := func(layer, seed int, to state.Stage) []state.Command {
		return []state.Command{{Action: state.Move, Layer: layer, Seed: seed, To: to}}
	}
	plant := func(layer, seed int, r state.GerminationRequest) []state.Command {
		return []state.Command{{Action: state.Germinate, Layer: layer, Seed: seed, Request: r}}
	}
	switch step {
	case 1:
		return [][]state.Command{plant(0, 1, state.GerminationRequest{Slot: 2,
			Kind: blueprints.ChunkMLP}),
			plant(depth, 0, state.GerminationRequest{Kind: blueprints.Stack, Size: 2})}
	case 2:
		return [][]state.Command{move(0, 1, state.Training), move(depth, 0, state.Training)}
	case 4:
		return [][]state.Command{move(0, 1, state.Grafting), move(depth, 0, state.Grafting)}
	case 6:
		return [][]state.Command{move(depth, 0, state.RolledBack),
			plant(depth, 1, state.GerminationRequest{Kind: blueprints.Interleave, Size: 2})}
	case 7:
		return [][]state.Command{move(depth, 1, state.Training)}
	case 8:
		return [][]state.Command{move(depth, 1, state.Grafting)}
	}

	return nil
}

// words is a source of tokens in memory. Each byte is a token.
type words struct {
	text        []byte
	fingerprint string
}

func newWords(seed uint64) words {
	return words{texttest.Words(seed, 5000), fmt.Sprint("words ", seed)}
}

func (w words) Tokenizer() string   { return "bytes" }
func (w words) VocabSize() int      { return 256 }
func (w words) Len() int64          { return int64(len(w.text)) }
func (w words) Fingerprint() string { return w.fingerprint }

func (w words) ReadTokens(dst []int, offset int64) error {
	for i := range dst {
		if int(offset)+i >= len(w.text) {
			return io.ErrUnexpectedEOF
		}
		dst[i] = int(w.text[int(offset)+i])
	}
	return nil
}

// places returns the places of a run on this host, at an unused port.
func places(t *testing.T, size int) []comm.Place {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	all, secret := make([]comm.Place, size), comm.NewSecret()
	for r := range all {
		all[r] = comm.Place{Rank: r, Size: size, LocalRank: r, LocalSize: size,
			MasterAddr: "127.0.0.1",
			MasterPort: port, Run: fmt.Sprintf("%s %d %d", t.Name(), os.Getpid(), port),
			Secret: secret}
	}

	return all
}

// on runs f at every rank of a team in this process and returns the errors by rank.
func on(t *testing.T, size int, o comm.Options,
	f func(rank int, team *parallel.Team) error) []error {
	t.Helper()
	o.Timeout = patience
	p, errs := places(t, size), make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			w, err := comm.Join(t.Context(), p[r], o)
			if err == nil {
				var team *parallel.Team
				if team, err = parallel.Join(t.Context(), w); err == nil {
					err = f(r, team)
					err = errors.Join(err, team.Close(err))
				}
			}
			errs[r] = err
		})
	}

	wg.Wait()
	return errs
}

// run trains on the given number of ranks, or in a process without a team if size is 0.
func (s setup) run(t *testing.T, size int) error {
	t.Helper()
	if size == 0 {
		return s.train(t.Context(), -1, 1, nil)
	}
	return errors.Join(on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
		return s.train(t.Context(), rank, size, team.Engine)
	})...)
}

// file performs the run and returns the last checkpoint.
func (s setup) file(t *testing.T, size int) []byte {
	t.Helper()
	s.save = filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, s.run(t, size), "%d ranks", size)
	b, err := os.ReadFile(s.save)
	require.NoError(t, err)
	return b
}

// TestSameBits checks that checkpoints, with parameters, moments, lattices and everything else, are the
// same on any number of ranks and in a single process that accumulates the same batches.
func TestSameBits(t *testing.T) {
	plain := llm.Config{Vocab: 1100, Dim: 16, Layers: 1, Heads: 2, Seq: 12}.Default()
	for name, s := range randtest.Sample(t, 3, map[string]setup{
		"AdamW":     {config: small(), steps: 8, accumulate: 6},
		"Muon":      {config: small(), steps: 8, accumulate: 6, optimizer: muon},
		"Lion":      {config: small(), steps: 4, accumulate: 6, optimizer: lion},
		"float64":   {config: small(), steps: 4, accumulate: 5, dt: tensor.Float64},
		"AdamW8bit": {config: small(), steps: 4, accumulate: 6, optimizer: adamW8bit},
		"growing by AdamW8bit in float64": {config: small(), steps: 20, accumulate: 4, grow: true,
			optimizer: adamW8bit, dt: tensor.Float64},
		"growing by AdamW": {config: small(), steps: 20, accumulate: 4,
			grow: true, commands: true},
		"growing by Muon": {config: small(), kasmina: llm.KasminaOptions{GradClip: 0.01}, steps: 20, accumulate: 4, grow: true,
			commands: true, optimizer: muon},
		"one batch a step":      {config: small(), steps: 3, accumulate: 1},
		"batches without seeds": {config: plain, steps: 4, accumulate: 3},
		"at weights and in the stream": {config: sited(plain), steps: 12, accumulate: 3,
			more: siteLives},
	}, "growing by Muon", "at weights and in the stream") {
		t.Run(name, func(t *testing.T) {
			want := s.file(t, 0)
			numbers := sizes()
			if !s.commands { // the growing runs cover more than these
				numbers = []int{2 + rand.IntN(7)}
			}
			for _, size := range numbers {
				require.True(t, bytes.Equal(want, s.file(t, size)), "%d ranks", size)
			}
			if s.commands {
				mustHaveGrown(t, want)
			}
		})
	}
}

// sited adds seeds at weights and in the stream to a model.
func sited(c llm.Config) llm.Config {
	c.Weights, c.Streams = c.WeightSites("q", "down"), []int{0, 0}
	return c
}

// siteLives moves all seeds through their stages; one of each site is rolled back. Every rank submits
// the commands, and all but the first one to do so are rejected.
func siteLives(tr *llm.Trainer) {
	stages := map[int]state.Stage{1: state.Training, 3: state.Grafting, 4: state.Stabilization,
		5: state.Evaluating, 7: state.FineTuning, 9: state.Fossilized}
	tr.On(func(e llm.Event) error {
		to, ok := stages[e.Step]
		if e.Kind != llm.StepEnd || !ok {
			return nil
		}
		for layer, l := range tr.Model.Kasmina.Lattices() {
			for seed := range l.Seeds() {
				c := state.Command{Action: state.Germinate, Layer: layer, Seed: seed,
					Request: state.GerminationRequest{Kind: blueprints.LoRA, Size: 2}}
				if l.Site() == blueprints.Stream {
					c.Request.Kind = []blueprints.Kind{blueprints.Attention,
						blueprints.Perceptron}[seed]
				}
				if to == state.Training {
					tr.Model.Kasmina.Submit(c)
				}
				c.Action, c.To = state.Move, to
				if to == state.Fossilized && seed == 1 {
					c.To = state.RolledBack
				}
				tr.Model.Kasmina.Submit(c)
			}
		}
		return nil
	})
}

// mustHaveGrown checks that the model in a checkpoint has gained blocks and contains seeds that
// blend.
func mustHaveGrown(t *testing.T, file []byte) {
	path := filepath.Join(t.TempDir(), "grown.safetensors")
	require.NoError(t, os.WriteFile(path, file, 0o666))
	m, err := llm.LoadModel(t.Context(), path)
	require.NoError(t, err)
	require.Equal(t, 4, m.Config.Layers)
	depth, err := m.Kasmina.Lattice(2).Stage(0)
	require.NoError(t, err)
	require.Equal(t, state.RolledBack, depth)
	blending := 0
	for _, l := range m.Kasmina.Lattices() {
		for _, s := range l.Report().Seeds {
			if s.Stage.Blends() {
				blending++
			}
		}
	}

	require.Greater(t, blending, 1)
}

// TestLimitsOfTheStepBefore covers limits that depend on telemetry, so that one batch may affect the
// gradients of the next. With several batches per step, these limits come from the previous step, for any
// number of ranks, and the engine has a different name.
func TestLimitsOfTheStepBefore(t *testing.T) {
	s := setup{config: small(), steps: 12, accumulate: 3, commands: true,
		kasmina: llm.KasminaOptions{Stability: op.Strict, AdaptiveClip: 0.5}}
	want := s.file(t, 1)
	for _, size := range sizes() {
		require.True(t, bytes.Equal(want, s.file(t, size)), "%d ranks", size)
	}

	require.False(t, bytes.Equal(want, s.file(t, 0)))
	s.resume = filepath.Join(t.TempDir(), "run.safetensors")
	require.NoError(t, os.WriteFile(s.resume, want, 0o666))
	require.ErrorIs(t, s.run(t, 0), llm.ErrSettings)
}

// TestResumesOnAnyNumber checks that any number of ranks can resume a checkpoint, whatever number
// wrote it, and that the result is bit-identical to that of an uninterrupted run.
func TestResumesOnAnyNumber(t *testing.T) {
	for name, s := range randtest.Sample(t, 1, map[string]setup{
		"AdamW": {config: small(), steps: 13, accumulate: 4, grow: true, commands: true},
		"Muon": {config: small(), steps: 13, accumulate: 4, grow: true, commands: true,
			optimizer: muon, background: true},
	}, "Muon") { // its run covers more than that of AdamW
		t.Run(name, func(t *testing.T) {
			pairs := [][2]int{{4, 0}, {3, 8}, {8, 2}, {1, 4}, {0, 3}}
			if !s.background {
				pairs = [][2]int{{3, 8}, {2, 0}}
			}
			want := s.file(t, 0)
			for _, pair := range randtest.SampleOf(t, 2, pairs) {
				from, to := pair[0], pair[1]
				first, second := s, s
				first.save, first.stop = filepath.Join(t.TempDir(), "run.safetensors"), 5
				first.every = 2
				require.ErrorIs(t, first.run(t, from), errStop)
				b, err := os.ReadFile(first.save)
				require.NoError(t, err)
				second.resume = filepath.Join(t.TempDir(), "copy.safetensors")
				require.NoError(t, os.WriteFile(second.resume, b, 0o666))
				require.True(t, bytes.Equal(want, second.file(t, to)), "from %d ranks to %d", from,
					to)
			}
		})
	}
}

// TestOtherRanksAreNamed checks that a rank with different data, options, parameters or step is
// rejected at the start, and that all ranks report which rank differs and how.
func TestOtherRanksAreNamed(t *testing.T) {
	base := setup{config: small(), steps: 3, accumulate: 2}
	for want, change := range map[string]func(*setup){
		"the text is different":                    func(s *setup) { s.text = 1 },
		"Batch is 2 here and 3 there":              func(s *setup) { s.batch = 3 },
		"Accumulate is 2 here and 3 there":         func(s *setup) { s.accumulate = 3 },
		"TrainConfig.Steps is different":           func(s *setup) { s.steps = 4 },
		`Optimizer is "*optim.AdamW" here`:         func(s *setup) { s.optimizer = muon },
		"Seeds is 4 here and 2 there":              func(s *setup) { s.config.Seeds = 2 },
		"the number of steps made is different":    func(s *setup) { s.resume = "set below" },
		`the run grew with a "*control.Heuristic"`: func(s *setup) { s.grow = true },
		"the state of the lattices is different": func(s *setup) {
			s.more = func(tr *llm.Trainer) {
				_ = tr.Model.Germinate(0, 2, state.GerminationRequest{Slot: 1,
					Kind: blueprints.ChunkMLP})
			}
		},
		"the value of a parameter is different": func(s *setup) {
			s.more = func(tr *llm.Trainer) { tr.Model.Params[3].Value.Float32s()[5] += 1e-3 }
		},
	} {
		t.Run(want, func(t *testing.T) {
			other := base
			change(&other)
			if other.resume != "" {
				shorter := base
				shorter.steps = 1
				b := shorter.file(t, 0)
				other.resume = filepath.Join(t.TempDir(), "run.safetensors")
				require.NoError(t, os.WriteFile(other.resume, b, 0o666))
			}
			errs := on(t, 3, comm.Options{}, func(rank int, team *parallel.Team) error {
				s := base
				if rank == 2 {
					s = other
				}
				return s.train(t.Context(), rank, 3, team.Engine)
			})
			for _, err := range errs {
				require.ErrorContains(t, err, "rank 2 trains differently from rank 0")
				require.ErrorContains(t, err, want)
			}
		})
	}
}
