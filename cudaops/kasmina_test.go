package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	kasminakernel "github.com/kasmina-go/kasmina/internal/cpu/kasmina"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// What fake passes leave is the results themselves, in their workspace.
func (k *fakeKernels) KasminaForwardWorkspace(l kasmina.Layer) int {
	return 4 * kasmina.ForwardFigures * l.State.Seeds
}

func (k *fakeKernels) KasminaBackwardWorkspace(l kasmina.Layer, _ bool) int {
	return 4 * (kasmina.BackwardFigures*l.State.Seeds + l.State.Slots*(l.Chunk+1))
}

func (k *fakeKernels) MergeKasminaRecords(s gpu.Stream, left []kasmina.Records) error {
	return k.launch(s, func(l *fake.Launch) {
		for _, r := range left {
			n := kasmina.ForwardFigures * r.Seeds
			copy(floatsAt(l, r.Figures, n), floatsAt(l, r.Records, n))
		}
	})
}

func (k *fakeKernels) AddKasminaParts(s gpu.Stream, left []kasmina.Parts) error {
	return k.launch(s, func(l *fake.Launch) {
		for _, p := range left {
			if p.Units == 0 {
				continue
			}
			n, slots := kasmina.BackwardFigures*p.Layer.State.Seeds, p.Layer.State.Slots
			sums := floatsAt(l, p.Total, slots*(p.Layer.Chunk+1))
			copy(floatsAt(l, p.DWeights, slots*p.Layer.Chunk), sums)
			copy(floatsAt(l, p.DScales, slots), sums[slots*p.Layer.Chunk:])
			if p.Figures != 0 {
				copy(floatsAt(l, p.Figures, n), floatsAt(l, p.Records, n))
			}
		}
	})
}

func (k *fakeKernels) KasminaWideWorkspace(kasmina.Layer, kasmina.Wide, bool) int {
	return 4
}

// kasminaPlan reads the state of a layer from the device.
func kasminaPlan(l *fake.Launch, k kasmina.Layer, wide *kasmina.Wide, r kasmina.Reduction) (*kasminakernel.Layer[float32], [][]float32) {
	n, width := k.State.Seeds, k.Chunk
	words := slices.Clone(fake.Slice[uint32](l, k.State.Ptr, k.State.Bytes()/4))
	if wide != nil {
		width = wide.Width
		list := fake.Slice[uint32](l, wide.Mixing.Ptr, wide.Mixing.Bytes()/4)
		for i := range list[0] {
			words[list[1+i]] = list[1+n+int(i)]
		}
	}
	field := func(i int) []float32 { return fake.Slice[float32](l, k.State.Ptr.Offset(4*i*n), n) }
	p := &kasminakernel.Layer[float32]{Rows: k.Rows, Seeds: n, Chunk: k.Chunk, Slots: k.State.Slots, Width: width, Eps: k.Eps,
		Stability: [...]kasminakernel.Stability{kasminakernel.StabilityFast, kasminakernel.StabilityStrict, kasminakernel.StabilityAdaptive}[k.Stability],
		Reduce:    [...]kasminakernel.Reduction{kasminakernel.ReduceExact, kasminakernel.ReduceMean, kasminakernel.ReduceMax}[r],
		Measure:   make([]bool, n)}
	for i, w := range words[:n] {
		p.Measure[i] = true
		if w == 0 {
			continue
		}
		err := p.Activate(kasminakernel.Seed[float32]{Seed: i, Slot: int(w >> 16), Kind: blueprints.Kind(w & 0xff), Blend: w>>8&1 == 1,
			Learn: w>>9&1 == 1, Alpha: field(1)[i], Low: field(2)[i], High: field(3)[i]})
		if err != nil {
			panic(err)
		}
	}
	limits := field(4)
	for _, v := range limits {
		p.Limit = append(p.Limit, float64(v))
	}
	return p, [][]float32{floatsAt(l, k.X, k.Rows*n*k.Chunk), floatsAt(l, k.Weights, k.State.Slots*width), floatsAt(l, k.Scales, k.State.Slots)}
}

func (k *fakeKernels) KasminaForward(s gpu.Stream, f kasmina.Forward) error {
	return k.kasminaForward(s, f, nil)
}

