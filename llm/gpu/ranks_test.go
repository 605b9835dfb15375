package gpu_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// roleVariable is set in the processes that tests start as ranks. It holds the name of the run and the
// folder for its checkpoint.
const roleVariable = "KASMINA_GPU_RANKS"

// TestMain also serves as the main function of the ranks that tests start.
func TestMain(m *testing.M) {
	role, dir, ok := strings.Cut(os.Getenv(roleVariable), ":")
	if !ok {
		os.Exit(m.Run())
	}
	err := rankOf(role, dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(comm.ExitCode(err))
}

// words is a source of tokens in memory. Each byte is a token.
type words []byte

func (w words) Tokenizer() string   { return "bytes" }
func (w words) VocabSize() int      { return 256 }
func (w words) Len() int64          { return int64(len(w)) }
func (w words) Fingerprint() string { return "words" }

func (w words) ReadTokens(dst []int, offset int64) error {
	for i := range dst {
		if int(offset)+i >= len(w) {
			return io.ErrUnexpectedEOF
		}
		dst[i] = int(w[int(offset)+i])
	}
	return nil
}

// rankRun is a run of several ranks.
type rankRun struct {
	config     llm.Config
	precision  cudaops.Precision
	muon       bool
	adapter    llm.LoRA // added to all linear layers, unless it is zero
	steps      int
	batch      int
	accumulate int // 0 for the number of ranks
	grow       bool
	evaluates  bool // every 10 steps; the checkpoint contains the loss
	pace       bool // prints tokens per second and saves nothing
	gradients  cudaops.Precision
	recompute  bool
	memory     int // limit in bytes (see cudaops.WithMemory), or 0 for none
}

// options returns the options of the machines.
func (r rankRun) options() []cudaops.MachineOption {
	o := []cudaops.MachineOption{cudaops.WithGradientPrecision(r.gradients)}
	if r.memory > 0 {
		o = append(o, cudaops.WithMemory(r.memory))
	}
	return o
}

func rankRuns() map[string]rankRun {
	small := llm.Config{Vocab: 1088, Dim: 128, Layers: 2, Heads: 2, KVHeads: 1, Seq: 64,
		Kasmina: []int{0, 1}, Seeds: 4, Depth: 2}.Default()
	gpt := llm.Config{Vocab: 50304, Dim: 768, Layers: 12, Heads: 12, Seq: 1024}.Default()
	large := llm.Config{Vocab: 50304, Dim: 1024, Layers: 24, Heads: 16, FF: 2816,
		Seq: 1024}.Default()
	wide := llm.Config{Vocab: 50304, Dim: 2048, Layers: 16, Heads: 16, FF: 5632, Seq: 2048}.Default()
	plain := llm.Config{Vocab: 1088, Dim: 512, Layers: 6, Heads: 4, Seq: 128}.Default()
	runs := map[string]rankRun{
		"no layers": {config: plain, precision: cudaops.BFloat16, steps: 50, batch: 4, accumulate: 4},
		"adamw bf16": {config: small, precision: cudaops.BFloat16, steps: 50,
			batch: 4, accumulate: 4},
		"one round": {config: plain, precision: cudaops.BFloat16, steps: 50, batch: 4, accumulate: 2},
		"one round, bf16 gradients": {config: small, precision: cudaops.BFloat16, steps: 50, batch: 4,
			accumulate: 2, gradients: cudaops.BFloat16, grow: true},
		"muon bf16": {config: small, precision: cudaops.BFloat16, steps: 50, batch: 4,
			accumulate: 4, muon: true},
		"adamw float8": {config: small, precision: cudaops.Float8, steps: 50,
			batch: 4, accumulate: 4},
		"growing adamw": {config: small, precision: cudaops.BFloat16, steps: 50, batch: 4,
			accumulate: 3, grow: true},
		"growing muon": {config: small, precision: cudaops.BFloat16, steps: 50, batch: 4,
			accumulate: 3, grow: true, muon: true},
		"adapters": {config: plain, precision: cudaops.BFloat16, steps: 50, batch: 4, accumulate: 4,
			adapter: llm.LoRA{Rank: 8, Alpha: 16}, evaluates: true},
		"bf16 gradients": {config: small, precision: cudaops.BFloat16, steps: 50, batch: 4,
			accumulate: 4, gradients: cudaops.BFloat16},
		"long": {config: gpt, precision: cudaops.BFloat16, steps: 100000, batch: 8,
			accumulate: 2, pace: true},
	}

	llama := llm.Config{Vocab: 128256, Dim: 4096, Layers: 32, Heads: 32, KVHeads: 8, FF: 14336,
		Seq: 4096, Base: 5e5, Untied: true}.Default()
	whole := rankRun{config: llama, precision: cudaops.BFloat16, steps: 9, batch: 2, pace: true,
		gradients: cudaops.BFloat16}
	runs["8B"] = whole
	whole.memory = 92 << 30 // room for the driver, NCCL and allocations outside the arena
	runs["8B in 95 GiB"] = whole
	whole.recompute = true
	runs["8B, recomputed"] = whole
	for name, r := range map[string]rankRun{"124M": {config: gpt, batch: 32, steps: 100},
		"350M": {config: large, batch: 16, steps: 70}, "925M": {config: wide, batch: 8, steps: 52}} {
		r.pace, r.precision = true, cudaops.BFloat16
		runs[name] = r
		r.gradients = cudaops.BFloat16
		runs[name+", gradients bf16"] = r
	}

	return runs
}

// rankOf trains as the rank that the environment describes, or as a process without ranks if the role
// starts with "plain ".
func rankOf(role, dir string) (err error) {
	name, plain := strings.CutPrefix(role, "plain ")
	run, ok := rankRuns()[name]
	if !ok && name != exchangeRole {
		return fmt.Errorf("there is no run %q", name)
	}

	place, err := comm.FromEnvironment(os.Getenv)
	if err != nil {
		return err
	}

	device, err := cudaops.Open(cudaops.WithOrdinal(place.LocalRank))
	if err != nil {
		return err
	}
	defer device.Close()

	ctx := context.Background()
	if plain {
		return run.train(ctx, place, device, dir, gpu.Engine(device, run.precision,
			run.options()...))
	}

	w, err := comm.Join(ctx, place, comm.Options{Timeout: time.Minute, Deadline: run.silence()})
	if err != nil {
		return err
	}

	if name == exchangeRole {
		return exchange(ctx, w, device)
	}

	team, err := gpu.Join(ctx, w, device)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, team.Close(err)) }()

	return run.train(ctx, place, device, dir, gpu.Parallel(device, run.precision, team,
		run.options()...))
}

