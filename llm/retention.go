package llm

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// RetentionConfig configures a [Retention].
type RetentionConfig struct {
	// Text is the old text: text of the kind that the model must not forget. It must not be part of the
	// text that the run trains on.
	Text *data.Evaluation
	// Budget is the largest permitted rise of the mean loss on the old text, in nats per token.
	Budget float64
	// Every is the number of steps between two checks. 0 checks only the model of the last step.
	Every int
}

// A Retention is a [Part] that limits how much a model forgets while it learns a new text.
//
// Before the first step, it measures the loss on the old text. It repeats the measurement after every
// RetentionConfig.Every steps and after step [TrainConfig.Steps]. If the loss has risen by more than the
// budget, it restores the parameters, the ranks of the adapters, and the optimizer state of the last check
// that was within the budget, and halves the learning rate. The step count and the position in the data
// continue, so that the run ends after the planned number of steps with a model within the budget.
//
// Why does it halve the rate instead of freezing some of the adapters? All adapters write to the same
// residual stream, so how much one of them makes the model forget depends on the others. A lower rate always
// reduces the rise between two checks. When the rate would fall below 1/16 of the scheduled one,
// hardly anything more can be learned within the budget, and the run ends.
//
// The model must not have seeds in depth, at weights or in the stream, whose growth changes its parameters.
//
// A checkpoint contains the state to roll back to. With several ranks, rank 0's measurements decide. If only
// adapters learn, the copy is small. Otherwise it takes as much memory as all parameters that learn, together
// with their moments.
type Retention struct {
	config  RetentionConfig
	figures RetentionFigures
	within  *retained // state of the last check within the budget; nil before the first step
	ended   bool
}

// RetentionFigures are the latest figures of a [Retention]. They are zero in a run without one.
type RetentionFigures struct {
	Before     float64 `json:"before"`      // loss on the old text before training, in nats per token
	Loss       float64 `json:"loss"`        // loss on the old text at the last check, after any rollback
	Budget     float64 `json:"budget"`      // largest permitted rise
	Step       int     `json:"step"`        // step whose parameters the model had after the last check
	Rollbacks  int     `json:"rollbacks"`   // number of times the model was rolled back
	RateFactor float64 `json:"rate_factor"` // factor on the scheduled learning rate
}

// IsZero reports whether the run has no Retention.
func (f RetentionFigures) IsZero() bool { return f == RetentionFigures{} }

// Rise returns how much the loss on the old text has risen.
func (f RetentionFigures) Rise() float64 { return f.Loss - f.Before }

// retained is a copy of everything that learning changes.
type retained struct {
	adapter LoRA
	params  map[string]*tensor.Dense // the parameters that learn
	moments []optim.Tensor
	loss    float64
	step    int
}

// leastRateFactor is the smallest factor on the learning rate with which a run continues.
const leastRateFactor = 1.0 / 16

var (
	_ RunStarter   = (*Retention)(nil)
	_ StepFinisher = (*Retention)(nil)
	_ RateScaler   = (*Retention)(nil)
	_ RunEnder     = (*Retention)(nil)
)

// NewRetention returns a part that enforces a forgetting budget. [Trainer.Use] adds it to a trainer.
func NewRetention(c RetentionConfig) (*Retention, error) {
	switch {
	case c.Text == nil:
		return nil, errors.New("llm: NewRetention: RetentionConfig.Text is nil, want text that the model must not " +
			"forget")
	case !(c.Budget > 0) || math.IsInf(c.Budget, 0):
		return nil, fmt.Errorf("llm: NewRetention: RetentionConfig.Budget is %v, want a finite number above 0", c.Budget)
	case c.Every < 0:
		return nil, fmt.Errorf("llm: NewRetention: RetentionConfig.Every is %d, want at least 0", c.Every)
	}
	return &Retention{config: c, figures: RetentionFigures{Budget: c.Budget, RateFactor: 1}}, nil
}

// Name implements [Part].
func (*Retention) Name() string { return "retention" }

// RateFactor implements [RateScaler].
func (r *Retention) RateFactor() float64 { return r.figures.RateFactor }

// Ended implements [RunEnder].
func (r *Retention) Ended() bool { return r.ended }

