package driver_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// TestZeroedWorkspace wants products whose workspaces one memset has set to zero to be those that
// set them to zero themselves, bit by bit and at every launch of the graph, and the graph to be
// without the memsets of the library.
func TestZeroedWorkspace(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		blas, s := must[gpu.Blas](t)(r.Blas()), must[gpu.Stream](t)(r.NewStream())
		const b16, f32, limit, most = gpu.BFloat16, gpu.Float32, 4 << 20, 1 << 10
		scale := 64
		if r.gpu {
			scale = 1
		}
		zeroing := 0 // ways that set workspace to zero
		for _, spec := range []gpu.MatmulSpec{
			{M: 16384, N: 1024, K: 1024, A: b16, B: b16, D: b16},
			{M: 16384, N: 1024, K: 1024, TransB: true, A: b16, B: b16, D: b16},
			{M: 5632, N: 1024, K: 4096, TransA: true, A: b16, B: b16, D: f32},
		} {
			spec.M, spec.N, spec.K = spec.M/scale, spec.N/scale, spec.K/scale
			p := must[gpu.MatmulPlan](t)(blas.Plan(spec, limit, 12))
			a, b := r.matrix(spec.A, spec.M*spec.K), r.matrix(spec.B, spec.K*spec.N)
			size := spec.M * spec.N * spec.D.Size()
			pa, pb, pd, work := r.alloc(t, len(a.bytes)), r.alloc(t, len(b.bytes)),
				r.alloc(t, 2*size), r.alloc(t, limit)
			ok(t, errors.Join(r.CopyToDevice(pa, a.bytes, s), r.CopyToDevice(pb, b.bytes, s)))
			for way, algo := range p.Algos() {
				if algo.Workspace == 0 || algo.Workspace > most {
					continue
				}
				// which may load a module
				ok(t, p.Run(way, gpu.MatmulArgs{Alpha: 1, A: pa, B: pb, D: pd, Workspace: work,
					WorkspaceSize: limit}, s))
				// capture takes two products, which write one behind the other, each with workspace
				// of its own.
				capture := func(zeroed bool) *gpu.Graph {
					ok(t, r.BeginCapture(s))
					if zeroed {
						ok(t, r.Memset8(work, 0, 2*most, s))
					}
					for i := range 2 {
						ok(t,
							p.Run(way, gpu.MatmulArgs{Alpha: 1, A: pa, B: pb,
								D: pd.Offset(i * size), Workspace: work.Offset(i * most),
								WorkspaceSize: algo.Workspace, Zeroed: zeroed}, s))
					}
					return must[*gpu.Graph](t)(r.EndCapture(s))
				}
				results := func(g *gpu.Graph) []byte {
					ok(t, errors.Join(r.Memset8(work, 0xff, limit, s),
						r.Memset8(pd, 0xff, 2*size, s), r.LaunchGraph(g, s)))
					got := make([]byte, 2*size)
					ok(t, errors.Join(r.CopyToHost(got, pd, s), r.SyncStream(s)))
					return got
				}
				plain, without := capture(false), capture(true)
				name := fmt.Sprintf("%dx%dx%d, way %d, which needs %d bytes", spec.M, spec.N,
					spec.K, way, algo.Workspace)
				if r.gpu && plain.Nodes > 2 && !gpu.Poison {
					if zeroing++; without.Nodes != plain.Nodes-1 {
						t.Errorf("%s: %d nodes, and %d with one memset for all", name,
							plain.Nodes, without.Nodes)
					}
				}
				want := results(plain)
				require.Equal(t, want[size:], want[:size], name)
				for launch := range 3 {
					if !bytes.Equal(results(without), want) {
						t.Errorf("%s: launch %d differs from the product that sets its workspace "+
							"to zero", name, launch)
					}
				}
				ok(t, errors.Join(r.DestroyGraph(plain), r.DestroyGraph(without)))
			}
			ok(t, errors.Join(r.Free(pa), r.Free(pb), r.Free(pd), r.Free(work), p.Close()))
		}
		t.Logf("%d ways set workspace to zero", zeroing)
		ok(t, r.DestroyStream(s))
	})
}
