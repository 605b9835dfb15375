package stream

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// launcher launches a Go function in place of the kernel. The function takes up to `limit` announced
// batches, counts NaN in every third batch, and ends.
type launcher struct {
	ctx      gpu.Context
	function *gpu.Function
	launch   kasmina.Stream
	limit    int
	taken    []uint64 // entries
	silent   bool     // end without reporting it
}

func (l *launcher) Launch(s gpu.Stream, params any) error {
	l.launch = params.(kasmina.Stream)
	return l.ctx.Launch(l.function, gpu.LaunchConfig{}, s, new(gpu.Args))
}

func (l *launcher) run(f *fake.Launch) {
	if l.silent {
		return
	}
	s := l.launch
	control := fake.Slice[uint64](f, s.Control, 2)
	entries, done := fake.Slice[uint64](f, s.Entries, s.Depth), fake.Slice[uint64](f, s.Done, s.Depth)
	batch, why := s.First, uint64(2)
	for n := 0; n < l.limit; n++ {
		place := int(batch % uint64(s.Depth))
		word := entries[place]
		if word == kasmina.StopWord(batch) {
			why = 1
			break
		}
		if word>>2 != batch+1 {
			break
		}

		l.taken = append(l.taken, word)
		fake.Slice[float32](f, s.Figures, 8*s.Seeds()*s.Depth)[8*s.Seeds()*place] = float32(batch)
		fake.Slice[uint32](f, s.Counts, s.Seeds()*s.Depth)[s.Seeds()*place+3] = uint32(batch)
		done[place] = 2 * (batch + 1)
		if batch%3 == 0 {
			done[place]++
		}
		batch++
	}
	control[0], control[1] = batch, why
}

func newKernel(t *testing.T, depth int) (*Kernel, *launcher, *fake.Driver) {
	t.Helper()
	l := &launcher{limit: 1 << 30}
	d := fake.New(fake.Config{Kernels: map[string]fake.Kernel{"call": l.run}})
	var err error
	l.ctx, err = d.Retain(0)
	require.NoError(t, err)
	m, err := l.ctx.LoadModule([]byte("fake"))
	require.NoError(t, err)
	l.function, err = l.ctx.Function(m, "call")
	require.NoError(t, err)
	s, err := l.ctx.NewStream(false)
	require.NoError(t, err)
	k, err := New(l.ctx, l, s, config(depth))
	require.NoError(t, err)
	t.Cleanup(func() {
		if k.phase == closed && errors.Is(k.failure, gpu.LaunchFailed) {
			return // destroying the context frees everything
		}
		require.NoError(t, l.ctx.DestroyStream(s))
		require.NoError(t, l.ctx.UnloadModule(m))
		require.NoError(t, l.ctx.Close()) // fails if anything has leaked
	})
	return k, l, d
}

func config(depth int) Config {
	layer := kasmina.Layer{Rows: 2, Chunk: 4, State: kasmina.State{Seeds: 4, Slots: 2}}
	other := kasmina.Layer{Rows: 2, Chunk: 4, State: kasmina.State{Seeds: 4, Slots: 3}}
	return Config{Layers: []kasmina.Layer{layer, other}, Depth: depth, Idle: time.Millisecond}
}

// TestKernel submits batches in groups and checks the entries, the results, and that the kernel is
// launched again after it has ended.
func TestKernel(t *testing.T) {
	k, l, _ := newKernel(t, 3)
	l.limit = 2 // of three batches in flight
	ctx := context.Background()
	var want []uint64
	for range 5 {
		for range 3 {
			watched := k.Next()%2 == 0
			batch, err := k.Submit(watched)
			require.NoError(t, err)
			want = append(want, kasmina.Word(batch, watched))
		}
		for batch := k.Next() - 3; batch < k.Next(); batch++ {
			require.NoError(t, k.Wait(ctx, batch))
			require.Equal(t, float32(batch), k.Figures(batch, 0)[0])
			require.Len(t, k.Figures(batch, 1), 8*4)
			if counts := k.Counts(batch, 0); batch%3 == 0 {
				require.Equal(t, []uint32{0, 0, 0, uint32(batch)}, counts)
			} else {
				require.Nil(t, counts)
			}
		}
	}

	require.Equal(t, want, l.taken)
	require.Equal(t, 10, k.Launches())
	require.NoError(t, k.Close())
	require.NoError(t, k.Close())
	_, err := k.Submit(false)
	require.ErrorContains(t, err, "closed")
}

