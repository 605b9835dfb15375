package fake

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func open(t *testing.T, config Config) (*Driver, *Context) {
	t.Helper()
	d := New(config)
	c, err := d.Retain(0)
	check(t, err)
	return d, c.(*Context)
}

func check(t *testing.T, errs ...error) {
	t.Helper()
	require.NoError(t, errors.Join(errs...))
}

func get[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		check(t, err)
		return v
	}
}

func TestInjectedFailures(t *testing.T) {
	d, c := open(t, Config{})
	d.Fail("cuMemAlloc", 3, gpu.OutOfMemory)
	d.Fail("cuMemAlloc", 4, gpu.InvalidValue)
	var got []error
	for range 5 {
		_, err := c.Alloc(1)
		got = append(got, err)
	}

	for i, want := range []error{nil, nil, gpu.OutOfMemory, gpu.InvalidValue, nil} {
		require.ErrorIs(t, got[i], want, i+1)
	}

	blas := get[gpu.Blas](t)(c.Blas())
	plan := get[gpu.MatmulPlan](t)(blas.Plan(gpu.MatmulSpec{M: 1, N: 1, K: 1}, 0, 3))
	d.Fail("cublasLtMatmul", 1, gpu.BlasNotSupported)
	require.ErrorIs(t, plan.Run(0, gpu.MatmulArgs{}, 0), gpu.BlasNotSupported)
	d.Fail("cuStreamSynchronize", 1, gpu.LaunchFailed)
	for _, err := range []error{c.SyncStream(0), c.SyncStream(0), c.Memset8(0, 0, 1, 0)} {
		require.ErrorIs(t, err, gpu.LaunchFailed)
	}
}

func TestLeaks(t *testing.T) {
	_, c := open(t, Config{})
	require.Empty(t, c.Leaks())
	get[gpu.Ptr](t)(c.Alloc(123))
	get[[]byte](t)(c.AllocHost(45))
	s := get[gpu.Stream](t)(c.NewStream(false))
	get[gpu.Event](t)(c.NewEvent(false))
	get[gpu.Module](t)(c.LoadModule([]byte{1}))
	check(t, c.BeginCapture(s))
	get[gpu.Graph](t)(c.EndCapture(s))
	err := c.Close()
	for _, s := range []string{"123 bytes of device", "45 bytes of pinned", "1 streams", "1 events",
		"1 modules", "1 graphs"} {
		require.ErrorContains(t, err, s)
	}
}

// TestNothingRunsEarly checks that work doesn't run before something waits for it, since the fake relies
// on this to reveal missing waits.
func TestNothingRunsEarly(t *testing.T) {
	_, c := open(t, Config{})
	p := get[gpu.Ptr](t)(c.Alloc(4))
	fresh := []float32{0}
	check(t, c.CopyToHost(gpu.Bytes(fresh), p, 0))
	require.True(t, fresh[0] != fresh[0])
	in, out := get[[]byte](t)(c.AllocHost(4)), get[[]byte](t)(c.AllocHost(4))
	in[0] = 1
	check(t, c.CopyToDevice(p, in, 0), c.CopyToHost(out, p, 0))
	in[0] = 2 // too early: the copy has not run yet
	require.Zero(t, out[0], "the copy ran before anything waited for it")
	check(t, c.SyncStream(0))
	require.Equal(t, byte(2), out[0])
	check(t, c.Free(p), c.FreeHost(in))
	require.Equal(t, byte(0xDD), in[0], "freed pinned memory keeps its content")
}

