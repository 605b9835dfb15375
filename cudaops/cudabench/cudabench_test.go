package cudabench

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func fakeContext(t *testing.T) (gpu.Context, *fake.Driver) {
	t.Helper()
	d := fake.New(fake.Config{AnyKernel: true})
	ctx, err := d.Retain(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if s := ctx.Stats(); s.DeviceBytes != 0 || s.HostBytes != 0 {
			t.Errorf("%d bytes on the device and %d pinned are left", s.DeviceBytes, s.HostBytes)
		}
		if err := ctx.Close(); err != nil {
			t.Error(err)
		}
	})
	return ctx, d
}

// newBench clears 64 bytes where there would be a cache.
func newBench(ctx gpu.Context, report func(Measurement) error) *bench {
	b := &bench{ctx: ctx, Set: kernel.New(ctx), size: 64, random: rand.New(rand.NewPCG(1, 1)), report: report}
	b.open()
	return b
}

// TestNames measures a small layer on the fake driver, whose clock moves by a microsecond with every operation.
func TestNames(t *testing.T) {
	ctx, _ := fakeContext(t)
	var got []Measurement
	b := newBench(ctx, func(m Measurement) error { got = append(got, m); return nil })
	newKasmina(b, 3, 50, true).measure()
	b.close()
	if b.err != nil {
		t.Fatal(b.err)
	}
	const elements = 3 * 50 * 4
	want := []Measurement{
		{Name: "kasmina_fwd_3x200_s50_stages", Bytes: 4 * elements}, {Name: "kasmina_bwd_3x200_s50_stages", Bytes: 6 * elements},
		{Name: "kasmina_fwd_3x200_s50_stages_telemetry", Bytes: 4 * elements},
		{Name: "kasmina_bwd_3x200_s50_stages_telemetry", Bytes: 6 * elements},
	}
	if len(got) != len(want) {
		t.Fatalf("%d measurements, want %d: %v", len(got), len(want), got)
	}
	for i, m := range got {
		if m.Time <= 0 {
			t.Errorf("%s took %v", m.Name, m.Time)
		}
		if m.Time = 0; m != want[i] {
			t.Errorf("measurement %d is %+v, want %+v", i, m, want[i])
		}
	}
}

// TestMedian has a clock that the launches move: the cache's clearing and the events must not count.
func TestMedian(t *testing.T) {
	ctx, _ := fakeContext(t)
	var got Measurement
	b := newBench(ctx, func(m Measurement) error { got = m; return nil })
	p, launches := b.alloc(64, f32), 0
	b.time(Measurement{Name: "memset"}, func() error { launches++; return ctx.Memset8(p, 0, 256, b.stream) })
	one := got.Time
	b.time(Measurement{Name: "three"}, func() error {
		return errors.Join(ctx.Memset8(p, 0, 256, b.stream), ctx.Memset8(p, 1, 256, b.stream), ctx.Memset8(p, 2, 256, b.stream))
	})
	b.close()
	if b.err != nil {
		t.Fatal(b.err)
	}
	if launches < 500 {
		t.Errorf("%d launches of a microsecond, want at least 500", launches)
	}
	if more := (got.Time - one).Microseconds(); one <= 0 || more != 2 {
		t.Errorf("one memset takes %v and three %v, want 2 µs more", one, got.Time)
	}
}

// TestFailure has memory run out, a launch fail and a report refuse: the error says where, and nothing is left behind.
func TestFailure(t *testing.T) {
	ctx, d := fakeContext(t)
	err := measure(ctx, []string{"copy"}, func(Measurement) error { return nil }) // 4 GiB of 1
	if !errors.Is(err, gpu.OutOfMemory) {
		t.Errorf("out of memory: %v", err)
	}
	d.Fail("cuLaunchKernel", 3, gpu.NotSupported)
	b := newBench(ctx, func(m Measurement) error { t.Errorf("%s is reported", m.Name); return nil })
	newKasmina(b, 3, 50, false).measure()
	b.close()
	if !errors.Is(b.err, gpu.NotSupported) || !strings.Contains(b.err.Error(), "kasmina_fwd_3x200_s50") {
		t.Errorf("a launch that fails: %v", b.err)
	}
	stop := errors.New("stop")
	b = newBench(ctx, func(Measurement) error { return stop })
	b.time(Measurement{Name: "report"}, func() error { return nil })
	b.time(Measurement{Name: "after"}, func() error { t.Error("it goes on"); return nil })
	b.close()
	if !errors.Is(b.err, stop) {
		t.Errorf("a report that refuses: %v", b.err)
	}
	if err := Run(nil, nil, nil); err == nil || !strings.Contains(err.Error(), "cudabench.Run") {
		t.Errorf("no device: %v", err)
	}
}
