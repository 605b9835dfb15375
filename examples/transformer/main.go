// Command transformer trains a Llama-style language model that grows while it trains on text: a
// small one, unless told otherwise. It uses an NVIDIA GPU if there is one, else the CPU.
//
//	go run ./examples/transformer                     # a few minutes on two cores, on the Go source tree
//	go run ./examples/transformer -data ~/notes -out runs/notes
//	go run ./examples/transformer -resume             # goes on from the checkpoint in -out
//	go run ./examples/transformer -resume -prompt 'type ' -sample 1000 # another text from a model that is trained
//	go run ./examples/transformer -kasmina            # Kasmina layers, whose seeds grow, instead of more blocks
//	go run ./examples/transformer -board 127.0.0.1:6060 # shows the run in a browser
//	go run ./examples/transformer -preset 124M        # a larger model, of subwords: for a GPU
//	go run ./examples/transformer -device cpu -gpus 2 -accumulate 2 # two processes, with the bits of one
//
// It leaves in -out a checkpoint (model.safetensors) and the loss curve (loss.png). There are also
// a log with a JSON object a line (log.jsonl) and a text drawn from the model (sample.txt). On the
// same held-out text it compares the model's bits per byte with those of an order-2 byte model and
// of gzip -9. The last line that it prints is a JSON object with the results. What an earlier run
// left in -out moves to a folder in there (before-1, before-2 and so on), which nothing but its
// user deletes. A second run in the folder of one that goes on is refused where folders can be
// locked, which is not on Windows.
//
// The presets 124M, 350M and 925M train on the tokens of a byte-pair encoding, which is first
// trained on the text. Encoding and tokens are kept in -cache, so that the next run on the same
// text starts at once. The encoding lies beside the checkpoint too (tokenizer.bpe). Options that
// are given override the preset.
//
// An interrupt (Ctrl-C), or the end of its terminal, makes the run save a checkpoint before it
// ends; a second one ends it at once. With -resume, options that are not given are those of the
// checkpoint, and the run continues as if it had never stopped, bit for bit. Options that are given
// may differ, which the program then says. A run planned for 20 steps goes on with -resume -steps
// 40, with the learning rates and the growth of the longer plan. It then does not end where 40
// steps at a stretch do.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/launch"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/plot"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/tensorboard"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// The files of a run.
const (
	checkpointName  = "model.safetensors"
	tokenizerName   = "tokenizer.bpe"
	logName         = "log.jsonl"
	curveName       = "loss.png"
	sampleName      = "sample.txt"
	tensorboardName = "tensorboard" // a folder
)

// runFiles begins with the checkpoint.
var runFiles = []string{checkpointName, tokenizerName, logName, curveName,
	sampleName, tensorboardName}

// keptPrefix begins the names of the folders in -out that earlier runs' files move to.
const keptPrefix = "before-"

// profileAfter is the steps that warm a GPU up before -profile looks.
const profileAfter = 10

func main() {
	stderr := launch.Teller{File: os.Stderr}
	launched, err := launchRanks(os.Args[1:], os.Stdout, stderr)
	if !launched && err == nil {
		err = run(launch.UntilInterrupt(stderr), os.Args[1:], os.Stdout, stderr)
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(stderr, "transformer:", err)
	}
	os.Exit(exitCode(err))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	w, err := joinRanks(ctx, o, stderr)
	if err != nil {
		return err
	}
	if w != nil && w.Rank() > 0 {
		stdout, stderr = io.Discard, io.Discard
	}
	device, err := openDevice(o, w, stderr)
	if err != nil && w != nil {
		return w.Blame(err)
	} else if err != nil {
		return err
	}
	if device != nil {
		defer device.Close()
	}
	team, err := gpu.Team(ctx, w, device)
	if err != nil {
		return err
	}
	if team != nil {
		defer func() { err = errors.Join(err, team.Close(err)) }()
	}
	return runIn(ctx, team, device, o, stdout, stderr)
}

