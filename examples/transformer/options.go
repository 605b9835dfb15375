package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

type options struct {
	data, out, cache, preset string
	optimizer, prompt        string
	device, precision        string
	gpus                     int               // processes to start
	gradients                cudaops.Precision // of weights
	tune                     cudaops.Tuning
	monitor                  int
	profile                  string
	board                    string
	boardControl             bool
	tensorboard, quiet       bool
	resume                   resumeFlag
	// what a resumed run keeps with other text; "" where it must be the same
	newData              string
	kasmina              bool
	judge                bool
	on                   map[string]string // facts of the machine, for the log
	grow                 int               // how many times as many blocks the model has at its end
	model                llm.Config
	train                llm.TrainConfig
	vocab                int // entries of the byte-pair encoding, 0 for bytes
	lr                   float64
	seed                 uint64
	maxBytes, heldOut    int64
	evalEvery, saveEvery int
	scrub                time.Duration
	sample               int
	sampler              sampler.Config

	changed []string // what a resumed run is told to do otherwise than before
}

// resumeFlag is -resume, which goes on from the checkpoint in -out, or -resume=FILE.
type resumeFlag struct {
	set  bool
	path string
}

func (r *resumeFlag) String() string   { return r.path }
func (r *resumeFlag) IsBoolFlag() bool { return true }

func (r *resumeFlag) Set(s string) error {
	if on, err := strconv.ParseBool(s); err == nil {
		*r = resumeFlag{set: on}
	} else {
		*r = resumeFlag{true, s}
	}
	return nil
}

// parse reads the command line. Of a run that is resumed, options that are not given are those of
// the checkpoint.
func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := o.flags(stderr)
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if rest := f.Args(); len(rest) > 0 && o.resume.set && o.resume.path == "" { // -resume FILE
		o.resume.path = rest[0]
		if err := f.Parse(rest[1:]); err != nil {
			return o, err
		}
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected arguments %q: every option begins with a dash, and a "+
			"checkpoint is named with -resume=FILE; -help lists the options", f.Args())
	}
	given := map[string]bool{}
	f.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if o.data != "" {
		var err error
		// a resumed run may start in another folder
		if o.data, err = filepath.Abs(o.data); err != nil {
			return o, err
		}
	}
	if o.resume.set {
		if o.resume.path == "" {
			o.resume.path = filepath.Join(o.out, checkpointName)
		}
		if err := o.restore(f, given); err != nil {
			return o, err
		}
	} else if err := o.apply(f, given); err != nil {
		return o, err
	} else {
		o.chooseGrowth(given)
	}
	for _, name := range []string{"top-k", "top-p"} {
		if given[name] && o.sampler.Temperature == 0 {
			return o, fmt.Errorf("-%s has no effect with -temperature 0, which always takes the likeliest token: "+
				"leave one of them out", name)
		}
	}
	o.train.Notes = map[string]string{}
	f.VisitAll(func(f *flag.Flag) {
		if !slices.Contains([]string{"out", "cache", "resume", "profile", "new-data", "gpus",
			"board", "board-control", "tensorboard", "quiet"}, f.Name) {
			o.train.Notes[f.Name] = f.Value.String()
		}
	})
	return o, o.finish()
}

