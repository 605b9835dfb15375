package gpu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/direct"
	"github.com/kasmina-go/kasmina/comm/nccl"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/parallel"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
)

// Join connects the ranks of a world with NCCL. Each rank needs its own GPU, and all ranks must call
// Join. The team takes ownership of the world, which Join closes if it returns an error. The device must stay
// open until the team is closed.
func Join(ctx context.Context, w *comm.World, device *cudaops.Device) (*parallel.Team, error) {
	g, err := nccl.New(ctx, w, device)
	if err != nil {
		return nil, fmt.Errorf("llm/gpu: %w", abandon(w, err))
	}

	var group comm.Group = g
	if os.Getenv("KASMINA_DIRECT") != "off" {
		var why error
		if group, why, err = direct.New(ctx, w, device, g); err != nil {
			return nil, fmt.Errorf("llm/gpu: %w", errors.Join(abandon(w, err), g.Close()))
		}
		if why != nil {
			slog.Debug("exchanging gradients with NCCL", "why", why)
		}
	}

	return parallel.On(w, group), nil
}

// abandon reports this rank's failure to the other ranks, closes the world, and returns the cause of the
// failure. After a failure, closing does not wait.
func abandon(w *comm.World, err error) error {
	err = w.Blame(err)
	w.Close() // adds nothing to the error
	return err
}

