package lower_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/decode"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/passtest"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/quant"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

// TestRowProducts checks that products of a few rows have their own kernel in graphs that continue texts, if requested,
// and that a matrix added to a product becomes an operand of it.
func TestRowProducts(t *testing.T) {
	count := func(rows int, o lower.Options) (own, others, added int) {
		for _, call := range pagedGraph(t, rows, o).Calls {
			switch m := call.Params.(type) {
			case *decode.RowsProduct:
				own++
				if call.Operand(&m.C) != nil {
					added++
				}
			case *program.Matmul:
				others++
			}
		}
		return own, others, added
	}

	for _, c := range []struct {
		rows, own, others int
		o                 lower.Options
	}{
		{8, 3, 0, lower.Options{Activation: gpu.BFloat16, Decoding: lower.Decoding{Rows: true}}},
		{64, 3, 0, lower.Options{Activation: gpu.Float16, Decoding: lower.Decoding{Rows: true}}},
		{65, 0, 3, lower.Options{Activation: gpu.BFloat16, Decoding: lower.Decoding{Rows: true}}},
		{8, 0, 3, lower.Options{Activation: gpu.Float32, Decoding: lower.Decoding{Rows: true}}},
		{8, 0, 3, lower.Options{Activation: gpu.BFloat16}},
	} {
		own, others, added := count(c.rows, c.o)
		require.Equal(t, []int{c.own, c.others, c.own / 3}, []int{own, others, added}, "%+v", c)
	}
}

// pagedGraph lowers a graph that continues texts: the projections of an attention to pages, with another product added
// to the last one.
func pagedGraph(t *testing.T, rows int, o lower.Options) *program.Program {
	g := gorgonia.NewGraph()
	x := passtest.Node(g, "x", rows, 64)
	pages, err := kvcache.NewPages(4)
	require.NoError(t, err)
	table := gorgonia.NewTensor(g, tensor.Int, 2, gorgonia.WithShape(rows, 3), gorgonia.WithName("table"))
	require.NoError(t, gorgonia.Let(table, tensor.New(tensor.WithShape(rows, 3), tensor.WithBacking(make([]int, 3*rows)))))
	part := func(name string) *gorgonia.Node { return must(op.Linear(x, passtest.Node(g, name, 64, 64))) }
	y := must(kvcache.PagedAttention(part("q"), part("k"), part("v"), table, pages, 0,
		kvcache.Config{Heads: 4, KVHeads: 4, HeadDim: 16, Capacity: 128}))
	must(gorgonia.Add(part("r"), must(op.Linear(y, passtest.Node(g, "o", 64, 64)))))

	o.PageMemory = func(*kvcache.Pages, int, int) (gpu.Ptr, error) { return 1 << 20, nil }
	return passtest.Lower(t, g, o)
}

// TestPackedProducts checks that products of a few rows read frozen weights in float8 and NF4 as they are stored, in
// graphs that continue texts, and that the projections of an attention remain one product.
func TestPackedProducts(t *testing.T) {
	for _, rows := range []int{1, 8} {
		for _, format := range []quant.Format{quant.Float8, quant.NF4} {
			for _, packed := range []bool{false, true} {
				o := lower.Options{Activation: gpu.BFloat16, Decoding: lower.Decoding{Rows: true, Packed: packed},
					Packed: func(n *gorgonia.Node) *quant.Matrix {
						if n.Name() == "x" {
							return nil
						}
						m, err := quant.New(format, 64, 64, make([]float32, 64*64))
						require.NoError(t, err)
						return m
					}}
				var parts []int
				widened := 0
				for _, call := range pagedGraph(t, rows, o).Calls {
					switch p := call.Params.(type) {
					case *decode.PackedProduct:
						n := 0
						for i := range p.Parts {
							if call.Operand(&p.Parts[i].Codes) != nil {
								require.Equal(t, 64, p.Parts[i].Rows)
								n++
							}
						}
						parts = append(parts, n)
						require.Equal(t, format == quant.NF4, p.NF4)
					case *quantize.WidenFloat8, *quantize.WidenNF4:
						widened++
					}
				}
				if packed {
					require.ElementsMatch(t, []int{3, 1, 1}, parts)
					require.Zero(t, widened)
				} else {
					require.Empty(t, parts)
					require.Equal(t, 5, widened)
				}
			}
		}
	}
}

// TestPackedNorms checks that products of one row with weights in float8 and NF4 take over the norm before them if
// they can normalize their row: it has up to 4,096 elements, and a multiple of 256 of them.
func TestPackedNorms(t *testing.T) {
	for _, format := range []quant.Format{quant.Float8, quant.NF4} {
		for dim, want := range map[int]int{192: 0, 256: 1, 4096: 1, 4352: 0} {
			const heads, headDim = 4, 16
			g := gorgonia.NewGraph()
			x := must(op.Embedding(passtest.Ints(g, "ids", 0), passtest.Node(g, "table", 9, dim)))
			y := must(op.RMSNorm(x, passtest.Node(g, "norm", dim), 1e-5))
			part := func(name string) *gorgonia.Node {
				return must(op.Linear(y, passtest.Node(g, name, heads*headDim, dim)))
			}
			must(kvcache.Attention(part("q"), part("k"), part("v"), passtest.Ints(g, "position", 0),
				kvcache.Config{Heads: heads, KVHeads: heads, HeadDim: headDim, Capacity: 128}))
			o := lower.Options{Activation: gpu.BFloat16,
				Decoding: lower.Decoding{Rows: true, Packed: true, Norms: true},
				Packed: func(n *gorgonia.Node) *quant.Matrix {
					if len(n.Name()) > 1 { // not a projection
						return nil
					}
					m, err := quant.New(format, heads*headDim, dim, make([]float32, heads*headDim*dim))
					require.NoError(t, err)
					return m
				}}

			products, folded := 0, 0
			for _, call := range passtest.Lower(t, g, o).Calls {
				if p, ok := call.Params.(*decode.PackedProduct); ok {
					products++
					if call.Operand(&p.Norm.W) != nil {
						require.Equal(t, 1e-5, p.Norm.Eps)
						folded++
					}
				}
			}
			require.Equal(t, 1, products)
			require.Equal(t, want, folded, "%d columns", dim)
		}
	}
}
