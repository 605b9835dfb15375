package plan

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

const alignment = 256

func TestPack(t *testing.T) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		all := make([]*Interval, r.IntN(60))
		for i := range all {
			first := r.IntN(40)
			all[i] = &Interval{Bytes: r.IntN(10000), First: first, Last: first + r.IntN(12)}
		}

		total := Pack(all, alignment)
		for i, a := range all {
			if a.Offset%alignment != 0 || a.Offset < 0 || a.Offset+a.Bytes > total {
				t.Fatalf("%+v lies outside the arena of %d bytes or is not aligned", a, total)
			}
			for _, b := range all[:i] {
				together := a.First <= b.Last && b.First <= a.Last
				if together && a.Offset < b.Offset+b.Bytes && b.Offset < a.Offset+a.Bytes {
					t.Fatalf("%+v and %+v overlap", a, b)
				}
			}
		}

		if least := peak(all, alignment); total < least || total > 2*least {
			t.Errorf("%d intervals take %d bytes, and %d are needed at once",
				len(all), total, least)
		}
	}
}

// TestPackChain checks that a chain of equal tensors, each needed by the next step only, takes the
// memory of two.
func TestPackChain(t *testing.T) {
	var all []*Interval
	for i := range 100 {
		all = append(all, &Interval{Bytes: 1 << 20, First: i, Last: i + 1})
	}
	if total := Pack(all, alignment); total != 2<<20 {
		t.Errorf("100 tensors take %d bytes, want the room of two", total)
	}
}

// peak returns the maximum memory needed by the intervals in any step, which is a lower bound for
// Pack.
func peak(all []*Interval, alignment int) int {
	steps := map[int]int{}
	for _, v := range all {
		steps[v.First] += Align(v.Bytes, alignment)
		steps[v.Last+1] -= Align(v.Bytes, alignment)
	}

	most, now := 0, 0
	for _, s := range slices.Sorted(maps.Keys(steps)) {
		now += steps[s]
		most = max(most, now)
	}

	return most
}
