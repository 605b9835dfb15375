package op_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// goldenOps maps the name of an op to a function that builds it for a golden case. The inputs are in the
// order of the op's arguments.
var goldenOps = map[string]func(c *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error){
	"RMSNorm": func(c *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.RMSNorm(in[0], in[1], settings[struct{ Eps float64 }](c).Eps)
	},
	"RoPE": func(c *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.RoPE(in[0], settings[op.RoPEConfig](c))
	},
	"Attention": func(c *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.Attention(in[0], in[1], in[2], settings[op.AttentionConfig](c))
	},
	"DocumentAttention": func(c *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.DocumentAttention(in[0], in[1], in[2], in[3], settings[op.AttentionConfig](c))
	},
	"Linear": func(_ *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.Linear(in[0], in[1])
	},
	"SiLUMLP": func(_ *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.SiLUMLP(in[0], in[1], in[2], in[3])
	},
	"Embedding": func(_ *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.Embedding(in[0], in[1])
	},
	"CrossEntropy": func(_ *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.CrossEntropy(in[0], in[1])
	},
	"LinearCrossEntropy": func(_ *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.LinearCrossEntropy(in[0], in[1], in[2])
	},
	"NewtonSchulz": func(c *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.NewtonSchulz(in[0], settings[struct{ Steps int }](c).Steps)
	},
}

// goldenErrors lists the tolerated errors ‖out − ref‖ / ‖ref‖ of outputs and gradients.
var goldenErrors = []struct {
	dtype             tensor.Dtype
	forward, backward float64
}{
	{tensor.Float64, 1e-12, 1e-12},
	{tensor.Float32, 1e-6, 1e-5},
}

// TestGolden compares every op with PyTorch in float64.
func TestGolden(t *testing.T) {
	tested := make(map[string]bool)
	for _, file := range []string{"rmsnorm", "rope", "attention", "mlp", "embedding",
		"crossentropy", "newtonschulz"} {
		for _, c := range loadGolden(t, file) {
			name := settings[struct{ Op string }](c).Op
			tested[name] = true
			for _, e := range goldenErrors {
				t.Run(fmt.Sprintf("%s/%s/%v", name, c.name, e.dtype), func(t *testing.T) {
					if most := settings[struct{ Float32Error float64 }](c).Float32Error; most > 0 &&
						e.dtype == tensor.Float32 {
						e.forward, e.backward = most, most
					}
					c.check(t, e.dtype, e.forward, e.backward, goldenOps[name])
				})
			}
		}
	}

	for name := range goldenOps {
		if !tested[name] {
			t.Errorf("no golden case for %s", name)
		}
	}
}

// TestGoldenKasminaOptions compares gradient clipping and the strict mode with PyTorch.
func TestGoldenKasminaOptions(t *testing.T) {
	for _, c := range loadGolden(t, "kasmina_options") {
		s := settings[struct {
			Seeds             []seedSetting
			GradClip, Epsilon float64
		}](c)
		option := []op.KasminaOption{op.WithGradClip(s.GradClip)}
		if s.GradClip == 0 {
			option = []op.KasminaOption{op.WithStability(op.Strict), op.WithEpsilon(s.Epsilon)}
		}
		for _, e := range goldenErrors {
			t.Run(fmt.Sprintf("%s/%v", c.name, e.dtype), func(t *testing.T) {
				c.check(t, e.dtype, e.forward, e.backward,
					func(_ *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
						return op.Kasmina(in[0], in[1], in[2],
							newLattice(t, in[0].Shape()[1], s.Seeds), option...)
					})
			})
		}
	}
}

// goldenCase is one case of a file testdata/golden_*.safetensors. The contents are described in
// make_golden.py in the same directory.
type goldenCase struct {
	name     string
	settings json.RawMessage
	tensors  map[string]safetensors.Tensor
}

// loadGolden returns the cases of a file, sorted by name.
func loadGolden(t *testing.T, file string) []*goldenCase {
	t.Helper()
	tensors, metadata, err := safetensors.Load(filepath.Join("..", "testdata",
		"golden_"+file+".safetensors"))
	if err != nil {
		t.Fatal(err)
	}

	var settings map[string]json.RawMessage
	if err := json.Unmarshal([]byte(metadata["cases"]), &settings); err != nil {
		t.Fatal(err)
	}

	cases := make(map[string]*goldenCase)
	for name, s := range settings {
		cases[name] = &goldenCase{name, s, make(map[string]safetensors.Tensor)}
	}

	for _, x := range tensors {
		name, part, _ := strings.Cut(x.Name, "/")
		cases[name].tensors[part] = x
	}

	return slices.SortedFunc(maps.Values(cases), func(a, b *goldenCase) int {
		return strings.Compare(a.name, b.name)
	})
}

// settings decodes the settings of c.
func settings[S any](c *goldenCase) (s S) {
	if err := json.Unmarshal(c.settings, &s); err != nil {
		panic(fmt.Sprintf("settings of %s: %v", c.name, err))
	}
	return s
}

