package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/internal/failpoint"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/hf/gguf"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/tensorboard"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

type trainOptions struct {
	common
	train     llm.TrainConfig
	lr        float64
	seed      uint64
	saveEvery int
	evalEvery int
	grow      int
	adapters  adapters
	resume    bool
	board     string
	control   bool
	events    bool
	quiet     bool
	gpus      int
	deadline  time.Duration
	parts     bool
	learning  learning
	warmup    int // in steps
	keepBest  bool
	gguf      string
	scratch   scratch
	text      textOptions
	engine    engineOptions
}

func init() {
	flagRules["train"] = map[string]rule{"model": always, "preset": newModelOnly, "layers": newModelOnly, "dim": newModelOnly, "heads": newModelOnly,
		"kv-heads": newModelOnly, "ff": newModelOnly, "untied": newModelOnly, "vocab": newModelOnly, "tokenizer": newModelOnly,
		"documents": newModelOnly, "cache": newModelOnly, "max-bytes": always, "held-out": always,
		"grad-precision": checkedLater, "tune": checkedLater, "profile": checkedLater, "memory": checkedLater,
		"monitor": notWith("gpus", "0", "which starts several processes"),
		"data":    always, "out": always, "batch": always, "accumulate": always,
		"seq": always, "lr": always, "grow": always,
		"adapters": onlyWith("model", "", "add the --model that they adapt"), "time": always,
		"recompute": always, "recompute-mlps": notRecompute, "save-every": always, "eval-every": always, "seed": always,
		"resume": always, "board": always, "tensorboard": always, "quiet": always, "device": always,
		"precision": always,
		"optimizer": always, "schedule": always, "warmup": always, "clip": always,
		"gguf":          onlyWith("model", "", "use kasmina convert after the run"),
		"weight-decay":  notAdapters,
		"keep-best":     needsEvaluations,
		"gpus":          checkedLater,
		"steps":         notWith("time", "0s", "the time ends the run"),
		"directed":      directedRule,
		"rank":          onlyWith("adapters", "", "add --adapters"),
		"board-control": onlyWith("board", "", "add --board and an address"),
		"deadline":      checkedLater,
		"save-parts":    checkedLater}
}

func newTrain() *cobra.Command { return newTrainOf(&trainOptions{}) }

