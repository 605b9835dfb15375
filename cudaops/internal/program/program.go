// Package program is a graph as calls over buffers: plain data. The passes of the machine make it
// (package lower), order it (schedule), give it memory (place), choose variants for it (choose) and run
// it.
package program

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/plan"
)

// Program is a graph as a list of calls, and all that stays on the device between runs of them.
type Program struct {
	Calls    []*Call
	Buffers  []*Buffer
	Values   map[*gorgonia.Node]*Array
	Inputs   []*Input
	Borrowed []*Input                  // parameters of another program
	Sums     map[*gorgonia.Node]*Array // of the gradients of parameters, where runs add up
	Weights  []*QuantizedWeight
	Caches   map[*gorgonia.Node]Cache // of attentions to earlier positions
	Made     Made

	// optimizer.LossScale, whose first number is the loss scale; nil where there is none
	Scale   *Array
	Scaling Scaling

	Kasmina []*KasminaLayer
	Reports *Array // what the Kasmina layers measure; nil where there are none

	Arena int // bytes of all buffers that are not resident
	Spent int // bytes that save time, and could be done without
}

// Cache is the keys and values of the positions so far, by rows, which live as long as the machine.
type Cache struct{ Keys, Values *Array }

// Alignment of all buffers, in bytes: what cudaMalloc gives, and cuBLASLt's fastest variants ask for.
const Alignment = 256

// Buffer is a piece of device memory. It is in the arena for the calls of a run that need it. Or it
// is resident, with an allocation of its own, for as long as the machine lives.
type Buffer struct {
	plan.Interval
	Resident bool
	Data     []float32 // what it holds from the start; nil for anything
	Base     gpu.Ptr   // where it lies, once the machine has memory
}

// Narrow has frozen inputs in that type alone in which they are read. Their float32 goes, unless it
// is among what outlives a run.
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

// NewArray returns an array in the arena, for the calls that are given it.
func (p *Program) NewArray(t gpu.DType, shape ...int) *Array {
	a := &Array{Buffer: &Buffer{Interval: plan.Interval{First: -1, Last: -1}}, Type: t,
		Shape: slices.Clone(shape)}
	a.Bytes = max(1, a.Extent())
	p.Buffers = append(p.Buffers, a.Buffer)
	return a
}

// Like returns a new array of a's type and shape, in the arena.
func (p *Program) Like(a *Array) *Array { return p.NewArray(a.Type, a.Shape...) }

// Workspace returns so many bytes in the arena.
func (p *Program) Workspace(bytes int) *Array { return p.NewArray(gpu.Float32, (bytes+3)/4) }

// NewResident returns an array that lives as long as the machine.
func (p *Program) NewResident(t gpu.DType, shape ...int) *Array {
	a := p.NewArray(t, shape...)
	a.Resident = true
	return a
}

// NewConstant returns a resident array that holds data.
func (p *Program) NewConstant(data []float32) *Array {
	a := p.NewResident(gpu.Float32, len(data))
	a.Data = data
	return a
}

// Resident returns the bytes of resident memory.
func (p *Program) Resident() (n int) {
	for _, b := range p.Buffers {
		if b.Resident {
			n += plan.Align(b.Bytes, Alignment)
		}
	}
	return n
}

// Add appends a call.
func (p *Program) Add(c *Call) *Call {
	p.Calls = append(p.Calls, c)
	return c
}
