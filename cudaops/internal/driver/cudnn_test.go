package driver

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// describedH200 is an H200 as cuDNN describes a GPU, so that it plans for one that is not there.
const describedH200 = `{"deviceName": "NVIDIA H200", "deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0, "pciDeviceId": 0,
	"multiProcessorCount": 132, "totalGlobalMem": 150754820096, "l2CacheSize": 62914560, "smClockRateKHz": 1980000,
	"memClockRateKHz": 3201000, "warpSize": 32, "regsPerBlock": 65536, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32,
	"maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "maxGridSize": [2147483647, 65535, 65535],
	"maxBlockSize": [1024, 1024, 64], "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
	"reservedSharedMemoryPerBlock": 1024, "isTccDriver": 0, "supportCoopLaunch": 1}`

// plannedDnn is cuDNN on this machine's GPU or, without one, for an H200.
func plannedDnn(t *testing.T) *cudnn {
	t.Helper()
	var missing *NotFoundError
	skip := func(err error) {
		t.Helper()
		if errors.As(err, &missing) {
			reason, _, _ := strings.Cut(err.Error(), "\n")
			t.Skip(reason)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if d, err := Open(); err == nil {
		ctx, err := d.Retain(0)
		skip(err)
		t.Cleanup(func() { ctx.Close() })
		dnn, err := ctx.Dnn()
		skip(err)
		return dnn.(*cudnn)
	}
	f := hostFinder()
	if library, _ := load(f, f.cuda(), 0, loadOnly); library == 0 {
		t.Skip("needs NVIDIA's driver library, which cuDNN compiles for")
	}
	for cuda := newestCUDA; cuda >= oldestCUDA; cuda-- {
		blas, _ := load(f, f.cublasLt(), cuda, func(path string) (uintptr, error) {
			if m := major(path); m != cuda {
				return 0, fmt.Errorf("is of CUDA %d", m)
			}
			return loadOnly(path)
		})
		if blas == 0 {
			continue
		}
		d, err := openDnn(f, cuda)
		if err != nil {
			continue
		}
		const deviceKind, deviceJSON, ofChar = 38, 2702, 24
		d.on, d.ledger = func(f func() error) error { return f() }, &Ledger{}
		g := &dnnGraph{d: d}
		device := g.make(deviceKind)
		dnnSet(g, device, deviceJSON, ofChar, []byte(describedH200)...)
		if g.finalize(device); g.err != nil {
			t.Fatal(g.err)
		}
		d.device = device
		return d
	}
	t.Skip("needs cuDNN, with the cuBLASLt and the libnvrtc of its version of CUDA")
	return nil
}

// packedSpec has q, k and v side by side.
func packedSpec(batch, seq, heads, kvHeads, headDim int, causal bool, t DType) AttentionSpec {
	all := (heads + 2*kvHeads) * headDim
	return AttentionSpec{Batch: batch, Seq: seq, Heads: heads, KVHeads: kvHeads, HeadDim: headDim, Causal: causal, Scale: 0.1, Type: t,
		Q: all, K: all, V: all, Y: heads * headDim}
}

// TestDnnPlans wants an engine for every shape that this module's models have, and next to no workspace. Without a GPU the kernel is
// compiled, but cannot be loaded.
func TestDnnPlans(t *testing.T) {
	const driverFailed DnnStatus = 5001
	d := plannedDnn(t)
	t.Logf("%s, version %d", d.path, d.version)
	for i, s := range []AttentionSpec{
		packedSpec(32, 1024, 12, 12, 64, true, BFloat16), packedSpec(8, 2048, 16, 4, 128, true, BFloat16),
		packedSpec(2, 1000, 6, 2, 96, true, Float16), packedSpec(1, 77, 3, 3, 64, false, BFloat16),
		packedSpec(2, 130, 4, 1, 8, true, BFloat16), packedSpec(1, 2, 1, 1, 72, true, Float16),
	} {
		if i > 0 && testing.Short() { // cuDNN compiles for about a second each
			break
		}
		p, err := d.PlanAttention(s)
		if d.device != 0 && errors.Is(err, driverFailed) {
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		pack := &dnnGraph{d: d}
		p.(*dnnPlan).pack(pack)
		if err := errors.Join(pack.err, pack.close()); err != nil {
			t.Errorf("operands: %v", err)
		}
		if p.Workspace() > 1<<16 { // what package kernels has
			t.Errorf("%+v: workspace of %d bytes", s, p.Workspace())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	s := packedSpec(1, 64, 2, 1, 20, true, BFloat16)
	var status DnnStatus
	if _, err := d.PlanAttention(s); !errors.As(err, &status) || !status.NotSupported() {
		t.Errorf("a head dimension of 20: error %v", err)
	}
}