func (k *fakeKernels) KasminaWideForward(s gpu.Stream, f kasmina.Forward, w kasmina.Wide) error {
	return k.kasminaForward(s, f, &w)
}

func (k *fakeKernels) kasminaForward(s gpu.Stream, f kasmina.Forward, wide *kasmina.Wide) error {
	if f.Records != nil {
		*f.Records = kasmina.Records{}
		if f.Telemetry && f.Reduction == kasmina.Exact {
			*f.Records = kasmina.Records{Figures: f.Figures, Records: f.Workspace, Seeds: f.State.Seeds}
			f.Figures = f.Workspace
		}
	}
	return k.launch(s, func(l *fake.Launch) {
		p, in := kasminaPlan(l, f.Layer, wide, f.Reduction)
		p.Limit = nil
		p.Forward(floatsAt(l, f.Y, len(in[0])), in[0], in[1], in[2])
		n := p.Seeds
		bad := fake.Slice[uint32](l, f.Bad, n)
		for i := range p.Figures {
			bad[i] += uint32(p.Figures[i].Bad)
		}
		if !f.Telemetry {
			return
		}
		out := floatsAt(l, f.Figures, kasmina.ForwardFigures*n)
		for i := range p.Figures {
			m := p.Figures[i].Moments
			h := p.Figures[i].Health(p.Reduce, p.Eps)
			for j, v := range append(h[:], m.Mean, m.Variance()) {
				out[j*n+i] = float32(v)
			}
		}
		if f.Histogram != 0 {
			bins := fake.Slice[uint32](l, f.Histogram, kasmina.Bins*n)
			for i, h := range p.Exponents(in[0]) {
				copy(bins[i*kasmina.Bins:], h[:])
			}
		}
	})
}

func (k *fakeKernels) KasminaBackward(s gpu.Stream, b kasmina.Backward) error {
	return k.kasminaBackward(s, b, nil)
}

func (k *fakeKernels) KasminaWideBackward(s gpu.Stream, b kasmina.Backward, w kasmina.Wide) error {
	return k.kasminaBackward(s, b, &w)
}

func (k *fakeKernels) kasminaBackward(s gpu.Stream, b kasmina.Backward, wide *kasmina.Wide) error {
	if b.Parts != nil {
		*b.Parts = kasmina.Parts{}
		if wide == nil && (!b.Telemetry || b.Reduction == kasmina.Exact) {
			seeds, slots := b.State.Seeds, b.State.Slots
			left := kasmina.Parts{Layer: b.Layer, DWeights: b.DWeights, DScales: b.DScales, Units: seeds,
				Total: b.Workspace.Offset(4 * kasmina.BackwardFigures * seeds)}
			if b.Telemetry {
				left.Figures, left.Records = b.Figures, b.Workspace
				b.Figures = b.Workspace
			}
			b.DWeights, b.DScales = left.Total, left.Total.Offset(4*slots*b.Chunk)
			*b.Parts = left
		}
	}
	return k.launch(s, func(l *fake.Launch) {
		p, in := kasminaPlan(l, b.Layer, wide, b.Reduction)
		if !b.Clip {
			p.Limit = nil
		}
		g := floatsAt(l, b.G, len(in[0]))
		if b.DX == b.G {
			g = slices.Clone(g)
		}
		p.Backward(floatsAt(l, b.DX, len(in[0])), floatsAt(l, b.DWeights, len(in[1])), floatsAt(l, b.DScales, len(in[2])), g, in[0], in[1], in[2])
		n := p.Seeds
		bad, clipped := fake.Slice[uint32](l, b.Bad, n), fake.Slice[uint32](l, b.Clipped, n)
		for i := range p.Figures {
			bad[i] += uint32(p.Figures[i].Bad)
			clipped[i] += uint32(p.Figures[i].Clipped)
		}
		if !b.Telemetry {
			return
		}
		out := floatsAt(l, b.Figures, kasmina.BackwardFigures*n)
		for i := range p.Figures {
			m := p.Figures[i].Norms
			g := p.Figures[i].Gradient(p.Reduce)
			for j, v := range append(g[:], m.Mean, m.Variance(), m.N) {
				out[j*n+i] = float32(v)
			}
		}
	})
}

