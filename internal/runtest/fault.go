package runtest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/state"
)

// fault repeats the run with a failing operation, and continues after the failure.
func (k *checker) fault() {
	f := k.Fault
	switch {
	case f == nil:
	case isOf(f.Op, "rank"):
		k.rankFault()
	case f.Op == duringSample:
		k.resumeDuringSample()
	case slices.Contains(k.machine.Limits.Faults, f.Op):
		k.faultOfMachine()
	case f.Resuming:
		k.faultOfResume()
	default:
		k.faultOfRun()
	}
}

// call returns which of n calls fails, counted from 1. It returns 0 if n is 0.
func (f *Fault) call(n int) int {
	if n == 0 {
		return 0
	}
	return 1 + int(f.At*float64(n))
}

func (f *Fault) wraps() error {
	if f.Diverged {
		return llm.ErrDiverged
	}
	return nil
}

// faultCase returns the case for a run with a failing operation. It omits goroutines that make calls at
// unpredictable times.
func (k *checker) faultCase() Case {
	c := k.Case.clone()
	c.Callbacks = slices.DeleteFunc(c.Callbacks, func(b string) bool {
		return b == "readers" ||
			b == "scrub"
	})
	return c
}

// faultOfRun makes a call fail during a run.
func (k *checker) faultOfRun() {
	f, c := k.Fault, k.faultCase()
	calls := k.plain.in.count(f.Op)
	if len(c.Callbacks) < len(k.Callbacks) { // count again without the calls of the omitted goroutines
		r := k.rig(c, nil)
		r.in.startCounting()
		k.must(Traceless, "a run with fewer callbacks", r.run())
		calls = r.in.count(f.Op)
		k.closed(r)
	}

	r := k.rig(c, nil)
	r.in.arm(f, f.call(calls))
	err := r.run()
	if !r.in.disarm() {
		k.closed(r)
		return
	}

	k.must(Unharmed, "repairing the folder", r.repair())
	what := fmt.Sprintf("a run in which call %d of %d of %s fails, after step %d",
		f.call(calls), calls, f.Op, r.tr.Step())
	if f.Lasting {
		what = fmt.Sprintf("a run in which %s fails from call %d of %d on, after step %d", f.Op, f.call(calls), calls,
			r.tr.Step())
	}

	stops := isOf(f.Op, "cancel") || isOf(f.Op, "stop")
	switch {
	case f.Lasting && r.abandons():
		k.savesOrRefuses(r, what)
		k.ended("growth is abandoned")
	case err == nil && (stops || f.Op == "ReadTokens"): // the loader may have retried
		k.same(Unharmed, what, r, -1, true)
		k.ended("the run completes anyway")
	case err == nil:
		k.absorbed(r, what)
		k.ended("a growth is abandoned")
	default:
		if errors.Is(err, llm.ErrDiverged) && k.straight.unstable() {
			k.closed(r)
			k.ended("a growth is abandoned, and an unstable run diverges without it")
			return
		}
		if !errors.Is(err, ErrInjected) && !isOf(f.Op, "stop") && !isOf(f.Op, "checkpoint") && !idle(err) {
			k.fail(Unharmed, "%s ends with a different error: %w", what, err)
		}
		k.goesOn(r, what, err)
	}

	k.checked(Unharmed)
	k.closed(r)
}

// abandons reports whether a run has abandoned growth because of a failure.
func (r *rig) abandons() bool {
	return slices.ContainsFunc(r.told, func(t told) bool { return t.err != nil })
}

// savesOrRefuses checks the end of a run that has abandoned growth, without knowing which. The trainer must still be
// able to save, or say that it needs a Resume.
func (k *checker) savesOrRefuses(r *rig, what string) {
	if _, err := r.save(); err != nil && !resumeFirst(err) {
		k.fail(Unharmed, "%s: saving the end: %w", what, err)
	}
}

// mostMachineCalls is the approximate number of driver calls in a run.
const mostMachineCalls = 300

