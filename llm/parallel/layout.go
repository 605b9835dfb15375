package parallel

import (
	"unsafe"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/internal/params"
	"github.com/kasmina-go/kasmina/optim"
)

// layout is how a model's parameters lie one behind the other in a buffer, and which rank owns
// what.
type layout struct {
	params []stretch
	shards comm.Shards

	// kernels are those by which the optimizer updates the parameters. The largest number of moments
	// that any of them has is moments.
	kernels map[string]*optim.Kernel
	moments int

	model  []gorgonia.ValueGrad
	reader params.Reader
}

// stretch is a parameter's place in the buffer.
type stretch struct {
	name    string
	at, len int
}

// newLayout divides a model among ranks: parameters whose kernel needs whole matrices not at all, and
// all others at multiples of optim.PartGrain.
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

// parts are those of the parameters that a rank owns. ats are their places in the buffer.
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

// read returns the parameters as they are in memory now, by name.
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

// copyParts copies parts between arrays, which slice returns in part, and the buffer, whose elements
// have the given size. A part of an array is copied as bytes, and takes no more of them than the
// elements of the parameter have room for. The buffer has the part at the parameter's place.
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

// bytesOf returns the memory of numbers, and nothing for a nil.
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
