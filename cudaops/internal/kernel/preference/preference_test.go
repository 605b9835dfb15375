package preference

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/preference"
)

// losses lists the settings with which the tests compute losses.
var losses = []preference.Loss{{Kind: preference.Sigmoid, Beta: 0.25}, {Kind: preference.Sigmoid, Beta: 0.5, Smoothing: 0.25},
	{Kind: preference.Hinge, Beta: 0.25}, {Kind: preference.IPO, Beta: 0.25}, {Kind: preference.Robust, Beta: 0.25,
		Smoothing: 0.125}}

// reference returns the loss, the figures and the gradient for a gradient g of the loss.
func reference(l preference.Loss, logProbs, refs []float64, answers []int, g float64) (loss float64, figures, dx []float64) {
	pairs := make([]preference.Pair, len(answers))
	n := float64(preference.Gather(pairs, logProbs, refs, answers))
	figures, dx = []float64{n, 0, 0, 0}, make([]float64, len(answers))
	for _, x := range pairs {
		if !x.Present() {
			continue
		}
		one, _ := l.Of(x)
		loss += one / n
		figures[2] += l.Beta * x.Ratio[0]
		figures[3] += l.Beta * x.Ratio[1]
		if x.Ratio[0] > x.Ratio[1] {
			figures[1]++
		}
	}
	for r, a := range answers {
		if a >= 0 {
			_, grad := l.Of(pairs[a/2])
			dx[r] = g / n * grad[a%2]
		}
	}
	return loss, figures, dx
}

// TestPreference compares losses, figures and gradients with float64 on the CPU: with long answers whose rows are
// together, and with rows in random order, pairs that lack an answer, and numbers without a pair.
func TestPreference(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, rows := range []int{1, 2, 31, 33, 500, 1025, 16384} {
		for _, scattered := range []bool{false, true} {
			for _, l := range losses {
				g.Scope(fmt.Sprintf("%d/%v/%v", rows, scattered, l), func(g *kerneltest.Rig) {
					answers, at := make([]int, rows), 0
					for r := range answers {
						if scattered {
							answers[r] = g.Rand.IntN(2*max(1, rows/4)+3) - 3
							continue
						}
						if g.Rand.IntN(200) == 0 {
							at++
						}
						answers[r] = at
						if at%5 == 4 {
							answers[r] = -1
						}
					}
					answers[0] = 0

					logProbs, x := g.Normal(rows, kerneltest.F32, 0)
					refs, y := g.Normal(rows, kerneltest.F32, 0)
					loss, figures := g.Alloc(1, kerneltest.F32, 0), g.Alloc(FigureCount, kerneltest.F32, 0)
					gradients, dx := g.Alloc(2*rows, kerneltest.F32, 0), g.Alloc(rows, kerneltest.F32, 0)
					grad, gr := g.Upload([]float64{1 + g.Rand.Float64()}, kerneltest.F32, 0)
					a := Forward{Loss: loss.Ptr, Figures: figures.Ptr, Gradients: gradients.Ptr, LogProbs: logProbs.Ptr,
						Reference: refs.Ptr, Answers: g.UploadInts(answers), Rows: rows, Pair: l}
					a.Workspace = g.Alloc(a.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0).Ptr
					g.Must(g.Launch(g.Stream, a))
					g.Must(g.Launch(g.Stream, Backward{DX: dx.Ptr, Gradients: gradients.Ptr, Figures: figures.Ptr,
						Grad: grad.Ptr, Answers: a.Answers, Rows: rows}))

					wantLoss, wantFigures, want := reference(l, x, y, answers, gr[0])
					g.Near("loss", loss, []float64{wantLoss}, 1e-6)
					got := g.Read(figures)
					require.Equal(t, wantFigures[:2], got[:2])
					require.InDeltaSlice(t, wantFigures, got, 1e-5*(1+math.Abs(wantFigures[2])+math.Abs(wantFigures[3])))
					if kerneltest.Norm(want) > 0 { // otherwise all pairs of the hinge loss are beyond its margin
						g.Near("gradient", dx, want, 1e-6)
					}

					again := g.Alloc(1, kerneltest.F32, 0)
					a.Loss = again.Ptr
					g.Must(g.Launch(g.Stream, a))
					require.Equal(t, g.Read(loss), g.Read(again))
				})
			}
		}
	}
}

// TestPreferenceNotFinite checks that a log-probability that is not finite makes the loss and the gradient of its pair
// NaN, and nothing else.
func TestPreferenceNotFinite(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, bad := range []float64{math.NaN(), math.Inf(-1), 1e30} {
		for _, l := range losses {
			logProbs, _ := g.Upload([]float64{-1, bad, -2, -3, 5}, kerneltest.F32, 0)
			refs, _ := g.Upload(make([]float64, 5), kerneltest.F32, 0)
			loss, figures := g.Alloc(1, kerneltest.F32, 0), g.Alloc(FigureCount, kerneltest.F32, 0)
			gradients, dx := g.Alloc(10, kerneltest.F32, 0), g.Alloc(5, kerneltest.F32, 0)
			one, _ := g.Upload([]float64{1}, kerneltest.F32, 0)
			a := Forward{Loss: loss.Ptr, Figures: figures.Ptr, Gradients: gradients.Ptr, LogProbs: logProbs.Ptr,
				Reference: refs.Ptr, Answers: g.UploadInts([]int{0, 1, 2, 3, -1}), Rows: 5, Pair: l}
			a.Workspace = g.Alloc(a.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0).Ptr
			g.Must(g.Launch(g.Stream, a))
			g.Must(g.Launch(g.Stream, Backward{DX: dx.Ptr, Gradients: gradients.Ptr, Figures: figures.Ptr, Grad: one.Ptr,
				Answers: a.Answers, Rows: 5}))
			require.True(t, math.IsNaN(g.Read(loss)[0]), l)
			got := g.Read(dx)
			require.True(t, math.IsNaN(got[0]) && math.IsNaN(got[1]), l)
			require.False(t, math.IsNaN(got[2]) || math.IsNaN(got[3]), l)
			require.Zero(t, got[4])
		}
	}
}
