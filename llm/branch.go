package llm

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/internal/parallel"
)

// A branch is a copy of the model state that training steps change: parameters, optimizer moments and
// loss scale.
type branch struct {
	modelState // not shared with the model
	scale      *LossScale
}

// branch returns a copy of the model's parameters, moments and loss scale.
func (d *driver) branch() (b branch, err error) {
	m, err := d.now()
	if err != nil {
		return b, err
	}
	return branch{m.Clone(), d.lossScale()}, nil
}

// enter replaces the model's parameters, moments and loss scale with the branch's. If the optimizer
// rejects the branch, nothing changes, unless the error wraps errNotUndone.
func (d *driver) enter(b branch) error {
	scale := d.lossScale()
	if err := d.setLossScale(b.scale); err != nil {
		return err
	}

	if err := d.t.Optimizer.SetState(b.Moments); err != nil {
		if again := d.setLossScale(scale); again != nil {
			return fmt.Errorf("%w; %w: %w", err, errNotUndone, again)
		}
		return err
	}

	d.t.learning = nil // the moments may belong to slots that are frozen by now
	changed(d.t.Model)
	parallel.Each(len(b.Params), func(i int) {
		copyNumbers(d.t.Model.Params[i].Value, b.Params[i].Value)
	})
	if err := d.engine.Push(); err != nil {
		return fmt.Errorf("%w: %w", errNotTaken, err)
	}

	return nil
}

var (
	// errNotTaken marks an error from enter that occurs after the host, but not the engine, has switched to
	// the branch.
	errNotTaken = errors.New("the engine has not taken the parameters")

	// errNotUndone marks an error from enter after which the engine has the loss scale of the branch.
	errNotUndone = errors.New("restoring the loss scale")
)

// suspend copies everything that training steps change and returns a function that restores it. If
// restoring fails, the model's own parameters are only on the host or lost, and the trainer must be resumed
// from a checkpoint.
func (d *driver) suspend() (restore func() error, err error) {
	own, err := d.branch()
	if err != nil {
		return nil, err
	}

	progress, arrays := d.t.progress, d.t.Model.Kasmina.Arrays()
	loader, rate := d.t.Loader.State(), d.t.Optimizer.LR()

	return func() error {
		install, err := d.t.Model.Kasmina.Load(arrays)
		if err == nil {
			install()
		}
		err = errors.Join(err, d.t.Loader.SetState(loader), d.t.Optimizer.SetLR(rate))
		entered := d.enter(own)
		d.t.progress = progress
		if err == nil && entered == nil {
			return nil
		}

		failed := modelLost
		if err == nil && errors.Is(entered, errNotTaken) {
			failed = pushFailed // only the engine differs
		}
		err = errors.Join(err, entered)
		d.t.on(failed, fmt.Errorf("the model could not be restored after its twin's steps: %w", err))
		return err
	}, nil
}

// repeat trains on the loader's next batches, with one step for each learning rate, and returns the sum
// of the gradient norms. The steps do not count toward the run. If a step fails, its gradients are
// dropped.
func (d *driver) repeat(rates []float64) (norms float64, err error) {
	defer func(whole bool) { d.whole = whole }(d.whole)
	d.whole = true

	for _, rate := range rates {
		u := update{rate: rate, before: rate}
		_, err := d.compute(&u)
		norms, d.t.spent.FLOPs = norms+u.norm, d.t.spent.FLOPs+d.t.stepFLOPs()
		if err == nil {
			continue
		}

		if dropped := d.engine.Drop(); dropped != nil {
			err = fmt.Errorf("%w, after: %v", dropped, err) // more serious than a divergence
			d.t.on(restoreFailed, fmt.Errorf("the gradients of a failed step were not dropped: %w", err))
		}
		return norms, err
	}

	return norms, nil
}
