package llm

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/ranks"
	"github.com/kasmina-go/kasmina/state"
)

// ranks is the trainer's engine if it is one of several, or nil.
func (t *Trainer) ranks() Parallel {
	e, _ := t.engine.(Parallel)
	return e
}

// writes reports whether this process is the only one, or rank 0, which writes.
func (t *Trainer) writes() bool {
	e := t.ranks()
	return e == nil || e.Rank() == 0
}

// agree returns this rank's error or, where it has none, the first of another's.
func (t *Trainer) agree(err error) error { return agreed(t.ranks(), err) }

// agreed is agree with the ranks of an engine, which may be nil.
func agreed(e Parallel, err error) error {
	if e == nil {
		return err
	}
	all, failed := ranks.Swap(e, "error", ranks.TextOf(err))
	return ranks.FirstError(err, all, failed)
}

// busy declares long work outside a step until done is called.
func (t *Trainer) busy(what string) (done func()) { return busy(t.engine, what) }

// busy declares long work to the other ranks of an engine that has any.
func busy(e Engine, what string) (done func()) {
	if e, ok := e.(Busier); ok {
		return e.Busy(what)
	}
	return func() {}
}

// stopAsked returns why this rank has been asked to stop, or nil.
func (t *Trainer) stopAsked() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.steering.halt != nil {
		return t.steering.halt
	}
	return context.Cause(t.outer)
}

// say returns this rank's word.
func (t *Trainer) say() ([]byte, error) {
	return json.Marshal(ranks.Word{Stop: ranks.TextOf(t.stopAsked()),
		Waiting: t.requested() || t.Model.Kasmina.Waiting()})
}

// spared reports whether the exchange at the end of a step can be skipped, because no rank has
// commands and no epoch has ended, at which the controller would give some.
func (t *Trainer) spared() bool {
	return t.heard.Agreed && !t.heard.Waiting && t.last.Step%t.Config.Epoch != 0 && t.replay() == nil
}

// takeHeard returns the trainer's ranks, nil for a single process, and what they said along with the
// last step, which it forgets. It takes a turn, since a Resume on another goroutine may replace the
// engine.
func (t *Trainer) takeHeard() (Parallel, ranks.Heard) {
	defer take(t.Model)()
	h := t.heard
	t.heard = ranks.Heard{}
	return t.ranks(), h
}

// unasked reports whether ranks need not meet between two steps, because they meet in the next one
// and none wants to stop. A rank that has failed says so there, where it computes nothing.
func (t *Trainer) unasked(p Parallel, h ranks.Heard, own error) bool {
	e, ok := p.(ParallelStepper)
	if !ok || !h.Agreed || h.Stop != "" || t.Last().Last {
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

// between completes the time between two steps. If a rank has failed or has been asked to stop, all
// ranks stop here.
func (t *Trainer) between(err error) error {
	e, heard := t.takeHeard()
	if e == nil || t.unasked(e, heard, err) {
		return err
	}
	stop, err := ranks.Between(e, err, t.stopAsked())
	if stop != nil {
		t.cancel(stop)
	}
	return err
}

// settle completes a step, which has failed unless err is nil. It grants requests if granting is
// true, and then carries out the commands that were submitted to Model.Kasmina. Several ranks carry
// out the requests and commands of all of them.
func (t *Trainer) settle(err error, granting bool) error {
	e := t.ranks()
	if e == nil {
		return t.settleAlone(err, granting)
	}
	if t.spared() {
		return err
	}

	var own []pendingRequest
	if granting && err == nil {
		own = t.takeRequests()
	}
	exchange := func(commands [][]state.Command) ([][]state.Command, int, error) {
		asked, err := ranks.Settle(e, err, commands, portable(own))
		if err != nil {
			refuse(own, err)
			return nil, 0, err
		}
		err = t.grantAll(requestsOf(asked.Requests), own, asked.OwnRequests)
		return asked.Commands, asked.OwnCommands, err
	}

	if err != nil {
		_, _, err := exchange(nil)
		return err
	}
	return t.Model.Kasmina.ApplyShared(exchange)
}

// settleAlone is settle for a single process.
func (t *Trainer) settleAlone(err error, granting bool) error {
	if err != nil {
		return err
	}

	// Commands that a failed step applied would be in no checkpoint, so they keep waiting.
	if granting {
		own := t.takeRequests()
		if err := t.grantAll(plain(own), own, 0); err != nil {
			return err
		}
	}
	t.Model.Kasmina.Apply()
	return nil
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
	defer takeToChange(t.Model)()
	return t.settle(nil, false)
}

// shared returns rank 0's value, or at the only one its own.
func shared[T any](t *Trainer, what string, own T) (T, error) {
	e := t.ranks()
	if e == nil {
		return own, nil
	}
	all, err := ranks.Swap(e, what, own)
	if err != nil {
		return own, err
	}
	return all[0], nil
}

// compare returns an error that names a rank whose run is another one than rank 0's, and in what.
func (t *Trainer) compare() error {
	e := t.ranks()
	if e == nil {
		return nil
	}
	err := pull(t.Model)
	own := ranks.Stand[Config]{Step: t.last.Step, Steps: t.Config.Steps, Settings: t.settings(),
		Loader: t.Loader.State(),
		Config: t.Model.Config, Lattices: t.Model.Kasmina.Digest(),
		Documents: t.Loader.KnowsDocuments()}
	for _, p := range t.Model.Params {
		own.Params = crc32.Update(own.Params, crc32.IEEETable, safetensors.Memory(p.Value.Data()))
	}
	if err := t.agree(err); err != nil {
		return err
	}
	all, err := ranks.Swap(e, "the run", own)
	if err != nil {
		return err
	}
	for r, other := range all {
		if diff := all[0].Differences(other); len(diff) > 0 {
			return fmt.Errorf("rank %d does not train as rank 0 (here) does: %s: start all with "+
				"the same data, options and checkpoint", r, strings.Join(diff, "; "))
		}
	}
	return nil
}

// spentTime is what a step has taken, by the clock of rank 0.
func (t *Trainer) spentTime(began time.Time) (time.Duration, error) {
	return shared(t, "time", time.Since(began))
}

// portable returns requests in the form in which ranks exchange them.
func portable(requests []pendingRequest) []ranks.Request {
	all := make([]ranks.Request, len(requests))
	for i, r := range requests {
		all[i] = ranks.Request(r.Request)
	}
	return all
}

// requestsOf returns requests that ranks have exchanged.
func requestsOf(exchanged []ranks.Request) []Request {
	all := make([]Request, len(exchanged))
	for i, r := range exchanged {
		all[i] = Request(r)
	}
	return all
}