// newTrainOf returns the command that parses its options into o.
func newTrainOf(o *trainOptions) *cobra.Command {
	c := &cobra.Command{
		Use:   "train {--model DIR | --preset NAME | --layers N ...} --data FILE --out NEW",
		Short: "Train a new or an existing model on a text",
		Long: `Train all weights of a model on a file or a folder of text. Part of the text is held out for
evaluation. With --model, the command trains an existing model further. Without it, the command trains
a new model from scratch, with the size given by --preset, or by --layers, --dim and --heads. It first
trains a tokenizer on the same text, unless --tokenizer names an existing one.

  preset   blocks  features  tokens per sequence  tokens per step
  small         4       192                  256            2,048   for a CPU, and the default for --layers
  124M         12       768                1,024           32,768   for GPUs
  350M         24     1,024                1,024           16,384
  925M         16     2,048                2,048           16,384

The folder --out receives the trained model, in the format of transformers. Its subfolder run contains
the last checkpoint, the optimizer's state and the log.

If a run was interrupted or killed, the same command continues it, and the result is bit-identical to
that of an uninterrupted run. Once the run has finished, the command says so and does nothing.

With --resume, only --out is required. The run continues with its own options, except for those that are
given, such as another learning rate, number of steps or text. More --steps also extend a finished run.

With --gpus, the run uses one process per GPU, and the result is bit-identical to that of a single process.
If torchrun, srun or a Kubernetes operator starts the processes, they connect to each other by themselves.

With --grow, the model receives more blocks during training if that is expected to pay off. With --adapters,
the weights are frozen, and LoRA adapters are trained and merged into the weights at the end.`,
		Example: `  kasmina train -m models/tiny -d text.txt -o tuned -n 200 -b 2
  kasmina train -o tuned --resume -n 400
  kasmina train -m models/tiny -d text.txt -o adapted --adapters grow --rank 4
  kasmina train --preset small -d notes/ -o mine --grow 2
  kasmina train --layers 6 --dim 256 --heads 8 --vocab 4096 -d notes/ -o mine`,
		Args:              noArguments,
		ValidArgsFunction: cobra.NoFileCompletions,
		PreRunE: func(c *cobra.Command, args []string) error {
			if err := recall(c); err != nil {
				return err
			}
			return requireModel(c)
		},
		RunE: func(c *cobra.Command, args []string) error { return o.run(c) },
	}

	o.modelFlag(c)
	o.scratch.flags(c)
	o.text.flags(c, &o.data)
	f := c.Flags()
	f.StringVarP(&o.out, "out", "o", "", "new `directory` for the model and the run")
	f.IntVarP(&o.train.Steps, "steps", "n", 100, "number of optimizer steps")
	f.IntVarP(&o.train.Batch, "batch", "b", 4, "sequences per batch")
	f.IntVar(&o.train.Accumulate, "accumulate", 1, "batches per step")
	f.IntVar(&o.seq, "seq", 0, "tokens per sequence (default: the preset's, or the longest "+
		"context of --model, at most 1024)")
	f.Float64Var(&o.lr, "lr", 0, "peak learning rate (default: the preset's, or 0.0001, for "+
		"adamw, and a corresponding value for other optimizers)")
	f.Float64Var(&o.train.Clip, "clip", 1, "limit of the global gradient norm; 0 means no limit")
	o.learning.flags(c)
	f.IntVar(&o.grow, "grow", 0, "let the number of blocks grow by up to this factor during training, if that is "+
		"expected to pay off; a new model ends with at most --layers blocks; 0 means no growth")
	o.adapters.flags(c)
	f.DurationVar(&o.train.Budget.Time, "time", 0, "train for this long instead of --steps, such as 90s or 2h")
	f.BoolVar(&o.train.Recompute, "recompute", false,
		"save memory by recomputing the blocks in the backward pass")
	f.IntVar(&o.train.RecomputeMLPs, "recompute-mlps", 0, "save some memory by recomputing only the MLPs, in this "+
		"many blocks")
	f.IntVar(&o.saveEvery, "save-every", 100, "steps between checkpoints; 0 saves only after the last step")
	f.IntVar(&o.evalEvery, "eval-every", 50, "steps between evaluations; 0 evaluates only after the last step")
	f.BoolVar(&o.keepBest, "keep-best", false, "save the model with the lowest held-out loss "+
		"instead of the last one")
	f.StringVar(&o.gguf, "gguf", "", "also write model.gguf for llama.cpp, with weights of this `type`: f32, f16, "+
		"bf16 or q8_0")
	f.Uint64VarP(&o.seed, "seed", "s", 1, "random seed for the data order, and for the weights of a new model")
	f.BoolVar(&o.resume, "resume", false, "continue the run in --out, with its own options except for those given")
	f.StringVar(&o.board, "board", "", "show the run in a browser at this `address`, such as 127.0.0.1:6060")
	f.BoolVar(&o.control, "board-control", false,
		"let anyone who has the token that --board prints steer the run")
	f.BoolVar(&o.events, "tensorboard", false, "also write event files for TensorBoard, next to the log")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "show no progress")
	f.IntVar(&o.gpus, "gpus", 0, "number of GPUs of this computer to train on, or of processes with --device "+
		"cpu; they divide the batches of a step (--accumulate) among them")
	f.DurationVar(&o.deadline, "deadline", parallel.Deadline, "end the run if one of several processes is "+
		"silent, or none makes progress, for this long")
	f.BoolVar(&o.parts, "save-parts", false, "let each of several processes write its own part of a "+
		"checkpoint; for large models")
	o.machineFlags(c)
	o.engine.flags(c)
	completeFlag(c, "gguf", "f32", "f16", "bf16", "q8_0")
	markRequired(c, "data", "out")
	return c
}

