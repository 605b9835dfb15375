package cudaops

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/comm"
	"github.com/kasmina-go/kasmina/comm/loopback"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
)

// fakeMemory lets collectives over loopback work in a fake driver's memory, in the place of NCCL:
// when all that was enqueued before is done.
type fakeMemory struct{ ctx *gpu.Observed }

func (f fakeMemory) device() *fake.Context { return f.ctx.Context.(*fake.Context) }

func (f fakeMemory) Alloc(bytes int) (comm.Ptr, error) {
	p, err := f.device().Alloc(bytes)
	return comm.Ptr(p), err
}
func (f fakeMemory) Free(p comm.Ptr) error { return f.device().Free(gpu.Ptr(p)) }
func (f fakeMemory) Bytes(p comm.Ptr, n int) ([]byte, error) {
	return f.device().Bytes(gpu.Ptr(p), n)
}
func (f fakeMemory) Enqueue(s comm.Stream, work func() error) error {
	return errors.Join(f.device().SyncStream(gpu.Stream(s)), work())
}

// eachRank runs f at so many ranks, each with a fake device of its own and a group on it.
func eachRank(t *testing.T, size int, f func(rank int, d *Device, g comm.Group,
	kernels MachineOption)) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	var wg sync.WaitGroup
	for r := range size {
		d, _, kernels := openFake(t, fake.Config{})
		wg.Go(func() {
			w, err := comm.Join(t.Context(), comm.Place{Rank: r, Size: size,
				LocalRank: r, LocalSize: size,
				MasterAddr: "127.0.0.1", MasterPort: port, Run: fmt.Sprint(t.Name(), port)},
				comm.Options{Timeout: time.Minute})
			if err != nil {
				t.Error(err)
				return
			}
			g, err := loopback.New(t.Context(), w, fakeMemory{d.ctx})
			if err != nil {
				t.Error(err)
				return
			}
			passed := false
			defer func() {
				if !passed { // nobody is to wait for it
					g.Abort(errors.New("the test has failed at this rank"))
				}
			}()
			f(r, d, g, kernels)
			passed = true
			if err := errors.Join(w.Barrier(t.Context(), "done"), g.Close(),
				w.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// notCaptured is for groups whose work cannot be captured. Gradients travel in several buckets.
func notCaptured(c *machineConfig) error {
	c.ranks.Uncaptured, c.ranks.Bucket = true, 1
	return nil
}

// ranked is a graph with a parameter of several chunks, a vector and matrices.
func ranked(t *testing.T) (loss *gorgonia.Node, x *gorgonia.Node, targets *gorgonia.Node,
	params gorgonia.Nodes) {
	t.Helper()
	r := rand.New(rand.NewPCG(3, 4))
	g := gorgonia.NewGraph()
	param := func(name string, shape ...int) *gorgonia.Node {
		data := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range data {
			data[i] = float32(r.NormFloat64()) / 8
		}
		n := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...),
			tensor.WithBacking(data)), gorgonia.WithName(name))
		params = append(params, n)
		return n
	}
	x = gorgonia.NewTensor(g, tensor.Float32, 2, gorgonia.WithShape(6, 64), gorgonia.WithName("x"))
	targets = gorgonia.NewTensor(g, tensor.Int, 1, gorgonia.WithShape(6),
		gorgonia.WithName("targets"))
	try := func(n *gorgonia.Node, err error) *gorgonia.Node {
		require.NoError(t, err)
		return n
	}
	y := try(op.Linear(x, param("a", 48, 64)))
	y = try(op.Linear(y, param("b", 64, 48)))
	y = try(op.SiLUMLP(y, param("gate", 32, 64), param("up", 32, 64), param("down", 64, 32)))
	y = try(op.RMSNorm(y, param("norm", 64), 1e-5))
	loss = try(op.LinearCrossEntropy(y, param("head", 600, 64), targets))
	_, err := gorgonia.Grad(loss, params...)
	require.NoError(t, err)
	return loss, x, targets, params
}

// TestRanks: where gradients leave beside the runs that make them and where they do so behind these,
// several GPUs have the parameters and moments of one, after updates of the same
// micro-batches, and go on from what the optimiser remembers on any number of them.
func TestRanks(t *testing.T) {
	for name, make := range map[string]func() (optim.Optimizer, error){"AdamW": newAdamW,
		"Muon": func() (optim.Optimizer, error) {
			return optim.NewMuon()
		}} {
		t.Run(name, func(t *testing.T) {
			var want []string
			for _, c := range []struct {
				size, then int
				beside     bool
			}{{1, 1, false}, {2, 2, false}, {2, 2, true}, {3, 1, true}, {4, 3, true}, {1, 2, true}} {
				how := stepped{batches: 4, beside: c.beside}
				state, values := trainRanks(t, make, c.size, how, nil, nil, 3)
				got := trainRanksText(trainRanks(t, make, c.then, how, state, values, 2))
				if want == nil {
					want = got
				}
				requireSame(t, want, got, "%+v", c)
			}
			one := trainRanksText(trainRanks(t, make, 1, stepped{batches: 8}, nil, nil, 2))
			how := stepped{batches: 8, beside: true}
			requireSame(t, one, trainRanksText(trainRanks(t, make, 8, how, nil, nil, 2)), "8 ranks")
		})
	}
}

// requireSame is require.Equal, whose message would show all numbers.
func requireSame(t *testing.T, want, got []string, format string, args ...any) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		name, _, _ := strings.Cut(want[i], " ")
		require.True(t, want[i] == got[i], "%s: %s", name, fmt.Sprintf(format, args...))
	}
}

