package place

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// TestArena runs random programs on bytes. A call writes its own number over what it writes, and
// wants what it reads to be as it was left. Some results lie over what their call reads.
func TestArena(t *testing.T) {
	over := 0
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		p := &program.Program{}
		var arrays []*program.Array
		for range 2 + r.IntN(20) {
			n := []int{r.IntN(2000), 700}[r.IntN(2)]
			if r.IntN(6) == 0 {
				arrays = append(arrays, p.NewResident(gpu.Float8E4M3, n))
				continue
			}
			a := p.NewArray(gpu.Float8E4M3, n)
			if r.IntN(4) == 0 { // as part of a packed result
				a = &program.Array{Parts: []*program.Array{a}}
			}
			arrays = append(arrays, a)
		}
		var written []*program.Array
		for _, a := range arrays {
			var args []program.Arg
			for range r.IntN(4) {
				if len(written) > 0 {
					args = append(args, program.Reads("", written[r.IntN(len(written))]))
				}
			}
			written = append(written, a)
			c := p.Add(&program.Call{Args: append(args, program.Writes("", a))})
			if len(args) > 0 && len(a.Parts)+len(args[0].Parts) == 0 && r.IntN(2) == 0 {
				c.Over = program.Over{From: args[0].Array, To: a}
			}
		}
		kept := []*program.Array{written[r.IntN(len(written))], nil}
		for range 2 { // a second time gives the same
			Arena(p, kept)
			play(t, p, kept)
		}
		for _, c := range p.Calls {
			if o := c.Over; o.From != nil && !o.To.Resident && o.From.Offset == o.To.Offset {
				over++
			}
		}
	}
	require.NotZero(t, over)
}

// play runs a program on bytes.
func play(t *testing.T, p *program.Program, kept []*program.Array) {
	t.Helper()
	arena := make([]int, p.Arena)
	left := map[*program.Buffer]int{} // the call that wrote a buffer last
	check := func(a *program.Array) {
		b := base(a)
		if b.Resident {
			return
		}
		for _, v := range arena[b.Offset:][:b.Bytes] {
			require.Equal(t, left[b], v)
		}
	}
	for i, c := range p.Calls {
		for _, a := range c.Args {
			if a.Role == program.Read {
				check(a.Array)
				continue
			}
			b := base(a.Array)
			left[b] = i + 1
			if b.Resident {
				continue
			}
			require.Zero(t, b.Offset%program.Alignment)
			for j := range b.Bytes {
				arena[b.Offset+j] = i + 1
			}
		}
	}
	for _, a := range kept {
		if a != nil {
			check(a)
		}
	}
}

func base(a *program.Array) *program.Buffer {
	if len(a.Parts) > 0 {
		return a.Parts[0].Buffer
	}
	return a.Buffer
}