// check builds the graph of cost = Σ g ⊙ y, y = build(inputs), and runs it on a tape machine. It compares
// y and the gradients of the inputs with the golden values.
func (c *goldenCase) check(t *testing.T, dt tensor.Dtype, forward, backward float64,
	build func(*goldenCase, gorgonia.Nodes) (*gorgonia.Node, error)) {
	graph := gorgonia.NewGraph()
	var in, wrt gorgonia.Nodes
	var gradients []string
	for _, name := range settings[struct{ Inputs []string }](c).Inputs {
		n := c.node(graph, name, dt)
		in = append(in, n)
		if _, ok := c.tensors["d"+name]; ok {
			wrt = append(wrt, n)
			gradients = append(gradients, "d"+name)
		}
	}

	y := must(t)(build(c, in))
	cost := must(t)(gorgonia.HadamardProd(c.node(graph, "g", dt), y))
	if !cost.IsScalar() {
		cost = must(t)(gorgonia.Sum(cost))
	}

	grads, err := gorgonia.Grad(cost, wrt...)
	if err != nil {
		t.Fatal(err)
	}

	values := make([]gorgonia.Value, 1+len(grads))
	for i, n := range append(gorgonia.Nodes{y}, grads...) {
		gorgonia.Read(n, &values[i])
	}

	// Ops with state first process another input.
	if x, ok := c.tensors["previous"]; ok {
		letFloats(t, in[0], x)
		run(t, graph)
		letFloats(t, in[0], c.tensors[in[0].Name()])
	}

	run(t, graph)
	c.compare(t, "y", values[0], forward)
	for i, name := range gradients {
		c.compare(t, name, values[1+i], backward)
	}
}

// letFloats assigns a tensor of floats to n.
func letFloats(t *testing.T, n *gorgonia.Node, x safetensors.Tensor) {
	t.Helper()
	if err := gorgonia.Let(n, dense(n.Dtype(), convert[float64](x.Data.([]float32)),
		x.Shape...)); err != nil {
		t.Fatal(err)
	}
}

// node returns an input node with the values of a tensor. Floats, which are float32 in the file, are
// converted to dt; ids remain ints.
func (c *goldenCase) node(g *gorgonia.ExprGraph, name string, dt tensor.Dtype) *gorgonia.Node {
	x := c.tensors[name]
	var value *tensor.Dense
	switch data := x.Data.(type) {
	case []int64:
		value = ints(convert[int](data))
	case []float32:
		if len(x.Shape) == 0 {
			return gorgonia.NewScalar(g, dt, gorgonia.WithName(name),
				gorgonia.WithValue(scalar(dt, data[0])))
		}
		value = dense(dt, convert[float64](data), x.Shape...)
	default:
		panic(fmt.Sprintf("tensor %s/%s is of type %s", c.name, name, x.DType))
	}

	return gorgonia.NewTensor(g, value.Dtype(), value.Dims(), gorgonia.WithName(name),
		gorgonia.WithShape(x.Shape...), gorgonia.WithValue(value))
}

func scalar(dt tensor.Dtype, v float32) any {
	if dt == tensor.Float32 {
		return v
	}
	return float64(v)
}

func convert[T, S int | int64 | float32 | float64](data []S) []T {
	out := make([]T, len(data))
	for i, v := range data {
		out[i] = T(v)
	}
	return out
}

// compare reports an error unless got equals the golden tensor within the given error. A tensor of zeros
// must match exactly.
func (c *goldenCase) compare(t *testing.T, name string, got gorgonia.Value, tolerance float64) {
	t.Helper()
	want, ok := c.tensors[name].Data.([]float64)
	if shape := tensor.Shape(c.tensors[name].Shape); !ok || got == nil || !got.Shape().Eq(shape) {
		t.Errorf("%s is %v, want shape %v", name, got, shape)
		return
	}
	if e := distance(floats(t, got), want); !(e <= tolerance) {
		t.Errorf("%s has error %.3g, want at most %g\n got %.6g\nwant %.6g", name, e,
			tolerance, floats(t, got), want)
	}
}

// TestGoldenModel compares the loss and all gradients of a whole model with PyTorch's. The model is a
// Llama of two blocks with a Kasmina layer between them.
func TestGoldenModel(t *testing.T) {
	for _, c := range loadGolden(t, "model") {
		for _, e := range goldenErrors {
			t.Run(fmt.Sprintf("%s/%v", c.name, e.dtype), func(t *testing.T) {
				c.check(t, e.dtype, e.forward, e.backward,
					func(c *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
						return goldenModel(t, c, in), nil
					})
			})
		}
	}
}

