package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/seed"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	kasminakernel "github.com/kasmina-go/kasmina/internal/cpu/kasmina"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// kasminaPlan reads the state of a layer from the device.
func kasminaPlan(l *fake.Launch, k kasmina.Layer,
	r seed.Reduction) (*kasminakernel.Layer[float32], [][]float32) {
	n, width := k.State.Seeds, k.Chunk
	words := slices.Clone(fake.Slice[uint32](l, k.State.Ptr, k.State.Bytes()/4))
	if k.State.Wide {
		width = k.Width
		list := words[(k.State.List()-k.State.Ptr)/4:]
		for i := range list[0] {
			words[list[1+i]] = list[1+n+int(i)]
		}
	}

	field := func(i int) []float32 { return fake.Slice[float32](l, k.State.Ptr.Offset(4*i*n), n) }
	p := &kasminakernel.Layer[float32]{Rows: k.Rows, Seeds: n, Chunk: k.Chunk, Slots: k.State.Slots,
		Width: width, Eps: k.Eps,
		Stability: k.Stability,
		Reduce:    r,
		Measure:   make([]bool, n)}
	for i, w := range words[:n] {
		p.Measure[i] = true
		if w == 0 {
			continue
		}
		err := p.Activate(i, seed.Seed{Slot: uint16(w >> 16), Kind: blueprints.Kind(w & 0xff),
			Blend: w>>8&1 == 1,
			Learn: w>>9&1 == 1, Alpha: field(1)[i], Low: float64(field(2)[i]),
			High: float64(field(3)[i])})
		if err != nil {
			panic(err)
		}
	}

	limits := field(4)
	for _, v := range limits {
		p.Limit = append(p.Limit, float64(v))
	}

	return p, [][]float32{floatsAt(l, k.X, k.Rows*n*k.Chunk),
		floatsAt(l, k.Weights, k.State.Slots*width), floatsAt(l, k.Scales, k.State.Slots)}
}

func (k *fakeKernels) KasminaForward(l *fake.Launch, f kasmina.Forward) {
	p, in := kasminaPlan(l, f.Layer, f.Reduction)
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
}

func (k *fakeKernels) KasminaBackward(l *fake.Launch, b kasmina.Backward) {
	p, in := kasminaPlan(l, b.Layer, b.Reduction)
	if !b.Clip {
		p.Limit = nil
	}

	g := floatsAt(l, b.G, len(in[0]))
	if b.DX == b.G {
		g = slices.Clone(g)
	}

	p.Backward(floatsAt(l, b.DX, len(in[0])), floatsAt(l, b.DWeights, len(in[1])),
		floatsAt(l, b.DScales, len(in[2])), g, in[0], in[1], in[2])
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
}

// kasminaGraph is the cross-entropy of a Kasmina layer y of x. The seeds of its lattice are in many
// stages.
type kasminaGraph struct {
	g                       *gorgonia.ExprGraph
	x, weights, scales      *gorgonia.Node
	loss                    *gorgonia.Node
	lattice                 *state.Lattice
	rows, seeds, chunk, dim int
}

const kasminaTestSlots = 9

func newKasminaGraph(t testing.TB, seed uint64, opts []state.Option,
	layer ...op.KasminaOption) *kasminaGraph {
	t.Helper()
	return newWideKasminaGraph(t, seed, 3, opts, layer...)
}

// newWideKasminaGraph returns a graph with slots of the given number of weights, and seeds of all kinds
// that fit.
func newWideKasminaGraph(t testing.TB, seed uint64, width int, opts []state.Option,
	layer ...op.KasminaOption) *kasminaGraph {
	t.Helper()
	k := &kasminaGraph{g: gorgonia.NewGraph(), rows: 6, seeds: 8, chunk: 3}
	kinds := []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate,
		blueprints.MLPExpansion, blueprints.ConvFilter}
	if width > k.chunk {
		kinds = []blueprints.Kind{blueprints.LowRank, blueprints.Residual, blueprints.ChunkMLP,
			blueprints.LowRank, blueprints.ChunkMLP}
	}

	k.dim = k.seeds * k.chunk
	r := rand.New(rand.NewPCG(seed, 7))
	k.x = randomNode(k.g, r, 1, "x", k.rows, k.dim)
	k.weights = randomNode(k.g, r, 1, "weights", kasminaTestSlots, width)
	k.scales = randomNode(k.g, r, 1, "scales", kasminaTestSlots)
	target := intNode(k.g, "targets", []int{1, 7, 22, 0, 9, 5})
	must := gorgonia.Must
	var err error
	k.lattice, err = state.NewLattice(k.seeds, k.dim, append(opts, state.WithoutGates())...)
	require.NoError(t, err)
	path := []state.Stage{state.Training, state.Grafting, state.Stabilization, state.Evaluating,
		state.FineTuning, state.Fossilized}
	for i := range k.seeds - 1 {
		request := state.GerminationRequest{Slot: 1 + i%4, Kind: kinds[i%len(kinds)]}
		require.NoError(t, k.lattice.RequestGermination(i, request))
		for _, s := range path[:min(i, len(path))] {
			require.NoError(t, k.lattice.Transition(i, s))
			if s == state.Grafting {
				require.NoError(t, k.lattice.SetAlpha(i, 0.1+0.1*float64(i)))
			}
		}
	}

	y := must(op.Kasmina(k.x, k.weights, k.scales, k.lattice, layer...))
	k.loss = must(op.CrossEntropy(y, target))
	require.NoError(t, errOf(gorgonia.Grad(k.loss, k.x, k.weights, k.scales)))
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

	require.NoError(t, gorgonia.Let(k.x, tensor.New(tensor.WithShape(k.rows, k.dim),
		tensor.WithBacking(x))))
}

