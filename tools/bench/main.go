// Command bench times this module's kernels and whole training steps, and prints one JSON line for
// each: its name, microseconds, GB/s or TFLOP/s, tokens per second and memory. Progress goes to
// standard error.
//
//	go run ./tools/bench > kasmina.jsonl                       # everything, on the GPU
//	go run ./tools/bench -groups train -models llama124M       # a part
//	go run ./tools/bench -device cpu                           # the same on the CPU
//	go run ./tools/bench -against before.jsonl > after.jsonl    # fails if something became slower
//
// peers/torch_peers.py takes the same measurements in PyTorch, under the same names, and
// peers/llmc_peers.py times training steps of llm.c. A table combines measurements from one machine:
//
//	python3 tools/bench/peers/torch_peers.py > torch.jsonl
//	go run ./tools/bench -table kasmina.jsonl torch.jsonl
//
// Three commands train models to the end and compare them:
//
//	go run ./tools/bench growth -help                          # pairs of a grown and a static model
//	go run ./tools/bench study -help                           # recipes of growth, on several budgets
//	go run ./tools/bench forgetting -help                      # learning against forgetting in tuning
//
// Two others measure generation and a server:
//
//	go run ./tools/bench decode -help                          # time of generating tokens
//	go run ./tools/bench serve -help                           # a server under the load of many clients
//
// Package cudabench times kernels, as medians of launches with a cold cache. A training step is
// everything from token ids on the host to updated weights and the loss on the host; a loss is the same
// without the update. Both are medians of wall-clock times. Package opbench times single ops on a CPU.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/cudabench"
	"github.com/kasmina-go/kasmina/tools/bench/forgetting"
	"github.com/kasmina-go/kasmina/tools/bench/growth"
)

// A result is a line of output. The first line of a program describes the machine and the date
// instead of a measurement.
type result struct {
	Bench    string  `json:"bench"`
	Peer     string  `json:"peer"`
	Us       float64 `json:"us,omitempty"`
	GBps     float64 `json:"gbps,omitempty"`
	TFLOPs   float64 `json:"tflops,omitempty"`
	TokensPS float64 `json:"tok_s,omitempty"`
	Params   int     `json:"params,omitempty"`
	PeakGiB  float64 `json:"peak_gib,omitempty"`
	ExtraGiB float64 `json:"extra_gib,omitempty"` // memory beyond operands and their gradients
	Loss     float64 `json:"loss,omitempty"`      // of the last step
	Tokens   int     `json:"tokens,omitempty"`    // computed in a pass over chats, including padding

	Card     string `json:"card,omitempty"`
	Driver   string `json:"driver,omitempty"`
	Versions string `json:"versions,omitempty"`
	Date     string `json:"date,omitempty"`
	Command  string `json:"command,omitempty"`
}

// project is this module's name among the peers. whereabouts names the first line of a program.
const project, whereabouts = "kasmina", "run"

// options are the options on the command line.
type options struct {
	groups    []string
	models    []string
	steps     int
	precision cudaops.Precision
	muon      bool
	profile   string
	batch     int
	seq       int               // of the group finetune; 0 for the default
	base      cpuops.WeightType // of the frozen weights of the group finetune
	recompute bool              // recompute blocks in the group finetune
	mlps      int               // blocks whose MLPs are recomputed in the group finetune
	pairs     bool              // use the loss of preference pairs in the group finetune
	memory    float64           // GiB that the group finetune may use to save time; 0 for no limit
	clip      float64
	tune      cudaops.Tuning
	monitor   int
	before    *earlier // nil without -against
}

// commands are the commands other than the measurements of kernels and training steps.
var commands = map[string]func(ctx context.Context, args []string, stdout, stderr io.Writer) error{
	"growth": growth.Pairs, "study": growth.Study, "forgetting": forgetting.Run,
	"decode": decode, "serve": serveLoad}

