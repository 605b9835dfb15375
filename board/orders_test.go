package board_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// atStep starts a trainer that waits after the given step until goOn is closed.
func atStep(t *testing.T, tr *llm.Trainer, step int) (reached <-chan struct{}, goOn chan<- struct{},
	done <-chan error) {
	t.Helper()
	at, on, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd && e.Step == step {
			close(at)
			<-on
		}
		return nil
	})

	go func() { ended <- tr.Run(context.Background()) }()
	return at, on, ended
}

// TestPendingOrders checks that a long-waiting order is reported as pending rather than rejected, and
// that its client can query the result.
func TestPendingOrders(t *testing.T) {
	t.Parallel()
	tr := newTrainer(t, 6, 4)
	b, _ := listen(t, tr, board.WithControl())
	b.SetPatience(20 * time.Millisecond)
	reached, goOn, done := atStep(t, tr, 2)
	<-reached

	bodies := map[string]string{
		"possible":   `{"commands":[{"action":"Germinate","layer":0,"seed":1,"slot":1,"kind":"Residual"}]}`,
		"impossible": `{"commands":[{"action":"Move","layer":0,"seed":2,"to":"Fossilized"}]}`,
	}
	status := func(path string) (o api.Order, code int) {
		w := httptest.NewRecorder()
		b.ServeHTTP(w, httptest.NewRequest("GET", "http://127.0.0.1"+path, nil))
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &o), w.Body.String())
		return o, w.Code
	}

	paths := map[string]string{}
	for name, body := range bodies {
		w := order(t, b, "0/commands", body, nil)
		require.Equal(t, 202, w.Code, w.Body.String())
		var o api.Order
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &o))
		require.Equal(t, api.Order{ID: o.ID, State: api.Pending}, o)
		paths[name] = w.Header().Get("Location")
		require.Equal(t, fmt.Sprintf("/api/v1/runs/0/orders/%d", o.ID), paths[name])
		again, code := status(paths[name])
		require.Equal(t, 200, code)
		require.Equal(t, o, again)
	}

	close(goOn)
	require.NoError(t, <-done)
	for _, path := range paths {
		require.Eventually(t, func() bool {
			o, _ := status(path)
			return o.State != api.Pending
		}, patience, time.Millisecond)
	}

	o, _ := status(paths["possible"])
	require.Equal(t, api.Order{ID: o.ID, State: api.Done, Done: true}, o)
	stage, err := tr.Model.Kasmina.Lattice(0).Stage(1)
	require.NoError(t, err)
	require.Equal(t, state.Germinated, stage)
	o, _ = status(paths["impossible"])
	require.Equal(t, api.Refused, o.State)
	require.Contains(t, o.Error, "Dormant")

	for _, path := range []string{"/api/v1/runs/0/orders/99", "/api/v1/runs/1/orders/1",
		"/api/v1/runs/x/orders/1"} {
		_, code := status(path)
		require.Equal(t, 404, code, path)
	}

	_, code := status("/api/v1/runs/0/orders/x")
	require.Equal(t, 400, code)
}

// TestClientWaitsForPendingOrders checks that a client waits for the result of its order however
// long the step takes, and that a client that gives up explains what may still happen.
func TestClientWaitsForPendingOrders(t *testing.T) {
	t.Parallel()
	tr := newTrainer(t, 6, 4)
	b, err := board.Attach(tr, board.WithControl())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	b.SetPatience(time.Millisecond)

	queries := make(chan struct{}, 1000) // answers to queries about pending orders
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.ServeHTTP(w, r)
		if r.Method == http.MethodGet {
			queries <- struct{}{}
		}
	}))
	defer server.Close()
	reached, goOn, done := atStep(t, tr, 2)
	<-reached
	c := &api.Client{URL: server.URL, Token: b.Token(), Who: "a test"}

	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	go func() {
		<-queries
		giveUp()
	}()
	err = c.Do(ctx, "0", state.Command{Action: state.Move, Seed: 3, To: state.Training})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "may yet take effect")
	require.Equal(t, 1, b.Pending())

	answers := make(chan error, 1)
	go func() { answers <- c.Measure(t.Context(), "0", state.Sampling, 3) }()
	for range 2 { // the client asks again although the first answer is that the order is pending
		<-queries
	}
	require.Equal(t, 2, b.Pending())
	require.Empty(t, answers)
	close(goOn)
	require.NoError(t, <-answers)
	require.NoError(t, <-done)
	for _, l := range tr.Model.Kasmina.Lattices() {
		require.Equal(t, state.Telemetry{Mode: state.Sampling, Every: 3}, l.Telemetry())
	}

	require.ErrorIs(t, c.Measure(t.Context(), "0", state.Off, 0), api.ErrRefused)
	require.ErrorIs(t, c.Stop(t.Context(), "0", "too late"), api.ErrRefused)
	require.ErrorIs(t, c.Save(t.Context(), "0"), api.ErrRefused)
}

