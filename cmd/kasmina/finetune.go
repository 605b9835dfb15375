package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/failpoint"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// The values of --method.
const (
	methodLoRA   = "lora"
	methodRSLoRA = "rslora"
	methodDoRA   = "dora"
	methodFull   = "full"  // all weights
	methodLast   = "last"  // all weights of the last blocks
	methodSeeds  = "seeds" // new chunk seeds after all blocks
)

// seedKind is the kind of the seeds of --method seeds.
const seedKind = blueprints.LowRank

// fullRate is the default learning rate if the weights themselves learn. Adapters learn best at about ten times
// this rate, whatever their rank.
const fullRate = 2e-5

// preferenceRate is the default learning rate if the weights themselves learn from preference pairs.
const preferenceRate = 1e-6

// warmupShare is the share of a run during which the learning rate rises.
const warmupShare = 0.03

type finetuneOptions struct {
	trainOptions

	method  string
	rank    int
	alpha   float64
	dropout float64
	targets string
	blocks  int
	merge   bool

	baseType string // of the weights that do not learn

	preference op.Preference // the loss of preference pairs

	retentionOptions

	epochs    int
	short     bool // with so few examples, --epochs takes fewer than fewSteps steps
	heldShare float64
	prompts   []string

	now time.Time // for chat templates that write the date; the same for the whole run
}

func init() {
	flagRules["finetune"] = map[string]rule{"model": always, "data": always, "out": always, "method": always, "rank": ranksOnly,
		"alpha": adaptersOnly, "dropout": adaptersOnly, "targets": adaptersOnly, "merge": adaptersOnly, "base": always,
		"blocks": lastBlocksOnly, "steps": always, "epochs": notWith("steps", "0", "which sets the length of the run"),
		"batch": always, "accumulate": always, "seq": always, "lr": always, "held-out": always, "prompt": always,
		"beta": checkedLater, "preference-loss": checkedLater, "label-smoothing": checkedLater,
		"keep": checkedLater, "forget": onlyWith("keep", "", "add --keep and a text"), "grow-rank": needsLoRA,
		"recompute": always, "recompute-mlps": notRecompute, "save-every": always, "eval-every": always, "seed": always, "resume": always,
		"board": always, "quiet": always, "gpus": checkedLater, "device": always, "precision": always, "memory": checkedLater}
}

