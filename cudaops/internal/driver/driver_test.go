package driver_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

func TestDevice(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		d := r.Device()
		t.Logf("%+v", d)
		if d.Name == "" || d.Major < 3 || d.SMs < 1 || d.Memory < 1<<29 ||
			d.SharedPerBlock < 48<<10 || d.L2 < 1<<17 {
			t.Errorf("implausible: %+v", d)
		}
		free, total, err := r.MemInfo()
		ok(t, err)
		if free == 0 || free > total || total > d.Memory+d.Memory/50 {
			t.Errorf("%d of %d bytes free on a GPU of %d", free, total, d.Memory)
		}
		require.NotZero(t, r.Handle(), "no handle")
	})
}

func TestCopies(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		s := must[gpu.Stream](t)(r.NewStream(false))
		for _, n := range []int{1, 3, 255, 4097, 1<<20 + 7} {
			for _, pinned := range []bool{false, true} {
				host := func() []byte {
					if pinned {
						return must[[]byte](t)(r.AllocHost(n))
					}
					return make([]byte, n)
				}
				in, out := host(), host()
				copy(in, r.bytes(n))
				a, b := r.alloc(t, n), r.alloc(t, n+5)
				ok(t, r.CopyToDevice(a, in, s))
				ok(t, r.Memset8(b, 0xA5, n+5, s))
				ok(t, r.CopyOnDevice(b.Offset(5), a, n, s))
				ok(t, r.CopyToHost(out, b.Offset(5), s))
				ok(t, r.SyncStream(s))
				require.Equal(t, out, in, pinned)
				head := make([]byte, 5)
				ok(t, r.CopyToHost(head, b, s)) // waits because the memory is not pinned
				require.Equal(t, bytes.Repeat([]byte{0xA5}, 5), head, n)
				ok(t, errors.Join(r.Free(a), r.Free(b)))
				if pinned {
					ok(t, errors.Join(r.FreeHost(in), r.FreeHost(out)))
				}
			}
		}
		p := r.alloc(t, 4*1001)
		ok(t, errors.Join(r.CopyToDevice(p, nil, s), r.CopyToHost(nil, p, s),
			r.CopyOnDevice(p, p, 0, s),
			r.Memset8(p, 0, 0, s)))
		for name, err := range map[string]error{
			"negative length": r.Memset8(p, 0, -1, s), "no bytes": second(r.Alloc(0)),
			"no pinned bytes": second(r.AllocHost(0)), "not pinned": r.FreeHost(make([]byte, 3)),
			"past the end": r.CopyToDevice(p, make([]byte, 1<<26), s),
		} {
			require.ErrorIs(t, err, gpu.InvalidValue, name)
		}
		ok(t, errors.Join(r.Free(p), r.Free(0), r.DestroyStream(s)))
	})
}

func second[T any](_ T, err error) error { return err }

func TestOutOfMemory(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		_, total, err := r.MemInfo()
		ok(t, err)
		_, err = r.Alloc(2 * int(total))
		var e *gpu.Error
		if !errors.As(err, &e) || !errors.Is(err, gpu.OutOfMemory) || e.Sticky() {
			t.Fatalf("got %v", err)
		}
		t.Log(err)
		for _, s := range []string{"cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY (2)",
			gpu.Size(2*total) + " requested",
			"of " + gpu.Size(total) + " free"} {
			require.ErrorContains(t, err, s)
		}
		ok(t, r.Free(r.alloc(t, 1<<20))) // the context still works
	})
}