// StartRun implements [RunStarter]. It measures the loss before training, unless the checkpoint of a resumed
// run had it.
func (r *Retention) StartRun(u Turn) error {
	if c := u.t.Model.Config; c.Depth > 0 || len(c.Weights)+len(c.Streams) > 0 {
		return errors.New("a forgetting budget does not apply to a model that can grow in depth, at weights or in " +
			"the stream, because the last state within the budget may lack parameters that the model has now")
	}

	if r.within == nil {
		if u.t.Config.Preference != nil {
			return errors.New("a forgetting budget does not apply to preference pairs, whose loss keeps the model " +
				"close to what it was")
		}
		if err := u.t.canEvaluate(r.config.Text); err != nil {
			return fmt.Errorf("RetentionConfig.Text: %w", err)
		}

		loss, err := r.measure(u)
		if err != nil {
			return err
		}
		if loss-loss != 0 {
			return fmt.Errorf("%w: the loss on the old text is %v before the first step", ErrDiverged, loss)
		}
		r.figures.Before = loss
		if err := r.retain(u, loss); err != nil {
			return err
		}
	}

	r.publish(u)
	return nil
}

// FinishStep implements [StepFinisher].
func (r *Retention) FinishStep(u Turn) error {
	step := u.Last().Step
	if step < u.t.Config.Steps && (r.config.Every == 0 || step%r.config.Every != 0) {
		return nil
	}

	loss, err := r.measure(u)
	if err != nil {
		return err
	}

	// A loss that is not a number is a violation like any other.
	if rise := loss - r.figures.Before; rise <= r.config.Budget {
		err = r.retain(u, loss)
	} else {
		err = r.rollBack(u, rise)
	}
	r.publish(u)
	return err
}

// publish adds the figures to the events of the run.
func (r *Retention) publish(u Turn) {
	u.t.note(func(e *Event) { e.Retention = r.figures })
}

// measure returns the mean loss on the old text, or NaN if the model has diverged. All ranks use the
// measurement of rank 0, and all fail if one fails.
func (r *Retention) measure(u Turn) (float64, error) {
	defer u.t.team.busy("measuring the loss on the old text")()

	own, err := r.lossOf(u)
	if err = u.t.team.agree(err); err != nil {
		return 0, err
	}
	loss, err := shared(u.t, "loss on the old text", jsonfloat.Float(own))
	return float64(loss), err
}

// lossOf returns the loss that this rank measures on the old text.
func (r *Retention) lossOf(u Turn) (float64, error) {
	var sum float64
	for b := range r.config.Text.Batches() {
		l, err := u.t.driver.loss(b)
		if errors.Is(err, ErrDiverged) {
			l, err = math.NaN(), nil
		}
		if err != nil {
			return 0, fmt.Errorf("the loss on the old text: %w", err)
		}
		sum += l * float64(b.Count)
	}
	loss, _ := r.config.Text.Score(sum)
	return loss, nil
}

// retain copies the current state, which is within the budget.
func (r *Retention) retain(u Turn, loss float64) error {
	now, err := u.t.driver.now()
	if err != nil {
		return err
	}

	s := &retained{adapter: now.Adapter, params: map[string]*tensor.Dense{}, moments: now.Moments, loss: loss,
		step: u.Last().Step}
	for _, p := range now.Params {
		if u.t.Config.Learns(p.Name) {
			s.params[p.Name] = cloneTensor(p.Value)
		}
	}

	r.within = s
	r.figures.Loss, r.figures.Step = loss, s.step
	return nil
}

// rollBack restores the last state within the budget and halves the learning rate.
func (r *Retention) rollBack(u Turn, rise float64) error {
	s := r.within
	if err := u.t.driver.restore(s.adapter, s.params, s.moments); err != nil {
		return fmt.Errorf("rolling back to step %d: %w", s.step, err)
	}

	r.figures.Loss, r.figures.Step = s.loss, s.step
	r.figures.Rollbacks++
	next := fmt.Sprintf("continuing at %v of the learning rate", r.figures.RateFactor/2)
	if r.figures.RateFactor/2 < leastRateFactor {
		r.ended, next = true, "ending the run, because the learning rate has been halved often enough"
	} else {
		r.figures.RateFactor /= 2
	}

	u.t.Note(fmt.Sprintf("the loss on the old text has risen by %.4f, which exceeds the budget of %v: restored the "+
		"model of step %d, with a rise of %.4f; %s", rise, r.config.Budget, s.step, s.loss-r.figures.Before, next))
	return nil
}