func newFinetune() *cobra.Command {
	o := &finetuneOptions{}
	o.deadline = parallel.Deadline
	o.onGPU = o.defaultPrecision
	c := &cobra.Command{
		Use:   "finetune --model DIR --data FILE --out NEW",
		Short: "Teach a model your own chats or texts",
		Long: `Fine-tune a model on chats, prompts with completions, texts, or preference pairs. The data is a file of
JSON Lines or a parquet file, as described in "kasmina data check --help". If some examples cannot be
used, the command lists them and stops before it trains.

  method   what learns
  lora     low-rank adapters of the linear layers, next to the frozen model
  rslora   the same with the scale alpha/√rank, for high ranks
  dora     the same with a learned magnitude for each output; often better, but slower
  full     all weights
  last     the weights of the last --blocks blocks
  seeds    a low-rank seed in the residual stream after each block, next to the frozen model

From a chat, the model learns the assistant's words and the token that ends each of the assistant's turns.
From a prompt with a completion, it learns only the completion. Everything else is context. Short examples
share a sequence, and attention does not cross the boundaries between them.

From preference pairs, the model learns to prefer the chosen answer to the rejected one (DPO). For that,
the probabilities of the answers before training are computed once, before the first step.

The folder --out receives the adapters in the format of PEFT, or the seeds, with the tokenizer and the
chat template. With --merge, or with --method full or last, it receives the whole model in the format of
transformers. Its subfolder run contains the last checkpoint and the log. If a run was interrupted or
killed, the same command continues it, and the result is bit-identical to that of an uninterrupted run.

The last line of output is a JSON object with steps, tokens_per_s, train_loss, val_loss, trained_params,
peak_gib and out. For preference pairs, it also has reward_margin and reward_accuracy, and with --keep, it
has keep_loss, keep_rise and rollbacks.`,
		Example: `  kasmina finetune -m Llama-3.2-1B-Instruct -d chat.jsonl -o tuned
  kasmina finetune -m Llama-3.2-1B-Instruct -d chat.jsonl -o merged --merge --epochs 1
  kasmina finetune -m Llama-3.2-1B-Instruct -d chat.jsonl -o last --method last --blocks 4
  kasmina finetune -m Llama-3.2-1B-Instruct -d chat.jsonl -o gentle --grow-rank --keep wiki.txt --forget 0.02
  kasmina finetune -m Llama-3.2-1B-Instruct -d preferences.jsonl -o preferred --beta 0.1`,
		Args:              noArguments,
		ValidArgsFunction: cobra.NoFileCompletions,
		PreRunE:           func(c *cobra.Command, args []string) error { return recall(c) },
		RunE:              func(c *cobra.Command, args []string) error { return o.run(c) },
	}

	o.modelFlag(c)
	f := c.Flags()
	f.StringVarP(&o.data, "data", "d", "", "`file` of JSON Lines, or parquet file")
	f.StringVarP(&o.out, "out", "o", "", "new `directory` for the result and the run")
	f.StringVar(&o.method, "method", methodLoRA, "what learns: lora, rslora, dora, seeds, full or last")
	f.IntVar(&o.rank, "rank", 16, "rank of the adapters or seeds")
	f.Float64Var(&o.alpha, "alpha", 32, "scale of the adapters: their output is multiplied by alpha/rank")
	f.Float64Var(&o.dropout, "dropout", 0, "dropout probability for the inputs of the adapters")
	f.StringVar(&o.targets, "targets", llm.AllLinear, "layers with adapters, separated by commas, such as "+
		"q_proj,v_proj or layers.[0-3].*; embed_tokens and lm_head must be named")
	f.IntVar(&o.blocks, "blocks", 0, "number of blocks that learn with --method last")
	o.retentionOptions.flags(c)
	f.BoolVar(&o.merge, "merge", false, "merge the adapters into the model, and save the merged model")
	o.baseFlag(c)
	f.IntVarP(&o.train.Steps, "steps", "n", 0, "number of optimizer steps (default: as many as --epochs take)")
	f.IntVar(&o.epochs, "epochs", 0, "number of passes over the data (default: 3, or 1 for preference pairs)")
	f.IntVarP(&o.train.Batch, "batch", "b", 2, "sequences per batch")
	f.IntVar(&o.train.Accumulate, "accumulate", 4, "batches per step")
	f.IntVar(&o.seq, "seq", 0, "tokens per sequence (default: as many as the longest example has, but at least 256 if "+
		"the model allows that)")
	f.Float64Var(&o.lr, "lr", 0, "peak learning rate (default: 2e-4 for adapters, 2e-5 for weights; for preference "+
		"pairs 1e-5 and 1e-6)")
	f.StringVar((*string)(&o.preference.Kind), "preference-loss", string(op.PreferenceSigmoid),
		"loss of preference pairs: sigmoid (DPO), hinge, ipo or robust")
	f.Float64Var(&o.preference.Beta, "beta", 0.1, "how strongly the loss of preference pairs keeps the model close to the "+
		"one before training")
	f.Float64Var(&o.preference.Smoothing, "label-smoothing", 0, "share of the preference pairs that are assumed to "+
		"have their answers in the wrong order")
	f.Float64Var(&o.heldShare, "held-out", 0.05, "share of the examples that is held out for evaluation")
	f.StringArrayVarP(&o.prompts, "prompt", "p", nil, "prompt `text` to answer after each evaluation; may be repeated "+
		"(default: the prompt of a held-out example)")
	f.BoolVar(&o.train.Recompute, "recompute", false,
		"save memory by recomputing the blocks in the backward pass")
	f.IntVar(&o.train.RecomputeMLPs, "recompute-mlps", 0, "save some memory by recomputing only the MLPs, in this "+
		"many blocks")
	f.IntVar(&o.saveEvery, "save-every", 100, "steps between checkpoints; 0 saves only after the last step")
	f.IntVar(&o.evalEvery, "eval-every", 50, "steps between evaluations; 0 evaluates only after the last step")
	f.Uint64VarP(&o.seed, "seed", "s", 1, "random seed for the data order and the adapters")
	f.BoolVar(&o.resume, "resume", false, "continue the run in --out, with its own options except for those given")
	f.StringVar(&o.board, "board", "", "show the run in a browser at this `address`, such as 127.0.0.1:6060")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "show no progress")
	f.IntVar(&o.gpus, "gpus", 0, "number of GPUs of this computer to train on, or of processes with --device "+
		"cpu; they divide the batches of a step (--accumulate) among them")
	o.engine.memoryFlag(c)
	o.deviceFlags(c, "type of matrix products: f32 or bf16, and on a GPU also f16 or f8 (default: bf16 on a GPU, and f32 on a CPU)",
		"f32", "bf16", "f16", "f8")
	completeFlag(c, "preference-loss", "sigmoid", "hinge", "ipo", "robust")
	completeFlag(c, "method", methodLoRA, methodRSLoRA, methodDoRA, methodSeeds, methodFull, methodLast)
	markRequired(c, "model", "data", "out")
	return c
}

// adapts reports whether low-rank adapters learn instead of the weights.
func (o *finetuneOptions) adapts() bool {
	return o.method == methodLoRA || o.method == methodRSLoRA || o.method == methodDoRA
}

// adds reports whether the run adds parameters that learn, adapters or seeds, to a frozen model.
func (o *finetuneOptions) adds() bool { return o.adapts() || o.method == methodSeeds }