func TestLaunch(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		m := must[gpu.Module](t)(r.LoadModule([]byte(ptx)))
		axpy := r.kernel(t, m, "axpy")
		s := must[gpu.Stream](t)(r.NewStream(false))
		for _, n := range []int{1, 31, 1000, 100003} {
			a, b := r.floats(n), r.floats(n)
			pa, pb, py := r.alloc(t, 4*n), r.alloc(t, 4*n), r.alloc(t, 4*n+4)
			ok(t, errors.Join(r.CopyToDevice(pa, gpu.Bytes(a), s),
				r.CopyToDevice(pb, gpu.Bytes(b), s),
				r.Memset8(py, 0xFF, 4*n+4, s)))
			packed := args(py, pa, pb, float32(-2.5), n)
			ok(t, r.Launch(axpy, gpu.LaunchConfig{Grid: gpu.Dim{X: (n + 127) / 128},
				Block: gpu.Dim{X: 128}}, s, packed))
			packed.Packed()[0]++ // the launch must have copied the arguments
			y := make([]float32, n+1)
			ok(t, r.CopyToHost(gpu.Bytes(y), py, s))
			for i := range n {
				require.Equal(t, float32(math.FMA(float64(b[i]), -2.5, float64(a[i]))), y[i])
			}
			require.True(t, math.IsNaN(float64(y[n])))
			ok(t, errors.Join(r.Free(pa), r.Free(pb), r.Free(py)))
		}
		full, sms := gpu.LaunchConfig{Grid: gpu.Dim{X: 2}, Block: gpu.Dim{X: 1024}}, r.Device().SMs
		if n := must[int](t)(r.Resident(axpy, full)); n < sms || n > 2*sms {
			t.Errorf("%d blocks of 1024 threads on %d multiprocessors", n, sms)
		}
		if full.Cluster.X = 2; r.Device().Capability() >= 90 {
			if n := must[int](t)(r.Resident(axpy, full)); n < 1 || n > sms {
				t.Errorf("%d clusters of two blocks of 1024 threads", n)
			}
		}
		_, err := r.Function(m, "absent")
		require.ErrorIs(t, err, gpu.NotFound)
		require.ErrorContains(t, err, "absent")

		one := gpu.LaunchConfig{Grid: gpu.Dim{X: 1}, Block: gpu.Dim{X: 32}}
		null := gpu.Ptr(0)
		some := args(null, null, null, float32(1), 0)
		for name, c := range map[string]gpu.LaunchConfig{
			"negative blocks":      {Block: gpu.Dim{X: 1}, Grid: gpu.Dim{X: -1}},
			"too many threads":     {Grid: one.Grid, Block: gpu.Dim{X: 1025}},
			"too much shared":      {Grid: one.Grid, Block: one.Block, Shared: 100 << 10},
			"grid, cluster differ": {Grid: gpu.Dim{X: 3}, Block: one.Block, Cluster: gpu.Dim{X: 2}},
		} {
			if err := r.Launch(axpy, c, s, some); err == nil ||
				!strings.Contains(err.Error(), "cuLaunchKernel") ||
				!strings.Contains(err.Error(), "axpy") ||
				!strings.Contains(err.Error(), "block ") {
				t.Errorf("%s: %v", name, err)
			}
		}
		ok(t, r.AllowShared(axpy, 100<<10))
		one.Shared = 100 << 10
		ok(t, r.Launch(axpy, one, s, some))
		require.ErrorIs(t, r.AllowShared(axpy, 1<<20), gpu.InvalidValue)
		ok(t, errors.Join(r.SyncStream(s), r.UnloadModule(m), r.DestroyStream(s)))
	})
}

func TestCluster(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		if r.Device().Major < 9 {
			t.Skip("clusters need compute capability 9.0")
		}
		m := must[gpu.Module](t)(r.LoadModule([]byte(clusterPTX)))
		p := r.alloc(t, 4*12)
		c := gpu.LaunchConfig{Grid: gpu.Dim{X: 12}, Block: gpu.Dim{X: 32}, Cluster: gpu.Dim{X: 4}}
		ok(t, r.Launch(r.kernel(t, m, "cluster_rank"), c, 0, args(p)))
		got := make([]uint32, 12)
		ok(t, r.CopyToHost(gpu.Bytes(got), p, 0))
		require.Equal(t, []uint32{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}, got)

		tensor := gpu.TiledTensor{Type: gpu.BFloat16, Address: p, Dims: []uint64{8, 3},
			Strides: []uint64{16},
			Box:     []uint32{8, 2}}
		if map128, err := r.EncodeTiled(tensor); err != nil || map128 == (gpu.TensorMap{}) {
			t.Errorf("tensor map: %v", err)
		}
		for name, change := range map[string]func(*gpu.TiledTensor){
			"address":  func(t *gpu.TiledTensor) { t.Address += 2 },
			"strides":  func(t *gpu.TiledTensor) { t.Strides = nil },
			"stride":   func(t *gpu.TiledTensor) { t.Strides = []uint64{18} },
			"box":      func(t *gpu.TiledTensor) { t.Box = []uint32{257, 2} },
			"row":      func(t *gpu.TiledTensor) { t.Box = []uint32{4, 2} },
			"long row": func(t *gpu.TiledTensor) { t.Dims[0], t.Box = 128, []uint32{128, 2} },
			"rank":     func(t *gpu.TiledTensor) { t.Dims = nil },
		} {
			bad := tensor
			bad.Dims = slices.Clone(tensor.Dims)
			change(&bad)
			require.ErrorIs(t, second(r.EncodeTiled(bad)), gpu.InvalidValue, name)
		}
		ok(t, errors.Join(r.Free(p), r.UnloadModule(m)))
	})
}