// TestRanksOneRound: two GPUs whose steps are one round, so that updates of AdamW add what both have,
// have the bits of one with two rounds, also where the update does not wait for the losses.
func TestRanksOneRound(t *testing.T) {
	for name, make := range map[string]func() (optim.Optimizer, error){"AdamW": newAdamW,
		"Muon": func() (optim.Optimizer, error) { return optim.NewMuon() }} {
		t.Run(name, func(t *testing.T) {
			want := trainRanksText(trainRanks(t, make, 1, stepped{batches: 2}, nil, nil, 4))
			for _, how := range []stepped{{2, false, false}, {2, true, false}, {2, false, true},
				{2, true, true}} {
				requireSame(t, want, trainRanksText(trainRanks(t, make, 2, how, nil, nil, 4)),
					"%+v", how)
			}
		})
	}
}

// TestRanksLossThatIsNone: where the loss of one of several ranks is not finite, no parameter of any
// changes, and the next step is made.
func TestRanksLossThatIsNone(t *testing.T) {
	eachRank(t, 2, func(rank int, d *Device, g comm.Group, kernels MachineOption) {
		loss, x, targets, nodes := ranked(t)
		m, err := NewMachine(d, loss.Graph(), kernels, WithParams(nodes...), WithOutputs(loss),
			WithRanks(g), WithRounds(1), notCaptured)
		require.NoError(t, err)
		defer m.Close()
		o, err := newAdamW()
		require.NoError(t, err)
		require.NoError(t, m.SetOptimizer(o, 0.1))
		before := fmt.Sprint(nodes[0].Value())
		for i := range 3 {
			in := tensor.New(tensor.WithShape(6, 64), tensor.Of(tensor.Float32))
			for k := range in.Float32s() {
				in.Float32s()[k] = float32(k%7) - 3
			}
			require.NoError(t, errors.Join(m.Expect(2, true), gorgonia.Let(x, in),
				gorgonia.Let(targets, tensor.New(tensor.WithShape(6), tensor.Of(tensor.Int))),
				m.RunAll(), m.Contribute(2, true)))
			spoil := i < 2 && i == rank
			if spoil {
				at := m.runner.Program.Values[loss].Ptr()
				b, err := d.ctx.Context.(*fake.Context).Bytes(at, 4)
				require.NoError(t, err)
				binary.LittleEndian.PutUint32(b, math.Float32bits(float32(math.NaN())))
			}
			var told []float64
			_, err := m.StepTogether(loss, func(l float64) error {
				told = append(told, l)
				return nil
			})
			require.Len(t, told, 1)
			require.Equal(t, spoil, math.IsNaN(told[0]))
			if i < 2 && !spoil {
				require.ErrorIs(t, err, ErrNonFinite)
			} else {
				require.NoError(t, err)
			}
			require.NoError(t, errors.Join(m.GatherState(), m.Download()))
			if changed := fmt.Sprint(nodes[0].Value()) != before; changed != (i == 2) {
				t.Errorf("rank %d, step %d: the parameters have changed: %v", rank, i, changed)
			}
		}
		if rank == 0 {
			_, err = m.StepTogether(loss, nil)
			require.ErrorContains(t, err, "nil")
			require.ErrorContains(t, m.Contribute(1, true), "one round of two ranks")
		}
	})
}

