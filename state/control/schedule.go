package control

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Schedule grows a model in depth at fixed shares of a run. It is meant for experiments that compare
// shares and kinds of growth, whereas [Depth] decides by itself when to grow and rolls back a growth
// that does not pay off.
//
// The last growth is never judged, and its seed stays in stage Grafting until the end of the run. An
// earlier growth must be fossilized before the next can start, so the next one waits until the
// earlier one has passed the lattice's gates. The trainer still rolls back a growth when a step
// diverges, and after that, the model no longer grows.
type Schedule struct {
	Growths []Planned // in order of their shares
}

// Planned is a growth at a fixed share of a run's budget.
type Planned struct {
	Share float64         // from 0 to less than 1, non-decreasing
	Kind  blueprints.Kind // a kind of depth, such as blueprints.Stack
	Size  int             // size of the growth, as defined by the kind
}

// Check returns an error that names the first invalid growth.
func (s *Schedule) Check() error {
	if len(s.Growths) == 0 {
		return fmt.Errorf("control.Schedule: %w: Growths is empty, want at least one growth",
			state.ErrArgument)
	}

	last := 0.0
	for i, g := range s.Growths {
		if !(g.Share >= last && g.Share < 1) {
			return fmt.Errorf("control.Schedule: %w: Growths[%d].Share is %v, want %v to less than 1: "+
				"shares must not fall", state.ErrArgument, i, g.Share, last)
		}
		if _, err := blueprints.Order(g.Kind, 2, g.Size); err != nil {
			return fmt.Errorf("control.Schedule: %w: Growths[%d]: %w", state.ErrArgument, i, err)
		}
		last = g.Share
	}

	return nil
}

// LeastEpochs returns the minimum number of epochs of a run that completes the schedule, which takes
// one epoch per growth after the last share is reached. It returns an error if a lattice in depth has
// fewer seeds than there are growths.
func (s *Schedule) LeastEpochs(l *state.Lattice, _ int) (int, error) {
	switch {
	case l == nil:
		return 0, errNoLattice
	case l.Site() != blueprints.Depth:
		return 0, s.Check()
	case len(s.Growths) > l.Seeds():
		return 0, fmt.Errorf("control.Schedule: %w: %d growths are planned, but there are %d seeds in depth: "+
			"set Config.Depth to the number of growths", state.ErrArgument, len(s.Growths), l.Seeds())
	}

	if err := s.Check(); err != nil {
		return 0, err
	}
	last := s.Growths[len(s.Growths)-1].Share
	return int(math.Ceil(float64(len(s.Growths)) / (1 - last))), nil
}

// Decide starts the next growth once its share is spent, at most one per epoch.
func (s *Schedule) Decide(reports []state.Report) (commands []state.Command) {
	for layer, r := range reports {
		if r.Site != blueprints.Depth || len(r.Curve) == 0 {
			continue
		}
		for _, c := range s.next(r) {
			c.Layer = layer
			commands = append(commands, c)
		}
	}
	return commands
}

// next returns the commands that are due in one lattice.
func (s *Schedule) next(r state.Report) []state.Command {
	done := 0
	for _, seed := range r.Seeds {
		switch {
		case seed.Stage == state.Fossilized:
			done++
		case seed.Stage.Grafted() && done+1 < len(s.Growths):
			return advance(seed)
		case seed.Stage.Grafted():
			return nil
		case seed.Stage.Ended():
			return nil // the growth diverged
		}
	}

	if done >= len(s.Growths) {
		return nil
	}

	planned, share := s.Growths[done], r.Curve[len(r.Curve)-1].Share
	if share < planned.Share {
		return nil
	}

	for _, seed := range r.Seeds {
		if seed.Stage != state.Dormant {
			continue
		}
		why := fmt.Sprintf("a share of %.3f is spent, and this growth is planned at %.3f", share,
			planned.Share)
		return []state.Command{
			{Action: state.Germinate, Seed: seed.Seed, Why: why,
				Request: state.GerminationRequest{Kind: planned.Kind, Size: planned.Size}},
			{Action: state.Move, Seed: seed.Seed, To: state.Training},
			{Action: state.Move, Seed: seed.Seed, To: state.Grafting},
		}
	}

	return nil
}

// advance returns the commands that move a grafted seed to its evaluation and, once the gate is
// open, beyond it.
func advance(seed state.SeedReport) []state.Command {
	move := func(to state.Stage) state.Command {
		return state.Command{Action: state.Move, Seed: seed.Seed, To: to}
	}
	switch {
	case seed.Stage == state.Grafting:
		return []state.Command{move(state.Stabilization), move(state.Evaluating)}
	case seed.CanAdvance:
		return []state.Command{move(seed.Stage.Next())}
	}
	return nil
}
