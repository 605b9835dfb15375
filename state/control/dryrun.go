package control

import (
	"fmt"
	"io"

	"github.com/kasmina-go/kasmina/state"
)

// DryRun returns a controller that writes what c would do to w, a line for each command, and does
// nothing. As nothing comes of what c decides, c decides the same for as long as it sees the same.
// Without a controller it writes nothing. w may be nil.
func DryRun(c state.Controller, w io.Writer) state.Controller {
	if w == nil {
		w = io.Discard
	}
	return dryRun{together{c}, w}
}

// dryRun hears what its controller is to hear.
type dryRun struct {
	together
	w io.Writer
}

// Decide writes what the controller would do.
func (d dryRun) Decide(reports []state.Report) []state.Command {
	for _, c := range d.together.Decide(reports) {
		fmt.Fprintf(d.w, "would do: %v\n", c)
	}
	return nil
}