// TestCooperative checks that a cooperative launch runs if its blocks fit the GPU at once and fails
// otherwise, and that kernels access pinned memory at the address that PinnedAddress returns.
func TestCooperative(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		const n = 1000
		m := must[gpu.Module](t)(r.LoadModule([]byte(ptx)))
		axpy := r.kernel(t, m, "axpy")
		host := must[[]byte](t)(r.AllocHost(3 * 4 * n))
		x := gpu.View[float32](host)
		copy(x, r.floats(2*n))
		a := must[gpu.Ptr](t)(r.PinnedAddress(host))
		b, y := must[gpu.Ptr](t)(r.PinnedAddress(host[4*n:])), a.Offset(2*4*n)

		c := gpu.LaunchConfig{Grid: gpu.Dim{X: 8}, Block: gpu.Dim{X: 128}, Cooperative: true}
		ok(t, r.Launch(axpy, c, 0, args(y, a, b, float32(-2.5), n)))
		ok(t, r.SyncStream(0))
		for i := range n {
			require.Equal(t, float32(math.FMA(float64(x[n+i]), -2.5, float64(x[i]))), x[2*n+i])
		}

		resident, err := r.Resident(axpy, c)
		ok(t, err)
		c.Grid.X = resident + 1
		err = r.Launch(axpy, c, 0, args(y, a, b, float32(-2.5), n))
		require.ErrorIs(t, err, gpu.CooperativeTooLarge)
		require.ErrorContains(t, err, "cooperative")

		_, err = r.PinnedAddress(make([]byte, 4))
		require.ErrorIs(t, err, gpu.InvalidValue)
		ok(t, errors.Join(r.FreeHost(host), r.UnloadModule(m)))
	})
}

func TestOrder(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		s := must[gpu.Stream](t)(r.NewStream(false))
		start, mid, end := must[gpu.Event](t)(r.NewEvent(true)),
			must[gpu.Event](t)(r.NewEvent(false)),
			must[gpu.Event](t)(r.NewEvent(true))
		const n = 16 << 20
		a, b := r.alloc(t, n), r.alloc(t, n)
		out := must[[]byte](t)(r.AllocHost(n))
		require.True(t, must[bool](t)(r.EventDone(mid)), "an event never recorded is not done")
		ok(t, errors.Join(r.Record(start, s), r.Memset8(a, 1, n, s),
			r.Memset8(a, 2, n, s), r.Record(mid, s),
			r.CopyOnDevice(b, a, n, s), r.Memset8(a, 3, n, s),
			r.CopyToHost(out, b, s), r.Record(end, s)))
		polls := 0
		for !must[bool](t)(r.EventDone(end)) {
			polls++
			time.Sleep(10 * time.Microsecond)
		}
		if !r.gpu && polls == 0 {
			t.Error("work was done before anything waited")
		}
		ok(t, r.SyncEvent(end))
		require.False(t, slices.ContainsFunc(out, func(v byte) bool { return v != 2 }))
		elapsed := must[time.Duration](t)(r.Elapsed(start, end))
		if elapsed <= 0 || elapsed > 10*time.Second {
			t.Errorf("elapsed %v", elapsed)
		}
		t.Logf("%d polls, %v", polls, elapsed)
		require.Error(t, second(r.Elapsed(mid, end)), "an event without timing was timed")
		ok(t, errors.Join(r.SyncStream(s), r.DestroyEvent(start),
			r.DestroyEvent(mid), r.DestroyEvent(end),
			r.DestroyStream(s), r.Free(a), r.Free(b), r.FreeHost(out)))
	})
}

