package parallel_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

var errDisk = errors.New("the disk is full")

// failAt returns a callback that fails when it receives an event of the given kind after step 4.
func failAt(kind llm.EventKind) llm.Callback {
	return func(e llm.Event) error {
		if e.Kind == kind && e.Step == 4 {
			return errDisk
		}
		return nil
	}
}

// TestCallbackFailsBeforeMeeting makes a callback of rank 1 fail in a step after which callbacks on
// the other ranks need all ranks. Every rank must report the cause, and the last step must be saved.
func TestCallbackFailsBeforeMeeting(t *testing.T) {
	s := setup{config: small(), steps: 9, accumulate: 3}
	heldOut := func(t *testing.T) *data.Evaluation {
		text, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, s.config.Seq)
		require.NoError(t, err)
		return text
	}
	evaluate := func(t *testing.T, tr *llm.Trainer) { tr.On(llm.Evaluate(tr, heldOut(t), 4)) }
	keepBest := func(t *testing.T, tr *llm.Trainer) {
		best, err := llm.NewBestCheckpoint(tr, filepath.Join(t.TempDir(), "best.safetensors"))
		require.NoError(t, err)
		require.NoError(t, tr.Use(best))
	}

	for name, c := range randtest.Sample(t, 4, map[string]struct {
		set          func(s *setup)
		kind         llm.EventKind
		before       func(t *testing.T, tr *llm.Trainer) // callbacks before the failing one
		after        func(t *testing.T, tr *llm.Trainer)
		noStepsAhead bool // the other ranks cannot know beforehand that they will meet
	}{
		"a checkpoint": {set: func(s *setup) { s.every = 2 }, kind: llm.StepEnd},
		"a checkpoint after an epoch": {set: func(s *setup) { s.every, s.epoch = 2, 2 },
			kind: llm.EpochEnd},
		"a checkpoint in the background": {set: func(s *setup) { s.every, s.background = 2, true },
			kind: llm.StepEnd},
		"a checkpoint in parts": {set: func(s *setup) { s.every, s.parts = 2, true }, kind: llm.StepEnd},
		"an evaluation":         {kind: llm.StepEnd, after: evaluate},
		"the best checkpoint, before the evaluation": {kind: llm.StepEnd,
			after: func(t *testing.T, tr *llm.Trainer) { keepBest(t, tr); evaluate(t, tr) }},
		"the best checkpoint, after the evaluation": {kind: llm.EvalEnd, before: evaluate,
			after: keepBest},
		"a callback that saves": {kind: llm.StepEnd, noStepsAhead: true,
			after: func(t *testing.T, tr *llm.Trainer) {
				path := filepath.Join(t.TempDir(), "own.safetensors")
				tr.On(func(e llm.Event) error {
					if e.Kind == llm.StepEnd && e.Step == 4 {
						return tr.Save(path)
					}
					return nil
				})
			}},
		"nothing": {kind: llm.StepEnd},
	}, "a checkpoint") {
		for _, stepper := range []bool{false, true} {
			name := name
			if stepper {
				name += ", meeting in steps"
			}
			t.Run(name, func(t *testing.T) {
				if stepper && c.noStepsAhead {
					t.Skip("only ranks that meet after every step learn of this")
				}
				own := s
				own.save = filepath.Join(t.TempDir(), "run.safetensors")
				if c.set != nil {
					c.set(&own)
				}

				const size = 3
				var finished atomic.Int64
				errs := on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
					ranked := own
					ranked.more = func(tr *llm.Trainer) {
						if c.before != nil {
							c.before(t, tr)
						}
						if rank == 1 {
							tr.On(failAt(c.kind))
						}
						if c.after != nil {
							c.after(t, tr)
						}
					}
					if !stepper {
						return ranked.train(t.Context(), rank, size, team.Engine)
					}
					return ranked.trainStepped(t, rank, size, team, func(_ int, e *stepping) {
						e.finished = &finished
					})
				})

				requireCause(t, errs)
				requireStep(t, own.save, 4)
			})
		}
	}
}

// TestCallbackFailsBeforeGrowth makes a callback of rank 1 fail after each step of a growing run, so that the model
// changes before the next step on the other ranks. Every rank must report the cause.
func TestCallbackFailsBeforeGrowth(t *testing.T) {
	const size = 3
	s := setup{config: small(), steps: 12, accumulate: 3, grow: true, commands: true}
	steps := []int{5, 7, 9, 1, 2, 3, 4, 6, 8, 10, 11} // blocks change before step 6
	for _, step := range randtest.SampleOf(t, 4, steps) {
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			own := s
			own.save = filepath.Join(t.TempDir(), "run.safetensors")
			var finished atomic.Int64
			errs := on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
				ranked := own
				ranked.more = func(tr *llm.Trainer) {
					tr.On(func(e llm.Event) error {
						if rank == 1 && e.Kind == llm.StepEnd && e.Step == step {
							return errDisk
						}
						return nil
					})
				}
				return ranked.trainStepped(t, rank, size, team, func(_ int, e *stepping) { e.finished = &finished })
			})
			requireCause(t, errs)
			requireStep(t, own.save, step)
		})
	}
}

