package parallel

import (
	"bytes"
	"encoding/gob"
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// result is the result of a batch.
type result struct {
	Loss      float64
	Err       string // empty for none
	NonFinite bool   // the error is op.ErrNonFinite
	Measured  []state.Measured
	Pairs     op.PreferenceFigures // of the batch's preference pairs
}

// unfit reports whether the batch rules out an update.
func (r result) unfit() bool { return r.Err != "" || r.Loss-r.Loss != 0 }

// report is the message of a rank about its batches in a step.
type report struct {
	Word     []byte   // the trainer's message
	Lattices uint32   // digest before the step
	Err      string   // error that prevents the step on this rank
	Unfit    bool     // a batch of this rank rules out an update
	Results  []result // results of the batches of this rank, in order
}

// Worker computes the part of a step that belongs to one rank.
type Worker interface {
	// Compute computes the gradients of a single batch of a round and returns the loss. When it
	// returns, the lattices hold the batch's telemetry.
	Compute(b data.Batch, r Round) (float64, error)
	// Add adds the latest gradients of the round's contributors to their owners' sums, unless Compute
	// has already done so. It may return before the transfer is complete.
	Add(r Round) error
	// Land waits until all transfers are complete.
	Land() error
}

// Round is a part of a step in which each of the first Contributors ranks computes one batch.
type Round struct {
	Contributors int
	First        bool // of the step
}

// Batches computes the batches of a step with a worker on each rank. It implements the method of
// [llm.Parallel].
func (t *Team) Batches(m *llm.Model, w Worker, n int, next func() (data.Batch, error)) ([]float64,
	error) {
	t.steps.Add(1)
	if err := t.progress(); err != nil {
		return nil, err
	}

	own := report{Lattices: m.Kasmina.Digest()}
	loader, err := t.rounds(w, n, next, func(b data.Batch, round Round, i int) {
		own.Results = append(own.Results, compute(m, w, b, round, i))
	})
	if err != nil {
		return nil, err
	}

	if err := w.Land(); err != nil {
		return nil, t.blame(err)
	}

	all, err := t.compared(own, loader)
	if err != nil {
		return nil, err
	}

	return t.take(m, n, all)
}

// rounds reads the n batches of a step, calls each for the batches of this rank, and adds the gradients of
// each round. If the loader fails, this rank stops computing, and rounds returns the error of the loader.
func (t *Team) rounds(w Worker, n int, next func() (data.Batch, error),
	each func(b data.Batch, r Round, i int)) (loader, err error) {
	me, size := t.Rank(), t.Size()
	for i := range n {
		round := Round{min(size, n-i/size*size), i < size}
		if loader == nil {
			var b data.Batch
			if b, loader = next(); loader == nil && i%size == me {
				each(b, round, i)
			}
		}
		if i%size == size-1 || i == n-1 {
			if err := w.Add(round); err != nil {
				return loader, t.blame(err)
			}
		}
	}

	return loader, nil
}

// compared exchanges reports and checks them. All ranks return an error if a rank's loader failed or
// if its lattices differ from rank 0's.
func (t *Team) compared(own report, loader error) ([]report, error) {
	if loader != nil {
		own.Err = loader.Error()
	}

	all, err := t.reports(own)
	if err != nil {
		return nil, err
	}

	for r, other := range all {
		if other.Err != "" && r != t.Rank() {
			return nil, fmt.Errorf("rank %d: %s", r, other.Err)
		}
	}

	if loader != nil {
		return all, loader
	}

	for r, other := range all {
		if other.Lattices != all[0].Lattices {
			return nil,
				fmt.Errorf("parallel: the lattices of ranks 0 and %d are no longer the same: "+
					"while several ranks train, submit changes of seeds with Model.Kasmina.Submit", r)
		}
	}

	return all, nil
}

// reports exchanges the reports of a step.
func (t *Team) reports(own report) ([]report, error) {
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(own); err != nil {
		return nil, err
	}

	texts, err := t.exchange(b.Bytes())
	if err != nil {
		return nil, err
	}

	all := make([]report, len(texts))
	for r, text := range texts {
		if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&all[r]); err != nil {
			return nil, fmt.Errorf("parallel: rank %d is not performing a step: %w", r, err)
		}
	}

	return all, nil
}

