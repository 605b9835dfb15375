package place

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// TestArena packs random programs and plays them on simulated memory. Each call writes its own number,
// and every array that it reads must still contain the number of its last writer. Some results replace an
// operand.
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
			arrays = append(arrays, p.NewArray(gpu.Float8E4M3, n))
		}
		var written []*program.Array
		for _, a := range arrays {
			var args []program.Arg
			for range r.IntN(4) {
				if len(written) > 0 {
					args = append(args, program.Reads(program.NoField, written[r.IntN(len(written))]))
				}
			}
			written = append(written, a)
			c := p.Add(&program.Call{Args: append(args, program.Writes(program.NoField, a))})
			if len(args) > 0 && r.IntN(2) == 0 {
				c.InPlace = program.InPlace{From: args[0].Array, To: a}
			}
		}
		last := written[r.IntN(len(written))]
		kept := []*program.Array{{Parts: []*program.Array{last}}} // the lasting array is part of a packed result
		for range 2 {                                             // a second call must give the same result
			Arena(p, kept)
			play(t, p, last)
		}
		for _, c := range p.Calls {
			if o := c.InPlace; o.From != nil && !o.To.Resident && o.From.Offset == o.To.Offset {
				over++
			}
		}
	}

	require.NotZero(t, over)
}

// play executes a program on simulated memory, and checks that the last array survives until the end.
func play(t *testing.T, p *program.Program, last *program.Array) {
	t.Helper()
	arena := make([]int, p.Arena)
	left := map[*program.Buffer]int{} // by buffer, 1 + the index of the last call that wrote to it
	check := func(b *program.Buffer) {
		if b.Resident {
			return
		}
		want := left[b]
		require.False(t, slices.ContainsFunc(arena[b.Offset:][:b.Bytes], func(v int) bool {
			return v != want
		}), "what call %d wrote was overwritten", want-1)
	}

	for i, c := range p.Calls {
		for _, a := range c.Args {
			if a.Role == program.Read {
				check(a.Buffer)
				continue
			}
			b := a.Buffer
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

	check(last.Buffer)
}
