package cudaops

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optim"
)

// lifetime is all that is done with a machine for the training of a model.
type lifetime struct {
	model     *llm.Model
	batch     *batch
	optimizer optim.Optimizer
	machine   *Machine
}

func newLifetime(t *testing.T, newOptimizer func() (optim.Optimizer, error)) *lifetime {
	t.Helper()
	model, b := newBatch(t, llm.ForTraining, 2)
	o, err := newOptimizer()
	if err != nil {
		t.Fatal(err)
	}
	return &lifetime{model: model, batch: b, optimizer: o}
}

func (l *lifetime) open(device *Device, opts ...MachineOption) (err error) {
	if l.machine, err = NewMachine(device, l.batch.G, append(opts, WithParams(l.batch.Params...),
		WithOutputs(l.batch.Loss))...); err != nil {
		return err
	}
	return l.machine.SetOptimizer(l.optimizer, 1)
}

func (l *lifetime) step() error {
	if err := l.machine.RunAll(); err != nil {
		return err
	}
	if _, err := l.machine.Value(l.batch.Loss); err != nil {
		return err
	}
	_, err := l.machine.Update()
	return err
}

// call is a public call that talks to the GPU.
type call struct {
	name string
	make func() error
}

// calls is all of them. SetOptimizer comes last: when it fails the machine has none.
func (l *lifetime) calls() []call {
	m := l.machine
	return []call{
		{"RunAll", m.RunAll},
		{"Value", func() error { _, err := m.Value(l.batch.Loss); return err }},
		{"Update", func() error { _, err := m.Update(); return err }},
		{"Upload", func() error { return m.Upload(l.batch.Params...) }},
		{"Download", m.Download},
		{"StartProfile", m.StartProfile},
		{"SetOptimizer", func() error { return m.SetOptimizer(l.optimizer, 1) }},
	}
}

// profile is the steps of a profile.
func (l *lifetime) profile() error {
	err := l.machine.StartProfile()
	for i := 0; i < ProfileSteps && err == nil; i++ {
		err = l.step()
	}
	if err == nil {
		_, err = l.machine.Profile()
	}
	return err
}

// TestEveryCallFails makes each call of CUDA fail, the first of its kind and some later ones, in
// the life of a machine, and wants an error that names it, nothing to be left behind, and the
// device to serve the next machine.
func TestEveryCallFails(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 6))
	for _, call := range []string{"cuMemAlloc", "cuMemHostAlloc", "cuMemGetInfo", "cuStreamCreate",
		"cuEventCreate", "cuEventRecord",
		"cuModuleLoadDataEx", "cuModuleGetFunction", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync",
		"cuMemsetD8Async", "cuLaunchKernel",
		"cuStreamSynchronize", "cuStreamBeginCapture", "cuStreamEndCapture",
		"cuGraphInstantiateWithFlags", "cuGraphLaunch",
		"cublasLtCreate", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"} {
		t.Run(call, func(t *testing.T) {
			var status error = gpu.OutOfMemory
			if strings.HasPrefix(call, "cublas") {
				status = gpu.BlasNotSupported
			}
			met := 0
			for nth := 1; nth < 5 || !testing.Short(); nth += 1 + r.IntN(2*nth) {
				device, cuda, fakeOption := openFake(t, fake.Config{})
				l, opts := newLifetime(t, newMuon),
					[]MachineOption{fakeOption, withCeilingBytes(1 << 12)}
				cuda.Fail(call, nth, status)
				err := l.open(device, opts...)
				for i := 0; i < 3 && err == nil; i++ {
					err = l.step()
				}
				if err == nil && strings.HasPrefix(call, "cuEvent") {
					err = l.profile()
				}
				if err == nil {
					// which may meet the call
					if err := l.machine.Close(); err != nil && !errors.Is(err, status) {
						t.Error(err)
					}
					break // there are no more of them
				}
				met++
				if !errors.Is(err, status) || !strings.Contains(err.Error(), call) ||
					!strings.HasPrefix(err.Error(), "cudaops.") {
					t.Errorf("call %d: the error is %v", nth, err)
				}
				if l.machine != nil {
					if err := l.machine.Close(); err != nil {
						t.Errorf("call %d: Close: %v", nth, err)
					}
				}
				if left := device.ctx.Context.(*fake.Context).Leaks(); len(left) > 0 {
					t.Errorf("call %d leaves %v", nth, left)
				}
				if nth > 1 { // the device is as it was
					continue
				}
				again := newLifetime(t, newAdamW)
				if err := errors.Join(again.open(device, fakeOption), again.step(),
					again.machine.Close()); err != nil {
					t.Errorf("the next machine: %v", err)
				}
			}
			if met == 0 {
				t.Error("the machine never makes this call")
			}
		})
	}
}