// checkValues returns an error for values that make no sense, before anything is read.
func (o *finetuneOptions) checkValues() error {
	for _, count := range []struct {
		name         string
		value, least int
		most         int
	}{{"steps", o.train.Steps, 0, math.MaxInt}, {"epochs", o.epochs, 0, mostSequences},
		{"batch", o.train.Batch, 1, mostSequences}, {"accumulate", o.train.Accumulate, 1, mostSequences},
		{"seq", o.seq, 0, math.MaxInt32}, {"rank", o.rank, 1, 1 << 16}, {"blocks", o.blocks, 0, 1 << 16},
		{"recompute-mlps", o.train.RecomputeMLPs, 0, 1 << 16},
		{"save-every", o.saveEvery, 0, math.MaxInt}, {"eval-every", o.evalEvery, 0, math.MaxInt},
		{"gpus", o.gpus, 0, mostSequences}} {
		if count.value < count.least || count.value > count.most {
			return fmt.Errorf("--%s is %d, want %d to %d", count.name, count.value, count.least, count.most)
		}
	}

	switch {
	case !o.adds() && o.method != methodFull && o.method != methodLast:
		return fmt.Errorf("--method is %.40q, want lora, rslora, dora, seeds, full or last", o.method)
	case o.method == methodLast && o.blocks == 0:
		return errors.New("--method last needs the number of --blocks that learn")
	case !(o.alpha > 0) || math.IsInf(o.alpha, 0):
		return fmt.Errorf("--alpha is %v, want a finite number above 0", o.alpha)
	case !(o.dropout >= 0 && o.dropout < 1):
		return fmt.Errorf("--dropout is %v, want at least 0 and less than 1", o.dropout)
	case !(o.heldShare >= 0 && o.heldShare < 1):
		return fmt.Errorf("--held-out is %v, want at least 0 and less than 1", o.heldShare)
	case !(o.lr >= 0) || math.IsInf(o.lr, 0):
		return fmt.Errorf("--lr is %v, want a finite number above 0", o.lr)
	}

	if _, err := o.weights(); err != nil {
		return err
	}

	if err := o.engine.checkValues(); err != nil {
		return err
	}

	if err := o.preference.Check(); err != nil {
		return fmt.Errorf("--preference-loss, --beta and --label-smoothing: %w", err)
	}

	return o.checkRetention()
}

func (o *finetuneOptions) run(c *cobra.Command) (err error) {
	if err := o.checkValues(); err != nil {
		return err
	}

	f, err := openFolder(o.model)
	if err != nil {
		return err
	}
	defer f.Close()

	d, err := o.read(c, f)
	if err != nil {
		return err
	}

	o.choose(d)
	m, err := o.meet(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close(err)) }()

	if err := o.engine.check(c, m); err != nil {
		return err
	}

	o.settleDevice(m)
	stage, release, err := o.openFolder(c, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()

	if stage != finished {
		err = o.remedy(o.tune(c, m, stage, f, d))
	}
	if err != nil || !m.team.First() {
		return err
	}

	text, err := os.ReadFile(o.in(resultName))
	if err != nil {
		return err
	}
	_, err = c.OutOrStdout().Write(text)
	return err
}

// defaultPrecision returns the precision on a GPU without --precision. A run in the folder that was started on a GPU keeps
// its precision. New runs use bfloat16, the type of most published models and the default of most programs for fine-tuning.
func (o *finetuneOptions) defaultPrecision() cudaops.Precision {
	run, err := o.dir().readManifest()
	if err != nil || run == nil || run.Options["device"] == "cpu" { // openFolder reports errors and other devices
		return cudaops.BFloat16
	}

	p := cudaops.Float32 // the default of older versions, which some of them did not record
	if recorded := run.Options["precision"]; recorded != "" && p.UnmarshalText([]byte(recorded)) != nil {
		return cudaops.BFloat16 // openFolder reports that the options differ
	}
	return p
}

// tuningData is the data of a run.
type tuningData struct {
	encoder  *chatdata.Encoder
	learn    []chatdata.Sequence
	held     []chatdata.Sequence
	examples int
	prompts  []string // rendered

	prefers               bool            // the examples are preference pairs
	learnPairs, heldPairs *chatdata.Pairs // nil for other examples, or without any
}

// lengths returns the numbers of tokens of the items that share rows: sequences or pairs.
func (d *tuningData) lengths(all []chatdata.Sequence) []int {
	if d.prefers {
		return chatdata.PairLengths(all)
	}

	lengths := make([]int, len(all))
	for i, s := range all {
		lengths[i] = len(s.IDs) - 1
	}
	return lengths
}