func trainRanksText(state []optim.Tensor, values []*tensor.Dense) (all []string) {
	for _, s := range state {
		all = append(all, fmt.Sprintf("%s %x", s.Name, s.Data))
	}
	for _, v := range values {
		all = append(all, fmt.Sprintf("%x", v.Data()))
	}
	return all
}

// stepped is how steps are made.
type stepped struct {
	batches  int
	beside   bool // gradients leave beside the runs
	together bool // the update does not wait for the losses
}

// trainRanks makes updates on a number of ranks, and returns what rank 0 has in the end.
func trainRanks(t *testing.T, make func() (optim.Optimizer, error), size int, how stepped,
	state []optim.Tensor, values []*tensor.Dense,
	steps int) (after []optim.Tensor, params []*tensor.Dense) {
	t.Helper()
	batches := how.batches
	eachRank(t, size, func(rank int, d *Device, g comm.Group, kernels MachineOption) {
		loss, x, targets, nodes := ranked(t)
		for i, v := range values {
			copy(nodes[i].Value().Data().([]float32), v.Float32s())
		}
		o, err := make()
		require.NoError(t, err)
		require.NoError(t, o.Declare(gorgonia.NodesToValueGrads(nodes)))
		require.NoError(t, o.SetState(state))
		options := []MachineOption{kernels, WithParams(nodes...), WithOutputs(loss), WithRanks(g),
			notCaptured}
		if batches%size == 0 {
			options = append(options, WithRounds(batches/size))
		}
		m, err := NewMachine(d, loss.Graph(), options...)
		require.NoError(t, err)
		defer m.Close()
		require.NoError(t, m.SetOptimizer(o, 0.1))
		divided := 0
		for _, in := range m.inputs.All {
			if in.Part != nil {
				divided++
			}
		}
		require.Equal(t, size > 1, divided > 0)
		r := rand.New(rand.NewPCG(uint64(len(state)), 9))
		for range steps {
			for b := range batches {
				in, ids := tensor.New(tensor.WithShape(6, 64), tensor.Of(tensor.Float32)),
					tensor.New(tensor.WithShape(6), tensor.Of(tensor.Int))
				for i := range in.Float32s() {
					in.Float32s()[i] = float32(r.NormFloat64())
				}
				for i := range ids.Ints() {
					ids.Ints()[i] = r.IntN(600)
				}
				if b%size == rank {
					if how.beside {
						require.NoError(t, m.Expect(min(size, batches-b/size*size), b < size))
					}
					require.NoError(t, errors.Join(gorgonia.Let(x, in), gorgonia.Let(targets, ids),
						m.RunAll()))
				}
				if b%size == size-1 || b == batches-1 {
					require.NoError(t, m.Contribute(b%size+1, b < size))
				}
			}
			update := m.Update
			if how.together {
				update = func() (float64, error) {
					return m.StepTogether(loss, func(l float64) error {
						if !(l > 1) {
							t.Errorf("the loss is %v", l)
						}
						return nil
					})
				}
			}
			norm, err := update()
			require.NoError(t, err)
			require.Greater(t, norm, 0.1, "nothing is clipped")
		}
		parts, err := m.DownloadOwn()
		require.NoError(t, err)
		own := o.(optim.Partial).StateParts(parts)
		require.NoError(t, m.GatherState())
		require.NoError(t, m.Download())
		require.Equal(t, own, o.(optim.Partial).StateParts(parts))
		if rank == 0 {
			after = o.State()
			for _, n := range nodes {
				params = append(params, n.Value().(*tensor.Dense))
			}
		}
	})
	return after, params
}

