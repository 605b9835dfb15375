package board_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/internal/browsertest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// screenshots is the directory for pictures of the page.
var screenshots = flag.String("screenshots", "", "folder to write pictures of the page to")

// A window is a browser window that shows the board.
type window struct{ *browsertest.Window }

// browser opens a window. It skips the test if Chromium is not installed.
func browser(t *testing.T) *window {
	t.Helper()
	return &window{browsertest.Open(t, 1280, 900)}
}

// see waits until elements are visible.
func (w *window) see(selectors ...string) {
	w.Helper()
	for _, s := range selectors {
		w.Do(chromedp.WaitVisible(chromedp.CSS(s)))
	}
}

// text returns the text of an element.
func (w *window) text(selector string) string {
	w.Helper()
	return eval[string](w, fmt.Sprintf("document.querySelector(%q).textContent", selector))
}

// eval evaluates an expression, and awaits the result if it is a promise.
func eval[T any](w *window, expression string) T {
	w.Helper()
	return browsertest.Eval[T](w.Window, expression)
}

// view sets the size of the window and selects light or dark mode.
func (w *window) view(width, height int64, scheme string) {
	w.Helper()
	w.Do(chromedp.EmulateViewport(width, height),
		chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
			_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
				Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
			return err
		}), chromedp.Sleep(400*time.Millisecond))
}

// shoot saves a picture of the page if the flag asks for pictures.
func (w *window) shoot(name string) {
	w.Helper()
	if *screenshots == "" {
		return
	}
	picture, err := chromedp.Run(w.Context, chromedp.FullScreenshot(100))
	require.NoError(w, err)
	require.NoError(w, os.WriteFile(filepath.Join(*screenshots, name), picture, 0o666))
}

// accessible checks the page with the accessibility rules of axe, and that it fits into the
// window.
func (w *window) accessible(view string) {
	w.Helper()
	w.Accessible(view)
	require.Eventually(w, func() bool { // the page may still be drawing
		return eval[int](w, "document.documentElement.scrollWidth - innerWidth") <= 0
	}, patience, 50*time.Millisecond, "%s: the page is wider than its window", view)
}

// paced slows a run down so that it can be watched.
func paced(tr *llm.Trainer, step time.Duration) {
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd {
			time.Sleep(step)
		}
		return nil
	})
}

// TestPage checks the page of a run. The first chart must appear before the second step, seeds
// must be shown with the reasons for their changes, and the page must be accessible at every
// width, in light and dark mode. With -timing, the page must load within a second.
func TestPage(t *testing.T) {
	w := browser(t)
	tr := newTrainer(t, 100, 16)
	_, url := listen(t, tr)
	const why = "<img src=x onerror=document.title='broken'> it is hungry"
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd && e.Step == 3 {
			germinate(t, tr, 1, 5, why)
		}
		return nil
	})

	paced(tr, 20*time.Millisecond)
	seen := make(chan struct{})
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd && e.Step == 1 {
			<-seen
		}
		return nil
	})

	w.Do(chromedp.Navigate(url))
	w.see("h1")
	loaded := eval[float64](w, "performance.getEntriesByType('navigation')[0].loadEventEnd")
	t.Logf("the page has loaded in %.0f ms", loaded)
	if *timing {
		require.Less(t, loaded, 1000.0)
	}

	done := make(chan error, 1)
	begun := time.Now()
	go func() { done <- tr.Run(context.Background()) }()
	w.see("#chart-loss canvas") // with only the first step
	t.Logf("the first chart is there after %v", time.Since(begun))
	close(seen)
	if *timing {
		require.Less(t, time.Since(begun), time.Second)
	}

	require.Eventually(t, func() bool { return strings.Contains(w.text("#events"), why) }, patience,
		50*time.Millisecond)
	eval[bool](w, "Lattice.select({layer: 1, seed: 5}); true")
	w.see("#seed-events li")
	require.Contains(t, w.text("#seed-story"), "from Germinated to Training after step 4")
	require.Contains(t, w.text("#seed-story"), why)
	require.NotContains(t, eval[string](w, "document.title"), "broken")

	w.view(1280, 900, "light")
	w.accessible("light")
	w.view(1280, 900, "dark")
	w.accessible("dark")
	w.view(390, 844, "light")
	w.accessible("phone")
	require.NoError(t, <-done)
	require.Eventually(t, func() bool {
		return w.text("#state") == "ended"
	}, patience, 50*time.Millisecond)
	require.Empty(t, w.Complaints(), "the browser's console")
}