func (r rankRun) train(ctx context.Context, place comm.Place, device *cudaops.Device, dir string,
	engine func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error)) error {
	m, err := llm.NewModel(r.config, tensor.Float32, 7, state.WithoutGates())
	if err != nil {
		return err
	}

	if !r.adapter.IsZero() {
		if r.adapter.Targets, err = r.config.MatchLayers(llm.AllLinear); err != nil {
			return err
		}
		if m, err = llm.Adapt(m, r.adapter, 11); err != nil {
			return err
		}
	}

	held, err := data.NewEvaluation([]byte(strings.Repeat("held-out text ", 50)), tokenizer.Bytes{}, r.batch,
		r.config.Seq)
	if err != nil {
		return err
	}

	loader, err := data.NewLoader(words(texttest.Words(3, 200000)),
		data.LoaderConfig{Batch: r.batch, Seq: r.config.Seq, Seed: 5})
	if err != nil {
		return err
	}

	var o optim.Optimizer
	if o, err = optim.NewAdamW(optim.WithLR(r.rate())); r.muon {
		o, err = optim.NewMuon()
	}
	if err != nil {
		return err
	}

	if r.accumulate == 0 {
		r.accumulate = place.Size
	}

	watch, spent := &watched{}, watched{}
	tr, err := llm.NewTrainer(m, loader, o, llm.TrainConfig{Steps: r.steps, Batch: r.batch,
		Accumulate: r.accumulate, Recompute: r.recompute,
		Schedule: optim.Constant(o.LR()), Clip: 1, Epoch: 5,
		Engine: func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
			e, err := engine(m, o, c)
			if p, ok := e.(llm.ParallelStepper); ok && r.pace {
				watch.ParallelStepper = p
				return watch, err
			}
			return e, err
		}})
	if err != nil {
		return err
	}
	defer tr.Close()

	var began, last time.Time
	var each []time.Duration // per step
	const laps = 3
	warm := min(10, r.steps/3)
	lap := max(1, (r.steps-warm)/laps)
	tr.On(func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		if r.grow && e.Step%place.Size == place.Rank {
			for _, c := range growthAt(e.Step) {
				tr.Model.Kasmina.Submit(c)
			}
		}
		if e.Step == 3 && place.Rank == 0 {
			fmt.Println("under way")
		}
		each, last = append(each, time.Since(last)), time.Now()
		if e.Step < warm || (e.Step-warm)%lap != 0 {
			return nil
		}
		if e.Step > warm && r.pace && place.Rank == 0 {
			s, n := time.Since(began).Seconds(), float64(lap)
			slices.Sort(each)
			free, total, err := device.Memory()
			if err != nil {
				return err
			}
			fmt.Printf("pace %d ranks, %d parameters: %.0f tokens/s, loss %.4f, %.2f ms a step, "+
				"%.2f the median (computing %.2f, talk %.2f), %.2f GiB\n",
				place.Size, e.Params, float64(e.StepTokens)*n/s, e.Loss, 1e3*s/n,
				1e3*each[len(each)/2].Seconds(), 1e3*(watch.steps-spent.steps).Seconds()/n,
				1e3*(watch.talk-spent.talk).Seconds()/n, float64(total-free)/(1<<30))
		}
		began, spent, each = time.Now(), *watch, nil
		return nil
	})

	if r.evaluates {
		tr.On(llm.Evaluate(tr, held, 10))
	}

	if !r.pace {
		tr.On(llm.Checkpoint(tr, filepath.Join(dir, "run.safetensors"), 20))
	}

	return tr.Run(ctx)
}

