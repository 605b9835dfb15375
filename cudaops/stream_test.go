package cudaops

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// KasminaStream computes the batches announced so far and then exits, as the kernel does when it has been idle.
func (k *fakeKernels) KasminaStream(l *fake.Launch, s kasmina.Stream) {
	control := fake.Slice[uint64](l, s.Control, 2)
	entries, done := fake.Slice[uint64](l, s.Entries, s.Depth), fake.Slice[uint64](l, s.Done, s.Depth)
	for batch := s.First; ; batch++ {
		place := int(batch % uint64(s.Depth))
		word := atomic.LoadUint64(&entries[place])
		if word == kasmina.StopWord(batch) || word>>2 != batch+1 {
			control[0] = batch
			atomic.StoreUint64(&control[1], 2)
			return
		}

		at := place * s.BatchBytes()
		counts := fake.Slice[uint32](l, s.Counts.Offset(4*place*s.Seeds()), s.Seeds())
		clear(counts)
		x, first := s.X.Offset(at), 0
		for i, layer := range s.Layers {
			y := s.Memory.Offset(i % 2 * s.BatchBytes())
			if i == len(s.Layers)-1 {
				y = s.Y.Offset(at)
			}
			layer.X = x
			from := place*s.Seeds() + first
			k.KasminaForward(l, kasmina.Forward{Layer: layer, Y: y, Telemetry: word&1 != 0,
				Figures: s.Figures.Offset(4 * kasmina.ForwardFigures * from),
				Bad:     s.Counts.Offset(4 * from)})
			x, first = y, first+layer.State.Seeds
		}

		flag := uint64(0)
		if slices.ContainsFunc(counts, func(n uint32) bool { return n > 0 }) {
			flag = 1
		}
		atomic.StoreUint64(&done[place], 2*(batch+1)+flag)
	}
}

// streamNet is a chain of Kasmina layers in a user's graph.
type streamNet struct {
	x, y     *gorgonia.Node
	params   gorgonia.Nodes // weights and scales of every layer
	lattices []*state.Lattice
	rand     *rand.Rand
}

// newStreamNet returns a chain of layers over 5 rows of 48 features, with the given numbers of seeds.
// Half of the seeds blend. The last slot of each layer is unwritten and unused.
func newStreamNet(t testing.TB, seed uint64, seeds []int, opts ...op.KasminaOption) *streamNet {
	t.Helper()
	const rows, features = 5, 48
	n := &streamNet{rand: rand.New(rand.NewPCG(seed, 1))}
	g := gorgonia.NewGraph()
	node := func(name string, shape ...int) *gorgonia.Node {
		x := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = float32(n.rand.NormFloat64())
		}
		return gorgonia.NewTensor(g, gorgonia.Float32, len(shape), gorgonia.WithName(name),
			gorgonia.WithShape(shape...),
			gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))))
	}

	n.x = node("x", rows, features)
	n.y = n.x
	for i, s := range seeds {
		lattice, err := state.NewLattice(s, features, state.WithoutGates())
		require.NoError(t, err)
		for j := range s / 2 {
			n.graft(t, lattice, j, j+1, blueprints.Kind((i+j)%4))
		}
		w, a := node(fmt.Sprint("weights ", i), s+1, features/s), node(fmt.Sprint("scales ", i), s+1)
		clear(w.Value().Data().([]float32)[s*features/s:])
		a.Value().Data().([]float32)[s] = 0
		n.y, err = op.Kasmina(n.y, w, a, lattice, opts...)
		require.NoError(t, err)
		n.params, n.lattices = append(n.params, w, a), append(n.lattices, lattice)
	}
	return n
}

// graft moves a dormant seed to Grafting.
func (n *streamNet) graft(t testing.TB, l *state.Lattice, seed, slot int, kind blueprints.Kind) {
	t.Helper()
	require.NoError(t, l.RequestGermination(seed, state.GerminationRequest{Slot: slot, Kind: kind}))
	require.NoError(t, l.Transition(seed, state.Training))
	require.NoError(t, l.Transition(seed, state.Grafting))
	require.NoError(t, l.SetAlpha(seed, 0.6))
}

