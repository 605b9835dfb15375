package loopback

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/half"
)

// Device provides memory and streams that work on it.
type Device interface {
	Alloc(bytes int) (comm.Ptr, error)
	Free(p comm.Ptr) error
	// Bytes returns n bytes of memory at p. It is called when the work runs.
	Bytes(p comm.Ptr, n int) ([]byte, error)
	// Enqueue adds work to a stream, after all work added before.
	Enqueue(s comm.Stream, work func() error) error
}

// Host is a [Device] in the memory of the process. Each stream is a goroutine. The first error of
// any work is kept, as in CUDA, and no work runs after it.
type Host struct {
	mu      sync.Mutex
	idle    sync.Cond
	next    comm.Ptr
	memory  []allocation // by address
	streams map[comm.Stream]*queue
	err     error
}

// allocation is a block of memory.
type allocation struct {
	at   comm.Ptr
	data []byte
}

// queue is the work of a stream.
type queue struct{ work []func() error }

// NewHost returns a device without allocations.
func NewHost() *Host {
	h := &Host{next: 1 << 20, streams: map[comm.Stream]*queue{}}
	h.idle.L = &h.mu
	return h
}

const alignment = 256

// Alloc returns memory filled with a pattern that should not occur in the results of a test.
func (h *Host) Alloc(bytes int) (comm.Ptr, error) {
	if bytes < 1 {
		return 0, fmt.Errorf("loopback: allocation of %d bytes: want at least 1", bytes)
	}
	h.mu.Lock()
	defer h.mu.Unlock()

	a := allocation{h.next, slices.Repeat([]byte{0xa5}, bytes)}
	h.memory = append(h.memory, a)
	h.next += comm.Ptr(bytes+2*alignment-1) / alignment * alignment // leave a gap between allocations
	return a.at, nil
}

// Free frees memory.
func (h *Host) Free(p comm.Ptr) error {
	h.mu.Lock()
	defer h.mu.Unlock()

	i, found := h.find(p)
	if !found {
		return fmt.Errorf("loopback: nothing was allocated at %#x", p)
	}
	h.memory = slices.Delete(h.memory, i, i+1)
	return nil
}

// find returns the index of the allocation at p, or of the next one.
func (h *Host) find(p comm.Ptr) (int, bool) {
	return slices.BinarySearchFunc(h.memory, p, func(a allocation, p comm.Ptr) int {
		return int(int64(a.at) - int64(p))
	})
}

// Bytes returns n bytes of memory, which must belong to one allocation.
func (h *Host) Bytes(p comm.Ptr, n int) ([]byte, error) {
	h.mu.Lock()
	defer h.mu.Unlock()

	i, found := h.find(p)
	if !found {
		i--
	}

	if i >= 0 {
		from := int(p - h.memory[i].at)
		if data := h.memory[i].data; n >= 0 && from+n <= len(data) {
			return data[from : from+n : from+n], nil
		}
	}

	return nil, fmt.Errorf("loopback: %d bytes at %#x are not in one allocation", n, p)
}

// Enqueue runs work on the goroutine of the stream, after all work enqueued there before.
func (h *Host) Enqueue(s comm.Stream, work func() error) error {
	h.mu.Lock()
	defer h.mu.Unlock()

	if h.err != nil {
		return h.err
	}

	q := h.streams[s]
	if q == nil {
		q = &queue{}
		h.streams[s] = q
	}

	q.work = append(q.work, work)
	if len(q.work) == 1 {
		go h.run(q)
	}

	return nil
}

// run executes the queue until it is empty. Running work stays in the queue, so that Sync waits for
// it.
func (h *Host) run(q *queue) {
	h.mu.Lock()
	defer h.mu.Unlock()

	for len(q.work) > 0 {
		work := q.work[0]
		if h.err == nil {
			h.mu.Unlock()
			err := work()
			h.mu.Lock()
			if err != nil && h.err == nil {
				h.err = err
			}
		}
		q.work = q.work[1:]
	}

	h.idle.Broadcast()
}

// Sync waits for the work of a stream and returns the device's first error.
func (h *Host) Sync(s comm.Stream) error {
	h.mu.Lock()
	defer h.mu.Unlock()

	for q := h.streams[s]; q != nil && len(q.work) > 0; {
		h.idle.Wait()
	}
	return h.err
}

// AddInOrder implements [comm.Adder] on a stream.
func (h *Host) AddInOrder(acc comm.Ptr, parts []comm.Ptr, overwrite bool, count int, t comm.Type,
	s comm.Stream) error {
	parts = slices.Clone(parts)
	return h.Enqueue(s, func() error {
		sum, err := h.Bytes(acc, count*comm.SumType(t).Size())
		if err != nil {
			return err
		}

		for i, part := range parts {
			data, err := h.Bytes(part, count*t.Size())
			if err != nil {
				return err
			}
			if t == comm.Float64 {
				addFloat64(sum, data, overwrite && i == 0)
			} else if err := addFloat32(sum, data, t, overwrite && i == 0); err != nil {
				return err
			}
		}

		return nil
	})
}

// addFloat64 adds elements to sums or, with set, copies them.
func addFloat64(sum, data []byte, set bool) {
	for i := 0; i < len(sum); i += 8 {
		bits := binary.NativeEndian.Uint64(data[i:])
		if !set {
			old := math.Float64frombits(binary.NativeEndian.Uint64(sum[i:]))
			bits = math.Float64bits(old + math.Float64frombits(bits))
		}
		binary.NativeEndian.PutUint64(sum[i:], bits)
	}
}

// addFloat32 adds elements of type t to float32 sums or, with set, copies them.
func addFloat32(sum, data []byte, t comm.Type, set bool) error {
	for i := range len(sum) / 4 {
		at := sum[4*i:]
		bits, err := float32Bits(data, i, t)
		if err != nil {
			return err
		}
		if !set {
			old := math.Float32frombits(binary.NativeEndian.Uint32(at))
			bits = math.Float32bits(old + math.Float32frombits(bits))
		}
		binary.NativeEndian.PutUint32(at, bits)
	}

	return nil
}

// float32Bits returns the bits of element i as a float32. Elements of type Float32 are not loaded
// as numbers, in order to preserve their bits.
func float32Bits(data []byte, i int, t comm.Type) (uint32, error) {
	switch t {
	case comm.Float32:
		return binary.NativeEndian.Uint32(data[4*i:]), nil
	case comm.BFloat16:
		return uint32(binary.NativeEndian.Uint16(data[2*i:])) << 16, nil
	case comm.Float16:
		return math.Float32bits(
				float32(half.Float16(binary.NativeEndian.Uint16(data[2*i:])).Float64())),
			nil
	}

	return 0, fmt.Errorf("loopback: ordered sum of %v", t)
}