// requireCause requires every rank to report that rank 1's disk is full.
func requireCause(t *testing.T, errs []error) {
	t.Helper()
	for rank, err := range errs {
		require.ErrorContains(t, err, "the disk is full", "rank %d", rank)
		if rank == 1 {
			require.ErrorIs(t, err, errDisk)
		} else {
			require.ErrorContains(t, err, "rank 1")
		}
		require.NotContains(t, err.Error(), "mismatched collectives", "rank %d", rank)
		require.NotContains(t, err.Error(), "all must do the same", "rank %d", rank)
		require.NotContains(t, err.Error(), "divided the model differently", "rank %d", rank)
	}
}

// requireStep requires a checkpoint to contain the state after a step.
func requireStep(t *testing.T, path string, step int) {
	t.Helper()
	_, metadata, err := safetensors.Load(path)
	require.NoError(t, err)
	var run struct{ Step int }
	require.NoError(t, json.Unmarshal([]byte(metadata["kasmina.training"]), &run))
	require.Equal(t, step, run.Step)
}

// unprepared is a part that fails before a step or at the start of a run.
type unprepared struct{ start, step bool }

func (unprepared) Name() string                               { return "unprepared" }
func (unprepared) Save(*llm.CheckpointWriter) error           { return nil }
func (unprepared) Load(*llm.CheckpointReader) (func(), error) { return nil, nil }
func (p unprepared) StartRun(llm.Turn) error {
	if p.start {
		return errDisk
	}
	return nil
}

func (p unprepared) PrepareStep(u llm.Turn) error {
	if p.step && u.Last().Step == 4 {
		return errDisk
	}
	return nil
}

// TestPartFailsAtOneRank makes a part of rank 1 fail before a step, and at the start of a run. Every
// rank must report the cause.
func TestPartFailsAtOneRank(t *testing.T) {
	for name, part := range map[string]unprepared{"start": {start: true}, "step": {step: true}} {
		t.Run(name, func(t *testing.T) {
			const size = 3
			s := setup{config: small(), steps: 9, accumulate: 3,
				save: filepath.Join(t.TempDir(), "run.safetensors")}
			errs := on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
				own := s
				own.more = func(tr *llm.Trainer) {
					if rank == 1 {
						require.NoError(t, tr.Use(part))
					} else {
						require.NoError(t, tr.Use(unprepared{}))
					}
				}
				return own.train(t.Context(), rank, size, team.Engine)
			})

			requireCause(t, errs)
		})
	}
}

// An operation is a method of an engine or optimizer that can fail at one rank.
type operation string

const (
	pull   operation = "Pull"
	loss   operation = "Loss"
	forget operation = "Forget"
	closed operation = "Close"
	setLR  operation = "SetLR"
)

// failing is an engine that calls a function before each operation, which fails if the function does.
type failing struct {
	llm.Parallel
	before func(operation) error
}

func (e failing) Pull(names ...string) error {
	if err := e.before(pull); err != nil {
		return err
	}
	return e.Parallel.Pull(names...)
}

func (e failing) Loss(b data.Batch) (float64, error) {
	if err := e.before(loss); err != nil {
		return 0, err
	}
	return e.Parallel.Loss(b)
}

func (e failing) Forget(ranges ...llm.ParamRange) error {
	if err := e.before(forget); err != nil {
		return err
	}
	return e.Parallel.Forget(ranges...)
}

// Close releases all resources even if it fails.
func (e failing) Close() error { return errors.Join(e.Parallel.Close(), e.before(closed)) }

// failingAdamW is the counterpart of failing for an optimizer.
type failingAdamW struct {
	*optim.AdamW
	before func(operation) error
}

func (o failingAdamW) SetLR(rate float64) error {
	if err := o.before(setLR); err != nil {
		return err
	}
	return o.AdamW.SetLR(rate)
}

