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

// share is this rank's share of an update that several ranks perform together.
//
// Gradients travel in buckets of parameters that a run completes at about the same time. Each bucket
// is divided among all ranks, so that all ranks send and receive all the time. Parameters are divided
// at multiples of a table's chunk, except that parameters with a whole-matrix kernel are not divided.
//
// After each round of micro-batches, every rank sends each owner its contribution to the owner's
// gradients, and the owner adds the contributions in the order of ranks: see package comm and
// exchange.go. If a step is one round of two ranks, no sums are stored: the update adds the two
// contributions while it reads them, and incoming contributions are placed in the arena of the run.
//
// The owners' sums of squares, over whole chunks, are sent to all ranks, so that the norm is summed
// exactly as on a single GPU. Then each rank updates its part, and the parameters travel back to all
// ranks.
type share struct {
	group    comm.Group
	buckets  []*bucket
	parts    [][]part // of each parameter, by rank; may be empty
	twoRanks bool     // the update adds the contributions of two ranks
	slots    int      // number of slots for the routes of buckets
	minBytes int      // minimum size of a bucket or load in bytes
	loads    []*load  // the parameters on their way back
	rounds   run.Recordings[round]

	exchange
}

// bucket is a set of parameters with gradients that travel together.
type bucket struct {
	pack     // in the order of the calls that complete the gradients
	slot int // slot for its routes

	// routes contains the routes by the number of contributing ranks. Routes for fewer than all ranks
	// are created on first use.
	routes map[int]comm.Route
}

// part is the elements from ≤ i < to of a parameter.
type part struct {
	param, from, to int
	contributed     []gpu.Ptr // contributions to the gradient, by rank; complete only on the owner
	sum             gpu.Ptr   // their sum in float32, for the owner
}

func (p part) len() int { return p.to - p.from }

const (
	// bucketBytes is the minimum size of a bucket other than the last. It is large enough to use a
	// link well, and small enough for the first bucket to leave soon.
	bucketBytes = 32 << 20

	// slots is the number of buckets with memory for incoming gradients if they are added up during
	// the run. One bucket can then arrive while another is added.
	slots = 3

	// maxPacks is the approximate maximum number of loads, and of buckets if there is memory for all
	// buckets at once.
	maxPacks = 64
)

// divide decides which gradients travel together and which rank owns which elements.
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
	s.twoRanks = r.Rounds == 1 && r.Group.Size() == 2

	total := 0
	for _, p := range x.Params {
		total += p.Grad.Extent()
		s.twoRanks = s.twoRanks && !p.Rule.Kernel.Whole
	}

	s.minBytes = cmp.Or(r.Bucket, bucketBytes)
	least := s.minBytes
	if s.twoRanks {
		least = max(least, total/maxPacks)
	}

	grad := func(i int) *program.Array { return x.Params[i].Grad }
	for _, p := range x.packs(least, grad, x.lastWrite) {
		b := &bucket{pack: p, routes: map[int]comm.Route{}}
		s.buckets = append(s.buckets, b)
		x.divideBucket(b)
	}

	return run.InOrder(x.allocateExchange, x.openExchange, x.shardParams, x.planLoads)
}

// pack is a set of parameters that travel together.
type pack struct {
	params      []int // indices of the parameters
	bytes       int
	first, last int // calls of a run that determine the position of the first and the last parameter
}

// packs groups the parameters into packs of at least the given number of bytes, in the order of calls
// of a run. A parameter as large as two packs starts a new pack, so that smaller parameters need not
// wait for it.
func (x *Optimizer) packs(least int, array func(i int) *program.Array,
	call func(*program.Array) int) (all []pack) {
	order, calls := make([]int, len(x.Params)), make([]int, len(x.Params))
	for i := range x.Params {
		order[i], calls[i] = i, call(array(i))
	}

	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(calls[a], calls[b]) })

	for _, i := range order {
		n := array(i).Extent()
		if len(all) == 0 || all[len(all)-1].bytes >= least || n >= 2*least {
			all = append(all, pack{first: calls[i]})
		}
		p := &all[len(all)-1]
		p.params, p.last, p.bytes = append(p.params, i), calls[i], p.bytes+n
	}

	return all
}

