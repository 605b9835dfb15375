package update

import (
	"cmp"
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
// send and receive at any time. Parameters are divided at multiples of a table's chunk, except those
// whose kernel needs whole matrices, which are not divided.
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
	slots   int      // of routes of buckets
	least   int      // bytes of what travels together
	loads   []*load  // in which parameters come back
	rounds  run.Recordings[round]

	beside
}

// bucket is parameters whose gradients travel together.
type bucket struct {
	pack     // ordered by the calls behind which gradients are there
	slot int // of its routes
	// of rounds to which so many ranks contribute; those to which not all do are made when the
	// first such round comes
	routes map[int]comm.Route
}

// part is the elements from ≤ i < to of a parameter.
type part struct {
	param, from, to int
	contributed     []gpu.Ptr // by rank, to their gradient; of other ranks' parts this rank's alone
	sum             gpu.Ptr   // of these, in float32; of this rank's parts
}

func (p part) len() int { return p.to - p.from }

const (
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
func (x *Optimizer) divide(r *Ranks) error {
	if r == nil {
		return nil
	}
	x.uncaptured = r.Uncaptured
	s := &share{group: r.Group, parts: make([][]part, len(x.Params))}
	for i := range s.parts {
		s.parts[i] = make([]part, r.Group.Size())
	}
	x.share = s
	s.two = r.Rounds == 1 && r.Group.Size() == 2
	total := 0
	for _, p := range x.Params {
		total += p.Grad.Extent()
		s.two = s.two && !p.Rule.Kernel.Whole
	}
	s.least = cmp.Or(r.Bucket, bucketBytes)
	least := s.least
	if s.two {
		least = max(least, total/mostHeld)
	}
	grad := func(i int) *program.Array { return x.Params[i].Grad }
	for _, p := range x.packs(least, grad, x.lastWrite) {
		b := &bucket{pack: p, routes: map[int]comm.Route{}}
		s.buckets = append(s.buckets, b)
		x.cut(b)
	}
	return run.InTurn(x.takeRoom, x.open, x.keepParts, x.arrange)
}

// pack is parameters that travel together.
type pack struct {
	params      []int // numbers
	bytes       int
	first, last int // the calls of a run at which they are ordered, of the first and the last
}

// packs puts what travels of the parameters in packs of so many bytes at least, in the order of
// calls of a run. One that is as large as two begins a pack, so that others do not wait for it.
func (x *Optimizer) packs(least int, what func(i int) *program.Array,
	call func(*program.Array) int) (all []pack) {
	order, calls := make([]int, len(x.Params)), make([]int, len(x.Params))
	for i := range x.Params {
		order[i], calls[i] = i, call(what(i))
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(calls[a], calls[b]) })
	for _, i := range order {
		n := what(i).Extent()
		if len(all) == 0 || all[len(all)-1].bytes >= least || n >= 2*least {
			all = append(all, pack{first: calls[i]})
		}
		p := &all[len(all)-1]
		p.params, p.last, p.bytes = append(p.params, i), calls[i], p.bytes+n
	}
	return all
}