// TestRetry makes calls of CUDA fail in a machine's runs, and wants the same machine to compute
// what it should when it is asked again.
func TestRetry(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("random seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 7))
	value := func(t *testing.T, l *lifetime) float32 {
		t.Helper()
		for range 3 {
			v, err := l.machine.Value(l.batch.Loss)
			if err == nil {
				return flat(t, v)[0]
			}
			if !errors.Is(err, gpu.OutOfMemory) {
				t.Fatal(err)
			}
		}
		t.Fatal("it goes on failing")
		return 0
	}
	device, _, fakeOption := openFake(t, fake.Config{})
	plain := newLifetime(t, newAdamW)
	if err := errors.Join(plain.open(device, fakeOption), plain.machine.RunAll()); err != nil {
		t.Fatal(err)
	}
	want := value(t, plain)
	for _, call := range []string{"cuMemHostAlloc", "cuEventCreate", "cuEventRecord",
		"cuEventSynchronize", "cuModuleGetFunction",
		"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemsetD32Async", "cuLaunchKernel",
		"cuStreamSynchronize", "cuStreamBeginCapture",
		"cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch", "cublasLtMatmul"} {
		for _, nth := range []int{1, 2 + r.IntN(8)} {
			device, cuda, fakeOption := openFake(t, fake.Config{})
			l := newLifetime(t, newAdamW)
			if err := l.open(device, fakeOption, WithMonitor(2)); err != nil {
				t.Fatal(err)
			}
			cuda.Fail(call, nth, gpu.OutOfMemory)
			for run := range 5 {
				err := l.machine.RunAll()
				for try := 0; err != nil && try < 3; try++ {
					if !errors.Is(err, gpu.OutOfMemory) {
						t.Fatalf("%s, call %d: %v", call, nth, err)
					}
					if enqueues := call == "cuLaunchKernel" || call == "cublasLtMatmul"; enqueues &&
						run == 0 && l.machine.runner.Now().Loaded {
						t.Fatalf("%s, call %d: what a capture needs counts as loaded", call, nth)
					}
					err = l.machine.RunAll()
				}
				if err != nil {
					t.Fatalf("%s, call %d: %v", call, nth, err)
				}
				if got := value(t, l); got != want {
					t.Errorf("%s, call %d: the loss of run %d is %v, want %v",
						call, nth, run, got, want)
				}
			}
			// which may meet the call
			if err := l.machine.Close(); err != nil && !errors.Is(err, gpu.OutOfMemory) {
				t.Errorf("%s, call %d: Close: %v", call, nth, err)
			}
		}
	}
	if err := plain.machine.Close(); err != nil {
		t.Error(err)
	}
}

// TestOutOfMemory wants an error that says what asked for how much and what is free, and a device
// that still works.
func TestOutOfMemory(t *testing.T) {
	wants := func(t *testing.T, err error, say ...string) {
		t.Helper()
		for _, s := range say {
			if !errors.Is(err, gpu.OutOfMemory) || !strings.Contains(err.Error(), s) {
				t.Errorf("got %v, want one that says %q", err, s)
			}
		}
	}
	t.Run("fake", func(t *testing.T) {
		device, _, fakeOption := openFake(t,
			fake.Config{Devices: []gpu.DeviceInfo{{Name: "Small GPU", Major: 9,
				Memory: 33 << 20, SMs: 1}}})
		wants(t, squareOf(device, 4096, fakeOption), "128.00 MiB", "33.00 MiB are free")
		// A machine that fits, with an optimiser that does not.
		l := newLifetime(t, newAdamW)
		if err := l.open(device, fakeOption); err != nil {
			t.Fatal(err)
		}
		defer l.machine.Close()
		free, _, err := device.Memory()
		if err != nil {
			t.Fatal(err)
		}
		hog, err := device.ctx.Alloc(int(free))
		if err != nil {
			t.Fatal(err)
		}
		bigger := newLifetime(t, newMuon)
		err = l.machine.SetOptimizer(bigger.optimizer, 1)
		wants(t, err, "SetOptimizer: allocating", "for Muon's directions",
			"asked for", "of 33.00 MiB free")
		if _, err := l.machine.Update(); err == nil ||
			!strings.Contains(err.Error(), "no optimiser") {
			t.Errorf("an update after an optimiser that did not fit: %v", err)
		}
		if err := errors.Join(device.ctx.Free(hog), l.machine.SetOptimizer(l.optimizer, 1),
			l.step()); err != nil {
			t.Errorf("with room again: %v", err)
		}
	})
	t.Run("GPU", func(t *testing.T) {
		device := openGPU(t)
		before := device.ctx.Stats()
		wants(t, squareOf(device, 1<<20), "the graph needs 8.00 TiB of device memory", "are free")
		_, total, err := device.Memory()
		if err != nil {
			t.Fatal(err)
		}
		_, err = device.ctx.Alloc(int(total))
		wants(t, err, gpu.Size(total)+" asked for", "free")
		if held := device.ctx.Stats().Sub(before); held.DeviceBytes != 0 || held.HostBytes != 0 {
			t.Errorf("%d bytes of device memory and %d of host memory are left behind",
				held.DeviceBytes, held.HostBytes)
		}
		l := newLifetime(t, newAdamW)
		if err := errors.Join(l.open(device), l.step(), l.machine.Close()); err != nil {
			t.Errorf("a machine that fits: %v", err)
		}
	})
}

// squareOf opens a machine for the square of a matrix n by n.
func squareOf(device *Device, n int, opts ...MachineOption) error {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(n, n), gorgonia.WithName("x"))
	if _, err := gorgonia.Square(x); err != nil {
		return err
	}
	m, err := NewMachine(device, g, opts...)
	if err == nil {
		err = m.Close()
	}
	return err
}

