package board_test

import (
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/llm"
)

// writeLog creates a directory with a log of the given number of steps, and returns its path.
func writeLog(t *testing.T, folder string, steps int, loss float64) string {
	t.Helper()
	require.NoError(t, os.MkdirAll(folder, 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "log.jsonl"),
		[]byte(logText(steps, loss)), 0o666))
	return folder
}

func logText(steps int, loss float64) string {
	var b strings.Builder
	fmt.Fprintf(&b, `{"event":"start","step":0,"steps":%d,"elapsed_s":0}`+"\n", 1000)
	for step := 1; step <= steps; step++ {
		fmt.Fprintf(&b, `{"event":"step","step":%d,"train_loss":%g,"elapsed_s":%d}`+"\n", step, loss,
			step)
		fmt.Fprintf(&b, `{"event":"eval","step":%d,"val_loss":%g,"val_bpb":1,"elapsed_s":%d}`+"\n",
			step, loss, step)
		fmt.Fprintf(&b, `{"event":"note","step":%d,"text":"loss %g"}`+"\n", step, loss)
	}
	return b.String()
}

// addLog appends lines to the log in a folder.
func addLog(t *testing.T, folder, text string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(folder, "log.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(text)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// logs returns the URL of a board that shows logs.
func logs(t *testing.T, paths ...string) string {
	t.Helper()
	b, err := board.Logs(paths)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	return url
}

// becomes waits until a run has the given state.
func becomes(t *testing.T, url, state string) (r api.Run) {
	t.Helper()
	require.Eventually(t, func() bool {
		get(t, url+"api/v1/runs/0", &r)
		return r.State == state
	}, patience, 20*time.Millisecond, "want %s", state)
	return r
}

// TestSilentLog checks that a run is silent, and not stopped, if its log has not changed for
// minutes, and that it is running again once its log grows.
func TestSilentLog(t *testing.T) {
	t.Parallel()
	folder := writeLog(t, filepath.Join(t.TempDir(), "one"), 3, 2)
	past := time.Now().Add(-5 * time.Minute)
	require.NoError(t, os.Chtimes(filepath.Join(folder, "log.jsonl"), past, past))
	url := logs(t, folder)
	becomes(t, url, "silent")

	addLog(t, folder, `{"event":"step","step":4,"train_loss":1.5}`+"\n")
	r := becomes(t, url, "running")
	require.Equal(t, 4, r.Step)
	require.NoError(t, os.Chtimes(filepath.Join(folder, "log.jsonl"), past, past))
	time.Sleep(1500 * time.Millisecond) // the board reads the log every second
	becomes(t, url, "running")          // regardless of the modification time

	addLog(t, folder, `{"event":"end","step":4}`+"\n")
	becomes(t, url, "ended")
	require.NoError(t, os.Chtimes(filepath.Join(folder, "log.jsonl"), past, past))
	becomes(t, logs(t, folder), "ended")
}

// TestReplacedLog checks that the API and an open page discard all data of a log that another log
// has replaced.
func TestReplacedLog(t *testing.T) {
	t.Parallel()
	w := browser(t)
	folder := writeLog(t, filepath.Join(t.TempDir(), "one"), 8, 2.25)
	url := logs(t, folder)
	w.Do(chromedp.Navigate(url))
	w.see("#chart-loss canvas", "#events li")
	require.Contains(t, w.text("#events"), "loss 2.25")
	shown := func() (cells [][]string) {
		rows, err := csv.NewReader(strings.NewReader(eval[string](w, "Board.csv()"))).ReadAll()
		require.NoError(t, err)
		return rows[1:]
	}
	require.Len(t, shown(), 16)

	// The new run in the same folder has already made more steps than the old one.
	writeLog(t, folder, 11, 7)
	var events []api.Event
	require.Eventually(t, func() bool {
		events = nil
		get(t, url+"api/v1/runs/0/events", &events)
		return len(events) == 11
	}, patience, 20*time.Millisecond)
	var s api.Series
	get(t, url+"api/v1/runs/0/series", &s)
	require.Len(t, s.Step, 11)
	require.Len(t, s.EvalStep, 11)
	for _, loss := range append(s.Loss, s.ValLoss...) {
		require.EqualValues(t, 7, loss)
	}

	require.Eventually(t, func() bool { return len(shown()) == 22 }, patience, 50*time.Millisecond)
	require.NotContains(t, eval[string](w, "Board.csv()"), "2.25")
	require.Eventually(t, func() bool {
		text := w.text("#events")
		return strings.Contains(text, "step 11, epoch 0loss 7") && !strings.Contains(text, "loss 2.25")
	}, patience, 50*time.Millisecond, "the page says %s", w.text("#events"))

	// A resumption removes all later data, including evaluations.
	addLog(t, folder, `{"event":"start","step":4,"steps":1000}`+"\n"+
		`{"event":"step","step":5,"train_loss":9}`+"\n")
	require.Eventually(t, func() bool { return len(shown()) == 9 }, patience, 50*time.Millisecond)
	get(t, url+"api/v1/runs/0/series", &s)
	require.Len(t, s.EvalStep, 4)
	require.Eventually(t, func() bool {
		return !strings.Contains(w.text("#events"), "step 5,") &&
			strings.Contains(w.text("#events"), "step 4,")
	}, patience, 50*time.Millisecond, "the page says %s", w.text("#events"))
	require.Empty(t, w.Complaints(), "the browser's console")
}

// TestReplacedCheckpoint checks that a run does not get the settings of the run that it has
// replaced, whose checkpoint may remain in the folder for a while.
func TestReplacedCheckpoint(t *testing.T) {
	t.Parallel()
	one, two := logged(t, "one", 6), logged(t, "two", 4)
	url := logs(t, one)
	var r api.Run
	get(t, url+"api/v1/runs/0", &r)
	require.Equal(t, "one", r.Settings["name"])

	log, err := os.ReadFile(filepath.Join(two, "log.jsonl"))
	require.NoError(t, err)
	start, rest, _ := strings.Cut(string(log), "\n")
	require.NoError(t, os.WriteFile(filepath.Join(one, "log.jsonl"), []byte(start+"\n"), 0o666))
	require.Eventually(t, func() bool {
		r = api.Run{}
		get(t, url+"api/v1/runs/0", &r)
		return r.Settings["on: device"] == "card of two"
	}, patience, 20*time.Millisecond)
	require.Empty(t, r.Settings["name"])

	require.NoError(t, os.Rename(filepath.Join(two, "model.safetensors"),
		filepath.Join(one, "model.safetensors")))
	addLog(t, one, rest)
	require.Eventually(t, func() bool {
		r = api.Run{}
		get(t, url+"api/v1/runs/0", &r)
		return r.Settings["name"] == "two"
	}, patience, 20*time.Millisecond)
	require.Equal(t, "card of two", r.Settings["on: device"])
}

// TestNamesOfLogs checks that runs have distinct names.
func TestNamesOfLogs(t *testing.T) {
	dir := t.TempDir()
	a, b := writeLog(t, filepath.Join(dir, "a", "x"), 1, 1), writeLog(t, filepath.Join(dir, "b", "x"), 1, 1)
	other := writeLog(t, filepath.Join(dir, "y"), 1, 1)
	own := filepath.Join(other, "own.jsonl")
	require.NoError(t, os.WriteFile(own, []byte(logText(1, 1)), 0o666))
	t.Chdir(a)
	url := logs(t, ".", filepath.Join(b, "log.jsonl"), other+"/", own, "../../y/log.jsonl")
	var runs []api.Run
	get(t, url+"api/v1/runs", &runs)
	var names []string
	for _, r := range runs {
		names = append(names, r.Name)
	}

	require.Equal(t, []string{"a/x", "b/x", "y", "own", "y (2)"}, names)
}

// TestCSV checks that spreadsheets do not interpret names in the page's CSV as formulas, and that
// numbers remain numbers.
func TestCSV(t *testing.T) {
	t.Parallel()
	w := browser(t)
	names := map[string]string{
		"=1+1":           "'=1+1",
		"+cmd|' /C x'!A": "'+cmd|' /C x'!A",
		"-x":             "'-x",
		"-2+3":           "'-2+3",
		"@SUM(A1)":       "'@SUM(A1)",
		"\tx":            "'\tx",
		"\rx":            "'\rx",
		"\nx":            "'\nx",
		" =1":            "' =1",
		"\uff1d1":        "'\uff1d1", // some spreadsheets interpret this as =
		"-1.5":           "-1.5",
		"+2e-3":          "+2e-3",
		"a=b":            "a=b",
		"2-3":            "2-3",
		"say \"x\", y":   "say \"x\", y",
		"":               "",
	}

	b, err := board.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	for name := range names {
		run := b.Add(name)
		for step := 1; step <= 2; step++ {
			run.Take(llm.Event{Kind: llm.StepEnd, Step: step, Loss: -1.5, GradNorm: 1e-7})
		}
	}

	w.Do(chromedp.Navigate(url))
	w.see("#chart-loss canvas")
	var text string
	var rows [][]string
	require.Eventually(t, func() bool {
		text = eval[string](w, "Board.csv()")
		rows, err = csv.NewReader(strings.NewReader(text)).ReadAll()
		return err != nil || len(rows) == 1+2*len(names)
	}, patience, 50*time.Millisecond)
	require.NoError(t, err)
	found := map[string]bool{}
	for _, row := range rows[1:] {
		found[row[0]] = true
		require.Equal(t, "-1.5", row[3])
		require.Equal(t, "1e-7", row[5])
	}

	for name, want := range names {
		require.True(t, found[want], "%q is not %q in %q", name, want, text)
	}
}
