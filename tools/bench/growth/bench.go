package growth

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/optim"
)

// benchOptions are the options of Study.
type benchOptions struct {
	options
	grid    plan
	gpus    string
	limit   time.Duration
	only    *regexp.Regexp // pattern for the names of runs to make; nil for all
	prepare bool
	replay  bool
	report  bool
	pack    bool
}

// parseBench reads the arguments of Study.
func parseBench(args []string, stderr io.Writer) (o benchOptions, err error) {
	var budgets, equal, seeds, rates string
	f := flag.NewFlagSet("bench study", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprintf(stderr, `usage: bench study [options] [arm ...]

Compares growing models with static models on equal budgets and prints a table. An arm is one of the
compared configurations, such as blocks=12,lr=0.002 (a static model) or blocks=3-12,share=0.1 (a model that
grows from 3 blocks to 12 when a tenth of the budget is spent). Without arms, static models with all, half
and a quarter of the blocks are compared with models that grow from a quarter.

Keys of an arm:
  blocks=N or N-M    number of blocks, or the numbers before and after each growth
  share=NUMBER       share of the budget at which the model grows, or for several growths, shares such as 0.1-0.2
                     forecast: control.Forecast decides whether, when and how much to grow
                     patient:  the same with control.Forecast.Patient
                     curve:    control.Depth decides by the loss curve alone
                     without this key, control.Depth decides when to grow
  lr=NUMBER          peak learning rate; without it, the rate is tuned
  kind=stack|interleave|middle|new
  optimizer=%s
  decay=cosine|linear|late
  rewarm=STEPS
  moments=kept|fresh
  outputs=random|zero
  norms=none|qk
  boundary=NUMBER    llm.Config.Boundary

Each run writes a record to the folder -out. A run with a record is not repeated.


`, strings.Join(optim.ChoiceNames(), "|"))
		f.PrintDefaults()
	}

	f.StringVar(&budgets, "budgets", "5,10,20,40",
		"tokens per parameter, of the parameters in the blocks of the largest model")
	f.StringVar(&equal, "equal", "flops,time", "quantity that runs on a budget have in common: flops, time, or both")
	f.StringVar(&seeds, "seeds", "1,2,3", "random seeds of parameters and data order")
	f.StringVar(&rates, "lr", "0.001,0.002,0.004", "learning rates to try for arms without one")
	f.StringVar(&o.gpus, "gpus", "all",
		"GPUs to use by position, such as 0,1, or all; a GPU named twice makes two runs at a time")
	f.DurationVar(&o.limit, "limit", 0, "start no run that would end after this time; 0 means no limit")
	f.Func("only", "make only runs whose names match this regular `expression`, such as 'flops-5-.*muon'",
		func(text string) (err error) {
			o.only, err = regexp.Compile(text)
			return err
		})
	f.BoolVar(&o.prepare, "prepare", false, "only encode the text, and keep its tokens in -cache")
	f.BoolVar(&o.replay, "replay", false, "repeat the growing runs in -out by their recorded decisions, and check that they end "+
		"with the\nsame bits; with -only, only the matching runs. Arms and budgets are ignored")
	f.BoolVar(&o.report, "report", false, "only print the table of the records in -out")
	f.BoolVar(&o.pack, "pack", false, "pack the records in -out into one file without training losses, "+
		"and print the table")
	f.StringVar(&o.device, "device", "auto", "where to compute: cpu, cuda or auto")
	f.TextVar(&o.precision, "precision", cudaops.BFloat16, "precision on a GPU: bf16, f8, f16 or f32")
	f.StringVar(&o.data, "data", "", "file or folder to learn from (default: the Go source tree)")
	f.StringVar(&o.ext, "ext", "", "learn only from files with this extension, such as .py")
	f.StringVar(&o.out, "out", filepath.Join("runs", "bench"), "folder for the records, table and picture")
	f.StringVar(&o.cache, "cache", filepath.Join(os.TempDir(), "kasmina"),
		"folder for byte-pair encodings and tokens")
	f.IntVar(&o.vocab, "vocab", 8192, "entries of the byte-pair encoding, or 0 for bytes")
	f.Int64Var(&o.heldOut, "heldout", 1<<20, "bytes of held-out text for comparing the models")
	f.IntVar(&o.batch, "batch", 32, "sequences in a batch")
	f.IntVar(&o.model.Layers, "layers", 12, "blocks of the largest model, which defines the budgets")
	f.IntVar(&o.model.Dim, "dim", 256, "features of the residual stream")
	f.IntVar(&o.model.Heads, "heads", 4, "attention heads")
	f.IntVar(&o.model.FF, "ff", 0, "hidden features of the perceptrons (default: 8/3 of -dim)")
	f.IntVar(&o.model.Seq, "seq", 1024, "tokens in a sequence")
	if err := f.Parse(args); err != nil {
		return o, err
	}

	for _, list := range []struct {
		flag, text string
		to         *[]float64
	}{{"budgets", budgets, &o.grid.budgets}, {"lr", rates, &o.grid.rates}} {
		for part := range strings.SplitSeq(list.text, ",") {
			v, err := parseNumber(part)
			if err != nil || v <= 0 {
				return o, fmt.Errorf("-%s is %q, want numbers above 0, separated by commas", list.flag, list.text)
			}
			*list.to = append(*list.to, v)
		}
	}

	for part := range strings.SplitSeq(seeds, ",") {
		seed, err := strconv.ParseUint(part, 10, 64)
		if err != nil {
			return o, fmt.Errorf("-seeds is %q, want whole numbers, separated by commas", seeds)
		}
		o.grid.seeds = append(o.grid.seeds, seed)
	}

	o.grid.equal = strings.Split(equal, ",")
	return o, o.finishBench(f.Args())
}

