package board_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// patience exceeds the duration of everything in these tests by far.
const patience = 2 * time.Minute

// newTrainer returns the trainer of a very small model, whose steps take about a millisecond.
func newTrainer(t testing.TB, steps, seeds int) *llm.Trainer {
	t.Helper()
	c := llm.Config{Vocab: 256, Layers: 2, Dim: 2 * seeds, Heads: 2, FF: 8,
		Seq: 8, Kasmina: []int{0, 1},
		Seeds: seeds}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 1, state.WithoutGates())
	require.NoError(t, err)
	corpus, err := data.Open(texttest.Files(t, texttest.Numbered(40)))
	require.NoError(t, err)
	tokens, err := data.Tokenize(t.Context(), corpus.Train, tokenizer.Bytes{})
	require.NoError(t, err)
	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: 2, Seq: c.Seq, Seed: 1})
	require.NoError(t, err)
	adamw, err := optim.NewAdamW(optim.WithLR(1e-3))
	require.NoError(t, err)
	tr, err := llm.NewTrainer(m, loader, adamw, llm.TrainConfig{Steps: steps, Batch: 2, Epoch: 2,
		Schedule: optim.Constant(1e-3)})
	require.NoError(t, err)
	t.Cleanup(func() { tr.Close() })
	return tr
}

// get requests a URL and decodes the answer.
func get(t testing.TB, url string, to any) {
	t.Helper()
	r, err := http.Get(url)
	require.NoError(t, err)
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, r.StatusCode, string(text))
	require.NoError(t, json.Unmarshal(text, to), string(text))
}

// germinate plants a blueprint in a seed and moves the seed to Training, with a reason.
func germinate(t testing.TB, tr *llm.Trainer, layer, seed int, why string) {
	t.Helper()
	require.NoError(t, tr.Model.Kasmina.Do(
		state.Command{Action: state.Germinate, Layer: layer, Seed: seed, Why: why,
			Request: state.GerminationRequest{Slot: seed + 1, Kind: blueprints.Residual}},
		state.Command{Action: state.Move, Layer: layer, Seed: seed, To: state.Training, Why: why}))
}

