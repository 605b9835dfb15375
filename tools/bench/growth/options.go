package growth

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state/control"
)

type options struct {
	device, data, ext, out, cache, optimizer string
	precision                                cudaops.Precision
	only                                     string // static or grown; "" for both
	replay                                   string // record that a grown model follows
	board                                    string // address, "" for none
	boardControl                             bool
	model                                    llm.Config // of the static model
	batch, epoch, vocab, runs                int
	from                                     int           // blocks of the grown model at the start
	every                                    int           // steps between evaluations; 0 to use evaluations
	heldOut                                  int64         // bytes
	rates                                    []float64     // learning rates to try
	time                                     time.Duration // of each run
	budget                                   llm.Budget    // budget of a static run
	grownShare                               float64       // share of the budget for a grown run
	evaluations                              int           // approximate number in each run
	seed                                     uint64
	sites                                    []string // sites of growth
	kind                                     string
	controller                               *control.Depth
	seeds                                    *control.Heuristic // for other sites than depth
}

func parse(args []string, stderr io.Writer) (o options, err error) {
	var rates, sites string
	o.controller, o.seeds = control.NewDepth(blueprints.Stack, 1), control.NewHeuristic(16, 1<<20)
	f := flag.NewFlagSet("bench growth", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprint(stderr, `usage: bench growth [options]

Trains pairs of a static and a growing model on the same budget, compares their held-out losses, and
writes plots and records of the decisions to the folder -out.

`)
		f.PrintDefaults()
	}

	f.StringVar(&o.device, "device", "auto",
		"where to compute: cpu, cuda (an NVIDIA GPU), or auto for the GPU if there is one")
	f.TextVar(&o.precision, "precision", cudaops.BFloat16, "precision on a GPU: bf16, f8, f16 or f32")
	f.StringVar(&o.data, "data", "", "file or folder to learn from (default: the Go source tree)")
	f.StringVar(&o.ext, "ext", "", "learn only from files with this extension, such as .py")
	f.StringVar(&o.out, "out", filepath.Join("runs", "grow"),
		"folder for models, logs, records and pictures")
	f.StringVar(&o.cache, "cache", filepath.Join(os.TempDir(), "kasmina"),
		"folder for byte-pair encodings and tokens")
	f.IntVar(&o.vocab, "vocab", 0,
		"entries of a byte-pair encoding to train on the data; 0 means that each byte is a token")
	f.Int64Var(&o.heldOut, "heldout", 32<<10,
		"bytes of held-out text for comparing the models")
	f.Uint64Var(&o.seed, "seed", 1, "random seed of parameters and data order")
	f.IntVar(&o.runs, "runs", 3, "number of comparisons, each with the next random seed")
	f.DurationVar(&o.time, "time", 20*time.Second, "duration of each run")
	f.Int64Var(&o.budget.Tokens, "tokens", 0, "tokens of each run, instead of -time")
	f.Float64Var(&o.budget.FLOPs, "flops", 0,
		"floating-point operations of each run, instead of -time")
	f.Float64Var(&o.grownShare, "grown-share", 1, "budget of a grown run, relative to a static run")
	f.IntVar(&o.batch, "batch", 8, "sequences in a batch")
	f.IntVar(&o.epoch, "epoch", 5, "steps in an epoch; the controller decides at the end of each epoch")
	f.StringVar(&o.optimizer, "optimizer", "muon", strings.Join(optim.ChoiceNames(), ", "))
	f.StringVar(&rates, "lr", "0.02",
		"peak learning rates, such as 0.01,0.02; the static run tries each, and the grown run uses\nthe best one")
	f.IntVar(&o.model.Layers, "layers", 4,
		"blocks of the static model, and of the grown model at the end")
	f.IntVar(&o.from, "from", 2, "blocks of the grown model at the start")
	f.StringVar(&sites, "site", "depth", "sites of growth, separated by commas: depth and, with -tokens or -flops, "+
		"chunk,\nweight or stream")
	f.StringVar((*string)(&o.seeds.Where), "where", "",
		"at other sites than depth: grow random or all seeds, instead of those that the controller chooses")
	f.IntVar(&o.seeds.MaxActive, "active", o.seeds.MaxActive,
		"at other sites than depth: maximum number of blueprints that grow at a time")
	f.IntVar(&o.seeds.MaxParameters, "params", o.seeds.MaxParameters,
		"at other sites than depth: maximum number of parameters of all blueprints")
	f.IntVar(&o.seeds.Rank, "rank", o.seeds.Rank, "with -site weight: rank of the blueprints")
	f.IntVar(&o.seeds.Features, "features", o.seeds.Features, "with -site stream: hidden features of the blueprints")
	f.StringVar(&o.kind, "kind", "stack", "kind of growth in depth: stack, interleave or new-blocks")
	f.Float64Var(&o.controller.Begin, "begin", o.controller.Begin,
		"earliest share of the budget for growth in depth; 0 lets the loss curve alone decide")
	f.Float64Var(&o.controller.End, "end", o.controller.End,
		"latest share of the budget for growth in depth")
	f.Float64Var(&o.controller.Flat, "flat", o.controller.Flat,
		"grow once the loss falls at this fraction of its fastest rate (default: derived from the cost of a step)")
	f.IntVar(&o.model.Dim, "dim", 192, "features of the residual stream")
	f.IntVar(&o.model.Heads, "heads", 4, "attention heads")
	f.IntVar(&o.model.FF, "ff", 0, "hidden features of the perceptrons (default: 8/3 of -dim)")
	f.IntVar(&o.model.Seq, "seq", 128, "tokens in a sequence")
	f.IntVar(&o.evaluations, "evaluations", 8, "approximate number of evaluations in a run, not counted in its time")
	f.IntVar(&o.every, "eval-every", 0,
		"steps between evaluations, instead of -evaluations")
	f.StringVar(&o.only, "only", "", "train only static or only grown models: static or grown")
	f.StringVar(&o.board, "board", "",
		"show the runs in a browser at this address, such as 127.0.0.1:6060")
	f.BoolVar(&o.boardControl, "board-control", false,
		"let anyone who has the token that -board prints steer the runs")
	f.StringVar(&o.replay, "replay", "",
		"let the grown model of the first random seed follow this record instead of the controller")
	if err := f.Parse(args); err != nil {
		return o, err
	}

	for _, s := range strings.Split(rates, ",") {
		lr, err := strconv.ParseFloat(s, 64)
		if err != nil || !(lr > 0) {
			return o, fmt.Errorf("-lr is %q, want numbers above 0, separated by commas", rates)
		}
		o.rates = append(o.rates, lr)
	}

	o.sites = strings.Split(sites, ",")
	return o, o.finish(f.Args())
}