// open returns a machine for the graph.
func (k *kasminaGraph) open(t testing.TB, device *Device, opts ...MachineOption) *Machine {
	t.Helper()
	m, err := NewMachine(device, k.g, append(opts, WithParams(k.weights, k.scales),
		WithOutputs(k.loss, k.x.Deriv()))...)
	require.NoError(t, err)
	return m
}

// TestKasminaMachine runs a layer on a Machine and on the tape machine while the lattice advances, and
// compares gradients and reports.
func TestKasminaMachine(t *testing.T) {
	for name, c := range map[string]struct {
		lattice []state.Option
		layer   []op.KasminaOption
	}{
		"default":  {},
		"strict":   {layer: []op.KasminaOption{op.WithStability(op.Strict), op.WithGradClip(1.5)}},
		"adaptive": {layer: []op.KasminaOption{op.WithAdaptiveGradClip(0.1)}},
		"mean": {lattice: []state.Option{state.WithTelemetry(
			state.Telemetry{Reduction: state.MeanOfRows})}},
		"debug": {lattice: []state.Option{state.WithTelemetry(state.Telemetry{Mode: state.Debug,
			Reduction: state.MaxOfRows})}},
		"sampling": {lattice: []state.Option{state.WithTelemetry(
			state.Telemetry{Mode: state.Sampling, Every: 2, Share: 0.5})}},
		"off":   {lattice: []state.Option{state.WithTelemetry(state.Telemetry{Mode: state.Off})}},
		"quiet": {layer: []op.KasminaOption{op.WithoutTelemetry()}},
	} {
		// slots as wide as chunks, and slots with room for kinds that mix features
		for _, width := range []int{3, 13} {
			name := fmt.Sprintf("%s/%d", name, width)
			t.Run(name+"/fake", func(t *testing.T) {
				device, _ := openFake(t, fake.Config{})
				compareKasmina(t, device, width, c.lattice, c.layer, WithStrict())
			})
			t.Run(name+"/scaled", func(t *testing.T) {
				device, _ := openFake(t, fake.Config{})
				compareKasmina(t, device, width, c.lattice, c.layer, WithStrict(), scaledGradients)
			})
			if testing.Short() && rand.IntN(2) == 0 {
				continue
			}
			t.Run(name+"/GPU", func(t *testing.T) {
				compareKasmina(t, openGPU(t), width, c.lattice, c.layer, WithStrict())
			})
		}
	}
}

func compareKasmina(t *testing.T, device *Device, width int, lattice []state.Option,
	layer []op.KasminaOption, opts ...MachineOption) {
	t.Helper()
	seed := randomSeed(t)
	a, b := newWideKasminaGraph(t, seed, width, lattice, layer...),
		newWideKasminaGraph(t, seed, width, lattice, layer...)
	m := a.open(t, device, opts...)
	defer m.Close()
	tape := tapeMachine(t, b.g)
	for step := range uint64(few(7, 5)) {
		for _, k := range []*kasminaGraph{a, b} {
			k.draw(t, seed+step, func(x []float32) {
				for i := 5; i < len(x); i += 7 { // strict mode passes the gradients of zeros
					x[i] = 0
				}
			})
			if step == 3 {
				require.NoError(t, k.lattice.SetTelemetry(state.Telemetry{Mode: state.Debug,
					Reduction: state.MaxOfRows}))
			}
			require.NoError(t, errOf(k.lattice.StepEpoch(state.Metrics{})))
		}
		tape.Reset()
		require.NoError(t, errors.Join(m.RunAll(), tape.RunAll()))
		// Gradients of slots are sums over all rows. Both machines round them, in a different order.
		sameAsTape(t, m, a, b, 1e-5, 1e-4)
		sameReports(t, fmt.Sprintf("step %d", step), a.lattice.Report(), b.lattice.Report())
	}

	sameReports(t, "history", a.lattice.History(), b.lattice.History())
}