// Parallel is like [Engine] for a rank of a team (see package parallel). Each GPU holds all weights, but
// only its share of the gradient sums and moments. NCCL transfers gradients in the precision in which the
// machine stores them, and weights as float32.
//
// Rank 0 chooses kernels according to the options (see cudaops.WithTuning). All ranks adopt its
// choices, so their GPUs must be of the same kind. Updates and evaluations use kernels chosen by
// rules, because the shapes of updates depend on the number of ranks.
//
// Several GPUs support neither Float16 nor Kasmina layers with the Strict mode or adaptive clipping.
func Parallel(device *cudaops.Device, precision cudaops.Precision, team *parallel.Team,
	opts ...cudaops.MachineOption) func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine,
	error) {
	return func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
		defer team.Busy("making an engine")()
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

// ranked implements the engine of one of several ranks.
type ranked struct {
	*engine
	team *parallel.Team
}

var (
	_ llm.ParallelStepper = ranked{}
	_ llm.Busier          = ranked{}
	_ parallel.Stepper    = ranked{}

	_ llm.PreferenceMeter = ranked{}
	_ parallel.Judge      = ranked{}
)

func newRanked(device *cudaops.Device, precision cudaops.Precision, team *parallel.Team,
	opts []cudaops.MachineOption, m *llm.Model, o optim.Optimizer,
	c llm.TrainConfig) (llm.Engine, error) {
	if err := team.Agree(checkRanked(precision, team, m, c)); err != nil {
		return nil, err
	}

	b := builder{name: "cuda " + precision.String() + ", ranks", device: device,
		opts: append(slices.Clip(opts), cudaops.WithPrecision(precision),
			cudaops.WithTuning(cudaops.TuneOff)),
		model: m, optimizer: o, config: c}
	rounds := 0 // any number if uneven, because in the last round some ranks are idle
	if c.Accumulate%team.Size() == 0 {
		rounds = c.Accumulate / team.Size()
	}

	shared := []cudaops.MachineOption{cudaops.WithRanks(team.Group(), rounds)}
	e, err := compileAlike(team, func() (*engine, []optime.Choice, error) {
		b.training = append(append(shared, cudaops.WithTuning(cudaops.TuneDefault)), opts...)
		e, err := b.compile()
		if err != nil {
			return nil, nil, err
		}
		return e, e.Choices(), nil
	}, func(variants []optime.Choice) (*engine, error) {
		b.training = append(shared, cudaops.WithChoices(variants))
		return b.compile()
	})
	if err != nil {
		return nil, err
	}

	if err := e.optimize(); err != nil {
		return nil, errors.Join(err, e.machine.Close())
	}

	return ranked{e, team}, nil
}

// checkRanked returns an error for options that several ranks do not support.
func checkRanked(precision cudaops.Precision, team *parallel.Team, m *llm.Model,
	c llm.TrainConfig) error {
	k := m.KasminaOptions
	switch {
	case precision == cudaops.Float16:
		return errors.New("float16 supports only a single GPU: use bf16, which needs no loss scale")
	case k.Stability == op.Strict || k.AdaptiveClip > 0:
		return errors.New("the Strict mode and adaptive clipping of Kasmina layers support " +
			"only a single GPU")
	case c.Accumulate < team.Size():
		return fmt.Errorf("a step of %d batches leaves nothing to do for some of %d GPUs: "+
			"TrainConfig.Accumulate must be at least their number", c.Accumulate, team.Size())
	}

	return nil
}

// compileAlike compiles on rank 0 first, and then on the other ranks with rank 0's choices. If rank 0
// fails, all ranks return its error.
func compileAlike[E io.Closer](team *parallel.Team, first func() (E, []optime.Choice, error),
	others func([]optime.Choice) (E, error)) (e E, err error) {
	var chosen []byte
	if team.Rank() == 0 {
		var variants []optime.Choice
		if e, variants, err = first(); err == nil {
			defer func() {
				if err != nil {
					err = errors.Join(err, e.Close())
				}
			}()
			chosen, err = json.Marshal(variants)
		}
	}

	if err = team.Agree(err); err != nil {
		return e, err
	}

	all, err := team.Exchange(chosen)
	if err != nil || team.Rank() == 0 {
		return e, err
	}

	var variants []optime.Choice
	if err := json.Unmarshal(all[0], &variants); err != nil {
		return e, fmt.Errorf("the choices of rank 0: %w", err)
	}

	return others(append([]optime.Choice{}, variants...))
}

// Busy implements [llm.Busier].
func (r ranked) Busy(what string) (done func()) { return r.team.Busy(what) }

func (r ranked) Rank() int                               { return r.team.Rank() }
func (r ranked) Ranks() int                              { return r.team.Size() }
func (r ranked) Exchange(value []byte) ([][]byte, error) { return r.team.Exchange(value) }

func (r ranked) Batches(n int, next func() (data.Batch, error)) ([]float64, error) {
	return r.team.Batches(r.Model, r, n, next)
}

// StepBatches implements [llm.ParallelStepper].
func (r ranked) StepBatches(n int, next func() (data.Batch, error), word []byte) (llm.StepResult,
	error) {
	return r.team.Step(r.Model, r, n, next, word)
}

// Compute implements [parallel.Worker]. In a full round, gradients are sent during the run.
func (r ranked) Compute(b data.Batch, in parallel.Round) (float64, error) {
	if err := r.machine.Rank().Expect(in.Contributors, in.First); err != nil {
		return 0, err
	}
	return r.engine.Gradients(b)
}

// Start, Wait and Finish implement [parallel.Stepper].
func (r ranked) Start(b data.Batch, in parallel.Round) error {
	if err := r.machine.Rank().Expect(in.Contributors, in.First); err != nil {
		return err
	}
	if err := r.graph.Let(b); err != nil {
		return err
	}
	return r.machine.RunAll()
}

func (r ranked) Wait() (float64, error) {
	v, err := r.machine.Value(r.graph.Loss)
	if err != nil {
		return 0, err
	}
	return float64(v.Data().(float32)), nil
}

func (r ranked) Finish(started bool, report func(loss float64) error) (float64, error) {
	var loss *gorgonia.Node
	if started {
		loss = r.graph.Loss
	}
	norm, err := r.updated(r.machine.Rank().Step(loss, report))
	return norm, r.blamed(err)
}

// Pull implements [llm.Engine]. Without names, all ranks must call it, and after a failed run it
// fetches nothing. With names, it does not wait for other ranks, and if the float32 values of a
// weight are divided among ranks, it fetches the values in the precision of the GPU.
func (r ranked) Pull(names ...string) error {
	if len(names) > 0 {
		return r.engine.Pull(names...)
	}
	if r.team.Failed() {
		return nil
	}
	return r.team.Blame(r.engine.Pull())
}

// Add enqueues the exchange of the gradients that have not been sent yet, followed by the sums.
func (r ranked) Add(in parallel.Round) error {
	return r.machine.Rank().Contribute(in.Contributors, in.First)
}

// Judged implements [parallel.Judge].
func (r ranked) Judged() op.PreferenceFigures { return r.graph.TakePreferences() }

// TakePreferences implements [llm.PreferenceMeter].
func (r ranked) TakePreferences() op.PreferenceFigures {
	return r.team.TakePairs().Plus(r.Inference.TakePreferences())
}

// Land does not wait, because the update is enqueued after the sums.
func (r ranked) Land() error { return nil }

func (r ranked) Gradients(data.Batch) (float64, error) {
	return 0, errors.New("llm/gpu: the batches of a step are computed together: use Batches")
}

func (r ranked) Update() (float64, error) {
	norm, err := r.engine.Update()
	return norm, r.blamed(err)
}

// blamed returns the error of an update and reports it to the other ranks, unless the update has changed
// nothing.
func (r ranked) blamed(err error) error {
	if err == nil || errors.Is(err, llm.ErrGradients) {
		return err
	}
	return r.team.Blame(err)
}

// Step always fails, because several ranks use StepBatches.
func (r ranked) Step(data.Batch) (loss, norm float64, err error) {
	_, err = r.Gradients(data.Batch{})
	return 0, 0, err
}

// Gather implements [llm.Parallel]. Without parameters that learn, there is no optimizer state.
func (r ranked) Gather() error {
	if !r.graph.Updates() {
		return nil
	}
	if err := r.machine.Rank().GatherState(); err != nil {
		return r.team.Blame(err)
	}
	return nil
}

// Own fetches the optimizer's state from the GPU of this rank.
func (r ranked) Own() ([]optim.Part, error) {
	if !r.graph.Updates() {
		return nil, nil
	}
	parts, err := r.machine.Rank().DownloadOwn()
	if err != nil {
		return nil, r.team.Blame(err)
	}
	return parts, nil
}

// CanKeep implements [llm.Keeper]. It returns false, because each rank holds only part of the
// parameters.
func (r ranked) CanKeep() bool { return false }

func (r ranked) Loss(b data.Batch) (float64, error) {
	if err := r.team.Progress(); err != nil {
		return 0, err
	}
	return r.engine.Loss(b)
}

// Decoder implements [llm.Engine]. Drawing a token counts as progress.
func (r ranked) Decoder() (func(ctx context.Context, tokens []int) (any, error), error) {
	next, err := r.engine.Decoder()
	return r.team.Drawing(next), err
}

// Drawer returns nil, because drawing a token on the device would not count as progress.
func (r ranked) Drawer() (llm.DrawFunc, error) { return nil, nil }

// Drop does nothing, because the sums of the next step start from zero.
func (r ranked) Drop() error { return nil }
