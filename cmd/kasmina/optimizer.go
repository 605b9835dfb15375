package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optim"
)

// A learning holds the options that decide how gradients change the weights, except for the learning rate
// and the gradient limit.
type learning struct {
	optimizer string
	schedule  string
	warmup    int     // in steps, or automatic
	decay     float64 // weight decay, or automatic
	base      float64 // peak learning rate that suits AdamW
}

// automatic makes the command choose the value of an option for which 0 has a meaning.
const automatic = -1

// The names of the schedules.
const (
	cosine   = "cosine"
	linear   = "linear"
	constant = "constant"
)

var scheduleNames = []string{cosine, linear, constant}

const (
	// usualRate is the default peak learning rate for fine-tuning with AdamW.
	usualRate = 1e-4
	// floor is the learning rate at the end, relative to the peak.
	floor = 0.1
	// longestWarmup is the default limit for the number of warmup steps, and timedWarmup the default
	// number of warmup steps in a run with a time limit.
	longestWarmup = 100
	timedWarmup   = 20
)

func (l *learning) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&l.optimizer, "optimizer", "adamw", "optimizer: "+strings.Join(optim.ChoiceNames(), ", "))
	f.Float64Var(&l.decay, "weight-decay", automatic,
		"weight decay of matrices; 0 means none; -1 means the optimizer's default, 0.1 for adamw")
	f.StringVar(&l.schedule, "schedule", cosine,
		"learning rate after the warmup: cosine or linear (both to a tenth of the peak), or constant")
	f.IntVar(&l.warmup, "warmup", automatic,
		"number of warmup steps; 0 means none; -1 means a tenth of the steps, at most 100")

	completeFlag(c, "optimizer", optim.ChoiceNames()...)
	completeFlag(c, "schedule", scheduleNames...)
}

// notAdapters is the rule of --weight-decay.
func notAdapters(f *pflag.FlagSet) string {
	return notWith("adapters", "", "because adapters do not decay")(f)
}

func (o *trainOptions) checkLearning() error {
	l := &o.learning
	switch {
	case l.decay != automatic && !(l.decay >= 0) || math.IsInf(l.decay, 1):
		return fmt.Errorf("--weight-decay is %v, want a finite number of at least 0", l.decay)
	case l.warmup < automatic:
		return fmt.Errorf("--warmup is %d, want at least 0", l.warmup)
	case !(o.train.Clip >= 0) || math.IsInf(o.train.Clip, 1):
		return fmt.Errorf("--clip is %v, want a finite number of at least 0", o.train.Clip)
	case !(o.lr > 0) || math.IsInf(o.lr, 1):
		return fmt.Errorf("--lr is %v, want a finite number above 0", o.lr)
	case o.train.Budget.Time == 0 && l.warmup >= o.train.Steps:
		return fmt.Errorf("--warmup is %d, want fewer steps than --steps, %d", l.warmup, o.train.Steps)
	}

	if _, err := o.newOptimizer(); err != nil {
		return err
	}

	return o.setSchedule()
}

// rate returns the default peak learning rate.
func (l *learning) rate() float64 {
	choice, err := optim.ByName(l.optimizer)
	if err != nil {
		return l.base // newOptimizer returns the error
	}
	return l.base * choice.Rate
}

// newOptimizer returns the optimizer of a run.
func (o *trainOptions) newOptimizer() (optim.Partial, error) {
	choice, err := optim.ByName(o.learning.optimizer)
	if err != nil {
		return nil, fmt.Errorf("--optimizer: %w", err)
	}

	// The first group that matches a parameter applies. Norms, biases and the weights of seeds do not
	// decay.
	opts := []optim.Option{optim.WithGroup(optim.NameContains("norm", "bias", "kasmina"), optim.Decay(0))}
	if o.learning.decay != automatic {
		opts = append(opts, optim.WithGroup(optim.Vectors, optim.Decay(0)),
			optim.WithGroup(func(string, []int) bool { return true }, optim.Decay(o.learning.decay)))
	}

	return choice.New(o.lr, opts...)
}

// setSchedule sets the learning rate schedule for the steps or the time of a run.
func (o *trainOptions) setSchedule() (err error) {
	timed := o.train.Budget.Time != 0
	warmup := o.learning.warmup
	switch {
	case warmup != automatic:
	case timed:
		warmup = timedWarmup
	default:
		warmup = min(longestWarmup, o.train.Steps/10)
	}

	var annealing optim.Annealing
	switch o.learning.schedule {
	case cosine:
		annealing, err = optim.CosineAnnealing(floor)
	case linear:
		annealing, err = optim.LinearAnnealing(0, floor)
	case constant:
	default:
		err = fmt.Errorf("--schedule is %.40q, want %s", o.learning.schedule,
			strings.Join(scheduleNames, ", "))
	}
	if err != nil {
		return err
	}

	o.warmup = warmup
	if o.train.Schedule, err = optim.Warmup(o.lr, warmup); err != nil {
		return err
	}

	switch {
	case timed:
		o.train.Steps, o.train.Annealing = 0, annealing
	case o.learning.schedule == cosine:
		o.train.Schedule, err = optim.WarmupCosine(o.lr, o.lr*floor, warmup, o.train.Steps)
	case o.learning.schedule == linear:
		rise, total := o.train.Schedule, o.train.Steps
		o.train.Schedule = func(step int) float64 {
			return rise(step) * annealing(float64(step-warmup)/float64(total-warmup))
		}
	}

	return err
}

// describe prints the settings of the optimizer and the memory of its moments.
func (o *trainOptions) describe(w io.Writer, t *llm.Trainer) error {
	config := t.Model.Config
	optimizer, err := o.newOptimizer()
	if err != nil {
		return err
	}

	decay := optimizer.Rule("model.layers.0.mlp.up_proj.weight", []int{2, 2}).Decay
	if o.adapters.where != "" {
		decay = 0
	}

	clip := "no limit of gradients"
	if o.train.Clip > 0 {
		clip = fmt.Sprintf("gradients clipped to a norm of %v", o.train.Clip)
	}

	course := "constant"
	if o.learning.schedule != constant {
		course = o.learning.schedule + " to a tenth"
	}

	moments := optim.MomentBytes(optimizer, func(yield func(string, []int) bool) {
		for name, shape := range config.Parameters() {
			if o.train.Learns(name) && !yield(name, shape) {
				return
			}
		}
	}, 4)

	if _, err := fmt.Fprintf(w, "settings  %s, learning rate %.3g (%s of warmup, then %s), weight decay %v, "+
		"%s, %s of %d tokens per step\n", o.learning.optimizer, o.lr, plural(o.warmup, "step"), course, decay, clip,
		plural(o.train.Batch*o.train.Accumulate, "sequence"), o.seq); err != nil || o.printPlan(w, t) || moments == 0 {
		return err
	}
	_, err = fmt.Fprintf(w, "memory    %s for the optimizer's moments\n", sizeText(int64(moments)))
	return err
}

// errNoBest is the error of --keep-best with adapters.
var errNoBest = errors.New("--keep-best has no effect with --adapters, which are merged when the run ends: " +
	"leave one of them out")