// silent is a group of two ranks at the first, which notes when it is asked to do something.
type silent struct {
	comm.Group
	asked    func(s comm.Stream)
	received func(p comm.Ptr, bytes int, s comm.Stream) // outside of rounds; nil for asked alone
}

func (s *silent) Rank() int                                  { return 0 }
func (s *silent) Size() int                                  { return 2 }
func (s *silent) Batch(f func(comm.Collectives) error) error { return f(s) }
func (s *silent) Send(_ comm.Ptr, _ int, _ comm.Type, _ int, on comm.Stream) error {
	s.asked(on)
	return nil
}
func (s *silent) Recv(p comm.Ptr, n int, t comm.Type, _ int, on comm.Stream) error {
	if s.asked(on); s.received != nil {
		s.received(p, n*t.Size(), on)
	}
	return nil
}
func (s *silent) AllReduce(_, _ comm.Ptr, _ int, _ comm.Type, _ comm.Op, _ comm.Stream) error {
	return nil
}

// TestRanksExchangeBeside: gradients leave on a stream of their own while the run that makes them is
// still being enqueued, in what is captured of it too, and do not leave again behind it.
func TestRanksExchangeBeside(t *testing.T) {
	d, _, kernels := openFake(t, fake.Config{})
	loss, x, targets, nodes := ranked(t)
	var at []int64 // launches before each bucket's
	launches := func() int64 { return int64(len(d.ctx.Context.(*fake.Context).Trace())) }
	g := &silent{}
	small := func(c *machineConfig) error { c.ranks.Bucket = 1; return nil }
	m, err := NewMachine(d, loss.Graph(), kernels, WithParams(nodes...), WithOutputs(loss),
		WithRanks(g), small)
	require.NoError(t, err)
	defer m.Close()
	o, err := newAdamW()
	require.NoError(t, err)
	require.NoError(t, m.SetOptimizer(o, 0.1))
	g.asked = func(s comm.Stream) {
		require.NotEqual(t, comm.Stream(m.Stream()), s)
		at = append(at, launches())
	}
	require.NoError(t, errors.Join(gorgonia.Let(x, tensor.New(tensor.WithShape(6, 64),
		tensor.Of(tensor.Float32))), gorgonia.Let(targets, tensor.New(tensor.WithShape(6),
		tensor.Of(tensor.Int)))))
	for i := range 3 { // as it is, captured, replayed
		at = nil
		require.NoError(t, errors.Join(m.Expect(2, true), m.RunAll()))
		if i == 2 {
			require.Empty(t, at, "what is replayed is asked for again")
		} else {
			require.NotEmpty(t, at)
			require.Less(t, at[0], launches()-4, "nothing leaves before the run's end")
		}
		at = nil
		require.NoError(t, m.Contribute(2, true))
		require.Empty(t, at)
	}
	g.asked = func(s comm.Stream) { at = append(at, 0) }
	require.NoError(t, errors.Join(m.RunAll(), m.Contribute(2, true)))
	require.NotEmpty(t, at, "a run of which nothing was expected sends nothing")
}

// TestRanksRemember: each rank holds the moments of its part alone.
func TestRanksRemember(t *testing.T) {
	var mu sync.Mutex
	var held, all int
	eachRank(t, 3, func(_ int, d *Device, g comm.Group, kernels MachineOption) {
		loss, _, _, nodes := ranked(t)
		o, err := newAdamW()
		require.NoError(t, err)
		m, err := NewMachine(d, loss.Graph(), kernels, WithParams(nodes...), WithOutputs(loss),
			WithRanks(g), notCaptured)
		require.NoError(t, err)
		defer m.Close()
		require.ErrorContains(t, m.Contribute(1, true), "no optimiser")
		require.NoError(t, m.SetOptimizer(o, 0))
		if g.Rank() == 0 {
			require.ErrorContains(t, m.Contribute(1, true), "has not run")
		}
		mu.Lock()
		defer mu.Unlock()
		all = 0
		for _, p := range m.optimizer.Params {
			all += p.Grad.Len()
			held += p.Moments[0].Len()
		}
	})
	require.Equal(t, all, held)
}

