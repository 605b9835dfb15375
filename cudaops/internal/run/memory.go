package run

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// Memory is what goes back when its user is closed: device memory, pinned memory and events.
type Memory struct {
	Ctx    gpu.Context
	Kept   *Kept           // what some of it may be taken over from; nil for none
	owned  map[gpu.Ptr]int // bytes of each allocation
	pinned [][]byte
	events []gpu.Event
}

// Alloc takes device memory.
func (m *Memory) Alloc(bytes int, what string) (gpu.Ptr, error) {
	p, err := m.Ctx.Alloc(bytes)
	if err != nil {
		return 0, fmt.Errorf("allocating %s for %s: %w", gpu.Size(uint64(bytes)), what, err)
	}
	m.own(p, bytes)
	return p, nil
}

func (m *Memory) own(p gpu.Ptr, bytes int) {
	if m.owned == nil {
		m.owned = map[gpu.Ptr]int{}
	}
	m.owned[p] = bytes
}

// For is Alloc for something.
func (m *Memory) For(what string) func(bytes int) (gpu.Ptr, error) {
	return func(bytes int) (gpu.Ptr, error) { return m.Alloc(bytes, what) }
}

// Free gives back what Alloc has taken, and to m.Kept what is from there.
func (m *Memory) Free(p gpu.Ptr) error {
	if k := m.Kept; k != nil && k.taken[p] {
		delete(k.taken, p)
		m.Leave(k, p)
		return nil
	}
	delete(m.owned, p)
	return m.Ctx.Free(p)
}

// AllocHost takes pinned memory.
func (m *Memory) AllocHost(bytes int) ([]byte, error) {
	b, err := m.Ctx.AllocHost(bytes)
	if err == nil {
		m.pinned = append(m.pinned, b)
	}
	return b, err
}

// NewEvent takes an event.
func (m *Memory) NewEvent(timing bool) (gpu.Event, error) {
	e, err := m.Ctx.NewEvent(timing)
	if err == nil {
		m.events = append(m.events, e)
	}
	return e, err
}

// Owns reports whether an address is of an allocation.
func (m *Memory) Owns(p gpu.Ptr) bool { return m.owned[p] > 0 }

// Held is the bytes of all allocations.
func (m *Memory) Held() (n int) {
	for _, bytes := range m.owned {
		n += bytes
	}
	return n
}

// Close gives back everything.
func (m *Memory) Close() error {
	var errs []error
	for p := range m.owned {
		errs = append(errs, m.Free(p))
	}

	for _, b := range m.pinned {
		errs = append(errs, m.Ctx.FreeHost(b))
	}

	for _, e := range m.events {
		errs = append(errs, m.Ctx.DestroyEvent(e))
	}

	m.pinned, m.events = nil, nil
	return errors.Join(errs...)
}

// Fits returns an error where a program needs more memory than is free.
func (m *Memory) Fits(p *program.Program) error {
	need := uint64(p.Arena + p.Resident())
	free, _, err := m.Ctx.MemInfo()
	if err != nil {
		return err
	}

	if free += uint64(m.Kept.Held()); need > free {
		return fmt.Errorf("the graph needs %s of device memory (%s for parameters and constants, "+
			"%s for a run), and %s are free: %w",
			gpu.Size(need), gpu.Size(uint64(p.Resident())), gpu.Size(uint64(p.Arena)),
			gpu.Size(free), gpu.OutOfMemory)
	}

	return nil
}

// Place takes the memory that a program was planned for, but for resident buffers that have some.
func (m *Memory) Place(p *program.Program, what string) error {
	var arena gpu.Ptr
	var err error
	if p.Arena > 0 {
		if arena, err = m.Alloc(p.Arena, what); err != nil {
			return err
		}
	}

	for _, b := range p.Buffers {
		switch {
		case !b.Resident:
			b.Base = arena.Offset(b.Offset)
		case b.Base == 0:
			b.Base, err = m.Alloc(max(1, b.Bytes), "parameters and constants")
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// Kept is device memory that a machine leaves to the next one: of parameters, and of what an
// optimiser remembers of them. The next one takes pieces over, or copies them. What nobody has
// taken goes back with Close.
type Kept struct {
	Memory
	Params map[string]*KeptParam // by name; none once it is closed
	Left   map[string]bool       // those that were here, and that a taker has left to another Kept
	taken  map[gpu.Ptr]bool      // what goes back to it, if its taker is closed before
}

// KeptParam is a parameter that is kept, of float32.
type KeptParam struct {
	Value   gpu.Ptr
	Len     int                // elements of the parameter
	Moments map[string]gpu.Ptr // by the names that package optim has for them
	Step    int64              // updates so far
}

// NewKept returns an empty one.
func NewKept(ctx gpu.Context) *Kept {
	return &Kept{Memory{Ctx: ctx}, map[string]*KeptParam{}, map[string]bool{}, map[gpu.Ptr]bool{}}
}

// Close gives back what nobody has taken. What was taken is its taker's from then on.
func (k *Kept) Close() error {
	clear(k.taken)
	clear(k.Params)
	return k.Memory.Close()
}

// Leave hands the allocation that an address is the begin of to k.
func (m *Memory) Leave(k *Kept, p gpu.Ptr) {
	if n := m.owned[p]; n > 0 {
		k.own(p, n)
		delete(m.owned, p)
	}

	if from := m.Kept; from != nil && from != k && from.taken[p] {
		delete(from.taken, p)
		maps.DeleteFunc(from.Params, func(name string, q *KeptParam) bool {
			left := q.Value == p || slices.Contains(slices.Collect(maps.Values(q.Moments)), p)
			if left {
				from.Left[name] = true
			}
			return left
		})
	}
}

// Take takes over an allocation of m.Kept that begins at an address and has so many bytes.
func (m *Memory) Take(p gpu.Ptr, bytes int) bool {
	k := m.Kept
	if k == nil || k.owned[p] != bytes {
		return false
	}
	delete(k.owned, p)
	k.taken[p] = true
	m.own(p, bytes)
	return true
}