// read reads and checks the data, and divides it into examples to learn and held-out ones.
func (o *finetuneOptions) read(c *cobra.Command, f *hf.Folder) (*tuningData, error) {
	// A template may write the date, so a resumed run must use the date of its start.
	today := time.Now().Format(time.DateOnly)
	if notes, err := llm.ReadNotes(o.in(checkpointName)); err == nil && notes[dateNote] != "" {
		today = notes[dateNote]
	}

	var err error
	if o.now, err = time.ParseInLocation(time.DateOnly, today, time.Local); err != nil {
		return nil, fmt.Errorf("the checkpoint in %s has the date %.40q: %w", o.in(""), today, err)
	}

	check := dataCheck{common: common{model: o.model, seq: o.seq}}
	e, err := check.encoder()
	if err != nil {
		return nil, err
	}
	e.Now = o.now

	report, err := o.report(c.Context(), e)
	if err != nil {
		return nil, err
	}

	d := &tuningData{encoder: e, prefers: report.Examples[chatdata.Preference] > 0}
	if !d.prefers {
		if unused := given(c, "beta", "preference-loss", "label-smoothing"); len(unused) > 0 {
			return nil, fmt.Errorf("%s no effect, because %s has no preference pairs: leave it out", have(unused),
				o.data)
		}
	}

	if err := o.checkRetentionData(c, d.prefers); err != nil {
		return nil, err
	}

	held, err := o.divide(d, report)
	if err != nil {
		return nil, err
	}

	longest := slices.Max(d.lengths(report.Sequences))
	switch {
	case o.seq == 0:
		o.seq = max(longest, min(256, f.Config.Seq))
	case f.Config.Positions > 0 && o.seq > f.Config.Positions:
		return nil, fmt.Errorf("--seq is %d, and the model has %d positions: want at most that", o.seq, f.Config.Positions)
	case d.prefers && longest > o.seq:
		return nil, fmt.Errorf("--seq is %d, and the longest pair of %s needs %d for both of its answers: give --seq %d, or leave it out",
			o.seq, o.data, longest, longest)
	}

	return d, o.renderPrompts(d, held)
}

// report checks the data, and returns an error if there are problems.
func (o *finetuneOptions) report(ctx context.Context, e *chatdata.Encoder) (*chatdata.Report, error) {
	report, err := e.Check(chatdata.ReadFile(o.data, nil), o.data, func(int) error { return ctx.Err() })
	if err != nil {
		return nil, fmt.Errorf("--data: %w", err)
	}

	if n := len(report.Problems); n > 0 {
		check := fmt.Sprintf("kasmina data check %s --model %s", o.data, o.model)
		if o.seq > 0 {
			check += fmt.Sprint(" --seq ", o.seq)
		}
		return nil, fmt.Errorf("%s has %s, and nothing was trained:%s\n%q shows all of them", o.data,
			plural(n, "problem"), summaryOf(report.Problems), check)
	}

	return report, nil
}

// summaryOf lists problems, one per line. A problem that several examples have is listed once.
func summaryOf(problems []*chatdata.Problem) string {
	const listed = 10
	repeated := map[string]int{}
	var first []*chatdata.Problem
	for _, p := range problems {
		if repeated[p.What]++; repeated[p.What] == 1 {
			first = append(first, p)
		}
	}

	var text strings.Builder
	for _, p := range first[:min(len(first), listed)] {
		fmt.Fprintf(&text, "\n  %v", p)
		if more := repeated[p.What] - 1; more > 0 {
			fmt.Fprintf(&text, " (the same in %s)", plural(more, "more example"))
		}
	}
	if more := len(first) - listed; more > 0 {
		fmt.Fprintf(&text, "\n  and %s of other kinds", plural(more, "problem"))
	}

	return text.String()
}

// divide holds out a share of the examples, chosen at random. It returns their lines or rows.
func (o *finetuneOptions) divide(d *tuningData, r *chatdata.Report) (held map[int]bool, err error) {
	var lines []int
	for _, s := range r.Sequences {
		if len(lines) == 0 || lines[len(lines)-1] != s.Line {
			lines = append(lines, s.Line)
		}
	}

	n := int(math.Round(o.heldShare * float64(len(lines))))
	if o.heldShare > 0 {
		n = max(n, 1)
	}
	n = min(n, len(lines)-1) // something must be left to learn

	held = map[int]bool{}
	for _, i := range rand.New(rand.NewPCG(o.seed, 1)).Perm(len(lines))[:max(0, n)] {
		held[lines[i]] = true
	}

	for _, s := range r.Sequences {
		if held[s.Line] {
			d.held = append(d.held, s)
		} else {
			d.learn = append(d.learn, s)
		}
	}

	d.examples = len(lines)
	return held, nil
}

