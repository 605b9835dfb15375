package update

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// share is a rank's part of an update that several make. The parameters lie one behind the other,
// as in package llm/parallel; what AdamW updates is divided at multiples of a table's chunk, what
// Muon updates not at all.
//
// After each round of micro-batches every rank sends each owner what it has of the owner's
// gradients, and the owner adds them in the order of ranks: see package comm. The owner's sums of
// squares, of whole chunks, go to all, so that the norm is added up as on one GPU; then each
// updates its part, and the parameters come back to all.
type share struct {
	group  comm.Group
	shards comm.Shards
	parts  [][]part // by rank
	acc    gpu.Ptr  // float32 sums of this rank's gradients, each part at a multiple of 16 bytes

	staging [][]gpu.Ptr // by rank and part of this rank: what comes from that rank
	rounds  map[round]*run.Recording

	// Chunks of AdamW's tables and of Muon's, by rank.
	adamw, muon comm.Shards
}

// part is the elements From ≤ i < To of parameter number Param.
type part struct {
	param, from, to int
	acc             int // element of acc
}

func (p part) len() int { return p.to - p.from }

// round is a kind of round, captured apart.
type round struct {
	contributors int
	first        bool
}

const accAlign = 64 // elements: every part begins where vectors may

// divide decides who owns what.
func (x *Optimizer) divide(group comm.Group) error {
	s := &share{group: group, rounds: map[round]*run.Recording{}}
	var pieces []comm.Piece
	for _, p := range x.Params {
		if want := p.Grad.Len() * p.Grad.Type.Size(); p.Grad.Extent() != want {
			return fmt.Errorf("the gradient of %s does not lie in one piece", p.Input.Node.Name())
		}
		piece := comm.Piece{Len: p.Grad.Len(), Multiple: optimizer.OptimChunk}
		if p.Rule.Muon {
			piece.Multiple = 0
		}
		pieces = append(pieces, piece)
	}
	s.shards = comm.CutShards(pieces, group.Size())
	s.adamw, s.muon = comm.Shards{0}, comm.Shards{0}
	for r := range group.Size() {
		var parts []part
		at, acc := 0, 0
		var chunks [2]int
		for i, p := range pieces {
			from, to := max(s.shards[r]-at, 0), min(s.shards[r+1]-at, p.Len)
			at += p.Len
			if from >= to {
				continue
			}
			parts = append(parts, part{i, from, to, acc})
			acc += (to - from + accAlign - 1) / accAlign * accAlign
			kind := 0
			if x.Params[i].Rule.Muon {
				kind = 1
			}
			chunks[kind] += (to - from + optimizer.OptimChunk - 1) / optimizer.OptimChunk
		}
		s.parts = append(s.parts, parts)
		s.adamw, s.muon = append(s.adamw, s.adamw[r]+chunks[0]), append(s.muon, s.muon[r]+chunks[1])
	}
	x.share = s
	return x.takeRoom()
}

// takeRoom allocates the sums, and room for what comes from other ranks.
func (x *Optimizer) takeRoom() (err error) {
	s, own := x.share, 0
	mine := s.parts[s.group.Rank()]
	if n := len(mine); n > 0 {
		own = mine[n-1].acc + mine[n-1].len()
	}
	if s.acc, err = x.memory.Alloc(4*max(1, own), "the sums of gradients"); err != nil {
		return err
	}
	s.staging = make([][]gpu.Ptr, s.group.Size())
	for r := range s.staging {
		if r == s.group.Rank() {
			continue
		}
		for _, p := range mine {
			at, err := x.memory.Alloc(p.len()*x.Params[p.param].Grad.Type.Size(),
				"gradients of other ranks")
			if err != nil {
				return err
			}
			s.staging[r] = append(s.staging[r], at)
		}
	}
	return nil
}

// own is this rank's part of parameter number i.
func (s *share) own(i int) (part, bool) {
	mine := s.parts[s.group.Rank()]
	at := slices.IndexFunc(mine, func(p part) bool { return p.param == i })
	if at < 0 {
		return part{}, false
	}
	return mine[at], true
}

var commTypes = map[gpu.DType]comm.Type{gpu.Float32: comm.Float32, gpu.BFloat16: comm.BFloat16,
	gpu.Float16: comm.Float16}

