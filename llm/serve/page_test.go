package serve

import (
	"context"
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
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
	for began := time.Now(); !eval[bool](w, condition); time.Sleep(50 * time.Millisecond) {
		if time.Since(began) > patience {
			w.Fatalf("%s, but the page says %s", condition, eval[string](w, "document.body.innerText"))
		}
	}
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

// view sets the width of the window and selects light or dark mode.
func (w *window) view(width int, scheme string) {
	w.Helper()
	w.Do(chromedp.EmulateViewport(int64(width), 700),
		chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
			_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
				Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
			return err
		}))
	w.sees(fmt.Sprintf(`innerWidth === %d && matchMedia("(prefers-color-scheme: %s)").matches`, width, scheme))
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
	var silent atomic.Bool
	f := &fake{script: func(p []int) []int {
		text, _ := tok.Decode(p)
		prompt = string(text)
		if strings.Contains(prompt, "forever") {
			return bytewise("x\n")[:2] // fills the window
		}
		return bytewise(reply)
	}, wait: func(ctx context.Context) error {
		if silent.Load() {
			<-ctx.Done()
		}
		return slow(10 * time.Millisecond)(ctx)
	}}
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

	// If an answer is stopped before its first word, the page offers the message to be sent again.
	silent.Store(true)
	w.says("patience")
	await(t, "the answer is awaited", func() bool { return f.active.Load() == 1 })
	eval[bool](w, `document.querySelector("#stop").click(), true`)
	w.sees(`document.querySelector("#input").value === "patience" && !document.body.innerText.includes("patience")`)
	w.sees(`document.querySelectorAll(".message").length === 6`)
	eval[bool](w, `document.querySelector("#input").value = "", true`)
	silent.Store(false)

	// A new conversation does not contain the answer that it stops.
	w.says("forever")
	w.sees(`document.querySelectorAll(".assistant")[3]?.textContent.length > 100`)
	w.Do(chromedp.Click(chromedp.CSS("#new")))
	w.sees(`!document.querySelector("#send").hidden`)
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

// TestPageViews checks that a long conversation, an error and the settings fit into wide and narrow windows, in light and in
// dark mode.
func TestPageViews(t *testing.T) {
	long := strings.Repeat("Lopadotemachoselachogaleokranioleipsanodrimhypotrimmatosilphiokarabo", 3)
	code := "Two lines of code:\n\n\tfor i := range 10 {\n\t\tfmt.Println(i, \"" + strings.Repeat("x ", 60) + "\")\n\t}\n"
	f := &fake{script: func(p []int) []int {
		text, _ := tok.Decode(p)
		switch {
		case strings.HasSuffix(string(text), "code\nassistant: "):
			return bytewise(code)
		case strings.HasSuffix(string(text), "think\nassistant: "):
			return bytewise("<think>The user wants me to think for a while.</think>I have thought.")
		}
		return bytewise(long)
	}}
	first, second := newModel(t, f, thinkTemplate), newModel(t, f, thinkTemplate)
	first.Name, second.Name = "Llama-3.2-1B-Instruct-fine-tuned-on-the-chats-of-our-customers", "support"
	first.Context = 2000
	s, err := New(Options{}, first, second)
	require.NoError(t, err)
	h := httptest.NewServer(s)
	defer h.Close()

	w := &window{browsertest.Open(t, 1000, 700)}
	w.Do(chromedp.Navigate(h.URL))
	w.sees(`document.querySelectorAll("#models option").length === 2`)
	for _, k := range []struct{ message, reply string }{{"code", code}, {"think", "I have thought."}, {long, long}} {
		w.says(k.message)
		w.sees(answered(k.reply))
	}
	eval[bool](w, `document.querySelector("#input").value = "too long ".repeat(1000); true`)
	w.Do(chromedp.Click(chromedp.CSS("#send")))
	w.sees(`document.querySelector("#error").textContent.includes("shorten the prompt")`)

	for _, scheme := range []string{"light", "dark"} {
		for _, width := range []int{1000, 360} {
			for _, settings := range []bool{false, true} {
				w.view(width, scheme)
				eval[bool](w, fmt.Sprintf(`document.querySelector("details").open = %v; true`, settings))
				name := fmt.Sprintf("%s-%d-%v", scheme, width, settings)
				w.picture(name)
				w.Accessible(name)
				require.LessOrEqual(t, eval[int](w, "document.documentElement.scrollWidth"), width, name)
				require.LessOrEqual(t, eval[int](w, "document.querySelector('#messages').scrollWidth"), width, name)
				require.Greater(t, eval[int](w, "document.querySelector('#messages').clientHeight"), 100, name)
			}
		}
	}
}

// TestPageForgets checks that a conversation goes on without its oldest messages once it fills the model's context.
func TestPageForgets(t *testing.T) {
	var prompt string
	f := &fake{script: func(p []int) []int {
		text, _ := tok.Decode(p)
		prompt = string(text)
		if strings.HasSuffix(prompt, "forever\nassistant: ") {
			return bytewise("x")[:1]
		}
		return says("ok")
	}}
	c := serve(t, f, Options{}) // with a context of 128 tokens
	w := &window{browsertest.Open(t, 700, 700)}
	w.Do(chromedp.Navigate(c.url))
	w.sees(`document.querySelector("h1").textContent === "tiny"`)

	first, second := strings.Repeat("y", 60), strings.Repeat("z", 60)
	w.says(first)
	w.sees(answered("ok"))
	w.says(second)
	w.sees(`document.querySelectorAll(".assistant").length === 2 && ` + answered("ok"))
	require.Equal(t, "user: "+second+"\nassistant: ", prompt)
	w.sees(`document.querySelectorAll(".note").length === 1 && document.querySelector(".note").textContent.includes("left out")`)

	// An answer that fills the context leaves no room for another one.
	w.says("forever")
	w.sees(`document.querySelectorAll(".note").length >= 2 && document.querySelector("#stop").hidden`)
	w.says("again")
	w.sees(`document.querySelectorAll(".assistant").length === 4 && ` + answered("ok"))
	require.NotContains(t, prompt, second)
	require.True(t, strings.HasSuffix(prompt, "user: again\nassistant: "), prompt)
	w.picture("forgotten")
	w.Accessible("a conversation without its oldest messages")

	// A message that is too long itself is rejected.
	eval[bool](w, `document.querySelector("#input").value = "w".repeat(200); true`)
	w.Do(chromedp.Click(chromedp.CSS("#send")))
	w.sees(`document.querySelector("#error").textContent.includes("shorten the prompt") && document.querySelector("#stop").hidden`)
}
