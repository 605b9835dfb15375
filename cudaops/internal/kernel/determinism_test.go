package kernel_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/crossentropy"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	normkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
)

// TestSameBits checks that kernels that add up many numbers are deterministic.
func TestSameBits(t *testing.T) {
	g := kerneltest.NewRig(t)
	const rows, d = 3001, 768
	n := rows * d
	x, _ := g.Normal(n, kerneltest.Bf16, 0)
	dy, _ := g.Normal(n, kerneltest.Bf16, 0)
	w, _ := g.Normal(d, kerneltest.F32, 0)
	rstd, _ := g.Normal(rows, kerneltest.F32, 0)
	dx, dw, work := g.Alloc(n, kerneltest.Bf16, 0), g.Alloc(d, kerneltest.F32, 0),
		g.Alloc(normkernel.RMSNormBackward{D: d, Type: kerneltest.Bf16}.WorkspaceBytes(g.Info)/4,
			kerneltest.F32, 0)
	sum := reduce.Reduce{Op: reduce.Sum, X: x.Ptr, Outer: 1, N: n, Inner: 1, XType: kerneltest.Bf16}
	columns := reduce.Reduce{Op: reduce.Sum, X: x.Ptr, Outer: 1, N: rows, Inner: d,
		XType: kerneltest.Bf16}
	parts := g.Alloc(max(sum.WorkspaceBytes(g.Info),
		columns.WorkspaceBytes(g.Info))/4, kerneltest.F32, 0)
	one, many := g.Alloc(1, kerneltest.F32, 0), g.Alloc(d, kerneltest.F32, 0)
	sum.Y, sum.Workspace, columns.Y, columns.Workspace = one.Ptr, parts.Ptr, many.Ptr, parts.Ptr
	targets := g.UploadInts(g.Classes(rows, d))
	losses, scale, mean := g.Alloc(rows, kerneltest.F32, 0), g.Alloc(1, kerneltest.F32, 0),
		g.Alloc(1, kerneltest.F32, 0)

	norm := normkernel.RMSNormBackward{DX: dx.Ptr, DW: dw.Ptr, G: dy.Ptr, X: x.Ptr, W: w.Ptr,
		Rstd: rstd.Ptr, Rows: rows, D: d, Type: kerneltest.Bf16,
		Workspace: work.Ptr}

	run := func() (results [][]float64) {
		g.Must(g.Launch(g.Stream, norm))
		results = append(results, g.Read(dx), g.Read(dw))
		g.Must(g.Launch(g.Stream, sum))
		g.Must(g.Launch(g.Stream, columns))
		g.Must(g.Launch(g.Stream, crossentropy.Scale{Scale: scale.Ptr, Targets: targets,
			Rows: rows}))
		g.Must(g.Launch(g.Stream, crossentropy.Forward{Logits: x.Ptr, Losses: losses.Ptr,
			Targets: targets, Rows: rows, V: d, Type: kerneltest.Bf16}))
		g.Must(g.Launch(g.Stream, crossentropy.Mean{Mean: mean.Ptr, Losses: losses.Ptr,
			Scale: scale.Ptr, Rows: rows}))
		return append(results, g.Read(one), g.Read(many), g.Read(losses), g.Read(mean))
	}

	first := run()
	for range 5 {
		for i, again := range run() {
			require.Equal(t, again, first[i])
		}
	}
}
