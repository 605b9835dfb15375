package cudaops

import (
	"bytes"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	normkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// monitored makes a machine that learns one weight matrix behind a norm, which takes as long as norm says.
func monitored(t *testing.T, norm *fake.Way, log *bytes.Buffer, opts ...MachineOption) (*Machine, *Device) {
	t.Helper()
	device, _, fakeOption := openFake(t, fake.Config{Devices: smallCache("GPU")})
	g := gorgonia.NewGraph()
	matrix := func(name string, rows, columns int) *gorgonia.Node {
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, columns), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(tensor.Range(tensor.Float32, 0, rows*columns)))))
	}
	x, w := matrix("x", 6, 4), matrix("w", 5, 4)
	scale := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(4), gorgonia.WithName("scale"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(4), tensor.WithBacking([]float32{1, 2, 3, 4}))))
	n, err := op.RMSNorm(x, scale, 1e-5)
	if err != nil {
		t.Fatal(err)
	}
	y, err := op.Linear(n, w)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(y)))), w); err != nil {
		t.Fatal(err)
	}
	private := func(c *machineConfig) error {
		c.tuneLeast, c.tunePath = 1, filepath.Join(t.TempDir(), "tune.json")
		return nil
	}
	wrap := withKernels(func(k kernels.Launcher) kernels.Launcher {
		slow := fake.Way{Took: 40 * time.Millisecond}
		return &slowNorm{normWays{Launcher: k, fake: fakeOf(k), names: []kernel.Way{{Family: "fast"}, {Family: "plain"}},
			ways: []fake.Way{{}, slow}}, norm}
	})
	all := append([]MachineOption{fakeOption, private, wrap, WithParams(w), WithLogger(slog.New(slog.NewTextHandler(log, nil)))}, opts...)
	m, err := NewMachine(device, g, all...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	o, err := optim.NewAdamW(optim.WithLR(0.01))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.SetOptimizer(o, 1); err != nil {
		t.Fatal(err)
	}
	return m, device
}

// slowNorm is normWays whose first way takes as long as it is told, run by run.
type slowNorm struct {
	normWays
	norm *fake.Way
}

func (k *slowNorm) Launch(s gpu.Stream, params any) error {
	if a, ok := params.(normkernel.RMSNorm); !ok || a.Way.Family != "fast" {
		return k.normWays.Launch(s, params)
	}
	if err := k.Launcher.Launch(s, params); err != nil {
		return err
	}
	return k.fake.launch(s, func(l *fake.Launch) { l.Took = k.norm.Took })
}

func TestMonitor(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	norm := &fake.Way{Took: 3 * time.Millisecond}
	var log bytes.Buffer
	m, _ := monitored(t, norm, &log, WithTuning(TuneCached), WithMonitor(4))
	plain, _ := monitored(t, norm, &bytes.Buffer{}, WithTuning(TuneCached))
	step := func(m *Machine) {
		t.Helper()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Update(); err != nil {
			t.Fatal(err)
		}
	}
	if times, err := m.Monitor(); err != nil || len(times) != 0 {
		t.Errorf("before any run: %v, %v", times, err)
	}
	for range 14 {
		step(m)
		step(plain)
	}
	times, err := m.Monitor()
	if err != nil || len(times) == 0 {
		t.Fatalf("%v, %v", times, err)
	}
	if m.monitor.Samples() < 3 || m.monitor.Samples() > 5 {
		t.Errorf("%d samples in 14 runs, want one in 4", m.monitor.Samples())
	}
	first := times[0]
	if first.Op != "RMSNorm" || first.Time < 3*time.Millisecond || first.Time > 4*time.Millisecond || first.Bytes != 4*(2*24+4+6) ||
		strings.Join(first.Ways, " ") != "fast" || first.Tuned < 3*time.Millisecond {
		t.Errorf("the norm: %+v", first)
	}
	table := Table(times)
	for _, want := range []string{"Linear", "Update", "RMSNorm", "fast", "GB/s"} {
		if !strings.Contains(table, want) {
			t.Errorf("no %s in the table:\n%s", want, table)
		}
	}
	for _, o := range times {
		if o.Op == "Linear" && o.FLOPs != 2*6*5*4 {
			t.Errorf("the product: %+v", o)
		}
		if o.Op == "Update" && o.Bytes != 4*20*8 { // gradients twice
			t.Errorf("the update: %+v", o)
		}
	}
	if log.Len() > 0 {
		t.Errorf("warnings: %s", log.String())
	}
	w := m.config.params[0]
	a, errA := m.Value(w)
	b, errB := plain.Value(plain.config.params[0])
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	for i, v := range flat(t, a) {
		if v != flat(t, b)[i] {
			t.Fatalf("element %d of the weights is %v, without the monitor %v", i, v, flat(t, b)[i])
		}
	}
	norm.Took = 9 * time.Millisecond
	for range 16 {
		step(m)
	}
	if text := log.String(); strings.Count(text, "when it was tuned") != 1 || !strings.Contains(text, "RMSNorm") {
		t.Errorf("the norm takes thrice as long: log %q", text)
	}
}

