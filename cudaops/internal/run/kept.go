package run

import "github.com/kasmina-go/kasmina/cudaops/internal/gpu"

// Kept is device memory that a machine leaves to the next one: of parameters, and of what an
// optimiser remembers of them. The next one takes pieces over, or copies them. What nobody has
// taken goes back with Close.
type Kept struct {
	Memory
	Params map[string]*KeptParam // by name; none once it is closed
	taken  map[gpu.Ptr]bool      // what goes back to it, if its taker is closed before
}

// KeptParam is a parameter that is kept. Its arrays are of float32, one behind the other.
type KeptParam struct {
	Value   gpu.Ptr
	Len     int                // elements of each array
	Moments map[string]gpu.Ptr // by the names that package optim has for them
	Step    int64              // updates so far
}

// NewKept returns an empty one.
func NewKept(ctx gpu.Context) *Kept {
	return &Kept{Memory{Ctx: ctx}, map[string]*KeptParam{}, map[gpu.Ptr]bool{}}
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