func TestStrayAccess(t *testing.T) {
	kernels := map[string]Kernel{
		"read":       func(l *Launch) { Slice[float32](l, Arg[gpu.Ptr](l), int(Arg[int32](l))) },
		"misaligned": func(l *Launch) { Slice[float32](l, Arg[gpu.Ptr](l)+1, 1) },
	}
	for _, test := range []struct {
		kernel string
		offset int
		n      int
		want   gpu.Status
		say    string
	}{
		{"read", 0, 25, gpu.Success, ""},
		{"read", 0, 26, gpu.IllegalAddress, "104 bytes at offset 0 of an allocation of 100"},
		{"read", 100, 1, gpu.IllegalAddress, "4 bytes at offset 100"},
		{"read", -4, 1, gpu.IllegalAddress, "is not device memory"},
		{"read", 1 << 30, 1, gpu.IllegalAddress, "is not device memory"},
		{"misaligned", 0, 1, gpu.MisalignedAddress, "not a multiple of 4"},
	} {
		_, c := open(t, Config{Kernels: kernels})
		p := get[gpu.Ptr](t)(c.Alloc(100))
		f := get[*gpu.Function](t)(c.Function(get[gpu.Module](t)(c.LoadModule([]byte{1})),
			test.kernel))
		var args gpu.Args
		gpu.Add(&args, p.Offset(test.offset))
		gpu.Add(&args, int32(test.n))
		check(t, c.Launch(f, gpu.LaunchConfig{}, 0, &args))
		err := c.SyncStream(0)
		if test.want == gpu.Success {
			check(t, err)
		} else if !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.say) {
			t.Errorf("%s at %d, %d: %v", test.kernel, test.offset, test.n, err)
		}
	}
}

func TestStrangeStream(t *testing.T) {
	_, c := open(t, Config{})
	p, s := get[gpu.Ptr](t)(c.Alloc(8)), get[gpu.Stream](t)(c.NewStream(false))
	e := get[gpu.Event](t)(c.NewEvent(false))
	check(t, c.BeginCapture(s))
	g := get[gpu.Graph](t)(c.EndCapture(s))
	check(t, c.DestroyStream(s))
	for _, err := range []error{c.Memset8(p, 0, 8, s), c.Record(e, s), c.LaunchGraph(g, s),
		c.BeginCapture(s), c.SyncStream(s)} {
		require.ErrorIs(t, err, gpu.InvalidHandle)
	}
}

// TestReplayAfterFree checks that launching a graph fails after its memory was freed.
func TestReplayAfterFree(t *testing.T) {
	_, c := open(t, Config{})
	s := get[gpu.Stream](t)(c.NewStream(false))
	p := get[gpu.Ptr](t)(c.Alloc(8))
	check(t, c.BeginCapture(s), c.Memset8(p, 7, 8, s))
	g := get[gpu.Graph](t)(c.EndCapture(s))
	check(t, c.LaunchGraph(g, s), c.SyncStream(s), c.Free(p))
	if err := c.Memset8(p, 7, 8, s); !errors.Is(err, gpu.InvalidValue) ||
		!strings.Contains(err.Error(), "was freed") {
		t.Errorf("freed memory: %v", err)
	}

	q := get[gpu.Ptr](t)(c.Alloc(8))
	require.NotEqual(t, p, q, "an address was used again")
	check(t, c.LaunchGraph(g, s))
	if err := c.SyncStream(s); !errors.Is(err, gpu.IllegalAddress) ||
		!strings.Contains(err.Error(), "was freed") {
		t.Errorf("replay: %v", err)
	}
}

func TestTraceAndClock(t *testing.T) {
	_, c := open(t, Config{Kernels: map[string]Kernel{
		"slow":  func(l *Launch) { l.Took = time.Millisecond },
		"other": func(*Launch) {},
	}})
	m := get[gpu.Module](t)(c.LoadModule([]byte{1}))
	slow, other := get[*gpu.Function](t)(c.Function(m, "slow")),
		get[*gpu.Function](t)(c.Function(m, "other"))
	s := get[gpu.Stream](t)(c.NewStream(false))
	from, to := get[gpu.Event](t)(c.NewEvent(true)), get[gpu.Event](t)(c.NewEvent(true))
	p := get[gpu.Ptr](t)(c.Alloc(8))
	shape := gpu.LaunchConfig{Grid: gpu.Dim{X: 3}, Block: gpu.Dim{X: 64}}
	check(t, c.BeginCapture(s), c.Launch(slow, shape, s, new(gpu.Args)),
		c.Memset8(p, 1, 8, s))
	g := get[gpu.Graph](t)(c.EndCapture(s))
	check(t, c.Record(from, s), c.LaunchGraph(g, s), c.Launch(other, shape, s, new(gpu.Args)),
		c.Record(to, s))
	if _, err := c.Elapsed(from, to); !errors.Is(err, gpu.NotReady) {
		t.Errorf("before it ran: %v", err)
	}

	check(t, c.SyncStream(s))
	// One millisecond for the kernel, and one microsecond each for the memset, the graph launch and the
	// other kernel.
	require.Equal(t, time.Millisecond+3*time.Microsecond,
		get[time.Duration](t)(c.Elapsed(from, to)))
	var got []string
	for _, o := range c.Trace {
		got = append(got, o.Call+" "+o.Name)
	}

	require.Equal(t, []string{"cuLaunchKernel slow", "cuMemsetD8Async ", "cuGraphLaunch ",
		"cuLaunchKernel other"}, got)
	require.Equal(t, shape, c.Trace[0].Config)
}

