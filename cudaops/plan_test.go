package cudaops

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// gatesFused makes one kernel of the gates of perceptrons and their products, which can keep h from
// the forward pass.
var gatesFused = WithWays("SiLUProduct*=fused")

// cardOf is a fake card with so many bytes, and a small cache.
func cardOf(bytes int) fake.Config {
	info := smallCache("Card")
	info[0].Memory = uint64(bytes)
	return fake.Config{Devices: info}
}

// keepsH reports how many backward passes of a machine's perceptrons go without forming h, as its
// choices have it.
func keepsH(m *Machine) (kept, formed int) {
	for _, c := range m.Choices() {
		switch {
		case c.Op != "SiLUProductBackward":
		case strings.HasSuffix(c.Shape, "without h"):
			kept++
		default:
			formed++
		}
	}
	return kept, formed
}

// trainWithGates trains a model of several layers for a few steps, and returns the machine and the
// bits of losses and gradients.
func trainWithGates(t *testing.T, device *Device, opts ...MachineOption) (m *Machine,
	seen []string) {
	t.Helper()
	l := newWideLifetime(t)
	if err := l.open(device, append(opts, gatesFused)...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.machine.Close(); err != nil {
			t.Error(err)
		}
	})
	for range 4 {
		if err := l.step(); err != nil {
			t.Fatal(err)
		}
		for _, n := range append(gorgonia.Nodes{l.batch.Loss}, gradients(l.batch.Params)...) {
			v, err := l.machine.Value(n)
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, string(gpu.Bytes(flat(t, v))))
		}
	}
	return l.machine, seen
}

// TestRoom wants memory taken to save time up to where too little would be left, and the same bits
// with and without.
func TestRoom(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	train := func(t *testing.T, bytes int, opts ...MachineOption) (*Machine, []string) {
		t.Helper()
		device, _, fakeOption := openFake(t, cardOf(bytes))
		return trainWithGates(t, device, append(opts, fakeOption)...)
	}
	const plenty = 1 << 30
	m, want := train(t, plenty)
	elements := 0
	for _, p := range m.config.Params {
		elements += p.Shape().TotalSize()
	}
	need := m.runner.Program.Arena + m.runner.Program.Resident() + 8*elements
	// of a card for which the workspace is taken before
	least := int(float64(need+run.WorkspaceBytes) / (1 - roomLeft))
	if kept, formed := keepsH(m); kept != 1 || formed != 0 || !m.runner.Program.Roomy {
		t.Errorf("on an empty card: %d perceptrons without h, %d with, spent %v", kept, formed,
			m.runner.Program.Roomy)
	}
	held := m.Memory()
	for _, c := range []struct {
		what  string
		bytes int
		spent bool
	}{{"just enough", least + 64, true}, {"a little less", least - 64, false},
		{"little", need + run.WorkspaceBytes + 64<<10, false}} {
		m, got := train(t, c.bytes)
		if kept, formed := keepsH(m); kept > 0 != c.spent || formed > 0 == c.spent ||
			m.runner.Program.Roomy != c.spent {
			t.Errorf("%s: %d perceptrons without h, %d with, spent %v", c.what, kept, formed,
				m.runner.Program.Roomy)
		}
		if less := m.Memory() < held; less == c.spent {
			t.Errorf("%s: the machine holds %d bytes, with h %d", c.what, m.Memory(), held)
		}
		// the reports, a layer, and what starts its slots
		if n := len(m.runner.Attendants); n != 3 {
			t.Errorf("%s: %d attend runs", c.what, n)
		}
		if !slices.Equal(want, got) {
			t.Errorf("%s: losses or gradients differ", c.what)
		}
	}
	// Nothing is timed again for a second plan.
	private := func(c *machineConfig) error {
		c.tuneLeast, c.tunePath = 1, filepath.Join(t.TempDir(), "tune.json")
		return nil
	}
	m, _ = train(t, least-64, private, WithTuning(TuneCached))
	products := 0
	for _, c := range m.Choices() {
		if c.Op == "Matmul" {
			if products++; c.Source != Measured {
				t.Errorf("%+v", c)
			}
		}
	}
	if products == 0 {
		t.Error("the choices lack those of products")
	}
	if kept, _ := keepsH(m); kept > 0 {
		t.Error("the choices are those of a plan that was dropped")
	}
	t.Run("GPU", func(t *testing.T) {
		device := openGPU(t)
		if device.info.Capability() != 90 {
			t.Skip("needs a GPU of compute capability 9.0")
		}
		free, total, err := device.Memory()
		if err != nil {
			t.Fatal(err)
		}
		if free < total-total/10 {
			t.Skip("needs a GPU that no other process uses")
		}
		opts := []MachineOption{WithPrecision(BFloat16), WithTuning(TuneOff)}
		m, want := trainWithGates(t, device, opts...)
		if free, total, err = device.Memory(); err != nil {
			t.Fatal(err)
		}
		hog, err := device.ctx.Alloc(int(free - total/20))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // behind the machines
			if err := device.ctx.Free(hog); err != nil {
				t.Error(err)
			}
		})
		less, got := trainWithGates(t, device, opts...)
		if !m.runner.Program.Roomy || less.runner.Program.Roomy {
			t.Errorf("spent %v on an empty card, %v on a full one", m.runner.Program.Roomy,
				less.runner.Program.Roomy)
		}
		if !slices.Equal(want, got) {
			t.Error("losses or gradients differ")
		}
	})
}