// listen returns a board that watches a trainer, and its URL.
func listen(t testing.TB, tr *llm.Trainer, opts ...board.Option) (*board.Board, string) {
	t.Helper()
	b, err := board.Attach(tr, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	return b, url
}

// TestRun checks that the API returns what the trainer reported.
func TestRun(t *testing.T) {
	tr := newTrainer(t, 6, 4)
	_, url := listen(t, tr)
	var losses []float64
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd {
			losses = append(losses, e.Loss)
		}
		if e.Kind == llm.StepEnd && e.Step == 3 {
			germinate(t, tr, 1, 2, "<b>it is hungry</b>")
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	var r api.Run
	require.Eventually(t, func() bool {
		get(t, url+"api/v1/runs/0", &r)
		return r.State == "ended"
	}, patience, 10*time.Millisecond)
	require.Equal(t, map[string]int{"Dormant": 7, "Training": 1}, r.Stages)
	require.Equal(t, 6, r.Step)
	require.EqualValues(t, losses[5], r.Loss)
	require.Zero(t, r.Dropped)

	var s api.Series
	get(t, url+"api/v1/runs/0/series", &s)
	require.Len(t, s.Loss, len(losses))
	for i, l := range losses {
		require.EqualValues(t, i+1, s.Step[i])
		require.EqualValues(t, l, s.Loss[i])
	}

	var l api.Lattice
	get(t, url+"api/v1/runs/0/lattice", &l)
	require.Len(t, l.Layers, 2)
	require.Equal(t, "chunk", l.Layers[1].Site)
	require.Equal(t, []byte{0, 0, byte(state.Training), 0}, l.Layers[1].Stage)

	var seed api.Seed
	get(t, url+"api/v1/runs/0/seeds/1/2", &seed)
	require.Equal(t, "Training", seed.Stage)
	require.Equal(t, "Residual", seed.Kind)
	require.Len(t, seed.Events, 2)
	require.Equal(t, "Germinated", seed.Events[0].To)
	require.Equal(t, "<b>it is hungry</b>", seed.Events[0].Reason)
}

// TestStream checks that a viewer receives every step once, in order, and the end of the run.
func TestStream(t *testing.T) {
	const steps = 50
	tr := newTrainer(t, steps, 4)
	_, url := listen(t, tr)
	response, err := http.Get(url + "api/v1/stream")
	require.NoError(t, err)
	defer response.Body.Close()
	done := make(chan error, 1)
	go func() { done <- tr.Run(context.Background()) }()
	var seen []float64
	kind := ""
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, text, _ := strings.Cut(lines.Text(), ": ")
		if name == "event" {
			kind = text
		}
		if name != "data" {
			continue
		}
		var m struct {
			State string
			All   bool
			Step  []float64
		}
		if kind == "run" || kind == "series" {
			m.Step = nil
			var raw map[string]json.RawMessage
			require.NoError(t, json.Unmarshal([]byte(text), &raw))
			if kind == "run" {
				require.NoError(t, json.Unmarshal(raw["state"], &m.State))
			} else {
				require.NoError(t, json.Unmarshal([]byte(text), &m))
				if m.All {
					seen = nil
				}
				seen = append(seen, m.Step...)
			}
		}
		if len(seen) == steps {
			break
		}
	}

	require.NoError(t, <-done)
	require.Len(t, seen, steps)
	for i, step := range seen {
		require.EqualValues(t, i+1, step)
	}
}

// TestHostile checks that malformed requests and requests for other hosts are rejected.
func TestHostile(t *testing.T) {
	tr := newTrainer(t, 2, 4)
	b, err := board.Attach(tr, board.WithHosts("gpu.example"))
	require.NoError(t, err)
	defer b.Close()
	require.NoError(t, tr.Run(t.Context()))
	ask := func(method, path, host string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, "http://127.0.0.1"+path, strings.NewReader("{}"))
		if host != "" {
			r.Host = host
		}
		w := httptest.NewRecorder()
		b.ServeHTTP(w, r)
		return w
	}

	for _, c := range []struct {
		method, path, host string
		want               int
	}{
		{"GET", "/", "", 200},
		{"GET", "/app.js", "localhost:6060", 200},
		{"GET", "/", "gpu.example:80", 200},
		{"GET", "/", "[::1]:6060", 200},
		{"GET", "/", "evil.example", 403}, // a foreign name that resolves to this computer
		{"GET", "/", "", 200},
		{"POST", "/", "", 405},
		{"DELETE", "/api/v1/runs/0", "", 405},
		{"GET", "/%2e%2e/board.go", "", 404},
		{"GET", "/..%2fboard.go", "", 404},
		{"GET", "/page/index.html", "", 404},
		{"GET", "/api/v1/runs/1", "", 404},
		{"GET", "/api/v1/runs/..%2f..%2fetc%2fpasswd", "", 404},
		{"GET", "/api/v1/runs/0/seeds/0/99", "", 404},
		{"GET", "/api/v1/runs/0/seeds/-1/0", "", 400},
		{"GET", "/api/v1/runs/0/seeds/0/99999999999999999999", "", 400},
		{"GET", "/api/v1/runs/0/events?from=x", "", 400},
		{"GET", "/api/v1/runs/0/events?from=4000000", "", 200},
	} {
		w := ask(c.method, c.path, c.host)
		require.Equal(t, c.want, w.Code, "%+v: %s", c, w.Body)
		require.Contains(t, w.Header().Get("Content-Security-Policy"), "default-src 'none'")
		require.Equal(t, "nosniff", w.Header().Get("X-Content-Type-Options"))
	}
}

// TestFlood checks that excessive requests are rejected, and that they and viewers that never read do
// not disturb a run.
func TestFlood(t *testing.T) {
	tr := newTrainer(t, 300, 4)
	b, url := listen(t, tr)
	for range 20 { // streams that are never read
		r, err := http.Get(url + "api/v1/stream")
		require.NoError(t, err)
		defer r.Body.Close()
	}

	// A client may make 300 requests at once, and 150 per second from then on.
	const requests = 1000
	answered, began := 0, time.Now()
	for range requests {
		w := httptest.NewRecorder()
		b.ServeHTTP(w, httptest.NewRequest("GET", "http://127.0.0.1/api/v1/runs", nil))
		if w.Code != http.StatusTooManyRequests {
			answered++
		}
	}
	require.LessOrEqual(t, float64(answered), 301+150*time.Since(began).Seconds())

	require.NoError(t, tr.Run(t.Context()))
	require.Eventually(t, func() bool {
		r, err := http.Get(url + "api/v1/runs/0")
		require.NoError(t, err)
		defer r.Body.Close()
		var run api.Run
		return json.NewDecoder(r.Body).Decode(&run) == nil && run.State == "ended" &&
			run.Step == 300 && run.Dropped == 0
	}, patience, 50*time.Millisecond)
}