func TestPlanningIsFree(t *testing.T) {
	_, c := open(t, Config{Devices: []gpu.DeviceInfo{{Name: "huge", Major: 9, Memory: 1 << 50}}})
	p := get[gpu.Ptr](t)(c.Alloc(1 << 45)) // more than any machine has
	if free, total, err := c.MemInfo(); err != nil || total-free != 1<<45 {
		t.Errorf("%d of %d free, %v", free, total, err)
	}
	check(t, c.Free(p), c.Close())
}

func TestNoBlas(t *testing.T) {
	_, c := open(t, Config{NoBlas: true})
	var missing *gpu.NotFoundError
	if _, err := c.Blas(); !errors.As(err, &missing) {
		t.Error(err)
	}
}

// TestWaitEvent checks that a stream waits for an event of another stream and, within a capture, joins
// it. A capture must fail if it doesn't wait for the work of a stream that joined.
func TestWaitEvent(t *testing.T) {
	_, c := open(t, Config{})
	p := get[gpu.Ptr](t)(c.Alloc(4))
	out := get[[]byte](t)(c.AllocHost(4))
	a, b := get[gpu.Stream](t)(c.NewStream(false)), get[gpu.Stream](t)(c.NewStream(true))
	fork, join := get[gpu.Event](t)(c.NewEvent(false)), get[gpu.Event](t)(c.NewEvent(false))
	check(t, c.WaitEvent(b, fork)) // never recorded, so there is nothing to wait for
	check(t, c.Memset8(p, 1, 4, a), c.Record(fork, a), c.WaitEvent(b, fork),
		c.CopyToHost(out, p, b), c.SyncStream(b))
	require.Equal(t, byte(1), out[0])
	check(t, c.BeginCapture(a), c.Memset8(p, 2, 4, a), c.Record(fork, a), c.WaitEvent(b, fork),
		c.CopyToHost(out, p, b), c.Record(join, b), c.WaitEvent(a, join), c.Memset8(p, 3, 4, a))
	g := get[gpu.Graph](t)(c.EndCapture(a))
	check(t, c.LaunchGraph(g, a), c.SyncStream(a))
	require.Equal(t, byte(2), out[0])
	check(t, c.Memset8(p, 1, 4, b), c.SyncStream(b)) // the stream has left the capture
	for name, test := range map[string]struct {
		work func() error
		want gpu.Status
	}{
		"work that nobody waits for": {func() error { return c.Memset8(p, 1, 4, b) },
			gpu.CaptureUnjoined},
		"more work after the join": {func() error {
			return errors.Join(c.Memset8(p, 1, 4, b), c.Record(join, b), c.Memset8(p, 1, 4, b),
				c.WaitEvent(a, join))
		}, gpu.CaptureUnjoined},
	} {
		check(t, c.BeginCapture(a), c.Record(fork, a), c.WaitEvent(b, fork), test.work())
		if _, err := c.EndCapture(a); !errors.Is(err, test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}

	check(t, c.Record(join, b), c.BeginCapture(a))
	require.ErrorIs(t, c.WaitEvent(a, join), gpu.CaptureIsolation)
	c.EndCapture(a) // returns an error
}