// batch returns a random batch.
func (n *streamNet) batch() []float32 {
	x := make([]float32, n.x.Shape().TotalSize())
	for i := range x {
		x[i] = float32(n.rand.NormFloat64())
	}
	return x
}

// reference computes a batch in the user's graph on the CPU.
func (n *streamNet) reference(t testing.TB, x []float32) ([]float32, error) {
	t.Helper()
	copy(n.x.Value().Data().([]float32), x)
	m, err := cpuops.NewMachine(n.x.Graph(), cpuops.WithOutputs(n.y))
	require.NoError(t, err)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		return nil, err
	}
	return slices.Clone(n.y.Value().Data().([]float32)), nil
}

// requireNear compares results. GPUs and CPUs round differently.
func requireNear(t testing.TB, got, want []float32, at ...any) {
	t.Helper()
	var diff, norm float64
	for i := range want {
		diff += math.Pow(float64(got[i]-want[i]), 2)
		norm += math.Pow(float64(want[i]), 2)
	}
	require.Less(t, math.Sqrt(diff/norm), 1e-6, at...)
}

// onStreams runs a test on the fake driver, on a GPU, and without a device, in every mode.
func onStreams(t *testing.T, test func(t *testing.T, device *Device, mode StreamMode)) {
	for _, mode := range []StreamMode{StreamAuto, StreamPersistent, StreamLaunches} {
		t.Run("fake/"+mode.String(), func(t *testing.T) {
			device, _ := openFake(t, fake.Config{})
			test(t, device, mode)
			requireNoLeaks(t, device)
		})
		t.Run("GPU/"+mode.String(), func(t *testing.T) { test(t, openGPU(t), mode) })
	}
	t.Run("CPU", func(t *testing.T) { test(t, nil, StreamAuto) })
}

// TestStream compares streams with the CPU while lattices, telemetry and weights change between batches
// that are in flight together.
func TestStream(t *testing.T) {
	onStreams(t, func(t *testing.T, device *Device, mode StreamMode) {
		t.Run("telemetry", func(t *testing.T) { testStream(t, device, mode) })
		t.Run("none", func(t *testing.T) { testStream(t, device, mode, op.WithoutTelemetry()) })
	})
}

func testStream(t *testing.T, device *Device, mode StreamMode, opts ...op.KasminaOption) {
	seed := randomSeed(t)
	a, b := newStreamNet(t, seed, []int{12, 12, 12}, opts...), newStreamNet(t, seed, []int{12, 12, 12}, opts...)
	s, err := NewStream(device, a.y, StreamOptions{Depth: 4, Mode: mode})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	ctx := context.Background()

	changes := []func(n *streamNet){
		func(n *streamNet) { require.NoError(t, n.lattices[0].SetAlpha(2, 0.9)) },
		func(n *streamNet) { require.NoError(t, n.lattices[1].Transition(3, state.RolledBack)) },
		func(n *streamNet) { n.graft(t, n.lattices[2], 8, 12, blueprints.MLPExpansion) }, // unwritten
		func(n *streamNet) {
			require.NoError(t, n.lattices[1].SetTelemetry(state.Telemetry{Mode: state.Sampling,
				Every: 3, Share: 0.5}))
		},
		func(n *streamNet) {
			require.NoError(t, n.lattices[0].SetTelemetry(state.Telemetry{Mode: state.Off}))
		},
	}
	for round := range 10 {
		type flight struct {
			batch uint64
			want  []float32
		}
		var flights []flight
		for i := range 1 + round%4 {
			if at := 4*round + i; at%7 == 6 && at/7 < len(changes) {
				changes[at/7](a)
				changes[at/7](b)
			}
			x := a.batch()
			batch, err := s.Submit(ctx, x)
			require.NoError(t, err)
			want, err := b.reference(t, x)
			require.NoError(t, err)
			flights = append(flights, flight{batch, want})
		}
		for _, f := range flights {
			y := make([]float32, len(f.want))
			require.NoError(t, s.Wait(ctx, f.batch, y))
			requireNear(t, y, f.want, "batch %d", f.batch)
		}
		for i := range a.lattices {
			sameReports(t, fmt.Sprintf("round %d, layer %d", round, i), a.lattices[i].Report(),
				b.lattices[i].Report())
		}
		if persistent := mode != StreamLaunches && device != nil; persistent {
			require.NoError(t, s.Fallback())
		} else {
			require.Error(t, s.Fallback())
		}

		for _, n := range []*streamNet{a, b} {
			w := n.params[2*(round%3)].Value().Data().([]float32)
			for i := range w[4 : len(w)-4] { // the last slot may have been started in one of the graphs
				w[i] *= 0.9
			}
		}
		require.NoError(t, s.Refresh(ctx))
	}
}