// goldenModel returns the model's loss.
func goldenModel(t *testing.T, c *goldenCase, in gorgonia.Nodes) *gorgonia.Node {
	s := settings[struct {
		Seq, Heads, KVHeads, HeadDim, Blocks int
		Eps                                  float64
		Seeds                                []seedSetting
	}](c)
	nodes := make(map[string]*gorgonia.Node)
	for _, n := range in {
		nodes[n.Name()] = n
	}

	must := must(t)
	x := must(op.Embedding(nodes["ids"], nodes["embedding"]))
	for i := range s.Blocks {
		w := func(name string) *gorgonia.Node { return nodes[fmt.Sprintf("block%d.%s", i, name)] }
		h := must(op.RMSNorm(x, w("norm1"), s.Eps))
		q := must(op.RoPE(must(op.Linear(h, w("q"))),
			op.RoPEConfig{Seq: s.Seq, Heads: s.Heads, HeadDim: s.HeadDim}))
		k := must(op.RoPE(must(op.Linear(h, w("k"))),
			op.RoPEConfig{Seq: s.Seq, Heads: s.KVHeads, HeadDim: s.HeadDim}))
		a := must(op.Attention(q, k, must(op.Linear(h, w("v"))),
			op.AttentionConfig{Seq: s.Seq, Heads: s.Heads, KVHeads: s.KVHeads,
				HeadDim: s.HeadDim, Causal: true}))
		x = must(gorgonia.Add(x, must(op.Linear(a, w("o")))))
		h = must(op.RMSNorm(x, w("norm2"), s.Eps))
		x = must(gorgonia.Add(x, must(op.SiLUMLP(h, w("gate"), w("up"), w("down")))))
		if i == 0 {
			x = must(op.Kasmina(x, nodes["weights"], nodes["scales"],
				newLattice(t, x.Shape()[1], s.Seeds)))
		}
	}

	x = must(op.RMSNorm(x, nodes["norm"], s.Eps))
	return must(op.LinearCrossEntropy(x, nodes["head"], nodes["targets"]))
}

// routes lists the transitions that take a dormant seed to a stage.
var routes = map[state.Stage][]state.Stage{
	state.Dormant:       {},
	state.Germinated:    {state.Germinated},
	state.Training:      {state.Germinated, state.Training},
	state.Grafting:      {state.Germinated, state.Training, state.Grafting},
	state.Stabilization: {state.Germinated, state.Training, state.Grafting, state.Stabilization},
	state.Evaluating: {state.Germinated, state.Training, state.Grafting,
		state.Stabilization, state.Evaluating},
	state.FineTuning: {state.Germinated, state.Training, state.Grafting, state.Stabilization,
		state.Evaluating, state.FineTuning},
	state.Fossilized: {state.Germinated, state.Training, state.Grafting, state.Stabilization,
		state.Evaluating, state.FineTuning, state.Fossilized},
	state.Culled:     {state.Germinated, state.Training, state.Culled},
	state.Cancelled:  {state.Germinated, state.Cancelled},
	state.RolledBack: {state.Germinated, state.Training, state.Grafting, state.RolledBack},
}

// seedSetting is the desired state of one seed.
type seedSetting struct {
	Stage string
	Kind  string
	Slot  int
	Alpha float64
}

// newLattice returns a lattice with seeds in the given states.
func newLattice(t testing.TB, hidden int, seeds []seedSetting,
	opts ...state.Option) *state.Lattice {
	t.Helper()
	l, err := state.NewLattice(len(seeds), hidden,
		append([]state.Option{state.WithoutGates()}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}

	for i, s := range seeds {
		if err := place(l, i, s); err != nil {
			t.Fatal(err)
		}
	}

	return l
}

func place(l *state.Lattice, seed int, s seedSetting) error {
	kind, ok := blueprints.ByName(s.Kind)
	if !ok {
		return fmt.Errorf("no kind %q", s.Kind)
	}

	for _, stage := range slices.Sorted(maps.Keys(routes)) {
		if stage.String() != s.Stage {
			continue
		}
		var err error
		for _, to := range routes[stage] {
			if to == state.Germinated {
				err = l.RequestGermination(seed, state.GerminationRequest{Slot: s.Slot, Kind: kind})
			} else {
				err = errors.Join(err, l.Transition(seed, to))
			}
		}
		return errors.Join(err, l.SetAlpha(seed, s.Alpha))
	}

	return fmt.Errorf("no stage %q", s.Stage)
}

// TestKasminaGolden compares the layer with PyTorch in float64. The cases cover every stage and kind,
// mixed lattices, shared slots, odd sizes, and activations that the adaptive mode scales.
func TestKasminaGolden(t *testing.T) {
	cases := loadGolden(t, "kasmina")
	if len(cases) < 50 {
		t.Errorf("%d golden cases, want every stage and kind and more", len(cases))
	}

	for _, c := range cases {
		seeds := settings[struct{ Seeds []seedSetting }](c).Seeds
		for _, e := range goldenErrors {
			for _, mode := range []op.Stability{op.Adaptive, op.Fast} {
				t.Run(fmt.Sprintf("%s/%v/%v", c.name, e.dtype, mode), func(t *testing.T) {
					c.check(t, e.dtype, e.forward, e.backward,
						func(_ *goldenCase, in gorgonia.Nodes) (*gorgonia.Node, error) {
							l := newLattice(t, in[0].Shape()[1], seeds)
							return op.Kasmina(in[0], in[1], in[2], l, op.WithStability(mode))
						})
				})
			}
		}
	}
}