func gradients(params gorgonia.Nodes) (all gorgonia.Nodes) {
	for _, p := range params {
		all = append(all, p.Deriv())
	}
	return all
}

// newBorrower is a machine that computes gradients with the parameters of another one.
func newBorrower(t *testing.T, device *Device, of *Machine, opts ...MachineOption) *Machine {
	t.Helper()
	b := newLifetime(t, newAdamW).batch
	m, err := NewMachine(device, b.G, append(opts, gatesFused, WithParamsOf(of),
		WithOutputs(append(gradients(b.Params), b.Loss)...))...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestRoomShared wants a machine that borrows parameters, and is planned twice, to give them back
// once.
func TestRoomShared(t *testing.T) {
	device, _, fakeOption := openFake(t, cardOf(128<<20))
	l := newLifetime(t, newAdamW)
	if err := l.open(device, fakeOption, gatesFused); err != nil {
		t.Fatal(err)
	}
	free, _, err := device.Memory()
	if err != nil {
		t.Fatal(err)
	}
	hog, err := device.ctx.Alloc(int(free) - run.WorkspaceBytes - 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	m := newBorrower(t, device, l.machine, fakeOption)
	if m.runner.Program.Roomy || len(m.borrowed) != len(l.batch.Params) {
		t.Errorf("spent %v, %d of %d parameters are borrowed", m.runner.Program.Roomy,
			len(m.borrowed), len(l.batch.Params))
	}
	if err := errors.Join(m.RunAll(), m.Close(), device.ctx.Free(hog)); err != nil {
		t.Error(err)
	}
	for _, in := range l.machine.runner.Program.Inputs {
		if l.machine.inputs.Shared(in) {
			t.Errorf("%s is still shared", graph.Describe(in.Node))
		}
	}
	if err := l.machine.Close(); err != nil {
		t.Error(err)
	}
}

// TestRoomOfOptimizer wants a machine to leave room for the moments that another one on the device
// will have, whether it borrows that one's parameters or not, until that one has them or is closed.
func TestRoomOfOptimizer(t *testing.T) {
	for _, c := range []struct {
		what  string
		other func(t *testing.T, device *Device, first *Machine, opt MachineOption) *Machine
	}{
		{"a borrower", func(t *testing.T, device *Device, first *Machine,
			opt MachineOption) *Machine {
			return newBorrower(t, device, first, opt)
		}},
		{"one with parameters of its own", func(t *testing.T, device *Device, _ *Machine,
			opt MachineOption) *Machine {
			b := newLifetime(t, newAdamW).batch
			m, err := NewMachine(device, b.G, opt, gatesFused,
				WithParams(b.Params...), WithOutputs(b.Loss))
			if err != nil {
				t.Fatal(err)
			}
			return m
		}},
	} {
		t.Run(c.what, func(t *testing.T) { testRoomOfOptimizer(t, c.other) })
	}
}

func testRoomOfOptimizer(t *testing.T, other func(*testing.T, *Device, *Machine,
	MachineOption) *Machine) {
	device, cuda, fakeOption := openFake(t, cardOf(256<<20))
	l := newLifetime(t, newAdamW)
	first := newFuseMachine(t, device, l.batch.G, l.batch.Params, gorgonia.Nodes{l.batch.Loss},
		[]MachineOption{fakeOption, gatesFused})
	m := other(t, device, first, fakeOption)
	need, moments := m.Memory()+momentsToCome(m), momentsToCome(first)
	if err := m.Close(); err != nil || !m.runner.Program.Roomy || moments == 0 {
		t.Fatalf("spent %v on an empty card, error %v", m.runner.Program.Roomy, err)
	}
	nothing := func() error { return nil }
	set := func() error { return first.SetOptimizer(l.optimizer, 1) }
	for _, c := range []struct {
		what string
		left int // beside what the machine takes, with an optimiser
		do   func() error
		want bool
	}{
		{"room for both", 3 * moments / 2, nothing, true},
		{"none for moments", moments / 2, nothing, false},
		{"which are there", moments / 2, set, true},
		{"which are let go of", moments / 2, func() error {
			cuda.Fail("cuMemAlloc", 1, gpu.OutOfMemory)
			if err := set(); !errors.Is(err, gpu.OutOfMemory) {
				return fmt.Errorf("SetOptimizer: %w", err)
			}
			return nil
		}, false},
	} {
		if err := c.do(); err != nil {
			t.Fatal(err)
		}
		free, total, err := device.Memory()
		if err != nil {
			t.Fatal(err)
		}
		hog, err := device.ctx.Alloc(int(free) - int(roomLeft*float64(total)) - need - c.left)
		if err != nil {
			t.Fatal(err)
		}
		m := other(t, device, first, fakeOption)
		if m.runner.Program.Roomy != c.want {
			t.Errorf("%s: spent %v", c.what, m.runner.Program.Roomy)
		}
		if err := errors.Join(m.Close(), device.ctx.Free(hog)); err != nil {
			t.Error(err)
		}
	}
	if before := device.expected.Load(); before != int64(moments) {
		t.Errorf("%d bytes are expected, want %d", before, moments)
	}
	if err := first.Close(); err != nil || device.expected.Load() != 0 {
		t.Errorf("%d bytes are expected of closed machines, error %v", device.expected.Load(), err)
	}
}

// TestRoomFails wants errors between one plan and the next to leave nothing behind.
func TestRoomFails(t *testing.T) {
	for _, call := range []string{"cuMemGetInfo", "cuMemAlloc", "cuMemHostAlloc",
		"cublasLtMatmulAlgoGetHeuristic"} {
		met := 0
		for nth := 1; ; nth++ {
			// less than a tenth is left
			device, cuda, fakeOption := openFake(t, cardOf(run.WorkspaceBytes+3<<20))
			l := newLifetime(t, newAdamW)
			cuda.Fail(call, nth, gpu.OutOfMemory)
			err := l.open(device, fakeOption, gatesFused)
			if err == nil {
				if l.machine.runner.Program.Roomy {
					t.Error("there is room for h")
				}
				if err := l.machine.Close(); err != nil {
					t.Error(err)
				}
				break
			}
			met++
			if !errors.Is(err, gpu.OutOfMemory) || !strings.Contains(err.Error(), call) {
				t.Errorf("%s, call %d: the error is %v", call, nth, err)
			}
			if l.machine != nil {
				if err := l.machine.Close(); err != nil {
					t.Errorf("%s, call %d: Close: %v", call, nth, err)
				}
			}
			if left := device.ctx.Context.(*fake.Context).Leaks(); len(left) > 0 {
				t.Errorf("%s, call %d leaves %v", call, nth, left)
			}
		}
		if met < 2 {
			t.Errorf("%s: the machine makes this call %d times", call, met)
		}
	}
	// The error of a graph that fits in no way has the figures of the plan that needs least.
	device, _, fakeOption := openFake(t, cardOf(run.WorkspaceBytes+1<<10))
	err := newLifetime(t, newAdamW).open(device, fakeOption, gatesFused)
	if !errors.Is(err, gpu.OutOfMemory) || !strings.Contains(err.Error(), "1.00 KiB are free") {
		t.Errorf("the error is %v", err)
	}
}

// TestRoomRecomputed wants blocks that are computed again to keep h no longer than for their own
// backward pass.
func TestRoomRecomputed(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	c := llm.Config{Vocab: 19, Dim: 16, Layers: 6, Heads: 2, Seq: 8, FF: 64}.Default()
	model, err := llm.NewModel(c, gorgonia.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	g, err := model.Graph(llm.ForTraining, 2, llm.WithRecompute())
	if err != nil {
		t.Fatal(err)
	}
	m := newFuseMachine(t, device, g.G, g.Params, gorgonia.Nodes{g.Loss},
		[]MachineOption{fakeOption, gatesFused})
	arena := map[bool]int{}
	for _, roomy := range []bool{false, true} {
		m.options.Roomy = roomy
		p, err := compile(m, g.G)
		if err != nil {
			t.Fatal(err)
		}
		if p.Roomy != roomy {
			t.Errorf("roomy %v: spent %v", roomy, p.Roomy)
		}
		arena[roomy] = p.Arena
	}
	if h := 2 * c.Seq * c.FF * 4; arena[true] > arena[false]+h {
		t.Errorf("a run takes %d bytes, and %d without room: the difference is more than one h, %d",
			arena[true], arena[false], h)
	}
	t.Log(arena)
}

// newWideLifetime trains a model whose products kernels of this module take.
func newWideLifetime(t *testing.T, how ...llm.GraphOption) *lifetime {
	t.Helper()
	c := llm.Config{Vocab: 19, Dim: 48, Layers: 3, Heads: 3, KVHeads: 1, Seq: 8, FF: 136,
		Kasmina: []int{1}, Seeds: 6}.Default()
	model, err := llm.NewModel(c, gorgonia.Float32, 2, state.WithoutGates())
	if err != nil {
		t.Fatal(err)
	}
	g, err := model.Graph(llm.ForTraining, 3, how...)
	if err != nil {
		t.Fatal(err)
	}
	o, err := newAdamW()
	if err != nil {
		t.Fatal(err)
	}
	l := &lifetime{model: model, batch: &batch{Graph: g}, optimizer: o}
	l.batch.draw(t, 2)
	return l
}