func (o *options) flags(stderr io.Writer) *flag.FlagSet {
	f := flag.NewFlagSet("transformer", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.preset, "preset", "small", "what options are that are not given: "+presetNames())
	f.StringVar(&o.device, "device", "auto",
		"cpu, cuda (an NVIDIA GPU) or auto: the GPU if there is one")
	f.StringVar(&o.precision, "precision", "",
		"on a GPU: bf16 (the default), f8, f16, or f32 for checking; on a CPU: f32 (the default), or bf16 for products of\nrounded operands where the CPU has AVX512-BF16")
	f.TextVar(&o.gradients, "grad-precision", cudaops.Float32,
		"how a GPU keeps the gradients of weights for the update: f32, or bf16, which takes less memory and, of large models, less time,\n"+
			"with -precision bf16 or f8; with -accumulate they are f32")
	f.IntVar(&o.gpus, "gpus", 0,
		"train on so many GPUs (CPUs with -device cpu) of this computer, a process each; a step's batches (-accumulate) are\n"+
			"divided among them (default: 1, or what PET_NPROC_PER_NODE says)")
	f.StringVar(&o.data, "data", "", "file or folder to learn from (default: the Go source tree)")
	f.StringVar(&o.out, "out", filepath.Join("runs", "transformer"),
		"folder for checkpoint, loss curve, log and sample")
	f.StringVar(&o.cache, "cache", cacheFolder(),
		"folder for byte-pair encodings and tokens, to be used again")
	f.StringVar(&o.newData, "new-data", "",
		"let -resume go on with other text, and keep of the run: all, optimizer (steps begin at 0), steps "+
			"(the optimiser\nbegins anew) or model (both begin anew)")
	f.Var(&o.resume, "resume",
		"go on from the checkpoint in -out, or from `FILE` with -resume=FILE, with its options unless given")
	f.IntVar(&o.train.Steps, "steps", growingSteps,
		fmt.Sprintf("optimiser steps in all; learning rate and growth follow them (with Kasmina layers %d, which take as long)",
			layeredSteps))
	f.TextVar(&o.tune, "tune", cudaops.TuneDefault,
		"how a GPU's fastest kernels are found: off, cached, full or default (off for f32, else cached)")
	f.IntVar(&o.monitor, "monitor", 0,
		"time the ops of one step in so many, at less than 0.5 % of the time: for the log, and a "+
			"table at the end; 0 for none")
	f.StringVar(&o.profile, "profile", "",
		"write a trace of one step on a GPU, with every kernel, to this file (for ui.perfetto.dev or chrome://tracing), and\n"+
			"print a summary")
	f.StringVar(&o.board, "board", "",
		"show the run in a browser, at this address, such as 127.0.0.1:6060")
	f.BoolVar(&o.boardControl, "board-control", false,
		"let whoever has the token that -board prints steer the run")
	f.BoolVar(&o.tensorboard, "tensorboard", false,
		"write event files for TensorBoard too, to the folder tensorboard in -out")
	f.BoolVar(&o.quiet, "quiet", false, "show no progress and no samples")
	f.BoolVar(&o.kasmina, "kasmina", true,
		"put a Kasmina layer after every block and grow its seeds during the run, unless the model grows in depth")
	f.BoolVar(&o.judge, "judge", false,
		"let a controller plant blueprints where features are unhealthy, and judge each by held-out text, instead of a\n"+
			"timetable for all seeds")
	f.IntVar(&o.grow, "grow", 2,
		"begin with one in `N` of the blocks, and let the model get the others while it trains, without Kasmina layers\n"+
			"(1 where -kasmina, -judge or -seeds asks for these, with other presets, in less than 100 steps, and for odd -layers)")
	f.IntVar(&o.model.Seeds, "seeds", 16, "seeds of each Kasmina layer")
	f.IntVar(&o.model.Layers, "layers", 4, "blocks")
	f.IntVar(&o.model.Dim, "dim", 192, "features of the residual stream")
	f.IntVar(&o.model.Heads, "heads", 4, "query heads")
	f.IntVar(&o.model.KVHeads, "kvheads", 0, "key-value heads (default: as many as query heads)")
	f.IntVar(&o.model.FF, "ff", 0, "hidden features of the perceptron (default: 8/3 of -dim)")
	f.IntVar(&o.model.Seq, "seq", 256, "tokens in a sequence")
	f.BoolVar(&o.model.Documents, "documents", false,
		"keep the files of the data apart: attention does not look from one into another "+
			"(computed on the CPU,\neven with a GPU)")
	f.IntVar(&o.vocab, "vocab", 0,
		"entries of a byte-pair encoding trained on the data, 257 or more; the model's "+
			"vocabulary is rounded up to a multiple of 64 (default: a token is a byte)")
	f.BoolVar(&o.model.Untied, "untied", false, "give the output layer its own weight")
	f.IntVar(&o.train.Batch, "batch", 8, "sequences in a batch")
	f.IntVar(&o.train.Accumulate, "accumulate", 1, "batches in a step")
	f.BoolVar(&o.train.Recompute, "recompute", false,
		"compute blocks again in the backward pass: less memory, more work")
	f.StringVar(&o.optimizer, "optimizer", "muon", "adamw or muon")
	f.Float64Var(&o.lr, "lr", 0,
		"peak learning rate (default: 0.02 for muon; for adamw 0.003, and less in large presets)")
	f.Float64Var(&o.train.Clip, "clip", 1, "limit of the global gradient norm, 0 for none")
	f.Uint64Var(&o.seed, "seed", 1, "random seed of parameters, data order and sample")
	f.Int64Var(&o.maxBytes, "max-bytes", 0,
		"use no more than about this much of the data, 0 for all")
	f.Int64Var(&o.heldOut, "heldout", 256<<10,
		"bytes of held-out text to score at the end; evaluations before it score 64 KiB at most")
	f.IntVar(&o.evalEvery, "eval-every", 200,
		"steps between evaluations, 0 for the last step alone")
	f.IntVar(&o.saveEvery, "save-every", 200,
		"steps between checkpoints, 0 for the last step alone")
	f.DurationVar(&o.scrub, "scrub", time.Minute,
		"verify the checksums of all seeds once in so long while the run goes on; 0 for never")
	f.IntVar(&o.sample, "sample", 300, "tokens to draw at the end")
	f.StringVar(&o.prompt, "prompt", "func ",
		"start of the drawn text; with -vocab it may be empty, for the start of a document")
	f.Float64Var(&o.sampler.Temperature, "temperature", 0.7,
		"of the drawn text; 0 always takes the likeliest token")
	f.IntVar(&o.sampler.TopK, "top-k", 0, "draw from the k likeliest tokens, 0 for all")
	f.Float64Var(&o.sampler.TopP, "top-p", 0.95,
		"draw from the likeliest tokens that together reach this probability; 0 for the likeliest "+
			"alone")
	return f
}

