package opbench

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/optime"
)

// Names of the peers, the implementations to compare.
const cpuPeer, gpuPeer, tapePeer = "cpu", "cuda", "gorgonia"

// peer returns the name of an implementation, or "" if the implementation does not take part in b. It
// returns an error if the implementation does not support b's type.
type peer func(b *bench) (name string, err error)

func onCPU(b *bench) (string, error) {
	switch rounds := gemm.RoundsToBFloat16(); b.dtype {
	case Float64:
		return cpuPeer, nil
	case Float32:
		if rounds {
			return cpuPeer, errors.New(
				"products round to bfloat16: call cpuops.UseBFloat16(false)")
		}
		return cpuPeer, nil
	case BFloat16:
		if !rounds {
			return cpuPeer, errors.New("products do not round to bfloat16: " +
				"call cpuops.UseBFloat16(true) if the CPU supports it")
		}
		return cpuPeer, nil
	}

	return cpuPeer, fmt.Errorf("a CPU does not support %s", b.dtype)
}

// precisions maps the types supported by GPUs to precisions.
var precisions = map[Dtype]cudaops.Precision{Float32: cudaops.Float32, BFloat16: cudaops.BFloat16,
	Float16: cudaops.Float16, Float8: cudaops.Float8}

func onGPU(b *bench) (string, error) {
	if b.device == nil {
		return "", nil
	}
	if _, ok := precisions[b.dtype]; !ok {
		return gpuPeer, fmt.Errorf("a GPU does not support %s", b.dtype)
	}
	return gpuPeer, nil
}

func onTape(b *bench) (string, error) {
	if b.dtype != Float32 && b.dtype != Float64 {
		return tapePeer, fmt.Errorf("no ops of Gorgonia for %s", b.dtype)
	}
	return tapePeer, nil
}

// timed runs a graph on a peer. It returns the time of a run, the machine's choices and the result.
func (b *bench) timed(peer string, g *graph,
	rules []string) (took time.Duration, choices []optime.Choice, y gorgonia.Value, err error) {
	defer func() {
		if cause := recover(); cause != nil { // an op of Gorgonia panicked
			err = fmt.Errorf("running the graph: %v", cause)
		}
	}()

	switch peer {
	case gpuPeer:
		return b.timedOnGPU(g, rules)
	case cpuPeer:
		m, err := cpuops.NewMachine(g.g, cpuops.WithOutputs(g.y), cpuops.WithVariants(rules...))
		if err != nil {
			return 0, nil, nil, err
		}
		took, err := b.wallClock(m.RunAll)
		choices = m.Choices()
		if err == nil {
			y, err = m.Value(g.y)
		}
		return took, choices, y, errors.Join(err, m.Close())
	}

	tape := gorgonia.NewTapeMachine(g.g)
	took, err = b.wallClock(func() error {
		tape.Reset()
		return tape.RunAll()
	})
	return took, nil, g.y.Value(), errors.Join(err, tape.Close())
}

// leastRuns is the minimum number of timed runs of a pass.
const leastRuns = 5

// wallClock returns the median wall-clock time of a run, ignoring the first one.
func (b *bench) wallClock(run func() error) (time.Duration, error) {
	var times []time.Duration
	for begin := time.Now(); len(times) <= leastRuns || time.Since(begin) < b.span; {
		start := time.Now()
		if err := run(); err != nil {
			return 0, err
		}
		times = append(times, time.Since(start))
	}

	times = times[1:]
	slices.Sort(times)
	return times[len(times)/2], nil
}

// timedOnGPU returns the mean device time of a run, as measured by the machine's monitor.
func (b *bench) timedOnGPU(g *graph,
	rules []string) (took time.Duration, choices []optime.Choice, y gorgonia.Value, err error) {
	opts := append([]cudaops.MachineOption{cudaops.WithTuning(cudaops.TuneOff)}, b.machine...)
	opts = append(opts, cudaops.WithPrecision(precisions[b.dtype]), cudaops.WithParams(g.params...),
		cudaops.WithOutputs(g.y), cudaops.WithMonitor(2), cudaops.WithVariants(rules...))
	m, err := cudaops.NewMachine(b.device, g.g, opts...)
	if err != nil {
		return 0, nil, nil, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()

	begin := time.Now()
	for runs := 0; took == 0 || runs <= 2*leastRuns || time.Since(begin) < b.span; runs++ {
		if err := m.RunAll(); err != nil {
			return 0, nil, nil, err
		}
		if y, err = m.Value(g.y); err != nil { // wait for the device
			return 0, nil, nil, err
		}
		times, err := m.Monitor()
		if err != nil {
			return 0, nil, nil, err
		}
		took = 0
		for _, t := range times {
			took += t.Time
		}
		if took == 0 && time.Since(begin) > b.span+time.Minute {
			return 0, nil, nil, errors.New("no run was timed within a minute")
		}
	}

	return took, m.Choices(), y, nil
}
