package llm

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/settings"
	"github.com/kasmina-go/kasmina/llm/model"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// Parallel is an engine that trains a model together with those of other processes, its ranks, each
// of which has the same model, data, settings and callbacks. The batches of a step are divided
// among them. Package llm/parallel has one.
//
// All ranks call Batches, Update, Exchange and Gather in the same order, and a trainer of such an
// engine sees to it that they decide alike. What is submitted to the lattices of one takes effect
// at all between the same two steps, the controller and the clock of rank 0 hold for all, and where
// one fails or is asked to stop, all end behind the same step. Rank 0 alone writes checkpoints.
type Parallel interface {
	Engine
	// Rank counts from 0 to Ranks−1.
	Rank() int
	Ranks() int
	// Batches gathers the gradients of n batches, in the place of Gradients, and returns their
	// losses. next returns one batch after the other, in memory that it uses again.
	Batches(n int, next func() (data.Batch, error)) (losses []float64, err error)
	// Exchange hands a value to all ranks, and returns those of all, by rank.
	Exchange(value []byte) ([][]byte, error)
	// Gather makes the optimiser's state on this host that of the whole model.
	Gather() error
	// Own makes the optimiser's state on this host right in the parts that this rank updates, and
	// returns those, in the order in which all ranks' parts stand one behind the other. It waits
	// for no other rank. The optimiser is an [optim.Partial].
	Own() ([]optim.Part, error)
}

// ParallelStepper is an engine of several ranks whose update does not wait on the host for the
// losses of a step. The ranks tell each other of these while it goes on.
type ParallelStepper interface {
	Parallel
	// StepBatches is Batches and Update in one. Its errors are theirs. With none there has been an
	// update unless a loss is not finite. Before the update all ranks have heard the words of all.
	StepBatches(n int, next func() (data.Batch, error), word []byte) (StepResult, error)
}

// StepResult is what a step of several ranks has come to.
type StepResult struct {
	Losses []float64 // of its batches
	Norm   float64   // of the gradient
	Made   bool      // the update has been made, or may have been
	Words  [][]byte  // by rank; nil where they have not agreed on an update
}

// ranks is the trainer's engine if it is one of several, or nil.
func (t *Trainer) ranks() Parallel {
	e, _ := t.engine.(Parallel)
	return e
}

// first reports whether this process is the only one, or rank 0, which writes.
func (t *Trainer) first() bool {
	e := t.ranks()
	return e == nil || e.Rank() == 0
}

// swap hands a value to all ranks as JSON, and returns those of all.
func swap[T any](e Parallel, what string, own T) ([]T, error) {
	text, err := json.Marshal(own)
	if err != nil {
		return nil, err
	}
	texts, err := e.Exchange(append([]byte(what+"\n"), text...))
	if err != nil {
		return nil, err
	}
	all := make([]T, len(texts))
	for r, text := range texts {
		kind, value, _ := bytes.Cut(text, []byte("\n"))
		if string(kind) != what {
			return nil,
				fmt.Errorf("llm: rank %d exchanges %.40q, rank %d %q: all must do the same "+
					"steps, saves and growth", r, kind, e.Rank(), what)
		}
		if err := json.Unmarshal(value, &all[r]); err != nil {
			return nil, fmt.Errorf("llm: rank %d exchanges %.40q: %w", r, kind, err)
		}
	}
	return all, nil
}

// agree returns this rank's error or, where it has none, the first of another's.
func (t *Trainer) agree(err error) error {
	e := t.ranks()
	if e == nil {
		return err
	}
	all, failed := swap(e, "error", textOf(err))
	return firstError(err, all, failed)
}

// textOf is an error for other ranks, empty for none.
func textOf(err error) string {
	if err == nil {
		return ""
	}
	return "!" + err.Error()
}

// firstError is this rank's error, that of the exchange, or the first of another rank.
func firstError(own error, all []string, failed error) error {
	if own != nil || failed != nil {
		return withNews(own, failed)
	}
	for r, text := range all {
		if text != "" {
			return fmt.Errorf("rank %d: %s", r, strings.TrimPrefix(text, "!"))
		}
	}
	return nil
}

