package bench

import (
	"errors"
	"testing"

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
	var got Measurement
	b := New(ctx, 64, func(m Measurement) error { got = m; return nil })
	p, launches := b.Alloc(64, gpu.Float32), 0
	b.Time(Measurement{Name: "memset"}, func() error {
		launches++
		return ctx.Memset8(p, 0, 256, b.Stream)
	})
	one := got.Time
	b.Time(Measurement{Name: "three"}, func() error {
		return errors.Join(ctx.Memset8(p, 0, 256, b.Stream), ctx.Memset8(p, 1, 256, b.Stream),
			ctx.Memset8(p, 2, 256, b.Stream))
	})
	b.close()
	require.NoError(t, b.Err)
	require.GreaterOrEqual(t, launches, 500)
	if more := (got.Time - one).Microseconds(); one <= 0 || more != 2 {
		t.Errorf("one memset takes %v and three %v, want 2 µs more", one, got.Time)
	}
}

// TestFailure has memory run out, a launch fail and a report refuse: the error says where, and
// nothing is left behind.
func TestFailure(t *testing.T) {
	ctx, d := fakeContext(t)
	b := New(ctx, 64, func(Measurement) error { return nil })
	Ceilings(b) // 4 GiB of 1
	require.ErrorIs(t, b.Close(), gpu.OutOfMemory)

	d.Fail("cuMemsetD8Async", 4, gpu.NotSupported)
	b = New(ctx, 64, func(m Measurement) error { t.Errorf("%s is reported", m.Name); return nil })
	p := b.Alloc(1, gpu.Float32)
	b.Time(Measurement{Name: "a name"}, func() error { return ctx.Memset8(p, 0, 4, b.Stream) })
	err := b.Close()
	require.ErrorIs(t, err, gpu.NotSupported)
	require.ErrorContains(t, err, "a name")

	stop := errors.New("stop")
	b = New(ctx, 64, func(Measurement) error { return stop })
	b.Time(Measurement{Name: "report"}, func() error { return nil })
	b.Time(Measurement{Name: "after"}, func() error { t.Error("it goes on"); return nil })
	require.ErrorIs(t, b.Close(), stop)
}