// writable finds out whether files can be made in a folder, or the folder itself, before a long
// tokenization is for nothing. It leaves nothing behind.
func writable(dir string) error {
	f, err := os.CreateTemp(dir, ".probe-*")
	if err == nil {
		return errors.Join(f.Close(), os.Remove(f.Name()))
	}
	_, there := os.Lstat(dir) // also of a link to nothing, which no folder can be made at
	if parent := filepath.Dir(dir); errors.Is(there, fs.ErrNotExist) && parent != dir {
		return writable(parent)
	}
	var cause *fs.PathError // which is about the probe
	if errors.As(err, &cause) {
		err = cause.Err
	}
	return fmt.Errorf("no file can be made in %s: %w", dir, err)
}

// afterFailure says what is left of a run that has failed. A checkpoint in -out is its own, or the
// one that it was resumed from.
func (o options) afterFailure(err error) error {
	_, missing := os.Stat(filepath.Join(o.out, checkpointName))
	switch {
	case errors.Is(err, data.ErrChanged):
		return resumeHint(err)
	case missing != nil || errors.Is(err, llm.ErrDiverged): // which has advice of its own
		return err
	}
	return fmt.Errorf("%w; %s goes on from the last checkpoint", err, o.resumption(o.out))
}

// resumption is the options with which the run in a folder goes on.
func (o options) resumption(out string) string {
	if o.data == "" {
		return "-resume -out " + quoted(out)
	}
	return "-resume -out " + quoted(out) + " -data " + quoted(o.data)
}

// resumeHint says what to do about a checkpoint that does not fit.
func resumeHint(err error) error {
	switch {
	case errors.Is(err, llm.ErrArchitecture):
		return fmt.Errorf("%w; without the options that differ it goes on, and without -resume "+
			"another run begins", err)
	case errors.Is(err, data.ErrChanged):
		return fmt.Errorf("%w; a run goes on with the text that it began with, with -new-data "+
			"all on this one, and without -resume another one begins", err)
	}
	return err
}

// setAside moves what another run left in -out to a folder of its own in there, unless it is that
// run which goes on.
func setAside(o options, stderr io.Writer) error {
	there, err := os.Stat(filepath.Join(o.out, checkpointName))
	checkpoint := err == nil
	if !checkpoint && !overwrites(o.out) {
		return nil
	}
	if checkpoint && o.resume.set {
		if resumed, err := os.Stat(o.resume.path); err == nil && os.SameFile(there, resumed) {
			return nil
		}
	}
	dir := ""
	for n, err := 1, fs.ErrExist; errors.Is(err, fs.ErrExist); n++ {
		dir = filepath.Join(o.out, fmt.Sprint(keptPrefix, n))
		if err = os.Mkdir(dir, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	// The checkpoint moves last: if this process is killed before, the next one moves the rest.
	for _, name := range append(slices.Clone(runFiles[1:]), checkpointName) {
		if err := os.Rename(filepath.Join(o.out, name), filepath.Join(dir, name)); err != nil &&
			!errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if !checkpoint {
		fmt.Fprintf(stderr, "kept      the files that were in %s are in %s now\n", o.out, dir)
		return nil
	}
	fmt.Fprintf(stderr,
		"kept      the run that was in %s is in %s now, and goes on with -resume -out %s\n",
		o.out, dir, quoted(dir))
	// which may be the work of days: only the user knows what can go
	if runs, bytes := keptRuns(o.out); runs > 1 {
		fmt.Fprintf(stderr,
			"kept      %d earlier runs are in %s by now and take %.1f MB: those of no more use can be deleted\n",
			runs, o.out, float64(bytes)/1e6)
	}
	return nil
}

// overwrites reports whether a run would overwrite files in a folder that has no checkpoint. They
// belong to a run that was killed before its first one, or to no run at all.
func overwrites(dir string) bool {
	for _, name := range []string{curveName, sampleName} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			return true
		}
	}
	return false
}

// keptRuns is how many runs have been set aside in a folder, and the bytes that they take.
func keptRuns(out string) (runs int, bytes int64) {
	entries, _ := os.ReadDir(out)
	for _, e := range entries {
		if _, err := os.Stat(filepath.Join(out, e.Name(), checkpointName)); err != nil ||
			!strings.HasPrefix(e.Name(), keptPrefix) {
			continue // a folder of the user's own may have such a name
		}
		runs++
		for _, name := range runFiles {
			if file, err := os.Stat(filepath.Join(out, e.Name(), name)); err == nil {
				bytes += file.Size()
			}
		}
	}
	return runs, bytes
}

// quoted returns a path as it can be pasted after an option: in quotes where a shell would take it
// for something else.
func quoted(path string) string {
	special := func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("/._-+:@%,=",
			r) && r != filepath.Separator
	}
	switch {
	case path != "" && !strings.ContainsFunc(path, special):
		return path
	case filepath.Separator == '\\':
		return `"` + path + `"` // in which a name cannot have a quote
	}
	return "'" + strings.ReplaceAll(path, "'", `'\''`) + "'"
}