// withNews joins errors but for those whose text is in the ones before: where a rank has died, every
// exchange from then on ends with the same.
func withNews(errs ...error) (all error) {
	for _, err := range errs {
		switch {
		case all == nil:
			all = err
		case err != nil && !strings.Contains(all.Error(), err.Error()):
			all = errors.Join(all, err)
		}
	}
	return all
}

// word is what a rank says along with a step, so that others need not be asked behind it.
type word struct {
	Stop    string // why it is to stop; empty for no wish
	Waiting bool   // there are commands
}

// heard is what ranks have said along with the last step, until it has been acted upon.
type heard struct {
	agreed bool // there has been a step that all have agreed on
	word        // of any
}

// stopAsked is why this rank has been asked to stop, nil if it has not.
func (t *Trainer) stopAsked() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.steering.halt != nil {
		return t.steering.halt
	}
	return context.Cause(t.outer)
}

// say is this rank's word.
func (t *Trainer) say() ([]byte, error) {
	t.mu.Lock()
	asked := t.steering.asked > 0
	t.mu.Unlock()
	return json.Marshal(word{textOf(t.stopAsked()), asked || t.Model.Kasmina.Waiting()})
}

// listenTo takes in the words of all.
func (t *Trainer) listenTo(words [][]byte) error {
	t.heard = heard{agreed: words != nil}
	for r, text := range words {
		var w word
		if err := json.Unmarshal(text, &w); err != nil {
			return fmt.Errorf("llm: the word of rank %d: %w", r, err)
		}
		t.heard.Stop = cmp.Or(t.heard.Stop, w.Stop)
		t.heard.Waiting = t.heard.Waiting || w.Waiting
	}
	return nil
}

// spared reports whether nothing is to be exchanged at the end of a step: nobody has commands, and no
// epoch has ended, at which controllers give some.
func (t *Trainer) spared() bool {
	return t.heard.agreed && !t.heard.Waiting && t.last.Step%t.Config.Epoch != 0 && t.replay() == nil
}

// unasked reports whether ranks need not meet between two steps: they meet in the next one, and
// nobody wants to stop. A rank that has failed says so there, where it computes nothing.
func (t *Trainer) unasked(own error) bool {
	h := t.heard
	t.heard = heard{}
	e, ok := t.engine.(ParallelStepper)
	if !ok || !h.agreed || h.Stop != "" || t.last.Last {
		return false
	}
	if own == nil {
		return true
	}
	_, _ = e.StepBatches(t.Config.Accumulate, func() (data.Batch, error) {
		return data.Batch{}, own
	}, nil) // which is this error, or that of an exchange that is over
	return false
}

// behind is what a rank says behind a step or an event.
type behind struct {
	Err, Stop string
}

// between ends what lies between two steps: where a rank has failed, or has been asked to stop, all
// do so here.
func (t *Trainer) between(err error) error {
	e := t.ranks()
	if e == nil || t.unasked(err) {
		return err
	}
	outer := t.stopAsked()
	all, failed := swap(e, "between steps", behind{textOf(err), textOf(outer)})
	errs := make([]string, len(all))
	for r, b := range all {
		errs[r] = b.Err
	}
	if err := firstError(err, errs, failed); err != nil {
		return err
	}
	for r, b := range all {
		if b.Stop == "" {
			continue
		}
		if outer == nil {
			outer = fmt.Errorf("%w at rank %d: %s", context.Canceled, r,
				strings.TrimPrefix(b.Stop, "!"))
		}
		t.cancel(outer)
		break
	}
	return nil
}

// settled is what a rank says at the end of a step: why it cannot be, or what it was asked to do.
type settled struct {
	Err      string
	Commands [][]state.Command
	Saves    int // that have been asked for
}