// TestRanksChoices: what rank 0 has timed holds at other ranks, where other ways would be faster,
// and the update, which differs from rank to rank, is not timed anywhere.
func TestRanksChoices(t *testing.T) {
	t.Setenv("KASMINA_TUNE", "")
	t.Setenv("KASMINA_WAYS", "")
	const size = 3
	chosen := make(chan []Choice, size)
	all := make([][]Choice, size)
	path := filepath.Join(t.TempDir(), "tune.json")
	eachRank(t, size, func(rank int, d *Device, g comm.Group, kernels MachineOption) {
		loss, _, _, nodes := ranked(t)
		took := []fake.Way{{Took: 1e6}, {Took: 9e6}}
		var tuned []MachineOption
		if rank == 0 {
			took = []fake.Way{{Took: 9e6}, {Took: 1e6}}
			tuned = []MachineOption{WithTuning(TuneCached)}
		} else {
			tuned = []MachineOption{WithTuning(TuneFull), WithChoices(<-chosen)}
		}
		wrap := withKernels(func(k run.Launcher) run.Launcher {
			return &normWays{Launcher: k, fake: fakeOf(k),
				names: []kernel.Way{{Family: "wide", Size: 4}, {Family: "plain"}}, ways: took}
		})
		private := func(c *machineConfig) error { c.tuneLeast, c.tunePath = 1, path; return nil }
		m, err := NewMachine(d, loss.Graph(), append(tuned, kernels, wrap, private,
			WithParams(nodes...), WithOutputs(loss), WithRanks(g), notCaptured)...)
		require.NoError(t, err)
		defer m.Close()
		all[rank] = m.Choices()
		if rank == 0 {
			for range size - 1 {
				chosen <- all[0]
			}
		}
		o, err := optim.NewMuon()
		require.NoError(t, err)
		require.NoError(t, o.Declare(gorgonia.NodesToValueGrads(nodes)))
		require.NoError(t, m.SetOptimizer(o, 0.1))
		for _, c := range m.Choices()[len(all[rank]):] {
			require.Equal(t, ByRule, c.Source, "%s %s of the update", c.Op, c.Shape)
		}
	})
	require.NotEmpty(t, all[0])
	timed := 0
	for r, choices := range all {
		require.Len(t, choices, len(all[0]))
		for i, c := range choices {
			want := all[0][i]
			require.Equal(t, [3]string{want.Op, want.Shape, want.Way},
				[3]string{c.Op, c.Shape, c.Way}, "rank %d", r)
			if c.Source == Measured {
				timed++
				require.Zero(t, r)
			}
			if c.Op == "RMSNorm" {
				require.Equal(t, "plain", c.Way)
			}
		}
	}
	require.NotZero(t, timed)
}

