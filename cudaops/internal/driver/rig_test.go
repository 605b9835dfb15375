package driver_test

import (
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// Tests that use a rig run on the fake driver and, if the machine has a GPU, on the real driver. Both
// must behave alike.
type rig struct {
	gpu.Context
	gpu  bool
	fake *fake.Driver
	rng  *rand.Rand
}

// needGPU returns the real driver, or skips the test.
func needGPU(t testing.TB) gpu.Driver {
	t.Helper()
	d, err := driver.Open()
	if err != nil {
		reason, _, _ := strings.Cut(err.Error(), "\n")
		t.Skip("needs an NVIDIA GPU: " + reason)
	}
	return d
}

func TestMain(m *testing.M) {
	if d, err := driver.Open(); err == nil {
		// Hold the GPU's context until the end, so that it isn't recreated for every test.
		if _, err := d.Retain(0); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

func each(t *testing.T, f func(t *testing.T, r *rig)) {
	run := func(t *testing.T, d gpu.Driver, fk *fake.Driver) {
		c, err := d.Retain(0)
		ok(t, err)
		f(t, &rig{Context: c, gpu: fk == nil, fake: fk, rng: randtest.New(t)})
		ok(t, c.Close())
	}

	t.Run("fake", func(t *testing.T) {
		fk := fake.New(fake.Config{Kernels: fakeKernels})
		run(t, fk, fk)
	})
	t.Run("gpu", func(t *testing.T) { run(t, needGPU(t), nil) })
}

func ok(t testing.TB, err error) {
	t.Helper()
	require.NoError(t, err)
}

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		ok(t, err)
		return v
	}
}

func (r *rig) alloc(t testing.TB, bytes int) gpu.Ptr {
	t.Helper()
	return must[gpu.Ptr](t)(r.Alloc(bytes))
}

func (r *rig) kernel(t testing.TB, m gpu.Module, name string) *gpu.Function {
	t.Helper()
	return must[*gpu.Function](t)(r.Function(m, name))
}

func (r *rig) bytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.rng.Uint32())
	}
	return b
}

func (r *rig) floats(n int) []float32 {
	f := make([]float32, n)
	for i := range f {
		f[i] = float32(r.rng.NormFloat64())
	}
	return f
}

// relative returns ‖got − want‖ / ‖want‖.
func relative(got, want []float64) float64 {
	var d, n float64
	for i := range want {
		d += (got[i] - want[i]) * (got[i] - want[i])
		n += want[i] * want[i]
	}
	return math.Sqrt(d / n)
}

// args packs pointers, float32 and int32 values as kernel arguments.
func args(values ...any) *gpu.Args {
	a := new(gpu.Args)
	for _, v := range values {
		switch v := v.(type) {
		case gpu.Ptr:
			gpu.Add(a, v)
		case float32:
			gpu.Add(a, v)
		case int:
			gpu.Add(a, int32(v))
		}
	}

	return a
}

// ptx contains kernels that compute out[i] = a[i] + scale·b[i], return the rank of each block in its
// cluster, and store 1 at an arbitrary address.
const ptx = `.version 6.0
.target sm_60
.address_size 64

.visible .entry axpy(.param .u64 out, .param .u64 a, .param .u64 b, .param .f32 scale, .param .u32 n)
{
	.reg .pred %p;
	.reg .b32 %r<5>;
	.reg .f32 %f<4>;
	.reg .b64 %rd<7>;
	ld.param.u32 %r0, [n];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ntid.x;
	mov.u32 %r3, %tid.x;
	mad.lo.u32 %r4, %r1, %r2, %r3;
	setp.ge.u32 %p, %r4, %r0;
	@%p bra done;
	mul.wide.u32 %rd0, %r4, 4;
	ld.param.u64 %rd1, [a];
	ld.param.u64 %rd2, [b];
	ld.param.u64 %rd3, [out];
	ld.param.f32 %f3, [scale];
	add.u64 %rd4, %rd1, %rd0;
	add.u64 %rd5, %rd2, %rd0;
	add.u64 %rd6, %rd3, %rd0;
	ld.global.f32 %f0, [%rd4];
	ld.global.f32 %f1, [%rd5];
	fma.rn.f32 %f2, %f1, %f3, %f0;
	st.global.f32 [%rd6], %f2;
done:
	ret;
}

.visible .entry poke(.param .u64 at)
{
	.reg .b64 %rd<1>;
	.reg .b32 %r<1>;
	ld.param.u64 %rd0, [at];
	mov.u32 %r0, 1;
	st.global.u32 [%rd0], %r0;
	ret;
}
`

const clusterPTX = `.version 7.8
.target sm_90
.address_size 64

.visible .entry cluster_rank(.param .u64 out)
{
	.reg .b64 %rd<3>;
	.reg .b32 %r<2>;
	ld.param.u64 %rd0, [out];
	mov.u32 %r0, %cluster_ctarank;
	mov.u32 %r1, %ctaid.x;
	mul.wide.u32 %rd1, %r1, 4;
	add.u64 %rd2, %rd0, %rd1;
	st.global.u32 [%rd2], %r0;
	ret;
}
`

// fakeKernels implement the kernels of ptx in Go.
var fakeKernels = map[string]fake.Kernel{
	"axpy": func(l *fake.Launch) {
		out, a, b := fake.Arg[gpu.Ptr](l), fake.Arg[gpu.Ptr](l), fake.Arg[gpu.Ptr](l)
		scale := fake.Arg[float32](l)
		n := min(int(fake.Arg[int32](l)), l.Grid.Count()*l.Block.Count())
		y, x, z := fake.Slice[float32](l, out, n), fake.Slice[float32](l, a, n),
			fake.Slice[float32](l, b, n)
		for i := range y {
			y[i] = float32(math.FMA(float64(z[i]), float64(scale), float64(x[i])))
		}
	},
	"poke": func(l *fake.Launch) { fake.Slice[uint32](l, fake.Arg[gpu.Ptr](l), 1)[0] = 1 },
	"cluster_rank": func(l *fake.Launch) {
		ranks := fake.Slice[uint32](l, fake.Arg[gpu.Ptr](l), l.Grid.Count())
		for i := range ranks {
			ranks[i] = uint32(i % l.Cluster.Count())
		}
	},
}