// parser is a Python script that parses metrics with Prometheus's client library.
const parser = `
import sys
from prometheus_client.parser import text_string_to_metric_families
for f in text_string_to_metric_families(sys.stdin.read()):
    for s in f.samples:
        print(f.type, s.name, s.labels.get("name"), s.labels.get("stage"), s.value)
`

// TestMetrics checks the metrics with Prometheus's promtool and with a parser of the format.
func TestMetrics(t *testing.T) {
	tr := newTrainer(t, 4, 4)
	b, err := board.New()
	require.NoError(t, err)
	require.NoError(t, b.Watch(tr, "a \"name\"\nof \\ two lines"))
	require.NoError(t, tr.Run(t.Context()))
	require.NoError(t, b.Close()) // empties the queue
	w := httptest.NewRecorder()
	b.ServeHTTP(w, httptest.NewRequest("GET", "http://127.0.0.1/metrics", nil))
	require.Equal(t, 200, w.Code)
	require.Contains(t, w.Body.String(),
		`kasmina_step{run="0",name="a \"name\"\nof \\ two lines"} 4`+"\n")
	require.Contains(t, w.Body.String(),
		"kasmina_validation_loss{run=\"0\",name=\"a \\\"name\\\"\\nof \\\\ two lines\"} NaN\n")
	text := w.Body.String()
	t.Run("promtool", func(t *testing.T) {
		path, err := exec.LookPath("promtool")
		if err != nil {
			t.Skip("no promtool: Debian's package prometheus has it")
		}
		check := exec.Command(path, "check", "metrics")
		check.Stdin = strings.NewReader(text)
		out, err := check.CombinedOutput()
		require.NoError(t, err, string(out))
		require.Empty(t, string(out))
		check = exec.Command(path, "check", "metrics")
		check.Stdin = strings.NewReader(text + "kasmina_step{run=\n")
		require.Error(t, check.Run(), "promtool takes anything")
	})

	t.Run("prometheus_client", func(t *testing.T) {
		python := os.Getenv("KASMINA_PYTHON") // an interpreter with prometheus_client
		if python == "" {
			python = "python3"
		}
		if exec.Command(python, "-c", "import prometheus_client").Run() != nil {
			t.Skip("no Python with prometheus_client: set KASMINA_PYTHON to one")
		}
		read := exec.Command(python, "-c", parser)
		read.Stdin = strings.NewReader(text)
		out, err := read.CombinedOutput()
		require.NoError(t, err, string(out))
		require.Contains(t, string(out), "kasmina_step a \"name\"\nof \\ two lines None 4\n")
		require.Contains(t, string(out),
			"gauge kasmina_seeds a \"name\"\nof \\ two lines Dormant 8\n")
		require.Contains(t, string(out), "counter kasmina_tokens_total")
	})
}

// TestRefusals checks the errors for addresses that cannot be used.
func TestRefusals(t *testing.T) {
	b, err := board.New()
	require.NoError(t, err)
	_, err = b.Listen("nowhere")
	require.ErrorContains(t, err, "use an address")
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	_, err = b.Listen("127.0.0.1:0")
	require.ErrorContains(t, err, "closed")
}

// order sends a request to steer. edit, unless it is nil, modifies the request first.
func order(t testing.TB, b *board.Board, path, body string, edit func(*http.Request)) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest("POST", "http://127.0.0.1/api/v1/runs/"+path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer "+b.Token())
	if edit != nil {
		edit(r)
	}
	w := httptest.NewRecorder()
	b.ServeHTTP(w, r)
	return w
}

