package program

import (
	"fmt"
	"maps"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// Input is a node whose value the host provides.
type Input struct {
	Node     *gorgonia.Node
	Array    *Array
	Constant bool      // sent once: a constant or a parameter
	Frozen   bool      // and never again
	Copies   []Copy    // of a parameter, in other types
	Part     *Part     // what there is of Array, which then has no memory; nil for all of it
	IDs      []IDRange // what the ops that use it ask of it
	Bound    bool      // its memory is the user's own, who fills it
	Sharers  int       // other machines that use its memory
}

// Sent reports whether the value goes to the device before every run.
func (in *Input) Sent() bool { return !in.Constant && !in.Bound }

// Part is the elements From ≤ i < To of an input, where other ranks have the others. What runs read
// is its first copy, which is whole.
type Part struct {
	*Array
	From, To int
}

// Copy is a parameter in another type, and the call that makes it from the parameter. Where there
// is but a part of that, others are made from the first copy, whose Renew is nil.
type Copy struct {
	*Array
	Renew *Call
}

// IDRange is what an op asks of an input that holds ids or, in sequences of Seq tokens, where their
// documents start.
type IDRange struct {
	Op, Argument string
	Vocab        int
	Negative     bool // a negative id means that the row does not count; one must not be negative
	Seq          int  // 0 for ids
}

// Check says of ids what the op would say on the CPU; a kernel cannot.
func (r IDRange) Check(ids []int64) error {
	var err error
	if r.Seq > 0 {
		err = opbase.CheckStarts(ids, r.Seq)
	} else {
		err = opbase.CheckIDs(r.Argument, ids, r.Vocab, r.Negative)
	}

	counts := func(id int64) bool { return id >= 0 }
	if err == nil && r.Negative && !slices.ContainsFunc(ids, counts) {
		err = fmt.Errorf("all %d %s are negative: %w", len(ids), r.Argument, op.ErrNoTargets)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", r.Op, err)
	}

	return nil
}

// Quantized is a matrix in float8, and the float32 factor of each of its rows. A matrix of another
// type has no factors.
type Quantized struct{ Values, Scales *Array }

// QuantizedWeight is a matrix made of parameters and constants, its rows in float8 and, unless
// nobody needs them, its columns turned to rows. They are made again when one of the inputs
// changes.
type QuantizedWeight struct {
	Of           []*Input
	Array        *Array
	Rows, Turned Quantized
}

// Made is what calls have made of arrays, so that it is made once. Of parameters and constants it
// is resident, and programs that borrow them use it too.
type Made map[Making]Quantized

// Making tells apart what is made of arrays: one in another type, or up to three of them, one above
// the other. Of a matrix in float8 it says where its rows end, and whether its columns have become
// rows.
type Making struct {
	Of            [3]Extent
	To            gpu.DType
	Width, Stride int
	Turned        bool
}

// Extent is where an array lies.
type Extent struct {
	*Buffer
	At, Len int
}

// NewMaking is what is made of arrays in a type.
func NewMaking(to gpu.DType, of ...*Array) (m Making) {
	m.To = to
	for i, a := range of {
		m.Of[i] = Extent{a.Buffer, a.At, a.Len()}
	}
	return m
}

// Borrow returns what is made of parameters. No program has none.
func (p *Program) Borrow() Made {
	m := Made{}
	if p != nil {
		maps.Copy(m, p.Made)
	}
	maps.DeleteFunc(m, func(_ Making, q Quantized) bool { return !q.Values.Resident })
	return m
}

// Scaling is where the loss scale takes the place of the loss's gradient, and which nodes carry it.
// Without a scale its maps are nil.
type Scaling struct {
	Edges   map[Edge]bool
	Carried map[*gorgonia.Node]bool
}

// Edge is an input of a node.
type Edge struct {
	Node  *gorgonia.Node
	Input int
}

// Carries reports whether an input of a node carries the scale.
func (s Scaling) Carries(n *gorgonia.Node, input int) bool {
	return s.Edges[Edge{n, input}] || s.Carried[graph.Children(n)[input]]
}
