package run

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// Memory owns device memory, pinned memory and events, and releases them when it is closed.
type Memory struct {
	Ctx    gpu.Context
	Kept   *Kept           // memory of an earlier machine that allocations may take over; may be nil
	owned  map[gpu.Ptr]int // size of each allocation in bytes
	pinned [][]byte
	events []gpu.Event
}

// Alloc allocates device memory. what describes its purpose in errors.
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

// For returns a function that calls Alloc with the given description.
func (m *Memory) For(what string) func(bytes int) (gpu.Ptr, error) {
	return func(bytes int) (gpu.Ptr, error) { return m.Alloc(bytes, what) }
}

// Free releases an allocation. Memory taken over from m.Kept is returned to it.
func (m *Memory) Free(p gpu.Ptr) error {
	if k := m.Kept; k != nil && k.taken[p] {
		delete(k.taken, p)
		m.HandOver(k, p)
		return nil
	}
	delete(m.owned, p)
	return m.Ctx.Free(p)
}

// AllocHost allocates pinned memory.
func (m *Memory) AllocHost(bytes int) ([]byte, error) {
	b, err := m.Ctx.AllocHost(bytes)
	if err == nil {
		m.pinned = append(m.pinned, b)
	}
	return b, err
}

// NewEvent creates an event.
func (m *Memory) NewEvent(timing bool) (gpu.Event, error) {
	e, err := m.Ctx.NewEvent(timing)
	if err == nil {
		m.events = append(m.events, e)
	}
	return e, err
}

// Owns reports whether p is the start of an allocation.
func (m *Memory) Owns(p gpu.Ptr) bool { return m.owned[p] > 0 }

// Held returns the total size of all device allocations.
func (m *Memory) Held() (n int) {
	for _, bytes := range m.owned {
		n += bytes
	}
	return n
}

// Close releases everything.
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

// Fits returns an error if a program needs more memory than is available. It does not count an arena that
// another program lends.
func (m *Memory) Fits(p *program.Program, borrows bool) error {
	need := uint64(p.Arena + p.Resident())
	if borrows {
		need -= uint64(p.Arena)
	}
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

// Place allocates memory for a program's arena, and for all resident buffers that have none yet.
func (m *Memory) Place(p *program.Program, what string) (err error) {
	if p.Arena > 0 {
		if p.Base, err = m.Alloc(p.Arena, what); err != nil {
			return err
		}
	}
	return m.PlaceIn(p, p.Base)
}

// PlaceIn is Place with an arena at the given address.
func (m *Memory) PlaceIn(p *program.Program, arena gpu.Ptr) (err error) {
	p.Base = arena
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

// Kept is device memory handed over from one machine to the next: parameters and their optimizer state.
// The next machine takes over allocations or copies them. Close releases allocations that were not taken.
type Kept struct {
	Memory
	Params     map[string]*KeptParam // by name; empty after Close
	HandedOver map[string]bool       // names of parameters that a taker has since handed over to another Kept
	taken      map[gpu.Ptr]bool      // allocations that return here if their taker is closed first
}

// KeptParam is a float32 parameter in a Kept.
type KeptParam struct {
	Value   gpu.Ptr
	Len     int                // number of elements
	Moments map[string]gpu.Ptr // by package optim's names
	Step    int64              // number of updates so far
}

// NewKept returns an empty Kept.
func NewKept(ctx gpu.Context) *Kept {
	return &Kept{Memory{Ctx: ctx}, map[string]*KeptParam{}, map[string]bool{}, map[gpu.Ptr]bool{}}
}

// Close releases allocations that were not taken. Taken allocations now belong to their takers.
func (k *Kept) Close() error {
	clear(k.taken)
	clear(k.Params)
	return k.Memory.Close()
}

// HandOver transfers ownership of the allocation that starts at p to k.
func (m *Memory) HandOver(k *Kept, p gpu.Ptr) {
	if n := m.owned[p]; n > 0 {
		k.own(p, n)
		delete(m.owned, p)
	}

	if from := m.Kept; from != nil && from != k && from.taken[p] {
		delete(from.taken, p)
		maps.DeleteFunc(from.Params, func(name string, q *KeptParam) bool {
			left := q.Value == p || slices.Contains(slices.Collect(maps.Values(q.Moments)), p)
			if left {
				from.HandedOver[name] = true
			}
			return left
		})
	}
}

// Take takes over the allocation that starts at p from m.Kept. It reports whether there was such an
// allocation, of exactly the given size.
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