// TestNoControl checks that a board is read-only by default.
func TestNoControl(t *testing.T) {
	tr := newTrainer(t, 2, 4)
	b, url := listen(t, tr)
	require.Empty(t, b.Token())
	require.NotContains(t, url, "token")
	for _, path := range []string{"0/commands", "0/save", "0/stop", "0/telemetry"} {
		require.Equal(t, 403, order(t, b, path, "{}", nil).Code, path)
	}
}

// TestForged checks that requests without the token, from other sites, or with invalid content
// change nothing.
func TestForged(t *testing.T) {
	tr := newTrainer(t, 20, 4)
	b, _ := listen(t, tr, board.WithControl())
	require.Greater(t, len(b.Token()), 20)
	const plant = `{"commands":[{"action":"Germinate","layer":0,"seed":0,"slot":1,"kind":"Residual"}]}`
	header := func(name, value string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set(name, value) }
	}
	type attempt struct {
		path, body string
		edit       func(*http.Request)
		want       int
	}
	attempts := map[string]attempt{
		"no token":       {"0/commands", plant, func(r *http.Request) { r.Header.Del("Authorization") }, 401},
		"another token":  {"0/commands", plant, header("Authorization", "Bearer "+strings.Repeat("A", len(b.Token()))), 401},
		"no bearer":      {"0/commands", plant, header("Authorization", b.Token()), 401},
		"in the query":   {"0/stop?token=" + b.Token(), "{}", func(r *http.Request) { r.Header.Del("Authorization") }, 401},
		"another origin": {"0/commands", plant, header("Origin", "http://evil.example"), 403},
		"another port":   {"0/commands", plant, header("Origin", "http://127.0.0.1:8080"), 403},
		"no origin":      {"0/stop", "{}", header("Origin", "null"), 403},
		"another site":   {"0/stop", "{}", header("Sec-Fetch-Site", "cross-site"), 403},
		"a form":         {"0/commands", plant, header("Content-Type", "text/plain"), 415},
		"another name":   {"0/commands", plant, func(r *http.Request) { r.Host = "evil.example" }, 403},
		"no JSON":        {"0/commands", "{", nil, 400},
		"two values":     {"0/stop", "{}{}", nil, 400},
		"unknown field":  {"0/stop", `{"force":true}`, nil, 400},
		"nothing":        {"0/commands", "{}", nil, 400},
		"no action":      {"0/commands", `{"commands":[{"action":"Explode","layer":0,"seed":0}]}`, nil, 400},
		"parameters":     {"0/commands", `{"commands":[{"action":"Load","layer":0,"seed":0,"kind":"Residual"}]}`, nil, 400},
		"too large":      {"0/commands", `{"commands":[{"action":"Move","why":"` + strings.Repeat("x", 1<<17) + `"}]}`, nil, 413},
		"another run":    {"1/stop", "{}", nil, 404},
		"a mode":         {"0/telemetry", `{"mode":"Loud"}`, nil, 400},
		"no checkpoint":  {"0/save", "{}", nil, 409},
	}

	tried := false
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd && !tried {
			tried = true
			for name, a := range attempts {
				w := order(t, b, a.path, a.body, a.edit)
				require.Equal(t, a.want, w.Code, "%s: %s", name, w.Body)
			}
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	require.True(t, tried)
	for _, r := range tr.Model.Kasmina.Report() {
		for _, s := range r.Seeds {
			require.Equal(t, state.Dormant, s.Stage)
		}
	}

	// A client may guess the token 30 times at once, and 15 times per second from then on.
	guesses, began := 0, time.Now()
	for range 60 {
		if order(t, b, "0/stop", "{}", header("Authorization", "Bearer x")).Code != 429 {
			guesses++
		}
	}
	require.LessOrEqual(t, float64(guesses), 31+15*time.Since(began).Seconds())
}

// A planter is a controller that germinates a seed and moves it to Training.
type planter struct{ seen []state.Report }

func (p *planter) Decide(reports []state.Report) []state.Command {
	p.seen = reports
	s := reports[0].Seeds[3]
	switch s.Stage {
	case state.Dormant:
		return []state.Command{
			{Action: state.Germinate, Seed: 3, Why: "the client's controller wants it",
				Request: state.GerminationRequest{Slot: 2, Kind: blueprints.AttentionGate}},
			{Action: state.Move, Seed: 2, To: state.Fossilized}, // impossible
		}
	case state.Germinated:
		return []state.Command{{Action: state.Move, Seed: 3, To: state.Training}}
	}

	return nil
}