// TestStreamSameBits compares the persistent kernel with launches: outputs and reports must be identical.
func TestStreamSameBits(t *testing.T) {
	device := openGPU(t)
	for _, precision := range []Precision{Float32, BFloat16, Float16} {
		seed := randomSeed(t)
		var outputs [2][][]float32
		var reports [2][]state.SeedReport
		for i, mode := range []StreamMode{StreamPersistent, StreamLaunches} {
			n := newStreamNet(t, seed, []int{12, 12, 12, 12})
			s, err := NewStream(device, n.y, StreamOptions{Mode: mode, Precision: precision})
			require.NoError(t, err)
			for batch := range 20 {
				if batch == 11 {
					require.NoError(t, n.lattices[1].SetAlpha(2, 0.3))
				}
				y := n.batch()
				require.NoError(t, s.Run(context.Background(), y, y))
				outputs[i] = append(outputs[i], y)
				for _, l := range n.lattices {
					reports[i] = append(reports[i], l.Report().Seeds...)
				}
			}
			require.NoError(t, s.Close())
		}
		require.Equal(t, outputs[1], outputs[0], precision)
		require.Equal(t, reports[1], reports[0], precision)
	}
}

// TestStreamFallsBack checks that a stream computes batches without the persistent kernel while that cannot
// compute them, with the same results, and returns to the kernel afterwards.
func TestStreamFallsBack(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	own, err := ownKind()
	require.NoError(t, err)
	seed := randomSeed(t)
	a, b := newStreamNet(t, seed, []int{12, 12}), newStreamNet(t, seed, []int{12, 12})
	s, err := NewStream(device, a.y, StreamOptions{Depth: 3})
	require.NoError(t, err)
	ctx := context.Background()
	check := func(want string) {
		t.Helper()
		x := a.batch()
		y, err := b.reference(t, x)
		require.NoError(t, err)
		got := make([]float32, len(x))
		require.NoError(t, s.Run(ctx, x, got))
		requireNear(t, got, y)
		for i := range a.lattices {
			sameReports(t, want, a.lattices[i].Report(), b.lattices[i].Report())
		}
		if want == "" {
			require.NoError(t, s.Fallback())
		} else {
			require.ErrorContains(t, s.Fallback(), want)
		}
	}

	both := func(change func(n *streamNet)) {
		change(a)
		change(b)
	}
	telemetry := func(c state.Telemetry) {
		both(func(n *streamNet) { require.NoError(t, n.lattices[1].SetTelemetry(c)) })
	}

	check("")
	telemetry(state.Telemetry{Mode: state.Debug})
	check("layer 1: the telemetry includes histograms")
	telemetry(state.Telemetry{Reduction: state.MeanOfRows})
	check("layer 1: the telemetry is reduced by the ")
	telemetry(state.Telemetry{})
	check("")
	both(func(n *streamNet) { n.graft(t, n.lattices[0], 9, 12, own) })
	check("the kind has no kernel")
	check("the kind has no kernel")
	both(func(n *streamNet) { require.NoError(t, n.lattices[0].Transition(9, state.RolledBack)) })
	check("")
	require.NoError(t, s.Close())
	requireNoLeaks(t, device)
}

