package program

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// VectorBytes is what optimisers and fused products read at once.
const VectorBytes = 16

// Chooser chooses among ways to compute something.
type Chooser interface {
	// Tunes reports whether anything may be timed.
	Tunes() bool
	// Ways lists the ways in which a kernel can do a launch, without those that nothing chooses
	// among.
	Ways(params any) []kernel.Way
	// Choose returns the position of an alternative, and what is to stand in its calls as Choice.
	Choose(g Group) (alternative int, choice *optime.Choice, err error)
}

// Group is a piece of work that several lists of calls can do.
type Group struct {
	// all that its time depends on, beside the device and the build of the kernels
	Op, Shape    string
	FLOPs        float64
	Alternatives []Alternative
	Plain        int      // whose results count as right
	Results      []*Array // what all of them write
}

// Alternative is one of the lists.
type Alternative struct {
	Name  string
	Calls []*Call
}

// WaysOf is a group of one call, with the given parameters, in some ways.
func WaysOf(c *Call, params any, tuned kernel.Tuned, ways []kernel.Way) Group {
	var g Group
	g.Op, g.Shape = tuned.Tuning()
	for _, a := range c.Args {
		if a.Role == Write || a.Role == Update {
			g.Results = append(g.Results, a.Array)
		}
	}
	for _, w := range ways {
		one := *c
		one.Params = WithWay(params, w)
		g.Alternatives = append(g.Alternatives, Alternative{w.String(), []*Call{&one}})
	}
	return g
}