// TestSteering checks that a person can germinate a seed on the page, sees the result, and can
// stop the run.
func TestSteering(t *testing.T) {
	t.Parallel()
	w := browser(t)
	tr := newTrainer(t, 1<<20, 16) // the run ends when the person stops it
	_, url := listen(t, tr, board.WithControl())
	paced(tr, 10*time.Millisecond)
	done := make(chan error, 1)
	go func() { done <- tr.Run(context.Background()) }()
	w.Do(chromedp.Navigate(url))
	w.see("#stop", "#legend li")
	require.NotContains(t, eval[string](w, "location.href"), "token")
	eval[bool](w, "Lattice.select({layer: 0, seed: 7}); true")
	w.see("#germinate")
	w.Do(chromedp.Click(chromedp.CSS("#germinate")))
	w.see("#confirm-yes")
	w.accessible("steering")
	w.shoot("board-steer.png")
	w.Do(chromedp.SendKeys(chromedp.CSS("#confirm-why"), "its features are dead"),
		chromedp.Click(chromedp.CSS("#confirm-yes")))
	require.Eventually(t, func() bool {
		return eval[int](w, "Lattice.layers()[0].stage[7]") == int(state.Germinated)
	}, patience, 50*time.Millisecond, "the page says %s", w.text("#answer"))
	require.Eventually(t, func() bool {
		return strings.Contains(w.text("#legend"), "Germinated 1")
	}, patience, 50*time.Millisecond)
	require.Eventually(t, func() bool {
		return strings.Contains(w.text("#seed-story"),
			"a person asked on the board: its features are dead")
	}, patience, 50*time.Millisecond)
	w.Do(chromedp.Click(chromedp.CSS("#stop")))
	w.see("#confirm-yes")
	w.Do(chromedp.Click(chromedp.CSS("#confirm-yes")))
	require.ErrorContains(t, <-done, "a person asked on the board")
	require.Empty(t, w.Complaints(), "the browser's console")
}

// TestFinishedRun checks that the page of a finished run offers no action that could only be
// rejected, whether it was open when the run ended or is opened later.
func TestFinishedRun(t *testing.T) {
	t.Parallel()
	w := browser(t)
	tr := newTrainer(t, 20, 4)
	_, url := listen(t, tr, board.WithControl())
	goOn := make(chan struct{})
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd && e.Step == 10 {
			<-goOn
		}
		return nil
	})

	done := make(chan error, 1)
	go func() { done <- tr.Run(context.Background()) }()
	w.Do(chromedp.Navigate(url))
	w.see("#stop", "#legend li")
	eval[bool](w, "Lattice.select({layer: 0, seed: 3}); true")
	w.see("#germinate")
	w.Do(chromedp.Click(chromedp.CSS("#save")))
	w.see("#confirm-yes")
	close(goOn)
	require.NoError(t, <-done)

	const offered = `['#save', '#stop', '#germinate', '#confirm-yes'].filter(s => {
		const e = document.querySelector(s);
		return e && e.checkVisibility();
	}).join()`
	require.Eventually(t, func() bool {
		return w.text("#state") == "ended" && eval[string](w, offered) == ""
	}, patience, 50*time.Millisecond)
	w.Do(chromedp.Reload(), chromedp.Sleep(time.Second))
	require.Eventually(t, func() bool { return w.text("#state") == "ended" }, patience,
		50*time.Millisecond)
	require.Empty(t, eval[string](w, offered))
	require.Empty(t, w.Complaints(), "the browser's console")
}
