package state

import (
	"fmt"
	"strings"
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

	stages = iota
)

var stageNames = [stages]string{"Dormant", "Germinated", "Training", "Grafting",
	"Stabilization", "Evaluating",
	"FineTuning", "Fossilized", "Culled", "Cancelled", "RolledBack"}

// allowed[s] holds the stages that may follow s. From Culled, Cancelled and RolledBack only
// Lattice.Recycle leads on.
var allowed = [stages][]Stage{
	Dormant:       {Germinated},
	Germinated:    {Training, Cancelled},
	Training:      {Grafting, Culled, Cancelled},
	Grafting:      {Stabilization, RolledBack},
	Stabilization: {Evaluating, RolledBack},
	Evaluating:    {FineTuning, Culled, RolledBack},
	FineTuning:    {Fossilized, Culled, RolledBack},
}

// String returns the stage's name.
func (s Stage) String() string { return nameOf(s, "Stage", stageNames[:]) }

// nameOf returns the name of a constant, or its type and number where it has none.
func nameOf[T ~uint8](v T, kind string, names []string) string {
	if int(v) < len(names) && names[v] != "" {
		return names[v]
	}
	return fmt.Sprintf("%s(%d)", kind, v)
}

// CanBecome reports whether the table of transitions leads from s to next.
func (s Stage) CanBecome(next Stage) bool {
	if s < stages {
		for _, a := range allowed[s] {
			if a == next {
				return true
			}
		}
	}
	return false
}

// way says, for an error, where a seed goes from the stage.
func (s Stage) way() string {
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

// grafted reports whether the blueprint of a seed in the stage is blended in, but not for good.
func (s Stage) grafted() bool { return s >= Grafting && s <= FineTuning }

// Learns reports whether weights and scale receive gradients.
func (s Stage) Learns() bool {
	return s == Training || s == Grafting || s == Stabilization || s == FineTuning
}

// LearningSlots returns, for each of the slots that [WithSlots] gave, whether a seed learns with
// it.
func (l *Lattice) LearningSlots() []bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	learning := make([]bool, l.config.Slots)
	for seed := range l.n {
		if stage, slot := l.at(seed); slot < len(learning) && stage.Learns() {
			learning[slot] = true
		}
	}
	return learning
}

// Ended reports whether the blueprint's life is over, so that only recycling leads on.
func (s Stage) Ended() bool { return s == Culled || s == Cancelled || s == RolledBack }

// weight is the α with which the arithmetic of the stage blends, given the seed's own: of the
// output, or in Training, where the output is x, of the gradients of weights and scale.
func (s Stage) weight(alpha float32) float32 {
	switch s {
	case Training, FineTuning, Fossilized:
		return 1
	case Grafting, Stabilization, Evaluating:
		return alpha
	}
	return 0
}

// share is the α with which the output blends.
func (s Stage) share(alpha float32) float32 {
	if !s.Blends() {
		return 0
	}
	return s.weight(alpha)
}
