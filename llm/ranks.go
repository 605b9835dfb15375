package llm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/ranks"
	"github.com/kasmina-go/kasmina/state"
)

// A team represents the trainer's position among several ranks. For a single process, its methods
// exchange nothing.
type team struct {
	t *Trainer

	// If several ranks train, the context of the run is canceled at all ranks after the same step, and
	// outer is the context passed to Run. The trainer's mu guards both fields.
	outer  context.Context
	cancel context.CancelCauseFunc

	// meetings report whether a callback that has yet to receive the StepEnd event will make all
	// ranks meet. They are called on the goroutine of Run; the trainer's mu guards the list.
	meetings []func(stepEnd Event) bool

	// alone is a failure to access the parameters. It has made this rank reject a command that other ranks may
	// have carried out.
	alone error
}

// failedAlone records a failure to access the parameters, if there are other ranks.
func (r *team) failedAlone(cause error) {
	if r.ranks() != nil {
		r.alone = cmp.Or(r.alone, cause)
	}
}

// agreeOnCommands is called by all ranks after they have carried out commands. err is this rank's error, or nil. If a
// rank has failed, or could not access the parameters that a command needs, every rank receives an error.
func (r *team) agreeOnCommands(err error) error {
	if r.alone != nil && err == nil {
		err = fmt.Errorf("a command has been rejected on this rank alone: %w", r.alone)
	}
	r.alone = nil
	return r.agree(err)
}

// ranks returns the trainer's engine if it is one of several ranks, and nil otherwise.
func (r *team) ranks() Parallel {
	e, _ := r.t.driver.engine.(Parallel)
	return e
}

// writes reports whether this process writes files, because it is the only one or rank 0.
func (r *team) writes() bool {
	e := r.ranks()
	return e == nil || e.Rank() == 0
}

// agree returns this rank's error or else the first error of another rank.
func (r *team) agree(err error) error { return agreed(r.ranks(), err) }

// agreed is agree for the ranks of an engine, which may be nil.
func agreed(e Parallel, err error) error {
	if e == nil {
		return err
	}
	all, failed := ranks.Swap(e, "error", ranks.TextOf(err))
	return ranks.FirstError(err, all, failed)
}

// busy declares long work outside a step until done is called.
func (r *team) busy(what string) (done func()) { return busy(r.t.driver.engine, what) }

// busy declares long work to an engine's other ranks, if there are any.
func busy(e Engine, what string) (done func()) {
	if e, ok := e.(Busier); ok {
		return e.Busy(what)
	}
	return func() {}
}

// stopAsked returns the reason why this rank should stop, or nil.
func (t *Trainer) stopAsked() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.steering.halt != nil {
		return t.steering.halt
	}
	return context.Cause(t.team.outer)
}

// wishOf converts the error that stops a run to the corresponding request, or nil to no request.
func wishOf(err error) ranks.Wish {
	var why halted
	switch {
	case err == nil:
		return ranks.Wish{}
	case errors.As(err, &why):
		return ranks.Wish{End: true, Asked: true, Why: string(why)}
	}
	return ranks.Wish{End: true, Why: err.Error()}
}

// say returns the word that this rank sends along with a step.
func (r *team) say() ([]byte, error) {
	return json.Marshal(ranks.Word{Stop: ranks.TextOf(r.t.stopAsked()),
		Waiting: r.t.steering.requested() || r.t.Model.Kasmina.Waiting()})
}

// unsteered reports whether seeds keep their stages at the end of the last step, because no rank has commands, and
// neither the controller nor a record is due to give any. The result is the same on all ranks.
func (r *team) unsteered(h ranks.Heard) bool {
	return !h.Waiting && r.t.last.Step%r.t.Config.Epoch != 0 && r.t.growth.replay() == nil
}

// spared reports whether the exchange at the end of a step can be skipped.
func (r *team) spared() bool { return r.t.heard.Agreed && r.unsteered(r.t.heard) }