func (o *trainOptions) dir() runDir { return runDir{filepath.Clean(o.out)} }

func (o *trainOptions) in(name string) string { return o.dir().in(name) }

// Limits for sizes that no computer exceeds.
const (
	mostSequences = 1 << 20
	mostGrowth    = 64
)

// check returns an error for impossible values, before anything is written.
func (o *trainOptions) check() error {
	if err := o.text.check(); err != nil {
		return err
	}

	if err := o.engine.checkValues(); err != nil {
		return err
	}

	for _, count := range []struct {
		name  string
		value int
	}{{"steps", o.train.Steps}, {"batch", o.train.Batch}, {"accumulate", o.train.Accumulate}} {
		if count.value < 1 {
			return fmt.Errorf("--%s is %d, want at least 1", count.name, count.value)
		}
		if count.name != "steps" && count.value > mostSequences {
			return fmt.Errorf("--%s is %d, want at most %d", count.name, count.value, mostSequences)
		}
	}

	if n := o.train.RecomputeMLPs; n < 0 || n > 1<<16 {
		return fmt.Errorf("--recompute-mlps is %d, want 0 to %d", n, 1<<16)
	}

	if o.grow < 0 || o.grow == 1 || o.grow > mostGrowth {
		return fmt.Errorf("--grow is %d, want 0, or 2 for twice as many blocks, up to %d", o.grow, mostGrowth)
	}

	if o.model == "" {
		if err := o.scratch.check(o.grow); err != nil {
			return err
		}
	}

	if err := o.adapters.check(); err != nil {
		return err
	}

	if o.adapters.where != "" && o.grow > 0 {
		return errAdaptersGrow
	}

	if o.adapters.where != "" && o.gpus > 1 {
		return errAdaptersProcesses
	}

	if o.train.Budget.Time < 0 {
		return fmt.Errorf("--time is %v, want at least 0", o.train.Budget.Time)
	}

	if o.grow > 0 && o.train.Steps < 100 {
		return fmt.Errorf("--steps is %d, but --grow needs at least 100", o.train.Steps)
	}

	if err := o.checkLearning(); err != nil {
		return err
	}

	if o.gguf != "" {
		if _, err := gguf.ParseType(o.gguf); err != nil {
			return fmt.Errorf("--gguf: %w", err)
		}
	}

	if o.keepBest && o.adapters.where != "" {
		return errNoBest
	}

	if o.saveEvery < 0 || o.evalEvery < 0 {
		return fmt.Errorf("--save-every is %d and --eval-every is %d, want at least 0", o.saveEvery,
			o.evalEvery)
	}

	if o.gpus < 0 {
		return fmt.Errorf("--gpus is %d, want at least 1", o.gpus)
	}

	if o.deadline < 0 {
		return fmt.Errorf("--deadline is %v, want at least 0", o.deadline)
	}

	return nil
}

func (o *trainOptions) run(c *cobra.Command) (err error) {
	if err := o.resolve(c); err != nil {
		return err
	}

	if o.lr == 0 && !c.Flags().Changed("lr") {
		o.lr = o.learning.rate()
	}

	if err := o.check(); err != nil {
		return err
	}

	m, err := o.meet(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close(err)) }()

	if err := o.engine.check(c, m); err != nil {
		return err
	}

	o.settle(m)
	if m.device == nil && m.team.First() && o.model == "" && o.scratch.meantForGPU() {
		fmt.Fprintf(c.ErrOrStderr(), "note      a model of this size is meant for GPUs: on a CPU, a step may take "+
			"minutes; --preset %s is meant for CPUs\n", defaultPreset)
	}

	stage, release, err := o.openFolder(c, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()

	if stage == finished {
		return nil
	}

	return o.remedy(o.runFrom(c, m, stage))
}

