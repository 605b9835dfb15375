package loopback

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/comm"
)

// hardFloat32 draws difficult bits: NaNs with payloads, infinities, zeros of both signs, subnormal
// numbers and, now and then, large numbers that cancel.
func hardFloat32(rng *rand.Rand) uint32 {
	switch rng.IntN(12) {
	case 0:
		return rng.Uint32()
	case 1:
		return 0x7f800000 | rng.Uint32()&0x807fffff // NaN or infinite
	case 2:
		return rng.Uint32() & 0x80000000 // ±0
	case 3:
		return rng.Uint32() & 0x807fffff // subnormal
	}

	return math.Float32bits(float32(rng.NormFloat64() * math.Exp(8*rng.NormFloat64())))
}

// microBatches draws contributions of a type.
func microBatches(rng *rand.Rand, n, count int, t comm.Type) [][]byte {
	all := make([][]byte, n)
	for m := range all {
		for range count {
			switch bits := hardFloat32(rng); t {
			case comm.Float32:
				all[m] = binary.NativeEndian.AppendUint32(all[m], bits)
			case comm.BFloat16:
				all[m] = binary.NativeEndian.AppendUint16(all[m], uint16(bits>>16))
			case comm.Float16:
				all[m] = binary.NativeEndian.AppendUint16(all[m], uint16(bits))
			case comm.Float64:
				all[m] = binary.NativeEndian.AppendUint64(all[m], uint64(bits)<<32|rng.Uint64()>>32)
			}
		}
	}

	return all
}

// sumOn adds micro-batches on a number of ranks and returns the final sum at each rank.
func sumOn(t *testing.T, all []rank, batches [][]byte, shards comm.Shards, typ comm.Type) [][]byte {
	sums := comm.SumType(typ)
	size, bytes := len(all), sums.Size()*shards.Count()
	results := make([][]byte, size)
	errs := everywhere(size, func(r int) error {
		me := all[r]
		o := comm.OrderedSum{Group: me.Group, Adder: me.Host, Shards: shards, Type: typ}
		o.Staging = me.Alloc(o.StagingLen()*typ.Size() + 1)
		sum := me.Alloc(bytes + 1)
		for from := 0; from < len(batches); from += size {
			contributors := min(size, len(batches)-from)
			mine := me.put(nil)
			if r < contributors {
				mine = me.put(batches[from+r])
			}
			if err := o.Add(sum.Offset(shards[r], sums), mine, contributors, from == 0,
				0); err != nil {
				return err
			}
		}

		err := errors.Join(comm.GatherShards(me.Group, sum, shards, sums, 0), me.Sync(0))
		results[r] = append([]byte{}, me.get(sum, bytes)...)
		return err
	})

	require.NoError(t, errors.Join(errs...))
	return results
}

// TestOrderedSumSameBits checks that a sum of micro-batches is bit-identical on 1, 2, 3, 4 and 8
// ranks, at every rank and for any division into shards.
func TestOrderedSumSameBits(t *testing.T) {
	rng := newRand(t)
	groups := map[int][]rank{}
	for _, size := range sizes {
		groups[size] = ranks(t, size)
	}

	for _, typ := range []comm.Type{comm.Float32, comm.Float64, comm.BFloat16, comm.Float16} {
		for _, count := range []int{0, 1, 5, 7, 64, 1001} {
			for _, n := range []int{1, 2, 7, 8, 12} {
				batches := microBatches(rng, n, count, typ)
				alone := comm.Shards{0, count}
				want := sumOn(t, groups[1], batches, alone, typ)[0]
				for _, size := range sizes {
					for _, shards := range []comm.Shards{comm.EvenShards(count, size, 1),
						comm.EvenShards(count, size, 16), unevenShards(rng, count, size)} {
						for r, got := range sumOn(t, groups[size], batches, shards, typ) {
							require.Equal(t, want, got,
								"%v: %d batches of %d on rank %d of %d, shards %v", typ, n,
								count, r,
								size, shards)
						}
					}
				}
			}
		}
	}
}

// unevenShards draws the boundaries of shards; many shards are empty.
func unevenShards(rng *rand.Rand, count, size int) comm.Shards {
	s := make(comm.Shards, size+1)
	for r := 1; r < size; r++ {
		s[r] = s[r-1] + rng.IntN(count-s[r-1]+1)*rng.IntN(2)
	}
	s[size] = count
	return s
}