// TestLibrariesMissing wants an error that says where was searched. A graph without products needs
// no cuBLASLt.
func TestLibrariesMissing(t *testing.T) {
	device, _, fakeOption := openFake(t, fake.Config{NoBlas: true})
	l := newLifetime(t, newAdamW)
	err := l.open(device, fakeOption)
	var missing *gpu.NotFoundError
	if !errors.As(err, &missing) || !strings.Contains(err.Error(), missing.Error()) {
		t.Errorf("without cuBLASLt: %v", err)
	}
	if left := device.ctx.Context.(*fake.Context).Leaks(); len(left) > 0 {
		t.Errorf("%v are left", left)
	}
	if err := squareOf(device, 8, fakeOption); err != nil {
		t.Errorf("a graph without products: %v", err)
	}
	t.Run("libcuda", func(t *testing.T) {
		runChild(t, "libcuda", "KASMINA_LIBCUDA="+t.TempDir())
	})
	t.Run("libcublasLt", func(t *testing.T) {
		openGPU(t)
		runChild(t, "libcublasLt", "KASMINA_LIBCUBLASLT="+t.TempDir())
	})
}

// TestLostContext wants clear errors from every call once the GPU's context is lost, and Close to
// come to an end.
func TestLostContext(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		device, cuda, fakeOption := openFake(t, fake.Config{})
		l := newLifetime(t, newMuon)
		if err := errors.Join(l.open(device, fakeOption), l.step(), l.step()); err != nil {
			t.Fatal(err)
		}
		cuda.Fail("cuGraphLaunch", 1, gpu.LaunchFailed)
		l.checkLost(t, device, gpu.LaunchFailed, fakeOption)
	})
	t.Run("closed", func(t *testing.T) { // the device before the machine, against the rules
		device, _, fakeOption := openFake(t, fake.Config{})
		l := newLifetime(t, newMuon)
		if err := errors.Join(l.open(device, fakeOption), l.step()); err != nil {
			t.Fatal(err)
		}
		if err := device.Close(); err == nil || !strings.Contains(err.Error(), "still alive") {
			t.Errorf("closing a device in use: %v", err)
		}
		l.checkLost(t, device, gpu.ContextIsDestroyed, fakeOption)
	})
	for _, fault := range []string{"trap", "poke"} {
		t.Run(fault, func(t *testing.T) {
			openGPU(t)
			runChild(t, fault)
		})
	}
}

