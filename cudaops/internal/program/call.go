package program

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// Call is one piece of device work: what is computed, and the arrays it reads and writes.
type Call struct {
	Op    string // the name in profiles
	Node  string // the node of the graph, for error messages
	Layer string // the layer of the model, derived from parameter names

	// Params is a pointer to what is computed: a launch of package kernel, a Matmul, Zero, HostOp or
	// KasminaPass. Between two calls of Bind its operands have null addresses.
	Params any
	Args   []Arg

	FLOPs  float64        // of matrix products
	Float8 bool           // FLOPs are those of float8 products
	Choice *optime.Choice // how the variant was chosen; nil if there was nothing to choose
	Over   Over

	value func() any // returns a copy of what Params points to; nil for Prepared calls
}

// NewCall returns a call of a launch whose operands are fields of *launch. Operands without an array
// are dropped.
//
//	a := softmax.Forward{Rows: rows, N: n, Type: t}
//	c := program.NewCall(&a, program.Reads(&a.X, x), program.Writes(&a.Y, y))
func NewCall[L any](launch *L, args ...Arg) *Call {
	c := Prepared(launch, args...)
	c.value = func() any { return *launch }
	if m, ok := any(launch).(*Matmul); ok {
		c.FLOPs, c.Float8 = m.Spec.FLOPs(), m.Spec.Scaled()
	}
	return c
}

// Prepared returns a call of a launch whose addresses are set already. The operands only say what the
// call reads and writes.
func Prepared(launch any, args ...Arg) *Call {
	return &Call{Params: launch, Args: slices.DeleteFunc(args, func(a Arg) bool {
		return a.Array == nil || a.Buffer == nil
	})}
}

// Over is a result that a call can leave in the memory of what it reads there, where nothing else
// needs that. From is nil where there is none.
type Over struct{ From, To *Array }

// Arg is an operand of a call: an array, what the call does with it, and the field of the launch that
// takes its address.
type Arg struct {
	*Array
	Role Role
	// Deviation is the standard deviation of the random numbers with which a read operand is timed; 0
	// means 1.
	Deviation float64

	ptr    *gpu.Ptr // nil for operands that no field takes
	stride *int     // nil where rows have no gaps
}

// Bound reports whether a field of the launch takes the operand's address.
func (a Arg) Bound() bool { return a.ptr != nil }

// Field is a field of a launch that takes an operand: an address, or a matrix whose rows may have
// gaps.
type Field interface{ *gpu.Ptr | *kernel.Rows }

// NoField stands for the field of an operand that the launch does not take, or knows already.
var NoField *gpu.Ptr

func operand[F Field](field F, a *Array, r Role) Arg {
	switch f := any(field).(type) {
	case *kernel.Rows:
		return Arg{Array: a, Role: r, ptr: &f.Ptr, stride: &f.Stride}
	case *gpu.Ptr:
		return Arg{Array: a, Role: r, ptr: f}
	}
	panic("unreachable")
}

// Role is what a call does with an operand.
type Role uint8

// The roles. What is timed on operands made up for that reads random numbers, and its results count
// as right when what it writes does.
const (
	Read    Role = iota
	Write        // all of it
	Update       // read and written
	Scratch      // written, and of use to nobody but perhaps a later call of the same op
	Untimed      // read, but null when variants are timed
)

// Reads returns an operand that is read.
func Reads[F Field](field F, a *Array) Arg { return operand(field, a, Read) }

// Writes returns an operand that is written as a whole.
func Writes[F Field](field F, a *Array) Arg { return operand(field, a, Write) }

// Updates returns an operand that is read and written.
func Updates[F Field](field F, a *Array) Arg { return operand(field, a, Update) }

// Uses returns scratch memory of the call.
func Uses[F Field](field F, a *Array) Arg { return operand(field, a, Scratch) }

// Bytes is what the call moves: its operands once, twice what it reads and writes.
func (c *Call) Bytes() (n float64) {
	for i, a := range c.Args {
		same := func(b Arg) bool { return b.Array == a.Array }
		if slices.ContainsFunc(c.Args[:i], same) {
			continue
		}
		n += float64(a.Extent())
		if a.Role == Update {
			n += float64(a.Extent())
		}
	}

	return n
}

// Touches reports whether an operand is in a buffer.
func (c *Call) Touches(b *Buffer) bool {
	return slices.ContainsFunc(c.Args, func(a Arg) bool { return a.Buffer == b })
}

// Operand returns the operand that a field takes, nil if there is none.
func (c *Call) Operand(field *gpu.Ptr) *Arg {
	for i := range c.Args {
		if a := &c.Args[i]; a.Bound() && a.ptr == field {
			return a
		}
	}
	return nil
}

// Bound reports whether two calls must stay in their order: one writes what the other touches.
func (c *Call) Bound(d *Call) bool {
	writes := func(c, d *Call) bool {
		return slices.ContainsFunc(c.Args, func(a Arg) bool {
			return a.Role != Read && d.Touches(a.Buffer)
		})
	}
	return writes(c, d) || writes(d, c)
}

// Bind returns a copy of the launch with the addresses of the operands in the fields that take them,
// and the strides of matrices whose rows may have gaps.
func (c *Call) Bind(address func(*Array) gpu.Ptr) any {
	if c.value == nil {
		return c.Params
	}

	for _, a := range c.Args {
		if a.ptr != nil {
			*a.ptr = address(a.Array)
		}
		if a.stride != nil {
			*a.stride = a.RowStride()
		}
	}

	bound := c.value()

	for _, a := range c.Args {
		if a.ptr != nil {
			*a.ptr = 0
		}
		if a.stride != nil {
			*a.stride = 0
		}
	}

	return bound
}

// SetWay sets the variant in which a launch with several is computed.
func (c *Call) SetVariant(w kernel.Variant) {
	c.Params.(interface{ SetVariant(kernel.Variant) }).SetVariant(w)
}

// Zero is the Params of a call that fills memory with zeros.
type Zero struct {
	Ptr   gpu.Ptr
	Bytes int
}

// VectorBytes is what optimisers and fused products read at once.
const VectorBytes = 16

// Chooser chooses among variants to compute something.
type Chooser interface {
	// Tunes reports whether anything may be timed.
	Tunes() bool
	// Variants lists the variants in which a kernel can do a launch, without those that nothing chooses
	// among.
	Variants(params any) []kernel.Variant
	// Choose returns the position of an alternative, and what is to stand in its calls as Choice.
	Choose(g Group) (alternative int, choice *optime.Choice, err error)
	// ChooseWay chooses the variant of a call ahead of the others, where calls depend on it.
	ChooseVariant(c *Call) error
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
	Name    string
	Calls   []*Call
	Variant *kernel.Variant // in which the only call is computed; nil to leave calls as they are
}

// VariantsOf returns the variants that has lists for the launch of a call, and the group of alternatives that
// they are.
func VariantsOf(c *Call, has func(launch any) []kernel.Variant) (g Group, variants []kernel.Variant) {
	bound := c.Bind((*Array).StandIn)
	g.Op, g.Shape = bound.(kernel.Tuned).Tuning()
	variants = has(bound)
	for _, a := range c.Args {
		if a.Role == Write || a.Role == Update {
			g.Results = append(g.Results, a.Array)
		}
	}

	for _, w := range variants {
		g.Alternatives = append(g.Alternatives, Alternative{w.String(), []*Call{c}, &w})
	}

	return g, variants
}