// lastWrite is the number of a run's last call that writes to an array's buffer.
func (x *Optimizer) lastWrite(a *program.Array) (last int) {
	for i, c := range x.m.Program.Calls {
		for _, arg := range c.Args {
			if (arg.Role == program.Write || arg.Role == program.Update) && arg.Buffer == a.Buffer {
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
		piece := comm.Piece{Len: x.Params[i].Grad.Len(), Multiple: optimizer.Chunk}
		if x.Params[i].Rule.Kernel.Whole {
			piece.Multiple = 0
		}
		pieces = append(pieces, piece)
	}
	ranks := x.share.group.Size()
	shards := comm.CutShards(pieces, ranks)
	for r := range ranks {
		at := 0
		for i, p := range pieces {
			from, to := max(shards[r]-at, 0), min(shards[r+1]-at, p.Len)
			at += p.Len
			if from < to {
				part := part{b.params[i], from, to, make([]gpu.Ptr, ranks), 0}
				g := x.Params[part.param].Grad
				part.contributed[x.share.group.Rank()] = g.Ptr().Offset(from * g.Type.Size())
				x.share.parts[part.param][r] = part
			}
		}
	}
}

// of is a rank's parts of what is in a bucket.
func (s *share) of(b *bucket, rank int) (all []*part) {
	for _, i := range b.params {
		if p := &s.parts[i][rank]; p.len() > 0 {
			all = append(all, p)
		}
	}
	return all
}

// takeRoom allocates the sums, and room for what comes from other ranks.
func (x *Optimizer) takeRoom() error {
	s := x.share
	if s.two {
		s.slots = len(s.buckets)
		return x.lodge()
	}
	s.slots = min(slots, len(s.buckets))
	var sums, room kernel.Carve // of all buckets, and for the one that takes most
	for _, b := range s.buckets {
		var all kernel.Carve
		x.stage(b, &all)
		room.At = max(room.At, all.At)
		for _, p := range s.of(b, s.group.Rank()) {
			p.sum = sums.Take(4 * p.len())
		}
	}
	at, err := x.memory.Alloc(max(1, int(sums.At)), "the sums of gradients")
	if err != nil {
		return err
	}
	others, err := x.memory.Alloc(max(1, s.slots*int(room.At)), "gradients of other ranks")
	for i, b := range s.buckets {
		b.slot = i % s.slots
		x.stage(b, &kernel.Carve{At: others + gpu.Ptr(b.slot)*room.At})
		for _, p := range s.of(b, s.group.Rank()) {
			p.sum += at
		}
	}
	return err
}

// stage gives what comes from other ranks of a bucket places in a piece of memory.
func (x *Optimizer) stage(b *bucket, in *kernel.Carve) {
	me := x.share.group.Rank()
	for r := range x.share.group.Size() {
		for _, p := range x.share.of(b, me) {
			if r != me {
				p.contributed[r] = in.Take(x.bytes(p))
			}
		}
	}
}

// lodge gives what comes from the other rank room in the run's arena, where no later call needs
// that: the passes are done with most of it when gradients leave. What does not fit has memory of
// its own.
func (x *Optimizer) lodge() error {
	s, p, me := x.share, x.m.Program, x.share.group.Rank()
	var arena gpu.Ptr
	var placed []*plan.Interval
	for _, b := range p.Buffers {
		if !b.Resident && b.First >= 0 {
			arena, placed = b.Base-gpu.Ptr(b.Offset), plan.Insert(placed, &b.Interval)
		}
	}
	var outside kernel.Carve
	var rest []*gpu.Ptr
	for i, b := range s.buckets {
		b.slot = i
		for _, own := range s.of(b, me) {
			at := &own.contributed[1-me]
			v := &plan.Interval{Bytes: x.bytes(own), First: b.last + 1, Last: len(p.Calls)}
			if plan.Fit(v, placed, program.Alignment); v.Offset+v.Bytes <= p.Arena {
				placed, *at = plan.Insert(placed, v), arena.Offset(v.Offset)
				continue
			}
			*at, rest = outside.Take(v.Bytes), append(rest, at)
		}
	}
	others, err := x.memory.Alloc(max(1, int(outside.At)), "gradients of other ranks")
	for _, at := range rest {
		*at += others
	}
	return err
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

// own is this rank's part of a parameter, whose moments it remembers.
func (x *Optimizer) own(i int) part {
	if x.share == nil {
		return part{param: i, to: x.Params[i].Grad.Len()}
	}
	return x.share.parts[i][x.share.group.Rank()]
}

// Part is the elements of parameter number i that this rank remembers moments of.
func (x *Optimizer) Part(i int) (from, to int) { return x.own(i).from, x.own(i).to }

// Shared reports whether the optimiser is one of several ranks'.
func (x *Optimizer) Shared() bool { return x.share != nil }

// tensorOf is what a table has of this rank's part of a parameter.
func (x *Optimizer) tensorOf(i int) optimizer.Tensor {
	p, own, s := x.Params[i], x.own(i), x.share
	in, r := p.Input, p.Rule
	t := optimizer.Tensor{Param: in.Array.Ptr().Offset(4 * own.from), Grad: p.Grad.Ptr(),
		GradType: p.Grad.Type, Size: own.len(),
		LRScale: r.LRScale, ShapeScale: r.ShapeScale, Decay: r.Decay, Beta1: r.Beta1,
		Beta2: r.Beta2, Step: p.Step, Apart: p.Apart}
	if in.Part != nil {
		t.Param = in.Part.Ptr()
	}
	for i, m := range p.Moments {
		t.Moments[i] = m.Ptr()
	}
	switch {
	case s == nil || t.Size == 0:
	case s.two:
		t.Grad, t.Other = own.contributed[0], own.contributed[1]
	default:
		t.Grad, t.GradType = own.sum, gpu.Float32
	}
	return t
}