// checkProcesses returns an error for options that do not fit the processes of the run: options for
// several processes if there is only one, --adapters if there are several, and --gpus if a launcher has
// started the processes.
func (o *trainOptions) checkProcesses(c *cobra.Command, m machines) error {
	here := 1
	if m.world != nil {
		here = m.world.Place().LocalSize
	}

	if o.gpus > 1 && o.gpus != here {
		return fmt.Errorf("--gpus %d has no effect, because another program has started this process as "+
			"one of %d on this host: leave it out", o.gpus, here)
	}

	unused := given(c, "deadline", "save-parts")
	if m.team != nil && m.team.Size() > 1 {
		if o.adapters.where != "" {
			return errAdaptersProcesses
		}
		return nil
	}
	if len(unused) == 0 {
		return nil
	}

	return fmt.Errorf("%s no effect in a single process: --gpus starts several", have(unused))
}

// openFolder claims the folder of the run and returns the stage at which to continue. If only the files
// of the finished model remain to be moved to their place, it moves them. Rank 0 does this for all ranks.
func (o *trainOptions) openFolder(c *cobra.Command, m machines) (s stage, release func() error,
	err error) {
	d := o.dir()
	release = func() error { return nil }
	err = m.atFirst(func() error {
		// Problems with the folder are reported before anything is created there.
		var run *manifest
		if s, _, err = d.decide(optionsOf(c), o.resume); err != nil || s == finished {
			return err
		}
		if release, err = d.claim(c.ErrOrStderr()); err != nil {
			release = func() error { return nil }
			return err
		}
		if s, run, err = d.decide(optionsOf(c), o.resume); err != nil {
			return err
		}
		failpoint.Reach("claimed", d.out)
		d.clean()
		if err := d.writable(); err != nil {
			return err
		}
		if s == publishing {
			s = finished
			return d.publish(run)
		}
		if differ := differences(optionsOf(c), run); s == begun && len(differ) > 0 {
			fmt.Fprintf(c.ErrOrStderr(), "folder    replacing a run that has other options (%s) "+
				"and no checkpoint yet\n", strings.Join(differ, "; "))
		}
		return nil
	})

	if err == nil && m.team != nil {
		var all [][]byte
		if all, err = m.team.Exchange([]byte{byte(s)}); err == nil {
			s = stage(all[0][0])
		}
	}
	if err != nil {
		return s, nil, errors.Join(err, release())
	}

	switch s {
	case finished:
		if m.team.First() {
			err = d.removeStaging()
		}
		fmt.Fprintf(c.ErrOrStderr(), "finished  the run has already finished, and its model is in %s\n", d.out)
	case saved:
		if o.quiet {
			break
		}
		fmt.Fprintf(c.ErrOrStderr(), "resuming  from the last checkpoint in %s\n", d.in(""))
	}

	return s, release, err
}

// modelShard is the largest size in bytes of a file of weights of the finished model. Tests change it.
var modelShard int64 = 5 << 30

// runFrom trains from the given stage and saves the model.
func (o *trainOptions) runFrom(c *cobra.Command, m machines, s stage) error {
	corpus, err := o.text.open(o.data)
	if err != nil {
		return fmt.Errorf("--data: %w", err)
	}

	from, err := o.origin(c, m, s, corpus.Train)
	if err != nil {
		return err
	}
	defer from.Close()

	if o.seq == 0 {
		o.seq = min(from.shape().Seq, 1024)
	}

	if err := o.window(c.ErrOrStderr(), from.shape()); err != nil {
		return err
	}

	if err := o.checkSave(from); err != nil {
		return err
	}

	tokens, err := o.text.tokens(c, m, corpus.Train, from.vocabulary())
	if err != nil {
		return err
	}
	defer tokens.Close()

	t, err := o.trainer(c, from, m, tokens)
	if err != nil {
		return err
	}

	if err := errors.Join(o.steps(c, t, m, s, from, corpus), t.Close()); err != nil ||
		!m.team.First() {
		return err
	}
	defer m.team.Busy("writing the model")()

	return o.save(c, t.Model, from)
}