// lastWrite returns the index of the last call of a run that writes to an array's buffer.
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

// divideBucket divides a bucket among the ranks.
func (x *Optimizer) divideBucket(b *bucket) {
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

// partsOf returns a rank's parts of the parameters in a bucket.
func (s *share) partsOf(b *bucket, rank int) (all []*part) {
	for _, i := range b.params {
		if p := &s.parts[i][rank]; p.len() > 0 {
			all = append(all, p)
		}
	}
	return all
}

// allocateExchange allocates the sums of gradients and memory for incoming gradients.
func (x *Optimizer) allocateExchange() error {
	s := x.share
	if s.twoRanks {
		s.slots = len(s.buckets)
		return x.placeInArena()
	}

	s.slots = min(slots, len(s.buckets))
	var sums, room kernel.Carve // for all buckets, and for the largest
	for _, b := range s.buckets {
		var all kernel.Carve
		x.stage(b, &all)
		room.At = max(room.At, all.At)
		for _, p := range s.partsOf(b, s.group.Rank()) {
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
		for _, p := range s.partsOf(b, s.group.Rank()) {
			p.sum += at
		}
	}

	return err
}

// stage assigns pieces of memory to a bucket's incoming gradients.
func (x *Optimizer) stage(b *bucket, in *kernel.Carve) {
	me := x.share.group.Rank()
	for r := range x.share.group.Size() {
		for _, p := range x.share.partsOf(b, me) {
			if r != me {
				p.contributed[r] = in.Take(x.bytes(p))
			}
		}
	}
}

// placeInArena places the other rank's gradients in the arena of the run where no later call needs the
// memory: most of the arena is free by the time gradients travel. Gradients that do not fit are
// allocated separately.
func (x *Optimizer) placeInArena() error {
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
		for _, own := range s.partsOf(b, me) {
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

// gatherSquares distributes the sums of squares of all chunks and of the losses to all ranks. Each sum
// is computed by one rank and is 0 on all other ranks, so the order of addition does not matter.
func (x *Optimizer) gatherSquares() error {
	if x.share == nil || x.share.group.Size() == 1 {
		return nil
	}
	at := ptr(x.squares)
	return x.share.group.AllReduce(at, at, x.sums(), comm.Float32, comm.Sum,
		comm.Stream(x.m.Stream))
}

// own returns the part of a parameter that this rank updates.
func (x *Optimizer) own(i int) part {
	if x.share == nil {
		return part{param: i, to: x.Params[i].Grad.Len()}
	}
	return x.share.parts[i][x.share.group.Rank()]
}

// Part returns the range of elements of parameter number i that this rank updates and stores the
// moments of.
func (x *Optimizer) Part(i int) (from, to int) { return x.own(i).from, x.own(i).to }

// Shared reports whether the optimizer works together with the optimizers of other ranks.
func (x *Optimizer) Shared() bool { return x.share != nil }

// tensorOf returns the table entry for this rank's part of a parameter.
func (x *Optimizer) tensorOf(i int) optimizer.Tensor {
	p, own, s := x.Params[i], x.own(i), x.share
	in, r := p.Input, p.Rule
	t := optimizer.Tensor{Param: in.Array.Ptr().Offset(4 * own.from), Grad: p.Grad.Ptr(),
		GradType: p.Grad.Type, Size: own.len(),
		LRScale: r.LRScale, ShapeScale: r.ShapeScale, Decay: r.Decay, Beta1: r.Beta1,
		Beta2: r.Beta2, Step: p.Step, Apart: p.ClipSeparately}

	if in.Part != nil {
		t.Param = in.Part.Ptr()
	}

	for i, m := range p.Moments {
		t.Moments[i] = m.Ptr()
	}

	switch {
	case s == nil || t.Size == 0:
	case s.twoRanks:
		t.Grad, t.Other = own.contributed[0], own.contributed[1]
	default:
		t.Grad, t.GradType = own.sum, gpu.Float32
	}

	return t
}