// How many steps take the same time in a model that grows from half its blocks, and in one with
// Kasmina layers.
const growingSteps, layeredSteps = 1280, 1040

// leastGrowing is how many steps a growth takes at least.
const leastGrowing = 100

// chooseGrowth decides whether a new run's model grows in depth, where -grow does not say.
func (o *options) chooseGrowth(given map[string]bool) {
	if given["grow"] || o.grow == 1 { // or the preset says so
		return
	}
	if given["kasmina"] || given["judge"] || given["seeds"] || o.model.Layers%o.grow != 0 ||
		o.train.Steps < leastGrowing {
		if o.grow = 1; !given["steps"] && presets[o.preset]["steps"] == "" {
			o.train.Steps = layeredSteps
		}
	}
}

// cacheFolder returns where the user's programs keep what can be made again.
func cacheFolder() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	return filepath.Join(dir, "kasmina")
}

// restore sets the options that were not given to those of the checkpoint, and notes which of the
// others differ.
func (o *options) restore(f *flag.FlagSet, given map[string]bool) error {
	notes, err := llm.ReadNotes(o.resume.path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w; a run begins without -resume, and -out or -resume=FILE names "+
			"where another left its checkpoint", err)
	} else if err != nil {
		return err
	}
	if was := cmp.Or(notes["preset"], o.preset); given["preset"] && was != o.preset {
		return fmt.Errorf("-preset is %s, and the run in %s was begun with %q: without -preset "+
			"it goes on as it was", o.preset, o.resume.path, was)
	}
	var errs []error
	f.VisitAll(func(fl *flag.Flag) {
		was, known := notes[fl.Name]
		if fl.Name == "grow" && !known {
			was, known = "1", true // of a run before there was another way
		}
		switch {
		case !known:
		case slices.Contains(pathOptions, fl.Name):
			if err := o.checkPath(fl, was, given[fl.Name]); err != nil {
				errs = append(errs, err)
			}
		case !given[fl.Name]:
			if err := fl.Value.Set(was); err != nil {
				errs = append(errs, fmt.Errorf("-%s of %s is %q: %w", fl.Name,
					o.resume.path, was, err))
			}
		case fl.Value.String() != was:
			o.changed = append(o.changed, fmt.Sprintf("-%s from %q to %q", fl.Name, was, fl.Value))
		}
	})
	return errors.Join(errs...)
}

// pathOptions are the options that name files, folders and an address. What a checkpoint says of
// them is never followed: whoever made the file would choose what is read and written.
var pathOptions = []string{"out", "data", "cache", "profile", "resume", "new-data", "board"}

// checkPath compares a path of the checkpoint with what the user gave. Text of one's own has to be
// named again.
func (o *options) checkPath(fl *flag.Flag, was string, given bool) error {
	switch {
	case fl.Value.String() == was:
		return nil
	case fl.Name == "data" && !given:
		return fmt.Errorf("the run in %s learnt from %q: a path in a file is not followed, so "+
			"name the text again, with -data", o.resume.path, was)
	case fl.Name != "data" && !given:
		o.changed = append(o.changed, fmt.Sprintf(
			"-%s from %q to %q: what a file says of it is not followed, so give it with -%[1]s",
			fl.Name, was, fl.Value))
		return nil
	case fl.Name != "data":
		return nil
	}
	o.changed = append(o.changed, fmt.Sprintf("-data from %q to %q", was, fl.Value))
	return nil
}

// keep is what -new-data asks for, nil where the text must be the same.
func (o *options) keep() (*llm.Keep, error) {
	keeps := map[string]*llm.Keep{"": nil, "all": {Optimizer: true, Steps: true},
		"optimizer": {Optimizer: true}, "steps": {Steps: true},
		"model": {}}
	keep, ok := keeps[o.newData]
	switch {
	case !ok:
		return nil, fmt.Errorf("-new-data is %q, want all, optimizer, steps or model", o.newData)
	case keep != nil && !o.resume.set:
		return nil, errors.New(
			"-new-data is for -resume: a run that begins has no other text before")
	}
	return keep, nil
}