// renderPrompts renders the prompts of samples: the prompts given as options, or the prompt of a held-out
// example.
func (o *finetuneOptions) renderPrompts(d *tuningData, held map[int]bool) error {
	for _, text := range o.prompts {
		x := chatdata.Example{Format: chatdata.PromptCompletion, Prompt: chatdata.Content{Text: text}}
		if d.encoder.Template != nil {
			message, err := json.Marshal(map[string]string{"role": "user", "content": text})
			if err != nil {
				return err
			}
			x = chatdata.Example{Format: chatdata.Conversation, Completion: chatdata.Content{Messages: []chatdata.Message{
				{Role: "user", Text: text, JSON: message}}}}
		}
		rendered, err := d.encoder.Prompt(x)
		if err != nil {
			return fmt.Errorf("--prompt: %w", err)
		}
		d.prompts = append(d.prompts, rendered)
	}

	if len(d.prompts) > 0 || len(held) == 0 {
		return nil
	}

	for x, err := range chatdata.ReadFile(o.data, nil) {
		if err != nil {
			return fmt.Errorf("--data: %w", err)
		}
		if !held[x.Line] {
			continue
		}
		if rendered, err := d.encoder.Prompt(x); err == nil && rendered != "" {
			d.prompts = append(d.prompts, rendered)
		}
		break
	}

	return nil
}

// choose sets the options that follow from the data.
func (o *finetuneOptions) choose(d *tuningData) {
	if o.lr == 0 {
		if o.lr = fullRate; d.prefers {
			o.lr = preferenceRate
		}
		if o.adds() {
			o.lr *= 10
		}
	}

	if o.epochs == 0 {
		if o.epochs = 3; d.prefers {
			o.epochs = 1
		}
	}

	if o.train.Steps == 0 {
		rows, perStep := len(chatdata.Pack(d.lengths(d.learn), o.seq)), o.train.Batch*o.train.Accumulate
		o.train.Steps = max(1, (o.epochs*rows+perStep-1)/perStep)
		o.short = o.train.Steps < fewSteps
	}
}

// fewSteps is the number of steps below which a run hardly changes a model.
const fewSteps = 20

// dateNote is the name of the note in a checkpoint that has the date for chat templates.
const dateNote = "date"

// resultName is the file with the last line of output, in the folder run.
const resultName = "result.json"

// tuned is the last line of output.
type tuned struct {
	Steps         int      `json:"steps"`
	TokensPerS    float64  `json:"tokens_per_s"`
	TrainLoss     float64  `json:"train_loss"` // of the last step
	ValLoss       *float64 `json:"val_loss"`   // null if nothing is held out
	TrainedParams int      `json:"trained_params"`
	PeakGiB       float64  `json:"peak_gib"`
	Out           string   `json:"out"`

	// The figures of preference pairs: of the held-out ones, or else of the last step.
	RewardMargin   *float64 `json:"reward_margin,omitempty"`
	RewardAccuracy *float64 `json:"reward_accuracy,omitempty"`

	// The loss on the text of --keep, its rise, and the number of times that the run was rolled back.
	KeepLoss  *float64 `json:"keep_loss,omitempty"`
	KeepRise  *float64 `json:"keep_rise,omitempty"`
	Rollbacks *int     `json:"rollbacks,omitempty"`
}

// tune trains from the given stage and saves the result.
func (o *finetuneOptions) tune(c *cobra.Command, on machines, s stage, f *hf.Folder, d *tuningData) error {
	lora, err := o.lora(f.Config)
	if err != nil {
		return err
	}

	config := f.Config
	config.Seq, config.Documents, config.Adapter = o.seq, true, lora
	if o.method == methodSeeds {
		if config, err = llm.SeedConfig(config, seedKind, o.rank); err != nil {
			return fmt.Errorf("--rank: %w", err)
		}
	}
	if err := o.checkSaving(config, f); err != nil {
		return err
	}

	loader, err := o.loader(d)
	if err != nil {
		return fmt.Errorf("--data: %w", err)
	}

	m, err := o.loadBase(c, f)
	if err != nil {
		return err
	}

	old, err := o.oldText(c, on, s, m, d)
	switch {
	case err != nil:
	case o.adapts():
		m, err = llm.Adapt(m, lora, o.seed)
	case o.method == methodSeeds:
		m, err = llm.TuneSeeds(m, seedKind, o.rank)
	}
	if err != nil {
		return err
	}

	t, err := o.newTrainer(m, loader, on, d)
	if err != nil {
		return err
	}
	if err := o.useRetention(t, old); err != nil {
		return errors.Join(err, t.Close())
	}

	if on.team.First() && !o.quiet {
		o.print(c.ErrOrStderr(), t, loader, d, old)
	}

	result, err := o.makeSteps(c, t, on, s, loader, d)
	if err = errors.Join(err, t.Close()); err != nil || !on.team.First() {
		return err
	}
	defer on.team.Busy("writing the result")()

	return o.publish(c, m, f, d, result)
}