// trainer returns the trainer of the run's model.
func (o *trainOptions) trainer(c *cobra.Command, from origin, on machines,
	tokens data.Tokens) (*llm.Trainer, error) {
	o.train.Engine = o.engine.engine(on)
	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: o.train.Batch, Seq: o.seq,
		Seed: o.seed})
	if err != nil {
		return nil, fmt.Errorf("--data: %w", err)
	}

	optimizer, err := o.newOptimizer()
	if err != nil {
		return nil, err
	}

	if o.grow > 0 {
		o.train.Epoch = max(1, o.train.Steps/100) // the life of a seed takes about 80 epochs
	}

	m, err := from.model(c.Context(), c.ErrOrStderr(), func(c *llm.Config) {
		c.Seq, c.Documents = o.seq, o.text.documents
		if o.grow > 0 {
			c.Depth = factors(o.grow)
		}
		o.adapters.config(c, &o.train)
	}, o.lattices()...)
	if err != nil {
		return nil, err
	}

	t, err := llm.NewTrainer(m, loader, optimizer, o.train)
	if err != nil {
		return nil, err
	}

	if o.grow > 0 {
		forecast := control.NewForecast(blueprints.Stack, o.grow)
		forecast.Growths, forecast.Trained = factors(o.grow), o.model != ""
		err = t.Grow(llm.Growth{Controller: forecast})
	}

	o.adapters.seed = o.seed
	return t, errors.Join(err, o.adapters.grow(t))
}

// factors returns the number of prime factors of n, which is the largest number of growths that multiply
// the blocks by n.
func factors(n int) (count int) {
	for p := 2; n > 1; p++ {
		for ; n%p == 0; n /= p {
			count++
		}
	}
	return count
}

// lattices returns the options of the seed lattices. Adapters move through their stages without gates.
func (o *trainOptions) lattices() []state.Option {
	if o.adapters.where == "" {
		return nil
	}
	return []state.Option{state.WithoutGates()}
}

// serve shows the run in a browser until stop is called.
func (o *trainOptions) serve(stderr io.Writer, t *llm.Trainer) (stop func() error, err error) {
	opts := []board.Option{board.WithFolder(o.out)}
	if o.control {
		opts = append(opts, board.WithControl())
	}

	b, err := board.Attach(t, opts...)
	if err != nil {
		return nil, err
	}

	url, err := b.Listen(o.board)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("--board: %w", err), b.Close())
	}

	fmt.Fprintf(stderr, "board     %s\n", url)
	return b.Close, nil
}

// steps trains from the given stage.
func (o *trainOptions) steps(c *cobra.Command, t *llm.Trainer, on machines, s stage,
	from origin, corpus *data.Corpus) error {
	if s == saved {
		if err := o.resumeFrom(c, t, o.in(checkpointName)); err != nil {
			return err
		}
	}

	// From here on, the folder belongs to a run with the options of this command.
	if err := on.atFirst(func() error {
		run, err := o.dir().nextManifest(c)
		if err != nil {
			return err
		}
		if err := o.dir().writeManifest(run); err != nil {
			return err
		}
		return from.persist()
	}); err != nil {
		return err
	}

	if on.team.First() {
		stop, err := o.watch(c, t, on, from.vocabulary(), corpus)
		if err != nil {
			return err
		}
		defer stop()
	}

	t.On(llm.MergeAtEnd(t), func(e llm.Event) error {
		failpoint.Reach("event", e.Kind.String())
		return nil
	})
	how := []llm.CheckpointOption{llm.OptimizerApart()}
	if o.parts {
		how = append(how, llm.InParts())
	}

	t.On(llm.Checkpoint(t, o.in(checkpointName), o.saveEvery, how...))
	err := t.Run(c.Context())
	if errors.Is(err, context.Canceled) || errors.Is(err, llm.ErrStopped) {
		return fmt.Errorf("stopped after step %d: %w; give the same command again to continue", t.Step(), err)
	}

	return err
}

