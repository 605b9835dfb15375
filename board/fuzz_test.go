package board_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/llm"
)

// FuzzReport checks that Report accepts any log and writes a page of limited size.
func FuzzReport(f *testing.F) {
	f.Add([]byte(`{"event":"start","step":0,"steps":9,"machine":{"device":"x"}}` + "\n" +
		`{"event":"step","step":1,"train_loss":2,"elapsed_seconds":1e300}` + "\n" +
		`{"event":"epoch","epoch":1,"layer":1,"step":1,"states":[{"seed":0,"stage":"Training",` +
		`"alpha":0.5,"health":{"variance":1},"events":[{"kind":"StageChanged","reason":"y"}]}]}` +
		"\n" + `{"event":"sample","step":2,"text":"</script>"}` + "\n" +
		`{"event":"start","step":1}` + "\n" + `{"event":"end","step":3,"error":"z"}`))

	path := filepath.Join(f.TempDir(), "log.jsonl")
	const page = 1 << 20 // size of an empty report
	f.Fuzz(func(t *testing.T, log []byte) {
		require.NoError(t, os.WriteFile(path, log, 0o666))
		bounded.Run(t, int64(len(log)+4*page), func() {
			require.NoError(t, board.Report(io.Discard, path))
		})
	})
}

// FuzzOrders sends any path and body to the handlers that steer a run, and checks the board
// afterwards.
func FuzzOrders(f *testing.F) {
	f.Add("commands", `{"who":"x","why":"y","commands":[{"action":"Germinate","layer":0,"seed":0,`+
		`"slot":1,"kind":"Residual"},{"action":"SetAlpha","seed":1,"alpha":2}]}`)
	f.Add("telemetry", `{"mode":"Sampling","every":3}`)
	f.Add("save", `{}`)
	f.Fuzz(func(t *testing.T, path, body string) {
		if strings.HasPrefix(path, "stop") || strings.ContainsAny(path, "?#% ") ||
			strings.ContainsFunc(path, func(r rune) bool { return r < ' ' || r > '~' }) {
			return
		}
		tr := newTrainer(t, 4, 4)
		b, err := board.Attach(tr, board.WithControl())
		require.NoError(t, err)
		defer b.Close()
		answered := make(chan int, 1)
		tr.On(func(e llm.Event) error {
			if e.Kind == llm.StepEnd && e.Step == 1 {
				go func() { answered <- order(t, b, "0/"+path, body, nil).Code }()
			}
			return nil
		})
		paced(tr, time.Millisecond)
		require.NoError(t, tr.Run(t.Context()))
		require.NotEqual(t, http.StatusInternalServerError, <-answered)
		for _, look := range []string{"/api/v1/runs", "/api/v1/runs/0/lattice",
			"/api/v1/runs/0/reports", "/api/v1/runs/0/events", "/metrics"} {
			w := httptest.NewRecorder()
			b.ServeHTTP(w, httptest.NewRequest("GET", "http://127.0.0.1"+look, nil))
			require.Equal(t, http.StatusOK, w.Code, look)
		}
	})
}
