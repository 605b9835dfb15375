package board_test

import (
	"math"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// large feeds a run of many steps and seeds, which come in layers of 5000.
func large(t testing.TB, run *store.Run, steps, seeds int) {
	t.Helper()
	r := texttest.Rand(t)
	reports := func() []state.Report {
		all := make([]state.Report, seeds/5000)
		for i := range all {
			all[i] = state.Report{Epoch: steps / 10, Slots: 5001,
				Seeds: make([]state.SeedReport, 5000)}
			for k := range all[i].Seeds {
				all[i].Seeds[k] = state.SeedReport{Seed: k, Stage: state.Stage(r.IntN(11)),
					Alpha:  r.Float64(),
					Health: state.Health{DeadRatio: r.Float64(), Variance: 1}}
			}
		}
		return all
	}
	e := llm.Event{Kind: llm.RunStart, Steps: steps + 1, StepTokens: 1000,
		Seeds: seeds, ValLoss: math.NaN(),
		Reports: reports()}
	run.Take(e)
	for step := 1; step <= steps; step++ {
		e.Kind, e.Step, e.Elapsed, e.RunTokens = llm.StepEnd, step,
			time.Duration(step)*time.Millisecond, int64(step)*1000
		e.Loss, e.GradNorm, e.LearningRate = 5/math.Sqrt(float64(step))+r.Float64()/10, r.Float64(),
			1e-3
		run.Take(e)
	}
	e.Kind, e.Reports = llm.EpochEnd, reports()
	run.Take(e)
}

// TestLarge wants the page of a run of 10,000 steps and 50,000 seeds to stay below 200 MB and to
// draw 30 frames a second, where -timing asks for that, while the lattice is moved.
func TestLarge(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	w := browser(t)
	b, err := board.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	large(t, b.Add("large"), 10_000, 50_000)
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	w.do(chromedp.Navigate(url))
	w.see("#chart-loss canvas", "#legend li")
	require.Eventually(t, func() bool {
		return eval[int](w, "Lattice.layers().length") == 10
	}, patience, 50*time.Millisecond)
	frames := eval[float64](w, `new Promise(done => {
		Lattice.zoom(6);
		let n = 0;
		const begun = performance.now();
		const frame = () => {
			Lattice.pan(n % 200 < 100 ? 7 : -7, n % 100 < 50 ? 3 : -3);
			n++;
			const took = performance.now() - begun;
			if (took > 2000) done(1000 * n / took); else requestAnimationFrame(frame);
		};
		requestAnimationFrame(frame);
	})`)
	heap := eval[float64](w, "performance.memory.usedJSHeapSize") / 1e6
	t.Logf("%.0f frames a second, %.0f MB", frames, heap)
	if *timing {
		require.Greater(t, frames, 30.0)
	}
	require.Less(t, heap, 200.0)
	require.Empty(t, w.complaints(), "the browser's console")
}

// BenchmarkFeed is what the training goroutine pays for a board at a step.
func BenchmarkFeed(b *testing.B) {
	tr := newTrainer(b, 1, 4)
	shown, err := board.Attach(tr)
	require.NoError(b, err)
	defer shown.Close()
	feed := shown.Feed(tr)
	e := llm.Event{Kind: llm.StepEnd, Steps: math.MaxInt32}
	for b.Loop() {
		e.Step++
		_ = feed(e)
	}
}