func TestCapture(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		const n = 1001
		m := must[gpu.Module](t)(r.LoadModule([]byte(ptx)))
		axpy := r.kernel(t, m, "axpy")
		s := must[gpu.Stream](t)(r.NewStream(false))
		in, out := must[[]byte](t)(r.AllocHost(4*n)), must[[]byte](t)(r.AllocHost(4*n))
		x, y, z := r.alloc(t, 4*n), r.alloc(t, 4*n), r.alloc(t, 4*n)
		ok(t, r.Memset8(y, 0, 4*n, s))
		ok(t, r.SyncStream(s))
		shape := gpu.LaunchConfig{Grid: gpu.Dim{X: 8}, Block: gpu.Dim{X: 128}}

		// z = x + (x + 2x)
		ok(t, r.BeginCapture(s))
		ok(t, r.CopyToDevice(x, in, s))
		ok(t, r.Launch(axpy, shape, s, args(y, x, x, float32(2), n)))
		ok(t, r.Launch(axpy, shape, s, args(z, x, y, float32(1), n)))
		ok(t, r.CopyToHost(out, z, s))
		g := must[gpu.Graph](t)(r.EndCapture(s))
		for range 3 {
			v := gpu.View[float32](in)
			copy(v, r.floats(n))
			ok(t, errors.Join(r.LaunchGraph(g, s), r.SyncStream(s)))
			for i, got := range gpu.View[float32](out) {
				inner := float32(math.FMA(float64(v[i]), 2, float64(v[i])))
				require.Equal(t, inner+v[i], got, i)
			}
		}
		ok(t, r.DestroyGraph(g))

		// Waiting invalidates a capture, and so does a copy that involves memory that is not pinned,
		// because it waits.
		ok(t, errors.Join(r.BeginCapture(s), r.Memset8(y, 0, n, s)))
		require.ErrorIs(t, r.SyncStream(s), gpu.CaptureUnsupported)
		require.ErrorIs(t, second(r.EndCapture(s)), gpu.CaptureInvalidated)
		require.Error(t, second(r.EndCapture(s)), "ended a capture that was not begun")
		ok(t, errors.Join(r.BeginCapture(s), r.Memset8(y, 0, n, s)))
		require.Error(t, r.CopyToHost(make([]byte, 4), z, s))
		require.Error(t, second(r.EndCapture(s)))
		// The stream still works.
		ok(t, errors.Join(r.Memset8(y, 0, n, s), r.SyncStream(s)))
		ok(t, errors.Join(r.DestroyStream(s), r.Free(x), r.Free(y), r.Free(z), r.FreeHost(in),
			r.FreeHost(out), r.UnloadModule(m)))
	})
}

func TestGoroutines(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		m := must[gpu.Module](t)(r.LoadModule([]byte(ptx)))
		axpy := r.kernel(t, m, "axpy")
		const workers, rounds, n = 16, 20, 777
		inputs := make([][]float32, workers)
		for i := range inputs {
			inputs[i] = r.floats(n)
		}
		work := func(in []float32) error {
			s, err := r.NewStream(false)
			if err != nil {
				return err
			}
			x, err := r.Alloc(4 * n)
			if err != nil {
				return err
			}
			y := make([]float32, n)
			for round := range rounds {
				packed := args(x, x, x, float32(round), n)
				err := errors.Join(r.CopyToDevice(x, gpu.Bytes(in), s),
					r.Launch(axpy, gpu.LaunchConfig{Grid: gpu.Dim{X: 7}, Block: gpu.Dim{X: 128}}, s,
						packed),
					r.CopyToHost(gpu.Bytes(y), x, s))
				if err != nil {
					return err
				}
				for i := range y {
					if want := float32(math.FMA(float64(in[i]), float64(round),
						float64(in[i]))); y[i] != want {
						return fmt.Errorf("round %d: y[%d] = %v, want %v", round, i, y[i], want)
					}
				}
			}
			return errors.Join(r.Free(x), r.DestroyStream(s))
		}
		errs := make([]error, workers)
		var wg sync.WaitGroup
		for i := range workers {
			wg.Go(func() { errs[i] = work(inputs[i]) })
		}
		wg.Wait()
		ok(t, errors.Join(errs...))
		ok(t, r.UnloadModule(m))
	})
}

func TestClosed(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		ok(t, r.Close())
		ok(t, r.Close())
		require.ErrorIs(t, second(r.Alloc(1)), gpu.ContextIsDestroyed)
	})
}

func TestAdopt(t *testing.T) {
	adopt := func(t *testing.T, d gpu.Driver) {
		own := must[gpu.Context](t)(d.Retain(0))
		p := must[gpu.Ptr](t)(own.Alloc(8))
		other := must[gpu.Context](t)(d.Adopt(own.Handle()))
		require.Equal(t, own.Device(), other.Device())
		v := []uint64{1234567890123}
		ok(t, other.CopyToDevice(p, gpu.Bytes(v), 0))
		ok(t, other.Close())
		got := []uint64{0}
		ok(t, own.CopyToHost(gpu.Bytes(got), p, 0))
		require.Equal(t, v[0], got[0])
		ok(t, errors.Join(own.Free(p), own.Close()))
	}

	each(t, func(t *testing.T, r *rig) {
		if r.gpu {
			adopt(t, needGPU(t))
		} else {
			adopt(t, r.fake)
		}
	})
}
