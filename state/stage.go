package state

import "github.com/kasmina-go/kasmina/state/lifecycle"

// Stages and gates are implemented in package lifecycle.
type (
	// Stage is a stage of a seed's life. The package documentation contains a table of the stages and
	// transitions. See [lifecycle.Stage].
	Stage = lifecycle.Stage
	// Transition is a change of a seed's stage; see [lifecycle.Transition].
	Transition = lifecycle.Transition
	// Thresholds are the conditions of the gates; see [lifecycle.Thresholds].
	Thresholds = lifecycle.Thresholds
	// Evidence holds the figures that gates judge; see [lifecycle.Evidence].
	Evidence = lifecycle.Evidence
	// Shortfall is a condition that keeps a gate shut; see [lifecycle.Shortfall].
	Shortfall = lifecycle.Shortfall
)

// Stages of a seed. y is its output, x its input chunk, t the transform of its blueprint.
const (
	Dormant       = lifecycle.Dormant       // y = x; the seed only measures its chunk
	Germinated    = lifecycle.Germinated    // y = x; a blueprint has been chosen
	Training      = lifecycle.Training      // y = x; the blueprint learns as if α were 1
	Grafting      = lifecycle.Grafting      // y = x + α(t(x) − x); α rises every epoch
	Stabilization = lifecycle.Stabilization // as Grafting, with α held
	Evaluating    = lifecycle.Evaluating    // as Grafting, with α held and the blueprint frozen
	FineTuning    = lifecycle.FineTuning    // y = t(x); the blueprint learns
	Fossilized    = lifecycle.Fossilized    // y = t(x); the blueprint is frozen permanently
	Culled        = lifecycle.Culled        // y = x; the blueprint has failed
	// Cancelled: y = x; the blueprint was given up before it was blended in.
	Cancelled  = lifecycle.Cancelled
	RolledBack = lifecycle.RolledBack // y = x; the blueprint was removed again
)

// DefaultThresholds returns the default thresholds; see [lifecycle.DefaultThresholds].
func DefaultThresholds() Thresholds { return lifecycle.DefaultThresholds() }

// DepthThresholds returns the default thresholds in depth; see [lifecycle.DepthThresholds].
func DepthThresholds() Thresholds { return lifecycle.DepthThresholds() }

// Thresholds returns the conditions of the lattice's gates, and whether it has gates at all.
func (l *Lattice) Thresholds() (t Thresholds, gated bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Thresholds, l.config.Gates
}

// Shortfall returns the condition that keeps a seed from the next stage of its life, [Stage.Next]. It is
// zero if the gate is open or does not exist, because the lattice has no gates or because the seed has no
// blueprint, is fossilized, or has reached the end of its blueprint's life.
func (l *Lattice) Shortfall(seed int) (Shortfall, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()

	if err := l.checkSeed("Shortfall", seed); err != nil {
		return Shortfall{}, err
	}
	from := Stage(l.seeds.stage[seed])
	if !l.config.Gates || !from.Alive() || from == Fossilized {
		return Shortfall{}, nil
	}
	s, _ := l.config.Thresholds.Gate(from, from.Next(), l.evidence(seed))
	return s, nil
}

// Address identifies a seed in a network.
type Address struct {
	Layer int `json:"layer"`
	Seed  int `json:"seed"`
}

// Grafted returns the seeds that are blended in but not yet fossilized.
func (l *Lattice) Grafted() (seeds []int) {
	l.mu.RLock()
	defer l.mu.RUnlock()

	for seed := range l.n {
		if stage, _ := l.at(seed); stage.Grafted() {
			seeds = append(seeds, seed)
		}
	}
	return seeds
}

// LearningSlots reports, for each slot set by [WithSlots], whether any seed trains its parameters.
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

// finite reports whether v is neither NaN nor infinite.
func finite(v float64) bool { return v-v == 0 }