// TestStreamUnfit checks why a stream cannot use the persistent kernel at all.
func TestStreamUnfit(t *testing.T) {
	device, driver := openFake(t, fake.Config{})
	for want, c := range map[string]struct {
		device *Device
		net    *streamNet
	}{
		"no NVIDIA GPU":  {nil, newStreamNet(t, 1, []int{12})},
		"in strict mode": {device, newStreamNet(t, 1, []int{12}, op.WithStability(op.Strict))},
		"chunks of 4 and 3 features take different kernels": {device, newStreamNet(t, 1, []int{12, 16})},
		"a batch has 4198400 bytes, more than 4194304":      {device, largeNet(t)},
	} {
		s, err := NewStream(c.device, c.net.y, StreamOptions{})
		require.NoError(t, err)
		require.ErrorContains(t, s.Fallback(), want)
		x := c.net.batch()
		y := make([]float32, len(x))
		require.NoError(t, s.Run(context.Background(), x, y))
		require.ErrorContains(t, s.Fallback(), want)
		require.NoError(t, s.Close())
		if _, err = NewStream(c.device, c.net.y, StreamOptions{Mode: StreamPersistent}); len(x) < 1<<20 {
			require.ErrorContains(t, err, want)
		}
	}

	// The driver reports that the launch does not fit on the device.
	n := newStreamNet(t, 1, []int{12})
	s, err := NewStream(device, n.y, StreamOptions{})
	require.NoError(t, err)
	x := n.batch()
	require.NoError(t, device.kernels.Close())
	driver.Fail("cuLaunchKernel", 1, gpu.CooperativeTooLarge)
	for range 2 {
		require.NoError(t, s.Run(context.Background(), x, x))
		require.ErrorIs(t, s.Fallback(), gpu.CooperativeTooLarge)
	}
	require.NoError(t, s.Close())
	requireNoLeaks(t, device)
}

// largeNet returns a layer over more than 4 MiB.
func largeNet(t *testing.T) *streamNet {
	n := &streamNet{rand: rand.New(rand.NewPCG(1, 1)), y: benchmarkNet(t, 1025, 1024, 2, 1)}
	n.x = graph.Children(n.y)[0]
	return n
}

