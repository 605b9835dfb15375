package cudabench

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

func fakeContext(t *testing.T, c fake.Config) (gpu.Context, *fake.Driver) {
	t.Helper()
	d := fake.New(c)
	ctx, err := d.Retain(0)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, ctx.Close()) // all memory must have been freed
	})
	return ctx, d
}

// TestMedian uses a clock that launches advance. It checks that clearing the cache and recording events
// do not count.
func TestMedian(t *testing.T) {
	ctx, _ := fakeContext(t, fake.Config{})
	times := map[string]time.Duration{}
	launches := 0
	require.NoError(t, measure(ctx, 64, func(m Measurement) error {
		times[m.Name] = m.Time
		return nil
	}, func(b *timer) {
		p := b.bytes(256)
		memset := func() { do(ctx.Memset8(p, 0, 256, b.stream)) }
		b.time(Measurement{Name: "one"}, func() { launches++; memset() })
		b.time(Measurement{Name: "three"}, func() { memset(); memset(); memset() })
	}))

	require.GreaterOrEqual(t, launches, 500)
	require.Positive(t, times["one"])
	require.EqualValues(t, 2, (times["three"] - times["one"]).Microseconds(), times)
}

// TestFailure checks the errors when memory runs out, a launch fails or report returns an error. The
// cleanup of the context checks for leaks.
func TestFailure(t *testing.T) {
	ctx, d := fakeContext(t, fake.Config{})
	none := func(m Measurement) error { t.Errorf("%s is reported", m.Name); return nil }
	require.ErrorIs(t, measure(ctx, 64, none, ceilings), gpu.OutOfMemory) // needs 4 GiB of 1 GiB

	d.Fail("cuMemsetD8Async", 4, gpu.NotSupported)
	err := measure(ctx, 64, none, func(b *timer) {
		p := b.bytes(4)
		b.time(Measurement{Name: "a name"}, func() { do(ctx.Memset8(p, 0, 4, b.stream)) })
	})
	require.ErrorIs(t, err, gpu.NotSupported)
	require.ErrorContains(t, err, "a name")

	stop := errors.New("stop")
	require.ErrorIs(t, measure(ctx, 64, func(Measurement) error { return stop }, func(b *timer) {
		b.time(Measurement{Name: "report"}, func() {})
		t.Error("the benchmark continued after an error")
	}), stop)
}

// TestChosen checks that the benchmarks of the named groups run once and in order.
func TestChosen(t *testing.T) {
	defer func(all []group) { groups = all }(groups)
	names := ""
	named := func(name string) func(*timer) { return func(*timer) { names += name } }
	groups = []group{
		{"a", []func(*timer){named("a1 "), named("a2 ")}},
		{"b", []func(*timer){named("b1 ")}},
		{"c", []func(*timer){named("c1 ")}},
	}
	require.Equal(t, []string{"a", "b", "c"}, Groups())
	benchmarks, err := selectBenchmarks([]string{"c", "a"})
	require.NoError(t, err)
	ctx, _ := fakeContext(t, fake.Config{})
	require.NoError(t, measure(ctx, 64, nil, benchmarks...))
	require.Equal(t, "a1 a2 c1 ", names)
	_, err = selectBenchmarks([]string{"a", "d"})
	require.ErrorContains(t, err, `there is no group "d", want some of [a b c]`)
}

// unstored is a context with an unlimited amount of memory that stores nothing.
type unstored struct {
	gpu.Context
	next *gpu.Ptr
}

func (c unstored) Alloc(bytes int) (gpu.Ptr, error) {
	p := *c.next
	*c.next = p.Offset((bytes + 255) / 256 * 256)
	return p, nil
}

func (unstored) Free(gpu.Ptr) error                                       { return nil }
func (unstored) CopyToDevice(gpu.Ptr, []byte, gpu.Stream) error           { return nil }
func (unstored) CopyOnDevice(_, _ gpu.Ptr, _ int, _ gpu.Stream) error     { return nil }
func (unstored) EncodeTiled(gpu.TiledTensor) (m gpu.TensorMap, err error) { return m, nil }
func (unstored) Memset8(gpu.Ptr, uint8, int, gpu.Stream) error            { return nil }

// Elapsed returns a long time so that only few launches are timed.
func (unstored) Elapsed(_, _ gpu.Event) (time.Duration, error) { return 20 * time.Millisecond, nil }

// TestLaunches checks that every benchmark launches existing kernels with valid arguments, and reports a
// time under a unique name.
func TestLaunches(t *testing.T) {
	ctx, _ := fakeContext(t, fake.Config{Images: kerneltest.Kernels})
	next := gpu.Ptr(256)
	// A stream waits for its kernel, which the fake does not execute. Package stream tests it.
	names := slices.DeleteFunc(Groups(), func(name string) bool { return name == "stream" })
	all, err := selectBenchmarks(names)
	require.NoError(t, err)
	seen := map[string]bool{}
	require.NoError(t, measure(unstored{ctx, &next}, 64, func(m Measurement) error {
		require.True(t, m.Time > 0 && (m.Bytes > 0) != (m.FLOPs > 0), "%+v", m)
		require.False(t, seen[m.Name], m.Name)
		seen[m.Name] = true
		return nil
	}, all[1:]...)) // the first group launches no kernels of this module

	require.Len(t, seen, 86)
}