// loader returns the loader of the examples to learn. It divides preference pairs into rows, together with
// the held-out ones.
func (o *finetuneOptions) loader(d *tuningData) (*chatdata.Loader, error) {
	if !d.prefers {
		return chatdata.NewLoader(d.learn, data.LoaderConfig{Batch: o.train.Batch, Seq: o.seq, Seed: o.seed})
	}

	var err error
	if d.learnPairs, err = chatdata.NewPairs(d.learn, o.train.Batch, o.seq); err != nil {
		return nil, err
	}
	if len(d.held) > 0 {
		if d.heldPairs, err = chatdata.NewPairs(d.held, o.train.Batch, o.seq); err != nil {
			return nil, err
		}
	}
	return d.learnPairs.Loader(o.seed), nil
}

// lora describes the adapters.
func (o *finetuneOptions) lora(c llm.Config) (a llm.LoRA, err error) {
	if !o.adapts() {
		return a, nil
	}

	targets, err := c.MatchLayers(strings.Split(o.targets, ",")...)
	if err != nil {
		return a, fmt.Errorf("--targets: %w", err)
	}

	return llm.LoRA{Rank: o.rank, Alpha: o.alpha, Dropout: o.dropout, Targets: targets,
		RankStabilized: o.method == methodRSLoRA, Magnitude: o.method == methodDoRA, Growing: o.growRank}, nil
}

// savesAdapter reports whether the result is adapters, and not a whole model.
func (o *finetuneOptions) savesAdapter() bool { return o.adds() && !o.merge }

// checkSaving returns an error if the result could not be saved.
func (o *finetuneOptions) checkSaving(c llm.Config, f *hf.Folder) (err error) {
	if o.savesAdapter() {
		err = hf.CheckSaveAdapter(c, o.base(), hf.Like(f))
	} else {
		err = hf.CheckSave(c.Plain(), hf.Like(f))
	}
	if err != nil && o.adapts() && !o.merge && hf.CheckSave(c.Plain(), hf.Like(f)) == nil {
		return fmt.Errorf("the adapters could not be saved: %w (add --merge)", err)
	}
	if err != nil {
		return fmt.Errorf("the result could not be saved: %w", err)
	}
	return nil
}

// base returns the model's folder as adapters name it.
func (o *finetuneOptions) base() string {
	if path, err := filepath.Abs(o.model); err == nil {
		return path
	}
	return o.model
}