// TestStop checks that Stop lets batches in flight finish, that the entry that stops the kernel does not
// stop the next launch, and that Stop can be canceled.
func TestStop(t *testing.T) {
	k, l, _ := newKernel(t, 2)
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	for round := range uint64(6) {
		for range round % 3 {
			_, err := k.Submit(false)
			require.NoError(t, err)
		}
		if round%3 > 0 {
			require.ErrorIs(t, k.Stop(canceled), context.Canceled)
		}
		require.NoError(t, k.Stop(context.Background()))
		require.NoError(t, k.Stop(canceled), "nothing is left to wait for")
		require.Equal(t, stopped, k.phase)
		require.Len(t, l.taken, int(k.Next()))
	}
	require.NoError(t, k.Close())
}

// TestFailures checks the errors of a launch that fails, of a kernel that vanishes, and of a lost device.
func TestFailures(t *testing.T) {
	k, l, d := newKernel(t, 2)
	ctx := context.Background()
	d.Fail("cuLaunchKernel", 1, gpu.CooperativeTooLarge)
	_, err := k.Submit(false)
	require.ErrorIs(t, err, gpu.CooperativeTooLarge)
	batch, err := k.Submit(true)
	require.NoError(t, err)
	require.Zero(t, batch, "the batch whose launch failed does not count")
	require.NoError(t, k.Wait(ctx, batch))
	require.Equal(t, []uint64{kasmina.Word(0, true)}, l.taken)

	l.silent = true
	batch, err = k.Submit(true)
	require.NoError(t, err)
	require.ErrorContains(t, k.Wait(ctx, batch), "ended unexpectedly")
	_, err = k.Submit(true)
	require.ErrorContains(t, err, "ended unexpectedly")
	require.NoError(t, k.Close())

	k, _, d = newKernel(t, 2)
	batch, err = k.Submit(true)
	require.NoError(t, err)
	d.Fail("cuEventQuery", 1, gpu.LaunchFailed)
	require.ErrorIs(t, k.Wait(ctx, batch), gpu.LaunchFailed)
	require.ErrorIs(t, k.Close(), gpu.LaunchFailed)
}

// TestRefused checks streams that no kernel can compute, and allocations that fail.
func TestRefused(t *testing.T) {
	d := fake.New(fake.Config{})
	ctx, err := d.Retain(0)
	require.NoError(t, err)
	changes := map[string]func(*Config){
		"depth 0":                     func(c *Config) { c.Depth = 0 },
		"idle time 0s":                func(c *Config) { c.Idle = 0 },
		"0 layers, want 1 to 16":      func(c *Config) { c.Layers = nil },
		"differ in rows":              func(c *Config) { c.Layers[1].Rows = 3 },
		"batches are empty":           func(c *Config) { c.Layers = c.Layers[:1]; c.Layers[0].Rows = 0 },
		"layer 1 is in strict mode":   func(c *Config) { c.Layers[1].Stability = seed.Strict },
		"take different kernels":      func(c *Config) { c.Layers[1].Chunk, c.Layers[1].State.Seeds = 8, 2 },
		"and at most 259 fit the GPU": func(c *Config) { c.Layers[0].State.Seeds, c.Layers = 1<<20, c.Layers[:1] },
	}
	for want, change := range changes {
		c := config(2)
		change(&c)
		_, err := New(ctx, nil, 0, c)
		require.ErrorContains(t, err, want)
	}

	for _, call := range []string{"cuMemHostAlloc", "cuMemAlloc", "cuEventCreate"} {
		d.Fail(call, 1, gpu.OutOfMemory)
		_, err := New(ctx, nil, 0, config(2))
		require.ErrorIs(t, err, gpu.OutOfMemory, call)
	}
	require.NoError(t, ctx.Close()) // fails if anything has leaked
}

// TestPhases checks the table of transitions: a closed kernel stays closed, and only a running one ends.
func TestPhases(t *testing.T) {
	for from := stopped; from <= closed; from++ {
		for e := launch; e <= closing; e++ {
			to := from
			to.on(e)
			switch {
			case from == closed || from == failed && e != closing:
				require.Equal(t, from, to)
			case e == end && from == running:
				require.Equal(t, stopped, to)
			case e == launch:
				require.Equal(t, running, to)
			}
		}
	}
}