// TestRanksDivided: float32 values of which each rank has a part go up from the host and come back
// whole, and machines that share them compute what the machine itself does.
func TestRanksDivided(t *testing.T) {
	var mu sync.Mutex
	var whole, held int // bytes of parameters, at all ranks
	eachRank(t, 2, func(rank int, d *Device, g comm.Group, kernels MachineOption) {
		loss, x, targets, nodes := ranked(t)
		m, err := NewMachine(d, loss.Graph(), kernels, WithParams(nodes...), WithOutputs(loss),
			WithRanks(g), notCaptured)
		require.NoError(t, err)
		defer m.Close()
		before := m.memory.Held()
		o, err := newAdamW()
		require.NoError(t, err)
		require.NoError(t, o.Declare(gorgonia.NodesToValueGrads(nodes)))
		require.NoError(t, m.SetOptimizer(o, 0))
		mu.Lock()
		whole, held = whole+before, held+m.memory.Held()
		mu.Unlock()
		var want [][]float32
		for _, n := range nodes {
			v := n.Value().Data().([]float32)
			for i := range v {
				v[i] += 0.5
			}
			want = append(want, append([]float32{}, v...))
		}
		require.NoError(t, m.Upload(nodes...))
		require.NoError(t, m.SetOptimizer(o, 0)) // as after a resumption
		for _, n := range nodes {
			clear(n.Value().Data().([]float32))
		}
		require.NoError(t, m.Download())
		divided := 0
		for i, n := range nodes {
			require.Equal(t, want[i], n.Value().Data().([]float32), n.Name())
			v, err := m.Value(n)
			require.NoError(t, err)
			require.Equal(t, want[i], v.Data().([]float32), n.Name())
			if _, _, err := m.Address(n); err != nil {
				require.ErrorContains(t, err, "divided among ranks")
				divided++
			}
		}
		require.NotZero(t, divided)

		other, otherX, otherTargets, _ := ranked(t)
		beside, err := NewMachine(d, other.Graph(), kernels, WithParamsOf(m), WithOutputs(other))
		require.NoError(t, err)
		defer beside.Close()
		in := tensor.New(tensor.WithShape(6, 64), tensor.Of(tensor.Float32))
		for i := range in.Float32s() {
			in.Float32s()[i] = float32(i%7) - 3
		}
		ids := tensor.New(tensor.WithShape(6), tensor.Of(tensor.Int))
		require.NoError(t, errors.Join(gorgonia.Let(x, in), gorgonia.Let(targets, ids),
			gorgonia.Let(otherX, in), gorgonia.Let(otherTargets, ids), m.RunAll(), beside.RunAll()))
		a, err := m.Value(loss)
		require.NoError(t, err)
		b, err := beside.Value(other)
		require.NoError(t, err)
		require.Equal(t, a.Data(), b.Data())
	})
	require.Less(t, held, whole)
}

// TestRanksWeightsBeside: parameters that come back from other ranks are waited for by the next run,
// as it is, captured and replayed, and not by the update.
func TestRanksWeightsBeside(t *testing.T) {
	d, _, kernels := openFake(t, fake.Config{})
	loss, x, targets, nodes := ranked(t)
	memory := d.ctx.Context.(*fake.Context)
	var came []gpu.Ptr
	var with byte
	g := &silent{asked: func(comm.Stream) {}}
	g.received = func(p comm.Ptr, bytes int, s comm.Stream) {
		came = append(came, gpu.Ptr(p))
		require.NoError(t, memory.Memset8(gpu.Ptr(p), with, bytes, gpu.Stream(s)))
	}
	m, err := NewMachine(d, loss.Graph(), kernels, WithParams(nodes...), WithOutputs(loss),
		WithRanks(g))
	require.NoError(t, err)
	defer m.Close()
	o, err := newAdamW()
	require.NoError(t, err)
	require.NoError(t, m.SetOptimizer(o, 0.1))
	require.NoError(t, errors.Join(gorgonia.Let(x, tensor.New(tensor.WithShape(6, 64),
		tensor.Of(tensor.Float32))), gorgonia.Let(targets, tensor.New(tensor.WithShape(6),
		tensor.Of(tensor.Int)))))
	arrived := func() bool {
		require.NotEmpty(t, came)
		for _, p := range came {
			b, err := memory.Bytes(p, 1)
			require.NoError(t, err)
			if b[0] != with {
				return false
			}
		}
		return true
	}
	for i := range 4 {
		require.NoError(t, errors.Join(m.RunAll(), m.Contribute(2, true)))
		came, with = nil, byte(0x30+i)
		_, err := m.Update()
		require.NoError(t, err)
		require.False(t, arrived(), "update %d has waited", i)
		require.NoError(t, m.RunAll())
		_, err = m.Value(loss)
		require.NoError(t, err)
		require.True(t, arrived(), "run %d has not waited", i)
	}
	came, with = nil, 1
	_, err = m.Update()
	require.NoError(t, err)
	_, err = m.Value(nodes[0])
	require.NoError(t, err)
	require.True(t, arrived(), "a parameter is fetched before it is there")
}