// newTrainer returns the trainer of the run.
func (o *finetuneOptions) newTrainer(m *llm.Model, l llm.Loader, on machines, d *tuningData) (*llm.Trainer,
	error) {
	options := []optim.AdamWOption{optim.WithLR(o.lr), optim.WithWeightDecay(0)}
	if o.fixesDirections() {
		options = append(options, optim.WithGroup(optim.NameContains("lora_A"), optim.LRScale(0)))
	}
	optimizer, err := optim.NewAdamW(options...)
	if err != nil {
		return nil, fmt.Errorf("--lr: %w", err)
	}

	switch o.method {
	case methodSeeds:
		o.train.Tuned = llm.SeedPatterns()
	case methodLast:
		if o.train.Tuned, err = m.Config.LastBlocks(o.blocks); err != nil {
			return nil, fmt.Errorf("--blocks: %w", err)
		}
	}

	warmup := o.warmupSteps()
	rise, err := optim.Warmup(o.lr, warmup)
	if err != nil {
		return nil, err
	}

	total := o.train.Steps
	o.train.Schedule = func(step int) float64 {
		if step < warmup {
			return rise(step)
		}
		return o.lr * max(0, float64(total-step)/float64(total-warmup))
	}

	o.train.Clip = 1
	o.train.Notes = map[string]string{dateNote: o.now.Format(time.DateOnly)}
	o.train.Engine = o.engine.engine(on)
	o.train.OmitBase = true
	if !d.prefers {
		return llm.NewTrainer(m, l, optimizer, o.train)
	}

	o.train.Preference = &o.preference
	t, err := llm.NewTrainer(m, l, optimizer, o.train)
	if err != nil {
		return nil, err
	}
	sets := []llm.ReferencedPairs{d.learnPairs}
	if d.heldPairs != nil {
		sets = append(sets, d.heldPairs)
	}
	if err := t.Use(llm.NewReferences(sets...)); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// warmupSteps returns the number of steps during which the learning rate rises.
func (o *finetuneOptions) warmupSteps() int {
	return min(o.train.Steps-1, int(math.Round(warmupShare*float64(o.train.Steps))))
}

// print prints the data and all settings.
func (o *finetuneOptions) print(w io.Writer, t *llm.Trainer, l *chatdata.Loader, d *tuningData,
	old *data.Evaluation) {
	tokens, learned := 0, 0
	for _, s := range d.learn {
		tokens, learned = tokens+len(s.IDs), learned+s.Learned()
	}

	fmt.Fprintf(w, "data      %s, %s held out; %d of %d tokens are learned, in %s of %d\n",
		plural(d.examples, "example"), plural(countLines(d.held), "example"), learned, tokens,
		plural(l.Rows(), "sequence"), o.seq)

	what := "all weights"
	switch {
	case o.adapts():
		what = fmt.Sprintf("%s of rank %d, alpha %v and dropout %v on %s", o.method, o.rank, o.alpha, o.dropout,
			plural(len(t.Model.Config.Adapter.Targets), "linear layer"))
	case o.method == methodSeeds:
		what = fmt.Sprintf("seeds of rank %d after %s", o.rank, plural(t.Model.Config.Layers, "block"))
	case o.method == methodLast:
		what = fmt.Sprintf("the last %s and the norm after them", plural(o.blocks, "block"))
	}
	if base := t.Model.Base; base != nil {
		what += fmt.Sprintf(", next to %v weights in %s", t.Model.BaseType(), sizeText(int64(base.Bytes())))
	}
	fmt.Fprintf(w, "tuning    %s: %d of %d parameters\n", what, t.Last().Params, t.Last().AllParams)
	if o.growRank {
		fmt.Fprintf(w, "growth    ranks grow and are pruned 3 times, to at most that many parameters\n")
	}
	if old != nil {
		fmt.Fprintf(w, "keep      the loss on %d tokens of %s may rise by %v nats per token\n", old.Tokens(), o.keep, o.forget)
	}
	if d.prefers {
		fmt.Fprintf(w, "pairs     loss %s with beta %v and label smoothing %v; the log-probabilities before training "+
			"are computed once, before the first step\n", o.preference.Kind, o.preference.Beta, o.preference.Smoothing)
	}
	fmt.Fprintf(w, "settings  adamw without weight decay, learning rate %.3g (%s of warmup, then linear to 0), "+
		"gradients clipped to a norm of %v, %s of %s, seed %d\n", o.lr, plural(o.warmupSteps(), "step"), o.train.Clip,
		plural(o.train.Steps, "step"), plural(o.train.Batch*o.train.Accumulate, "sequence"), o.seed)
	if o.short {
		fmt.Fprintf(w, "note      %s may be too few to learn the examples: for more, raise --epochs, or lower --batch and "+
			"--accumulate\n", plural(o.train.Steps, "step"))
	}
	where := "CPU"
	if o.device == "cuda" {
		where = "GPU"
	}
	fmt.Fprintf(w, "precision matrix products in %s, on a %s\n", o.precision, where)
	o.printPlan(w, t)
}

// countLines returns the number of examples of sequences.
func countLines(all []chatdata.Sequence) int {
	lines := map[int]bool{}
	for _, s := range all {
		lines[s.Line] = true
	}
	return len(lines)
}

// makeSteps makes the steps that are left.
func (o *finetuneOptions) makeSteps(c *cobra.Command, t *llm.Trainer, on machines, s stage, l *chatdata.Loader,
	d *tuningData) (result tuned, err error) {
	if s == saved {
		if err := o.resumeFrom(c, t, o.in(checkpointName)); err != nil {
			return result, err
		}
	}

	if err := on.atFirst(func() error {
		run, err := o.dir().nextManifest(c)
		if err != nil {
			return err
		}
		return o.dir().writeManifest(run)
	}); err != nil {
		return result, err
	}

	if on.team.First() {
		stop, err := o.watchTuning(c, t, on, d)
		if err != nil {
			return result, err
		}
		defer stop()
	}

	t.On(func(e llm.Event) error {
		failpoint.Reach("event", e.Kind.String())
		return nil
	}, llm.Checkpoint(t, o.in(checkpointName), o.saveEvery, llm.OptimizerApart()))

	began := time.Now()
	err = t.Run(c.Context())
	if errors.Is(err, context.Canceled) || errors.Is(err, llm.ErrStopped) {
		return result, fmt.Errorf("stopped after step %d: %w; give the same command again to continue", t.Step(), err)
	}

	last := t.Last()
	result = tuned{Steps: last.Step, TrainLoss: last.Loss, TrainedParams: last.Params, PeakGiB: o.peak(on), Out: o.out}
	if seconds := time.Since(began).Seconds(); seconds > 0 {
		// Padding does not count.
		result.TokensPerS = float64(last.RunTokens) * fullness(l, d.learn) / seconds
	}
	result.addRetention(last.Retention)
	if v := last.ValLoss; !math.IsNaN(v) {
		result.ValLoss = &v
	}
	if d.prefers {
		pairs := last.Preferences
		if last.ValPreferences.Pairs > 0 {
			pairs = last.ValPreferences
		}
		margin, accuracy := pairs.Margin(), pairs.Accuracy()
		result.RewardMargin, result.RewardAccuracy = &margin, &accuracy
	}

	return result, err
}

// fullness returns the share of tokens in the loader's rows that are not padding.
func fullness(l *chatdata.Loader, all []chatdata.Sequence) float64 {
	tokens := 0
	for _, s := range all {
		tokens += len(s.IDs) - 1
	}
	return float64(tokens) / float64(l.Rows()*l.Config().Seq)
}

// watchTuning adds the callbacks that show progress, write the log, evaluate and draw samples.
func (o *finetuneOptions) watchTuning(c *cobra.Command, t *llm.Trainer, on machines,
	d *tuningData) (stop func() error, err error) {
	shown := c.ErrOrStderr()
	if o.quiet {
		shown = io.Discard
	}

	stop = func() error { return nil }
	if o.board != "" {
		if stop, err = o.serve(c.ErrOrStderr(), t); err != nil {
			return nil, err
		}
	}

	t.On(runlog.Progress(shown), runlog.JSON(o.in(logName), runlog.On(on.facts())))
	if len(d.held) > 0 {
		var e *data.Evaluation
		if d.prefers {
			e, err = d.heldPairs.Evaluation()
		} else {
			e, err = d.encoder.Evaluation(d.held, o.train.Batch, o.seq)
		}
		if err != nil {
			return nil, errors.Join(err, stop())
		}
		t.On(llm.Evaluate(t, e, o.evalEvery))
	}

	const length = 64
	if tok, ok := d.encoder.Tokenizer.(vocabulary); ok && !o.quiet {
		for _, prompt := range d.prompts {
			t.On(llm.SampleText(t, answers{tok, d.encoder.End}, prompt, length, sampler.Config{}, "", o.evalEvery))
		}
	}

	t.On(llm.Ceilings(t))
	return stop, nil
}

// answers is a vocabulary for answers, which end at the first end-of-text token.
type answers struct {
	vocabulary
	end []int
}

// Decode returns the text of the tokens before the first end-of-text token.
func (a answers) Decode(ids []int) ([]byte, error) {
	if i := slices.IndexFunc(ids, func(id int) bool { return slices.Contains(a.end, id) }); i >= 0 {
		ids = ids[:i]
	}
	return a.vocabulary.Decode(ids)
}

// publish saves the result and moves it to its place.
func (o *finetuneOptions) publish(c *cobra.Command, m *llm.Model, f *hf.Folder, data *tuningData, result tuned) error {
	d := o.dir()
	line, err := json.Marshal(result)
	if err == nil {
		err = atomicfile.Write(d.in(resultName), func(f *os.File) error {
			_, err := f.Write(append(line, '\n'))
			return err
		})
	}
	if err != nil {
		return err
	}

	if !o.savesAdapter() {
		if m, err = o.whole(c, m, f, data.learn[0].IDs); err != nil {
			return err
		}
	}

	at, erase := bar(c.ErrOrStderr(), "writing", true)
	defer erase()
	if o.savesAdapter() {
		err = hf.SaveAdapter(c.Context(), d.in(stagingName), o.base(), m, hf.Like(f))
	} else {
		err = savePretrained(c.Context(), d.in(stagingName), m, hf.Like(f), hf.WithSaveProgress(at),
			hf.WithShardSize(modelShard))
	}
	if err != nil {
		return err
	}

	run, err := d.nextManifest(c)
	if err != nil {
		return err
	}
	if err := d.publish(run); err != nil {
		return err
	}

	erase()
	if !o.quiet {
		o.printNextSteps(c.ErrOrStderr(), data.encoder.Template != nil)
	}

	return nil
}

// printNextSteps prints the saved files and commands to try next. chats reports whether the model has a chat template.
func (o *finetuneOptions) printNextSteps(w io.Writer, chats bool) {
	try := "kasmina generate -m " + quoted(o.dir().out) + " -p TEXT"
	if chats {
		try = "kasmina chat -m " + quoted(o.dir().out)
	}

	switch {
	case o.method == methodSeeds:
		fmt.Fprintf(w, "saved     the seeds in %s, their checkpoint and the log in %s\n", o.dir().out, o.in(""))
		fmt.Fprintf(w, "next      %s\n", try)
		fmt.Fprintf(w, "          kasmina serve -m %s --adapter %s   # serves both\n", quoted(o.model), quoted(o.dir().out))
		return
	case o.savesAdapter():
		fmt.Fprintf(w, "saved     the adapters in %s, their checkpoint and the log in %s\n", o.dir().out, o.in(""))
		fmt.Fprintf(w, "next      %s\n", try)
		fmt.Fprintf(w, "          kasmina convert -m %s -o NEW   # merges them into the model\n", quoted(o.dir().out))
		return
	}
	fmt.Fprintf(w, "saved     the model in %s, its checkpoint and the log in %s\n", o.dir().out, o.in(""))
	fmt.Fprintf(w, "next      %s\n", try)
}

// peak returns the peak memory of the run in GiB: the memory in use on the GPU or, without a GPU, that of the
// process.
func (o *finetuneOptions) peak(on machines) float64 {
	bytes := peakMemory()
	if on.device != nil {
		if free, total, err := on.device.Memory(); err == nil {
			bytes = total - free
		}
	}
	return math.Round(float64(bytes)/(1<<30)*1000) / 1000
}
