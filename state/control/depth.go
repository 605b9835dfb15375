package control

import (
	"cmp"
	"errors"
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/curve"
	"github.com/kasmina-go/kasmina/state"
)

// Depth is a controller that lets a model grow in depth. The model starts with few blocks, which
// makes steps fast, and gets more blocks once its loss falls more slowly. The decisions depend only
// on the curve of the run's loss, so a resumed run decides as if it had not been interrupted. All
// shares are fractions of the run's budget or, without one, of its steps.
type Depth struct {
	Kind blueprints.Kind // a kind of depth, such as blueprints.Stack
	Size int             // size of the growth, as defined by the kind
	// Growths is the number of growths, which take place one after another.
	Growths int
	// Begin and End are the shares between which growth may start. At End, the model grows
	// regardless of the curve.
	//
	// If Begin is 0, growth may start at any share before End: the model grows once the loss has
	// stayed flat (see Flat) from some share s until the share Delay·s. If that has not happened by
	// End, more blocks are not worth their cost, so the model never grows.
	Begin, End float64
	// Delay, used if Begin is 0, is the factor by which the share must grow while the loss stays
	// flat. 0 means 1.5.
	Delay float64 `json:",omitempty"`
	// Flat defines when the loss counts as flat: when a doubling of the spent share lowers it by at
	// most Flat times as much as a doubling did at its fastest.
	//
	// 0 means 1/c, where a step of the grown model costs c times as much as a step of the current
	// one. If the grown model then learns as much per step as the current one did at its fastest,
	// it learns more in the same time.
	Flat float64
	// Settle is the share that passes between a growth and its evaluation. Patience is the share
	// after which a growth that does not pay off is rolled back.
	Settle, Patience float64

	cost func(kind blueprints.Kind, size int) float64
}

// Costs sets the function that returns the cost of a step after growth by a kind and size, in steps
// of the current model. The trainer calls it.
func (d *Depth) Costs(of func(kind blueprints.Kind, size int) float64) {
	d.cost = of
}

// flat returns Flat, or its default according to the cost of a step.
func (d *Depth) flat() float64 {
	if d.Flat > 0 || d.cost == nil {
		return d.Flat
	}
	return 1 / max(1, d.cost(d.Kind, d.Size))
}

// NewDepth returns a controller that grows a model once, by a kind of depth and a size, with Begin
// 0.4, End 0.55, Settle 0.1 and Patience 0.25. Its fields may be changed before its first use.
func NewDepth(kind blueprints.Kind, size int) *Depth {
	return &Depth{Kind: kind, Size: size, Growths: 1, Begin: 0.4, End: 0.55, Settle: 0.1, Patience: 0.25}
}

// Check returns an error that names all invalid fields.
func (d *Depth) Check() error {
	var errs []error
	refuse := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("control.Depth: %w: "+format,
			append([]any{state.ErrArgument},
				args...)...))
	}
	if _, err := blueprints.Order(d.Kind, 2, d.Size); err != nil {
		refuse("Kind and Size: %w", err)
	}

	if d.Growths < 1 {
		refuse("Growths is %d, want at least 1", d.Growths)
	}

	if !(0 <= d.Begin && d.Begin <= d.End && 0 < d.End && d.End < 1) {
		refuse("Begin is %v and End is %v, want 0 ≤ Begin ≤ End, and End above 0 and below 1", d.Begin,
			d.End)
	}

	if !(d.Delay == 0 || d.Delay >= 1 && !math.IsInf(d.Delay, 1)) {
		refuse("Delay is %v, want at least 1, or 0 for the default", d.Delay)
	}

	if !(d.Flat >= 0) {
		refuse("Flat is %v, want a number above 0, or 0 to derive it from the cost of a step", d.Flat)
	}

	if !(0 < d.Settle && d.Settle <= d.Patience) {
		refuse("Settle is %v and Patience is %v, want 0 < Settle ≤ Patience", d.Settle, d.Patience)
	}

	if d.End+d.Settle*float64(max(d.Growths, 1)) >= 1 {
		refuse("End is %v and Settle is %v for %d growths, so there is no time to judge the "+
			"last: want End + Growths·Settle < 1", d.End, d.Settle, d.Growths)
	}

	return errors.Join(errs...)
}

// leastPoints is the number of epochs that must end before the model may grow, and before a growth
// is judged, so that the slope of the loss is known.
const leastPoints = 8

// LeastEpochs returns the minimum number of epochs of a run in which a growth can be judged, since
// the shares before Begin and during Settle must each contain enough points to determine the slope of
// the loss. The curve has one point for each group of `every` epochs.
func (d *Depth) LeastEpochs(l *state.Lattice, every int) (int, error) {
	if err := d.Check(); err != nil {
		return 0, err
	}
	if l == nil {
		return 0, errNoLattice
	}
	if l.Site() != blueprints.Depth {
		return 0, nil
	}
	if d.Growths > l.Seeds() {
		return 0, fmt.Errorf("control.Depth: %w: Growths is %d, but there are %d seeds in depth",
			state.ErrArgument, d.Growths, l.Seeds())
	}

	least := d.Settle
	if d.Begin > 0 {
		least = min(d.Begin, d.Settle)
	}
	return int(math.Ceil(float64(leastPoints*max(every, 1)) / least)), nil
}

// Decide returns the commands for seeds in depth.
func (d *Depth) Decide(reports []state.Report) (commands []state.Command) {
	for layer, r := range reports {
		if r.Site != blueprints.Depth || len(r.Curve) == 0 {
			continue
		}
		for _, c := range d.decide(r) {
			c.Layer = layer
			commands = append(commands, c)
		}
	}
	return commands
}

