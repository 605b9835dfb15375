package schedule

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// sums and norms are two kinds of launches that can be joined; they say which calls they stand for.
type (
	sums  struct{ of []string }
	norms struct{ of []string }
)

func (s sums) Join(other any) (any, bool) {
	o, ok := other.(sums)
	return sums{slices.Concat(s.of, o.of)}, ok
}

func (s norms) Join(other any) (any, bool) {
	o, ok := other.(norms)
	return norms{slices.Concat(s.of, o.of)}, ok
}

// standsFor are the names of the calls that a call does the work of.
func standsFor(c *program.Call) []string {
	switch p := c.Params.(type) {
	case sums:
		return p.of
	case norms:
		return p.of
	}
	return []string{c.Op}
}

// TestJoinSums wants every call of random programs made once, behind all whose results it touches,
// other calls in their order. There are fewer launches where nothing stands between two.
func TestJoinSums(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 2))
		p := &program.Program{}
		var arrays []*program.Array
		var plain []string
		needs := map[string][]string{} // calls by those that must come before them
		writer := map[*program.Array]string{}
		for i := range 3 + r.IntN(30) {
			name := fmt.Sprint(i)
			c := &program.Call{Op: name}
			switch r.IntN(4) {
			case 0:
				c.Params = sums{[]string{name}}
			case 1:
				c.Params = norms{[]string{name}}
			default:
				plain = append(plain, name)
			}
			for range r.IntN(3) {
				if len(arrays) > 0 {
					a := arrays[r.IntN(len(arrays))]
					c.Args = append(c.Args, program.Reads("", a))
					needs[name] = append(needs[name], writer[a])
				}
			}
			if c.Params != nil { // it reads nothing that another such call leaves
				c.Args, needs[name] = nil, nil
			}
			a := p.NewArray(gpu.Float32, 1+r.IntN(100))
			c.Args = append(c.Args, program.Writes("", a))
			arrays, writer[a] = append(arrays, a), name
			p.Add(c)
		}
		all := len(p.Calls)
		JoinSums(p)
		var made, order []string
		for _, c := range p.Calls {
			for _, name := range standsFor(c) {
				for _, before := range needs[name] {
					require.Contains(t, made, before, "call %s comes ahead of %s", name, before)
				}
			}
			made = append(made, standsFor(c)...)
			if c.Params == nil {
				order = append(order, c.Op)
			}
		}
		require.Len(t, made, all)
		slices.Sort(made)
		require.Len(t, slices.Compact(made), all)
		require.Equal(t, plain, order)
	}
}

// TestJoinSumsMemory wants sums not to wait while they keep much memory.
func TestJoinSumsMemory(t *testing.T) {
	for bytes, want := range map[int]int{partsMemory / 4: 1, partsMemory: 2} {
		p := &program.Program{}
		for i := range 3 {
			parts := p.NewArray(gpu.Float8E4M3, bytes)
			p.Add(&program.Call{Params: sums{[]string{fmt.Sprint(i)}},
				Args: []program.Arg{program.Reads("", parts),
					program.Writes("", p.NewArray(gpu.Float32, 1))}})
		}
		JoinSums(p)
		require.Len(t, p.Calls, want, "parts of %d bytes", bytes)
	}
}

// TestPutOff wants products that nobody needs at the end, and all others where they were.
func TestPutOff(t *testing.T) {
	p := &program.Program{}
	array := func() *program.Array { return p.NewArray(gpu.Float32, 4) }
	g, x, dx, table := array(), array(), array(), array()
	add := func(op string, params any, args ...program.Arg) {
		p.Add(&program.Call{Op: op, Params: params, Args: args})
	}
	w, r := program.Writes, program.Reads
	add("early", program.Matmul{}, w("", array()), r("", g))
	add("dw of two", program.Matmul{}, w("", array()), r("", g), r("", x))
	add("dx", program.Matmul{}, w("", dx), r("", g))
	add("dw", program.Matmul{}, w("", array()), r("", dx), r("", x))
	add("norm", nil, program.Updates("", dx))
	add("last dw", program.Matmul{}, w("", array()), r("", dx), r("", x))
	add("embedding", nil, w("", table), r("", dx))
	PutOff(p, 2)
	var order []string
	for _, c := range p.Calls {
		order = append(order, c.Op)
	}
	require.Equal(t, []string{"early", "dx", "dw", "norm", "embedding", "last dw", "dw of two"}, order)
}
