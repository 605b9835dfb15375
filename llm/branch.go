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
// rejects the branch, nothing changes.
func (d *driver) enter(b branch) error {
	scale := d.lossScale()
	if err := d.setLossScale(b.scale); err != nil {
		return err
	}

	if err := d.t.Optimizer.SetState(b.Moments); err != nil {
		return errors.Join(err, d.setLossScale(scale))
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

// errNotTaken marks an error from enter that occurs after the host, but not the engine, has switched to
// the branch.
var errNotTaken = errors.New("the engine has not taken the parameters")

// suspend copies everything that training steps change and returns a function that restores it. If
// restoring fails, the trainer needs a Resume; the model's own parameters are then only on the host, or
// lost.
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
		err = errors.Join(err, d.t.Loader.SetState(loader), d.t.Optimizer.SetLR(rate), d.enter(own))
		d.t.progress = progress
		if err != nil {
			failed := modelLost
			if errors.Is(err, errNotTaken) {
				failed = pushFailed
			}
			d.t.on(failed, fmt.Errorf("the model could not be restored after its twin's steps: %w", err))
		}
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
			return norms, fmt.Errorf("%w, after: %v", dropped, err) // more serious than a divergence
		}
		return norms, err
	}

	return norms, nil
}
