package cudaops

import (
	"math/rand/v2"
	"testing"
)

func TestPack(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		all := make([]*interval, r.IntN(60))
		for i := range all {
			first := r.IntN(40)
			all[i] = &interval{bytes: r.IntN(10000), first: first, last: first + r.IntN(12)}
		}
		total := pack(all)
		for i, a := range all {
			if a.offset%alignment != 0 || a.offset < 0 || a.offset+a.bytes > total {
				t.Fatalf("%+v lies outside the arena of %d bytes or is not aligned", a, total)
			}
			for _, b := range all[:i] {
				together := a.first <= b.last && b.first <= a.last
				if together && a.offset < b.offset+b.bytes && b.offset < a.offset+a.bytes {
					t.Fatalf("%+v and %+v overlap", a, b)
				}
			}
		}
		if least := peak(all); total < least || total > 2*least {
			t.Errorf("%d intervals take %d bytes, and %d are needed at once", len(all), total, least)
		}
	}
}

// TestPackChain wants a chain of equal tensors, each needed by the next step only, to take the room of two.
func TestPackChain(t *testing.T) {
	var all []*interval
	for i := range 100 {
		all = append(all, &interval{bytes: 1 << 20, first: i, last: i + 1})
	}
	if total := pack(all); total != 2<<20 {
		t.Errorf("100 tensors take %d bytes, want the room of two", total)
	}
}