// kasminaGraph is the cross-entropy of a Kasmina layer y of x, whose lattice has seeds in many stages.
type kasminaGraph struct {
	g                       *gorgonia.ExprGraph
	x, weights, scales      *gorgonia.Node
	loss                    *gorgonia.Node
	lattice                 *state.Lattice
	rows, seeds, chunk, dim int
}

const kasminaTestSlots = 9

func newKasminaGraph(t testing.TB, seed uint64, opts []state.Option, layer ...op.KasminaOption) *kasminaGraph {
	t.Helper()
	return newWideKasminaGraph(t, seed, 3, opts, layer...)
}

// newWideKasminaGraph has slots of the given number of weights, and seeds of all kinds that fit.
func newWideKasminaGraph(t testing.TB, seed uint64, width int, opts []state.Option, layer ...op.KasminaOption) *kasminaGraph {
	t.Helper()
	k := &kasminaGraph{g: gorgonia.NewGraph(), rows: 6, seeds: 8, chunk: 3}
	kinds := []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate, blueprints.MLPExpansion, blueprints.ConvFilter}
	if width > k.chunk {
		kinds = []blueprints.Kind{blueprints.LowRank, blueprints.Residual, blueprints.ChunkMLP, blueprints.LowRank, blueprints.ChunkMLP}
	}
	k.dim = k.seeds * k.chunk
	r := rand.New(rand.NewPCG(seed, 7))
	values := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return x
	}
	matrix := func(name string, rows, cols int) *gorgonia.Node {
		return gorgonia.NewMatrix(k.g, tensor.Float32, gorgonia.WithShape(rows, cols), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows, cols), tensor.WithBacking(values(rows*cols)))))
	}
	k.x, k.weights = matrix("x", k.rows, k.dim), matrix("weights", kasminaTestSlots, width)
	k.scales = gorgonia.NewVector(k.g, tensor.Float32, gorgonia.WithShape(kasminaTestSlots), gorgonia.WithName("scales"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(kasminaTestSlots), tensor.WithBacking(values(kasminaTestSlots)))))
	target := gorgonia.NewVector(k.g, tensor.Int, gorgonia.WithShape(k.rows), gorgonia.WithName("targets"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(k.rows), tensor.WithBacking([]int{1, 7, 22, 0, 9, 5}))))
	must := func(n *gorgonia.Node, err error) *gorgonia.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	var err error
	if k.lattice, err = state.NewLattice(k.seeds, k.dim, append(opts, state.WithoutGates())...); err != nil {
		t.Fatal(err)
	}
	path := []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating, state.FineTuning, state.Fossilized}
	for i := range k.seeds - 1 {
		request := state.GerminationRequest{Slot: 1 + i%4, Kind: kinds[i%len(kinds)]}
		if err := k.lattice.RequestGermination(i, request); err != nil {
			t.Fatal(err)
		}
		for _, s := range path[:min(i, len(path))] {
			if err := k.lattice.Transition(i, s); err != nil {
				t.Fatal(err)
			}
			if s == state.Grafting {
				if err := k.lattice.SetAlpha(i, 0.1+0.1*float64(i)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	y := must(op.Kasmina(k.x, k.weights, k.scales, k.lattice, layer...))
	k.loss = must(op.CrossEntropy(y, target))
	if _, err := gorgonia.Grad(k.loss, k.x, k.weights, k.scales); err != nil {
		t.Fatal(err)
	}
	return k
}

func (k *kasminaGraph) draw(t testing.TB, seed uint64, spoil func([]float32)) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 8))
	x := make([]float32, k.rows*k.dim)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	if spoil != nil {
		spoil(x)
	}
	if err := gorgonia.Let(k.x, tensor.New(tensor.WithShape(k.rows, k.dim), tensor.WithBacking(x))); err != nil {
		t.Fatal(err)
	}
}

