package update

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/plan"
)

// share is a rank's part of an update that several make. Gradients travel in buckets, each of those
// that a run is done with about the same time. Each bucket is divided among all ranks, so that all
// send and receive at any time. What AdamW updates is divided at multiples of a table's chunk, what
// Muon updates not at all.
//
// In each round of micro-batches every rank sends each owner what it has of the owner's gradients.
// The owner adds them in the order of ranks: see package comm and exchange.go. Of a step of one
// round by two ranks the update adds the two contributions as it reads them. There are no sums in
// memory then, and what comes from the other lies in the arena of the run. The owner's sums of
// squares, of whole chunks, go to all, so that the norm is added up as on one GPU. Then each
// updates its part, and the parameters come back to all.
type share struct {
	group   comm.Group
	buckets []*bucket
	parts   [][]part // of each parameter, by rank; of some ranks they have no elements
	two     bool     // the update adds the contributions of two ranks
	acc     gpu.Ptr  // float32 sums of this rank's gradients, each part at a multiple of 256 bytes
	staging gpu.Ptr  // what comes from other ranks: of a few buckets, or what the arena has no room for
	room    int      // bytes of staging for one bucket
	slots   int      // of routes of buckets
	least   int      // bytes of what travels together
	loads   []*load  // in which parameters come back
	rounds  run.Recordings[round]

	beside
}

// bucket is parameters whose gradients travel together.
type bucket struct {
	pack             // ordered by the calls behind which gradients are there
	slot   int       // of its routes
	places []gpu.Ptr // of this rank's parts, where those of the next rank come, and so on
	parts  [][]part  // by rank
	// of rounds to which so many ranks contribute; those to which not all do are made when the
	// first such round comes
	exchanges map[int]exchange
}

// exchange is how the gradients of a bucket travel.
type exchange struct {
	route  comm.Route
	staged [][]gpu.Ptr // of this rank's parts, where contributions lie, in the order of ranks
}

// part is the elements From ≤ i < To of parameter number Param.
type part struct {
	param, from, to int
	acc             int     // element of acc
	bucket          *bucket // in which it travels
	index           int     // among those of its rank there
}

func (p part) len() int { return p.to - p.from }

const (
	accAlign = 64 // elements: every part begins where vectors may
	// bucketBytes is what a bucket has at least, but for the last. It is enough to use a link well,
	// and little enough for the first to leave soon.
	bucketBytes = 32 << 20
	// slots is how many buckets there is room for, where they are added up beside the run: one may
	// arrive while another is added.
	slots = 3
	// mostHeld is how many buckets there are about at most where there is room for all, and loads.
	mostHeld = 64
)

// divide decides which gradients travel together, and who owns what.
func (x *Optimizer) divide(r Ranks) error {
	s := &share{group: r.Group, parts: make([][]part, len(x.Params))}
	for i := range s.parts {
		s.parts[i] = make([]part, r.Group.Size())
	}
	x.share = s
	s.two = r.Rounds == 1 && r.Group.Size() == 2
	total := 0
	for _, p := range x.Params {
		if want := p.Grad.Len() * p.Grad.Type.Size(); p.Grad.Extent() != want {
			return fmt.Errorf("the gradient of %s does not lie in one piece", p.Input.Node.Name())
		}
		total += p.Grad.Extent()
		s.two = s.two && !p.Rule.Muon
	}
	s.least = cmp.Or(r.Bucket, bucketBytes)
	least := s.least
	if s.two {
		least = max(least, total/mostHeld)
	}
	acc := 0
	for _, p := range x.packs(least,
		func(i int) int { return lastWrite(x.m.Program, x.Params[i].Grad) },
		func(i int) int { return x.Params[i].Grad.Extent() }) {
		b := &bucket{pack: p, exchanges: map[int]exchange{}}
		s.buckets = append(s.buckets, b)
		x.cut(b)
		for i := range b.parts[r.Group.Rank()] {
			p := &b.parts[r.Group.Rank()][i]
			p.acc = acc
			acc += kernel.CeilDiv(p.len(), accAlign) * accAlign
			s.parts[p.param][r.Group.Rank()] = *p
		}
	}
	return run.InTurn(func() error { return x.takeRoom(acc) }, x.open, x.keepParts, x.arrange)
}

// pack is parameters that travel together.
type pack struct {
	params      []int // numbers
	bytes       int
	first, last int // the calls of a run at which they are ordered, of the first and the last
}

// packs puts the parameters in packs of so many bytes at least, in the order of calls of a run. One
// that is as large as two begins a pack, so that others do not wait for it.
func (x *Optimizer) packs(least int, call, bytes func(i int) int) (all []pack) {
	order, calls := make([]int, len(x.Params)), make([]int, len(x.Params))
	for i := range x.Params {
		order[i], calls[i] = i, call(i)
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(calls[a], calls[b]) })
	for _, i := range order {
		n := bytes(i)
		if len(all) == 0 || all[len(all)-1].bytes >= least || n >= 2*least {
			all = append(all, pack{first: calls[i]})
		}
		p := &all[len(all)-1]
		p.params, p.last, p.bytes = append(p.params, i), calls[i], p.bytes+n
	}
	return all
}

// lastWrite is the number of the last call of a program that writes to an array's buffer.
func lastWrite(p *program.Program, a *program.Array) (last int) {
	for i, c := range p.Calls {
		for _, arg := range c.Args {
			if (arg.Role == program.Write || arg.Role == program.Update) && arg.Array.On(a.Buffer) {
				last = i
			}
		}
	}
	return last
}