// finish derives what the options leave open, and refuses what would otherwise fail only after the
// training.
func (o *options) finish() error {
	o.model.Vocab = tokenizer.Bytes{}.VocabSize()
	if o.vocab != 0 {
		o.model.Vocab = (o.vocab + 63) / 64 * 64 // which matrix products are fast at
	}
	layers := o.model.Layers
	if o.grow > 1 {
		o.kasmina, o.model.Depth, o.model.Layers = false, 1, max(1, layers/o.grow)
		o.train.Epoch = max(1, min(10, o.train.Steps/100)) // a growth takes some 80 epochs
	}
	if o.kasmina {
		for i := range o.model.Layers {
			o.model.Kasmina = append(o.model.Kasmina, i)
		}
	} else {
		o.model.Seeds = 0
	}
	o.model = o.model.Default()
	if _, err := o.keep(); err != nil {
		return err
	}
	o.sampler.Seed, o.sampler.TopP = o.seed, sampler.Nucleus(o.sampler.TopP)
	if _, err := sampler.New(o.sampler); err != nil {
		return err
	}
	for _, c := range []struct {
		ok         bool
		name, want string
		value      any
	}{
		{o.out != "", "out", "a folder", `""`},
		{o.train.Steps >= 1, "steps", "at least 1", o.train.Steps},
		{o.grow >= 1 && layers%max(1, o.grow) == 0, "grow",
			fmt.Sprintf("a number that divides -layers, %d", layers), o.grow},
		{!o.judge || o.kasmina, "judge", "Kasmina layers too, which -grow and -kasmina=false have not",
			o.judge},
		{o.gpus >= 0, "gpus", "at least 1", o.gpus},
		{o.train.Batch >= 1, "batch", "at least 1", o.train.Batch},
		{o.train.Accumulate >= 1, "accumulate", "at least 1", o.train.Accumulate},
		{o.evalEvery >= 0, "eval-every", "at least 0", o.evalEvery},
		{o.saveEvery >= 0, "save-every", "at least 0", o.saveEvery},
		{o.vocab == 0 || o.vocab >= 257 && o.vocab <= 1<<20, "vocab",
			"0, or 257 to 1048576", o.vocab},
		{o.prompt != "" || o.vocab > 0, "prompt", "some text", `""`},
		{o.monitor == 0 || o.monitor >= 2, "monitor", "0, or at least 2", o.monitor},
		{o.scrub >= 0, "scrub", "at least 0", o.scrub},
		{o.sample >= 0, "sample", "at least 0", o.sample},
		{o.maxBytes >= 0, "max-bytes", "at least 0", o.maxBytes},
		{o.heldOut >= 2, "heldout", "at least 2", o.heldOut},
		{!o.boardControl || o.board != "", "board-control", "an address with -board too",
			o.boardControl},
		{presets[o.preset] != nil, "preset", "one of " + presetNames(), strconv.Quote(o.preset)},
		{slices.Contains([]string{"auto", "cpu", "cuda"}, o.device), "device", "auto, cpu or cuda",
			strconv.Quote(o.device)},
		{o.precision == "" || new(cudaops.Precision).UnmarshalText([]byte(o.precision)) == nil,
			"precision", "bf16, f8, f16 or f32", strconv.Quote(o.precision)},
		{o.gradients == cudaops.Float32 || o.gradients == cudaops.BFloat16, "grad-precision",
			"f32 or bf16", o.gradients},
		{o.gradients == cudaops.Float32 || slices.Contains([]string{"", "bf16", "f8"}, o.precision),
			"grad-precision", "f32 with -precision " + o.precision, o.gradients},
		{o.optimizer == "adamw" || o.optimizer == "muon", "optimizer", "adamw or muon",
			strconv.Quote(o.optimizer)},
	} {
		if !c.ok {
			return fmt.Errorf("-%s is %v, want %s", c.name, c.value, c.want)
		}
	}
	return o.model.Check()
}

// explain says what becomes of a resumed run with other options. settings are the differences that
// change its results.
func (o *options) explain(settings []string) string {
	var s strings.Builder
	for _, c := range o.changed {
		fmt.Fprintf(&s, "changed   %s\n", c)
	}
	if len(settings) > 0 {
		fmt.Fprintf(&s,
			"from here on the run follows its new settings, and ends with another model than one that followed them\n"+
				"from the start: %s\n", strings.Join(settings, "; "))
	}
	return s.String()
}