// TestStreamErrors checks the errors for wrong arguments and calls, after which the stream still works.
func TestStreamErrors(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	n := newStreamNet(t, 1, []int{12})
	g := n.x.Graph()
	lattice, err := state.NewLattice(12, 48)
	require.NoError(t, err)
	empty, err := op.Kasmina(n.x, gorgonia.NewMatrix(g, gorgonia.Float32, gorgonia.WithShape(13, 4),
		gorgonia.WithName("empty")), n.params[1], lattice)
	require.NoError(t, err)
	for want, make := range map[string]func() (*Stream, error){
		"the node is nil":            func() (*Stream, error) { return NewStream(device, nil, StreamOptions{}) },
		"is not a Kasmina layer":     func() (*Stream, error) { return NewStream(device, n.x, StreamOptions{}) },
		"the depth is -1":            func() (*Stream, error) { return NewStream(device, n.y, StreamOptions{Depth: -1}) },
		"the idle time is -1ns":      func() (*Stream, error) { return NewStream(device, n.y, StreamOptions{Idle: -1}) },
		"the precision is f8":        func() (*Stream, error) { return NewStream(device, n.y, StreamOptions{Precision: Float8}) },
		"the mode is 9":              func() (*Stream, error) { return NewStream(device, n.y, StreamOptions{Mode: 9}) },
		"empty (13, 4) has no value": func() (*Stream, error) { return NewStream(device, empty, StreamOptions{}) },
	} {
		_, err := make()
		require.ErrorContains(t, err, "cudaops.NewStream: ")
		require.ErrorContains(t, err, want)
	}

	s, err := NewStream(device, n.y, StreamOptions{Depth: 2})
	require.NoError(t, err)
	ctx := context.Background()
	x := n.batch()
	_, err = s.Submit(ctx, x[1:])
	require.ErrorContains(t, err, "the batch has 239 elements, want 5 rows of 48")
	for i := range 2 {
		batch, err := s.Submit(ctx, x)
		require.NoError(t, err)
		require.EqualValues(t, i, batch)
	}

	_, err = s.Submit(ctx, x)
	require.ErrorIs(t, err, ErrStreamFull)
	require.ErrorContains(t, err, "wait for batch 0 first")
	require.ErrorContains(t, s.Wait(ctx, 0, x[1:]), "the result has room for 239 elements")
	require.ErrorContains(t, s.Wait(ctx, 2, x), "batch 2 has not been submitted")
	require.NoError(t, s.Wait(ctx, 1, x))
	require.ErrorContains(t, s.Wait(ctx, 1, x), "batch 1 has not been submitted, or has been waited for")

	cause := errors.New("enough")
	canceled, cancel := context.WithCancelCause(ctx)
	cancel(cause)
	require.NoError(t, s.Wait(ctx, 0, x))
	_, err = s.Submit(canceled, x)
	require.ErrorIs(t, err, cause)
	require.NoError(t, s.Run(ctx, x, x))

	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	_, err = s.Submit(ctx, x)
	require.ErrorIs(t, err, ErrStreamClosed)
	require.ErrorIs(t, s.Wait(ctx, 0, x), ErrStreamClosed)
	require.ErrorIs(t, s.Refresh(ctx), ErrStreamClosed)
	requireNoLeaks(t, device)
}

// TestStreamCanceled cancels a context while a batch is in flight. The batch can still be waited for.
func TestStreamCanceled(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	n := newStreamNet(t, 1, []int{12})
	s, err := NewStream(device, n.y, StreamOptions{Depth: 2})
	require.NoError(t, err)
	x := n.batch()
	canceled, cancel := context.WithCancel(context.Background())
	batch, err := s.Submit(canceled, x)
	require.NoError(t, err)
	cancel()
	require.ErrorIs(t, s.Wait(canceled, batch, x), context.Canceled) // the fake runs nothing at first
	require.NoError(t, s.Wait(context.Background(), batch, x))

	// Run abandons its batch, so that the stream does not fill up.
	for range 5 {
		require.ErrorIs(t, s.Run(canceled, x, x), context.Canceled)
	}
	require.NoError(t, s.Run(context.Background(), x, x))
	require.NoError(t, s.Close())
	requireNoLeaks(t, device)
}

// TestStreamProcess checks complete sequences of batches, sequences that the consumer stops, and errors.
func TestStreamProcess(t *testing.T) {
	onStreams(t, func(t *testing.T, device *Device, mode StreamMode) {
		n := newStreamNet(t, randomSeed(t), []int{12})
		s, err := NewStream(device, n.y, StreamOptions{Depth: 3, Mode: mode})
		require.NoError(t, err)
		ctx := context.Background()
		var batches, want [][]float32
		for range 10 {
			x := n.batch()
			y, err := n.reference(t, x)
			require.NoError(t, err)
			batches, want = append(batches, x), append(want, y)
		}

		for _, end := range []int{10, 4} {
			i := 0
			for y, err := range s.Process(ctx, slices.Values(batches)) {
				require.NoError(t, err)
				requireNear(t, y, want[i], i)
				if i++; i == end {
					break
				}
			}
			require.Equal(t, end, i)
		}

		batches[5] = batches[5][1:]
		results := 0
		for _, err = range s.Process(ctx, slices.Values(batches)) {
			if err == nil {
				results++
			}
		}
		require.ErrorContains(t, err, "the batch has 239 elements")
		require.LessOrEqual(t, results, 5)
		require.NoError(t, s.Close())
	})
}

