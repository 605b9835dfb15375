package program

import (
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/optime"
)

// Call is a unit of device work: an operation with the arrays that it reads and writes.
type Call struct {
	Op    string // the name in profiles
	Node  string // the node of the graph, for error messages
	Layer string // the layer of the model, derived from parameter names

	// Params points to the operation: a launch from package kernel, a Matmul, Zero, HostOp or
	// KasminaPass. Its operand addresses are null except during Bind.
	Params any
	Args   []Arg

	FLOPs   float64        // floating-point operations in matrix products
	Float8  bool           // the FLOPs are float8 operations
	Choice  *optime.Choice // how the variant was chosen; nil if there was only one
	InPlace InPlace

	value func() any // returns a copy of *Params; nil for calls returned by Prepared
}

// NewCall returns a call of a launch with operands that are fields of *launch. Operands without an
// array are dropped.
//
//	a := softmax.Forward{Rows: rows, N: n, Type: t}
//
//	c := program.NewCall(&a, program.Reads(&a.X, x), program.Writes(&a.Y, y))
func NewCall[L any](launch *L, args ...Arg) *Call {
	c := Prepared(launch, args...)
	c.value = func() any { return *launch }
	if m, ok := any(launch).(*Matmul); ok {
		c.FLOPs, c.Float8 = m.Spec.FLOPs(), m.Spec.Scaled()
	}
	return c
}

// Prepared returns a call of a launch that already contains its addresses. The operands only declare
// which arrays the call reads and writes.
func Prepared(launch any, args ...Arg) *Call {
	return &Call{Params: launch, Args: slices.DeleteFunc(args, func(a Arg) bool {
		return a.Array == nil || a.Buffer == nil
	})}
}

// InPlace names a result that may be written over an operand, provided that no later call needs the
// operand. From is nil if the call does not support this.
type InPlace struct{ From, To *Array }

// Arg is an operand of a call: an array, how the call uses it, and the field of the launch that receives
// its address.
type Arg struct {
	*Array
	Role Role
	// Deviation is the standard deviation of the random numbers used as this operand when variants are
	// timed; 0 means 1.
	Deviation float64

	ptr    *gpu.Ptr // nil if no field receives the address
	stride *int     // nil if the operand must be contiguous
}

// Bound reports whether a field of the launch receives the operand's address.
func (a Arg) Bound() bool { return a.ptr != nil }

// Field is a type of launch field that receives an operand: an address, or a matrix with a row stride.
type Field interface{ *gpu.Ptr | *kernel.Rows }

// NoField takes the place of a field for operands that the launch doesn't address.
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

// Role describes how a call uses an operand.
type Role uint8

// The roles of operands. When variants are timed, operands that are read contain random numbers, and the
// operands written are compared with the results of the plain variant.
const (
	Read    Role = iota
	Write        // overwritten completely
	Update       // read and written
	Scratch      // written, but meaningless afterwards except to later calls of the same op
	Untimed      // read, but passed as null while variants are timed
)

// Reads returns an operand that is read.
func Reads[F Field](field F, a *Array) Arg { return operand(field, a, Read) }

// Writes returns an operand that is overwritten completely.
func Writes[F Field](field F, a *Array) Arg { return operand(field, a, Write) }

// Updates returns an operand that is read and written.
func Updates[F Field](field F, a *Array) Arg { return operand(field, a, Update) }

// Uses returns an operand that serves as scratch memory.
func Uses[F Field](field F, a *Array) Arg { return operand(field, a, Scratch) }

// Bytes returns the number of bytes that the call moves. Each array counts once, or twice if it is both
// read and written.
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

// Touches reports whether any operand is in buffer b.
func (c *Call) Touches(b *Buffer) bool {
	return slices.ContainsFunc(c.Args, func(a Arg) bool { return a.Buffer == b })
}

// Operand returns the operand bound to a field, or nil if the field has no operand.
func (c *Call) Operand(field *gpu.Ptr) *Arg {
	for i := range c.Args {
		if a := &c.Args[i]; a.Bound() && a.ptr == field {
			return a
		}
	}
	return nil
}

// Conflicts reports whether c and d must keep their order because one writes to a buffer that the
// other uses.
func (c *Call) Conflicts(d *Call) bool {
	writes := func(c, d *Call) bool {
		return slices.ContainsFunc(c.Args, func(a Arg) bool {
			return a.Role != Read && d.Touches(a.Buffer)
		})
	}
	return writes(c, d) || writes(d, c)
}

// Bind returns a copy of the launch with its operand fields set: to addresses and, for matrices with a
// row stride, strides.
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

// SetVariant sets the launch's variant.
func (c *Call) SetVariant(w kernel.Variant) {
	c.Params.(interface{ SetVariant(kernel.Variant) }).SetVariant(w)
}

// Zero is the Params of a call that fills memory with zeros.
type Zero struct {
	Ptr   gpu.Ptr
	Bytes int
}

// VectorBytes is the size of the vectors that optimizers and fused products read.
const VectorBytes = 16

// Chooser chooses among variants of a computation.
type Chooser interface {
	// Tunes reports whether the chooser may time variants.
	Tunes() bool
	// Variants lists the variants of a kernel that support a launch. It is empty if there is nothing
	// to choose.
	Variants(params any) []kernel.Variant
	// Choose returns the index of the chosen alternative, and the record of the choice to store in its
	// calls.
	Choose(g Group) (alternative int, choice *optime.Choice, err error)
	// ChooseVariant chooses the variant of a call before the rest of the program is complete, because
	// other calls depend on it.
	ChooseVariant(c *Call) error
}

// Group is a computation with several alternative lists of calls.
type Group struct {
	// everything that determines the timing, apart from the device and the build of the kernels
	Op, Shape    string
	FLOPs        float64
	Alternatives []Alternative
	Plain        int      // index of the alternative that serves as the reference for results
	Results      []*Array // arrays that every alternative writes
}

// Alternative is one way to perform the computation of a Group.
type Alternative struct {
	Name    string
	Calls   []*Call
	Variant *kernel.Variant // variant to set on the single call; nil to use the calls unchanged
}

// VariantsOf calls has to obtain the variants of a call's launch. It returns them along with a group
// that contains one alternative per variant.
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