// checkLost makes every call on a machine whose context is lost, or is by the first of them.
func (l *lifetime) checkLost(t *testing.T, device *Device, status gpu.Status,
	opts ...MachineOption) {
	t.Helper()
	check := func(name string, err error) {
		t.Helper()
		var e *gpu.Error
		if !errors.As(err, &e) || !e.Sticky() || status != 0 && !errors.Is(err, status) ||
			e.Call == "" ||
			!strings.Contains(err.Error(), e.Call+": CUDA_ERROR_") || !strings.Contains(err.Error(),
			"context is lost") || len(err.Error()) > 600 {
			t.Errorf("%s: %v, want a short error that names the call and says that the context "+
				"is lost", name, err)
		}
	}
	check("RunAll", errors.Join(l.machine.RunAll(), device.ctx.Synchronize()))
	for _, c := range l.calls() {
		check(c.name, c.make())
	}
	_, err := NewMachine(device, l.batch.G, opts...)
	check("NewMachine", err)
	check("Close", l.machine.Close())
	if err := l.machine.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
	for _, c := range l.calls() {
		if err := c.make(); err == nil || !strings.Contains(err.Error(), "closed") {
			t.Errorf("%s on a closed machine: %v", c.name, err)
		}
	}
}

// faults is kernels that lose the context.
const faults = `.version 7.0
.target sm_80
.address_size 64
.visible .entry trap() { trap; ret; }
.visible .entry poke() { .reg .b64 %at; .reg .b32 %v; mov.u64 %at, 64; mov.u32 %v, 1; st.global.u32 [%at], %v; ret; }
`

// child is the variable that tells this test binary what to do as a child of itself: what it does
// cannot be undone.
const child = "KASMINA_TEST_CHILD"

func runChild(t *testing.T, task string, env ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestChild$", "-test.v")
	cmd.Env = append(append(os.Environ(), child+"="+task), env...)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestChild") {
		t.Errorf("%v", err)
	}
	t.Logf("%s", out)
}

func TestChild(t *testing.T) {
	task := os.Getenv(child)
	switch task {
	case "":
		return // this is no child
	case "libcuda":
		_, err := Open()
		if !errors.Is(err, ErrNoDevice) || !strings.Contains(fmt.Sprint(err),
			os.Getenv("KASMINA_LIBCUDA")) {
			t.Errorf("got %v, want ErrNoDevice and where was searched", err)
		}
		t.Log(err)
		return
	}
	device, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	l := newLifetime(t, newAdamW)
	err = l.open(device)
	if task == "libcublasLt" {
		var missing *gpu.NotFoundError
		if !errors.As(err, &missing) || !strings.Contains(err.Error(),
			os.Getenv("KASMINA_LIBCUBLASLT")) {
			t.Errorf("got %v, want where was searched", err)
		}
		t.Log(err)
		return
	}
	if err := errors.Join(err, l.step(), l.step()); err != nil {
		t.Fatal(err)
	}
	module, err := device.ctx.LoadModule([]byte(faults))
	if err != nil {
		t.Fatal(err)
	}
	kernel, err := device.ctx.Function(module, task)
	if err != nil {
		t.Fatal(err)
	}
	one := gpu.LaunchConfig{Grid: gpu.Dim{X: 1}, Block: gpu.Dim{X: 1}}
	if err := device.ctx.Launch(kernel, one, l.machine.runner.Stream, new(gpu.Args)); err != nil {
		t.Fatal(err)
	}
	l.checkLost(t, device, 0)
	t.Log(device.Close())
}
