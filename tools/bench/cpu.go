package main

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// The groups for the CPU: its limits, a matrix product, a Kasmina layer, single ops, training, and tuning on short
// chats.
func cpuGroups() []string { return []string{"copy", "gemm", "kasmina", "ops", "train", ofPacking} }

// onCPU measures in float32 on GOMAXPROCS cores.
func onCPU(o options) error {
	if err := o.check(cpuGroups()); err != nil {
		return err
	}

	if o.profile != "" {
		return errors.New("-profile needs a GPU, because steps on a CPU are not traced")
	}

	line := where(fmt.Sprintf("%s, %d cores", processor(), runtime.GOMAXPROCS(0)), "")
	fmt.Fprintln(os.Stderr, line.Card)
	if err := o.begin(line); err != nil {
		return err
	}

	for _, g := range []struct {
		name    string
		measure func(options) error
	}{{"copy", cpuCeilings}, {"gemm", cpuGemm}, {"kasmina", cpuKasmina}, {"ops", cpuOps},
		{"train", cpuTrain}, {ofPacking, cpuPackings}} {
		if !o.has(g.name) {
			continue
		}
		if err := g.measure(o); err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
	}

	return nil
}

// processor returns the processor's name, or its architecture if the operating system does not provide the name.
func processor() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err == nil {
		for line := range strings.Lines(string(info)) {
			if key, value, _ := strings.Cut(line, ":"); strings.TrimSpace(key) == "model name" {
				return strings.TrimSpace(value)
			}
		}
	}
	return runtime.GOARCH
}

// timed returns the median time of f over about a second, in at least five runs after a warmup.
func timed(f func() error) (time.Duration, error) {
	if err := f(); err != nil {
		return 0, err
	}

	var times []time.Duration
	for begin := time.Now(); len(times) < 5 || time.Since(begin) < time.Second; {
		start := time.Now()
		if err := f(); err != nil {
			return 0, err
		}
		times = append(times, time.Since(start))
	}

	return median(times)
}

// cpuCeilings measures the bandwidth of a copy and the peak of multiplications and additions.
func cpuCeilings(options) error {
	const n = 64 << 20 // floats, 256 MiB
	x, y := make([]float32, n), make([]float32, n)
	for i := range x {
		x[i] = float32(i)
	}

	took, err := timed(func() error {
		cpu.Parallel(n, 1<<18, func(lo, hi int) { copy(y[lo:hi], x[lo:hi]) })
		return nil
	})
	if err != nil {
		return err
	}

	if err := emit(measured("copy_256MiB_cpu", took, 2*4*n, 0)); err != nil {
		return err
	}

	if peak := gemm.FMAPeak(runtime.GOMAXPROCS(0), 300*time.Millisecond); peak > 0 {
		return emit(result{Bench: "fma_peak_cpu", Peer: project, TFLOPs: rounded(peak/1e12, 4)})
	}

	return nil
}

// cpuGemm measures a product of square matrices.
func cpuGemm(options) error {
	const n = 1024
	random := rand.New(rand.NewPCG(3, 3))
	a, b, c := normal(random, 1, n, n).Float32s(), normal(random, 1, n, n).Float32s(),
		make([]float32, n*n)
	took, err := timed(func() error {
		gemm.Mul(false, false, n, n, n, 1, a, n, b, n, 0, c, n)
		return nil
	})
	if err != nil {
		return err
	}

	return emit(measured("gemm_1024_f32_cpu", took, 0, 2*n*n*n))
}

// cpuKasmina measures a layer with default telemetry. All its seeds are grafting, with four kinds of
// blueprints in turn. It times the forward pass, and the forward and backward pass together.
func cpuKasmina(options) error {
	const rows, dim, seeds, chunk = 1024, 4096, 256, 16
	random := rand.New(rand.NewPCG(4, 4))
	lattice, err := state.NewLattice(seeds, dim, state.WithoutGates())
	if err != nil {
		return err
	}

	for s := range seeds {
		if err := graft(lattice, s, random.Float64()); err != nil {
			return err
		}
	}

	for _, backward := range []bool{false, true} {
		g := gorgonia.NewGraph()
		x := gorgonia.NodeFromAny(g, normal(random, 1, rows, dim), gorgonia.WithName("x"))
		w := gorgonia.NodeFromAny(g, normal(random, 1, seeds+1, chunk),
			gorgonia.WithName("weights"))
		a := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(seeds+1),
			gorgonia.WithName("scales"),
			gorgonia.WithInit(gorgonia.Ones()))
		y, err := op.Kasmina(x, w, a, lattice)
		if err != nil {
			return err
		}
		name, bytes := "kasmina_fwd_1024x4096_s256_cpu", float64(2*4*rows*dim)
		if backward {
			name, bytes = "kasmina_fwdbwd_1024x4096_s256_cpu", 5*4*rows*dim
			up := gorgonia.NodeFromAny(g, normal(random, 1, rows, dim), gorgonia.WithName("g"))
			if _, err := gorgonia.Backpropagate(gorgonia.Nodes{y}, gorgonia.Nodes{up},
				gorgonia.Nodes{x, w, a}); err != nil {
				return err
			}
		}

		machine, err := cpuops.NewMachine(g)
		if err != nil {
			return err
		}
		took, err := timed(machine.RunAll)
		if err != nil {
			return err
		}
		if err := machine.Close(); err != nil {
			return err
		}
		if err := emit(measured(name, took, bytes, 0)); err != nil {
			return err
		}
	}

	return nil
}

