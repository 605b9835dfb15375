package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// finishedRun returns the folder of a finished run with two steps.
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

// TestReport checks that report writes the page of a run to the named file, and that its errors name the
// cause.
func TestReport(t *testing.T) {
	page := filepath.Join(t.TempDir(), "a", "page.html")
	out, err := kasmina(t, "report", "--out", page, finishedRun(t))
	require.NoError(t, err)
	require.Equal(t, page+"\n", out)
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(text), `"loss":[5.5,4.25]`)
	_, err = kasmina(t, "report")
	require.ErrorContains(t, err, "accepts 1 arg(s), received 0")
	_, err = kasmina(t, "report", "--out", page, t.TempDir())
	require.ErrorContains(t, err, "log.jsonl")
}

// TestReportName checks the default name of a report, however the run is named.
func TestReportName(t *testing.T) {
	run := finishedRun(t)
	inside := filepath.Join(run, "inside")
	require.NoError(t, os.Mkdir(inside, 0o777))
	own := filepath.Join(run, "own.jsonl")
	text, err := os.ReadFile(filepath.Join(run, "log.jsonl"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(own, text, 0o666))
	for _, c := range []struct{ in, run, want string }{
		{run, ".", "mine.html"},
		{run, "./", "mine.html"},
		{inside, "..", "mine.html"},
		{inside, "../", "mine.html"},
		{inside, "../inside/..", "mine.html"},
		{filepath.Dir(run), "mine/", "mine.html"},
		{filepath.Dir(run), "mine//", "mine.html"},
		{run, "log.jsonl", "mine.html"},
		{inside, "../log.jsonl", "mine.html"},
		{run, "own.jsonl", "own.html"},
		{inside, run, "mine.html"},
	} {
		t.Chdir(c.in)
		out, err := kasmina(t, "report", c.run)
		require.NoError(t, err, "report %s", c.run)
		require.Equal(t, c.want+"\n", out, "report %s", c.run)
		page, err := os.ReadFile(filepath.Join(c.in, c.want))
		require.NoError(t, err)
		require.Contains(t, string(page), `"loss":[5.5,4.25]`)
		require.NoError(t, os.Remove(filepath.Join(c.in, c.want)))
	}

	t.Chdir(inside)
	_, err = kasmina(t, "report", "/")
	require.ErrorContains(t, err, "want a folder with a log.jsonl")
	left, err := os.ReadDir(inside)
	require.NoError(t, err)
	require.Empty(t, left)
}

// TestReportReplaces checks that a report replaces an earlier one of the same run, and no other file.
func TestReportReplaces(t *testing.T) {
	one, two := finishedRun(t), finishedRun(t) // both are named mine
	t.Chdir(t.TempDir())
	report := func(args ...string) error {
		_, err := kasmina(t, append([]string{"report"}, args...)...)
		return err
	}
	require.NoError(t, report(one))
	first, err := os.ReadFile("mine.html")
	require.NoError(t, err)
	require.ErrorContains(t, report(two), "mine.html exists and is not a report of this run")
	same, err := os.ReadFile("mine.html")
	require.NoError(t, err)
	require.Equal(t, first, same)

	f, err := os.OpenFile(filepath.Join(one, "log.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(`{"event":"start","step":2,"steps":3}` + "\n" +
		`{"event":"step","step":3,"train_loss":3.25}` + "\n")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, report(one+"/log.jsonl"))
	later, err := os.ReadFile("mine.html")
	require.NoError(t, err)
	require.Contains(t, string(later), `"loss":[5.5,4.25,3.25]`)

	require.NoError(t, os.WriteFile("notes.html", []byte("mine"), 0o666))
	require.ErrorContains(t, report("--out", "notes.html", one), "not a report of this run")
	require.NoError(t, os.Mkdir("folder.html", 0o777))
	require.ErrorContains(t, report("--out", "folder.html", one), "folder")
	require.NoError(t, report("--out", "two.html", two))
	require.NoError(t, report("--out", "two.html", two))
	text, err := os.ReadFile("notes.html")
	require.NoError(t, err)
	require.Equal(t, "mine", string(text))
}

// TestBoard checks that the command prints the address of its page and ends when it is interrupted.
func TestBoard(t *testing.T) {
	_, err := kasmina(t, "board")
	require.ErrorContains(t, err, "requires at least 1 arg(s)")
	_, err = kasmina(t, "board", "--addr", "nowhere", finishedRun(t))
	require.ErrorContains(t, err, "missing port in address")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	out := &lineThen{then: stop}
	var stderr bytes.Buffer
	empty := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(empty, logName), nil, 0o666))
	none := t.TempDir()
	require.ErrorIs(t, run(ctx, []string{"board", "--addr", "127.0.0.1:0", none, finishedRun(t), empty}, out,
		&stderr), context.Canceled)
	require.True(t, strings.HasPrefix(out.String(), "http://127.0.0.1:"), out.String())
	require.Contains(t, stderr.String(), "skipping "+none+", which has no log.jsonl")
	require.Contains(t, stderr.String(), filepath.Join(empty, logName)+" is empty")

	_, err = kasmina(t, "board", none)
	require.ErrorContains(t, err, "no log.jsonl in "+none)
}

// lineThen calls a function once a line has been written.
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
