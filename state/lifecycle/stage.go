// Package lifecycle defines the stages of a seed's life, the table of transitions between them, and
// the gates that guard the transitions. Everything here is pure arithmetic on its arguments. Package
// state holds the seeds, and its documentation shows the table.
package lifecycle

import (
	"strings"

	"github.com/kasmina-go/kasmina/internal/enum"
)

// Stage is a stage of a seed's life.
type Stage uint8

// Stages of a seed. y is its output, x its input chunk, t the transform of its blueprint.
const (
	Dormant    Stage = iota // y = x; the seed only measures its chunk
	Germinated              // y = x; a blueprint has been chosen
	// Training: y = x; the blueprint learns as if α were 1, without affecting the host.
	Training
	Grafting      // y = x + α(t(x) − x); the strategy raises α every epoch
	Stabilization // as Grafting, with α held
	Evaluating    // as Grafting, with α held and the blueprint frozen
	FineTuning    // y = t(x); the blueprint learns
	Fossilized    // y = t(x); the blueprint is frozen permanently
	Culled        // y = x; the blueprint has failed
	Cancelled     // y = x; the blueprint was given up before it was blended in
	RolledBack    // y = x; the blueprint was removed again

	Count = iota // number of stages
)

// Names holds the names of the stages by number.
var Names = [Count]string{"Dormant", "Germinated", "Training", "Grafting",
	"Stabilization", "Evaluating",
	"FineTuning", "Fossilized", "Culled", "Cancelled", "RolledBack"}

// allowed[s] lists the stages that may follow s. Culled, Cancelled and RolledBack have no entry,
// because only state.Lattice.Recycle ends them.
var allowed = [Count][]Stage{
	Dormant:       {Germinated},
	Germinated:    {Training, Cancelled},
	Training:      {Grafting, Culled, Cancelled},
	Grafting:      {Stabilization, RolledBack},
	Stabilization: {Evaluating, RolledBack},
	Evaluating:    {FineTuning, Culled, RolledBack},
	FineTuning:    {Fossilized, Culled, RolledBack},
}

// String returns the stage's name.
func (s Stage) String() string {
	return enum.Name(s, "Stage", Names[:])
}

// CanBecome reports whether the table allows a transition from s to next.
func (s Stage) CanBecome(next Stage) bool {
	if s < Count {
		for _, a := range allowed[s] {
			if a == next {
				return true
			}
		}
	}
	return false
}

// NextSteps describes, for an error message, how a seed can leave the stage.
func (s Stage) NextSteps() string {
	switch {
	case s == Dormant:
		return "RequestGermination, or the command Germinate, gives it a blueprint"
	case s == Fossilized:
		return "it is permanent"
	case s.Ended():
		return "Recycle makes it dormant, and then it can grow another blueprint"
	}

	names := make([]string, len(allowed[s]))
	for i, next := range allowed[s] {
		names[i] = next.String()
	}
	last := len(names) - 1
	return "want " + strings.Join(names[:last], ", ") + " or " + names[last]
}

// Next returns the following stage in a life without failures, or s itself if it is Fossilized,
// Culled, Cancelled or RolledBack.
func (s Stage) Next() Stage {
	if s >= Fossilized {
		return s
	}
	return s + 1
}

// Blends reports whether the output is x + α(t(x) − x) rather than x.
func (s Stage) Blends() bool { return s >= Grafting && s <= Fossilized }

// Alive reports whether a seed in the stage has a blueprint.
func (s Stage) Alive() bool { return s >= Germinated && s <= Fossilized }

// Grafted reports whether the blueprint of a seed in the stage is blended in but not fossilized.
func (s Stage) Grafted() bool { return s >= Grafting && s <= FineTuning }

// Learns reports whether the blueprint's weights and scale receive gradients.
func (s Stage) Learns() bool {
	return s == Training || s == Grafting || s == Stabilization || s == FineTuning
}

// Ended reports whether the blueprint's life is over, so that only recycling can follow.
func (s Stage) Ended() bool { return s == Culled || s == Cancelled || s == RolledBack }

// Weight returns the α for the arithmetic of the stage, given the seed's own α. In Training, where
// the output is x, it applies only to the gradients of weights and scale.
func (s Stage) Weight(alpha float32) float32 {
	switch s {
	case Training, FineTuning, Fossilized:
		return 1
	case Grafting, Stabilization, Evaluating:
		return alpha
	}
	return 0
}

// Share returns the effective α of the output.
func (s Stage) Share(alpha float32) float32 {
	if !s.Blends() {
		return 0
	}
	return s.Weight(alpha)
}
