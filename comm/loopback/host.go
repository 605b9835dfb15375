package loopback

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/half"
)

// Device is memory, and streams that work on it.
type Device interface {
	Alloc(bytes int) (comm.Ptr, error)
	Free(p comm.Ptr) error
	// Bytes is the memory from p on. It is asked for when the work runs.
	Bytes(p comm.Ptr, n int) ([]byte, error)
	// Enqueue adds work to a stream, which runs it after all that was added before.
	Enqueue(s comm.Stream, work func() error) error
}

// Host is a [Device] in the memory of the process, with as many streams as are used, each a
// goroutine of its own. An error of work is kept, as CUDA does: from then on no work runs.
type Host struct {
	mu      sync.Mutex
	idle    sync.Cond
	next    comm.Ptr
	memory  []allocation // by address
	streams map[comm.Stream]*queue
	err     error
}

type allocation struct {
	at   comm.Ptr
	data []byte
}

type queue struct{ work []func() error }

// NewHost returns a device without memory.
func NewHost() *Host {
	h := &Host{next: 1 << 20, streams: map[comm.Stream]*queue{}}
	h.idle.L = &h.mu
	return h
}

const alignment = 256

// Alloc returns memory filled with a pattern that no test should find in its results.
func (h *Host) Alloc(bytes int) (comm.Ptr, error) {
	if bytes < 1 {
		return 0, fmt.Errorf("loopback: allocation of %d bytes: want at least 1", bytes)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	a := allocation{h.next, slices.Repeat([]byte{0xa5}, bytes)}
	h.memory = append(h.memory, a)
	h.next += comm.Ptr(bytes+2*alignment-1) / alignment * alignment // a gap between any two
	return a.at, nil
}

// Free gives memory back.
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

// find is the place of the allocation at p, or of the next one.
func (h *Host) find(p comm.Ptr) (int, bool) {
	return slices.BinarySearchFunc(h.memory, p, func(a allocation, p comm.Ptr) int {
		return int(int64(a.at) - int64(p))
	})
}

// Bytes is n bytes of memory, which must lie in one allocation.
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

// Enqueue runs work on the stream's goroutine, after what was enqueued there before.
func (h *Host) Enqueue(s comm.Stream, work func() error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil {
		return h.err
	}
	if h.streams == nil {
		return errors.New("loopback: the device is its zero value, want one that NewHost returns")
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

// run works until the queue is empty. What runs stays in the queue, so that Sync waits for it.
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

// Sync waits for the work of a stream, and returns the device's first error.
func (h *Host) Sync(s comm.Stream) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for q := h.streams[s]; q != nil && len(q.work) > 0; {
		h.idle.Wait()
	}
	return h.err
}

// AddInOrder is [comm.Adder] on a stream.
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

// addFloat64 adds elements to sums, or sets the sums to them.
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

// addFloat32 adds elements of type t to float32 sums, or sets the sums to them.
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

// float32Bits is element i as a float32. Float32 itself is not loaded as a number, so that its
// bits stay.
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
