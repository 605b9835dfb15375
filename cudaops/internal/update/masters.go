package update

import (
	"fmt"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/optim"
)

// If runs read a parameter only in a narrower type, its float32 values are divided among the ranks,
// and each rank stores only the elements that it updates. After an update the ranks exchange the
// narrow elements, which every rank stores in full.

// sendsCopy reports whether the owners of a parameter send its first copy, in a narrower type,
// instead of its float32 values.
func (x *Optimizer) sendsCopy(p *Param) bool {
	in := p.Input
	return x.share.group.Size() > 1 && len(in.Copies) > 0 &&
		in.Copies[0].At%program.VectorBytes == 0 && in.Sharers == 0 &&
		x.m.Memory.Owns(in.Array.Base) && x.firstTouch(in.Array) == len(x.m.Program.Calls) &&
		!slices.ContainsFunc(x.m.Program.Kasmina, func(l *program.KasminaLayer) bool {
			return l.WeightsInput == in || l.ScalesInput == in
		})
}

// shardParams reduces parameters that travel in a narrower type to the parts that this rank updates.
func (x *Optimizer) shardParams() error {
	for i, p := range x.Params {
		from, to := x.Part(i)
		switch {
		case p.Input.Part != nil && (p.Input.Part.From != from || p.Input.Part.To != to):
			return fmt.Errorf("%s is already divided among ranks, and this optimizer needs "+
				"another division: make a new machine for it", p.Input.Node.Name())
		case p.Input.Part != nil || !x.sendsCopy(p):
			continue
		}
		if err := x.shardParam(p.Input, from, to); err != nil {
			return err
		}
	}

	return nil
}

// shardParam reduces the float32 values of a parameter to one part and frees the rest.
func (x *Optimizer) shardParam(in *program.Input, from, to int) error {
	size := in.Array.Type.Size()
	part := &program.Part{From: from, To: to,
		Array: new(program.Program).NewResident(in.Array.Type, to-from)}
	var err error
	if part.Base, err = x.m.Memory.Alloc(part.Bytes, "a part of a parameter"); err != nil {
		return err
	}

	if err := run.Joined(x.m.Ctx.CopyOnDevice(part.Ptr(), in.Array.Ptr().Offset(from*size),
		(to-from)*size, x.m.Stream), x.m.Ctx.SyncStream(x.m.Stream)); err != nil {
		return err
	}

	whole, first := in.Array.Base, in.Copies[0].Array
	in.Part, in.Array.Base, in.Copies[0].Convert = part, 0, nil
	for i, c := range in.Copies[1:] {
		l := elementwise.Cast{YType: c.Type, XType: first.Type, N: first.Len()}
		in.Copies[i+1].Convert = named(program.NewCall(&l, program.Writes(&l.Y, c.Array),
			program.Reads(&l.X, first)))
	}

	return x.m.Memory.Free(whole)
}

// sentArray returns the array that is sent to other ranks for parameter number i.
func (x *Optimizer) sentArray(i int) *program.Array {
	if in := x.Params[i].Input; in.Part != nil {
		return in.Copies[0].Array
	}
	return x.Params[i].Input.Array
}

// planCopies decides how a parameter's copies are updated. The update kernel writes one copy along with
// the parameter, provided that this rank updates the whole parameter or that the copy travels.
func (x *Optimizer) planCopies(p *Param, t *optimizer.Tensor) {
	for i, c := range p.Input.Copies {
		part := p.Input.Part
		switch {
		case part != nil && i == 0:
			t.Copy, t.CopyType = c.Ptr().Offset(part.From*c.Type.Size()), c.Type
		case x.share == nil && t.Copy == 0 && c.At%program.VectorBytes == 0:
			t.Copy, t.CopyType = c.Ptr(), c.Type // written along with the parameter
		default:
			x.copyUpdates = append(x.copyUpdates, c.Convert)
		}
	}
}

// Own returns a moment of a parameter with this rank's part filled in and zeros elsewhere.
func (x *Optimizer) Own(param, moment int) (any, error) {
	p := x.Params[param]
	m := p.Rule.Kernel.Moments[moment]
	whole := m.New(p.Grad.Len(), tensor.Float32)
	a := p.Moments[moment]
	if a.Len() == 0 {
		return whole, nil
	}

	own := x.own(param)
	part := m.Slice(whole, optim.Part{From: own.from, To: own.to})
	return whole, x.m.FetchBytes(a, hostBytes(part))
}

// hostBytes returns the memory of a moment's elements on the host.
func hostBytes(data any) []byte {
	if codes, ok := data.([]uint8); ok {
		return codes
	}
	return gpu.Bytes(data.([]float32))
}

// GatheredMoment returns a moment of a parameter, assembled from the parts of all ranks. All ranks
// must request the same moment.
func (x *Optimizer) GatheredMoment(param, moment int) (any, error) {
	p := x.Params[param]
	m := p.Rule.Kernel.Moments[moment]
	whole := m.New(p.Grad.Len(), tensor.Float32)
	return whole, x.gather(param, p.Moments[moment].Ptr(), func(r part) []byte {
		return hostBytes(m.Slice(whole, optim.Part{From: r.from, To: r.to}))
	})
}

// Gathered returns the float32 values of a parameter, assembled from the parts of all ranks. This
// rank's part is at own. All ranks must request the same parameter.
func (x *Optimizer) Gathered(param int, own gpu.Ptr) ([]float32, error) {
	whole := make([]float32, x.Params[param].Grad.Len())
	return whole, x.gather(param, own, func(r part) []byte {
		return gpu.Bytes(whole[r.from:r.to])
	})
}

// gather copies to the host an array that is divided among the ranks like a parameter. This rank's
// part is at own, and host returns the destination of each part.
func (x *Optimizer) gather(param int, own gpu.Ptr, host func(part) []byte) error {
	s, parts := x.share, x.share.parts[param]
	most := 1
	for _, p := range parts {
		most = max(most, len(host(p)))
	}

	room, err := x.memory.Alloc(most, "parts of other ranks")
	if err != nil {
		return err
	}

	ctx, stream := x.m.Ctx, x.m.Stream
	for r, p := range parts {
		to := host(p)
		if len(to) == 0 {
			continue
		}
		at := room
		if r == s.group.Rank() {
			at = own
		}
		err := run.InOrder(
			func() error {
				return s.group.Broadcast(ptr(at), len(to), comm.Uint8, r, comm.Stream(stream))
			},
			func() error { return ctx.CopyToHost(to, at, stream) },
			func() error { return ctx.SyncStream(stream) },
			s.group.Err) // an aborted broadcast ends early without an error on the stream
		if err != nil {
			return run.Joined(err, x.memory.Free(room))
		}
	}

	return x.memory.Free(room)
}