// cut divides a bucket among the ranks.
func (x *Optimizer) cut(b *bucket) {
	var pieces []comm.Piece
	for _, i := range b.params {
		piece := comm.Piece{Len: x.Params[i].Grad.Len(), Multiple: optimizer.OptimChunk}
		if x.Params[i].Rule.Muon {
			piece.Multiple = 0
		}
		pieces = append(pieces, piece)
	}
	shards := comm.CutShards(pieces, x.share.group.Size())
	b.parts = make([][]part, x.share.group.Size())
	for r := range b.parts {
		at := 0
		for i, p := range pieces {
			from, to := max(shards[r]-at, 0), min(shards[r+1]-at, p.Len)
			at += p.Len
			if from < to {
				p := part{param: b.params[i], from: from, to: to, bucket: b, index: len(b.parts[r])}
				b.parts[r], x.share.parts[p.param][r] = append(b.parts[r], p), p
			}
		}
	}
}

// takeRoom allocates the sums, and room for what comes from other ranks.
func (x *Optimizer) takeRoom(sums int) (err error) {
	s := x.share
	if s.two {
		s.slots = len(s.buckets)
		return x.lodge()
	}
	s.slots = min(slots, len(s.buckets))
	if s.acc, err = x.memory.Alloc(4*max(1, sums), "the sums of gradients"); err != nil {
		return err
	}
	for _, b := range s.buckets {
		bytes := 0
		for _, p := range b.parts[s.group.Rank()] {
			bytes += x.stagingBytes(p)
		}
		s.room = max(s.room, bytes*(s.group.Size()-1))
	}
	s.staging, err = x.memory.Alloc(max(1, s.slots*s.room), "gradients of other ranks")
	for i, b := range s.buckets {
		b.slot = i % s.slots
		at := s.staging.Offset(b.slot * s.room)
		for range s.group.Size() - 1 {
			for _, p := range b.parts[s.group.Rank()] {
				b.places = append(b.places, at)
				at = at.Offset(x.stagingBytes(p))
			}
		}
	}
	return err
}

// lodge gives what comes from the other rank room in the run's arena, where no later call needs
// that: the passes are done with most of it when gradients leave. What does not fit has memory of
// its own.
func (x *Optimizer) lodge() (err error) {
	s, p := x.share, x.m.Program
	var arena gpu.Ptr
	var placed []*plan.Interval
	for _, b := range p.Buffers {
		if !b.Resident && b.First >= 0 {
			arena, placed = b.Base-gpu.Ptr(b.Offset), plan.Insert(placed, &b.Interval)
		}
	}
	outside := 0
	var rest []*gpu.Ptr
	for i, b := range s.buckets {
		b.slot = i
		mine := b.parts[s.group.Rank()]
		b.places = make([]gpu.Ptr, len(mine))
		for j, own := range mine {
			v := &plan.Interval{Bytes: x.stagingBytes(own), First: b.last + 1, Last: len(p.Calls)}
			if plan.Fit(v, placed, program.Alignment); v.Offset+v.Bytes <= p.Arena {
				placed, b.places[j] = plan.Insert(placed, v), arena.Offset(v.Offset)
				continue
			}
			b.places[j], rest = gpu.Ptr(outside), append(rest, &b.places[j])
			outside += v.Bytes
		}
	}
	s.staging, err = x.memory.Alloc(max(1, outside), "gradients of other ranks")
	for _, at := range rest {
		*at += s.staging
	}
	return err
}

// stagingBytes is what a part takes of what comes from one rank.
func (x *Optimizer) stagingBytes(p part) int {
	return plan.Align(x.bytes(p), program.Alignment)
}

// summed says where a table finds the gradient of a part of this rank's.
func (x *Optimizer) summed(own part, t *optimizer.Tensor) {
	s := x.share
	t.Grad, t.GradType = s.acc.Offset(4*own.acc), gpu.Float32
	if !s.two {
		return
	}
	staged := own.bucket.exchanges[2].staged[own.index]
	t.Grad, t.Other, t.GradType = staged[0], staged[1], x.Params[own.param].Grad.Type
}

// own is this rank's part of parameter number i.
func (s *share) own(i int) (part, bool) {
	p := s.parts[i][s.group.Rank()]
	return p, p.len() > 0
}

// gatherSquares brings the sums of squares to all ranks, of all chunks and of the losses. Each is
// that of one rank, and 0 at the others, so that no order of addition matters.
func (x *Optimizer) gatherSquares() error {
	if x.share == nil || x.share.group.Size() == 1 {
		return nil
	}
	at := ptr(x.squares)
	return x.share.group.AllReduce(at, at, x.sums(), comm.Float32, comm.Sum,
		comm.Stream(x.m.Stream))
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
		LRScale: r.LRScale, Decay: r.Decay, Beta1: r.Beta1, Beta2: r.Beta2, Step: p.Step,
		Apart: p.Apart}
	if x.share != nil {
		own, ok := x.share.own(i)
		if !ok {
			return t, false
		}
		t.Param, t.Size = x.master(i, own.from), own.len()
		x.summed(own, &t)
	}
	t.First = p.Moments[0].Ptr()
	if !r.Muon {
		t.Second = p.Moments[1].Ptr()
	}
	return t, true
}
