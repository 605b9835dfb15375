package cpuops_test

import (
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/op"
)

// TestLinearAdd checks that a product plus another value is bit-identical to the result of Gorgonia's
// tape machine and does not change its operands. The cases cover all conditions under which the two
// ops may or may not become one step.
func TestLinearAdd(t *testing.T) {
	must := gorgonia.Must
	linear := func(x, w *gorgonia.Node) *gorgonia.Node { return must(op.Linear(x, w)) }
	for name, build := range map[string]func(x, w, b *gorgonia.Node) gorgonia.Nodes{
		"product first": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			return gorgonia.Nodes{must(gorgonia.Add(linear(x, w), b))}
		},
		"product second": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			return gorgonia.Nodes{must(gorgonia.Add(b, linear(x, w)))}
		},
		"difference": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			return gorgonia.Nodes{must(gorgonia.Sub(b, linear(x, w)))}
		},
		"two products": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			return gorgonia.Nodes{must(gorgonia.Add(linear(x, w), linear(b, w)))}
		},
		"chain": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			for range 3 {
				x = must(gorgonia.Add(x, linear(x, w))) // the addend is also a factor
			}
			return gorgonia.Nodes{must(gorgonia.HadamardProd(x, b))}
		},
		"sum later": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			y := linear(x, w)
			c := must(gorgonia.HadamardProd(must(gorgonia.Tanh(b)), b))
			return gorgonia.Nodes{must(gorgonia.Add(y, c)), must(gorgonia.Sum(c))}
		},
		"view of a product": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			y := must(gorgonia.Reshape(linear(x, w), tensor.Shape{x.Shape().TotalSize()}))
			return gorgonia.Nodes{must(gorgonia.Add(y, must(gorgonia.Reshape(b, y.Shape()))))}
		},
		"product read twice": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			y := linear(x, w)
			return gorgonia.Nodes{must(gorgonia.HadamardProd(must(gorgonia.Add(y, b)), y))}
		},
		"product twice": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			y := linear(x, w)
			return gorgonia.Nodes{must(gorgonia.Add(y, y))}
		},
		"scalar": func(x, w, b *gorgonia.Node) gorgonia.Nodes {
			return gorgonia.Nodes{must(gorgonia.Add(linear(x, w), must(gorgonia.Sum(b))))}
		},
	} {
		for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			for _, rows := range []int{3, 70} {
				t.Run(fmt.Sprintf("%s/%v/%d", name, dt, rows), func(t *testing.T) {
					const d = 300 // more than one pass along k
					r := random(t)
					x, w, b := normal(r, dt, rows, d), normal(r, dt, d, d), normal(r, dt, rows, d)
					var results [2][]any
					for i := range results {
						g := gorgonia.NewGraph()
						out := build(gorgonia.NodeFromAny(g, x.Clone(), gorgonia.WithName("x")),
							gorgonia.NodeFromAny(g, w.Clone(), gorgonia.WithName("w")),
							gorgonia.NodeFromAny(g, b.Clone(), gorgonia.WithName("b")))
						if i == 0 {
							tape := gorgonia.NewTapeMachine(g)
							defer tape.Close()
							if err := tape.RunAll(); err != nil {
								t.Fatal(err)
							}
						} else {
							m := check[*cpuops.Machine](t)(cpuops.NewMachine(g,
								cpuops.WithOutputs(out...)))
							for range 2 {
								if err := m.RunAll(); err != nil {
									t.Fatal(err)
								}
							}
						}
						for _, n := range out {
							results[i] = append(results[i], flat(t, n.Value()))
						}
					}
					for k := range results[0] {
						if !equal(results[0][k], results[1][k]) {
							t.Errorf("result %d differs from the tape machine's", k)
						}
					}
				})
			}
		}
	}
}

// TestKeptOperands checks that a product which is an output, or has a view that is an output, keeps its
// value after a run, even if another op reads it.
func TestKeptOperands(t *testing.T) {
	for _, form := range []string{"matrix product", "view of a matrix product",
		"elementwise product", "view of an elementwise product"} {
		t.Run(form, func(t *testing.T) {
			r := random(t)
			g := gorgonia.NewGraph()
			x := gorgonia.NodeFromAny(g, normal(r, tensor.Float32, 40, 30), gorgonia.WithName("x"))
			w := gorgonia.NodeFromAny(g, normal(r, tensor.Float32, 30, 30), gorgonia.WithName("w"))
			b := gorgonia.NodeFromAny(g, normal(r, tensor.Float32, 40, 30), gorgonia.WithName("b"))
			product := func() (*gorgonia.Node, error) { return op.Linear(x, w) }
			if strings.Contains(form, "elementwise") {
				product = func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(x, b) }
			}
			y := check[*gorgonia.Node](t)(product())
			sum := gorgonia.Must(gorgonia.Add(y, b))
			if strings.Contains(form, "view") {
				y = gorgonia.Must(gorgonia.Reshape(y, tensor.Shape{1200}))
			}
			m := check[*cpuops.Machine](t)(cpuops.NewMachine(g, cpuops.WithOutputs(y, sum)))
			if err := m.RunAll(); err != nil {
				t.Fatal(err)
			}
			kept, total, added := flat(t, y.Value()).([]float32), flat(t, sum.Value()).([]float32),
				flat(t, b.Value()).([]float32)
			for i, p := range kept {
				if p == 0 || p+added[i] != total[i] {
					t.Fatalf("element %d: the product is %v; with %v added it is %v", i, p, added[i], total[i])
				}
			}
		})
	}
}
