package board_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// large adds the events of a run with many steps and seeds, in layers of 5000 seeds.
func large(t testing.TB, run *store.Run, steps, seeds int) {
	t.Helper()
	r := randtest.New(t)
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

// TestLarge checks that the page of a run with 10,000 steps and 50,000 seeds needs less than 200
// MB. With -timing, it must also draw 30 frames per second while the lattice is moved.
func TestLarge(t *testing.T) {
	randtest.NeedsLong(t, "TestPage has a smaller run")

	w := browser(t)
	b, err := board.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	large(t, b.Add("large"), 10_000, 50_000)
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	w.Do(chromedp.Navigate(url))
	w.see("#chart-loss canvas", "#legend li")
	require.Eventually(t, func() bool {
		return eval[int](w, "Lattice.layers().length") == 10
	}, patience, 50*time.Millisecond)
	frames := eval[float64](w, `new Promise(done => {
		Lattice.zoom(6);
		const canvas = document.getElementById('lattice'), at = canvas.getBoundingClientRect();
		let x = 300, y = 100;
		canvas.setPointerCapture = () => {}; // the events have no real pointer
		const point = type => canvas.dispatchEvent(new PointerEvent(type,
			{pointerId: 1, clientX: at.left + x, clientY: at.top + y}));
		point('pointerdown');
		let n = 0;
		const begun = performance.now();
		const frame = () => {
			x += n % 200 < 100 ? 7 : -7;
			y += n % 100 < 50 ? 3 : -3;
			point('pointermove');
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
	if whole, ok := renderer(t); ok {
		t.Logf("%.0f MB in the page's process", whole)
		require.Less(t, whole, 200.0)
	}

	require.Empty(t, w.Complaints(), "the browser's console")
}

// renderer returns the memory in MB of the largest renderer process that this test has started,
// with its portion of shared memory. It returns false on systems without /proc.
func renderer(t *testing.T) (mb float64, ok bool) {
	field := func(file, name string) (n float64) {
		text, _ := os.ReadFile(file) // the process may have ended
		for line := range strings.Lines(string(text)) {
			if rest, is := strings.CutPrefix(line, name); is {
				fmt.Sscan(rest, &n)
			}
		}
		return n
	}

	all, err := filepath.Glob("/proc/[0-9]*")
	require.NoError(t, err)
	for _, p := range all {
		command, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		if !strings.Contains(string(command), "--type=renderer") {
			continue
		}
		at := p
		for n := 1.0; n > 0 && filepath.Base(at) != fmt.Sprint(os.Getpid()); {
			n = field(filepath.Join(at, "status"), "PPid:")
			at = fmt.Sprintf("/proc/%.0f", n)
		}
		if filepath.Base(at) != fmt.Sprint(os.Getpid()) {
			continue
		}
		pss := field(filepath.Join(p, "smaps_rollup"), "Pss:") * 1024 / 1e6
		mb, ok = max(mb, pss), ok || pss > 0
	}

	return mb, ok
}

// BenchmarkFeed measures the cost of a step for the training goroutine.
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