// graft brings a seed from dormant to grafting.
func graft(l *state.Lattice, seed int, alpha float64) error {
	kinds := []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate,
		blueprints.MLPExpansion, blueprints.ConvFilter}
	if err := l.RequestGermination(seed, state.GerminationRequest{Slot: seed + 1,
		Kind: kinds[seed%len(kinds)]}); err != nil {
		return err
	}

	for _, to := range []state.Stage{state.Training, state.Grafting} {
		if err := l.Transition(seed, to); err != nil {
			return err
		}
	}

	return l.SetAlpha(seed, alpha)
}

// cpuTrain times training steps of a small Llama-style model: forward and backward pass, clipping and
// AdamW. The peer is the same model built from Gorgonia's own ops, on Gorgonia's machine. The memory
// is the maximum that the process has held so far.
func cpuTrain(o options) error {
	s := size{"llama3M_cpu", llm.Config{Vocab: 256, Dim: 256, Layers: 4, Heads: 4,
		FF: 704, Seq: 256}, 4, false}
	m, err := llm.NewModel(s.config.Default(), tensor.Float32, 1)
	if err != nil {
		return err
	}

	g, err := m.Graph(llm.ForTraining, s.batch)
	if err != nil {
		return err
	}

	opts := []cpuops.Option{cpuops.WithParams(g.Params...), cpuops.WithOutputs(g.Loss)}
	if o.monitor > 0 {
		opts = append(opts, cpuops.WithMonitor(o.monitor))
	}

	machine, err := cpuops.NewMachine(g.G, opts...)
	if err != nil {
		return err
	}
	defer machine.Close()

	took, err := cpuSteps(o.steps, s, machine, machine.ValueGrads(), g.Let)
	if err != nil {
		return err
	}

	if o.monitor > 0 {
		fmt.Fprint(os.Stderr, optime.Table(machine.Monitor()))
	}

	line := s.trained("train_"+s.name, took, m.NumParams())
	line.PeakGiB = peakGiB()
	if err := emit(line); err != nil {
		return err
	}

	if cpuops.UseBFloat16(true) == nil {
		took, err := cpuSteps(o.steps, s, machine, machine.ValueGrads(), g.Let)
		if err := errors.Join(err, cpuops.UseBFloat16(false)); err != nil {
			return err
		}
		line = s.trained("train_"+s.name, took, m.NumParams())
		line.Peer, line.PeakGiB = project+"_bf16", peakGiB()
		if err := emit(line); err != nil {
			return err
		}
	}

	stock, err := newStockModel(m, s.batch)
	if err != nil {
		return err
	}

	tape := gorgonia.NewTapeMachine(stock.g, gorgonia.BindDualValues(stock.params...))
	defer tape.Close()
	if took, err = cpuSteps(max(1, o.steps/4), s, tape, gorgonia.NodesToValueGrads(stock.params),
		stock.let); err != nil {
		return err
	}

	line = s.trained("train_"+s.name, took, m.NumParams())
	line.Peer, line.PeakGiB = "gorgonia", peakGiB()
	return emit(line)
}

// cpuSteps returns the median time of a training step.
func cpuSteps(steps int, s size, vm gorgonia.VM, grads []gorgonia.ValueGrad,
	let func(data.Batch) error) (time.Duration, error) {
	adamw, err := optim.NewAdamW(optim.WithLR(3e-4))
	if err != nil {
		return 0, err
	}

	random := rand.New(rand.NewPCG(1, 1))
	var times []time.Duration
	for i := range 2 + steps {
		ids := make([]int, s.batch*s.config.Seq+1)
		for j := range ids {
			ids[j] = random.IntN(s.config.Vocab)
		}

		start := time.Now()
		vm.Reset()
		if err := let(data.Batch{Inputs: ids[:len(ids)-1], Targets: ids[1:]}); err != nil {
			return 0, err
		}
		if err := vm.RunAll(); err != nil {
			return 0, err
		}
		if _, err := autodiff.ClipGlobalNorm(grads, 1); err != nil {
			return 0, err
		}
		if err := adamw.Step(grads); err != nil {
			return 0, err
		}
		if i >= 2 {
			times = append(times, time.Since(start))
		}
	}

	return median(times)
}

// peakGiB returns the maximum memory of the process, or 0 if the operating system does not report it.
func peakGiB() float64 {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}

	for line := range strings.Lines(string(status)) {
		if kib, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			n, _ := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(kib),
				"kB")), 64)
			return math.Round(n/1048576*1000) / 1000
		}
	}

	return 0
}
