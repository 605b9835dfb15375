package parallel_test

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/optim"
)

// stepping is an engine that makes steps with [parallel.Team.Step], like the engines for several GPUs.
type stepping struct {
	llm.Parallel
	parallel.Worker
	team      *parallel.Team
	model     *llm.Model
	loss      float64 // of the batch that was started
	err       error
	computed  int                        // number of batches
	alterLoss func(loss float64) float64 // alters the loss of each batch if not nil
	fail      error                      // error of the loader in the third step
	steps     int
	finished  *atomic.Int64
}

var (
	_ llm.ParallelStepper = (*stepping)(nil)
	_ parallel.Stepper    = (*stepping)(nil)
)

func (s *stepping) Compute(b data.Batch, r parallel.Round) (float64, error) {
	loss, err := s.Worker.Compute(b, r)
	if s.alterLoss != nil {
		loss = s.alterLoss(loss)
	}
	return loss, err
}

func (s *stepping) Start(b data.Batch, r parallel.Round) error {
	s.loss, s.err = s.Worker.Compute(b, r)
	return nil
}

func (s *stepping) Wait() (float64, error) { return s.loss, s.err }

func (s *stepping) Finish(started bool, report func(loss float64) error) (float64, error) {
	s.finished.Add(1)
	loss := s.loss
	if !started {
		loss = 0
	}
	if err := errors.Join(s.err, report(loss), s.Land()); err != nil {
		return 0, err
	}
	return s.Update()
}

func (s *stepping) StepBatches(n int, next func() (data.Batch, error), word []byte) (
	llm.StepResult, error) {
	if s.steps++; s.steps == 3 && s.fail != nil {
		next = func() (data.Batch, error) { return data.Batch{}, s.fail }
	}
	return s.team.Step(s.model, s, n, next, word)
}

// runStepping trains on several ranks and returns their errors. set configures each rank's engine.
func (s setup) runStepping(t *testing.T, size int, set func(rank int, e *stepping)) []error {
	return on(t, size, comm.Options{}, func(rank int, team *parallel.Team) error {
		return s.trainStepped(t, rank, size, team, set)
	})
}

func (s setup) trainStepped(t *testing.T, rank, size int, team *parallel.Team,
	set func(rank int, e *stepping)) error {
	return s.train(t.Context(), rank, size, func(m *llm.Model, o optim.Optimizer,
		c llm.TrainConfig) (llm.Engine, error) {
		e, err := team.Engine(m, o, c)
		if err != nil {
			return nil, err
		}
		own := &stepping{Parallel: e.(llm.Parallel), Worker: e.(parallel.Worker), team: team,
			model: m}
		set(rank, own)
		return own, nil
	})
}

// TestStepSameBits checks that updates which don't wait for losses are bit-identical to a single
// process's, whether or not the number of ranks divides the number of batches in a step.
func TestStepSameBits(t *testing.T) {
	s := setup{config: small(), steps: 6, accumulate: 3, grow: true, commands: true}
	want := s.file(t, 0)
	var alone int64 // steps that one rank finishes, including steps of the model's twin
	for _, size := range []int{1, 2, 3} {
		var finished atomic.Int64
		got := s
		got.save = filepath.Join(t.TempDir(), "run.safetensors")
		require.NoError(t, errors.Join(got.runStepping(t, size, func(_ int, e *stepping) {
			e.finished = &finished
		})...))
		if size == 1 {
			alone = finished.Load()
			require.GreaterOrEqual(t, alone, int64(s.steps))
		}
		require.Equal(t, alone*int64(size), finished.Load())
		file, err := os.ReadFile(got.save)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, file), "%d ranks", size)
	}
}

// TestStepWithoutUpdate checks that if a rank has no batch, or an earlier round of the step had a
// non-finite loss, no rank updates and all ranks report the cause.
func TestStepWithoutUpdate(t *testing.T) {
	s := setup{config: small(), steps: 6, accumulate: 4}
	for name, c := range map[string]struct {
		set  func(e *stepping)
		want string
	}{
		"no batch": {func(e *stepping) { e.fail = errors.New("the disk is gone") },
			"the disk is gone"},
		"no loss": {func(e *stepping) {
			e.alterLoss = func(loss float64) float64 {
				if e.computed++; e.computed == 3 {
					return math.NaN()
				}
				return loss
			}
		}, "the loss is NaN"},
	} {
		t.Run(name, func(t *testing.T) {
			var finished atomic.Int64
			for r, err := range s.runStepping(t, 2, func(rank int, e *stepping) {
				e.finished = &finished
				if rank == 1 {
					c.set(e)
				}
			}) {
				require.ErrorContains(t, err, c.want)
				require.ErrorContains(t, err, "step 3", "rank %d", r)
			}
			require.Equal(t, int64(2*2), finished.Load(), "updates")
		})
	}
}

// TestStepFails checks that a callback error or a request to stop at one rank stops the run on all
// ranks after the same step, although ranks only communicate during steps.
func TestStepFails(t *testing.T) {
	s := setup{config: small(), steps: 9, accumulate: 2}
	for name, c := range map[string]struct {
		set     func(s *setup, rank int)
		want    string
		updates int64
	}{
		"callback": {func(s *setup, rank int) {
			s.more = func(tr *llm.Trainer) {
				tr.On(func(e llm.Event) error {
					if rank == 1 && e.Kind == llm.StepEnd && e.Step == 4 {
						return errors.New("the disk is full")
					}
					return nil
				})
			}
		}, "the disk is full", 2 * 4},
		"stop": {func(s *setup, _ int) { s.stop = 4 }, "asked to stop", 2 * 5},
	} {
		t.Run(name, func(t *testing.T) {
			var finished atomic.Int64
			errs := on(t, 2, comm.Options{}, func(rank int, team *parallel.Team) error {
				own := s
				c.set(&own, rank)
				return own.trainStepped(t, rank, 2, team, func(_ int, e *stepping) {
					e.finished = &finished
				})
			})
			for r, err := range errs {
				require.ErrorContains(t, err, c.want, "rank %d", r)
			}
			require.Equal(t, c.updates, finished.Load(), "updates")
		})
	}
}