// runCommand runs one of the commands.
func runCommand(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	err := commands[args[0]](ctx, args[1:], os.Stdout, os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	return err
}

func main() {
	if len(os.Args) > 1 && commands[os.Args[1]] != nil {
		if err := runCommand(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}

	groups := flag.String("groups", "",
		"groups of measurements, separated by commas (default: all)\non a GPU "+
			strings.Join(gpuGroups(), ", ")+"\non a CPU "+strings.Join(cpuGroups(), ", "))
	device := flag.String("device", "cuda", "where to measure: cuda or cpu")
	models := flag.String("models", strings.Join(modelNames(), ","),
		"models for the training groups, separated by commas")
	o := options{}
	flag.IntVar(&o.steps, "steps", 20, "training steps to time")
	flag.TextVar(&o.precision, "precision", cudaops.BFloat16,
		"precision of training on a GPU: bf16, f8, f16 or f32")
	flag.TextVar(&o.tune, "tune", cudaops.TuneDefault,
		"how a GPU's fastest kernels are found: off, cached, full or default (off for f32, else cached)")
	flag.BoolVar(&o.muon, "muon", false, "train with Muon instead of AdamW")
	flag.Float64Var(&o.clip, "clip", 0,
		"limit of the global gradient norm on a GPU; 0 means no limit, as in torch_peers.py without --clip;\n"+
			"on a CPU the limit is 1")
	flag.StringVar(&o.profile, "profile", "",
		"write a trace of one training step, with every kernel, to this file (for ui.perfetto.dev or chrome://tracing),\n"+
			"and print a summary to standard error; with several models, to one file per model with its name")
	flag.IntVar(&o.monitor, "monitor", 0,
		"time the ops of one in this many training steps, and print a table to standard error; 0 times nothing")
	flag.IntVar(&o.batch, "batch", 0, "sequences in a batch (default: depends on the model)")
	flag.IntVar(&o.seq, "seq", 0, "tokens in a sequence of the group finetune (default: 4096)")
	flag.BoolVar(&o.recompute, "recompute", false, "recompute blocks in the backward pass, in the group finetune")
	flag.IntVar(&o.mlps, "recompute-mlps", 0, "recompute the MLPs of this many blocks, in the group finetune")
	flag.Float64Var(&o.memory, "memory", 0, "use at most this many GiB to save time, in the group finetune (default: no limit)")
	flag.BoolVar(&o.pairs, "pairs", false, "train on preference pairs, in the group finetune")
	base := flag.String("base", cpuops.BFloat16.String(),
		"type of the frozen weights in the group finetune: bf16, f8 or nf4")
	against := flag.String("against", "",
		"compare with the output of an earlier run on this machine in this `FILE`, and fail if\nsomething became slower by more than 3%; "+
			"the fastest of several measurements counts")
	repeat := flag.Int("repeat", 1, "number of times to measure everything")
	table := flag.Bool("table", false,
		"print the given files of measurements as a Markdown table, and measure nothing")
	flag.Parse()
	o.models = strings.Split(*models, ",")
	if *groups != "" {
		o.groups = strings.Split(*groups, ",")
	}

	err := o.base.UnmarshalText([]byte(*base))
	switch {
	case err != nil || o.base != cpuops.BFloat16 && o.base != cpuops.Float8 && o.base != cpuops.NF4:
		err = fmt.Errorf("-base is %q, want bf16, f8 or nf4", *base)
	case *table:
		err = printTable(os.Stdout, flag.Args())
	case flag.NArg() > 0:
		err = fmt.Errorf("%q is not an option; -table takes files", flag.Arg(0))
	case *repeat < 1:
		err = fmt.Errorf("-repeat is %d, want at least 1", *repeat)
	default:
		err = o.run(*device, *repeat, *against)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run measures on a device, and compares with an earlier run if its file is given.
func (o options) run(device string, repeat int, against string) error {
	measure := map[string]func(options) error{"cuda": onGPU, "cpu": onCPU}[device]
	if measure == nil {
		return fmt.Errorf("-device is %q, want cuda or cpu", device)
	}

	if against != "" {
		var err error
		if o.before, err = readEarlier(against); err != nil {
			return err
		}
	}

	for range repeat {
		if err := measure(o); err != nil {
			return err
		}
	}

	if o.before == nil {
		return nil
	}

	return o.before.compare(os.Stderr, emitted)
}

// gpuGroups returns the groups of cudabench, and the groups measured through the public machine.
func gpuGroups() []string {
	return append(cudabench.Groups(), "loss", "train", "train-f8", "train-bf16-gradients",
		"recompute", "train-kasmina", ofPublished, ofTuning, ofPacking)
}

func modelNames() (names []string) {
	for _, s := range append(slices.Clip(sizes), tuned...) {
		if !slices.Contains(names, s.name) {
			names = append(names, s.name)
		}
	}
	return names
}

// check chooses all groups if none is named, and returns an error for unknown names.
func (o *options) check(groups []string) error {
	if o.groups == nil {
		o.groups = groups
	}

	for _, g := range o.groups {
		if !slices.Contains(groups, g) {
			return fmt.Errorf("unknown group %q, want some of %s", g,
				strings.Join(groups, ", "))
		}
	}

	for _, name := range o.models {
		if !slices.Contains(modelNames(), name) {
			return fmt.Errorf("unknown model %q, want some of %s", name,
				strings.Join(modelNames(), ", "))
		}
	}

	if o.steps < 1 {
		return fmt.Errorf("-steps is %d, want at least 1", o.steps)
	}

	if o.clip < 0 || math.IsInf(o.clip, 0) || math.IsNaN(o.clip) {
		return fmt.Errorf("-clip is %v, want a number above 0, or 0 for no limit", o.clip)
	}

	if o.batch < 0 {
		return fmt.Errorf("-batch is %d, want at least 1, or 0 for the default", o.batch)
	}

	// An hour of measurements must not end in an error.
	if info, err := os.Stat(filepath.Dir(o.profile)); o.profile != "" &&
		(err != nil || !info.IsDir()) {
		return fmt.Errorf("-profile is %s, want a file in an existing folder", o.profile)
	}

	return nil
}

func (o options) has(group string) bool { return slices.Contains(o.groups, group) }

func onGPU(o options) error {
	if err := o.check(gpuGroups()); err != nil {
		return err
	}

	device, err := cudaops.Open()
	if errors.Is(err, cudaops.ErrNoDevice) {
		return fmt.Errorf("%w\n-device cpu measures the CPU", err)
	} else if err != nil {
		return err
	}
	defer device.Close()

	fmt.Fprintln(os.Stderr, device)
	line := where(device.Name(), driverVersion())
	if err := o.begin(line); err != nil {
		return err
	}

	var kernels []string
	for _, g := range cudabench.Groups() {
		if o.has(g) {
			kernels = append(kernels, g)
		}
	}

	if len(kernels) > 0 {
		if err := cudabench.Run(device, kernels, func(m cudabench.Measurement) error {
			return emit(measured(m.Name, m.Time, m.Bytes, m.FLOPs))
		}); err != nil {
			return err
		}
	}

	if o.has("loss") {
		if err := linearCrossEntropy(device); err != nil {
			return err
		}
	}

	for _, s := range sizes {
		if o.batch > 0 {
			s.batch = o.batch
		}
		for _, variants := range o.trainings(s) {
			if err := s.train(device, variants, o); err != nil {
				return err
			}
		}
	}

	if err := o.tunings(device); err != nil {
		return err
	}

	return o.packings(device)
}

// begin prints the first line of a run, unless the earlier run was on another machine.
func (o options) begin(line result) error {
	if err := o.before.fits(line); err != nil {
		return err
	}
	return emit(line)
}

// measured returns the result of a measurement.
func measured(name string, d time.Duration, bytes, flops float64) result {
	s := d.Seconds()
	return result{Bench: name, Peer: project, Us: rounded(s*1e6, 2), GBps: rounded(bytes/s/1e9, 2),
		TFLOPs: rounded(flops/s/1e12, 4)}
}

func rounded(x float64, digits int) float64 {
	p := math.Pow10(digits)
	return math.Round(x*p) / p
}

// where returns the first line of a run.
func where(card, driver string) result {
	command := append([]string{"go run ./tools/bench"}, os.Args[1:]...)
	return result{Bench: whereabouts, Peer: project, Card: card, Driver: driver,
		Versions: runtime.Version(),
		Date:     time.Now().Format(time.DateOnly), Command: strings.Join(command, " ")}
}

// driverVersion returns the version of NVIDIA's driver, or "" without nvidia-smi.
func driverVersion() string {
	out, err := exec.Command("nvidia-smi", "--query-gpu=driver_version",
		"--format=csv,noheader").Output()
	if err != nil {
		return ""
	}
	version, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(version)
}

// emitted holds all results so far.
var emitted []result

// emit prints a result as JSON, and in words on standard error.
func emit(r result) error {
	emitted = append(emitted, r)
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if r.Bench != whereabouts {
		fmt.Fprintf(os.Stderr, "%-52s %s\n", r.Bench, r)
	}
	_, err = fmt.Println(string(line))
	return err
}

// median sorts the times.
func median(times []time.Duration) (time.Duration, error) {
	if len(times) == 0 {
		return 0, errors.New("nothing was timed")
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}
