package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// finishedRun returns the folder of a run of two steps.
func finishedRun(t *testing.T) string {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "mine")
	require.NoError(t, os.MkdirAll(folder, 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "log.jsonl"),
		[]byte(`{"event":"start","step":0,"steps":2}
{"event":"step","step":1,"train_loss":5.5}
{"event":"step","step":2,"train_loss":4.25}
{"event":"end","step":2,"train_loss":4.25}
`), 0o666))
	return folder
}

// TestReport wants a run's page where it was asked for, and what is wrong named.
func TestReport(t *testing.T) {
	page := filepath.Join(t.TempDir(), "a", "page.html")
	out, err := kasmina(t, "report", "-out", page, finishedRun(t))
	require.NoError(t, err)
	require.Equal(t, page+"\n", out)
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(text), `"loss":[5.5,4.25]`)
	_, err = kasmina(t, "report")
	require.ErrorContains(t, err, "want one")
	_, err = kasmina(t, "report", "-out", page, t.TempDir())
	require.ErrorContains(t, err, "log.jsonl")
}

// TestBoard wants the command to say where its page is, and to end when it is interrupted.
func TestBoard(t *testing.T) {
	_, err := kasmina(t, "board")
	require.ErrorContains(t, err, "runs/*")
	_, err = kasmina(t, "board", "-addr", "nowhere", finishedRun(t))
	require.ErrorContains(t, err, "want an address")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	out := &lineThen{then: stop}
	require.NoError(t, run(ctx, []string{"board", "-addr", "127.0.0.1:0", finishedRun(t)}, out,
		io.Discard))
	require.True(t, strings.HasPrefix(out.String(), "http://127.0.0.1:"), out.String())
}

// lineThen does something once a line has been written.
type lineThen struct {
	bytes.Buffer
	then func()
}

func (w *lineThen) Write(text []byte) (int, error) {
	if bytes.ContainsRune(text, '\n') {
		defer w.then()
	}
	return w.Buffer.Write(text)
}
