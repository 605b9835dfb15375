package serve

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// A window is a window of a headless Chromium.
type window struct {
	*testing.T
	ctx  context.Context
	said chan string // errors and warnings in the console
}

// open opens a page. It skips the test if Chromium is not installed.
func open(t *testing.T, url string) *window {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("no Chromium: Debian's package chromium has one")
	}
	ctx, stop := chromedp.NewExecAllocator(t.Context(), chromedp.ExecPath(path), chromedp.NoSandbox,
		chromedp.Headless, chromedp.Flag("disable-dev-shm-usage", true), chromedp.WindowSize(1000, 700))
	t.Cleanup(stop)
	ctx, stop = chromedp.NewContext(ctx)
	t.Cleanup(stop)
	w := &window{T: t, ctx: ctx, said: make(chan string, 100)}

	// The first context must live as long as the browser, so it has no time limit.
	require.NoError(t, chromedp.Do(ctx, chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		if _, err := cdp.Call(ctx, t, runtime.Enable, cdp.Empty{}); err != nil {
			return err
		}
		_, err := cdp.Call(ctx, t, log.Enable, cdp.Empty{})
		return err
	})))
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
	w.do(chromedp.Navigate(url))
	return w
}

// do performs actions, with a generous time limit.
func (w *window) do(actions ...chromedp.Action[chromedp.Void]) {
	w.Helper()
	ctx, stop := context.WithTimeout(w.ctx, 60*time.Second)
	defer stop()
	require.NoError(w, chromedp.Do(ctx, actions...))
}

// eval evaluates an expression, and awaits the result if it is a promise.
func eval[T any](w *window, expression string) T {
	w.Helper()
	ctx, stop := context.WithTimeout(w.ctx, 60*time.Second)
	defer stop()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	require.NoError(w, err, expression[:min(len(expression), 200)])
	return v
}

// sees waits until a condition holds on the page.
func (w *window) sees(condition string) {
	w.Helper()
	require.Eventually(w, func() bool { return eval[bool](w, condition) }, 30*time.Second, 50*time.Millisecond,
		"%s, but the page says %s", condition, eval[string](w, "document.body.innerText"))
}

// says sends a message.
func (w *window) says(text string) {
	w.Helper()
	w.do(chromedp.SendKeys(chromedp.CSS("#input"), text), chromedp.Click(chromedp.CSS("#send")))
}

// answered is a condition: the last answer has the given text, and is complete.
func answered(text string) string {
	return fmt.Sprintf(`[...document.querySelectorAll(".assistant")].at(-1)?.textContent === %q &&
		document.querySelector("#stop").hidden`, text)
}

// TestPage talks to a model on the page of a server with a key.
func TestPage(t *testing.T) {
	const reply = "<img src=x onerror=alert(1)> Grüße"
	var prompt string
	f := &fake{script: func(p []int) []int {
		text, _ := tok.Decode(p)
		prompt = string(text)
		if strings.Contains(prompt, "forever") {
			return bytewise("x\n")[:2] // fills the window
		}
		return bytewise(reply)
	}, wait: slow(10 * time.Millisecond)}
	m := newModel(t, f, chatTemplate)
	m.Context = 100_000
	c := serveModel(t, m, Options{Keys: []string{"secret"}})

	w := open(t, c.url)
	w.sees(`!document.querySelector("#key-form").hidden`)
	w.do(chromedp.SendKeys(chromedp.CSS("#key"), "wrong"), chromedp.Click(chromedp.CSS("#key-form button")))
	w.sees(`document.querySelector("#error").textContent === "This API key is wrong."`)
	eval[bool](w, `document.querySelector("#key").value = ""; true`)
	w.do(chromedp.SendKeys(chromedp.CSS("#key"), "secret"), chromedp.Click(chromedp.CSS("#key-form button")))
	w.sees(`document.querySelector("h1").textContent === "tiny" && document.querySelector("#key-form").hidden`)
	for len(w.said) > 0 {
		require.Contains(t, <-w.said, "401") // only the refused keys
	}

	w.says("one")
	w.sees(answered(reply))
	w.says("two")
	w.sees(`document.querySelectorAll(".assistant").length === 2 && ` + answered(reply))
	require.Equal(t, "user: one\nassistant: "+reply+"\nuser: two\nassistant: ", prompt)

	// An answer that would never end is stopped, and its slot is free.
	w.says("forever")
	w.sees(`document.querySelectorAll(".assistant")[2]?.textContent.length > 100`)
	eval[bool](w, `document.querySelector("#stop").click(), true`)
	await(t, "the answer is stopped", func() bool { return f.active.Load() == 0 })
	w.sees(`!document.querySelector("#send").hidden`)

	script, err := os.ReadFile("../../board/testdata/axe.js")
	require.NoError(t, err)
	eval[bool](w, string(script)+"; true")
	require.Empty(t, eval[[]string](w, `axe.run().then(r => r.violations.map(v => v.id + ': ' +
		v.nodes.map(n => n.html + ' ' + n.failureSummary).join('; ')))`))

	w.do(chromedp.Click(chromedp.CSS("#new")))
	w.says("again")
	w.sees(`document.querySelectorAll(".assistant").length === 1 && ` + answered(reply))
	require.Equal(t, "user: again\nassistant: ", prompt)
	for len(w.said) > 0 {
		t.Error(<-w.said)
	}
}