// faultOfMachine makes a driver call of the machine fail.
func (k *checker) faultOfMachine() {
	f := k.Fault
	r := k.rig(k.faultCase(), nil)
	r.in.startCounting()
	at := 1 + int(f.At*f.At*mostMachineCalls) // prefer early calls, which all runs make
	happened := k.session.Fail(f.Op, at)
	err := r.run()
	if !happened() {
		k.closed(r)
		return
	}

	what := fmt.Sprintf("a run in which call %d of %s fails, after step %d", at, f.Op, r.tr.Step())
	switch {
	case err == nil && r.abandons(): // it is unknown which growth
		_, err := r.save()
		k.must(Unharmed, what+": saving the end", err)
		k.ended("a growth is abandoned")
	case err == nil: // the machine used an alternative
		k.same(Unharmed, what, r, -1, true)
		k.ended("the run continues")
	default:
		k.goesOn(r, what, err)
	}

	k.checked(Unharmed)
	k.closed(r)
}

// ended sets the outcome of the fault.
func (k *checker) ended(how string) { k.Outcome = how }

// absorbed checks a run that has continued after a failure. The trainer must have reported the failure
// and abandoned a growth. Otherwise, the run must equal a run with orders to abandon that growth.
func (k *checker) absorbed(r *rig, what string) {
	if !slices.ContainsFunc(r.told, func(t told) bool { return errors.Is(t.err, ErrInjected) }) {
		k.fail(Unharmed, "%s: the failure is not reported", what)
	}

	gave := r.in.moves()
	other := k.rig(k.faultCase(), nil)
	other.extra, other.in.dropped = gave, r.dropped
	for _, i := range slices.Backward(r.refused) {
		other.Orders = slices.Delete(slices.Clone(other.Orders), i, i+1)
	}

	if len(r.dropped) > 0 && k.Growth.Controller != "script" && k.Growth.Controller != "needs" {
		k.closed(other)
		return // other controllers cannot omit a command
	}

	k.must(Unharmed, "a run with orders to abandon the growth", other.run())
	if other.in.omitted < len(r.dropped) {
		k.closed(other)
		return // a command of the governor, which no controller can omit
	}
	for _, m := range gave {
		if m.to != state.Cancelled && m.to != state.RolledBack {
			k.fail(Unharmed, "%s: seed %d of layer %d becomes %v", what, m.seed, m.layer, m.to)
		}
	}

	want, err := other.save()
	k.must(Unharmed, what, err)
	end, err := r.save()
	k.must(Unharmed, what+": saving the end", err)
	if diff := differences(want, end, true); diff != "" {
		k.fail(Unharmed, "%s and %v are abandoned; it ends with a different file than a run with orders to "+
			"abandon them: %s", what, gave, diff)
	}

	k.closed(other)
}

