package parallel

import (
	"unsafe"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/params"
	"github.com/kasmina-go/kasmina/optim"
)

// layout describes a buffer with all parameters of a model and its division into shards.
type layout struct {
	params []stretch
	shards comm.Shards

	// kernels holds each parameter's update kernel, and moments the largest number of moments of any
	// kernel.
	kernels map[string]*optim.Kernel
	moments int

	model  []gorgonia.ValueGrad
	reader params.Reader
}

// stretch is a parameter's section of the buffer.
type stretch struct {
	name    string
	at, len int
}

// newLayout divides a model among ranks, at multiples of optim.PartGrain. It does not divide a parameter if
// the kernel needs whole matrices.
func newLayout(model []gorgonia.ValueGrad, o optim.Partial, size int) (*layout, error) {
	l := &layout{model: model, kernels: map[string]*optim.Kernel{}}
	ps, err := l.reader.Read(model)
	if err != nil {
		return nil, err
	}

	var pieces []comm.Piece
	at := 0
	for _, p := range ps {
		n := p.Shape.TotalSize()
		piece := comm.Piece{Len: n, Multiple: optim.PartGrain}
		kernel := o.Rule(p.Name, p.Shape).Kernel
		if kernel.Whole {
			piece.Multiple = 0
		}
		l.kernels[p.Name], l.moments = kernel, max(l.moments, len(kernel.Moments))
		pieces = append(pieces, piece)
		l.params = append(l.params, stretch{p.Name, at, n})
		at += n
	}

	l.shards = comm.CutShards(pieces, size)
	return l, nil
}

// parts returns the parts of parameters that belong to a rank, and their offsets in the buffer.
func (l *layout) parts(rank int) (parts []optim.Part, ats []int) {
	for _, s := range l.params {
		from, to := max(l.shards[rank]-s.at, 0), min(l.shards[rank+1]-s.at, s.len)
		if from < to {
			parts, ats = append(parts, optim.Part{Name: s.name, From: from, To: to}),
				append(ats, s.at+from)
		}
	}
	return parts, ats
}

// read returns the current parameters by name.
func (l *layout) read() (map[string]params.Param, error) {
	ps, err := l.reader.Read(l.model)
	if err != nil {
		return nil, err
	}
	byName := make(map[string]params.Param, len(ps))
	for _, p := range ps {
		byName[p.Name] = p
	}
	return byName, nil
}

// copyParts copies parts of arrays to or from the buffer. The function slice returns a part of an array.
// Elements of the buffer have the given size. The bytes of a part must fit in the place of the parameter's
// elements in the buffer.
func copyParts(parts []optim.Part, ats []int, buffer []byte, size int,
	slice func(optim.Part) any, toBuffer bool) {
	for i, part := range parts {
		array := bytesOf(slice(part))
		room := buffer[ats[i]*size:][:len(array)]
		if toBuffer {
			copy(room, array)
		} else {
			copy(array, room)
		}
	}
}

// elements returns the elements of a parameter's value or gradient that belong to a part.
func elements(data any, p optim.Part) any {
	switch x := data.(type) {
	case []float32:
		return x[p.From:p.To]
	case []float64:
		return x[p.From:p.To]
	}
	return nil
}

// bytesOf returns the memory of a slice of numbers, or nil for nil.
func bytesOf(numbers any) []byte {
	switch x := numbers.(type) {
	case []float32:
		return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
	case []float64:
		return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 8*len(x))
	case []uint8:
		return x
	}
	return nil
}
