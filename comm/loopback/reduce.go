package loopback

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/half"
)

// reduceRing reduces the contributions of all ranks into dst in the order of a ring: the elements
// are divided into as many blocks as there are ranks, and block b starts at rank b+1. Sums
// therefore depend on the number of ranks, as NCCL's do.
func reduceRing(dst []byte, parts [][]byte, t comm.Type, op comm.Op) error {
	size, n := t.Size(), len(parts)
	count := len(dst) / size
	f, err := reducer(t, op)
	if err != nil {
		return err
	}

	value := make([]byte, size)
	for i := range count {
		start := i*n/count + 1
		at := i * size
		copy(value, parts[start%n][at:at+size])
		for k := start + 1; k < start+n; k++ {
			f(value, parts[k%n][at:])
		}
		copy(dst[at:], value)
	}

	return nil
}

// reducer returns a function that sets a to op(a, b), rounded to the type.
func reducer(t comm.Type, op comm.Op) (func(a, b []byte), error) {
	e := binary.NativeEndian
	switch t {
	case comm.Uint8:
		return func(a, b []byte) { a[0] = reduce(op, a[0], b[0]) }, nil
	case comm.Int32:
		return func(a, b []byte) {
			e.PutUint32(a, uint32(reduce(op, int32(e.Uint32(a)), int32(e.Uint32(b)))))
		}, nil
	case comm.Int64:
		return func(a, b []byte) {
			e.PutUint64(a, uint64(reduce(op, int64(e.Uint64(a)), int64(e.Uint64(b)))))
		}, nil
	case comm.Uint64:
		return func(a, b []byte) { e.PutUint64(a, reduce(op, e.Uint64(a), e.Uint64(b))) }, nil
	case comm.Float32:
		return func(a, b []byte) {
			x, y := math.Float32frombits(e.Uint32(a)), math.Float32frombits(e.Uint32(b))
			e.PutUint32(a, math.Float32bits(reduce(op, x, y)))
		}, nil
	case comm.Float64:
		return func(a, b []byte) {
			x, y := math.Float64frombits(e.Uint64(a)), math.Float64frombits(e.Uint64(b))
			e.PutUint64(a, math.Float64bits(reduce(op, x, y)))
		}, nil
	case comm.BFloat16:
		return func(a, b []byte) {
			x, y := half.BFloat16(e.Uint16(a)).Float32(), half.BFloat16(e.Uint16(b)).Float32()
			e.PutUint16(a, uint16(half.NewBFloat16(reduce(op, x, y))))
		}, nil
	case comm.Float16:
		return func(a, b []byte) {
			x, y := half.Float16(e.Uint16(a)).Float64(), half.Float16(e.Uint16(b)).Float64()
			e.PutUint16(a, uint16(half.NewFloat16(reduce(op, x, y))))
		}, nil
	}

	return nil, fmt.Errorf("loopback: reduction of %v", t)
}

// reduce returns op(a, b).
func reduce[T cmp.Ordered](op comm.Op, a, b T) T {
	switch op {
	case comm.Max:
		return max(a, b)
	case comm.Min:
		return min(a, b)
	}
	return a + b
}
