package driver

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/ebitengine/purego"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// nodes is a graph as the driver's functions show it: what each node waits for, and the memsets
// among them.
type nodes struct {
	before  map[uintptr][]uintptr
	memsets map[uintptr]memsetParams
	front   []uintptr // of the stream that is captured
	odd     uintptr   // a node behind an edge that is not an ordinary one
}

func (g *nodes) behind(node uintptr) (all []uintptr) {
	for _, n := range slices.Sorted(maps.Keys(g.before)) {
		if slices.Contains(g.before[n], node) {
			all = append(all, n)
		}
	}
	return all
}

// context is one whose driver has only the functions that read and change graphs.
func (g *nodes) context() *context {
	const invalid, lossy = 1, 922
	c := &context{cuda: &cuda{}}
	answer := func(list []uintptr, to *uintptr, n *uintptr) {
		if to != nil {
			copy(unsafe.Slice(to, *n), list)
		}
		*n = uintptr(len(list))
	}
	for p, f := range map[*proc]any{
		&c.CtxSetCurrent:  func(uintptr) uintptr { return 0 },
		&c.GetErrorName:   func(_, _ uintptr) uintptr { return invalid },
		&c.GetErrorString: func(_, _ uintptr) uintptr { return invalid },
		&c.StreamCaptureInfo: func(s uintptr, status *int32, _, _ *uintptr,
			list **uintptr, n *uintptr) uintptr {
			if *n = uintptr(len(g.front)); s == 1 && len(g.front) > 0 {
				*status, *list = 1, &g.front[0]
			}
			return 0
		},
		&c.GraphDependencies: func(node uintptr, to, n *uintptr) uintptr {
			if node == g.odd {
				return lossy
			}
			answer(g.before[node], to, n)
			return 0
		},
		&c.GraphDependents: func(node uintptr, to, n *uintptr) uintptr {
			if slices.Contains(g.before[g.odd], node) {
				return lossy
			}
			answer(g.behind(node), to, n)
			return 0
		},
		&c.GraphNodeType: func(node uintptr, kind *int32) uintptr {
			if _, ok := g.memsets[node]; ok {
				*kind = 2
			}
			return 0
		},
		&c.GraphMemsetParams: func(node uintptr, p *memsetParams) uintptr {
			if of, ok := g.memsets[node]; ok {
				*p = of
			} else {
				*p = memsetParams{dst: 0x1000, size: 4, width: 1, height: 1}
			}
			return 0
		},
		&c.GraphAddEdges: func(_ uintptr, from, to *uintptr, n uintptr) uintptr {
			for i, from := range unsafe.Slice(from, n) {
				to := unsafe.Slice(to, n)[i]
				if slices.Contains(g.before[to], from) {
					return invalid
				}
				g.before[to] = append(g.before[to], from)
			}
			return 0
		},
		&c.GraphDestroyNode: func(node uintptr) uintptr {
			delete(g.before, node)
			for n, list := range g.before {
				g.before[n] = slices.DeleteFunc(list, func(x uintptr) bool { return x == node })
			}
			return 0
		},
	} {
		p.addr = purego.NewCallback(f)
	}
	return c
}

// TestZeroingNodes wants only such a node taken out of a graph as comes first in what is captured
// and sets to zero what is known to be zero, and all that it ordered to be ordered still.
func TestZeroingNodes(t *testing.T) {
	const at, bytes = gpu.Ptr(0x1000), 64
	word := memsetParams{dst: at, size: 4, width: 1, height: 1}
	// A product behind the nodes 1 and 2: 3, 4 and 5, where 3 is a memset unless it is told
	// otherwise, and 6 behind it.
	graph := func(change func(g *nodes)) *nodes {
		g := &nodes{before: map[uintptr][]uintptr{1: nil, 2: {1}, 3: {2}, 4: {3}, 5: {4}, 6: {5}},
			memsets: map[uintptr]memsetParams{3: word}}
		change(g)
		return g
	}
	memset := func(change func(p *memsetParams)) func(g *nodes) {
		return func(g *nodes) { p := word; change(&p); g.memsets[3] = p }
	}
	for name, c := range map[string]struct {
		change func(g *nodes)
		from   []uintptr
		taken  bool
	}{
		"a word": {func(g *nodes) {}, []uintptr{2}, true},
		"all of it": {memset(func(p *memsetParams) {
			p.size, p.width = 1, bytes
		}), []uintptr{2}, true},
		"the last word": {memset(func(p *memsetParams) {
			p.dst += bytes - 4
		}), []uintptr{2}, true},
		"behind two nodes": {func(g *nodes) {
			g.before[2], g.before[3] = nil, []uintptr{2, 1}
		}, []uintptr{1, 2}, true},
		"one": {memset(func(p *memsetParams) {
			p.value = 1
		}), []uintptr{2}, false},
		"too many words": {memset(func(p *memsetParams) {
			p.width = bytes/4 + 1
		}), []uintptr{2}, false},
		"far too many": {memset(func(p *memsetParams) {
			p.width = 1 << 62
		}), []uintptr{2}, false},
		"rows": {memset(func(p *memsetParams) {
			p.height = 2
		}), []uintptr{2}, false},
		"in front of it": {memset(func(p *memsetParams) {
			p.dst -= 4
		}), []uintptr{2}, false},
		"behind it": {memset(func(p *memsetParams) {
			p.dst += bytes
		}), []uintptr{2}, false},
		"a kernel": {func(g *nodes) { clear(g.memsets) }, []uintptr{2}, false},
		"a memset behind a kernel": {func(g *nodes) {
			g.memsets = map[uintptr]memsetParams{4: word}
		}, []uintptr{2}, false},
		"one of others": {func(g *nodes) {
			g.memsets = map[uintptr]memsetParams{2: word}
		}, []uintptr{2}, false},
		"another one waits": {func(g *nodes) {
			g.before[6] = []uintptr{5, 3}
		}, []uintptr{2}, false},
		"waits for another one": {func(g *nodes) {
			g.before[4] = []uintptr{3, 1}
		}, []uintptr{2}, false},
		"no chain": {func(g *nodes) {
			g.before[5] = []uintptr{4, 1}
		}, []uintptr{2}, false},
		"another edge":          {func(g *nodes) { g.odd = 4 }, []uintptr{2}, false},
		"another edge in front": {func(g *nodes) { g.odd = 3 }, []uintptr{2}, false},
		"nothing in front": {func(g *nodes) {
			g.before[3] = nil
			delete(g.before, 2)
		}, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			g := graph(c.change)
			ctx := g.context()
			ctx.ledger.BeginCapture(1)
			g.front = c.from
			noted := ctx.noteZeroing(1, at, bytes)
			g.front = []uintptr{5}
			noted()
			for _, s := range []gpu.Stream{2, 1} {
				_, surplus := ctx.ledger.EndCapture(s)
				for _, node := range surplus {
					ctx.takeOut(7, node)
				}
			}
			want := graph(c.change)
			if c.taken {
				want.before[4] = want.before[3]
				delete(want.before, 3)
			}
			require.Equal(t, fmt.Sprint(want.before), fmt.Sprint(g.before))
		})
	}

	t.Run("an old driver", func(t *testing.T) {
		g := graph(func(*nodes) {})
		ctx := g.context()
		ctx.StreamCaptureInfo = proc{name: "cuStreamGetCaptureInfo", since: "11.3"}
		ctx.ledger.BeginCapture(1)
		ctx.noteZeroing(1, at, bytes)()
		if _, surplus := ctx.ledger.EndCapture(1); surplus != nil {
			t.Errorf("nodes %v are taken out", surplus)
		}
	})
}