// decide returns the commands for one lattice.
func (d *Depth) decide(r state.Report) []state.Command {
	grown := 0
	for _, s := range r.Seeds {
		switch {
		case s.Stage == state.Fossilized:
			grown++
		case s.Stage == state.RolledBack || s.Stage == state.Culled || s.Stage == state.Cancelled:
			return nil // a growth that failed is not repeated
		case s.Stage != state.Dormant:
			return d.next(r, s)
		}
	}

	if grown == d.Growths {
		return nil
	}

	for _, s := range r.Seeds {
		if s.Stage != state.Dormant {
			continue
		}

		why := d.due(r)
		if why == "" {
			return nil
		}

		// Blocks are copies of trained ones, so they need no training stage, and all commands take
		// effect together.
		return []state.Command{
			{Action: state.Germinate, Seed: s.Seed, Why: why,
				Request: state.GerminationRequest{Kind: d.Kind, Size: d.Size}},
			{Action: state.Move, Seed: s.Seed, To: state.Training},
			{Action: state.Move, Seed: s.Seed, To: state.Grafting},
		}
	}

	return nil
}

// due returns the reason for growing now, or "".
func (d *Depth) due(r state.Report) string {
	now := r.Curve[len(r.Curve)-1]
	from := 0.0 // start of the current model's curve
	for _, s := range r.Seeds {
		if p, ok := at(r.Curve, r.Epoch-s.EpochsInStage); s.Stage == state.Fossilized && ok {
			from = max(from, p.Share)
		}
	}

	if from == 0 && now.Share < d.Begin || len(r.Curve) < leastPoints {
		return ""
	}

	if from == 0 && now.Share >= d.End {
		if d.Begin == 0 {
			return ""
		}
		return fmt.Sprintf("a share of %.3f is spent, and growth starts at %.3f at the latest", now.Share,
			d.End)
	}

	t := trendOf(r.Curve, from, d.flat())
	if !t.flat || d.Begin == 0 && now.Share < t.since*cmp.Or(d.Delay, defaultDelay) {
		return ""
	}

	why := fmt.Sprintf("the loss, %.4f, falls by %.4f per doubling of the spent share, less "+
		"than %.2f times the fastest fall, %.4f", now.Loss, t.present*math.Ln2, d.flat(),
		t.fastest*math.Ln2)
	if d.Begin == 0 {
		why += fmt.Sprintf(", and has done so since a share of %.3f", t.since)
	}
	return why
}

// defaultDelay is the meaning of a zero Delay. In the runs of docs/lab/growth.md, it starts growth at
// shares between the tested ones; judging by their losses, the result should be within 0.002 nats per
// byte of the best.
const defaultDelay = 1.5

// trend describes the slope of a curve. present and fastest are decreases of the loss per increase
// of the spent share by a factor of e.
type trend struct {
	present, fastest float64
	flat             bool    // whether the loss is flat now
	since            float64 // the share since which it has been flat
}

// trendOf returns the slope of a curve after the share from. The curve is flat where it falls at most flat
// times as fast as at its fastest.
func trendOf(points []state.Point, from, flat float64) trend {
	t := trend{present: math.NaN()}
	for i, p := range points {
		if p.Share <= from {
			continue
		}
		fall, _, ok := curve.Trend(shares(points[:i+1], from))
		if !ok {
			continue
		}
		t.present, t.fastest = fall, max(t.fastest, fall)
		isFlat := fall <= flat*t.fastest
		if isFlat && !t.flat {
			t.since = p.Share
		}
		t.flat = isFlat
	}

	return t
}

// shares returns the points of a curve after the share from, as input for a fit.
func shares(points []state.Point, from float64) (all []curve.Point) {
	for _, p := range points {
		if p.Share > from {
			all = append(all, curve.Point{X: p.Share, Y: p.Loss})
		}
	}
	return all
}

// at returns the first point of a curve at or after an epoch.
func at(points []state.Point, epoch int) (p state.Point, ok bool) {
	for _, p := range points {
		if p.Epoch >= epoch {
			return p, true
		}
	}
	return p, false
}

// next returns the commands that are due for a seed with a blueprint.
func (d *Depth) next(r state.Report, s state.SeedReport) []state.Command {
	move := func(to state.Stage, why string) []state.Command {
		return []state.Command{{Action: state.Move, Seed: s.Seed, To: to, Why: why}}
	}
	now := r.Curve[len(r.Curve)-1]
	entered, ok := at(r.Curve, r.Epoch-s.EpochsInStage)
	if !ok {
		entered = now
	}

	spent := now.Share - entered.Share
	switch s.Stage {
	case state.Germinated, state.Training:
		return move(s.Stage.Next(), "")
	case state.Grafting:
		return move(state.Stabilization, "")
	case state.Stabilization:
		if spent >= d.Settle {
			return move(state.Evaluating,
				fmt.Sprintf("it has settled for a share of %.3f", spent))
		}
	case state.Evaluating, state.FineTuning:
		verdict := fmt.Sprintf("the loss is %.4f lower than without it", s.Delta)
		if s.CanAdvance {
			return move(s.Stage.Next(), verdict)
		}
		if spent >= d.Patience-d.Settle && s.EpochsInStage > 0 && s.Delta <= 0 {
			return move(state.RolledBack,
				fmt.Sprintf("the loss is %.4f higher than without it",
					-s.Delta))
		}
	}

	return nil
}
