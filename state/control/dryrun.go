package control

import (
	"fmt"
	"io"

	"github.com/kasmina-go/kasmina/state"
)

// DryRun returns a controller that writes the commands of c to w, one per line, and commands nothing.
// Since c's commands are not carried out, c repeats them as long as the reports stay the same. A nil
// w discards the output.
func DryRun(c state.Controller, w io.Writer) state.Controller {
	if w == nil {
		w = io.Discard
	}
	return dryRun{together{c}, w}
}

// dryRun embeds together so that the wrapped controller still receives everything a trainer offers to
// controllers.
type dryRun struct {
	together
	w io.Writer
}

// Decide writes the controller's commands and returns none.
func (d dryRun) Decide(reports []state.Report) []state.Command {
	for _, c := range d.together.Decide(reports) {
		fmt.Fprintf(d.w, "would do: %v\n", c)
	}
	return nil
}
