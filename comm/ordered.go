package comm

import (
	"fmt"
	"slices"
)

// Shards divides a buffer among ranks: rank r owns elements [s[r], s[r+1]). A shard may be empty.
type Shards []int

// EvenShards divides count elements among size ranks, as evenly as possible in units of multiple
// elements. If count is not divisible by multiple, the last non-empty shard gets the remainder.
// EvenShards returns nil for invalid arguments, which [Shards.Check] then rejects.
func EvenShards(count, size, multiple int) Shards {
	if count < 0 || size < 1 || size > maxRanks || multiple < 1 {
		return nil // rejected by Check
	}
	s := make(Shards, size+1)
	blocks := (count + multiple - 1) / multiple
	for r := range s {
		s[r] = min(count, blocks*r/size*multiple)
	}
	return s
}

// Piece is a contiguous section of a buffer. It may be divided only at multiples of Multiple elements
// from its start, or not at all if Multiple is 0.
type Piece struct{ Len, Multiple int }

// CutShards divides a buffer that consists of consecutive pieces among ranks, as evenly as the pieces
// allow. Each boundary is the admissible one nearest to an even division.
func CutShards(pieces []Piece, size int) Shards {
	if size < 1 || size > maxRanks {
		return nil // rejected by Check
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

// nearestCut returns the admissible boundary nearest to at, or the lower one of two that are equally
// near.
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

// Len returns the number of elements that a rank owns.
func (s Shards) Len(rank int) int {
	if rank < 0 || rank >= len(s)-1 {
		return 0
	}
	return s[rank+1] - s[rank]
}

// Count returns the total number of elements.
func (s Shards) Count() int {
	if len(s) == 0 {
		return 0
	}
	return s[len(s)-1]
}

// Check returns an error unless s divides a buffer among size ranks.
func (s Shards) Check(size int) error {
	if size < 1 || len(s) != size+1 || s[0] != 0 || !slices.IsSorted(s) {
		return fmt.Errorf("comm: shards %v for %d ranks: want %d boundaries that increase from 0", []int(s),
			size,
			size+1)
	}
	return nil
}

// Adder adds contributions on a device:
//
//	acc[i] = (((acc[i] + parts[0][i]) + parts[1][i]) + …)
//
// for count elements, with each sum rounded to float32. acc holds float32 elements and the parts
// elements of type t, except that float64 parts require a float64 acc and round to float64. With
// overwrite, acc[i] starts as a copy of parts[0][i] rather than as 0 + parts[0][i], which would lose
// the sign of −0.
type Adder interface {
	AddInOrder(acc Ptr, parts []Ptr, overwrite bool, count int, t Type, s Stream) error
}

// OrderedSum adds the contributions of micro-batches in micro-batch order, each shard at the rank
// that owns it. The result is bit-identical for any number of ranks; see the package documentation.
type OrderedSum struct {
	Group  Group
	Adder  Adder
	Shards Shards
	Type   Type // type of the contributions; SumType returns the type of the sums
	// Staging is memory for StagingLen elements of Type.
	Staging Ptr
}

// SumType returns the type of a sum of elements: float64 for float64 elements, otherwise float32.
func SumType(t Type) Type {
	if t == Float64 {
		return Float64
	}
	return Float32
}

// StagingLen returns the number of elements a rank receives in one round, which is its own shard from
// every other rank.
func (o OrderedSum) StagingLen() int {
	return (o.Group.Size() - 1) * o.Shards.Len(o.Group.Rank())
}

// Check returns an error if the settings are invalid.
func (o OrderedSum) Check() error {
	switch o.Type {
	case Float32, Float64, BFloat16, Float16:
	default:
		return fmt.Errorf("comm: ordered sum of %v: want float32, float64, bfloat16 or float16",
			o.Type)
	}
	return o.Shards.Check(o.Group.Size())
}

// Add adds one round, consisting of a micro-batch from each of the first contributors ranks, in rank
// order. contribution points to this rank's Shards.Count() elements, and acc to the sum of this
// rank's shard. The first round must set overwrite, which overwrites acc.
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

// exchange sends each owner its shard and returns the addresses of the contributions to this rank's
// shard, by rank. This rank's own contribution is not copied.
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

// GatherShards copies every rank's shard of buffer to all ranks, bit for bit.
func GatherShards(g Group, buffer Ptr, shards Shards, t Type, s Stream) error {
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