// goesOn checks the state after a run that ended with an error, and continues from there.
func (k *checker) goesOn(r *rig, what string, cause error) {
	if idle(cause) {
		k.ended("the only growth is abandoned, and nothing is left to train")
		return
	}

	step := r.tr.Step()
	now, refused := r.save()
	ordered := r.scripted >= step || !slices.ContainsFunc(k.Orders, func(o Order) bool {
		return o.Step == step
	})
	ordered = ordered && !r.unjudged(step, k.straight.tr.Step())
	if k.Train.Merge && step == k.straight.tr.Step() {
		ordered = ordered && r.mergedAt == step
	}
	var broken panicked
	// Reported growth is not undone if the following step fails. Growth that a diverged step has taken back is
	// reported before the step is repeated.
	undone := !slices.ContainsFunc(k.straight.told, func(t told) bool {
		return strings.HasPrefix(t.text, "reshaped") &&
			(t.step == step+1 || t.step == step && errors.Is(t.err, llm.ErrDiverged))
	})
	if path := k.straight.files[step]; refused == nil && ordered && undone && path != "" {
		want, err := os.ReadFile(path)
		k.must(Unharmed, what, err)
		// At the end of a run, fossilized seeds become part of the model.
		ended := step == k.straight.tr.Step() && differences(k.end, now, true) == ""
		if diff := differences(want, now, true); diff != "" && !ended {
			k.fail(Unharmed, "%s (%.150v), has changed the trainer: %s", what, cause, diff)
		}
	} else if refused != nil && !resumeFirst(refused) && !errors.As(cause, &broken) && !(step == 0 && unmeasured(refused)) {
		k.fail(Unharmed, "%s (%.150v): an unusable trainer returns %w", what, cause, refused)
	}

	// After a panic, a checkpoint that is still being written in the background is not reported.
	if r.written >= 0 && r.checkpoint != "" && !(k.Checkpoint.Background && errors.As(cause, &broken)) {
		other := k.rig(k.faultCase(), nil)
		more := fmt.Sprintf("%s (%.150v): resumed from its checkpoint of step %d", what, cause,
			r.written)
		k.must(Unharmed, more, other.resume(r.checkpoint, r.written, r.ordered))
		k.must(Unharmed, more, other.run())
		k.same(Unharmed, more, other, r.written, true)
		k.closed(other)
		k.ended("a new trainer continues")
	}

	again := r.run()
	more := fmt.Sprintf("%s (%.150v): run again", what, cause)
	if again != nil && resumeFirst(again) {
		path, from := k.straight.fileBefore(min(step, len(k.straight.files)-1))
		more = fmt.Sprintf("%s (%.150v): the same trainer, resumed at step %d", what, cause, from)
		k.must(Unharmed, more, r.resume(path, from, true))
		again = r.run()
		k.ended("the same trainer resumes")
	} else {
		k.ended("the same trainer continues")
	}

	k.must(Unharmed, more, again)
	end, err := r.save()
	k.must(Unharmed, more+": saving the end", err)
	if diff := differences(k.end, end, true); diff != "" {
		k.fail(Unharmed, "%s ends with a different file: %s", more, diff)
	}
}

// resumeFirst reports whether an error tells the user to resume from a checkpoint.
func resumeFirst(err error) bool {
	return strings.Contains(strings.ToLower(err.Error()), "resume")
}

// faultOfResume makes a call fail while a checkpoint is read.
func (k *checker) faultOfResume() {
	f, c := k.Fault, k.faultCase()
	path, step := k.straight.fileBefore(min(int(f.At*float64(k.straight.tr.Step()+1)), k.straight.tr.Step()))
	_, inside := math.Modf(f.At * 97)
	prepared := func() *rig {
		r := k.rig(c, nil)
		if f.Early || c.measuresFirst() { // resume in a trainer that has already trained
			k.must(Unharmed, "a preceding run", r.run())
		}
		return r
	}

	counter := prepared()
	counter.in.startCounting()
	k.must(Resumes, "resuming", counter.resume(path, step, true))
	calls := counter.in.count(f.Op)
	k.closed(counter)
	if calls == 0 {
		return
	}

	at := (&Fault{At: inside}).call(calls)
	r := prepared()
	before, err := r.save()
	k.must(Unharmed, "saving", err)
	r.in.arm(f, at)
	err = r.resume(path, step, true)
	if !r.in.disarm() {
		k.closed(r)
		return
	}

	what := fmt.Sprintf("a Resume at step %d in which call %d of %d of %s fails", step, at, calls,
		f.Op)
	if !errors.Is(err, ErrInjected) {
		k.fail(Unharmed, "%s ends with %w", what, err)
	}

	after, refused := r.save()
	if refused == nil {
		if diff := differences(before, after, false); diff != "" {
			k.fail(Unharmed, "%s has changed the trainer: %s", what, diff)
		}
	} else if !resumeFirst(refused) {
		k.fail(Unharmed, "%s: an unusable trainer returns %w", what, refused)
	}

	k.must(Unharmed, what+": once more", r.resume(path, step, true))
	clear(r.figures)
	r.told = nil
	k.must(Unharmed, what+": the resumed run", r.run())
	k.same(Unharmed, what+", resumed again", r, step, true)
	k.ended("the same trainer resumes")
	k.checked(Unharmed)
	k.closed(r)
}