// finish fills in defaults, and returns an error for impossible values.
func (o *options) finish(rest []string) error {
	for _, c := range []struct {
		ok   bool
		text string
	}{
		{len(rest) == 0, fmt.Sprintf("%q is not an option", rest)},
		{o.runs >= 1, fmt.Sprintf("-runs is %d, want at least 1", o.runs)},
		{o.time > 0, fmt.Sprintf("-time is %v, want more than 0", o.time)},
		{o.budget.Tokens >= 0, fmt.Sprintf("-tokens is %d, want at least 0", o.budget.Tokens)},
		{o.budget.FLOPs >= 0 && !math.IsInf(o.budget.FLOPs, 1),
			fmt.Sprintf("-flops is %v, want a finite number of at least 0", o.budget.FLOPs)},
		{o.budget.Tokens == 0 || o.budget.FLOPs == 0, "-tokens and -flops are given: want one"},
		{0 < o.grownShare && o.grownShare <= 1,
			fmt.Sprintf("-grown-share is %v, want more than 0, and at most 1", o.grownShare)},
		{o.evaluations >= 1, fmt.Sprintf("-evaluations is %d, want at least 1", o.evaluations)},
		{o.batch >= 1, fmt.Sprintf("-batch is %d, want at least 1", o.batch)},
		{o.epoch >= 1, fmt.Sprintf("-epoch is %d, want at least 1", o.epoch)},
		{o.every >= 0, fmt.Sprintf("-eval-every is %d, want at least 0", o.every)},
		{o.heldOut >= 2, fmt.Sprintf("-heldout is %d, want at least 2", o.heldOut)},
		{o.vocab == 0 || o.vocab >= 257,
			fmt.Sprintf("-vocab is %d, want 0, or at least 257", o.vocab)},
		{!slices.ContainsFunc(o.sites, func(s string) bool {
			return !slices.Contains([]string{"depth", "chunk", "weight", "stream"}, s)
		}), fmt.Sprintf("-site is %q, want depth, chunk, weight or stream", o.sites)},
		{!o.elsewhere() || o.budget.Tokens > 0 || o.budget.FLOPs > 0,
			fmt.Sprintf("-site %s needs -tokens or -flops, because the controller of seeds must know the number of epochs",
				strings.Join(o.sites, ","))},
		{1 <= o.from && o.from < o.model.Layers,
			fmt.Sprintf("-from is %d, want 1 to %d: fewer than -layers", o.from, o.model.Layers-1)},
		{slices.Contains([]string{"auto", "cpu", "cuda"}, o.device),
			fmt.Sprintf("-device is %q, want auto, cpu or cuda", o.device)},
		{slices.Contains(optim.ChoiceNames(), o.optimizer),
			fmt.Sprintf("-optimizer is %q, want one of %s", o.optimizer,
				strings.Join(optim.ChoiceNames(), ", "))},
		{slices.Contains([]string{"", "static", "grown"}, o.only),
			fmt.Sprintf("-only is %q, want static or grown", o.only)},
		{o.replay == "" || o.only != "static",
			"-replay is for the grown model, and -only is static"},
	} {
		if !c.ok {
			return errors.New(c.text)
		}
	}

	if o.budget == (llm.Budget{}) {
		o.budget.Time = o.time
	}

	if err := o.plan(); err != nil {
		return err
	}

	o.model.Vocab = tokenizer.Bytes{}.VocabSize()
	if o.vocab > 0 {
		o.model.Vocab = (o.vocab + 63) / 64 * 64 // a multiple of 64 makes the products faster
	}

	o.model = o.model.Default()
	if err := errors.Join(o.model.Check(), o.controller.Check(), o.seeds.Check()); err != nil {
		return err
	}

	// A run needs enough epochs for a whole growth, because the controller decides once in each epoch. A
	// growth in depth takes about 80 epochs. At other sites, blueprints are compared in each epoch, which
	// takes longer than a few steps, so the epochs must not be too short.
	minEpochs := 40.0
	if o.grows("depth") {
		minEpochs = 100
	}

	if steps := o.steps(); steps > 0 {
		o.epoch = max(1, min(o.epoch, int(steps/minEpochs)))
	}

	return nil
}