// finishBench fills in the arms and the largest model, and returns an error for impossible values.
func (o *benchOptions) finishBench(arms []string) error {
	for _, e := range o.grid.equal {
		if e != "flops" && e != "time" {
			return fmt.Errorf("-equal is %q, want flops, time or flops,time", strings.Join(o.grid.equal, ","))
		}
	}

	switch {
	case !slices.Contains([]string{"auto", "cpu", "cuda"}, o.device):
		return fmt.Errorf("-device is %q, want auto, cpu or cuda", o.device)
	case o.batch < 1:
		return fmt.Errorf("-batch is %d, want at least 1", o.batch)
	case o.heldOut < 2:
		return fmt.Errorf("-heldout is %d, want at least 2", o.heldOut)
	case o.vocab != 0 && o.vocab < 257:
		return fmt.Errorf("-vocab is %d, want 0, or at least 257", o.vocab)
	case o.limit < 0:
		return fmt.Errorf("-limit is %v, want at least 0", o.limit)
	case len(arms) == 0 && o.model.Layers%4 != 0:
		return fmt.Errorf("-layers is %d, want a multiple of 4, or a list of arms", o.model.Layers)
	}

	if len(arms) == 0 {
		arms = defaultArms(o.model.Layers)
	}

	for _, text := range arms {
		a, err := parseArm(text)
		if err != nil {
			return err
		}
		o.grid.arms = append(o.grid.arms, a)
	}

	o.model.Vocab = 256
	if o.vocab > 0 {
		o.model.Vocab = (o.vocab + 63) / 64 * 64
	}

	o.model = o.model.Default()
	return o.model.Check()
}

// Study trains the given arms on every budget and prints a table. It saves a record of each run, and
// skips runs that already have one.
func Study(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	start := time.Now()
	o, err := parseBench(args, stderr)
	if err != nil {
		return err
	}

	if o.report || o.pack {
		s, err := loadStudy(o.out)
		if err == nil && o.pack {
			err = s.pack()
		}
		if err != nil {
			return err
		}
		return s.report(stdout)
	}

	text, err := openCorpus(ctx, o.options, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, text.Close()) }()

	if o.prepare {
		return nil
	}

	devices, closeDevices, err := openDevices(o.device, o.gpus, stderr)
	if err != nil {
		return err
	}
	defer closeDevices()

	s, err := openStudy(o.out, studySettings{Largest: o.model, Batch: o.batch,
		Precision: precisionName(devices[0], o.precision), Tokens: text.tokens.Fingerprint(),
		HeldOut: text.heldOut.Fingerprint()})
	if err != nil {
		return err
	}

	b := &bench{study: s, options: o.options, text: text, devices: devices, stderr: stderr,
		failed: map[string]error{}}
	if o.limit > 0 {
		b.deadline = start.Add(o.limit)
	}

	if o.replay {
		return b.replayAll(ctx, o.only, stdout)
	}

	if err := b.measureSpeed(ctx); err != nil {
		return err
	}

	// A job that fails is not tried again in this call. The other jobs still run.
	unwanted := func(j job) bool {
		return b.failed[j.name()] != nil || o.only != nil && !o.only.MatchString(j.name())
	}
	for {
		jobs := slices.DeleteFunc(o.grid.jobs(s.records), unwanted)
		if len(jobs) == 0 {
			break
		}
		skipped, err := b.run(ctx, jobs)
		if err != nil {
			return err
		}
		if skipped > 0 {
			fmt.Fprintf(stderr, "%d of %d runs are left for the next call: they would end after -limit\n",
				skipped, len(jobs))
			break
		}
	}

	return errors.Join(append(slices.Collect(maps.Values(b.failed)), s.report(stdout))...)
}

