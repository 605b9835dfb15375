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

// Input is a node that receives its value from the host.
type Input struct {
	Node     *gorgonia.Node
	Array    *Array
	Constant bool      // a constant or parameter, sent once
	Frozen   bool      // never changes after it was sent
	Copies   []Copy    // the parameter converted to other types
	Part     *Part     // if sharded, the elements that this rank stores; Array then has no memory
	IDs      []IDRange // constraints that the ops reading the input place on its ids
	Bound    bool      // the user supplied the device memory and fills it
	Sharers  int       // number of other machines that share its memory
}

// Sent reports whether the value is copied to the device before every run.
func (in *Input) Sent() bool { return !in.Constant && !in.Bound }

// Part is the slice of a sharded input that this rank stores: the elements From ≤ i < To. Other ranks
// store the remaining elements. Runs read the input's first copy, which holds all elements.
type Part struct {
	*Array
	From, To int
}

// Copy is a parameter in another type, with the call that converts the parameter to it. If the input is
// sharded, its first copy has no such call (Convert is nil), and the remaining copies are converted from
// the first.
type Copy struct {
	*Array
	Convert *Call
}

// IDRange is a constraint that an op places on an input of ids. If Seq is not 0, the input holds document starts in
// sequences of Seq tokens, and if Pairs is set, the answers of preference pairs.
type IDRange struct {
	Op, Argument string
	Vocab        int
	Negative     bool // whether ids may be negative, to exclude a row
	Seq          int  // sequence length; 0 for ids
	Pairs        bool // the answers of pairs
}

// Check validates ids, which a kernel cannot do, and returns the error that the op would return on the
// CPU.
func (r IDRange) Check(ids []int64) error {
	var err error
	switch {
	case r.Pairs:
		err = op.CheckAnswers(ids)
	case r.Seq > 0:
		err = opbase.CheckStarts(ids, r.Seq)
	default:
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

// Quantized is a float8 matrix with one float32 scale per row. Scales is nil for a matrix of another
// type.
type Quantized struct{ Values, Scales *Array }

// QuantizedWeight is a matrix of parameters and constants that is quantized to float8, both by rows and,
// if any call needs it, transposed. It is quantized again whenever one of its inputs changes.
type QuantizedWeight struct {
	Inputs           []*Input
	Array            *Array
	Rows, Transposed Quantized
}

// Conversions maps each conversion in a program to its result, so that no array is converted twice.
// Results that derive only from parameters and constants are resident, and programs that borrow these
// parameters share the results.
type Conversions map[Conversion]Quantized

// Conversion identifies a conversion: one array converted to another type, or up to three arrays stacked
// vertically. A float8 conversion also depends on the row layout of the matrix and on whether the result
// is transposed.
type Conversion struct {
	Sources       [3]Extent
	To            gpu.DType
	Width, Stride int
	Transposed    bool
}

// Extent is a range of a buffer occupied by an array.
type Extent struct {
	*Buffer
	At, Len int
}

// NewConversion returns the key of a conversion of arrays to a type.
func NewConversion(to gpu.DType, of ...*Array) (m Conversion) {
	m.To = to
	for i, a := range of {
		m.Sources[i] = Extent{a.Buffer, a.At, a.Len()}
	}
	return m
}

// BorrowConversions returns the resident conversions, which another program may share. The conversions
// of a nil program are an empty map.
func (p *Program) BorrowConversions() Conversions {
	m := Conversions{}
	if p != nil {
		maps.Copy(m, p.Conversions)
	}
	maps.DeleteFunc(m, func(_ Conversion, q Quantized) bool { return !q.Values.Resident })
	return m
}

// Scaling records the edges where the loss scale replaces the gradient of the loss, and the nodes that
// carry the scale. Its maps are nil if loss scaling is off.
type Scaling struct {
	Edges   map[Edge]bool
	Carried map[*gorgonia.Node]bool
}

// Edge identifies one input of a node.
type Edge struct {
	Node  *gorgonia.Node
	Input int
}

// Carries reports whether the given input of n carries the loss scale.
func (s Scaling) Carries(n *gorgonia.Node, input int) bool {
	return s.Edges[Edge{n, input}] || s.Carried[graph.Children(n)[input]]
}