// TestNamesAreLines checks that control characters in an order's name and reason never reach a
// terminal.
func TestNamesAreLines(t *testing.T) {
	tr := newTrainer(t, 6, 4)
	b, _ := listen(t, tr, board.WithControl())
	reached, goOn, done := atStep(t, tr, 2)
	<-reached
	w := order(t, b, "0/stop", `{"who":"\u0000\u001b[31mA\u202enn\u0007","why":"to\r\n\u009b2Jrest"}`,
		nil)
	require.Equal(t, 200, w.Code, w.Body.String())
	close(goOn)
	require.EqualError(t, <-done,
		"llm: the run has been stopped: [31mAnn asked on the board to stop: to 2Jrest")
}

// TestTooManyPendingOrders checks that the number of pending orders is limited, and that the
// result of each is known after the step.
func TestTooManyPendingOrders(t *testing.T) {
	t.Parallel()
	tr := newTrainer(t, 6, 4)
	b, _ := listen(t, tr, board.WithControl())
	b.SetPatience(0)
	reached, goOn, done := atStep(t, tr, 2)
	<-reached
	accepted, full := 0, 0
	for range 300 {
		switch w := order(t, b, "0/telemetry", `{"mode":"Off"}`, nil); w.Code {
		case 202:
			accepted++
		case 503:
			full++
			require.Contains(t, w.Body.String(), "wait for the end")
		case 429: // too many requests per second
			time.Sleep(50 * time.Millisecond)
		default:
			t.Fatal(w.Code, w.Body)
		}
		if full > 0 {
			break
		}
	}

	close(goOn)
	require.NoError(t, <-done)
	require.NotZero(t, full)
	require.Equal(t, 64, accepted)
}

// TestTelemetryOnThePage changes the telemetry on the page during a step that takes longer than
// requests wait.
func TestTelemetryOnThePage(t *testing.T) {
	t.Parallel()
	w := browser(t)
	tr := newTrainer(t, 6, 4)
	b, url := listen(t, tr, board.WithControl())
	b.SetPatience(10 * time.Millisecond)
	reached, goOn, done := atStep(t, tr, 2)
	<-reached
	w.Do(chromedp.Navigate(url))
	w.see("#stop")
	require.Eventually(t, func() bool { // the page may still be drawing its controls
		w.Do(chromedp.SetValue(chromedp.CSS("#control select"), "Off"))
		time.Sleep(100 * time.Millisecond)
		return eval[string](w, `document.querySelector('#control select').value`) == "Off"
	}, patience, 20*time.Millisecond)
	eval[bool](w, `[...document.querySelectorAll('#control button')]
		.find(b => b.textContent === 'Change telemetry').click() || true`)
	w.see("#confirm-yes")
	w.Do(chromedp.SendKeys(chromedp.CSS("#confirm-who"), "Ann"),
		chromedp.Click(chromedp.CSS("#confirm-yes")))
	require.Eventually(t, func() bool {
		return w.text("#answer") == "Pending: the step takes long, and the request waits for its end."
	}, patience, 20*time.Millisecond)
	require.Equal(t, state.Production, tr.Model.Kasmina.Lattice(0).Telemetry().Mode)

	close(goOn)
	require.NoError(t, <-done)
	require.Eventually(t, func() bool { return w.text("#answer") == "Done." }, patience,
		20*time.Millisecond, "the page says %s", w.text("#answer"))
	require.Equal(t, state.Off, tr.Model.Kasmina.Lattice(0).Telemetry().Mode)
	require.Eventually(t, func() bool {
		return eval[string](w, "document.querySelector('#events').textContent") ==
			"step 3, epoch 1Ann asked on the board to measure seeds in mode Off"
	}, patience, 20*time.Millisecond, "the page says %s", w.text("#events"))
	require.Empty(t, w.Complaints(), "the browser's console")
}
