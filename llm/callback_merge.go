package llm

import (
	"errors"

	"github.com/kasmina-go/kasmina/internal/failpoint"
	"github.com/kasmina-go/kasmina/state"
)

// MergeAtEnd fossilizes every blueprint in FineTuning, such as the adapters of control.Adapters,
// after the last step of a run. When the run ends, these blueprints become part of the model. Add
// MergeAtEnd before callbacks that save. If a callback has failed after the last step, MergeAtEnd acts when
// the run is started again.
//
// A blueprint that has not reached the thresholds of its lattice yet stays in FineTuning.
func MergeAtEnd(t *Trainer) Callback {
	return func(e Event) error {
		if !due(e, 0) {
			return nil
		}
		seeds := t.Model.Kasmina
		for layer, r := range seeds.Report() {
			for _, s := range r.Seeds {
				if s.Stage != state.FineTuning {
					continue
				}
				failpoint.Reach("merge", "")
				err := seeds.Do(state.Command{Action: state.Move, Layer: layer, Seed: s.Seed,
					To: state.Fossilized, Why: "the run ends"})
				if err != nil && !errors.Is(err, state.ErrGate) {
					return err
				}
			}
		}
		return nil
	}
}