// TestClient checks that a controller in another process can grow a model. It must receive the
// same reports as a controller inside, and its commands must take effect and appear among the
// events.
func TestClient(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	tr := newTrainer(t, 1<<20, 4)
	paced(tr, 10*time.Millisecond)
	b, _ := listen(t, tr, board.WithControl())
	grown := errors.New("the client has grown the model")
	tr.On(func(e llm.Event) error {
		if e.Kind != llm.EpochEnd {
			return nil
		}
		if stage, err := tr.Model.Kasmina.Lattice(0).Stage(3); stage != state.Training {
			return err
		}
		return grown
	})

	server := httptest.NewServer(b)
	defer server.Close()
	done := make(chan error, 1)
	go func() { done <- tr.Run(ctx) }()
	c := &api.Client{URL: server.URL, Token: b.Token(), Who: "a test"}
	p := &planter{}
	var refused []string
	require.NoError(t, c.Follow(ctx, "0", p, func(_ state.Command, err error) { refused = append(refused, err.Error()) }))
	require.ErrorIs(t, <-done, grown)
	require.NotEmpty(t, refused)
	require.Contains(t, refused[0], "Dormant")
	want := tr.Model.Kasmina.Report()
	require.Equal(t, state.Training, want[0].Seeds[3].Stage)
	got, err := c.Reports(ctx, "0")
	require.NoError(t, err)
	require.Equal(t, want[0].Seeds[3], got[0].Seeds[3])
	require.Equal(t, want[1].SlotParameters, got[1].SlotParameters)
	var s api.Seed
	get(t, server.URL+"/api/v1/runs/0/seeds/0/3", &s)
	require.Contains(t, s.Events[0].Reason, "a test asked on the board: the client's controller wants it")
	require.ErrorIs(t, c.Do(ctx, "0", state.Command{Action: state.Recycle}), api.ErrRefused)
	var told []api.Event
	get(t, server.URL+"/api/v1/runs/0/events", &told)
	i := slices.IndexFunc(told, func(e api.Event) bool { return e.Kind == "Refused" })
	require.GreaterOrEqual(t, i, 0)
	require.Contains(t, told[i].To, "Dormant")
	require.Contains(t, told[i].Reason, "a test asked on the board")
	c.Token = "x"
	require.ErrorContains(t, c.Stop(ctx, "0", ""), "token")
}