// TestGrowthFailsAtOneRank makes an operation of rank 1 fail at each of the moments at which a growing run
// performs it. Every rank must report the cause, or give up the growth and continue.
func TestGrowthFailsAtOneRank(t *testing.T) {
	const size = 3
	s := setup{config: small(), steps: 12, accumulate: 3, grow: true, commands: true}
	train := func(stepper bool, before func(rank int) func(operation) error) []error {
		var finished atomic.Int64
		return on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
			own, fail := s, before(rank)
			own.optimizer = func() (optim.Optimizer, error) {
				o, err := optim.NewAdamW(optim.WithLR(0.01))
				return failingAdamW{o, fail}, err
			}
			if stepper {
				return own.trainStepped(t, rank, size, team, func(_ int, e *stepping) {
					e.finished, e.Parallel = &finished, failing{e.Parallel, fail}
				})
			}
			return own.train(t.Context(), rank, size,
				func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
					e, err := team.Engine(m, o, c)
					if err != nil {
						return nil, err
					}
					return failing{e.(llm.Parallel), fail}, nil
				})
		})
	}

	calls := map[operation]int{} // of rank 1
	require.NoError(t, errors.Join(train(false, func(rank int) func(operation) error {
		return func(o operation) error {
			if rank == 1 {
				calls[o]++
			}
			return nil
		}
	})...))

	type call struct {
		of     operation
		number int
	}
	cases := map[string]call{}
	for o, n := range calls {
		for number := range n {
			c := call{o, number + 1}
			cases[fmt.Sprint(c.of, " ", c.number)] = c
		}
	}
	require.Len(t, calls, 5)

	for name, c := range randtest.Sample(t, 6, cases, "Close 1", "Loss 9", "SetLR 7") {
		for _, stepper := range []bool{false, true} {
			t.Run(fmt.Sprint(name, stepper), func(t *testing.T) {
				var failed atomic.Bool
				errs := train(stepper, func(rank int) func(operation) error {
					left := c.number
					return func(o operation) error {
						if rank != 1 || o != c.of {
							return nil
						}
						if left--; left == 0 {
							failed.Store(true)
							return errDisk
						}
						return nil
					}
				})
				require.True(t, stepper || failed.Load()) // a stepper may need fewer operations
				if errors.Join(errs...) != nil {
					requireCause(t, errs)
				}
			})
		}
	}
}

// scorer is the engine of a rank that trains on preference pairs.
type scorer interface {
	llm.Parallel
	llm.PreferenceMeter
}

// unscored is an engine that cannot compute log-probabilities.
type unscored struct{ scorer }

func (unscored) LogProbs(context.Context, data.Batch) ([]float64, error) { return nil, errDisk }

// TestMeasurementFailsAtOneRank makes the measurements of parts fail at rank 1. Every rank must report the cause.
func TestMeasurementFailsAtOneRank(t *testing.T) {
	const size = 3
	plain := llm.Config{Vocab: 1100, Dim: 16, Layers: 1, Heads: 2, Seq: 12}.Default()
	old, err := data.NewEvaluation(texttest.Words(9, 120), tokenizer.Bytes{}, 2, plain.Seq)
	require.NoError(t, err)

	for name, at := range map[string]int{"retention at the start": 1, "retention after a step": 8} {
		t.Run(name, func(t *testing.T) {
			s := setup{config: plain, steps: 4, accumulate: 3}
			requireCause(t, on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
				own, left := s, at
				own.more = func(tr *llm.Trainer) {
					r, err := llm.NewRetention(llm.RetentionConfig{Text: old, Budget: 9, Every: 1})
					require.NoError(t, err)
					require.NoError(t, tr.Use(r))
				}
				return own.train(t.Context(), rank, size,
					func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
						e, err := team.Engine(m, o, c)
						if err != nil {
							return nil, err
						}
						return failing{e.(llm.Parallel), func(of operation) error {
							if rank != 1 || of != loss {
								return nil
							}
							if left--; left == 0 {
								return errDisk
							}
							return nil
						}}, nil
					})
			}))
		})
	}

	t.Run("references", func(t *testing.T) {
		requireCause(t, on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
			_, err := trainPairs(t.Context(),
				func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
					e, err := team.Engine(m, o, c)
					if err != nil || rank != 1 {
						return e, err
					}
					return unscored{e.(scorer)}, nil
				})
			return err
		}))
	})
}

// fullDisk is a writer that fails once it has been called a number of times.
type fullDisk struct{ left int }

func (f *fullDisk) Write(p []byte) (int, error) {
	if f.left--; f.left < 0 {
		return 0, errDisk
	}
	return len(p), nil
}

// TestRecordFailsAtOneRank makes rank 1 fail to record growth, at each of the moments at which it does so. Every rank
// must report the cause.
func TestRecordFailsAtOneRank(t *testing.T) {
	const size = 3
	s := setup{config: small(), steps: 30, accumulate: 3, grow: true}
	for n := range 4 {
		for _, stepper := range []bool{false, true} {
			t.Run(fmt.Sprint(n, stepper), func(t *testing.T) {
				var finished atomic.Int64
				errs := on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
					own := s
					if rank == 1 {
						own.record = &fullDisk{left: n}
					}
					if !stepper {
						return own.train(t.Context(), rank, size, team.Engine)
					}
					return own.trainStepped(t, rank, size, team, func(_ int, e *stepping) { e.finished = &finished })
				})
				requireCause(t, errs)
			})
		}
	}
}