// settle ends a step: it carries out the commands that have been submitted, at any rank, or steer.
func (t *Trainer) settle(err error) error {
	e := t.ranks()
	if e == nil {
		if err == nil {
			err = t.steer()
			t.Model.Kasmina.Apply()
		}
		return err
	}
	if t.spared() {
		return err
	}
	exchange := func(own [][]state.Command) (every [][]state.Command, at int, _ error) {
		all, failed := swap(e, "commands", settled{textOf(err), portable(own),
			t.takeAsked()})
		errs := make([]string, len(all))
		for r, s := range all {
			if r == e.Rank() {
				at = len(every)
			}
			errs[r], every = s.Err, append(every, s.Commands...)
			t.addSaves(s.Saves)
		}
		return every, at, firstError(err, errs, failed)
	}
	if err != nil {
		_, _, err := exchange(nil)
		return err
	}
	return t.Model.Kasmina.ApplyShared(exchange)
}

// portable are commands as other ranks can read them. One that they cannot, such as with a strategy
// that no file could hold, is one that is refused everywhere.
func portable(own [][]state.Command) [][]state.Command {
	for i, commands := range own {
		if _, err := json.Marshal(commands); err != nil {
			own[i] = []state.Command{{Action: state.Move, Layer: -1,
				Why: "other ranks cannot read it: " + err.Error()}}
		}
	}
	return own
}

// gatherState makes the optimiser's state that of the whole model.
func (t *Trainer) gatherState() error {
	if e := t.ranks(); e != nil {
		return e.Gather()
	}
	return nil
}

// settleInTurn is settle outside of a step.
func (t *Trainer) settleInTurn() error {
	defer model.TakeToChange(t.Model)()
	return t.settle(nil)
}

// shared returns rank 0's value, or at the only one its own.
func shared[T any](t *Trainer, what string, own T) (T, error) {
	e := t.ranks()
	if e == nil {
		return own, nil
	}
	all, err := swap(e, what, own)
	if err != nil {
		return own, err
	}
	return all[0], nil
}

// stand is what ranks must have in common when a run begins.
type stand struct {
	Step, Steps int
	Settings    *settings.Settings
	Loader      data.LoaderState
	Config      Config
	Lattices    uint32
	Params      uint32
	Documents   bool
}

// compare returns an error that names a rank whose run is another one than rank 0's, and in what.
func (t *Trainer) compare() error {
	e := t.ranks()
	if e == nil {
		return nil
	}
	err := model.Pull(t.Model)
	own := stand{Step: t.last.Step, Steps: t.Config.Steps, Settings: t.settings(),
		Loader: t.Loader.State(),
		Config: t.Model.Config, Lattices: t.Model.Kasmina.Digest(),
		Documents: t.Loader.KnowsDocuments()}
	for _, p := range t.Model.Params {
		own.Params = crc32.Update(own.Params, crc32.IEEETable, safetensors.Memory(p.Value.Data()))
	}
	if err := t.agree(err); err != nil {
		return err
	}
	all, err := swap(e, "the run", own)
	if err != nil {
		return err
	}
	for r, other := range all {
		if diff := all[0].differences(other); len(diff) > 0 {
			return fmt.Errorf("rank %d does not train as rank 0 (here) does: %s: start all with "+
				"the same data, options and checkpoint", r, strings.Join(diff, "; "))
		}
	}
	return nil
}

// differences names what is other there.
func (here stand) differences(there stand) []string {
	diff := settings.Fields(here.Config, there.Config)
	diff = append(diff, here.Settings.DifferencesOfRanks(*there.Settings)...)
	for _, d := range []struct {
		what string
		same bool
	}{
		{"the text", here.Loader.Data == there.Loader.Data},
		{"what is known of documents", here.Documents == there.Documents},
		{"the loader's place", here.Loader == there.Loader ||
			here.Loader.Data != there.Loader.Data},
		{"the number of steps made", here.Step == there.Step},
		{"TrainConfig.Steps", here.Steps == there.Steps},
		{"the state of the lattices", here.Lattices == there.Lattices},
		{"the values of the parameters", here.Params == there.Params},
	} {
		if !d.same {
			diff = append(diff, d.what+" is another")
		}
	}
	return diff
}

// spentTime is what a step has taken, by the clock of rank 0.
func (t *Trainer) spentTime(began time.Time) (time.Duration, error) {
	return shared(t, "time", time.Since(began))
}
