package main

import (
	"fmt"
	"io"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// follow makes a trainer follow the controller, tells of what happens to the seeds, and counts what
// ends well or not.
func follow(t *llm.Trainer, o options, text *corpus, r *result, w io.Writer) (*history, error) {
	var controller state.Controller = narrated{o.controller, w}
	if o.dryRun {
		controller = control.DryRun(o.controller, w)
	}
	_, err := t.Model.Kasmina.Listen(func(e state.Event) {
		switch {
		case e.Kind == state.StageChanged && e.To == state.Fossilized:
			r.Fossilized++
		case e.Kind == state.StageChanged && e.To.Ended():
			r.Given++
		}
		if e.Kind != state.GateOpened { // what is made of it follows at once
			fmt.Fprintf(w, "seeds     %v\n", e)
		}
	})
	if err != nil {
		return nil, err
	}
	err = t.Grow(llm.Growth{Controller: controller, Validation: text.validation, Every: o.every,
		Refused: func(c state.Command, err error) { fmt.Fprintf(w, "refused   %v: %v\n", c, err) }})
	return &history{network: t.Model.Kasmina, every: t.Config.Epoch}, err
}

// narrated prints the reasons of a controller's commands; the events tell what comes of them. To
// Grow it is the Heuristic that it is: one that can be checked before a run.
type narrated struct {
	*control.Heuristic
	w io.Writer
}

func (n narrated) Decide(reports []state.Report) []state.Command {
	commands := n.Heuristic.Decide(reports)
	for _, c := range commands {
		if c.Why != "" {
			fmt.Fprintf(n.w, "decision  %v\n", c)
		}
	}
	return commands
}

func progress(t *llm.Trainer, w io.Writer, grown bool) llm.Callback {
	return func(e llm.Event) error {
		if e.Kind == llm.StepEnd && (e.Step%50 == 0 || e.Step == e.Steps) {
			fmt.Fprintf(w, "%-9s step %d of %d, training loss %.3f, %.0f tokens/s\n", name(grown), e.Step, e.Steps, e.Loss,
				float64(e.RunTokens)/e.Elapsed.Seconds())
		}
		return nil
	}
}