// restore gives the model the adapters, the learning parameters and the moments of an earlier state. All other
// parameters stay.
func (d *driver) restore(adapter LoRA, params map[string]*tensor.Dense, moments []optim.Tensor) error {
	now, err := d.now()
	if err != nil && !errors.Is(err, ErrDiverged) {
		return err
	}

	// The whole model is on the host now.
	now.From, now.Here = nil, nil
	next := modelState{layout: now.layout, Moments: moments}
	next.Adapter = adapter
	for p := range next.Specs() {
		v := params[p.Name]
		if v == nil {
			v = now.param(p.Name)
		} else {
			v = cloneTensor(v)
		}
		next.Params = append(next.Params, Param{p.Name, v})
	}

	if !next.layout.SameBlocks(now.layout) {
		if err := d.t.growth.canReshape(next.layout); err != nil {
			return err
		}
		return d.change(now, next, d.lossScale())
	}

	// If the optimizer refuses the moments, nothing has changed.
	if err := d.t.Optimizer.SetState(next.Moments); err != nil {
		return err
	}

	d.t.learning = nil // the moments may belong to slots that are frozen by now
	for _, p := range next.Params {
		if to := d.t.Model.Param(p.Name); to != p.Value {
			copyNumbers(to, p.Value)
		}
	}
	changed(d.t.Model)
	if err := d.engine.Push(); err != nil {
		d.t.on(pushFailed, err)
		return err
	}
	return nil
}

// Save implements [Part].
func (r *Retention) Save(w *CheckpointWriter) error {
	w.Value("text", r.config.Text.Fingerprint())
	w.Value("budget", r.config.Budget)
	w.Value("every", r.config.Every)
	w.Value("figures", r.figures)
	w.Value("ended", r.ended)

	s := r.within
	if s == nil {
		return errors.New("the loss on the old text has not been measured yet")
	}
	w.Value("adapter", s.adapter)
	for _, name := range slices.Sorted(maps.Keys(s.params)) {
		v := s.params[name]
		if err := w.Tensor(retainedParam+name, v.Shape(), v.Data()); err != nil {
			return err
		}
	}
	for _, m := range s.moments {
		if err := w.Tensor(retainedMoment+m.Name, m.Shape, m.Data); err != nil {
			return err
		}
	}
	return nil
}

// Prefixes of the tensors in a checkpoint.
const (
	retainedParam  = "param."
	retainedMoment = "moment."
)

// Load implements [Part].
func (r *Retention) Load(c *CheckpointReader) (install func(), err error) {
	var text string
	var budget float64
	var every int
	var ended bool
	var figures RetentionFigures
	s := &retained{params: map[string]*tensor.Dense{}}
	for _, v := range []struct {
		name string
		into any
	}{{"text", &text}, {"budget", &budget}, {"every", &every}, {"ended", &ended}, {"figures", &figures},
		{"adapter", &s.adapter}} {
		if err := c.Value(v.name, v.into); err != nil {
			return nil, err
		}
	}

	if budget != r.config.Budget || every != r.config.Every {
		c.Differs("the forgetting budget is %v, checked every %d steps, and was %v, checked every %d steps",
			r.config.Budget, r.config.Every, budget, every)
	}
	if text != r.config.Text.Fingerprint() {
		c.Differs("the old text is different: its loss is measured again, before the next step")
		return func() { r.within = nil }, nil
	}
	if f := figures.RateFactor; !(f >= leastRateFactor && f <= 1) {
		return nil, fmt.Errorf("the factor on the learning rate is %v", f)
	}

	for _, name := range c.Tensors() {
		shape, values, err := c.Tensor(name)
		if err != nil {
			return nil, err
		}
		if param, ok := strings.CutPrefix(name, retainedParam); ok {
			s.params[param] = tensor.New(tensor.WithShape(shape...), tensor.WithBacking(values))
		} else if moment, ok := strings.CutPrefix(name, retainedMoment); ok {
			s.moments = append(s.moments, optim.Tensor{Name: moment, Shape: shape, Data: values})
		}
	}

	config := c.Config()
	config.Adapter = s.adapter
	for p := range config.Specs() {
		if v := s.params[p.Name]; v != nil && !v.Shape().Eq(tensor.Shape(p.Shape)) {
			return nil, fmt.Errorf("the retained %s has shape %v, want %v", p.Name, v.Shape(), p.Shape)
		}
	}

	s.loss, s.step, figures.Budget = figures.Loss, figures.Step, r.config.Budget
	return func() { r.within, r.figures, r.ended = s, figures, ended }, nil
}
