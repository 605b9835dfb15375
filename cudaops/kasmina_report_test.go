package cudaops

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// kasminaChain is a loss behind layers of different lattices, one on top of the other.
type kasminaChain struct {
	loss     *gorgonia.Node
	params   gorgonia.Nodes
	lattices []*state.Lattice
}

func newKasminaChain(t *testing.T, seed uint64, telemetry []state.Telemetry, seeds []int) *kasminaChain {
	t.Helper()
	const rows, d, slots = 6, 24, 4
	k, g, r := &kasminaChain{}, gorgonia.NewGraph(), rand.New(rand.NewPCG(seed, 5))
	node := func(name string, shape ...int) *gorgonia.Node {
		x := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return gorgonia.NewTensor(g, tensor.Float32, len(shape), gorgonia.WithShape(shape...), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))))
	}
	y := node("x", rows, d)
	for i, n := range seeds {
		l, err := state.NewLattice(n, d, state.WithoutGates(), state.WithTelemetry(telemetry[i]))
		if err != nil {
			t.Fatal(err)
		}
		for s := range n - 1 {
			kind := []blueprints.Kind{blueprints.Residual, blueprints.MLPExpansion}[s%2]
			err := l.RequestGermination(s, state.GerminationRequest{Slot: 1 + s%(slots-1), Kind: kind})
			for _, stage := range []state.Stage{state.Training, state.Grafting, state.Stabilization}[:1+s%3] {
				if err = errors.Join(err, l.Transition(s, stage)); stage == state.Grafting {
					err = errors.Join(err, l.SetAlpha(s, 0.3))
				}
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		w, a := node(fmt.Sprintf("w%d", i), slots, d/n), node(fmt.Sprintf("a%d", i), slots)
		if y, err = op.Kasmina(y, w, a, l); err != nil {
			t.Fatal(err)
		}
		k.params, k.lattices = append(k.params, w, a), append(k.lattices, l)
	}
	target := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(rows), gorgonia.WithName("target"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(rows), tensor.WithBacking([]int{3, 1, 4, 1, 5, 9}))))
	var err error
	if k.loss, err = op.CrossEntropy(y, target); err == nil {
		_, err = gorgonia.Grad(k.loss, k.params...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestKasminaReports wants the layers of a graph to be reported by one copy a run, as long as what they measure asks for, and each
// to hear of itself: gradients and reports as those of a tape machine.
func TestKasminaReports(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	off, production := state.Telemetry{Mode: state.Off}, state.Telemetry{Mode: state.Production}
	debug, sampled := state.Telemetry{Mode: state.Debug}, state.Telemetry{Mode: state.Sampling, Every: 2}
	mean := state.Telemetry{Mode: state.Production, Reduction: state.MeanOfRows}
	seeds := []int{8, 4, 2, 6}
	const all = 20
	for name, c := range map[string]struct {
		telemetry []state.Telemetry
		words     int64 // that a run measures of each seed at most
	}{
		"off":        {[]state.Telemetry{off, off, off, off}, program.KasminaHealth},
		"production": {[]state.Telemetry{production, production, mean, production}, program.KasminaBins},
		"some":       {[]state.Telemetry{off, production, off, sampled}, program.KasminaBins},
		"histograms": {[]state.Telemetry{sampled, mean, debug, off}, program.KasminaWords},
	} {
		check := func(t *testing.T, device *Device, opts ...MachineOption) {
			a, b := newKasminaChain(t, seed, c.telemetry, seeds), newKasminaChain(t, seed, c.telemetry, seeds)
			m, err := NewMachine(device, a.loss.Graph(), append(opts, WithParams(a.params...), WithOutputs(a.loss))...)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			tape := gorgonia.NewTapeMachine(b.loss.Graph())
			defer tape.Close()
			for step := range 5 {
				tape.Reset()
				before := device.ctx.Stats()
				if err := errors.Join(m.RunAll(), tape.RunAll()); err != nil {
					t.Fatal(err)
				}
				copies, size := int64(1), 4*all*c.words
				for _, p := range a.params {
					if step == 0 && p.Dims() == 1 { // scales, which tell whether anybody has written the slots
						copies, size = copies+1, size+int64(4*p.Shape().TotalSize())
					}
				}
				if down := device.ctx.Stats().Sub(before).ToHost; int64(down.Count) != copies || down.Bytes != size {
					t.Errorf("step %d: %d copies to the host of %d bytes, want %d of %d", step, down.Count, down.Bytes, copies, size)
				}
				for i, p := range a.params {
					v, err := m.Value(p.Deriv())
					if err != nil {
						t.Fatal(err)
					}
					if d := distance(t, v, b.params[i].Deriv().Value()); !(d < 1e-4) {
						t.Errorf("step %d: the gradient of %s differs by %.2g", step, p.Name(), d)
					}
				}
			}
			for i, l := range a.lattices {
				sameReports(t, fmt.Sprintf("layer %d", i), l.Report(), b.lattices[i].Report())
				sameReports(t, fmt.Sprintf("history of layer %d", i), l.History(), b.lattices[i].History())
			}
		}
		t.Run(name+"/fake", func(t *testing.T) {
			device, _, fakeOption := openFake(t, fake.Config{})
			check(t, device, fakeOption, WithStrict())
		})
		t.Run(name+"/GPU", func(t *testing.T) { check(t, openGPU(t), WithStrict()) })
	}
}
