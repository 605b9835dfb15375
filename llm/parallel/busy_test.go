package parallel_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

// slow is an engine with long work outside steps.
type slow struct {
	llm.Parallel
	gather, loss, token time.Duration
	delayed             *atomic.Int64
}

var _ llm.Busier = slow{}

func (s slow) sleep(d time.Duration) {
	time.Sleep(d)
	s.delayed.Add(int64(d))
}

func (s slow) Busy(what string) (done func()) { return s.Parallel.(llm.Busier).Busy(what) }

// Gather is called by every save.
func (s slow) Gather() error {
	s.sleep(s.gather)
	return s.Parallel.Gather()
}

func (s slow) Own() ([]optim.Part, error) {
	s.sleep(s.gather)
	return s.Parallel.Own()
}

func (s slow) Loss(b data.Batch) (float64, error) {
	s.sleep(s.loss)
	return s.Parallel.Loss(b)
}

func (s slow) Decoder() (func(ctx context.Context, tokens []int) (any, error), error) {
	next, err := s.Parallel.Decoder()
	return func(ctx context.Context, tokens []int) (any, error) {
		s.sleep(s.token)
		return next(ctx, tokens)
	}, err
}

// untilPatient calls f with deadlines for silent ranks, a short one first. If f fails, other programs may have delayed a
// rank for that long, so f is called again with a longer deadline. Its error counts once the deadline exceeds a minute.
func untilPatient(t *testing.T, f func(silence time.Duration) error) {
	t.Helper()
	for silence := time.Second; ; silence *= 3 {
		err := f(silence)
		if err == nil {
			return
		}
		if silence > time.Minute {
			t.Fatal(err)
		}
		t.Logf("with a deadline of %v: %v", silence, err)
	}
}

// TestLongWorkOutsideOfSteps checks that a run succeeds although a rank spends several deadlines on
// saving, evaluating, sampling or writing the final model.
func TestLongWorkOutsideOfSteps(t *testing.T) {
	t.Parallel()
	type work struct {
		rank   int // index of the slow rank
		engine slow
		parts  bool
		add    func(t *testing.T, tr *llm.Trainer) error
		finish func(team *parallel.Team, long time.Duration)
	}

	// The durations are in thirds of a deadline.
	for name, c := range map[string]work{
		"a checkpoint":           {engine: slow{gather: 6}},
		"a part of a checkpoint": {rank: 2, engine: slow{gather: 6}, parts: true},
		"an evaluation": {engine: slow{loss: 1},
			add: func(t *testing.T, tr *llm.Trainer) error {
				text, err := data.NewEvaluation(texttest.Words(9, 200), tokenizer.Bytes{}, 1,
					tr.Model.Config.Seq)
				tr.On(llm.Evaluate(tr, text, 3))
				return err
			}},
		"a sample": {engine: slow{token: 1},
			add: func(t *testing.T, tr *llm.Trainer) error {
				tr.On(llm.SampleText(tr, tokenizer.Bytes{}, "a", 10, sampler.Config{},
					filepath.Join(t.TempDir(), "sample"), 3))
				return nil
			}},
		"the end": {finish: func(team *parallel.Team, long time.Duration) {
			defer team.Busy("writing the model")()
			time.Sleep(long)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			untilPatient(t, func(silence time.Duration) error {
				s := setup{config: small(), steps: 3, accumulate: 3, parts: c.parts,
					save: filepath.Join(t.TempDir(), "run.safetensors")}
				long, late := 2*silence, c.engine
				late.delayed = new(atomic.Int64)
				late.gather *= silence / 3
				late.loss *= silence / 3
				late.token *= silence / 3

				errs := on(t, 3, comm.Options{Deadline: silence},
					func(rank int, team *parallel.Team) (err error) {
						own, engine := s, team.Engine
						if rank == c.rank {
							engine = func(m *llm.Model, o optim.Optimizer, t llm.TrainConfig) (llm.Engine,
								error) {
								e, err := team.Engine(m, o, t)
								if err != nil {
									return nil, err
								}
								own := late
								own.Parallel = e.(llm.Parallel)
								return own, nil
							}
							own.more = func(tr *llm.Trainer) {
								if c.add != nil {
									err = c.add(t, tr)
								}
							}
						}
						err = errors.Join(err, own.train(t.Context(), rank, 3, engine))
						if rank == c.rank && c.finish != nil {
							c.finish(team, long)
						}
						return err
					})
				if err := errors.Join(errs...); err != nil {
					return err
				}
				if c.finish == nil {
					require.GreaterOrEqual(t, time.Duration(late.delayed.Load()), long-silence)
				}
				return nil
			})
		})
	}
}
