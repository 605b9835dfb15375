package comm

import (
	"errors"
	"fmt"
	"slices"
)

// Shards says which part of a buffer belongs to which rank: rank r owns the elements from s[r] up
// to s[r+1]. A shard may be empty.
type Shards []int

// EvenShards divides count elements among ranks as evenly as multiples of so many elements allow.
// Where count is no multiple the last shard that is not empty takes the rest.
func EvenShards(count, size, multiple int) Shards {
	if count < 0 || size < 1 || size > maxRanks || multiple < 1 {
		return nil // which Check refuses
	}
	s := make(Shards, size+1)
	blocks := (count + multiple - 1) / multiple
	for r := range s {
		s[r] = min(count, blocks*r/size*multiple)
	}
	return s
}

// Piece is a stretch of a buffer. It may be divided at multiples of Multiple elements from its
// start, or where that is 0 not at all.
type Piece struct{ Len, Multiple int }

// CutShards divides a buffer, the pieces one behind the other, among ranks as evenly as the pieces
// allow. Each bound is the place nearest to an even share at which the buffer may be divided.
func CutShards(pieces []Piece, size int) Shards {
	if size < 1 || size > maxRanks {
		return nil // which Check refuses
	}
	total := 0
	for _, p := range pieces {
		total += p.Len
	}
	s := make(Shards, size+1)
	for r := 1; r < size; r++ {
		s[r] = max(s[r-1], nearestCut(pieces, total/size*r+total%size*r/size))
	}
	s[size] = total
	return s
}

// nearestCut is the place nearest to at where a buffer may be divided, the first of two.
func nearestCut(pieces []Piece, at int) int {
	start := 0
	for _, p := range pieces {
		if end := start + p.Len; at >= end {
			start = end
			continue
		}
		below, above := start, start+p.Len
		if p.Multiple > 0 {
			below = start + (at-start)/p.Multiple*p.Multiple
			above = min(above, below+p.Multiple)
		}
		if at-below <= above-at {
			return below
		}
		return above
	}
	return start
}

// Len is the number of elements that a rank owns.
func (s Shards) Len(rank int) int {
	if rank < 0 || rank >= len(s)-1 {
		return 0
	}
	return s[rank+1] - s[rank]
}

// Count is the number of all elements.
func (s Shards) Count() int {
	if len(s) == 0 {
		return 0
	}
	return s[len(s)-1]
}

// Check says what is wrong with shards for so many ranks.
func (s Shards) Check(size int) error {
	if size < 1 || len(s) != size+1 || s[0] != 0 || !slices.IsSorted(s) {
		return fmt.Errorf("comm: shards %v of %d ranks: want %d bounds that rise from 0", []int(s),
			size,
			size+1)
	}
	return nil
}

// Adder adds contributions on a device:
//
//	acc[i] = (((acc[i] + parts[0][i]) + parts[1][i]) + …)
//
// for count elements, each sum rounded to float32. acc is float32, the parts are of type t; of
// float64 parts sums are float64. With overwrite, acc[i] starts as parts[0][i] itself: not as
// 0 + parts[0][i], which would lose the sign of −0.
type Adder interface {
	AddInOrder(acc Ptr, parts []Ptr, overwrite bool, count int, t Type, s Stream) error
}

// OrderedSum adds the contributions of micro-batches, in the order of the micro-batches, at the
// rank that owns the sum. The result has the same bits for every number of ranks: see the package's
// documentation.
type OrderedSum struct {
	Group  Group
	Adder  Adder
	Shards Shards
	Type   Type // of contributions; sums are float32, of float64 float64
	// Staging has room for StagingLen elements of Type.
	Staging Ptr
}

// SumType is the type of a sum of elements: float32, of float64 elements float64.
func SumType(t Type) Type {
	if t == Float64 {
		return Float64
	}
	return Float32
}

// StagingLen is the number of elements that arrive at a rank in one round: those of its shard, from
// each of the other ranks.
func (o OrderedSum) StagingLen() int {
	if o.Group == nil {
		return 0
	}
	return (o.Group.Size() - 1) * o.Shards.Len(o.Group.Rank())
}

// Check says what is wrong with the settings.
func (o OrderedSum) Check() error {
	switch o.Type {
	case Float32, Float64, BFloat16, Float16:
	default:
		return fmt.Errorf("comm: ordered sum of %v: want float32, float64, bfloat16 or float16",
			o.Type)
	}
	return o.Shards.Check(o.Group.Size())
}

// Add adds one round: a micro-batch of each of the first contributors ranks, in the order of ranks.
// contribution is this rank's, Shards.Count() elements; acc is the sum of this rank's shard. The
// first round overwrites acc.
func (o OrderedSum) Add(acc, contribution Ptr, contributors int, overwrite bool, s Stream) error {
	if err := o.Check(); err != nil {
		return err
	}
	if contributors < 1 || contributors > o.Group.Size() {
		return fmt.Errorf("comm: ordered sum of %d contributions by %d ranks: want 1 to the "+
			"number of ranks",
			contributors, o.Group.Size())
	}
	parts, err := o.exchange(contribution, contributors, s)
	if err != nil || len(parts) == 0 {
		return err
	}
	return o.Adder.AddInOrder(acc, parts, overwrite, o.Shards.Len(o.Group.Rank()), o.Type, s)
}

// exchange sends each owner its shard, and returns where the contributions to this rank's lie, by
// rank. This rank's own stays where it is.
func (o OrderedSum) exchange(contribution Ptr, contributors int, s Stream) (parts []Ptr,
	err error) {
	me, own := o.Group.Rank(), o.Shards.Len(o.Group.Rank())
	err = o.Group.Batch(func(c Collectives) error {
		slot := o.Staging
		for r := range o.Group.Size() {
			theirs := contribution.Offset(o.Shards[r], o.Type)
			if r == me {
				if me < contributors && own > 0 {
					parts = append(parts, theirs)
				}
				continue
			}
			if me < contributors && o.Shards.Len(r) > 0 {
				if err := c.Send(theirs, o.Shards.Len(r), o.Type, r, s); err != nil {
					return err
				}
			}
			if r < contributors && own > 0 {
				if err := c.Recv(slot, own, o.Type, r, s); err != nil {
					return err
				}
				parts = append(parts, slot)
				slot = slot.Offset(own, o.Type)
			}
		}
		return nil
	})
	return parts, err
}

// GatherShards hands every rank all shards: buffer[Shards[r]…] is rank r's at every rank. The bits
// are copied.
func GatherShards(g Group, buffer Ptr, shards Shards, t Type, s Stream) error {
	if g == nil {
		return errors.New("comm: GatherShards: the group is nil")
	}
	if err := shards.Check(g.Size()); err != nil {
		return err
	}
	return g.Batch(func(c Collectives) error {
		for r := range g.Size() {
			if shards.Len(r) == 0 {
				continue
			}
			if err := c.Broadcast(buffer.Offset(shards[r], t), shards.Len(r), t, r, s); err != nil {
				return err
			}
		}
		return nil
	})
}
