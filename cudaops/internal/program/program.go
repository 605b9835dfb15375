// Package program represents a graph as a list of calls that operate on buffers. A Program is plain data;
// the machine's passes work on it in turn: package lower creates it from the graph, schedule orders its
// calls, place assigns memory, choose selects kernel variants, and run executes it.
package program

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/plan"
)

// Program is a graph lowered to a list of calls, together with all data that stays on the device between
// runs.
type Program struct {
	Calls       []*Call
	Buffers     []*Buffer
	Values      map[*gorgonia.Node]*Array
	Inputs      []*Input
	Borrowed    []*Input                  // parameters owned by another program
	Sums        map[*gorgonia.Node]*Array // accumulated gradients of parameters, if runs accumulate
	Weights     []*QuantizedWeight
	Caches      map[*gorgonia.Node]Cache // key-value caches of incremental attention ops
	Conversions Conversions
	Packed      map[string]*Packed // frozen weights in float8 or NF4, by the names of their nodes

	// loss-scale state laid out as optimizer.LossScale, so that its first number is the scale; nil
	// without loss scaling
	Scale   *Array
	Scaling Scaling

	Draws *Draws // nil if no tokens are drawn

	Meters []Meter // figures of ops

	Kasmina []*KasminaLayer
	Reports *Array // telemetry of all Kasmina layers; nil if there are none

	Arena int     // total size in bytes of the buffers that are not resident
	Base  gpu.Ptr // address of the arena, once memory is allocated
	Spent int     // bytes used only to save time, which a machine short of memory can give up
}

// Draws describes the tokens that a program draws. Params holds, as int64, the sources of Fed ids, a rule for each of
// Rows rows of logits, and the entries of the rules: see package sample. Tokens [Rows] receives the tokens, which the
// next run can feed to its ids.
type Draws struct {
	Params, Tokens *Array
	Rows, Fed      int
}

// Meter is a resident array of float32 into which every run writes figures of an op. The machine passes them to Add
// once after each run.
type Meter struct {
	*Array
	Add func([]float32)
}

// Cache holds the keys and values of all positions so far, one per row. It lives as long as the machine.
type Cache struct{ Keys, Values *Array }

// Alignment is the alignment of every buffer in bytes. cudaMalloc guarantees it, and cuBLASLt's fastest
// variants require it.
const Alignment = 256

// Buffer is a region of device memory. A transient buffer occupies part of the arena during the calls
// of a run that use it; a resident buffer has a separate allocation that lives as long as the machine.
type Buffer struct {
	plan.Interval
	Resident bool
	Data     []float32 // initial contents; nil if they don't matter
	// Table, if not nil, returns the initial contents once all buffers have addresses.
	Table func() ([]byte, error)
	Base  gpu.Ptr // device address, once memory is allocated
}

// Narrow drops the float32 array of each frozen input that the calls read only through a single copy
// in another type, and makes that copy the input's array. It keeps the float32 arrays of inputs in
// lasting, since their values must survive a run.
func (p *Program) Narrow(lasting map[*gorgonia.Node]bool) {
	for _, in := range p.Inputs {
		b := in.Array.Buffer
		read := func(c *Call) bool { return c.Touches(b) }
		if in.Frozen && len(in.Copies) == 1 && !lasting[in.Node] &&
			!slices.ContainsFunc(p.Calls, read) {
			p.Buffers = slices.DeleteFunc(p.Buffers, func(o *Buffer) bool { return o == b })
			in.Array, in.Copies = in.Copies[0].Array, nil
			p.Values[in.Node] = in.Array
		}
	}
}

// NewArray returns an array in the arena. It occupies memory only during the calls that use it.
func (p *Program) NewArray(t gpu.DType, shape ...int) *Array {
	a := &Array{Buffer: &Buffer{Interval: plan.Interval{First: -1, Last: -1}}, Type: t,
		Shape: slices.Clone(shape)}
	a.Bytes = max(1, a.Extent())
	p.Buffers = append(p.Buffers, a.Buffer)
	return a
}

// Like returns a new array in the arena with a's type and shape.
func (p *Program) Like(a *Array) *Array { return p.NewArray(a.Type, a.Shape...) }

// Workspace returns an array of at least the given number of bytes in the arena.
func (p *Program) Workspace(bytes int) *Array { return p.NewArray(gpu.Float32, (bytes+3)/4) }

// NewResident returns an array that lives as long as the machine.
func (p *Program) NewResident(t gpu.DType, shape ...int) *Array {
	a := p.NewArray(t, shape...)
	a.Resident = true
	return a
}

// NewConstant returns a resident array initialized with data.
func (p *Program) NewConstant(data []float32) *Array {
	a := p.NewResident(gpu.Float32, len(data))
	a.Data = data
	return a
}

// Resident returns the total size of resident buffers in bytes, including alignment.
func (p *Program) Resident() (n int) {
	for _, b := range p.Buffers {
		if b.Resident {
			n += plan.Align(b.Bytes, Alignment)
		}
	}
	return n
}

// Add appends c to the program's calls and returns it.
func (p *Program) Add(c *Call) *Call {
	p.Calls = append(p.Calls, c)
	return c
}
