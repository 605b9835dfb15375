package op_test

import (
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/op"
)

// golden is one case of testdata/golden_*.safetensors; make_golden.py there says what a case holds.
type golden struct {
	name     string
	settings []byte // JSON
	tensors  map[string]safetensors.Tensor
}

// The functions by which the cases' ops are built. in holds the inputs in order.
var builders = map[string]func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error){
	"RMSNorm": func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.RMSNorm(in[0], in[1], read[struct{ Eps float64 }](c).Eps)
	},
	"RoPE": func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.RoPE(in[0], read[op.RoPEConfig](c))
	},
	"Attention": func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.Attention(in[0], in[1], in[2], read[op.AttentionConfig](c))
	},
	"Linear":    func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error) { return op.Linear(in[0], in[1]) },
	"SiLUMLP":   func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error) { return op.SiLUMLP(in[0], in[1], in[2], in[3]) },
	"Embedding": func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error) { return op.Embedding(in[0], in[1]) },
	"CrossEntropy": func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.CrossEntropy(in[0], in[1])
	},
	"LinearCrossEntropy": func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.LinearCrossEntropy(in[0], in[1], in[2])
	},
	"NewtonSchulz": func(c *golden, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.NewtonSchulz(in[0], read[struct{ Steps int }](c).Steps)
	},
}

func TestGolden(t *testing.T) {
	tested := make(map[string]bool)
	for _, file := range []string{"rmsnorm", "rope", "attention", "mlp", "embedding", "crossentropy", "newtonschulz"} {
		for _, c := range loadGolden(t, file) {
			settings := read[struct {
				Op     string
				Inputs []string
			}](c)
			build := builders[settings.Op]
			if build == nil {
				t.Fatalf("%s %s: unknown op %q", file, c.name, settings.Op)
			}
			tested[settings.Op] = true
			t.Run(settings.Op+"/"+c.name, func(t *testing.T) {
				for _, p := range precisions {
					check(t, c, p, settings.Inputs, build)
				}
			})
		}
	}
	for name := range builders {
		if !tested[name] {
			t.Errorf("no case for %s", name)
		}
	}
}

