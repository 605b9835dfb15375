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

// result is what a batch has come to.
type result struct {
	Loss      float64
	Err       string // empty for none
	NonFinite bool   // the error is op.ErrNonFinite
	Measured  []state.Measured
}

// unfit reports whether no update may be made of the batch.
func (r result) unfit() bool { return r.Err != "" || r.Loss-r.Loss != 0 }

// report is what a rank tells the others of a step's batches.
type report struct {
	Word     []byte   // for those who train
	Lattices uint32   // digest, before the step
	Err      string   // why there can be no step here
	Unfit    bool     // a batch has come to what no update may be made of
	Results  []result // of its own batches, in order
}

// Worker computes what falls to one rank of a step.
type Worker interface {
	// Compute makes the gradients of a batch of a round, alone, and returns its loss. The passes have
	// reported to the lattices when it returns.
	Compute(b data.Batch, r Round) (float64, error)
	// Add adds the gradients of a round to their owners' sums, unless Compute has seen to that: those
	// that its contributors have computed last. It may return while they are on their way.
	Add(r Round) error
	// Land waits until all that was added is there.
	Land() error
}

// Round is a part of a step: a batch at each of the first Contributors ranks.
type Round struct {
	Contributors int
	First        bool // of the step
}

// Batches computes the batches of a step, as [llm.Parallel] wants, by a worker at each rank.
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
	return take(m, n, all)
}

// rounds deals out the n batches of a step, has each do with those of this rank, and adds what the
// rounds have come to. It returns the loader's error, at which this rank computes no more.
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

// compared is reports where this rank's loader has ended with an error or nil. A rank's error, or
// lattices that are not those of rank 0, are an error of all.
func (t *Team) compared(own report, loader error) ([]report, error) {
	if loader != nil {
		own.Err = loader.Error()
	}
	all, err := t.reports(own)
	if err != nil {
		return nil, err
	}
	for r, other := range all {
		switch {
		case other.Err != "" && r != t.Rank():
			return nil, fmt.Errorf("rank %d: %s", r, other.Err)
		case other.Lattices != all[0].Lattices:
			return nil,
				fmt.Errorf("parallel: the lattices of ranks 0 and %d are not the same any more: "+
					"while ranks train, what changes seeds must be submitted (Model.Kasmina.Submit)", r)
		}
	}
	return all, loader
}

// reports exchanges what ranks tell of a step.
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
			return nil, fmt.Errorf("parallel: rank %d does something else than a step: %w", r, err)
		}
	}
	return all, nil
}

// take takes in what the batches have measured, in order, up to the first that has failed.
func take(model *llm.Model, n int, all []report) (losses []float64, err error) {
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
	}
	return losses, nil
}

// compute makes the gradients of the i-th batch of a step.
func compute(m *llm.Model, w Worker, b data.Batch, in Round, i int) result {
	measured := note(m, i)
	defer noted(m)
	loss, err := w.Compute(b, in)
	return resultOf(loss, measured, err)
}

// note has the lattices set aside what passes of the i-th batch measure, until noted.
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

func resultOf(loss float64, measured []state.Measured, err error) result {
	r := result{Loss: loss, Measured: measured}
	if err != nil {
		r.Err, r.NonFinite = err.Error(), errors.Is(err, op.ErrNonFinite)
	}
	return r
}

// Stepper is a Worker that computes and updates beside its host. A loss that is not finite at one
// rank keeps the parameters of all.
type Stepper interface {
	Worker
	// Start puts the gradients of a batch of a round on their way, as Compute makes them, and Wait
	// waits for them. It returns the loss, and the passes have reported to the lattices.
	Start(b data.Batch, r Round) error
	Wait() (float64, error)
	// Finish makes the update behind the last round of a step, in which this rank has started a batch
	// or not. When the passes have reported it calls told with the loss, 0 without a batch, and the
	// update goes on meanwhile. An error of told is that of Finish.
	Finish(started bool, told func(loss float64) error) (norm float64, err error)
}

// Step is Batches and the update in one, as [llm.ParallelStepper] wants. While they compute the last
// round the ranks agree that there can be an update, and while they make it they exchange losses.
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
			results = append(results, resultOf(loss, measured, err))
		}
		all, err := t.reports(report{Lattices: own.Lattices, Results: results})
		if err == nil {
			step.Losses, err = take(m, n, all)
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
