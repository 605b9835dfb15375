package parallel

import (
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

	// moments is the largest number of moments that the optimizer keeps of a parameter.
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
	l := &layout{model: model}
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
		l.moments = max(l.moments, len(kernel.Moments))
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

// copyParts copies parts between arrays of parameters and the buffer, one of []float32 and
// []float64.
func copyParts(parts []optim.Part, ats []int, buffer any, array func(name string) any,
	toBuffer bool) {
	for i, part := range parts {
		n := part.To - part.From
		switch b := buffer.(type) {
		case []float32:
			if x, ok := array(part.Name).([]float32); ok {
				transfer(b[ats[i]:][:n], x[part.From:part.To], toBuffer)
			}
		case []float64:
			if x, ok := array(part.Name).([]float64); ok {
				transfer(b[ats[i]:][:n], x[part.From:part.To], toBuffer)
			}
		}
	}
}

func transfer[T any](buffer, array []T, toBuffer bool) {
	if toBuffer {
		copy(buffer, array)
	} else {
		copy(array, buffer)
	}
}
