package cudaops

import (
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/state"
)

// TestCopiesOfAStep counts what goes between host and device in the steps of a growing model: ids and targets up, the loss and
// the norm of the gradients down, what the lattice wants to know of its seeds down, and nothing else.
func TestCopiesOfAStep(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testCopies(t, device, fakeOption)
	})
	t.Run("scaled", func(t *testing.T) {
		device, _, fakeOption := openFake(t, fake.Config{})
		testCopies(t, device, fakeOption, scaledGradients)
	})
	for name, p := range map[string]Precision{"float32": Float32, "bfloat16": BFloat16, "float16": Float16} {
		if testing.Short() && p != BFloat16 {
			continue
		}
		t.Run(name, func(t *testing.T) { testCopies(t, openGPU(t), WithPrecision(p)) })
	}
}

func testCopies(t *testing.T, device *Device, opts ...MachineOption) {
	l := newLifetime(t, newMuon)
	lattice := l.model.Kasmina.Lattice(0)
	if err := l.model.Germinate(0, 1, state.GerminationRequest{Slot: 1, Kind: blueprints.ConvFilter}); err != nil {
		t.Fatal(err)
	}
	for _, s := range []state.Stage{state.Training, state.Grafting} {
		if err := lattice.Transition(1, s); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.open(device, append(opts, WithStrict())...); err != nil {
		t.Fatal(err)
	}
	defer l.machine.Close()
	rows, seeds := int64(l.batch.IDs.Shape()[0]), int64(lattice.Seeds())
	const loss, control = 4, 64
	up, down := gpu.Copies{Count: 2, Bytes: 2 * 8 * rows}, gpu.Copies{Count: 2, Bytes: loss + control}
	with := func(c gpu.Copies, bytes int64) gpu.Copies {
		return gpu.Copies{Count: c.Count + 1, Bytes: c.Bytes + bytes}
	}
	stateBytes, alpha := int64(l.machine.runner.Program.Kasmina[0].State.Extent()), 0.0
	cases := []struct {
		name     string
		set      func() error
		up, down gpu.Copies
	}{
		{"a steady step", nil, up, with(down, 4*program.KasminaBins*seeds)},
		{"telemetry with histograms", func() error { return lattice.SetTelemetry(state.Telemetry{Mode: state.Debug}) }, up,
			with(down, 4*program.KasminaWords*seeds)},
		{"telemetry off", func() error { return lattice.SetTelemetry(state.Telemetry{Mode: state.Off}) }, up, with(down, 4*program.KasminaHealth*seeds)},
		{"a seed that changes", func() error { alpha += 0.1; return lattice.SetAlpha(1, alpha) }, with(up, stateBytes), with(down, 4*program.KasminaHealth*seeds)},
		{"another learning rate", func() error { return l.optimizer.SetLR(l.optimizer.LR() / 2) }, with(up, control), with(down, 4*program.KasminaHealth*seeds)},
	}
	for _, c := range cases[:few(len(cases), 2)] {
		// Runs and updates are launched one by one at first and recorded at the second time.
		for i := range few(4, 3) {
			if c.set != nil {
				if err := c.set(); err != nil {
					t.Fatal(err)
				}
			}
			l.batch.draw(t, uint64(i))
			before := device.ctx.Stats()
			if err := l.step(); err != nil {
				t.Fatal(err)
			}
			work := device.ctx.Stats().Sub(before)
			if i > 1 && (work.ToDevice != c.up || work.ToHost != c.down || work.OnDevice.Count != 0) {
				t.Errorf("%s copies %+v up, %+v down and %+v on the device, want %+v, %+v and none", c.name, work.ToDevice, work.ToHost,
					work.OnDevice, c.up, c.down)
			}
			if i > 1 && work.GraphLaunches != 2 {
				t.Errorf("%s launches %d graphs, want that of the run and that of the update", c.name, work.GraphLaunches)
			}
		}
	}
}

// TestModesAreCapturedApart wants runs that measure and runs that do not, in turn, to be replayed alike: neither makes the other
// be enqueued task by task again.
func TestModesAreCapturedApart(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{})
	l := newLifetime(t, newMuon)
	if err := l.model.Kasmina.Lattice(0).SetTelemetry(state.Telemetry{Mode: state.Sampling, Every: 2}); err != nil {
		t.Fatal(err)
	}
	if err := l.open(device, fakeOption); err != nil {
		t.Fatal(err)
	}
	defer l.machine.Close()
	for i := range 10 {
		l.batch.draw(t, uint64(i))
		before := device.ctx.Stats()
		if err := l.step(); err != nil {
			t.Fatal(err)
		}
		if work := device.ctx.Stats().Sub(before); i > 3 && work.GraphLaunches != 2 {
			t.Errorf("step %d launches %d graphs, want that of the run and that of the update", i, work.GraphLaunches)
		}
	}
	if n := l.machine.runner.Recordings(); n != 2 {
		t.Errorf("%d kinds of runs are captured, want 2", n)
	}
}