// loadGolden returns the cases of a file, in order of their names.
func loadGolden(t *testing.T, file string) []*golden {
	t.Helper()
	tensors, metadata, err := safetensors.Load(filepath.Join("..", "testdata", "golden_"+file+".safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	cases := make(map[string]*golden)
	for name, settings := range metadata {
		cases[name] = &golden{name, []byte(settings), make(map[string]safetensors.Tensor)}
	}
	for _, x := range tensors {
		name, part, _ := strings.Cut(x.Name, "/")
		cases[name].tensors[part] = x
	}
	sorted := make([]*golden, 0, len(cases))
	for _, c := range cases {
		sorted = append(sorted, c)
	}
	slices.SortFunc(sorted, func(a, b *golden) int { return strings.Compare(a.name, b.name) })
	return sorted
}

// read decodes the settings of c.
func read[S any](c *golden) (s S) {
	if err := json.Unmarshal(c.settings, &s); err != nil {
		panic(fmt.Sprintf("settings of %s: %v", c.name, err))
	}
	return s
}

// precision is an element type and the error it may have, ‖out − ref‖ / ‖ref‖.
type precision struct {
	dtype             tensor.Dtype
	forward, backward float64
}

var precisions = []precision{
	{tensor.Float64, 1e-12, 1e-12},
	{tensor.Float32, 1e-6, 1e-5},
}

// check builds the graph of sum(g ⊙ op(inputs)), runs it on a tape machine and compares output and gradients.
func check(t *testing.T, c *golden, p precision, inputs []string, build func(*golden, gorgonia.Nodes) (*gorgonia.Node, error)) {
	t.Helper()
	g := gorgonia.NewGraph()
	var in, wrt gorgonia.Nodes
	var results []string // the tensors to compare: the output, then the gradients of wrt
	results = append(results, "y")
	for _, name := range inputs {
		n := c.node(g, name, p.dtype)
		in = append(in, n)
		if _, ok := c.tensors["d"+name]; ok {
			wrt = append(wrt, n)
			results = append(results, "d"+name)
		}
	}
	y, err := build(c, in)
	if err != nil {
		t.Fatal(err)
	}
	if want := tensor.Shape(c.tensors["y"].Shape); !y.Shape().Eq(want) {
		t.Fatalf("output has shape %v, want %v", y.Shape(), want)
	}
	cost, err := gorgonia.HadamardProd(c.node(g, "g", p.dtype), y)
	if err == nil && !cost.IsScalar() {
		cost, err = gorgonia.Sum(cost)
	}
	if err != nil {
		t.Fatal(err)
	}
	grads, err := gorgonia.Grad(cost, wrt...)
	if err != nil {
		t.Fatal(err)
	}
	values := make([]gorgonia.Value, len(results))
	for i, n := range append(gorgonia.Nodes{y}, grads...) {
		gorgonia.Read(n, &values[i])
	}
	vm := gorgonia.NewTapeMachine(g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	for i, name := range results {
		tolerance := p.backward
		if name == "y" {
			tolerance = p.forward
		}
		compare(t, fmt.Sprintf("%v %s", p.dtype, name), values[i], c.tensors[name], tolerance)
	}
}

// node returns an input node with the value of a tensor; floats become of type dtype.
func (c *golden) node(g *gorgonia.ExprGraph, name string, dtype tensor.Dtype) *gorgonia.Node {
	x, ok := c.tensors[name]
	if !ok {
		panic(fmt.Sprintf("case %s has no tensor %s", c.name, name))
	}
	var backing any
	switch data := x.Data.(type) {
	case []int64:
		backing = convert[int](data)
	case []float32:
		backing = any(slices.Clone(data))
		if dtype == tensor.Float64 {
			backing = convert[float64](data)
		}
	default:
		panic(fmt.Sprintf("tensor %s of case %s is %s", name, c.name, x.DType))
	}
	if len(x.Shape) == 0 {
		value := tensor.New(tensor.FromScalar(convert[float64](x.Data.([]float32))[0]))
		if dtype == tensor.Float32 {
			value = tensor.New(tensor.FromScalar(x.Data.([]float32)[0]))
		}
		return gorgonia.NewScalar(g, dtype, gorgonia.WithName(name), gorgonia.WithValue(value))
	}
	value := tensor.New(tensor.WithShape(x.Shape...), tensor.WithBacking(backing))
	return gorgonia.NewTensor(g, value.Dtype(), value.Dims(), gorgonia.WithName(name), gorgonia.WithShape(x.Shape...), gorgonia.WithValue(value))
}

func convert[T, S int | int64 | float32 | float64](data []S) []T {
	out := make([]T, len(data))
	for i, v := range data {
		out[i] = T(v)
	}
	return out
}

// compare reports an error when ‖got − want‖ / ‖want‖ is above tolerance; of a want of zeros, got must be all zeros.
func compare(t *testing.T, what string, got gorgonia.Value, want safetensors.Tensor, tolerance float64) {
	t.Helper()
	if got == nil || !got.Shape().Eq(tensor.Shape(want.Shape)) {
		t.Errorf("%s is %v, want shape %v", what, got, want.Shape)
		return
	}
	if e := relativeError(floats(got), want.Data.([]float64)); !(e <= tolerance) {
		t.Errorf("%s has error %.3g, want at most %g\n got %.9g\nwant %.9g", what, e, tolerance, floats(got), want.Data)
	}
}

func relativeError(got, want []float64) float64 {
	var difference, norm float64
	for i, w := range want {
		difference += (got[i] - w) * (got[i] - w)
		norm += w * w
	}
	if difference == 0 {
		return 0
	}
	return math.Sqrt(difference / norm)
}

// floats returns the elements of v.
func floats(v gorgonia.Value) []float64 {
	switch data := v.Data().(type) {
	case float32:
		return []float64{float64(data)}
	case float64:
		return []float64{data}
	case []float32:
		return convert[float64](data)
	default:
		return data.([]float64)
	}
}