// take merges the telemetry of the batches into the lattices, in order, up to the first failed batch. It
// adds up the figures of preference pairs in the same order.
func (t *Team) take(model *llm.Model, n int, all []report) (losses []float64, err error) {
	for i := range n {
		r, at := i%len(all), i/len(all)
		if at >= len(all[r].Results) {
			return nil, fmt.Errorf("parallel: rank %d has not computed batch %d of %d", r, i, n)
		}
		got := all[r].Results[at]
		for k, m := range got.Measured {
			if err := model.Kasmina.Lattice(k).Take(m); err != nil {
				return nil, err
			}
		}
		if got.Err != "" {
			err := fmt.Errorf("batch %d of the step, at rank %d: %s", i+1, r, got.Err)
			if got.NonFinite {
				err = fmt.Errorf("%w: %w", op.ErrNonFinite, err)
			}
			return nil, err
		}
		losses = append(losses, got.Loss)
		t.pairs = t.pairs.Plus(got.Pairs)
	}

	return losses, nil
}

// compute computes the gradients of the i-th batch of a step.
func compute(m *llm.Model, w Worker, b data.Batch, in Round, i int) result {
	measured := note(m, i)
	defer noted(m)
	loss, err := w.Compute(b, in)
	return resultOf(w, loss, measured, err)
}

// note makes the lattices record the telemetry of the i-th batch separately until noted is called.
func note(m *llm.Model, i int) []state.Measured {
	measured := make([]state.Measured, m.Kasmina.Layers())
	for k, l := range m.Kasmina.Lattices() {
		l.Defer(&measured[k], i)
	}
	return measured
}

func noted(m *llm.Model) {
	for _, l := range m.Kasmina.Lattices() {
		l.Defer(nil, 0)
	}
}

// A Judge is a [Worker] that computes the loss of preference pairs. Judged returns the figures of the pairs
// since the last call.
type Judge interface {
	Worker
	Judged() op.PreferenceFigures
}

func resultOf(w Worker, loss float64, measured []state.Measured, err error) result {
	r := result{Loss: loss, Measured: measured}
	if j, ok := w.(Judge); ok {
		r.Pairs = j.Judged()
	}
	if err != nil {
		r.Err, r.NonFinite = err.Error(), errors.Is(err, op.ErrNonFinite)
	}
	return r
}

// Stepper is a Worker that computes and updates asynchronously. If the loss of a rank is not finite, no rank
// changes its parameters.
type Stepper interface {
	Worker
	// Start starts computing the gradients of a batch, like Compute. Wait waits for them and returns
	// the loss; the lattices then hold the batch's telemetry.
	Start(b data.Batch, r Round) error
	Wait() (float64, error)
	// Finish performs the update after the last round of a step. The argument started reports whether
	// this rank started a batch in that round. As soon as the passes have reported, Finish calls
	// report with the loss, or with 0 if the rank has no batch. The update continues during the call.
	// Finish returns any error from report.
	Finish(started bool, report func(loss float64) error) (norm float64, err error)
}

// Step combines Batches with the update. It implements the method of [llm.ParallelStepper]. The ranks agree
// on the update while they compute the last round, and exchange losses during the update.
func (t *Team) Step(m *llm.Model, w Stepper, n int, next func() (data.Batch, error),
	word []byte) (step llm.StepResult, err error) {
	t.steps.Add(1)
	if err := t.progress(); err != nil {
		return step, err
	}

	own := report{Lattices: m.Kasmina.Digest(), Word: word}
	var results []result
	var measured []state.Measured
	var started bool
	var failed error
	loader, err := t.rounds(w, n, next, func(b data.Batch, round Round, i int) {
		if i < (n-1)/t.Size()*t.Size() {
			r := compute(m, w, b, round, i)
			results, own.Unfit = append(results, r), own.Unfit || r.unfit()
			return
		}
		measured, started = note(m, i), true
		failed = w.Start(b, round)
	})
	defer noted(m)

	if err != nil {
		return step, err
	}

	finish := func(loss float64, err error) error {
		noted(m)
		if started {
			results = append(results, resultOf(w, loss, measured, err))
		}
		all, err := t.reports(report{Lattices: own.Lattices, Results: results})
		if err == nil {
			step.Losses, err = t.take(m, n, all)
		}
		return err
	}

	all, err := t.compared(own, errors.Join(loader, failed))
	unfit := slices.ContainsFunc(all, func(r report) bool { return r.Unfit })
	if err == nil {
		for _, r := range all {
			step.Words = append(step.Words, r.Word)
		}
	}

	if err == nil && !unfit {
		step.Made = true
		step.Norm, err = w.Finish(started, func(loss float64) error { return finish(loss, nil) })
		return step, err
	}

	var loss float64
	var lost error
	if started && failed == nil {
		loss, lost = w.Wait()
	}
	if err == nil {
		err = finish(loss, lost)
	}

	return step, err
}
