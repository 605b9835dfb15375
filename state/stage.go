package state

import "github.com/kasmina-go/kasmina/state/lifecycle"

// Stages and the gates between them are in package lifecycle.
type (
	// Stage is where a seed stands in its life: [lifecycle.Stage].
	Stage = lifecycle.Stage
	// Transition is a change of a seed's stage: [lifecycle.Transition].
	Transition = lifecycle.Transition
	// Thresholds are the conditions of the gates: [lifecycle.Thresholds].
	Thresholds = lifecycle.Thresholds
	// Evidence is what the gates judge a seed by: [lifecycle.Evidence].
	Evidence = lifecycle.Evidence
	// Shortfall is a condition that keeps a gate shut: [lifecycle.Shortfall].
	Shortfall = lifecycle.Shortfall
)

// The stages of a seed.
const (
	Dormant       = lifecycle.Dormant       // y = x; the seed watches its chunk
	Germinated    = lifecycle.Germinated    // y = x; a blueprint has been chosen
	Training      = lifecycle.Training      // y = x; the blueprint learns as if it were blended in
	Grafting      = lifecycle.Grafting      // y = x + α(t(x) − x); α moves every epoch
	Stabilization = lifecycle.Stabilization // the same with α held
	Evaluating    = lifecycle.Evaluating    // the same with α held and the blueprint frozen
	FineTuning    = lifecycle.FineTuning    // y = t(x); the blueprint learns
	Fossilized    = lifecycle.Fossilized    // y = t(x); the blueprint is frozen for good
	Culled        = lifecycle.Culled        // y = x; the blueprint has failed
	// y = x; the blueprint was given up before it was blended in
	Cancelled  = lifecycle.Cancelled
	RolledBack = lifecycle.RolledBack // y = x; the blueprint was taken out again
)

// DefaultThresholds is [lifecycle.DefaultThresholds].
func DefaultThresholds() Thresholds { return lifecycle.DefaultThresholds() }

// DepthThresholds is [lifecycle.DepthThresholds].
func DepthThresholds() Thresholds { return lifecycle.DepthThresholds() }

// Thresholds returns the conditions of the lattice's gates, and whether it has gates.
func (l *Lattice) Thresholds() (t Thresholds, gated bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Thresholds, l.config.Gates
}

// Shortfall returns what keeps a seed from the next stage of its life, [Stage.Next]: the condition
// of its gate that is not met. It is zero where the gate is open, and where there is none. There is
// none without gates, without a blueprint, and where the seed is Fossilized or its blueprint's life
// is over.
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

// Address is a seed's in a network.
type Address struct {
	Layer int `json:"layer"`
	Seed  int `json:"seed"`
}

// Grafted returns the seeds whose blueprints are blended in, but not for good.
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

func finite(v float64) bool { return v-v == 0 }
