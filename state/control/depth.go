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

// Depth lets a model grow in depth: it begins with few blocks, whose steps are quick, and gets more
// once it learns more slowly. It decides by the run's curve alone, so that a resumed run decides as
// one that was never interrupted. All shares are of the run's budget, or of its steps.
type Depth struct {
	Kind blueprints.Kind // of depth, such as blueprints.Stack
	Size int             // as the kind says
	// Growths is how often the model grows, one growth after the other.
	Growths int
	// Begin and End are the shares between which it may begin to grow. At End it grows in any case.
	//
	// With a Begin of 0 the curve alone decides, and no share is fixed: the model grows once the
	// loss has been flat, as Flat says, from some share to Delay times that share. A curve that is
	// not flat for so long by End belongs to a model that still learns as fast as a larger one would
	// for its cost, and the model never grows.
	Begin, End float64
	// Delay is for a Begin of 0: how long the loss must stay flat. 0 means 1.5.
	Delay float64 `json:",omitempty"`
	// Flat is when it grows. The loss then falls by at most Flat times as much, for each doubling
	// of what is spent, as it did at its fastest. 0 means 1 over what a step costs once the model
	// has grown, in steps of before. Then one that learns as much from a step as this one did at
	// its fastest learns more in the same time.
	Flat float64
	// Settle is the share after which a growth is judged, and Patience that after which one that
	// does not pay is rolled back.
	Settle, Patience float64

	cost func(kind blueprints.Kind, size int) float64
}

// Costs tells the controller what a step costs once the model has grown by a kind and a size. It
// counts in steps of the model as it is. A trainer calls it.
func (d *Depth) Costs(of func(kind blueprints.Kind, size int) float64) {
	d.cost = of
}

// flat is Flat, or what the cost of a step makes of it.
func (d *Depth) flat() float64 {
	if d.Flat > 0 || d.cost == nil {
		return d.Flat
	}
	return 1 / max(1, d.cost(d.Kind, d.Size))
}

// NewDepth returns a controller that grows a model once, by a kind of depth and a size. Begin is
// 0.4, End 0.55, Flat 0, Settle 0.1 and Patience 0.25. Its fields may be changed before it is used.
func NewDepth(kind blueprints.Kind, size int) *Depth {
	return &Depth{Kind: kind, Size: size, Growths: 1, Begin: 0.4, End: 0.55, Settle: 0.1, Patience: 0.25}
}

// Check returns an error that names a field which makes no sense.
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
		refuse("Flat is %v, want a number above 0, or 0 for what the cost of a step says", d.Flat)
	}
	if !(0 < d.Settle && d.Settle <= d.Patience) {
		refuse("Settle is %v and Patience is %v, want 0 < Settle ≤ Patience", d.Settle, d.Patience)
	}
	if d.End+d.Settle*float64(max(d.Growths, 1)) >= 1 {
		refuse("End is %v and Settle is %v for %d growths, which leaves no time to judge the "+
			"last: want End + Growths·Settle < 1", d.End, d.Settle, d.Growths)
	}
	return errors.Join(errs...)
}

// leastPoints is how many epochs must end before the model may grow and before a growth is judged,
// to tell how the loss falls.
const leastPoints = 8

// LeastEpochs returns the fewest epochs that a run needs for a growth that can be judged. As many
// as it takes to tell how the loss falls lie before Begin, and while it settles. The curve has a
// point every so many epochs.
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
		return 0, fmt.Errorf("control.Depth: %w: Growths is %d, and %d seeds are in depth",
			state.ErrArgument, d.Growths, l.Seeds())
	}
	least := d.Settle
	if d.Begin > 0 {
		least = min(d.Begin, d.Settle)
	}
	return int(math.Ceil(float64(leastPoints*max(every, 1)) / least)), nil
}

// Decide returns the commands for the seeds in depth.
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

func (d *Depth) decide(r state.Report) []state.Command {
	grown := 0
	for _, s := range r.Seeds {
		switch {
		case s.Stage == state.Fossilized:
			grown++
		case s.Stage == state.RolledBack || s.Stage == state.Culled || s.Stage == state.Cancelled:
			return nil // what has not paid is not tried again
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
		// A blueprint of copies has learnt before it is planted, so all this takes effect at once.
		return []state.Command{
			{Action: state.Germinate, Seed: s.Seed, Why: why,
				Request: state.GerminationRequest{Kind: d.Kind, Size: d.Size}},
			{Action: state.Move, Seed: s.Seed, To: state.Training},
			{Action: state.Move, Seed: s.Seed, To: state.Grafting},
		}
	}
	return nil
}

// due says why the model should grow now, or nothing.
func (d *Depth) due(r state.Report) string {
	now := r.Curve[len(r.Curve)-1]
	from := 0.0 // of the curve of the model as it is
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
		return fmt.Sprintf("a share of %.3f is spent, of at most %.3f before it grows", now.Share,
			d.End)
	}

	t := d.trend(r.Curve, from)
	if !t.flat || d.Begin == 0 && now.Share < t.since*cmp.Or(d.Delay, defaultDelay) {
		return ""
	}
	why := fmt.Sprintf("the loss, %.4f, falls by %.4f for each doubling of what is spent, less "+
		"than %.2f times the %.4f of its fastest", now.Loss, t.present*math.Ln2, d.flat(),
		t.fastest*math.Ln2)
	if d.Begin == 0 {
		why += fmt.Sprintf(", as it has since a share of %.3f", t.since)
	}
	return why
}

// defaultDelay is the value of Delay that 0 stands for. In the runs of docs/lab/growth.md, it
// starts growth at shares between the ones that were tried. Their losses suggest that the result is
// within 0.002 nats per byte of the best.
const defaultDelay = 1.5

// A trend describes how a curve falls. present and fastest are the falls of the loss each time the
// spending grows by a factor of e.
type trend struct {
	present, fastest float64
	flat             bool    // the present fall is flat
	since            float64 // the share since which it has been
}

// trend returns how a curve falls from a share on.
func (d *Depth) trend(points []state.Point, from float64) trend {
	t, flat := trend{present: math.NaN()}, d.flat()
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

// shares returns a curve as the fit of a trend takes it, from a share on.
func shares(points []state.Point, from float64) (all []curve.Point) {
	for _, p := range points {
		if p.Share > from {
			all = append(all, curve.Point{X: p.Share, Y: p.Loss})
		}
	}
	return all
}

// at returns the point of a curve at an epoch, or the first one after it.
func at(points []state.Point, epoch int) (p state.Point, ok bool) {
	for _, p := range points {
		if p.Epoch >= epoch {
			return p, true
		}
	}
	return p, false
}

// next returns what is due for a seed that has a blueprint.
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
				fmt.Sprintf("it has had a share of %.3f to settle", spent))
		}
	case state.Evaluating, state.FineTuning:
		verdict := fmt.Sprintf("the loss is %.4f lower than it would be without it", s.Delta)
		if s.CanAdvance {
			return move(s.Stage.Next(), verdict)
		}
		if spent >= d.Patience-d.Settle && s.EpochsInStage > 0 && s.Delta <= 0 {
			return move(state.RolledBack,
				fmt.Sprintf("the loss is %.4f higher than it would be without it",
					-s.Delta))
		}
	}
	return nil
}