// TestMonitorWithoutOptimizer wants the times of ops, and of updates, after an optimiser that did not fit has left the machine without.
func TestMonitorWithoutOptimizer(t *testing.T) {
	m, device := monitored(t, &fake.Way{}, &bytes.Buffer{}, WithMonitor(2))
	for range 6 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Update(); err != nil {
			t.Fatal(err)
		}
	}
	context := device.ctx.Context
	Wrap(device, func(gpu.Context) gpu.Context { return full{context} })
	if err := m.SetOptimizer(m.optimizer.Rules, 1); !errors.Is(err, gpu.OutOfMemory) {
		t.Errorf("an optimiser without room: %v", err)
	}
	Wrap(device, func(gpu.Context) gpu.Context { return context })
	times, err := m.Monitor()
	if i := slices.IndexFunc(times, func(o OpTime) bool { return o.Op == "Update" }); err != nil || i < 0 || times[i].Time == 0 {
		t.Errorf("got %v, %v, want what updates took too", times, err)
	}
}

// full is a context without room.
type full struct{ gpu.Context }

func (full) Alloc(bytes int) (gpu.Ptr, error) { return 0, gpu.NewOutOfMemory(bytes, 0, 0) }

// TestMonitorSampleFails wants a sample whose times cannot all be read to leave no trace in those that follow.
func TestMonitorSampleFails(t *testing.T) {
	m, device := monitored(t, &fake.Way{}, &bytes.Buffer{}, WithMonitor(2))
	o := m.monitor
	for !o.Sampling() {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
	if err := device.ctx.SyncStream(m.runner.Stream); err != nil {
		t.Fatal(err)
	}
	context := device.ctx.Context
	Wrap(device, func(gpu.Context) gpu.Context { return &unread{context, len(m.runner.Program.Calls)} })
	if _, err := m.Monitor(); !errors.Is(err, gpu.LaunchFailed) {
		t.Fatalf("a time that cannot be read: %v", err)
	}
	Wrap(device, func(gpu.Context) gpu.Context { return context })
	if times, err := m.Monitor(); len(times) != 0 || err != nil || o.Samples() != 0 {
		t.Errorf("%d samples, %v, %v", o.Samples(), times, err)
	}
	for range 6 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
	}
	if times, err := m.Monitor(); err != nil || len(times) == 0 || o.Samples() == 0 {
		t.Errorf("%d samples later: %v, %v", o.Samples(), times, err)
	}
}

// unread is a context that tells so many times.
type unread struct {
	gpu.Context
	left int
}

func (c *unread) Elapsed(from, to gpu.Event) (time.Duration, error) {
	if c.left--; c.left < 0 {
		return 0, gpu.NewError("cuEventElapsedTime", gpu.LaunchFailed, "", "")
	}
	return c.Context.Elapsed(from, to)
}

// TestMonitorCost wants fewer samples where they cost much.
func TestMonitorCost(t *testing.T) {
	norm := &fake.Way{}
	m, _ := monitored(t, norm, &bytes.Buffer{}, WithMonitor(2))
	for range 30 {
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		norm.Took = 5 * time.Millisecond
		if m.monitor.Sampling() { // as if the stamps took so much
			norm.Took = 10 * time.Millisecond
		}
		if _, err := m.Value(m.config.params[0]); err != nil { // computes it
			t.Fatal(err)
		}
	}
	if m.monitor.Samples() == 0 || m.monitor.Every() < 100 {
		t.Errorf("%d samples, one in %d", m.monitor.Samples(), m.monitor.Every())
	}
	device, _, fakeOption := openFake(t, fake.Config{})
	if _, err := NewMachine(device, gorgonia.NewGraph(), fakeOption, WithMonitor(1)); err == nil || !strings.Contains(err.Error(), "at least 2") {
		t.Errorf("WithMonitor(1): %v", err)
	}
}