// withHint says what helps against an error that a GPU's memory is too small.
func withHint(err error) error {
	if errors.Is(err, cudaops.ErrOutOfMemory) {
		return fmt.Errorf("%w; a smaller -batch needs less, with a larger -accumulate for as "+
			"many tokens in a step, and so does -recompute", err)
	}
	return err
}

// tellPace tells how long a run will take if the first step says that it will be long.
func tellPace(w io.Writer) llm.Callback {
	told := false
	return func(e llm.Event) error {
		if e.Kind != llm.StepEnd || told {
			return nil
		}
		told = true
		if step, left := e.Elapsed, e.Steps-e.Step; step > 5*time.Second && left > 0 {
			fmt.Fprintf(w,
				"pace      a step of %d tokens takes %v on this CPU, and the %d to come %v: "+
					"-steps, -batch and -seq make it less\n",
				e.StepTokens, step.Round(time.Second/10), left,
				(time.Duration(left) * step).Round(time.Second))
		}
		return nil
	}
}

func addCallbacks(t *llm.Trainer, o options, d dataset, stderr io.Writer) error {
	texts, err := d.evaluations(o)
	if err != nil {
		return err
	}
	if o.kasmina && !o.judge {
		t.On(grow(t.Model, t.Config.Epoch))
	}
	in := func(name string) string { return filepath.Join(o.out, name) }
	shown := stderr
	if o.quiet {
		shown = io.Discard
	}
	if o.tensorboard {
		t.On(tensorboard.Events(in(tensorboardName)))
	}
	t.On(
		runlog.Progress(shown),
		runlog.JSON(in(logName), runlog.On(o.on)),
		plot.LossCurve(in(curveName), in(logName)),
		llm.Evaluate(t, texts[0], o.evalEvery, llm.WithQuick(texts[1])),
		llm.Checkpoint(t, in(checkpointName), o.saveEvery, llm.InBackground()),
		llm.Monitor(t, stderr, o.saveEvery),
		llm.Ceilings(t),
		llm.SampleText(t, d.tokenizer, o.prompt, o.sample, o.sampler, in(sampleName), 0),
	)
	if o.scrub > 0 {
		t.On(llm.Scrub(t, stderr, o.scrub))
	}
	if o.profile != "" {
		t.On(llm.ProfileStep(t, stderr, o.profile, profileAfter))
	}
	return nil
}

// onGPU is the precision of a GPU.
func (o options) onGPU() cudaops.Precision {
	p := cudaops.BFloat16
	if o.precision != "" {
		p.UnmarshalText([]byte(o.precision)) // checked with the other options
	}
	return p
}

// onCPU sets how a CPU multiplies.
func (o options) onCPU(stderr io.Writer) error {
	if o.gradients != cudaops.Float32 {
		return fmt.Errorf("-grad-precision %v is for a GPU; a CPU takes f32", o.gradients)
	}
	switch o.precision {
	case "f16", "f8":
		return fmt.Errorf("-precision %s is for a GPU; a CPU takes f32 or bf16", o.precision)
	case "bf16":
		if err := cpuops.UseBFloat16(true); err != nil {
			return fmt.Errorf("-precision bf16: %w", err)
		}
		fmt.Fprintln(stderr, "device    the CPU, products of operands rounded to bfloat16")
	default:
		return cpuops.UseBFloat16(false)
	}
	return nil
}

