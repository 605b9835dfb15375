// Package browsertest lets tests look at pages in a headless Chromium.
package browsertest

import (
	"context"
	_ "embed"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

//go:embed axe.js
var axe string

// patience limits the time for an action on a page. It is generous, because machines may be slow.
const patience = 60 * time.Second

// A Window is a browser window. Its Context is for actions of chromedp without a time limit.
type Window struct {
	*testing.T
	Context context.Context

	said chan string // errors and warnings in the console
}

// Open opens a window of the given size. It skips the test if Chromium is not installed.
func Open(t *testing.T, width, height int) *Window {
	t.Helper()
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "chrome"} {
		if found, err := exec.LookPath(name); err == nil {
			path = found
			break
		}
	}
	if path == "" {
		t.Skip("no Chromium: Debian's package chromium has one")
	}

	ctx, stop := chromedp.NewExecAllocator(t.Context(), chromedp.ExecPath(path),
		chromedp.NoSandbox, chromedp.Headless,
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.WindowSize(width, height))
	t.Cleanup(stop)
	ctx, stop = chromedp.NewContext(ctx)
	t.Cleanup(stop)

	w := &Window{T: t, Context: ctx, said: make(chan string, 100)}
	w.Do(chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		if _, err := cdp.Call(ctx, t, runtime.Enable, cdp.Empty{}); err != nil {
			return err
		}
		_, err := cdp.Call(ctx, t, log.Enable, cdp.Empty{})
		return err
	}))

	require.NoError(t, chromedp.Listen(ctx, func(e any) {
		text := ""
		switch e := e.(type) {
		case *runtime.EventExceptionThrown:
			text = fmt.Sprintf("%+v", e.ExceptionDetails)
		case *log.EventEntryAdded:
			text = fmt.Sprint(e.Entry.Level, ": ", e.Entry.Text, " ", e.Entry.URL)
		default:
			return
		}
		select {
		case w.said <- text:
		default:
		}
	}))
	return w
}

// Do performs actions.
func (w *Window) Do(actions ...chromedp.Action[chromedp.Void]) {
	w.Helper()
	ctx := w.Context
	if chromedp.FromContext(ctx).Target != nil { // the first context must live as long as the browser
		var stop func()
		ctx, stop = context.WithTimeout(ctx, patience)
		defer stop()
	}
	require.NoError(w, chromedp.Do(ctx, actions...), "%v", w.Complaints())
}

// Eval evaluates an expression on the page, and awaits the result if it is a promise.
func Eval[T any](w *Window, expression string) T {
	w.Helper()
	ctx, stop := context.WithTimeout(w.Context, patience)
	defer stop()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	require.NoError(w, err, expression[:min(len(expression), 200)])
	return v
}

// Complaints returns the errors and warnings in the console since the last call.
func (w *Window) Complaints() (all []string) {
	for len(w.said) > 0 {
		all = append(all, <-w.said)
	}
	return all
}

// Accessible checks the page with the accessibility rules of axe.
func (w *Window) Accessible(view string) {
	w.Helper()
	Eval[bool](w, axe+"; true")
	require.Empty(w, Eval[[]string](w, `axe.run().then(r => r.violations.map(v => v.id + ': ' +
		v.nodes.map(n => n.html + ' ' + n.failureSummary).join('; ')))`), view)
}
