package bench

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func fakeContext(t *testing.T) (gpu.Context, *fake.Driver) {
	t.Helper()
	d := fake.New(fake.Config{})
	ctx, err := d.Retain(0)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, ctx.Close()) // which nothing may outlive
	})
	return ctx, d
}

// TestMedian has a clock that the launches move: the cache's clearing and the events must not
// count.
func TestMedian(t *testing.T) {
	ctx, _ := fakeContext(t)
	times := map[string]time.Duration{}
	launches := 0
	require.NoError(t, Run(ctx, 64, func(m Measurement) error {
		times[m.Name] = m.Time
		return nil
	}, func(b *B) {
		p := b.Alloc(64, gpu.Float32)
		memset := func() { b.Do(ctx.Memset8(p, 0, 256, b.Stream)) }
		b.Time(Measurement{Name: "one"}, func() { launches++; memset() })
		b.Time(Measurement{Name: "three"}, func() { memset(); memset(); memset() })
	}))
	require.GreaterOrEqual(t, launches, 500)
	require.Positive(t, times["one"])
	require.EqualValues(t, 2, (times["three"] - times["one"]).Microseconds(), times)
}

// TestFailure has memory run out, a launch fail and a report refuse: the error says where, and
// nothing is left behind.
func TestFailure(t *testing.T) {
	ctx, d := fakeContext(t)
	none := func(m Measurement) error { t.Errorf("%s is reported", m.Name); return nil }
	require.ErrorIs(t, Run(ctx, 64, none, Ceilings), gpu.OutOfMemory) // 4 GiB of 1

	d.Fail("cuMemsetD8Async", 4, gpu.NotSupported)
	err := Run(ctx, 64, none, func(b *B) {
		p := b.Alloc(1, gpu.Float32)
		b.Time(Measurement{Name: "a name"}, func() { b.Do(ctx.Memset8(p, 0, 4, b.Stream)) })
	})
	require.ErrorIs(t, err, gpu.NotSupported)
	require.ErrorContains(t, err, "a name")

	stop := errors.New("stop")
	require.ErrorIs(t, Run(ctx, 64, func(Measurement) error { return stop }, func(b *B) {
		b.Time(Measurement{Name: "report"}, func() {})
		t.Error("it goes on")
	}), stop)
}