// open returns a machine for the graph.
func (k *kasminaGraph) open(t testing.TB, device *Device, opts ...MachineOption) *Machine {
	t.Helper()
	m, err := NewMachine(device, k.g, append(opts, WithParams(k.weights, k.scales), WithOutputs(k.loss, k.x.Deriv()))...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestKasminaMachine runs a layer on both machines, while the lattice moves on, and compares gradients and reports.
func TestKasminaMachine(t *testing.T) {
	for name, c := range map[string]struct {
		lattice []state.Option
		layer   []op.KasminaOption
	}{
		"default":  {},
		"strict":   {layer: []op.KasminaOption{op.WithStability(op.Strict), op.WithGradClip(1.5)}},
		"adaptive": {layer: []op.KasminaOption{op.WithAdaptiveGradClip(0.1)}},
		"mean":     {lattice: []state.Option{state.WithTelemetry(state.Telemetry{Reduction: state.MeanOfRows})}},
		"debug":    {lattice: []state.Option{state.WithTelemetry(state.Telemetry{Mode: state.Debug, Reduction: state.MaxOfRows})}},
		"sampling": {lattice: []state.Option{state.WithTelemetry(state.Telemetry{Mode: state.Sampling, Every: 2, Share: 0.5})}},
		"off":      {lattice: []state.Option{state.WithTelemetry(state.Telemetry{Mode: state.Off})}},
		"quiet":    {layer: []op.KasminaOption{op.WithoutTelemetry()}},
	} {
		for _, width := range []int{3, 13} { // slots as wide as chunks, and slots with room for the kinds that mix
			name := fmt.Sprintf("%s/%d", name, width)
			t.Run(name+"/fake", func(t *testing.T) {
				device, _, fakeOption := openFake(t, fake.Config{})
				compareKasmina(t, device, width, c.lattice, c.layer, WithStrict(), fakeOption)
			})
			t.Run(name+"/scaled", func(t *testing.T) {
				device, _, fakeOption := openFake(t, fake.Config{})
				compareKasmina(t, device, width, c.lattice, c.layer, WithStrict(), fakeOption, scaledGradients)
			})
			if testing.Short() && rand.IntN(2) == 0 {
				continue
			}
			t.Run(name+"/GPU", func(t *testing.T) { compareKasmina(t, openGPU(t), width, c.lattice, c.layer, WithStrict()) })
		}
	}
}

func compareKasmina(t *testing.T, device *Device, width int, lattice []state.Option, layer []op.KasminaOption, opts ...MachineOption) {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	a, b := newWideKasminaGraph(t, seed, width, lattice, layer...), newWideKasminaGraph(t, seed, width, lattice, layer...)
	m := a.open(t, device, opts...)
	defer m.Close()
	tape := gorgonia.NewTapeMachine(b.g)
	defer tape.Close()
	for step := range uint64(few(7, 5)) {
		for _, k := range []*kasminaGraph{a, b} {
			k.draw(t, seed+step, nil)
			if step == 3 {
				if err := k.lattice.SetTelemetry(state.Telemetry{Mode: state.Debug, Reduction: state.MaxOfRows}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := k.lattice.StepEpoch(state.Metrics{}); err != nil {
				t.Fatal(err)
			}
		}
		tape.Reset()
		if err := errors.Join(m.RunAll(), tape.RunAll()); err != nil {
			t.Fatal(err)
		}
		nodes := gorgonia.Nodes{a.loss, a.x.Deriv(), a.weights.Deriv(), a.scales.Deriv()}
		for i, want := range (gorgonia.Nodes{b.loss, b.x.Deriv(), b.weights.Deriv(), b.scales.Deriv()}) {
			v, err := m.Value(nodes[i])
			if err != nil {
				t.Fatal(err)
			}
			tolerance := 1e-5
			if i > 1 { // sums over all rows, which both machines round, each in its order
				tolerance = 1e-4
			}
			if d := distance(t, v, want.Value()); !(d < tolerance) {
				t.Errorf("step %d: value %d differs by %.2g", step, i, d)
			}
		}
		sameReports(t, fmt.Sprintf("step %d", step), a.lattice.Report(), b.lattice.Report())
	}
	sameReports(t, "history", a.lattice.History(), b.lattice.History())
}

// sameReports compares every number, whatever the structure, up to the precision of what the lattice keeps as float16.
func sameReports(t testing.TB, at string, got, want any) {
	t.Helper()
	if where := differs(reflect.ValueOf(got), reflect.ValueOf(want), at); where != "" {
		t.Errorf("the reports differ: %s", where)
	}
}

func differs(a, b reflect.Value, at string) string {
	switch a.Kind() {
	case reflect.Float32, reflect.Float64: // one may be rounded up to a bfloat16, the other down
		if x, y := a.Float(), b.Float(); !(math.Abs(x-y) <= 0x1.01p-7*math.Abs(y)+1e-6) {
			return fmt.Sprintf("%s: %v, want %v", at, x, y)
		}
	case reflect.Struct:
		if layer, ok := a.Interface().(state.LayerReport); ok { // what was timed is another matter on every machine
			want := b.Interface().(state.LayerReport)
			a = reflect.ValueOf(state.LayerReport{Errors: layer.Errors, Clips: layer.Clips})
			b = reflect.ValueOf(state.LayerReport{Errors: want.Errors, Clips: want.Clips})
		}
		for i := range a.NumField() {
			if s := differs(a.Field(i), b.Field(i), at+"."+a.Type().Field(i).Name); s != "" {
				return s
			}
		}
	case reflect.Slice, reflect.Array:
		if a.Len() != b.Len() {
			return fmt.Sprintf("%s: %d elements, want %d", at, a.Len(), b.Len())
		}
		for i := range a.Len() {
			if s := differs(a.Index(i), b.Index(i), fmt.Sprintf("%s[%d]", at, i)); s != "" {
				return s
			}
		}
	case reflect.Pointer:
		if a.IsNil() != b.IsNil() {
			return fmt.Sprintf("%s: one is nil", at)
		} else if !a.IsNil() {
			return differs(a.Elem(), b.Elem(), at)
		}
	default:
		if !a.Equal(b) {
			return fmt.Sprintf("%s: %v, want %v", at, a, b)
		}
	}
	return ""
}

// TestKasminaMachineCopies shows that the lattice's state goes up when it has changed, and only then, and that no run waits
// for a report.
func TestKasminaMachineCopies(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	k := newKasminaGraph(t, 1, nil)
	m := k.open(t, device, fakeOption, WithStrict())
	defer m.Close()
	copies := func() int64 {
		before := device.ctx.Stats()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		return device.ctx.Stats().Sub(before).ToDevice.Count
	}
	first := copies()
	for range 3 {
		if n := copies(); n != first-1 {
			t.Errorf("%d copies to the device in a run in which the lattice has not changed, %d in the first", n, first)
		}
	}
	if err := k.lattice.SetAlpha(2, 0.9); err != nil {
		t.Fatal(err)
	}
	if n := copies(); n != first {
		t.Errorf("%d copies to the device in a run in which the lattice has changed, want %d", n, first)
	}
	if err := m.runner.Settle(); err != nil {
		t.Fatal(err)
	}
	if n := len(k.lattice.History()); n == 0 {
		t.Error("no report has arrived")
	}
}

func TestKasminaMachineNonFinite(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	k := newKasminaGraph(t, 2, nil, op.StopOnNonFinite())
	m := k.open(t, device, fakeOption)
	defer m.Close()
	k.draw(t, 3, func(x []float32) { x[5] = float32(math.NaN()) })
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	_, err := m.Value(k.loss)
	if !errors.Is(err, op.ErrNonFinite) {
		t.Errorf("the error is %v, want one that wraps op.ErrNonFinite", err)
	}
	if _, err := m.Value(k.loss); err != nil {
		t.Errorf("it is reported twice: %v", err)
	}
}

// ownKind is a registered blueprint, which has no kernel.
var ownKind = sync.OnceValues(func() (blueprints.Kind, error) {
	b, err := blueprints.Lookup(blueprints.MLPExpansion)
	if err != nil {
		return 0, err
	}
	own := *b
	own.Name = "machine test's own"
	return blueprints.Register(own)
})

// TestKasminaMachineOwnBlueprint has a registered blueprint come to a layer that was lowered before, and must not be computed on
// the host.
func TestKasminaMachineOwnBlueprint(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	kind, err := ownKind()
	if err != nil {
		t.Fatal(err)
	}
	k := newKasminaGraph(t, 4, nil)
	m := k.open(t, device, fakeOption, WithStrict())
	defer m.Close()
	if err := k.lattice.RequestGermination(k.seeds-1, state.GerminationRequest{Slot: 5, Kind: kind}); err != nil {
		t.Fatal(err)
	}
	if err := m.RunAll(); err != nil {
		t.Errorf("a seed that has only germinated: %v", err)
	}
	if err := k.lattice.Transition(k.seeds-1, state.Training); err != nil {
		t.Fatal(err)
	}
	if err := m.RunAll(); !errors.Is(err, kasmina.ErrKind) {
		t.Errorf("the error is %v, want one that wraps ErrKind", err)
	}
}

// TestKasminaOnHost wants a layer with a registered blueprint to be computed on the host in a graph whose other ops are on the
// device, as right and as well reported as there, with one warning.
func TestKasminaOnHost(t *testing.T) {
	clipped := []op.KasminaOption{op.WithGradClip(0.05)}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testKasminaOnHost(t, device, 1e-5, clipped, fakeOption)
	})
	t.Run("scaled", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testKasminaOnHost(t, device, 1e-5, clipped, fakeOption, scaledGradients)
	})
	t.Run("GPU", func(t *testing.T) { testKasminaOnHost(t, openGPU(t), 1e-5, clipped) })
	t.Run("float16", func(t *testing.T) { testKasminaOnHost(t, openGPU(t), 1e-2, nil, WithPrecision(Float16)) })
}

func testKasminaOnHost(t *testing.T, device *Device, tolerance float64, layer []op.KasminaOption, opts ...MachineOption) {
	kind, err := ownKind()
	if err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	graph := func() *kasminaGraph {
		k := newWideKasminaGraph(t, seed, 13, nil, layer...)
		if err := k.lattice.RequestGermination(k.seeds-1, state.GerminationRequest{Slot: 5, Kind: kind}); err != nil {
			t.Fatal(err)
		}
		for _, s := range []state.Stage{state.Training, state.Grafting} {
			if err := k.lattice.Transition(k.seeds-1, s); err != nil {
				t.Fatal(err)
			}
		}
		if err := k.lattice.SetAlpha(k.seeds-1, 0.7); err != nil {
			t.Fatal(err)
		}
		return k
	}
	a, b := graph(), graph()
	var log bytes.Buffer
	m := a.open(t, device, append(opts, WithLogger(slog.New(slog.NewTextHandler(&log, nil))))...)
	defer m.Close()
	tape := gorgonia.NewTapeMachine(b.g)
	defer tape.Close()
	for step := range uint64(3) {
		a.draw(t, seed+step, nil)
		b.draw(t, seed+step, nil)
		tape.Reset()
		if err := errors.Join(m.RunAll(), tape.RunAll()); err != nil {
			t.Fatal(err)
		}
		nodes := gorgonia.Nodes{a.loss, a.x.Deriv(), a.weights.Deriv(), a.scales.Deriv()}
		for i, want := range (gorgonia.Nodes{b.loss, b.x.Deriv(), b.weights.Deriv(), b.scales.Deriv()}) {
			v, err := m.Value(nodes[i])
			if err != nil {
				t.Fatal(err)
			}
			if d := distance(t, v, want.Value()); !(d < tolerance) {
				t.Errorf("step %d: value %d differs by %.2g", step, i, d)
			}
		}
		if tolerance < 1e-4 {
			sameReports(t, fmt.Sprintf("step %d", step), a.lattice.Report(), b.lattice.Report())
		}
	}
	text := log.String()
	if n := strings.Count(text, "computed on the host"); n != 1 || strings.Count(text, "\n") != 1 || !strings.Contains(text, "machine test's own") {
		t.Errorf("%d warnings, want one that names the kind: %s", n, text)
	}
	_, err = NewMachine(device, a.g, append(opts, WithStrict(), WithParams(a.weights, a.scales))...)
	if err == nil || !strings.Contains(err.Error(), "Kasmina") || !strings.Contains(err.Error(), "the kind has no kernel, and WithStrict forbids") {
		t.Errorf("got %v, want an error that names the op and why", err)
	}
}
