// Package browsertest tests web pages in a headless Chromium.
package browsertest

import (
	"context"
	_ "embed"
	"fmt"
	"os/exec"
	"slices"
	"sync"
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

// patience is the time limit for the start of the browser and for an action on a page. It allows for slow machines.
const patience = 2 * time.Minute

// A Window is a browser window. Actions that use Context directly have no time limit.
type Window struct {
	*testing.T
	Context context.Context

	said chan string // errors and warnings in the console
}

// shared is the browser in which Run opens all windows of a package.
var shared struct {
	sync.Mutex
	wanted  bool
	context context.Context // nil until the first window opens
	stop    []func()
}

// Run runs the tests of a package, as m.Run does, with a single browser for all of their windows. Windows do
// not share cookies or storage. Without Run, every window opens in a browser of its own.
func Run(m *testing.M) (code int) {
	shared.wanted = true
	defer func() {
		for _, stop := range slices.Backward(shared.stop) {
			stop()
		}
	}()
	return m.Run()
}

// start starts a browser. The returned functions end it, in reverse order.
func start(parent context.Context, path string) (ctx context.Context, stop []func(), err error) {
	ctx, stopAllocator := chromedp.NewExecAllocator(parent, chromedp.ExecPath(path), chromedp.NoSandbox,
		chromedp.Headless, chromedp.Flag("disable-dev-shm-usage", true), chromedp.WSURLReadTimeout(patience))
	ctx, stopBrowser := chromedp.NewContext(ctx)
	return ctx, []func(){stopAllocator, stopBrowser}, chromedp.Do(ctx)
}

// browser returns the context of the browser in which a test opens its windows.
func browser(t *testing.T, path string) context.Context {
	t.Helper()
	if !shared.wanted {
		ctx, stop, err := start(t.Context(), path)
		for _, s := range stop {
			t.Cleanup(s)
		}
		require.NoError(t, err)
		return ctx
	}

	shared.Lock()
	defer shared.Unlock()
	if shared.context == nil {
		ctx, stop, err := start(context.Background(), path)
		shared.stop = append(shared.stop, stop...)
		require.NoError(t, err)
		shared.context = ctx
	}
	return shared.context
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

	ctx, stop := chromedp.NewContext(browser(t, path), chromedp.WithNewBrowserContext())
	t.Cleanup(stop)

	w := &Window{T: t, Context: ctx, said: make(chan string, 100)}
	w.Do(chromedp.EmulateViewport(int64(width), int64(height)),
		chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
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

// Do performs the given actions.
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

// Eval evaluates an expression on the page. If the result is a promise, Eval awaits it.
func Eval[T any](w *Window, expression string) T {
	w.Helper()
	ctx, stop := context.WithTimeout(w.Context, patience)
	defer stop()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	require.NoError(w, err, expression[:min(len(expression), 200)])
	return v
}

// Complaints returns the errors and warnings logged in the console since the last call.
func (w *Window) Complaints() (all []string) {
	for len(w.said) > 0 {
		all = append(all, <-w.said)
	}
	return all
}

// Accessible checks the page against the accessibility rules of axe. view names the page in failures.
func (w *Window) Accessible(view string) {
	w.Helper()
	Eval[bool](w, axe+"; true")
	require.Empty(w, Eval[[]string](w, `axe.run().then(r => r.violations.map(v => v.id + ': ' +
		v.nodes.map(n => n.html + ' ' + n.failureSummary).join('; ')))`), view)
}