// watched measures how long a rank's host waits in steps and exchanges.
type watched struct {
	llm.ParallelStepper
	steps, talk time.Duration
}

func since(from time.Time, sum *time.Duration) { *sum += time.Since(from) }

func (w *watched) StepBatches(n int, next func() (data.Batch, error), word []byte) (llm.StepResult,
	error) {
	defer since(time.Now(), &w.steps)
	return w.ParallelStepper.StepBatches(n, next, word)
}

func (w *watched) Exchange(value []byte) ([][]byte, error) {
	defer since(time.Now(), &w.talk)
	return w.ParallelStepper.Exchange(value)
}

// rankSilence limits the time that a rank may be silent, including the time for loading kernels.
const rankSilence = 15 * time.Second

// silence returns how long the ranks of a run may be silent.
func (r rankRun) silence() time.Duration {
	if r.pace && r.steps < 1000 { // creating a large model takes a while
		return 3 * time.Minute
	}
	return rankSilence
}

// rate returns the learning rate.
func (r rankRun) rate() float64 {
	if r.pace {
		return 3e-4
	}
	return 3e-3
}

// growthAt returns the commands after a step. They grow a blueprint on a chunk, and blocks in depth.
func growthAt(step int) []state.Command {
	const depth = 2
	move := func(layer, seed int, to state.Stage) state.Command {
		return state.Command{Action: state.Move, Layer: layer, Seed: seed, To: to}
	}
	switch step {
	case 3:
		return []state.Command{{Action: state.Germinate, Layer: 0, Seed: 1,
			Request: state.GerminationRequest{Slot: 1, Kind: blueprints.Residual}},
			{Action: state.Germinate, Layer: depth, Seed: 0,
				Request: state.GerminationRequest{Kind: blueprints.Stack, Size: 2}}}
	case 6:
		return []state.Command{move(0, 1, state.Training), move(depth, 0, state.Training)}
	case 9:
		return []state.Command{move(0, 1, state.Grafting), move(depth, 0, state.Grafting)}
	}

	return nil
}

// launchRanks runs ranks and returns their output and the checkpoint.
func launchRanks(t *testing.T, role string, ranks int) (output string, file []byte) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	dir := t.TempDir()
	var out bytes.Buffer
	err = launch.Run(t.Context(), launch.Job{Path: self, PerNode: ranks, Stdout: &out, Stderr: &out,
		Env: append(os.Environ(), roleVariable+"="+role+":"+dir)})
	require.NoError(t, err, "%s on %d GPUs:\n%s", role, ranks, out.String())
	file, err = os.ReadFile(filepath.Join(dir, "run.safetensors"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		require.NoError(t, err)
	}

	return out.String(), file
}

// gpus returns the number of GPUs.
func gpus(t *testing.T) (n int) {
	t.Helper()
	for {
		d, err := cudaops.Open(cudaops.WithOrdinal(n))
		if err != nil {
			break
		}
		require.NoError(t, d.Close())
		n++
	}

	if n < 2 {
		t.Skip("needs two GPUs")
	}

	return n
}

// TestRanksSameBits checks that parameters, moments and lattices after 50 steps are the same on one GPU
// and on several.
func TestRanksSameBits(t *testing.T) {
	most := gpus(t)
	for name, r := range rankRuns() {
		if r.pace {
			continue
		}
		t.Run(name, func(t *testing.T) {
			_, want := launchRanks(t, name, 1)
			require.NotEmpty(t, want)
			for n := 2; n <= min(most, r.accumulate); n++ {
				_, got := launchRanks(t, name, n)
				require.True(t, bytes.Equal(want, got), "%d GPUs", n)
			}
		})
	}
}

// TestRanksPace measures how fast models train on one GPU, with and without ranks, and on several.
func TestRanksPace(t *testing.T) {
	most := gpus(t)
	if testing.Short() {
		t.Skip("takes a minute")
	}

	for name, r := range rankRuns() {
		if !r.pace || name == "long" || strings.HasPrefix(name, "8B") {
			continue
		}
		t.Run(name, func(t *testing.T) {
			output, _ := launchRanks(t, "plain "+name, 1)
			t.Logf("plain: %s", output)
			for n := 2; n <= most; n *= 2 {
				output, _ := launchRanks(t, name, n)
				t.Log(output)
			}
		})
	}
}

// large enables TestRanksLarge.
var large = flag.Bool("large", false, "train an 8B model on all GPUs, which takes minutes")

// TestRanksLarge measures the speed and memory of training all parameters of a model with the shape of
// Llama 3.1 8B on all GPUs together, with 2 × 4096 tokens per GPU. On two GPUs it needs about 108 GB
// each, and less if memory is limited or the backward pass recomputes blocks.
func TestRanksLarge(t *testing.T) {
	if !*large {
		t.Skip("takes minutes and hundreds of GB: -large")
	}
	for _, name := range []string{"8B", "8B in 95 GiB", "8B, recomputed"} {
		t.Run(name, func(t *testing.T) {
			output, _ := launchRanks(t, name, gpus(t))
			t.Log(output)
		})
	}
}