// TestStreamNonFinite checks that NaN propagates, that layers with telemetry count it, and that its batch fails
// if the layer has the option StopOnNonFinite.
func TestStreamNonFinite(t *testing.T) {
	onStreams(t, func(t *testing.T, device *Device, mode StreamMode) {
		for _, opts := range [][]op.KasminaOption{nil, {op.StopOnNonFinite()},
			{op.StopOnNonFinite(), op.WithoutTelemetry()}} {
			n := newStreamNet(t, randomSeed(t), []int{12, 12}, opts...)
			s, err := NewStream(device, n.y, StreamOptions{Mode: mode})
			require.NoError(t, err)
			ctx := context.Background()
			x := n.batch()
			y := make([]float32, len(x))
			require.NoError(t, s.Run(ctx, x, y))
			x[7] = float32(math.NaN())
			if err := s.Run(ctx, x, y); opts == nil {
				require.NoError(t, err)
				require.True(t, y[7] != y[7])
			} else {
				require.ErrorIs(t, err, op.ErrNonFinite)
			}
			want := 1
			if len(opts) > 1 { // without telemetry
				want = 0
			}
			require.Equal(t, want, n.lattices[0].Report().Seeds[1].NonFiniteX)
			x[7] = 0
			require.NoError(t, s.Run(ctx, x, y))
			require.NoError(t, s.Close())
		}
	})
}

// TestStreamFailures makes calls of the driver fail. Nothing may leak, and the stream must work
// afterwards.
func TestStreamFailures(t *testing.T) {
	for _, call := range []string{"cuStreamCreate", "cuMemHostAlloc", "cuMemAlloc", "cuEventCreate",
		"cuMemcpyHtoDAsync", "cuStreamSynchronize", "cuLaunchKernel"} {
		for nth := 1; ; nth++ {
			device, driver := openFake(t, fake.Config{})
			n := newStreamNet(t, 1, []int{12, 12})
			s, err := NewStream(device, n.y, StreamOptions{Mode: StreamPersistent})
			require.NoError(t, err)
			x := n.batch()
			want, err := n.reference(t, x)
			require.NoError(t, err)
			y := make([]float32, len(x))

			driver.Fail(call, nth, gpu.NotSupported)
			err = s.Run(context.Background(), x, y)
			failed := driver.Pending(call) == 0
			driver.Cancel(call)
			if failed {
				require.ErrorIs(t, err, gpu.NotSupported, call, nth)
			}
			require.NoError(t, s.Run(context.Background(), x, y), call, nth)
			requireNear(t, y, want, call, nth)
			require.NoError(t, s.Close(), call, nth)
			requireNoLeaks(t, device, call, nth)
			if !failed {
				require.Greater(t, nth, 1, call)
				break
			}
		}
	}
}

// TestStreamLost loses the context while a batch is in flight, which must not make Wait hang.
func TestStreamLost(t *testing.T) {
	device, driver := openFake(t, fake.Config{})
	n := newStreamNet(t, 1, []int{12})
	s, err := NewStream(device, n.y, StreamOptions{})
	require.NoError(t, err)
	x := n.batch()
	batch, err := s.Submit(context.Background(), x)
	require.NoError(t, err)
	driver.Fail("cuEventQuery", 1, gpu.IllegalAddress)
	require.ErrorIs(t, s.Wait(context.Background(), batch, x), gpu.IllegalAddress)
	require.ErrorIs(t, s.Wait(context.Background(), batch, x), gpu.IllegalAddress)
	_, err = s.Submit(context.Background(), x)
	require.ErrorIs(t, err, gpu.IllegalAddress)
	require.ErrorIs(t, s.Close(), gpu.IllegalAddress)
}