// takeHeard returns the trainer's ranks, or nil for a single process, and the ranks' words from the last
// step, and clears the words. It locks the model, because a Resume on another goroutine may replace the
// engine.
func (r *team) takeHeard() (Parallel, ranks.Heard) {
	defer take(r.t.Model)()
	h := r.t.heard
	r.t.heard = ranks.Heard{}
	return r.ranks(), h
}

// mayGrow reports whether seeds may have changed their stages at the end of the last step, so that all ranks may meet
// before the next step to change the model. The result is the same on all ranks.
func (r *team) mayGrow(h ranks.Heard) bool {
	defer take(r.t.Model)()
	return r.t.Model.Kasmina.Layers() > 0 && !r.unsteered(h)
}

// unasked reports whether ranks can skip the exchange between two steps, because they will meet in the
// next step and none wants to stop.
//
// A rank with a failed callback takes part in the next meeting of the other ranks, which is the next step
// unless a callback calls a meeting earlier.
func (r *team) unasked(p Parallel, h ranks.Heard, own error) bool {
	e, ok := p.(ParallelStepper)
	if !ok || !h.Agreed || h.Stop != "" || r.t.Last().Last || r.mayGrow(h) {
		return false
	}

	if own != nil && !r.meetingAhead() {
		r.refuseStep(e, own)
		return false
	}

	return own == nil
}

// stopNow makes all ranks exchange their requests to stop before the next step, instead of along with it. If
// one rank calls it after a step, all must.
func (r *team) stopNow() {
	defer take(r.t.Model)()
	r.t.heard.Agreed = false
}

// addMeeting registers a callback of the trainer that makes all ranks meet, for example by saving. The
// function reports whether the callback will do so when it receives the given StepEnd event. It must
// return false once the callback has received the event.
func (r *team) addMeeting(ahead func(stepEnd Event) bool) {
	r.t.mu.Lock()
	defer r.t.mu.Unlock()
	r.meetings = append(r.meetings, ahead)
}

// meetingAhead reports whether a callback that has yet to receive the StepEnd event of the last step
// will make all ranks meet.
func (r *team) meetingAhead() bool {
	r.t.mu.Lock()
	e, meetings := r.t.last, r.meetings
	r.t.mu.Unlock()

	e.Kind = StepEnd
	return slices.ContainsFunc(meetings, func(ahead func(Event) bool) bool { return ahead(e) })
}

// refuse makes a step that this rank cannot start fail on all ranks, for the given reason.
func (r *team) refuse(why error) {
	if e := r.ranks(); e != nil {
		r.refuseStep(e, why)
	}
}

// refuseStep takes part in a step of the other ranks without computing anything, so that they receive
// the error why this rank cannot make the step.
func (r *team) refuseStep(e Parallel, why error) {
	next := func() (data.Batch, error) { return data.Batch{}, why }

	// Ignore the error: it is why itself, or the error of a failed exchange.
	if s, ok := e.(ParallelStepper); ok {
		_, _ = s.StepBatches(r.t.Config.Accumulate, next, nil)
	} else {
		_, _ = e.Batches(r.t.Config.Accumulate, next)
	}
}

// between is called between two steps. If a rank has failed or should stop, it makes all ranks stop.
func (r *team) between(err error) error {
	e, heard := r.takeHeard()
	var received *ranks.Failure // by all ranks
	if e == nil || errors.As(err, &received) || r.unasked(e, heard, err) {
		return err
	}

	own := r.t.stopAsked()
	wish, rank, err := ranks.Between(e, err, wishOf(own))
	switch {
	case !wish.End:
	case rank == e.Rank():
		r.cancel(own)
	case wish.Asked:
		r.cancel(halted(wish.Why))
	default:
		r.cancel(fmt.Errorf("%w at rank %d: %s", context.Canceled, rank, wish.Why))
	}

	return err
}

