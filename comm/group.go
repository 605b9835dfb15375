package comm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/internal/enum"
)

// Ptr is an address in the memory that a [Group] works on: a GPU's, for NCCL.
type Ptr uint64

// Offset is the address of element n.
func (p Ptr) Offset(n int, t Type) Ptr { return p + Ptr(n*t.Size()) }

// Stream is a queue of work of a device; the zero Stream is the default one.
type Stream uintptr

// Type is the type of an element.
type Type uint8

// The types of elements, those of NCCL that training needs.
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

func (t Type) String() string {
	if t >= numTypes {
		return fmt.Sprintf("Type(%d)", uint8(t))
	}
	return types[t].name
}

// Size is in bytes.
func (t Type) Size() int {
	if t >= numTypes {
		return 0
	}
	return types[t].size
}

// Op is what a reduction does with two elements.
type Op uint8

// The reductions.
const (
	Sum Op = iota
	Max
	Min
	numOps
)

func (o Op) String() string {
	return enum.Name(o, "Op", []string{"sum", "max", "min"})
}

// Collectives are operations that all ranks of a group take part in. Each enqueues work on a stream
// and returns; the work is done when the stream has passed it. Every rank must call the same
// operations with the same counts, types and roots in the same order.
//
// Buffers may not overlap, but dst and src may be the same where a method says so.
type Collectives interface {
	// AllReduce: dst[i] = op over all ranks of src[i], for count elements. dst may be src.
	AllReduce(dst, src Ptr, count int, t Type, op Op, s Stream) error
	// ReduceScatter: dst[i] of rank r = op over all ranks of src[r·count+i], for count elements.
	// dst may be that part of src.
	ReduceScatter(dst, src Ptr, count int, t Type, op Op, s Stream) error
	// AllGather: dst[r·count+i] = src[i] of rank r, for count elements. src may be its part of dst.
	AllGather(dst, src Ptr, count int, t Type, s Stream) error
	// Broadcast: buffer[i] = buffer[i] of rank root, for count elements.
	Broadcast(buffer Ptr, count int, t Type, root int, s Stream) error
	// Send hands count elements to the rank to, which must call Recv; the n-th Send from one rank
	// to another meets its n-th Recv there. Outside a Batch it may wait for the other side.
	Send(src Ptr, count int, t Type, to int, s Stream) error
	// Recv takes count elements from the rank from.
	Recv(dst Ptr, count int, t Type, from int, s Stream) error
}

// Registration is memory that a [Group] knows.
type Registration uintptr

// Group is ranks that compute together. Its methods may be called from any goroutine, but order
// counts (see [Collectives]), and Err and Abort are the only ones to call beside others.
type Group interface {
	Collectives
	// Rank is this process's, from 0; Size is the number of ranks.
	Rank() int
	Size() int
	// Batch makes what f calls one operation: its parts run at once, so that sends and receives
	// between ranks cannot wait for each other. f must use c alone, and one stream. Where f fails,
	// nothing is enqueued at this rank.
	Batch(f func(c Collectives) error) error
	// Alloc returns memory that the group's transport likes best, and Free gives it back.
	Alloc(bytes int) (Ptr, error)
	Free(p Ptr) error
	// Register makes known memory that will be used again and again, so that it need not be copied
	// through buffers of the transport. Deregister must come before the memory is freed.
	Register(p Ptr, bytes int) (Registration, error)
	Deregister(r Registration) error
	// Err says whether work that was enqueued has failed. It never waits.
	Err() error
	// Abort ends all work, enqueued and running, also where it waits for ranks that are gone. From
	// then on every call fails with the cause. Only the first cause counts.
	Abort(cause error)
	// Close frees the group. The streams that it was used on must have been waited for. Where the
	// group has failed, the error is the cause.
	Close() error
}

// CheckCall says what is wrong with the arguments of a collective. Implementations use it.
func CheckCall(name string, g Group, count int, t Type, op Op, peer int) error {
	switch {
	case g == nil:
		return fmt.Errorf("comm: %s of a group that is nil", name)
	case count < 0:
		return fmt.Errorf("comm: %s of %d elements: want a number from 0", name, count)
	case t >= numTypes:
		return fmt.Errorf("comm: %s of %v: no such type", name, t)
	case op >= numOps:
		return fmt.Errorf("comm: %s with %v: no such reduction", name, op)
	case peer < 0 || peer >= g.Size():
		return fmt.Errorf("comm: %s with rank %d: want 0 to %d", name, peer, g.Size()-1)
	}
	return nil
}