// rankFault makes one of several ranks fail, and continues with the same number of ranks.
func (k *checker) rankFault() {
	c := k.onRanks()
	if c == nil || k.machine.RanksDiffer {
		return
	}

	f, ranks := k.Fault, k.Ranks
	fails := 1 + int(k.Seed%uint64(ranks-1))
	calls := k.straight.tr.Step()
	switch f.Op {
	case "rank Gradients":
		calls *= max(1, k.Train.Accumulate)
	case "rank Pull":
		calls = k.plain.in.count("Pull")
	}

	var failing *rig
	first, _, errs := k.team(*c, func(r *rig) {
		r.in.startCounting()
		if r.rank == fails {
			failing = r
			r.in.arm(f, f.call(calls))
		}
	}, "")

	if failing == nil || !failing.in.disarm() {
		return
	}

	what := fmt.Sprintf("a run on %d ranks where rank %d fails after step %d", ranks, fails,
		failing.tr.Step())
	if f.Op == "rank Pull" && errors.Join(errs...) == nil {
		k.ended("a growth is abandoned on all ranks")
		k.checked(Unharmed)
		return
	}

	for rank, err := range errs {
		if err == nil {
			k.fail(Unharmed, "%s: rank %d receives no error", what, rank)
		}
		if !strings.Contains(err.Error(), ErrInjected.Error()) {
			k.fail(Unharmed, "%s: the error of rank %d omits the cause: %w", what, rank, err)
		}
	}

	if !errors.Is(errs[fails], ErrInjected) {
		k.fail(Unharmed, "%s: the error of the failing rank is %w", what, errs[fails])
	}

	from := ""
	if first.written >= 0 {
		from = first.checkpoint
	}

	ordered := first.ordered
	_, end, errs := k.team(*c, func(r *rig) { r.resumedOrdered = ordered }, from)
	for rank, err := range errs {
		k.must(Unharmed, fmt.Sprintf("%s: restarted from step %d: rank %d", what, first.written,
			rank), err)
	}

	if diff := differences(k.end, end, true); diff != "" {
		k.fail(Unharmed, "%s, restarted from step %d, ends with a different file: %s", what,
			first.written, diff)
	}

	k.ended("new ranks continue")
	k.checked(Unharmed)
}

// duringSample is the fault that makes another goroutine call Resume while a callback samples.
const duringSample = "Resume during SampleText"

// resumeDuringSample resumes at an earlier step while a callback samples.
func (k *checker) resumeDuringSample() {
	c := k.faultCase()
	r := k.rig(c, nil)
	steps := k.straight.tr.Step()
	at := 1 + int(k.Fault.At*float64(steps-1))
	to := at * int(k.Seed%3) / 2 % (at + 1)
	back := make(chan error, 1)
	jumped := false
	r.tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd && e.Step == at && !jumped {
			go func() { back <- r.tr.Resume(context.Background(), k.straight.files[to]) }()
		}
		return nil
	}, llm.SampleText(r.tr, letters{}, "a", 200, sampler.Config{Temperature: 1}, "", 1),
		func(e llm.Event) error {
			if e.Kind == llm.StepEnd && e.Step == at && !jumped {
				jumped = true
				err := <-back
				r.scripted = to
				r.frozen.forget()
				return err
			}
			return nil
		})

	what := fmt.Sprintf("a run reset to step %d while a callback samples after step %d",
		to, at)
	k.must(Unharmed, what, r.run())
	end, err := r.save()
	k.must(Unharmed, what, err)
	if diff := differences(k.end, end, true); diff != "" {
		k.fail(Unharmed, "%s ends with a different file: %s", what, diff)
	}

	k.ended("the run continues from there")
	k.checked(Unharmed)
	k.closed(r)
}
