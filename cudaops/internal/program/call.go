package program

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// Call is one piece of device work: what is computed, and what it reads and writes.
type Call struct {
	Op     string // as profiles name it
	Node   string // of the graph, for people
	Layer  string // of the model, as parameters' names tell
	Params any    // a launch of package kernels with null addresses, or HostOp or KasminaPass
	Args   []Arg
	FLOPs  float64        // of matrix products
	Float8 bool           // of which these are
	Choice *optime.Choice // of its way; nil for none
	Over   Over
}

// NewCall is a call on those of the operands that are not nil.
func NewCall(params any, args ...Arg) *Call {
	c := &Call{Params: params, Args: slices.DeleteFunc(args, func(a Arg) bool {
		return a.Array == nil || a.Buffer == nil
	})}
	if m, ok := params.(Matmul); ok {
		c.FLOPs, c.Float8 = m.Spec.FLOPs(), m.Spec.Scaled()
	}
	return c
}

// Over is a result that a call can leave in the memory of what it reads there, where nothing else
// needs that. From is nil where there is none.
type Over struct{ From, To *Array }

// Arg is an operand of a call.
type Arg struct {
	Field string // of the call's Params, which takes its address; "" where none does
	*Array
	Role Role
	// Deviation is the standard deviation of the random numbers that a read is timed with; 0 counts
	// as 1.
	Deviation float64
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
	Untimed      // read, but null when ways are timed
)

// Reads, Writes, Updates and Uses are operands of these roles, Uses of Scratch.
func Reads(field string, a *Array) Arg { return Arg{Field: field, Array: a} }

// Writes is an operand that is written as a whole.
func Writes(field string, a *Array) Arg { return Arg{Field: field, Array: a, Role: Write} }

// Updates is an operand that is read and written.
func Updates(field string, a *Array) Arg { return Arg{Field: field, Array: a, Role: Update} }

// Uses is an operand that only the op itself has a use for.
func Uses(field string, a *Array) Arg { return Arg{Field: field, Array: a, Role: Scratch} }

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

// Operand returns the operand of a field, nil if there is none.
func (c *Call) Operand(field string) *Arg {
	for i := range c.Args {
		if c.Args[i].Field == field {
			return &c.Args[i]
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

// Bind returns a launch with what address says of the call's operands in the fields that name them.
// A field is an address, or a structure that holds one as Ptr and perhaps a Stride of rows.
func (c *Call) Bind(params any, address func(*Array) gpu.Ptr) any {
	bound := reflect.New(reflect.TypeOf(params)).Elem()
	bound.Set(reflect.ValueOf(params))
	for _, a := range c.Args {
		if a.Field == "" {
			continue
		}
		f := bound.FieldByName(a.Field)
		if !f.IsValid() {
			panic(fmt.Sprintf("program: %T has no field %s", params, a.Field))
		}
		p := f
		if f.Kind() == reflect.Struct {
			if p = f.FieldByName("Ptr"); f.FieldByName("Stride").IsValid() {
				f.FieldByName("Stride").SetInt(int64(a.RowStride()))
			}
		}
		p.SetUint(uint64(address(a.Array)))
	}
	return bound.Interface()
}

// WithWay returns a launch that is to be computed in a way: what its field Way is.
func WithWay(params, way any) any {
	v := reflect.New(reflect.TypeOf(params)).Elem()
	v.Set(reflect.ValueOf(params))
	v.FieldByName("Way").Set(reflect.ValueOf(way))
	return v.Interface()
}

// Zero is the Params of a call that fills memory with zeros.
type Zero struct {
	Ptr   gpu.Ptr
	Bytes int
}

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
	// ChooseWay chooses the way of a call ahead of the others, where calls depend on it.
	ChooseWay(c *Call) error
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

// WaysOf is a group of one call in the ways that its kernel is said to have.
func WaysOf(c *Call, has func(params any) []kernel.Way) (g Group, ways []kernel.Way) {
	tuned := c.Bind(c.Params, (*Array).StandIn).(kernel.Tuned)
	g.Op, g.Shape = tuned.Tuning()
	ways = has(tuned)
	for _, a := range c.Args {
		if a.Role == Write || a.Role == Update {
			g.Results = append(g.Results, a.Array)
		}
	}
	for _, w := range ways {
		one := *c
		one.Params = WithWay(c.Params, w)
		g.Alternatives = append(g.Alternatives, Alternative{w.String(), []*Call{&one}})
	}
	return g, ways
}