// openDevice returns the GPU to train on, nil for the CPU.
func openDevice(o options, w *comm.World, stderr io.Writer) (*cudaops.Device, error) {
	if o.device == "cpu" {
		return nil, nil
	}
	at, err := gpu.Ordinal(w)
	var device *cudaops.Device
	if err == nil {
		device, err = cudaops.Open(cudaops.WithOrdinal(at))
	}
	switch {
	case err == nil:
		fmt.Fprintf(stderr, "device    %v, %v\n", device, o.onGPU())
		return device, nil
	case o.device == "auto" && errors.Is(err, cudaops.ErrNoDevice):
		return nil, nil
	case o.device == "auto":
		fmt.Fprintf(stderr, "device    the CPU, as the GPU cannot be used: %v\n", err)
		return nil, nil
	}
	return nil, err
}

func newTrainer(o options, tokens data.Tokens) (*llm.Trainer, error) {
	gates := state.WithoutGates()
	if o.judge {
		o.train.Epoch = max(1, o.train.Steps/judgedEpochs)
		epochs := o.train.Steps / o.train.Epoch
		gates = state.WithThresholds(state.DefaultThresholds().Within(epochs / 2))
	}
	m, err := llm.NewModel(o.model, tensor.Float32, o.seed, gates,
		// which costs a CPU a quarter of all of it
		state.WithTelemetry(state.Telemetry{Mode: state.Sampling, Every: 4}))
	if err != nil {
		return nil, err
	}
	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: o.train.Batch,
		Seq: o.model.Seq, Seed: o.seed})
	if err != nil {
		return nil, err
	}
	opt, peak, err := newOptimizer(o)
	if err != nil {
		return nil, err
	}
	if o.train.Schedule, err = optim.WarmupCosine(peak, peak/20, min(100, o.train.Steps/10),
		o.train.Steps); err != nil {
		return nil, err
	}
	t, err := llm.NewTrainer(m, loader, opt, o.train)
	if err != nil || o.grow == 1 {
		return t, err
	}
	if err := deepen(t, o.grow); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// newOptimizer returns the optimiser of -optimizer and its peak learning rate. Neither decays norms
// or Kasmina's slots.
func newOptimizer(o options) (optim.Optimizer, float64, error) {
	rate := func(usual float64) float64 {
		if o.lr != 0 {
			return o.lr
		}
		return usual
	}
	adamw := []optim.AdamWOption{optim.WithBetas(0.9, 0.95), optim.WithWeightDecay(0.1),
		optim.WithGroup(optim.NameContains("norm", "kasmina"), optim.Decay(0))}
	if o.optimizer == "adamw" {
		lr := rate(adamwRates[o.preset])
		a, err := optim.NewAdamW(append(adamw, optim.WithLR(lr))...)
		return a, lr, err
	}
	lr := rate(0.02)
	m, err := optim.NewMuon(optim.WithLR(lr),
		optim.WithAdamW(append(adamw, optim.WithLR(lr*0.15))...))
	return m, lr, err
}

// report prints the comparison and, on the last line, the results as JSON.
func report(o options, e llm.Event, b baselines, stdout io.Writer) error {
	tokensPerS := 0.0
	if e.RunTokens > 0 {
		tokensPerS = math.Round(float64(e.RunTokens) / e.Elapsed.Seconds())
	}
	line, err := json.Marshal(map[string]any{
		"steps": e.Step, "tokens_per_s": tokensPerS, "train_loss": e.Loss, "val_bpb": e.ValBPB,
		"order2_bpb": b.order2,
		"gzip_bpb":   b.gzip, "params": e.Params, "seeds": e.Seeds,
		"seconds": e.Elapsed.Round(time.Millisecond).Seconds(), "out": o.out,
	})
	if err != nil {
		return err
	}
	var files []string
	entries, _ := os.ReadDir(o.out) // what cannot be listed is not told
	for _, f := range entries {
		files = append(files, f.Name())
	}
	_, err = fmt.Fprintf(stdout, "\nin %s: %s\n\n%-28s bits per byte (until now of at most %d KiB)\n"+
		"%-28s %.3f\n%-28s %.3f\n%-28s %.3f\n\n%s\n", o.out, strings.Join(files, ", "),
		"on all of the held-out text", quickBytes>>10,
		"this model", e.ValBPB, "order-2 byte model", b.order2, "gzip -9", b.gzip, line)
	return err
}
