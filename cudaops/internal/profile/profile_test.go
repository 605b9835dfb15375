package profile_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/passtest"
	"github.com/kasmina-go/kasmina/cudaops/internal/profile"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

// newMachine returns a machine that computes tanh(x) and its square.
func newMachine(t *testing.T) (*passtest.Rig, *profile.Target) {
	t.Helper()
	g := gorgonia.NewGraph()
	gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Tanh(passtest.Node(g, "x", 3, 4)))))
	r := passtest.New(t, g, lower.Options{})
	m := &profile.Target{Runner: r.Runner, Warn: func(string) {}, Copy: 1 << 14}
	var err error
	m.Layers, err = kasmina.New(&kasmina.Runtime{Runner: r.Runner})
	require.NoError(t, err)
	return r, m
}

// step performs a run and, if update is not nil, an update with one part.
func step(t *testing.T, r *passtest.Rig, o run.Observer, update func() error) {
	t.Helper()
	require.NoError(t, r.Runner.Compute(o, nil))
	if update != nil {
		require.NoError(t, o.Update(func() error {
			return o.UpdatePart(run.Work{Replay: update, Plain: update, Bytes: 48})
		}))
	}
	require.NoError(t, r.Ctx.SyncStream(r.Runner.Stream))
}

// TestMonitor checks that a monitor times the calls of one run in three, along with the update after
// it, and that all runs and updates still execute.
func TestMonitor(t *testing.T) {
	r, m := newMachine(t)
	o := profile.NewMonitor(m, 3)
	defer func() { require.NoError(t, run.Joined(o.Close(), r.Runner.DropCaptures())) }()
	updates := 0
	update := func() error {
		updates++
		return r.Ctx.Memset8(r.Program.Calls[0].Args[0].Ptr(), 0, 48, r.Runner.Stream)
	}

	times, err := o.Times(48)
	require.NoError(t, err)
	require.Empty(t, times)
	for range 12 {
		step(t, r, o, update)
	}

	require.Equal(t, 12, updates)
	times, err = o.Times(48)
	require.NoError(t, err)

	ops := map[string]float64{}
	for _, op := range times {
		require.Positive(t, op.Time, op.Op)
		ops[op.Op] = op.Bytes
	}

	require.Equal(t, map[string]float64{"tanh": 96, "square": 96, "Update": 48}, ops)
	require.Positive(t, o.Samples)
	require.Less(t, o.Samples, 6)
}

// TestUnloadedRun checks that the first run, which loads kernels, is not measured.
func TestUnloadedRun(t *testing.T) {
	r, m := newMachine(t)
	o := profile.NewMonitor(m, 2)
	require.NoError(t, r.Runner.Compute(o, nil))
	require.False(t, o.Sampling())
	require.Equal(t, []string{"elementwise.Unary", "elementwise.Unary"}, passtest.Types(r.Launches))
	require.NoError(t, run.Joined(o.Close(), r.Runner.DropCaptures()))
}

// TestProfiler checks that a profile has a span for every call and for the update, in order.
func TestProfiler(t *testing.T) {
	r, m := newMachine(t)
	require.NoError(t, r.Runner.Compute(run.Unobserved{}, nil))
	p := profile.NewProfiler(m)
	update := func() error {
		return r.Ctx.Memset8(r.Program.Calls[0].Args[0].Ptr(), 0, 48, r.Runner.Stream)
	}

	for i := range profile.Steps {
		require.True(t, p.Busy(), "step %d", i)
		require.False(t, p.Open())
		require.NoError(t, p.Start())
		require.True(t, p.Open())
		done := p.Call("Run")
		step(t, r, p, update)
		done()
		p.Finish()
	}

	require.False(t, p.Busy())

	result, err := p.Result()
	require.NoError(t, err)
	var ops []string
	var last time.Duration
	for _, s := range result.Spans {
		require.GreaterOrEqual(t, s.Start, last)
		last = s.Start + s.Time
		ops = append(ops, s.Op)
	}

	require.Equal(t, []string{"tanh", "square", "Update"}, ops)
	require.Equal(t, "Run", result.Host[0].Name)
	require.NoError(t, r.Runner.DropCaptures())
}
