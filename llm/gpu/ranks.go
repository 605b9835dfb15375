package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/nccl"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// Join connects the ranks of a world by NCCL, each with a GPU of its own. All must call it. The
// world is the team's from then on; the device must stay open until the team is closed.
func Join(ctx context.Context, w *comm.World, device *cudaops.Device) (*parallel.Team, error) {
	g, err := nccl.New(ctx, w, device)
	if err != nil {
		return nil, fmt.Errorf("llm/gpu: %w", w.Blame(err))
	}
	return parallel.On(w, g), nil
}

// Parallel is [Engine] for a rank of a team: see package parallel. Each GPU holds the weights, and
// the sums of gradients and the moments of its part. Gradients travel by NCCL in the precision that
// the machine keeps them in, and weights as float32.
//
// Ranks compute in the ways that rules choose (cudaops.TuneOff): those that are timed might differ
// from GPU to GPU. Float16, and Kasmina layers in the Strict mode or with adaptive clipping, are
// for a single GPU.
func Parallel(device *cudaops.Device, precision cudaops.Precision, team *parallel.Team,
	opts ...cudaops.MachineOption) func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine,
	error) {
	return func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
		e, err := newRanked(device, precision, team, opts, m, o, c)
		if err = team.Agree(err); err == nil {
			return e, nil
		}
		if e != nil {
			err = errors.Join(err, e.Close())
		}
		return nil, fmt.Errorf("llm/gpu: %w", err)
	}
}

// ranked is the engine of one of several ranks.
type ranked struct {
	*engine
	team *parallel.Team
}

var _ llm.Parallel = ranked{}

func newRanked(device *cudaops.Device, precision cudaops.Precision, team *parallel.Team,
	opts []cudaops.MachineOption, m *llm.Model,
	o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
	k := m.Config.KasminaOptions
	switch {
	case precision == cudaops.Float16:
		return nil, errors.New("float16 is for a single GPU: bf16 needs no loss scale")
	case k.Stability == op.Strict || k.AdaptiveClip > 0:
		return nil,
			errors.New("the Strict mode and adaptive clipping of Kasmina layers are for a " +
				"single GPU")
	case c.Accumulate < team.Size():
		return nil,
			fmt.Errorf("a step of %d batches leaves nothing to do for some of %d GPUs: "+
				"TrainConfig.Accumulate is at least "+
				"their number", c.Accumulate, team.Size())
	}
	own := append(slices.Clip(opts), cudaops.WithPrecision(precision),
		cudaops.WithTuning(cudaops.TuneOff))
	e, err := newEngine("cuda "+precision.String()+", ranks", device, own, m, o, c,
		cudaops.WithRanks(team.Group()))
	if err != nil {
		return nil, err
	}
	return ranked{e, team}, nil
}

func (r ranked) Rank() int                               { return r.team.Rank() }
func (r ranked) Ranks() int                              { return r.team.Size() }
func (r ranked) Exchange(value []byte) ([][]byte, error) { return r.team.Exchange(value) }

func (r ranked) Batches(n int, next func() (data.Batch, error)) ([]float64, error) {
	return r.team.Batches(r.Model, r, n, next)
}

// Compute is that of [parallel.Worker].
func (r ranked) Compute(b data.Batch) (float64, error) { return r.engine.Gradients(b) }

// Add enqueues the exchange of gradients behind the run, and the sums behind that.
func (r ranked) Add(round, contributors int) error {
	return r.machine.Contribute(contributors, round == 0)
}

// Land does not wait: the update comes behind the sums.
func (r ranked) Land() error { return nil }

func (r ranked) Gradients(data.Batch) (float64, error) {
	return 0, errors.New("llm/gpu: the batches of a step are computed together: Batches")
}

func (r ranked) Update() (float64, error) {
	norm, err := r.engine.Update()
	if err != nil && !errors.Is(err, llm.ErrGradients) {
		err = r.team.Blame(err)
	}
	return norm, err
}

// Step is not for several ranks.
func (r ranked) Step(data.Batch) (loss, norm float64, err error) {
	_, err = r.Gradients(data.Batch{})
	return 0, 0, err
}

func (r ranked) Gather() error {
	if err := r.machine.GatherState(); err != nil {
		return r.team.Blame(err)
	}
	return nil
}

func (r ranked) Loss(b data.Batch) (float64, error) {
	if err := r.team.Progress(); err != nil {
		return 0, err
	}
	return r.engine.Loss(b)
}

// Drop leaves nothing: the sums of the next step begin anew.
func (r ranked) Drop() error { return nil }
