package parallel_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
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

// patientDeadline returns a deadline that no step misses, however busy this machine is: many times the longest
// step of the same run without a deadline.
func patientDeadline(t *testing.T, s setup) time.Duration {
	t.Helper()
	var mu sync.Mutex
	longest := time.Second / margin
	errs := on(t, 3, comm.Options{}, func(rank int, team *parallel.Team) error {
		own, last := s, time.Time{}
		own.more = func(tr *llm.Trainer) {
			tr.On(func(e llm.Event) error {
				mu.Lock()
				defer mu.Unlock()
				if e.Kind == llm.StepEnd && !last.IsZero() {
					longest = max(longest, time.Since(last))
				}
				last = time.Now()
				return nil
			})
		}
		return own.train(t.Context(), rank, 3, team.Engine)
	})

	require.NoError(t, errors.Join(errs...))
	return margin * longest
}

// margin is the factor by which a deadline exceeds the longest step.
const margin = 10

// TestLongWorkOutsideOfSteps checks that a run succeeds although a rank spends several deadlines on
// saving, evaluating, sampling or writing the final model.
func TestLongWorkOutsideOfSteps(t *testing.T) {
	silence := patientDeadline(t, setup{config: small(), steps: 3, accumulate: 3})
	t.Parallel()
	long := 2 * silence
	type work struct {
		rank   int // index of the slow rank
		engine slow
		parts  bool
		add    func(t *testing.T, tr *llm.Trainer) error
		finish func(team *parallel.Team)
	}

	for name, c := range map[string]work{
		"a checkpoint":           {engine: slow{gather: long}},
		"a part of a checkpoint": {rank: 2, engine: slow{gather: long}, parts: true},
		"an evaluation": {engine: slow{loss: silence / 3},
			add: func(t *testing.T, tr *llm.Trainer) error {
				text, err := data.NewEvaluation(texttest.Words(9, 200), tokenizer.Bytes{}, 1,
					tr.Model.Config.Seq)
				tr.On(llm.Evaluate(tr, text, 3))
				return err
			}},
		"a sample": {engine: slow{token: silence / 3},
			add: func(t *testing.T, tr *llm.Trainer) error {
				tr.On(llm.SampleText(tr, tokenizer.Bytes{}, "a", 10, sampler.Config{},
					filepath.Join(t.TempDir(), "sample"), 3))
				return nil
			}},
		"the end": {finish: func(team *parallel.Team) {
			defer team.Busy("writing the model")()
			time.Sleep(long)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := setup{config: small(), steps: 3, accumulate: 3, parts: c.parts,
				save: filepath.Join(t.TempDir(), "run.safetensors")}
			c.engine.delayed = new(atomic.Int64)
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
							own := c.engine
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
						c.finish(team)
					}
					return err
				})
			require.NoError(t, errors.Join(errs...))
			if c.finish == nil {
				require.GreaterOrEqual(t, time.Duration(c.engine.delayed.Load()), long-silence)
			}
		})
	}
}
