package run

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// Large values are transferred in pieces, by several goroutines that each read and convert into their own
// pinned buffer. Constants and parameters therefore need no host memory of their full size, and loading a
// model takes little longer than reading it.

const (
	pieceBytes      = 1 << 20
	transferWorkers = 4 // number of goroutines
)

// transfer performs n pieces of work on several goroutines, each with its own pinned buffer, which later
// calls reuse. After a piece fails, no further piece is started.
func (x *Executor) transfer(n int, work func(i int, pinned []byte) error) error {
	var all sync.WaitGroup
	var begun atomic.Int64
	errs := make([]error, n+1) // the last element is an allocation error
	for c := range min(transferWorkers, n) {
		if x.pinned[c] == nil {
			if x.pinned[c], errs[n] = x.Memory.AllocHost(pieceBytes); errs[n] != nil {
				break
			}
		}
		all.Go(func() {
			for i := begun.Add(1) - 1; i < int64(n); i = begun.Add(1) - 1 {
				if errs[i] = work(int(i), x.pinned[c]); errs[i] != nil {
					begun.Store(int64(n))
				}
			}
		})
	}

	all.Wait()
	return cmp.Or(errs...)
}

// Reader passes the elements of an input to put, in order and in pieces of any size, encoded as type t.
type Reader func(n *gorgonia.Node, put func(part []byte, t gpu.DType) error) error

// source is an array to send, with the origin of its elements.
type source struct {
	*program.Array
	node   *gorgonia.Node
	raw    []byte // nil if the reader supplies the elements
	stored gpu.DType
}

// sourcesOf returns the sources of an input, or an error if its value cannot be sent. A sharded input has
// two: the part that this rank stores, and the whole value in the type of the first copy.
func (s *Inputs) sourcesOf(in *program.Input) ([]source, error) {
	if in.Node.Value() == nil && in.Frozen && s.read != nil {
		return []source{{Array: in.Array, node: in.Node}}, nil
	}
	raw, stored, err := hostValue(in)
	if err != nil || in.Part == nil {
		return []source{{in.Array, in.Node, raw, stored}}, err
	}
	size := stored.Size()
	return []source{{in.Part.Array, in.Node, raw[in.Part.From*size : in.Part.To*size], stored},
		{in.Copies[0].Array, in.Node, raw, stored}}, nil
}

// hostElements returns the memory of a value, checked to fit in array a, and the type of the elements
// in that memory: 64-bit integers, since device programs are 64-bit, or float32.
func hostElements(v gorgonia.Value, a *program.Array) (raw []byte, stored gpu.DType, err error) {
	flat, err := opbase.Flat(v)
	if err != nil {
		return nil, 0, err
	}

	switch x := flat.(type) {
	case []int:
		raw, stored = gpu.Bytes(x), gpu.Int64
	case []float32:
		raw, stored = gpu.Bytes(x), gpu.Float32
	}

	if raw == nil || len(raw) != a.Len()*stored.Size() ||
		(stored == gpu.Int64) != (a.Type == gpu.Int64) {
		return nil, 0, fmt.Errorf("the value is a %v of shape %v, want %d elements to store as %v",
			v.Dtype(), v.Shape(), a.Len(), a.Type)
	}

	return raw, stored, nil
}

// convert converts elements from one type to another and writes them to raw as type t.
func convert(raw []byte, t gpu.DType, from []byte, stored gpu.DType) {
	n := len(from) / stored.Size()
	switch {
	case stored == t:
		copy(raw, from)
	case stored == gpu.Float32:
		gpu.Encode(raw, t, gpu.View[float32](from))
	case t == gpu.Float32:
		gpu.Decode(gpu.View[float32](raw)[:n], stored, from)
	default:
		x := make([]float32, n)
		gpu.Decode(x, stored, from)
		gpu.Encode(raw, t, x)
	}
}

// send copies an array to the device through a pinned buffer.
func (s *Inputs) send(from source, pinned []byte) error {
	t, at := from.Type, 0
	put := func(part []byte, stored gpu.DType) error {
		for len(part) > 0 {
			if at == from.Len() {
				return fmt.Errorf("there are more than its %d elements", at)
			}
			n := min(len(part)/stored.Size(), len(pinned)/t.Size(), from.Len()-at)
			if n == 0 {
				return fmt.Errorf("a piece of %d bytes is no number of elements of type %v",
					len(part), stored)
			}
			convert(pinned, t, part[:n*stored.Size()], stored)
			if err := Joined(s.Ctx.CopyToDevice(from.Ptr().Offset(at*t.Size()), pinned[:n*t.Size()],
				s.Stream), s.Ctx.SyncStream(s.Stream)); err != nil {
				return err
			}
			part, at = part[n*stored.Size():], at+n
		}
		return nil
	}

	if from.raw != nil {
		return put(from.raw, from.stored)
	}

	err := s.read(from.node, put)
	if err == nil && at < from.Len() {
		err = fmt.Errorf("there are %d elements of %d", at, from.Len())
	}

	return err
}

// copyToHost waits for the device and copies len(dst) bytes from an address on the device to dst.
func (r *Runner) copyToHost(dst []byte, from gpu.Ptr) error {
	n := (len(dst) + pieceBytes - 1) / pieceBytes
	return r.transfer(n, func(i int, pinned []byte) error {
		to := dst[i*pieceBytes : min(len(dst), (i+1)*pieceBytes)]
		err := Joined(r.Ctx.CopyToHost(pinned[:len(to)], from.Offset(i*pieceBytes), r.Stream),
			r.Ctx.SyncStream(r.Stream))
		if err == nil {
			copy(to, pinned)
		}
		return err
	})
}
