package board_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/board/internal/boardtest"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/runlog"
)

// everything is a script that returns all texts of the page that contain a figure, one per line.
const everything = `(() => {
	const lines = selector => [...document.querySelectorAll(selector)].map(e => selector + ': ' + e.textContent);
	return [...lines('#name'), ...lines('#state'), ...lines('#pace'), ...lines('#tiles > div'), ...lines('#legend li'),
		...lines('.curves li'), ...lines('#events li'), ...lines('#seed-title'), ...lines('#seed-story'), ...lines('#seed-trial'),
		...lines('#seed-figures > div'), ...lines('#seed-events li'), Board.csv(),
		'history ' + document.getElementById('history').toDataURL().length,
		'progress ' + document.getElementById('progress').getAttribute('aria-valuenow')].join('\n');
})()`

// figures returns all figures that a page shows, with a seed selected.
func figures(w *window, seed int) string {
	w.Helper()
	eval[bool](w, fmt.Sprintf("Lattice.select({layer: 0, seed: %d}); true", seed))
	w.see("#seed-events li", "#history")
	w.Do(chromedp.Sleep(time.Second)) // fetches and frames
	return eval[string](w, everything)
}

// TestPagesAgree checks that a page that was open from the start, a page opened in the middle of the
// run, the page of a board of logs, and a report show the same figures.
func TestPagesAgree(t *testing.T) {
	randtest.NeedsLong(t, "TestPage and TestReport look at the pages one at a time")
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "the run")
	log := runlog.JSON(filepath.Join(folder, "log.jsonl"))
	b, err := board.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	run := b.Add("the run")
	first := browser(t)
	first.Do(chromedp.Navigate(url))
	first.see("h1")

	var middle *window
	for _, e := range boardtest.Growing() {
		require.NoError(t, log(e))
		run.Take(e)
		if e.Kind == llm.StepEnd && e.Step == 10 {
			middle = browser(t)
			middle.Do(chromedp.Navigate(url))
			first.see("#chart-loss canvas", "#events li")
			middle.see("#chart-loss canvas", "#events li")
		}
	}
	ended := func(w *window) {
		t.Helper()
		require.Eventually(t, func() bool { return w.text("#state") == "ended" }, patience,
			50*time.Millisecond)
	}
	ended(first)
	ended(middle)

	var page strings.Builder
	require.NoError(t, board.Report(&page, folder))
	path := filepath.Join(t.TempDir(), "report.html")
	require.NoError(t, os.WriteFile(path, []byte(page.String()), 0o666))
	report := browser(t)
	report.Do(chromedp.Navigate("file://" + path))
	ended(report)
	want := figures(report, 1)

	// Live pages fetch the history of seeds only every few seconds, and once more after the end.
	agrees := func(w *window, name string) {
		t.Helper()
		for end := time.Now().Add(patience); figures(w, 1) != want && time.Now().Before(end); {
			time.Sleep(200 * time.Millisecond)
		}
		require.Equal(t, want, figures(w, 1), name)
	}
	agrees(first, "opened at the start")
	agrees(middle, "opened in the middle")
	report.Do(chromedp.Navigate(logs(t, folder)))
	ended(report)
	agrees(report, "board of logs")

	require.Contains(t, want, "parameters4.0 ksince step 20")
	require.Contains(t, want, "128 seeds (layer 0, seed 0; layer 0, seed 1; layer 0, seed 2 and 125 more): "+
		"Evaluating → FineTuning because the timetable")
	require.Contains(t, want, "The model has changed: 3 blocks become 12")
	require.Contains(t, want, "the held-out loss is 0.0625 lower than without it (2%), and 75% of the batches agree")
	require.Equal(t, 6, strings.Count(want, "128 seeds ("))

	// Seed 2 has the same stage, but nothing was compared.
	plain := figures(first, 2)
	require.Contains(t, plain, "layer 0, seed 2: FineTuning")
	require.Contains(t, plain, "Nothing was compared")
	require.NotContains(t, plain, "lowers the loss by")
	require.NotContains(t, plain, "stability")
	require.NotContains(t, plain, "helped")
	for _, w := range []*window{first, middle, report} {
		require.Empty(t, w.Complaints(), "the browser's console")
	}
}
