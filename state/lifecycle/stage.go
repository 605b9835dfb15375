// Package lifecycle has the stages of a seed's life, the table of what may follow what, and the
// gates between them. All of it is pure: package state keeps the seeds.
package lifecycle

import (
	"strings"

	"github.com/kasmina-go/kasmina/internal/enum"
)

// Stage is where a seed stands in its life.
type Stage uint8

// The stages of a seed. y is the seed's output, x its input chunk, t its blueprint's transform.
const (
	Dormant    Stage = iota // y = x; the seed watches its chunk
	Germinated              // y = x; a blueprint has been chosen
	// y = x; the blueprint learns as if it were blended in with α = 1, the host unaffected
	Training
	Grafting      // y = x + α(t(x) − x); the strategy moves α every epoch
	Stabilization // the same with α held
	Evaluating    // the same with α held and the blueprint frozen
	FineTuning    // y = t(x); the blueprint learns
	Fossilized    // y = t(x); the blueprint is frozen for good
	Culled        // y = x; the blueprint has failed
	Cancelled     // y = x; the blueprint was given up before it was blended in
	RolledBack    // y = x; the blueprint was taken out again

	Count = iota // how many there are
)

// Names are those of the stages, by number.
var Names = [Count]string{"Dormant", "Germinated", "Training", "Grafting",
	"Stabilization", "Evaluating",
	"FineTuning", "Fossilized", "Culled", "Cancelled", "RolledBack"}

// allowed[s] holds the stages that may follow s. From Culled, Cancelled and RolledBack only
// state.Lattice.Recycle leads on.
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

// CanBecome reports whether the table of transitions leads from s to next.
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

// Way says, for an error, where a seed goes from the stage.
func (s Stage) Way() string {
	switch {
	case s == Dormant:
		return "RequestGermination, or the command Germinate, gives it a blueprint"
	case s == Fossilized:
		return "it is there for good"
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

// Next returns the stage that follows in a life without failures, or s itself when s is Fossilized
// or has ended.
func (s Stage) Next() Stage {
	if s >= Fossilized {
		return s
	}
	return s + 1
}

// Blends reports whether the output is x + α(t(x) − x), rather than x.
func (s Stage) Blends() bool { return s >= Grafting && s <= Fossilized }

// Alive reports whether a seed in the stage has a blueprint.
func (s Stage) Alive() bool { return s >= Germinated && s <= Fossilized }

// Grafted reports whether the blueprint of a seed in the stage is blended in, but not for good.
func (s Stage) Grafted() bool { return s >= Grafting && s <= FineTuning }

// Learns reports whether weights and scale receive gradients.
func (s Stage) Learns() bool {
	return s == Training || s == Grafting || s == Stabilization || s == FineTuning
}

// Ended reports whether the blueprint's life is over, so that only recycling leads on.
func (s Stage) Ended() bool { return s == Culled || s == Cancelled || s == RolledBack }

// Weight is the α with which the arithmetic of the stage blends, given the seed's own. It blends
// the output or, in Training, where the output is x, the gradients of weights and scale.
func (s Stage) Weight(alpha float32) float32 {
	switch s {
	case Training, FineTuning, Fossilized:
		return 1
	case Grafting, Stabilization, Evaluating:
		return alpha
	}
	return 0
}

// Share is the α with which the output blends.
func (s Stage) Share(alpha float32) float32 {
	if !s.Blends() {
		return 0
	}
	return s.Weight(alpha)
}
