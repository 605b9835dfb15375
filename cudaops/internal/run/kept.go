package run

import (
	"errors"
	"sync"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Kept is device memory that a machine leaves to the next one: of parameters, and of what an
// optimiser remembers of them. The next one takes pieces over, or copies them. What nobody has
// taken goes back with Close.
type Kept struct {
	ctx    gpu.Context
	params map[string]*KeptParam

	mu     sync.Mutex
	free   map[gpu.Ptr]int // bytes of what nobody has taken
	taken  map[gpu.Ptr]int
	closed bool
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
	return &Kept{ctx: ctx, params: map[string]*KeptParam{}, free: map[gpu.Ptr]int{},
		taken: map[gpu.Ptr]int{}}
}

// Put adds a parameter.
func (k *Kept) Put(name string, p *KeptParam) { k.params[name] = p }

// Param is the parameter of a name, nil if there is none. A nil Kept has none.
func (k *Kept) Param(name string) *KeptParam {
	if k == nil {
		return nil
	}
	return k.params[name]
}

// Held is the bytes that nobody has taken.
func (k *Kept) Held() (n int) {
	if k == nil {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, bytes := range k.free {
		n += bytes
	}
	return n
}

// take hands an allocation over that is at p and has so many bytes.
func (k *Kept) take(p gpu.Ptr, bytes int) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if n, ok := k.free[p]; !ok || n != bytes {
		return false
	}
	delete(k.free, p)
	k.taken[p] = bytes
	return true
}

// back takes an allocation back from who had taken it, unless Close was called.
func (k *Kept) back(p gpu.Ptr) bool {
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	n, ok := k.taken[p]
	if !ok || k.closed {
		return false
	}
	delete(k.taken, p)
	k.free[p] = n
	return true
}

// Close gives back what nobody has taken. What was taken is its taker's from then on.
func (k *Kept) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	var errs []error
	for p := range k.free {
		errs = append(errs, k.ctx.Free(p))
	}
	clear(k.free)
	k.closed = true
	return errors.Join(errs...)
}

// Leave hands the allocation that an address is the begin of to k.
func (m *Memory) Leave(k *Kept, p gpu.Ptr) {
	if n := m.owned[p]; n > 0 {
		k.free[p] = n
		delete(m.owned, p)
	}
}

// Take takes over an allocation of m.Kept that begins at an address and has so many bytes.
func (m *Memory) Take(p gpu.Ptr, bytes int) bool {
	if !m.Kept.take(p, bytes) {
		return false
	}
	m.own(p, bytes)
	return true
}