// sameAsTape compares the loss and the gradients of a graph a on a machine against the same graph b on
// Gorgonia's tape machine. The tolerances are for the gradient of x, and for the gradients of weights and
// scales.
func sameAsTape(t *testing.T, m *Machine, a, b *kasminaGraph, x, slots float64) {
	t.Helper()
	of := func(k *kasminaGraph) gorgonia.Nodes {
		return gorgonia.Nodes{k.loss, k.x.Deriv(), k.weights.Deriv(), k.scales.Deriv()}
	}
	for i, n := range of(a) {
		tolerance := []float64{x, x, slots, slots}[i]
		require.Less(t, distance(t, valueIn(t, m, n), of(b)[i].Value()), tolerance, i)
	}
}

// sameReports compares all numbers in two structures, up to the precision of the lattice's bfloat16
// numbers.
func sameReports(t testing.TB, at string, got, want any) {
	t.Helper()
	require.Empty(t, differs(reflect.ValueOf(got), reflect.ValueOf(want), at))
}

func differs(a, b reflect.Value, at string) string {
	switch a.Kind() {
	case reflect.Float32, reflect.Float64: // one may be rounded up to a bfloat16, the other down
		if x, y := a.Float(), b.Float(); !(math.Abs(x-y) <= 0x1.01p-7*math.Abs(y)+1e-6) {
			return fmt.Sprintf("%s: %v, want %v", at, x, y)
		}
	case reflect.Struct:
		// times differ between machines
		if layer, ok := a.Interface().(state.LayerReport); ok {
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

// TestKasminaMachineNonFinite checks that a layer with the option reports a NaN once, and that the
// errors of equal runs are equal, although their lattices have different numbers.
func TestKasminaMachineNonFinite(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	var messages []string
	for range 2 {
		k := newKasminaGraph(t, 2, nil, op.StopOnNonFinite())
		m := k.open(t, device)
		defer m.Close()
		k.draw(t, 3, func(x []float32) { x[5] = float32(math.NaN()) })
		require.NoError(t, m.RunAll())
		_, err := m.Value(k.loss)
		require.ErrorIs(t, err, op.ErrNonFinite)
		require.NoError(t, errOf(m.Value(k.loss)))
		messages = append(messages, err.Error())
	}
	require.Equal(t, messages[0], messages[1])
}

// ownKind returns a registered blueprint, which has no kernel.
var ownKind = sync.OnceValues(func() (blueprints.Kind, error) {
	b, err := blueprints.Lookup(blueprints.MLPExpansion)
	if err != nil {
		return 0, err
	}
	own := *b
	own.Name = "machine test's own"
	return blueprints.Register(own)
})

// OwnKind exports ownKind to the external test package.
func OwnKind() (blueprints.Kind, error) { return ownKind() }

// TestKasminaMachineOwnBlueprint checks the error of WithStrict when a seed with a registered blueprint
// starts to train in a layer that has already been compiled for the device.
func TestKasminaMachineOwnBlueprint(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	kind, err := ownKind()
	require.NoError(t, err)
	k := newKasminaGraph(t, 4, nil)
	m := k.open(t, device, WithStrict())
	defer m.Close()
	require.NoError(t, k.lattice.RequestGermination(k.seeds-1, state.GerminationRequest{Slot: 5,
		Kind: kind}))
	require.NoError(t, m.RunAll())
	require.NoError(t, k.lattice.Transition(k.seeds-1, state.Training))
	require.ErrorContains(t, m.RunAll(), "the kind has no kernel")
}

// TestKasminaOnHost checks that a layer with a registered blueprint is computed on the host in a graph
// with other ops on the device, with one warning and with the same results and reports as on the CPU.
func TestKasminaOnHost(t *testing.T) {
	onEach(t, testKasminaOnHost, map[string]float64{"fake": 1e-5, "scaled": 1e-5, "float32": 1e-5,
		"float16": 1e-2})
}

func testKasminaOnHost(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	var layer []op.KasminaOption
	if tolerance < 1e-2 { // in float16, rounding may change which gradients are clipped
		layer = append(layer, op.WithGradClip(0.05))
	}

	kind, err := ownKind()
	require.NoError(t, err)
	seed := randomSeed(t)
	graph := func() *kasminaGraph {
		k := newWideKasminaGraph(t, seed, 13, nil, layer...)
		k.germinate(t, kind)
		return k
	}
	a, b := graph(), graph()
	var log bytes.Buffer
	m := a.open(t, device, append(opts, logTo(&log))...)
	defer m.Close()
	tape := tapeMachine(t, b.g)
	for step := range uint64(3) {
		a.draw(t, seed+step, nil)
		b.draw(t, seed+step, nil)
		tape.Reset()
		require.NoError(t, errors.Join(m.RunAll(), tape.RunAll()))
		sameAsTape(t, m, a, b, tolerance, tolerance)
		if tolerance < 1e-4 {
			sameReports(t, fmt.Sprintf("step %d", step), a.lattice.Report(), b.lattice.Report())
		}
	}

	text := log.String()
	require.Equal(t, 1, strings.Count(text, "computed on the host"), text)
	require.Equal(t, 1, strings.Count(text, "\n"), text)
	require.Contains(t, text, "machine test's own")
	_, err = NewMachine(device, a.g, append(opts, WithStrict(), WithParams(a.weights, a.scales))...)
	require.ErrorContains(t, err, "Kasmina")
	require.ErrorContains(t, err, "the kind has no kernel, and WithStrict forbids")
}

// TestKasminaFreshWeights checks that slots of zeros are initialized with the same identity start on a
// device as on a CPU when a seed starts to compute with them. Weights and scales are parameters or are
// sent before every run, and the layer is computed on the device or on the host.
func TestKasminaFreshWeights(t *testing.T) {
	onEach(t, testFreshWeights, map[string]float64{"fake": 1e-5, "float32": 1e-5})
}

func testFreshWeights(t *testing.T, device *Device, tolerance float64, opts ...MachineOption) {
	own, err := ownKind()
	require.NoError(t, err)
	seed := randomSeed(t)
	for _, kind := range []blueprints.Kind{blueprints.AttentionGate, blueprints.LowRank, own} {
		for _, params := range []bool{true, false} {
			a, b := freshGraph(t, seed, kind), freshGraph(t, seed, kind)
			with := append(opts[:len(opts):len(opts)],
				WithOutputs(a.loss, a.x.Deriv(), a.weights.Deriv()))
			if params {
				with = append(with, WithParams(a.weights, a.scales))
			}
			m, err := NewMachine(device, a.g, with...)
			require.NoError(t, err)
			tape := gorgonia.NewTapeMachine(b.g)
			for step := range uint64(4) {
				if step == 2 { // the other seeds have started before the first run
					a.germinate(t, kind)
					b.germinate(t, kind)
				}
				a.draw(t, seed+step, nil)
				b.draw(t, seed+step, nil)
				tape.Reset()
				require.NoError(t, m.RunAll())
				require.NoError(t, tape.RunAll())
				for i, n := range []*gorgonia.Node{a.loss, a.x.Deriv(), a.weights.Deriv()} {
					got := valueIn(t, m, n)
					want := []*gorgonia.Node{b.loss, b.x.Deriv(), b.weights.Deriv()}[i].Value()
					require.Less(t, distance(t, got, want), tolerance,
						"%v, parameters %v, step %d, value %d",
						kind, params, step, i)
				}
			}
			require.NoError(t, m.Download())
			require.Equal(t, b.weights.Value().Data(), a.weights.Value().Data(),
				"%v, parameters %v", kind,
				params)
			require.Equal(t, b.scales.Value().Data(), a.scales.Value().Data(),
				"%v, parameters %v", kind,
				params)
			require.NotZero(t, b.scales.Value().Data().([]float32)[5])
			require.NoError(t, m.Close())
			require.NoError(t, tape.Close())
		}
	}
}

// freshGraph returns a graph with wide slots that are all zero.
func freshGraph(t *testing.T, seed uint64, kind blueprints.Kind) *kasminaGraph {
	k := newWideKasminaGraph(t, seed, 13, nil)
	require.NoError(t, gorgonia.Let(k.weights,
		tensor.New(tensor.WithShape(k.weights.Shape()...), tensor.Of(tensor.Float32))))
	require.NoError(t, gorgonia.Let(k.scales,
		tensor.New(tensor.WithShape(k.scales.Shape()...), tensor.Of(tensor.Float32))))
	return k
}

// germinate makes the last seed graft a kind in slot 5.
func (k *kasminaGraph) germinate(t *testing.T, kind blueprints.Kind) {
	require.NoError(t, k.lattice.RequestGermination(k.seeds-1,
		state.GerminationRequest{Slot: 5, Kind: kind}))
	require.NoError(t, k.lattice.Transition(k.seeds-1, state.Training))
	require.NoError(t, k.lattice.Transition(k.seeds-1, state.Grafting))
	require.NoError(t, k.lattice.SetAlpha(k.seeds-1, 0.7))
}

// ownLife lists the stages of a seed with a registered kind, and whether its layer is computed on the
// host in each stage.
var ownLife = []struct {
	to     state.Stage
	onHost bool
}{{state.Dormant, false}, {state.Germinated, false}, {state.Training, true}, {state.Grafting, true},
	{state.FineTuning, true},
	{state.RolledBack, false}}

// live moves a seed of the given kind to the next stage in ownLife.
func live(l *state.Lattice, seed int, to state.Stage, kind blueprints.Kind) error {
	switch to {
	case state.Dormant:
		return nil
	case state.Germinated:
		return l.RequestGermination(seed, state.GerminationRequest{Slot: 3, Kind: kind})
	case state.Grafting:
		return errors.Join(l.Transition(seed, to), l.SetAlpha(seed, 0.7))
	case state.FineTuning:
		return errors.Join(l.Transition(seed, state.Stabilization),
			l.Transition(seed, state.Evaluating), l.Transition(seed, to))
	}

	return l.Transition(seed, to)
}

// TestKasminaMovesToHost checks that a layer is computed on the host from the moment a registered kind
// starts to train, with one warning that names the kind, and on the device again when the kind is gone.
// Results and reports must be the same as on the CPU throughout, with runs captured on the device before
// and after.
func TestKasminaMovesToHost(t *testing.T) {
	for _, width := range []int{3, 13} {
		for name, layer := range map[string][]op.KasminaOption{
			"default": {op.WithGradClip(0.05)}, "strict": {op.WithStability(op.Strict)},
			"adaptive": {op.WithAdaptiveGradClip(0.1)},
		} {
			t.Run(fmt.Sprintf("%s/%d", name, width), func(t *testing.T) {
				device, _ := openFake(t, fake.Config{})
				testKasminaMovesToHost(t, device, width, layer)
				testKasminaMovesToHost(t, device, width, layer, scaledGradients)
				testKasminaMovesToHost(t, device, width, layer, WithMonitor(2))
			})
		}
	}

	t.Run("GPU", func(t *testing.T) { testKasminaMovesToHost(t, openGPU(t), 3, nil) })
}

func testKasminaMovesToHost(t *testing.T, device *Device, width int, layer []op.KasminaOption,
	opts ...MachineOption) {
	kind, err := ownKind()
	require.NoError(t, err)
	seed := randomSeed(t)
	a, b := newWideKasminaGraph(t, seed, width, nil, layer...),
		newWideKasminaGraph(t, seed, width, nil, layer...)
	var log bytes.Buffer
	counter := counting(device)
	m := a.open(t, device, append(opts, logTo(&log))...)
	defer m.Close()
	tape := tapeMachine(t, b.g)
	for _, c := range ownLife {
		for step := range uint64(3) {
			at := fmt.Sprintf("%v, step %d", c.to, step)
			for _, k := range []*kasminaGraph{a, b} {
				k.draw(t, seed+step, nil)
				if step == 0 {
					require.NoError(t, live(k.lattice, k.seeds-1, c.to, kind))
				}
			}
			tape.Reset()
			counter.take()
			require.NoError(t, errors.Join(m.RunAll(), tape.RunAll()), at)
			captured := counter.take().graphs > 0
			require.Equal(t, c.onHost, m.runner.OnHost(), at)
			require.Equal(t, !c.onHost && (step > 0 || c.to != state.Dormant), captured, at)
			sameAsTape(t, m, a, b, 1e-4, 1e-4)
			sameReports(t, at, a.lattice.Report(), b.lattice.Report())
		}
	}

	sameReports(t, "history", a.lattice.History(), b.lattice.History())
	require.Equal(t, 1, strings.Count(log.String(), "has no kernel"), log.String())
	require.Contains(t, log.String(), `machine test's own`)
}

// grafted returns the training graph of a model of two blocks, each followed by a Kasmina layer. Half of
// the layers' seeds blend.
func grafted(t *testing.T, seed uint64, opts ...llm.GraphOption) *batch {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: 64, Layers: 2, Heads: 2, Seq: 33,
		Kasmina: []int{0, 1}, Seeds: 8}.Default()
	m, err := llm.NewModel(c, tensor.Float32, seed, state.WithoutGates())
	require.NoError(t, err)
	for i, l := range m.Kasmina.Lattices() {
		for s := 0; s < c.Seeds; s += 2 {
			r := state.GerminationRequest{Slot: 1 + s, Kind: blueprints.Kind((i + s/2) % 4)}
			err := errors.Join(m.Germinate(i, s, r), l.Transition(s, state.Training),
				l.Transition(s, state.Grafting), l.SetAlpha(s, 0.5))
			require.NoError(t, err)
		}
	}

	g, err := m.Graph(llm.ForTraining, 4, opts...)
	require.NoError(t, err)
	b := &batch{Graph: g}
	b.draw(t, seed)
	return b
}

// gradientsOfLayers returns the gradients of the results of all Kasmina layers.
func gradientsOfLayers(g *gorgonia.ExprGraph) (all gorgonia.Nodes) {
	for _, n := range g.AllNodes() {
		if isOp[*op.KasminaGradOp](n) {
			all = append(all, graph.Children(n)[4])
		}
	}
	return all
}

func inPlaceTasks(m *Machine) (n int) {
	for _, t := range m.runner.Program.Calls {
		if o := t.InPlace; o.From != nil && o.From.Ptr() == o.To.Ptr() {
			n++
		}
	}
	return n
}

// TestKasminaInPlace checks that the gradient of a layer's input overwrites the gradient of its result if
// nothing else reads the latter and it is not an output. The bits must be the same in either place, and
// with a monitor, which runs the pass more than once.
func TestKasminaInPlace(t *testing.T) {
	onEach(t, compareInPlace, exactly("fake", "bfloat16"))
}

func compareInPlace(t *testing.T, device *Device, _ float64, opts ...MachineOption) {
	t.Helper()
	opts = append(opts, WithTuning(TuneOff))
	seed := randomSeed(t)
	type variant struct {
		name string
		kept func(*gorgonia.ExprGraph) gorgonia.Nodes
		opts []MachineOption
		want int // number of tasks in place
	}

	none := func(*gorgonia.ExprGraph) gorgonia.Nodes { return nil }
	var want [][]float32
	for _, w := range []variant{{"in place", none, nil, 2}, {"kept", gradientsOfLayers, nil, 0},
		{"with a monitor", none, []MachineOption{WithMonitor(3)}, 2}} {
		b := grafted(t, seed)
		m := newFuseMachine(t, device, b.G, b.Params,
			append(gorgonia.Nodes{b.Loss}, w.kept(b.G)...), append(w.opts, opts...))
		require.Equal(t, w.want, inPlaceTasks(m), w.name)
		var got [][]float32
		for step := range uint64(7) {
			b.draw(t, seed+step)
			require.NoError(t, m.RunAll())
			for _, p := range b.Params {
				got = append(got, append([]float32(nil), flat(t, valueIn(t, m, p.Deriv()))...))
			}
		}
		if want == nil {
			want = got
			continue
		}
		for i := range got {
			for j, v := range got[i] {
				if math.Float32bits(v) != math.Float32bits(want[i][j]) {
					t.Fatalf("%s: in step %d the gradient of %v is %v at %d, in place %v", w.name,
						i/len(b.Params), b.Params[i%len(b.Params)], v, j,
						want[i][j])
				}
			}
		}
	}
}

// TestKasminaReplaced checks that Value returns an error for a gradient that has been overwritten, even
// though its memory outlasts the run.
func TestKasminaReplaced(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	b := grafted(t, 1)
	keep, replaced := gorgonia.Nodes{b.Loss}, gradientsOfLayers(b.G)
	for _, n := range b.G.AllNodes() {
		if o, ok := n.Op().(*opbase.PartOp); ok && o.Offset == 0 &&
			isOp[*op.KasminaGradOp](graph.Children(n)[0]) {
			keep = append(keep, n)
		}
	}

	m := newFuseMachine(t, device, b.G, b.Params, keep, nil)
	require.Equal(t, len(replaced), inPlaceTasks(m))
	require.Len(t, keep, 1+len(replaced))
	require.NoError(t, m.RunAll())
	for _, n := range keep {
		require.NoError(t, errOf(m.Value(n)))
	}

	for _, n := range replaced {
		require.Error(t, errOf(m.Value(n)), "%v, which another gradient has replaced", n)
	}
}

// TestKasminaNotInPlace checks gradients that cannot be overwritten, because something else reads them or
// because they are not in the arena.
func TestKasminaNotInPlace(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	open := func(g *gorgonia.ExprGraph, params gorgonia.Nodes, keep ...*gorgonia.Node) *Machine {
		t.Helper()
		return newFuseMachine(t, device, g, params, keep, nil)
	}
	k := newKasminaGraph(t, 1, nil)
	require.LessOrEqual(t, inPlaceTasks(open(k.g, gorgonia.Nodes{k.weights, k.scales}, k.loss)), 0)
	b := grafted(t, 1)
	g := gradientsOfLayers(b.G)[0]
	twice, err := gorgonia.Add(g, g)
	require.NoError(t, err)
	require.Equal(t, 1, inPlaceTasks(open(b.G, b.Params, b.Loss, twice)))
}

// directions counts norms that process rows in ascending and in descending order.
type directions struct {
	run.Launcher
	ascending, descending int
}

func (k *directions) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(norm.RMSNorm); ok && a.Ascending {
		k.ascending++
	} else if ok {
		k.descending++
	}
	return k.Launcher.Launch(s, params)
}

// TestNormsAfterKasmina checks that a norm starts with the rows that the preceding layer has written
// last: the first rows after a Kasmina layer.
func TestNormsAfterKasmina(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	k := &directions{}
	b := grafted(t, 1)
	m := newFuseMachine(t, device, b.G, b.Params, gorgonia.Nodes{b.Loss},
		[]MachineOption{
			withKernels(func(inner run.Launcher) run.Launcher { k.Launcher = inner; return k })})
	require.NoError(t, m.RunAll())
	// There are two norms in each block, the second one of a sum, and a last norm.
	runs := k.ascending / 2
	require.NotZero(t, runs)
	require.Equal(t, []int{2 * runs, 3 * runs}, []int{k.ascending, k.descending})
}

// kasminaChain is a loss of several Kasmina layers with different lattices, each applied to the result of
// the previous one.
type kasminaChain struct {
	loss     *gorgonia.Node
	params   gorgonia.Nodes
	lattices []*state.Lattice
}

func newKasminaChain(t *testing.T, seed uint64, telemetry []state.Telemetry,
	seeds []int, layer ...op.KasminaOption) *kasminaChain {
	t.Helper()
	const rows, d, slots = 6, 24, 4
	k, g, r := &kasminaChain{}, gorgonia.NewGraph(), rand.New(rand.NewPCG(seed, 5))
	y := randomNode(g, r, 1, "x", rows, d)
	for i, n := range seeds {
		l, err := state.NewLattice(n, d, state.WithoutGates(), state.WithTelemetry(telemetry[i]))
		require.NoError(t, err)
		for s := range n - 1 {
			kind := []blueprints.Kind{blueprints.Residual, blueprints.MLPExpansion}[s%2]
			err := l.RequestGermination(s,
				state.GerminationRequest{Slot: 1 + s%(slots-1), Kind: kind})
			for _, stage := range []state.Stage{state.Training, state.Grafting,
				state.Stabilization}[:1+s%3] {
				if err = errors.Join(err, l.Transition(s, stage)); stage == state.Grafting {
					err = errors.Join(err, l.SetAlpha(s, 0.3))
				}
			}
			require.NoError(t, err)
		}
		w := randomNode(g, r, 1, fmt.Sprintf("w%d", i), slots, d/n)
		a := randomNode(g, r, 1, fmt.Sprintf("a%d", i), slots)
		y, err = op.Kasmina(y, w, a, l, layer...)
		require.NoError(t, err)
		k.params, k.lattices = append(k.params, w, a), append(k.lattices, l)
	}

	target := intNode(g, "target", []int{3, 1, 4, 1, 5, 9})
	var err error
	if k.loss, err = op.CrossEntropy(y, target); err == nil {
		_, err = gorgonia.Grad(k.loss, k.params...)
	}

	require.NoError(t, err)
	return k
}

// TestKasminaReports checks that a run copies the measurements of all layers at once, and that gradients
// and reports are the same as on a tape machine.
func TestKasminaReports(t *testing.T) {
	seed := randomSeed(t)
	off, production := state.Telemetry{Mode: state.Off}, state.Telemetry{Mode: state.Production}
	debug, sampled := state.Telemetry{Mode: state.Debug},
		state.Telemetry{Mode: state.Sampling, Every: 2}
	mean := state.Telemetry{Mode: state.Production, Reduction: state.MeanOfRows}
	seeds := []int{8, 4, 2, 6}
	const all = 20
	for name, telemetry := range map[string][]state.Telemetry{
		"off":        {off, off, off, off},
		"production": {production, production, mean, production},
		"some":       {off, production, off, sampled},
		"histograms": {sampled, mean, debug, off},
	} {
		check := func(t *testing.T, device *Device, opts ...MachineOption) {
			a, b := newKasminaChain(t, seed, telemetry, seeds),
				newKasminaChain(t, seed, telemetry, seeds)
			counter := counting(device)
			m := openMachine(t, device, a.loss.Graph(), append(opts, WithParams(a.params...),
				WithOutputs(a.loss))...)
			tape := tapeMachine(t, b.loss.Graph())
			for step := range 5 {
				tape.Reset()
				counter.take()
				require.NoError(t, errors.Join(m.RunAll(), tape.RunAll()))
				want := copies{1, 4 * all * program.KasminaWords}
				for _, p := range a.params {
					// scales show whether the slots are still zero
					if step == 0 && p.Dims() == 1 {
						want.add(copies{1, int64(4 * p.Shape().TotalSize())})
					}
				}
				require.Equal(t, want, counter.take().down, step)
				for i, p := range a.params {
					require.Less(t, distance(t, valueIn(t, m, p.Deriv()),
						b.params[i].Deriv().Value()), 1e-4, "%v, %v", step, p.Name())
				}
			}
			for i, l := range a.lattices {
				sameReports(t, fmt.Sprintf("layer %d", i), l.Report(), b.lattices[i].Report())
				sameReports(t, fmt.Sprintf("history of layer %d", i), l.History(),
					b.lattices[i].History())
			}
		}
		t.Run(name+"/fake", func(t *testing.T) {
			device, _ := openFake(t, fake.Config{})
			check(t, device, WithStrict())
		})
		t.Run(name+"/GPU", func(t *testing.T) { check(t, openGPU(t), WithStrict()) })
	}
}

// TestKasminaFailedRun checks that no counts remain on the device after a run that fails in any of its
// launches: once the lattice is restored, the runs that follow are reported as if nothing had failed.
func TestKasminaFailedRun(t *testing.T) {
	seed := randomSeed(t)
	telemetry := []state.Telemetry{{Mode: state.Production}, {Mode: state.Production}}
	reports := func(fails int) (clips int, failed bool, reports []state.Report) {
		device, cuda := openFake(t, fake.Config{})
		k := newKasminaChain(t, seed, telemetry, []int{8, 4}, op.WithGradClip(1e-6))
		m, err := NewMachine(device, k.loss.Graph(), WithParams(k.params...), WithOutputs(k.loss))
		require.NoError(t, err)
		defer m.Close()

		if fails > 0 {
			before := make([][]byte, len(k.lattices))
			for i, l := range k.lattices {
				before[i], err = l.MarshalBinary()
				require.NoError(t, err)
			}
			cuda.Fail("cuLaunchKernel", fails, gpu.OutOfMemory)
			if failed = m.RunAll() != nil; !failed {
				return 0, false, nil
			}
			require.NoError(t, m.DropGradients())
			for i, l := range k.lattices {
				require.NoError(t, l.UnmarshalBinary(before[i]))
			}
		}

		require.NoError(t, errors.Join(m.RunAll(), m.RunAll(), m.DropGradients()))
		for _, l := range k.lattices {
			r := l.Report()
			clips, reports = clips+r.Layer.Clips, append(reports, r)
		}
		return clips, failed, reports
	}

	clips, _, want := reports(0)
	require.NotZero(t, clips, "no row was clipped, so the test proves nothing")
	for fails := 1; ; fails++ {
		_, failed, got := reports(fails)
		if !failed {
			require.Greater(t, fails, 4)
			return
		}
		sameReports(t, fmt.Sprintf("launch %d has failed", fails), got, want)
	}
}

// slowKasmina makes passes of Kasmina layers take the given times, and longer with telemetry.
type slowKasmina struct {
	run.Launcher
	fake                         *fakeKernels
	forward, backward, telemetry time.Duration
}

func (k *slowKasmina) Launch(s gpu.Stream, params any) error {
	if err := k.Launcher.Launch(s, params); err != nil {
		return err
	}

	took, measures := time.Duration(0), false
	switch p := params.(type) {
	case kasmina.Forward:
		took, measures = k.forward, p.Telemetry
	case kasmina.Backward:
		took, measures = k.backward, p.Telemetry
	default:
		return nil
	}

	if measures {
		took += k.telemetry
	}

	return k.fake.launch(s, func(l *fake.Launch) { l.Took = took })
}

// TestKasminaTiming checks that a machine with a monitor reports the time of passes and the cost of
// telemetry to the lattice, and otherwise computes bit-identical results, measurements and counts.
func TestKasminaTiming(t *testing.T) {
	seed := randomSeed(t)
	for _, mode := range []state.TelemetryMode{state.Production, state.Off} {
		opts := []state.Option{state.WithTelemetry(state.Telemetry{Mode: mode})}
		var graphs [2]*kasminaGraph
		var machines [2]*Machine
		for i := range graphs {
			device, _ := openFake(t, fake.Config{})
			slow := withKernels(func(k run.Launcher) run.Launcher {
				return &slowKasmina{Launcher: k, fake: fakeOf(k), forward: 2 * time.Millisecond,
					backward: 4 * time.Millisecond, telemetry: 300 * time.Microsecond}
			})
			graphs[i] = newKasminaGraph(t, seed, opts, op.WithGradClip(0.05))
			more := []MachineOption{slow, WithMonitor(3)}
			machines[i] = graphs[i].open(t, device, more[:1+i]...)
			defer machines[i].Close()
		}
		for step := range uint64(30) {
			for i, m := range machines {
				graphs[i].draw(t, seed+step, func(x []float32) { x[5] = float32(math.NaN()) })
				require.NoError(t, m.RunAll())
				require.NoError(t, errOf(m.Value(graphs[i].loss)))
			}
		}
		for _, n := range [][2]*node{{graphs[0].x.Deriv(), graphs[1].x.Deriv()},
			{graphs[0].weights.Deriv(), graphs[1].weights.Deriv()}} {
			var bits [2][]float32
			for i, m := range machines {
				bits[i] = flat(t, valueIn(t, m, n[i]))
			}
			for i, v := range bits[0] {
				require.Equal(t, math.Float32bits(bits[1][i]), math.Float32bits(v), n[0])
			}
		}
		plain, timed := graphs[0].lattice.Report(), graphs[1].lattice.Report()
		sameReports(t, "with a monitor", timed, plain)
		require.NotZero(t, plain.Layer.Clips, mode)
		require.NotZero(t, plain.Layer.Errors, mode)
		require.Zero(t, plain.Layer.Timed, mode)
		if l := timed.Layer; mode == state.Off {
			require.Zero(t, l.Timed)
			continue
		}
		k := graphs[1]
		// The passes move x and y, both gradients, and x again for seeds that are neither dormant nor
		// Residual.
		bytes, perRun := 4*float64(k.rows*(4*k.dim+5*k.chunk)), (6 * time.Millisecond).Seconds()
		l := timed.Layer
		if l.Timed < 2 || l.Timed != 2*machines[1].monitor.Samples ||
			math.Abs(l.Kernel.Seconds()/(perRun/2)-1) > 0.01 || math.Abs(l.Overhead-10) > 0.1 ||
			math.Abs(l.Bandwidth/(bytes/perRun)-1) > 0.01 {
			t.Errorf("%+v, want a kernel's time of %v s, 10%% of overhead and %v bytes/s", l,
				perRun/2, bytes/perRun)
		}
	}
}
