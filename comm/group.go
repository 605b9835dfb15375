package comm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/enum"
)

// Ptr is an address in the memory that a [Group] works on. For NCCL, this is GPU memory.
type Ptr uint64

// Offset returns the address of element n of an array of type t at p.
func (p Ptr) Offset(n int, t Type) Ptr { return p + Ptr(n*t.Size()) }

// Stream identifies a queue of work on a device. The zero Stream is the default one.
type Stream uintptr

// Type is the type of an element.
type Type uint8

// Element types: the types of NCCL that training needs.
const (
	Uint8 Type = iota
	Int32
	Int64
	Uint64
	Float16
	Float32
	Float64
	BFloat16
	numTypes
)

var types = [numTypes]struct {
	name string
	size int
}{Uint8: {"uint8", 1}, Int32: {"int32", 4}, Int64: {"int64", 8}, Uint64: {"uint64", 8},
	Float16: {"float16", 2},
	Float32: {"float32", 4}, Float64: {"float64", 8}, BFloat16: {"bfloat16", 2}}

// String returns the type's name.
func (t Type) String() string {
	if t >= numTypes {
		return fmt.Sprintf("Type(%d)", uint8(t))
	}
	return types[t].name
}

// Size returns the size of an element in bytes.
func (t Type) Size() int {
	if t >= numTypes {
		return 0
	}
	return types[t].size
}

// Op is a reduction of two elements.
type Op uint8

// Reductions.
const (
	Sum Op = iota
	Max
	Min
	numOps
)

// String returns the reduction's name.
func (o Op) String() string {
	return enum.Name(o, "Op", []string{"sum", "max", "min"})
}

// Collectives are operations of all ranks of a group together. A call enqueues work on a stream and
// returns; the work is done when the stream has passed it. Every rank must call the same operations
// with the same counts, types and roots in the same order.
//
// Buffers must not overlap, except where a method permits dst to be src.
type Collectives interface {
	// AllReduce computes dst[i] = op over all ranks of src[i], for count elements. dst may be src.
	AllReduce(dst, src Ptr, count int, t Type, op Op, s Stream) error
	// ReduceScatter computes, at rank r, dst[i] = op over all ranks of src[r·count+i], for count
	// elements. dst may be that part of src.
	ReduceScatter(dst, src Ptr, count int, t Type, op Op, s Stream) error
	// AllGather computes dst[r·count+i] = src[i] of rank r, for count elements and all r. src may
	// be this rank's part of dst.
	AllGather(dst, src Ptr, count int, t Type, s Stream) error
	// Broadcast copies count elements of buffer from rank root to all ranks.
	Broadcast(buffer Ptr, count int, t Type, root int, s Stream) error
	// Send sends count elements to rank to, which must call Recv. The n-th Send from one rank to
	// another corresponds to the n-th Recv there. Outside a Batch, it may wait for the other side.
	Send(src Ptr, count int, t Type, to int, s Stream) error
	// Recv receives count elements from rank from.
	Recv(dst Ptr, count int, t Type, from int, s Stream) error
}

// Registration identifies memory registered with a [Group].
type Registration uintptr

// Group is a set of ranks that compute together. Its methods may be called from any goroutine.
// Calls must be ordered, however (see [Collectives]); only Err and Abort may be called concurrently
// with other methods.
type Group interface {
	Collectives
	// Rank returns the rank of this process, and Size the number of ranks.
	Rank() int
	Size() int
	// Batch combines the operations f calls into one, so that sends and receives between ranks run
	// concurrently and cannot wait for each other. f must use only c and a single stream. If f fails,
	// this rank enqueues nothing.
	Batch(f func(c Collectives) error) error
	// Alloc returns memory that suits the group's transport best. Free frees it.
	Alloc(bytes int) (Ptr, error)
	Free(p Ptr) error
	// Register announces memory that will be used repeatedly, so that the transport can access it
	// directly instead of through buffers. Deregister must be called before the memory is freed.
	Register(p Ptr, bytes int) (Registration, error)
	Deregister(r Registration) error
	// Err returns the error of failed work, or nil. It never blocks.
	Err() error
	// Abort terminates all enqueued and running work, even if it is waiting for ranks that are gone.
	// All subsequent calls fail with the cause. Only the first cause counts.
	Abort(cause error)
	// Close frees the group. Its streams must have finished. If the group has failed, Close returns
	// the cause.
	Close() error
}

// CheckCall returns an error if the arguments of a collective are invalid. It serves
// implementations of [Group].
func CheckCall(name string, g Group, count int, t Type, op Op, peer int) error {
	switch {
	case count < 0:
		return fmt.Errorf("comm: %s of %d elements: want at least 0", name, count)
	case t >= numTypes:
		return fmt.Errorf("comm: %s of %v: no such type", name, t)
	case op >= numOps:
		return fmt.Errorf("comm: %s with %v: no such reduction", name, op)
	case peer < 0 || peer >= g.Size():
		return fmt.Errorf("comm: %s with rank %d: want 0 to %d", name, peer, g.Size()-1)
	}

	return nil
}