// settle completes a step, which has failed if err is not nil. It grants requests if granting is true,
// and then carries out the commands submitted to Model.Kasmina. Several ranks carry out the requests and
// commands of all ranks.
func (r *team) settle(err error, granting bool) error {
	e := r.ranks()
	if e == nil {
		return r.settleAlone(err, granting)
	}

	if r.spared() {
		return err
	}

	var own []pendingRequest
	if granting && err == nil {
		own = r.t.steering.takeRequests()
	}

	given := false
	exchange := func(commands [][]state.Command) ([][]state.Command, int, error) {
		asked, err := ranks.Settle(e, err, commands, portable(own))
		if err != nil {
			refuse(own, err)
			return nil, 0, err
		}
		given = len(asked.Commands)+len(asked.Requests) > 0
		err = r.t.steering.grantAll(requestsOf(asked.Requests), own, asked.OwnRequests)
		return asked.Commands, asked.OwnCommands, err
	}

	if err != nil {
		_, _, err := exchange(nil)
		return err
	}

	err = r.t.Model.Kasmina.ApplyShared(exchange)
	if !given {
		return err
	}
	return r.agreeOnCommands(err)
}

// settleAlone is settle for a single process.
func (r *team) settleAlone(err error, granting bool) error {
	if err != nil {
		return err
	}

	// A failed step would not save the effect of commands in a checkpoint, so they keep waiting.
	if granting {
		own := r.t.steering.takeRequests()
		if err := r.t.steering.grantAll(plain(own), own, 0); err != nil {
			return err
		}
	}

	r.t.Model.Kasmina.Apply()
	return nil
}

// settleInTurn is settle between steps.
func (r *team) settleInTurn() error {
	defer takeToChange(r.t.Model)()
	return r.settle(nil, false)
}

// shared returns rank 0's value. For a single process it returns own.
func shared[T any](t *Trainer, what string, own T) (T, error) {
	e := t.team.ranks()
	if e == nil {
		return own, nil
	}
	all, err := ranks.Swap(e, what, own)
	if err != nil {
		return own, err
	}
	return all[0], nil
}

// A rankModel describes a model, apart from its parameters and lattices, for comparing ranks.
type rankModel struct {
	Config
	Planted        []Planted
	KasminaOptions KasminaOptions
}

// compare returns an error that names a rank with a different run than rank 0, and the differences.
func (r *team) compare() error {
	e := r.ranks()
	if e == nil {
		return nil
	}

	err := pull(r.t.Model)
	own := ranks.Stand[rankModel]{Step: r.t.last.Step, Steps: r.t.Config.Steps, Settings: r.t.settings(),
		Loader: r.t.Loader.State(),
		Config: rankModel{r.t.Model.Config, r.t.Model.Planted,
			r.t.Model.KasminaOptions}, Lattices: r.t.Model.Kasmina.Digest(),
		Documents: r.t.Loader.KnowsDocuments()}
	for _, p := range r.t.Model.Params {
		if r.t.Model.Base.Has(p.Name) {
			own.Params = crc32.Update(own.Params, crc32.IEEETable, r.t.Model.digestOf(p))
			continue
		}
		own.Params = crc32.Update(own.Params, crc32.IEEETable, safetensors.Memory(p.Value.Data()))
	}

	if err := r.agree(err); err != nil {
		return err
	}

	all, err := ranks.Swap(e, "the run", own)
	if err != nil {
		return err
	}

	for r, other := range all {
		if diff := all[0].Differences(other); len(diff) > 0 {
			return fmt.Errorf("rank %d trains differently from rank 0 (here): %s: start all with "+
				"the same data, options and checkpoint", r, strings.Join(diff, "; "))
		}
	}

	return nil
}

// spentTime returns the duration of a step, measured by rank 0's clock.
func (r *team) spentTime(began time.Time) (time.Duration, error) {
	return shared(r.t, "time", time.Since(began))
}

// portable returns requests in the form that ranks exchange.
func portable(requests []pendingRequest) []ranks.Request {
	all := make([]ranks.Request, len(requests))
	for i, r := range requests {
		all[i] = ranks.Request(r.Request)
	}
	return all
}

// requestsOf converts exchanged requests back.
func requestsOf(exchanged []ranks.Request) []Request {
	all := make([]Request, len(exchanged))
	for i, r := range exchanged {
		all[i] = Request(r)
	}
	return all
}