// grows reports whether models grow at a site.
func (o *options) grows(site string) bool { return slices.Contains(o.sites, site) }

// elsewhere reports whether models grow at other sites than depth.
func (o *options) elsewhere() bool {
	return o.grows("chunk") || o.grows("weight") || o.grows("stream")
}

// steps returns the number of steps in a static run, or 0 if its time limits it.
func (o *options) steps() float64 {
	// At most one of the two budgets is set. The other one adds 0.
	tokens := float64(o.budget.Tokens) + o.budget.FLOPs/o.model.FLOPs()
	return tokens / float64(o.batch*o.model.Seq)
}

// plan configures the controller to grow the model from -from blocks to -layers.
func (o *options) plan() error {
	factor := o.model.Layers / o.from
	c := o.controller
	switch o.kind {
	case "stack":
		c.Kind, c.Size = blueprints.Stack, factor
	case "interleave":
		c.Kind, c.Size = blueprints.Interleave, factor
	case "new-blocks":
		c.Kind, c.Size = blueprints.NewBlocks, o.model.Layers-o.from
		return nil
	default:
		return fmt.Errorf("-kind is %q, want stack, interleave or new-blocks", o.kind)
	}

	if factor*o.from != o.model.Layers {
		return fmt.Errorf(
			"-layers is %d, want a multiple of -from, %d: -kind new-blocks takes others",
			o.model.Layers, o.from)
	}

	return nil
}