func precisionName(d *cudaops.Device, p cudaops.Precision) string {
	if d == nil {
		return "f32 on a CPU"
	}
	return p.String()
}

// openDevices opens the GPUs in a list. To compute on a CPU, it returns a single nil device.
func openDevices(device, list string, stderr io.Writer) (all []*cudaops.Device, closeAll func(), err error) {
	closeAll = func() {
		for _, d := range all {
			if d != nil {
				d.Close()
			}
		}
	}

	n := 0
	if device != "cpu" {
		if n, err = cudaops.Count(); err != nil && (device == "cuda" || !errors.Is(err, cudaops.ErrNoDevice)) {
			return nil, closeAll, err
		}
	}

	if n == 0 {
		return []*cudaops.Device{nil}, closeAll, nil
	}

	var at []int
	if list == "all" {
		for i := range n {
			at = append(at, i)
		}
	} else if at, err = parseList(strings.ReplaceAll(list, ",", "-"), strconv.Atoi); err != nil {
		return nil, closeAll, fmt.Errorf("-gpus is %q, want positions separated by commas, or all", list)
	}

	for _, i := range at {
		d, err := cudaops.Open(cudaops.WithOrdinal(i))
		if err != nil {
			return nil, closeAll, err
		}
		fmt.Fprintf(stderr, "device    %d: %v\n", i, d)
		all = append(all, d)
	}

	return all, closeAll, nil
}

// A bench makes the runs of a study, one at a time on each device.
type bench struct {
	*study
	options
	text     *corpus
	devices  []*cudaops.Device // nil for the CPU
	deadline time.Time         // zero for none
	stderr   io.Writer

	mu     sync.Mutex       // guards the study, stderr and the fields below
	failed map[string]error // runs that ended with an error, by the names of their jobs
}

// run makes the runs of the given jobs, in order, and returns the number of jobs skipped because they
// would end after the deadline. It fails if a record cannot be written or ctx is done.
func (b *bench) run(ctx context.Context, jobs []job) (skipped int, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	queue := make(chan job)
	var workers sync.WaitGroup
	for _, d := range b.devices {
		workers.Go(func() {
			for j := range queue {
				if err := b.runOne(ctx, j, d, &skipped); err != nil {
					cancel(fmt.Errorf("%s: %w", j.name(), err))
				}
			}
		})
	}

deal:
	for _, j := range jobs {
		select {
		case queue <- j:
		case <-ctx.Done():
			break deal
		}
	}

	close(queue)
	workers.Wait()
	return skipped, context.Cause(ctx)
}

// runOne runs a job and adds its record to the study.
func (b *bench) runOne(ctx context.Context, j job, d *cudaops.Device, skipped *int) error {
	// Allow a tenth more for evaluations, and two seconds for starting the run. Runs that share a GPU
	// slow each other down.
	sharing := 0
	for _, other := range b.devices {
		if byOrdinal(other, d) == 0 {
			sharing++
		}
	}
	expected := time.Duration(1.1*float64(sharing)*b.flops(j)/b.Speed*float64(time.Second)) + 2*time.Second

	if !b.deadline.IsZero() && time.Now().Add(expected).After(b.deadline) {
		b.mu.Lock()
		defer b.mu.Unlock()
		*skipped++
		return nil
	}

	r, err := b.train(ctx, j, d, nil)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		b.failed[j.name()] = fmt.Errorf("%s: %w", j.name(), err)
		fmt.Fprintf(b.stderr, "%v\n", b.failed[j.name()])
		return nil
	}
	if err != nil {
		return err
	}

	result := fmt.Sprintf("%.4f nats/byte, %d steps in %.1f s", r.Loss, r.Steps, r.Seconds)
	if r.Failed != "" {
		result = r.Failed
	}

	fmt.Fprintf(b.stderr, "%-70s %s\n", j.name(), result)
	return b.add(r)
}

// flops returns the budget of a job in FLOPs.
func (b *bench) flops(j job) float64 {
	blocks := 0
	for name, shape := range b.Largest.Parameters() {
		if strings.HasPrefix(name, "model.layers.") {
			size := 1
			for _, n := range shape {
				size *= n
			}
			blocks += size
		}
	}

	return j.Budget * float64(blocks) * b.Largest.FLOPs()
}
