package serve

import (
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/browsertest"
)

// A window is a browser window that shows the chat page.
type window struct{ *browsertest.Window }

// eval evaluates an expression, and awaits the result if it is a promise.
func eval[T any](w *window, expression string) T {
	w.Helper()
	return browsertest.Eval[T](w.Window, expression)
}

// sees waits until a condition holds on the page.
func (w *window) sees(condition string) {
	w.Helper()
	require.Eventually(w, func() bool { return eval[bool](w, condition) }, 30*time.Second, 50*time.Millisecond,
		"%s, but the page says %s", condition, eval[string](w, "document.body.innerText"))
}

// screenshots is the folder for pictures of the page.
var screenshots = flag.String("screenshots", "", "folder to write pictures of the chat page to")

// picture writes a picture of the page if -screenshots is set.
func (w *window) picture(name string) {
	w.Helper()
	if *screenshots == "" {
		return
	}
	picture, err := chromedp.Run(w.Context, chromedp.FullScreenshot(100))
	require.NoError(w, err)
	require.NoError(w, os.WriteFile(filepath.Join(*screenshots, name+".png"), picture, 0o666))
}

// says sends a message.
func (w *window) says(text string) {
	w.Helper()
	w.Do(chromedp.SendKeys(chromedp.CSS("#input"), text), chromedp.Click(chromedp.CSS("#send")))
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

	w := &window{browsertest.Open(t, 1000, 700)}
	w.Do(chromedp.Navigate(c.url))
	w.sees(`!document.querySelector("#key-form").hidden`)
	w.Do(chromedp.SendKeys(chromedp.CSS("#key"), "wrong"), chromedp.Click(chromedp.CSS("#key-form button")))
	w.sees(`document.querySelector("#error").textContent === "This API key is wrong."`)
	eval[bool](w, `document.querySelector("#key").value = ""; true`)
	w.Do(chromedp.SendKeys(chromedp.CSS("#key"), "secret"), chromedp.Click(chromedp.CSS("#key-form button")))
	w.sees(`document.querySelector("h1").textContent === "tiny" && document.querySelector("#key-form").hidden`)
	for _, complaint := range w.Complaints() {
		require.Contains(t, complaint, "401") // only the rejected keys
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

	w.Accessible("a conversation")
	w.picture("conversation")

	w.Do(chromedp.Click(chromedp.CSS("#new")))
	w.says("again")
	w.sees(`document.querySelectorAll(".assistant").length === 1 && ` + answered(reply))
	require.Equal(t, "user: again\nassistant: ", prompt)
	require.Empty(t, w.Complaints())
}

// TestPageWithModels chooses one of several models on the page, and reads the reasoning of an answer.
func TestPageWithModels(t *testing.T) {
	first := newModel(t, &fake{answer: bytewise("I am the first.")}, chatTemplate)
	second := newModel(t, &fake{answer: bytewise("<think>Who am I?</think>I am the second.")}, thinkTemplate)
	second.Name = "second"
	s, err := New(Options{}, first, second)
	require.NoError(t, err)
	h := httptest.NewServer(s)
	defer h.Close()

	w := &window{browsertest.Open(t, 1000, 700)}
	w.Do(chromedp.Navigate(h.URL))
	w.sees(`document.querySelectorAll("#models option").length === 2 && document.querySelector("#model").textContent === "tiny"`)
	w.says("Hello")
	w.sees(answered("I am the first."))
	eval[bool](w, `const m = document.querySelector("#models"); m.value = "second"; m.dispatchEvent(new Event("change")); true`)
	w.says("And you?")
	w.sees(answered("I am the second."))
	w.sees(`document.querySelector(".reasoning").textContent === "Who am I?"`)
	require.Equal(t, "second", eval[string](w, "document.title"))
	w.picture("models")
	w.Accessible("a choice of models")
	require.Empty(t, w.Complaints())
}
