package callback

import (
	"github.com/kasmina-go/kasmina/internal/failpoint"
	"github.com/kasmina-go/kasmina/llm/event"
	"github.com/kasmina-go/kasmina/state"
)

// MergeAtEnd is that of package llm.
func MergeAtEnd(t Run) event.Callback {
	return func(e event.Event) error {
		if e.Kind != event.StepEnd || !e.Last {
			return nil
		}
		if err := t.Made(); err != nil {
			return err
		}
		seeds := t.Model().Kasmina
		var commands []state.Command
		for layer, r := range seeds.Report() {
			for _, s := range r.Seeds {
				if s.Stage == state.FineTuning {
					commands = append(commands, state.Command{Action: state.Move, Layer: layer,
						Seed: s.Seed, To: state.Fossilized, Why: "the run ends"})
				}
			}
		}
		if len(commands) == 0 {
			return nil
		}

		failpoint.Reach("merge", "")
		return seeds.Do(commands...)
	}
}