// TestStreamConcurrent submits on one goroutine and waits on another one.
func TestStreamConcurrent(t *testing.T) {
	randtest.Concurrent(t)
	onStreams(t, func(t *testing.T, device *Device, mode StreamMode) {
		n := newStreamNet(t, randomSeed(t), []int{12})
		s, err := NewStream(device, n.y, StreamOptions{Depth: 4, Mode: mode, Idle: time.Millisecond})
		require.NoError(t, err)
		ctx := context.Background()
		x := n.batch()
		want, err := n.reference(t, x)
		require.NoError(t, err)

		var group sync.WaitGroup
		submitted := make(chan uint64, 2) // with the batch being sent and the one being waited for: 4
		group.Go(func() {
			defer close(submitted)
			for range 50 {
				batch, err := s.Submit(ctx, x)
				if err != nil {
					t.Error(err)
					return
				}
				submitted <- batch
			}
		})
		y := make([]float32, len(x))
		for batch := range submitted {
			require.NoError(t, s.Wait(ctx, batch, y))
			requireNear(t, y, want, batch)
		}
		group.Wait()
		require.NoError(t, s.Close())
	})
}

// BenchmarkStream times batches, as a program sees them, on a CPU (StreamAuto), with launches, and with the
// persistent kernel: one after another with Run, and several in flight with Process.
func BenchmarkStream(b *testing.B) {
	device := openGPU(b)
	for _, shape := range []struct{ rows, features, seeds int }{{1, 64, 16}, {16, 256, 64}, {64, 1024, 256},
		{64, 4000, 1000}, {256, 4096, 1024}} {
		for _, layers := range []int{1, 4, 8} {
			for _, mode := range []StreamMode{StreamAuto, StreamLaunches, StreamPersistent} {
				name := fmt.Sprintf("%dx%d_l%d/%v", shape.rows, shape.features, layers, mode)
				y := benchmarkNet(b, shape.rows, shape.features, shape.seeds, layers)
				on := device
				if mode == StreamAuto { // on the CPU
					on = nil
				}
				s, err := NewStream(on, y, StreamOptions{Mode: mode})
				require.NoError(b, err)
				x := make([]float32, shape.rows*shape.features)
				for i := range x {
					x[i] = float32(i%7) - 3
				}
				out := make([]float32, len(x))
				ctx := context.Background()
				for range 3 { // allocates memory, loads kernels and captures graphs
					require.NoError(b, s.Run(ctx, x, out))
				}
				b.Run(name+"/Run", func(b *testing.B) {
					for b.Loop() {
						require.NoError(b, s.Run(ctx, x, out))
					}
				})
				b.Run(name+"/Process", func(b *testing.B) {
					batches := func(yield func([]float32) bool) {
						for range b.N {
							if !yield(x) {
								return
							}
						}
					}
					for _, err := range s.Process(ctx, batches) {
						require.NoError(b, err)
					}
				})
				require.NoError(b, s.Close())
			}
		}
	}
}

// benchmarkNet returns a chain of layers without telemetry. All seeds blend.
func benchmarkNet(b testing.TB, rows, features, seeds, layers int) *gorgonia.Node {
	g := gorgonia.NewGraph()
	node := func(name string, shape ...int) *gorgonia.Node {
		x := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = float32(i%5) / 5
		}
		return gorgonia.NewTensor(g, gorgonia.Float32, len(shape), gorgonia.WithName(name),
			gorgonia.WithShape(shape...),
			gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))))
	}

	y := node("x", rows, features)
	for i := range layers {
		lattice, err := state.NewLattice(seeds, features, state.WithoutGates(),
			state.WithTelemetry(state.Telemetry{Mode: state.Off}))
		require.NoError(b, err)
		for j := range seeds {
			new(streamNet).graft(b, lattice, j, j+1, blueprints.Kind(j%4))
		}
		y, err = op.Kasmina(y, node(fmt.Sprint("w", i), seeds+1, features/seeds),
			node(fmt.Sprint("a", i), seeds+1), lattice, op.WithoutTelemetry())
		require.NoError(b, err)
	}
	return y
}