// logged runs a trainer that writes a log, and returns the folder of the log.
func logged(t *testing.T, name string, steps int) string {
	t.Helper()
	folder := filepath.Join(t.TempDir(), name)
	tr := newTrainer(t, steps, 4)
	tr.Config.Notes = map[string]string{"name": name, "seeds": "4"}
	tr.On(runlog.JSON(filepath.Join(folder, "log.jsonl"),
		runlog.On(map[string]string{"device": "card of " + name})),
		llm.Checkpoint(tr, filepath.Join(folder, "model.safetensors"), 0))
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd && e.Step == 3 {
			germinate(t, tr, 0, 1, "</script><b>hungry</b>")
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	return folder
}

// TestLogs checks that a board of logs shows finished runs and one in progress, with their settings,
// and skips lines that are not records.
func TestLogs(t *testing.T) {
	t.Parallel()
	one, two := logged(t, "one", 6), logged(t, "two", 9)
	b, err := board.Logs([]string{one, filepath.Join(two, "log.jsonl")})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	var runs []api.Run
	get(t, url+"api/v1/runs", &runs)
	require.Len(t, runs, 2)
	require.Equal(t, "one", runs[0].Name)
	require.Equal(t, "one", runs[0].Settings["name"])
	require.Equal(t, "two", runs[1].Settings["name"])
	require.Equal(t, "card of two", runs[1].Settings["on: device"])
	require.Contains(t, runs[1].Settings["on: system"], "/")
	require.Equal(t, "ended", runs[1].State)
	require.Equal(t, 9, runs[1].Step)
	require.Equal(t, map[string]int{"Dormant": 7, "Training": 1}, runs[0].Stages)
	var seed api.Seed
	get(t, url+"api/v1/runs/0/seeds/0/1", &seed)
	require.Equal(t, "</script><b>hungry</b>", seed.Events[0].Reason)

	log, err := os.OpenFile(filepath.Join(one, "log.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = log.WriteString("no JSON\n" + `{"event":"epoch","epoch":3,"layer":-1,"step":7}` + "\n" +
		`{"event":"epoch","epoch":3,"layer":0,"step":7,"states":[{"seed":-1},{"seed":99,"stage":"x"}]}` + "\n" +
		`{"event":"start","step":6}` + "\n" + `{"event":"step","step":7,"train_loss":1.5}` + "\n" + `{"event":"st`)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		var r api.Run
		get(t, url+"api/v1/runs/0", &r)
		return r.Step == 7 && r.Loss == 1.5 && r.State == "running"
	}, patience, 50*time.Millisecond)
	_, err = log.WriteString(`ep","step":8,"train_loss":1.25}` + "\n")
	require.NoError(t, errors.Join(err, log.Close()))
	require.Eventually(t, func() bool {
		var r api.Run
		get(t, url+"api/v1/runs/0", &r)
		return r.Loss == 1.25
	}, patience, 50*time.Millisecond)
	var s api.Series
	get(t, url+"api/v1/runs/0/series", &s)
	require.Len(t, s.Step, 8)

	model := t.TempDir() // the layout that kasmina train writes
	require.NoError(t, os.Rename(two, filepath.Join(model, "run")))
	other, err := board.Logs([]string{model})
	require.NoError(t, err)
	require.NoError(t, other.Close())
	_, err = board.Logs([]string{t.TempDir()})
	require.ErrorContains(t, err, "log.jsonl")
	for _, path := range texttest.NoFiles(t) {
		_, err = board.Logs([]string{path})
		require.Error(t, err, path)
		require.Error(t, board.Report(io.Discard, path), path)
	}

	_, err = board.Logs(nil)
	require.ErrorContains(t, err, "runs/*")
	require.Equal(t, 403, order(t, b, "0/stop", "{}", nil).Code)
}

// TestReport checks that a report is a single page that contains the run and loads no other files.
func TestReport(t *testing.T) {
	folder := logged(t, "one", 6)
	var page bytes.Buffer
	require.NoError(t, board.Report(&page, folder))
	require.NotContains(t, page.String(), `src="`)
	require.NotContains(t, page.String(), `rel="stylesheet"`)
	require.NotContains(t, page.String(), "<b>hungry")
	require.Contains(t, page.String(), `"on: device":"card of one"`)
	require.ErrorContains(t, board.Report(io.Discard, filepath.Join(folder, "none")), "want a folder")

	w := browser(t)
	path := filepath.Join(t.TempDir(), "report.html")
	require.NoError(t, os.WriteFile(path, page.Bytes(), 0o666))
	w.Do(chromedp.Navigate("file://" + path))
	w.see("#chart-loss canvas", "#history", "#legend li", "#settings-box")
	require.Contains(t, w.text("#legend"), "Training 1")
	require.Contains(t, w.text("#events"), "because </script><b>hungry</b>")
	require.Contains(t, w.text("#settings"), "one")
	w.accessible("report")
	w.shoot("report.png")
	eval[bool](w, "Lattice.select({layer: 0, seed: 1}); true")
	w.see("#seed-events li")
	require.Empty(t, w.Complaints(), "the browser's console")
}

// TestFollowWithoutSeeds checks that a controller of a run without seeds is called once per epoch.
func TestFollowWithoutSeeds(t *testing.T) {
	epoch := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state, reports := "running", strings.HasSuffix(r.URL.Path, "/reports")
		if !reports {
			epoch++
		}
		switch {
		case reports:
			io.WriteString(w, "[]")
			return
		case epoch > 4:
			state = "ended"
		}
		fmt.Fprintf(w, `{"state":%q,"epoch":%d}`, state, min(epoch, 2))
	}))
	defer server.Close()

	asked := counted{}
	require.NoError(t, (&api.Client{URL: server.URL}).Follow(t.Context(), "0", &asked, nil))
	require.Equal(t, 2, asked.n)
}

// counted is a controller that counts its calls.
type counted struct{ n int }

func (c *counted) Decide([]state.Report) []state.Command {
	c.n++
	return nil
}