// resumeFrom loads a checkpoint. With --resume, it accepts a checkpoint with other settings or another
// text, and reports the differences.
func (o *trainOptions) resumeFrom(c *cobra.Command, t *llm.Trainer, path string) error {
	if !o.resume {
		err := t.Resume(c.Context(), path)
		switch {
		case errors.Is(err, data.ErrChanged):
			return fmt.Errorf("%w; to continue with the current text, add --resume", err)
		case errors.Is(err, llm.ErrSettings):
			return settingsError{err}
		}
		return err
	}

	run, err := o.dir().readManifest()
	if err != nil {
		return err
	}

	settings := llm.WithNewSettings(func(found []string) {
		if options := differences(optionsOf(c), run); len(options) > 0 {
			found = options // with the option names that the user knows
		}
		fmt.Fprintf(c.ErrOrStderr(), "resuming  with other settings: %s\n", strings.Join(found, "; "))
	})

	err = t.Resume(c.Context(), path, settings)
	if errors.Is(err, data.ErrChanged) {
		// Not earlier, because WithNewData starts at the beginning of the text even if the text is the
		// same.
		text := llm.WithNewData(llm.Keep{Optimizer: true, Steps: true})
		if err = t.Resume(c.Context(), path, settings, text); err == nil {
			fmt.Fprintln(c.ErrOrStderr(), "resuming  with another text, from its start")
		}
	}

	if errors.Is(err, llm.ErrArchitecture) {
		if options := differences(optionsOf(c), run); len(options) > 0 {
			err = fmt.Errorf("%s: %w (%s)", path, llm.ErrArchitecture, strings.Join(options, "; "))
		}
		return fmt.Errorf("%w; the sizes of the model, --seq, --grow and the options of adapters must stay as they were: give the "+
			"values of that run, or start a new one with another --out", err)
	}

	return err
}

// A settingsError wraps the error of a checkpoint with different settings although the options are the
// same, for example on another kind of machine. It recommends the option that accepts the checkpoint.
type settingsError struct{ error }

func (e settingsError) Error() string {
	text, _, _ := strings.Cut(e.error.Error(), ": set up the trainer")
	return text + ": add --resume to continue all the same"
}

func (e settingsError) Unwrap() error { return e.error }

// watch adds the callbacks that show progress, write the log and evaluate. Only one process calls it.
func (o *trainOptions) watch(c *cobra.Command, t *llm.Trainer, on machines,
	tok tokenizer.Tokenizer, corpus *data.Corpus) (stop func() error, err error) {
	e, err := o.text.evaluation(corpus.HeldOut, tok, o.train.Batch, o.seq)
	if err != nil {
		return nil, err
	}

	shown := c.ErrOrStderr()
	if o.quiet {
		shown = io.Discard
	}

	if o.events {
		t.On(tensorboard.Events(o.in("tensorboard")))
	}

	stop = func() error { return nil }
	if o.board != "" {
		if stop, err = o.serve(c.ErrOrStderr(), t); err != nil {
			return nil, err
		}
	}

	if o.adapters.where != "" && !o.quiet {
		t.On(o.adapters.report(t, c))
	}

	if err := o.describe(shown, t); err != nil {
		return nil, errors.Join(err, stop())
	}

	t.On(runlog.Progress(shown), runlog.JSON(o.in(logName),
		runlog.On(on.facts())), llm.Evaluate(t, e, o.evalEvery), llm.Ceilings(t))
	if o.keepBest {
		t.On(o.saveBest(t))
	}

	o.engine.watch(c, t)
	return stop, nil
}