func ptr(p gpu.Ptr) comm.Ptr { return comm.Ptr(p) }

// Contribute enqueues the sending of the last run's gradients, where this rank is among the first
// contributors, to their owners, and the adding of what comes. It is what all ranks do after every
// round.
func (x *Optimizer) Contribute(contributors int, first bool) error {
	s := x.share
	if s == nil {
		return errors.New("the optimiser is not one of several ranks'")
	}
	if contributors < 1 || contributors > s.group.Size() {
		return fmt.Errorf("%d contributions by %d ranks, want 1 to the number of ranks",
			contributors, s.group.Size())
	}
	k := round{contributors, first}
	if s.rounds[k] == nil {
		s.rounds[k] = new(run.Recording)
	}
	return x.replay(s.rounds[k], func() error {
		if err := x.exchange(contributors); err != nil {
			return err
		}
		return x.addUp(contributors, first)
	})
}

// replay is Runner.Replay where collectives can be captured.
func (x *Optimizer) replay(r *run.Recording, enqueue func() error) error {
	if x.share != nil && x.uncaptured {
		return enqueue()
	}
	return x.m.Replay(r, enqueue)
}

// exchange sends and receives gradients, all at once.
func (x *Optimizer) exchange(contributors int) error {
	s, stream, me := x.share, comm.Stream(x.m.Stream), x.share.group.Rank()
	return s.group.Batch(func(c comm.Collectives) error {
		for r := range s.group.Size() {
			if r == me {
				continue
			}
			for _, p := range s.parts[r] {
				g := x.Params[p.param].Grad
				if me < contributors {
					if err := c.Send(ptr(g.Ptr().Offset(p.from*g.Type.Size())), p.len(),
						commTypes[g.Type], r, stream); err != nil {
						return err
					}
				}
			}
			for i, p := range s.parts[me] {
				if r < contributors {
					t := commTypes[x.Params[p.param].Grad.Type]
					if err := c.Recv(ptr(s.staging[r][i]), p.len(), t, r, stream); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// addUp adds the contributions of a round to this rank's sums, in the order of ranks.
func (x *Optimizer) addUp(contributors int, first bool) error {
	s, me := x.share, x.share.group.Rank()
	for i, p := range s.parts[me] {
		g, sum := x.Params[p.param].Grad, s.acc.Offset(4*p.acc)
		from := make([]gpu.Ptr, contributors)
		for r := range from {
			if from[r] = g.Ptr().Offset(p.from * g.Type.Size()); r != me {
				from[r] = s.staging[r][i]
			}
		}
		keep := 1.0
		if first {
			keep = 0
		}
		if first && contributors > 1 && g.Type == gpu.Float32 { // the first two in one pass
			if err := x.m.Launch(elementwise.Binary{Op: elementwise.Add, Y: sum,
				A: elementwise.Operand{Ptr: from[0]},
				B: elementwise.Operand{Ptr: from[1]}, N: p.len(), Type: gpu.Float32}); err != nil {
				return err
			}
			from, keep = from[2:], 1
		}
		for _, at := range from {
			if err := x.m.Launch(elementwise.Axpby{Y: sum, YType: gpu.Float32, X: at,
				XType: g.Type, Alpha: 1, Beta: keep,
				N: p.len()}); err != nil {
				return err
			}
			keep = 1
		}
	}
	return nil
}

// gatherSquares brings the sums of squares of all chunks to all ranks.
func (s *share) gatherSquares(squares gpu.Ptr, stream gpu.Stream) error {
	if s.group.Size() == 1 {
		return nil
	}
	return s.group.Batch(func(c comm.Collectives) error {
		base := 0
		for _, shards := range []comm.Shards{s.adamw, s.muon} {
			for r := range s.group.Size() {
				if n := shards.Len(r); n > 0 {
					at := squares.Offset(4 * (base + shards[r]))
					if err := c.Broadcast(ptr(at), n, comm.Float32, r,
						comm.Stream(stream)); err != nil {
						return err
					}
				}
			}
			base += shards.Count()
		}
		return nil
	})
}

// gatherParams brings the parameters to all ranks.
func (x *Optimizer) gatherParams() error {
	s := x.share
	if s.group.Size() == 1 {
		return nil
	}
	return s.group.Batch(func(c comm.Collectives) error {
		for r, parts := range s.parts {
			for _, p := range parts {
				at := x.Params[p.param].Input.Array.Ptr().Offset(4 * p.from)
				if err := c.Broadcast(ptr(at), p.len(), comm.Float32, r,
					comm.Stream(x.m.Stream)); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// Gathered returns a moment of a parameter, whole, at every rank; all ranks must ask for the same.
func (x *Optimizer) Gathered(param, moment int) ([]float32, error) {
	s, a := x.share, x.Params[param]
	whole, n := make([]float32, a.Grad.Len()), 0
	for _, parts := range s.parts {
		for _, p := range parts {
			if p.param == param {
				n = max(n, p.len())
			}
		}
	}
	room, err := x.memory.Alloc(4*n, "a moment of other ranks")
	if err != nil {
		return nil, err
	}
	ctx, stream := x.m.Ctx, x.m.Stream
	for r, parts := range s.parts {
		for _, p := range parts {
			if p.param != param {
				continue
			}
			at := room
			if r == s.group.Rank() {
				at = a.Moments[moment].Ptr()
			}
			err := s.group.Broadcast(ptr(at), p.len(), comm.Float32, r, comm.Stream(stream))
			if err == nil {
				err = ctx.CopyToHost(gpu.Bytes(whole[p.from:p.to]), at, stream)
			}
			if err == nil {
				err = ctx.SyncStream(stream)
			}
			if err != nil {
				return nil, run.Joined(err, x.memory.Free(room))
			}
		}
	}
	return whole, x.memory.Free(room)
}

// Part is the elements of parameter number i that this rank remembers moments of.
func (x *Optimizer) Part(i int) (from, to int) {
	if x.share == nil {
		return 0, x.Params[i].Grad.Len()
	}
	p, _ := x.share.own(i)
	return p.from, p.to
}

// Shared reports whether the optimiser is one of several ranks'.
func (x *Optimizer) Shared() bool { return x.share != nil }

// tensorOf is what a table has of a parameter, or of this rank's part of it.
func (x *Optimizer) tensorOf(i int) (optimizer.Tensor, bool) {
	p := x.Params[i]
	r := p.Rule
	t := optimizer.Tensor{Param: p.Input.Array.Ptr(), Grad: p.Grad.Ptr(),
		GradType: p.Grad.Type, Size: p.Grad.Len(),
		LRScale: r.LRScale, Decay: r.Decay, Beta1: r.Beta1, Beta2: r.Beta2, Step: p.Step}
	if x.share != nil {
		own, ok := x.share.own(i)
		if !ok {
			return t, false
		}
		t.Param, t.Size = t.Param.Offset(4*own.from), own.len()
		t.Grad, t.GradType = x.share.acc.Offset(4*own.acc), gpu.Float32
	}
	t.First = p.Moments[0].Ptr()
	if !r.Muon {
		t.Second = p.Moments[1].Ptr()
	}
	return t, true
}

// copies says how a parameter's copies are renewed: one along with the parameter, where this rank
// updates all of it.
func (x *Optimizer) copies(p *Param, t *optimizer.Tensor, vector int) {
	for _, c := range p.Input.Copies {
		if x.share == nil && t.Copy == 0 && c.At%vector == 0 {
			t.Copy, t.CopyType = c.Ptr(), c.Type // written along with the parameter
		} else {
			x.renew = append(x.renew, c.Renew)
		}
	}
}

// squaresAt are where a rank's sums of squares begin, of AdamW's chunks and of Muon's, and how many
// there are at all ranks.
func (x *Optimizer) squaresAt() (adamw, muon, all int) {
	if s := x.share; s != nil {
		me := s.group.Rank()
		return s.adamw[me], s.adamw.Count() + s.muon[me], s.adamw.Count() + s.muon.Count()
	}
	if x.adamw != nil {
		muon = x.adamw.Chunks
	}
	all = muon
	if x.muon != nil {
		all += x.muon.Chunks
	}
	return 0, muon, all
}