// TestOrderedSumIsThePlainSum checks that the sum on one rank equals a simple loop's, and that the
// sum of one micro-batch is that micro-batch, including NaN payloads and −0.
func TestOrderedSumIsThePlainSum(t *testing.T) {
	rng := newRand(t)
	all := ranks(t, 3)
	const count = 501
	batches := microBatches(rng, 1, count, comm.Float32)
	for _, got := range sumOn(t, all, batches, comm.EvenShards(count, 3, 1), comm.Float32) {
		require.Equal(t, batches[0], got)
	}

	var want []byte
	batches = make([][]byte, 5)
	for range count {
		var sum float32
		for m := range batches {
			v := float32(rng.NormFloat64())
			batches[m] = binary.NativeEndian.AppendUint32(batches[m], math.Float32bits(v))
			sum += v
		}
		want = binary.NativeEndian.AppendUint32(want, math.Float32bits(sum))
	}

	for _, got := range sumOn(t, all, batches, comm.EvenShards(count, 3, 1), comm.Float32) {
		require.Equal(t, want, got)
	}
}

// TestReductionsDependOnRanks checks that the result of AllReduce depends on the number of ranks.
// Otherwise the test above could not detect an ordered sum that uses it.
func TestReductionsDependOnRanks(t *testing.T) {
	rng := newRand(t)
	const count = 1000
	var batches [][]byte
	for range 8 {
		var b []byte
		for range count {
			b = binary.NativeEndian.AppendUint32(b, math.Float32bits(float32(rng.NormFloat64())))
		}
		batches = append(batches, b)
	}

	all, want := ranks(t, 8), sumOn(t, ranks(t, 1), batches, comm.Shards{0, count}, comm.Float32)[0]
	errs := everywhere(8, func(r int) error {
		p := all[r].put(batches[r])
		err := errors.Join(all[r].AllReduce(p, p, count, comm.Float32, comm.Sum, 0), all[r].Sync(0))
		require.NotEqual(t, want, append([]byte{}, all[r].get(p, 4*count)...))
		return err
	})

	require.NoError(t, errors.Join(errs...))
}

func TestOrderedSumRefuses(t *testing.T) {
	me := ranks(t, 1)[0]
	o := comm.OrderedSum{Group: me.Group, Adder: me.Host, Shards: comm.Shards{0, 4},
		Type: comm.Float32}
	require.ErrorContains(t, o.Add(1, 1, 2, true, 0), "2 contributions by 1 ranks")
	require.ErrorContains(t, o.Add(1, 1, 0, true, 0), "0 contributions by 1 ranks")
	o.Type = comm.Int32
	require.ErrorContains(t, o.Add(1, 1, 1, true, 0), "ordered sum of int32")
	o.Type, o.Shards = comm.Float32, comm.Shards{0, 2, 1}
	require.ErrorContains(t, o.Add(1, 1, 1, true, 0), "boundaries that increase from 0")
	require.ErrorContains(t, comm.GatherShards(me.Group, 1, comm.Shards{1, 2}, comm.Float32, 0),
		"boundaries that increase")
}

// TestCutShards checks that every boundary is admissible, and that no other is nearer to an even
// division.
func TestCutShards(t *testing.T) {
	rng := newRand(t)
	for range 300 {
		var pieces []comm.Piece
		cuts, total := []int{0}, 0
		for range rng.IntN(6) {
			p := comm.Piece{Len: rng.IntN(50), Multiple: rng.IntN(9)}
			for at := p.Multiple; p.Multiple > 0 && at < p.Len; at += p.Multiple {
				cuts = append(cuts, total+at)
			}
			total += p.Len
			pieces, cuts = append(pieces, p), append(cuts, total)
		}

		size := 1 + rng.IntN(9)
		s := comm.CutShards(pieces, size)
		require.NoError(t, s.Check(size))
		require.Equal(t, total, s.Count())
		for r := 1; r < size; r++ {
			even, best := total*r/size, total
			for _, c := range cuts {
				best = min(best, max(c-even, even-c))
			}
			require.Contains(t, cuts, s[r], "%v among %d", pieces, size)
			require.Equal(t, best, max(s[r]-even, even-s[r]), "%v among %d: %v", pieces, size, s)
		}
	}
}
