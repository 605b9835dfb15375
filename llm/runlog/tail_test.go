package runlog_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/runlog"
)

// lines returns a log of the given steps, all with the same loss.
func lines(from, to int, loss string) string {
	var b strings.Builder
	for step := from; step <= to; step++ {
		fmt.Fprintf(&b, `{"event":"step","step":%d,"train_loss":%s}`+"\n", step, loss)
	}
	return b.String()
}

// TestTail checks that a Tail continues with the new records of a growing log, and starts over when
// another log has taken its place, however that happened.
func TestTail(t *testing.T) {
	long := lines(1, 400, "2.5") // several times as long as the marks that a Tail compares
	for name, c := range map[string]struct {
		change  func(t *testing.T, path string) // modifies the log
		restart bool
		want    string // records read after the change
	}{
		"nothing": {func(*testing.T, string) {}, false, ""},
		"appended": {func(t *testing.T, path string) {
			appendTo(t, path, lines(401, 403, "2.5"))
		}, false, lines(401, 403, "2.5")},
		"half a line": {func(t *testing.T, path string) {
			appendTo(t, path, `{"event":"step","st`)
		}, false, ""},
		"touched": {func(t *testing.T, path string) {
			require.NoError(t, os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour)))
		}, false, ""},
		"truncated": {func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, nil, 0o666))
		}, true, ""},
		"overwritten by a shorter one": {func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, []byte(lines(1, 2, "7.5")), 0o666))
		}, true, lines(1, 2, "7.5")},
		"overwritten by one of the same size": {func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, []byte(lines(1, 400, "7.5")), 0o666))
			require.NoError(t, os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour)))
		}, true, lines(1, 400, "7.5")},
		"overwritten by a longer one": {func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, []byte(lines(1, 500, "7.5")), 0o666))
		}, true, lines(1, 500, "7.5")},
		"overwritten by one with the same start": {func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path,
				[]byte(lines(1, 300, "2.5")+lines(301, 500, "7.5")), 0o666))
		}, true, lines(1, 300, "2.5") + lines(301, 500, "7.5")},
		"deleted and written again": {func(t *testing.T, path string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.WriteFile(path, []byte(lines(1, 500, "7.5")), 0o666))
		}, true, lines(1, 500, "7.5")},
		"replaced by a copy": {func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path+".new", []byte(long), 0o666))
			require.NoError(t, os.Rename(path+".new", path))
		}, true, long},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "log.jsonl")
			require.NoError(t, os.WriteFile(path, []byte(long), 0o666))
			tail := runlog.NewTail(path)
			require.Equal(t, long, readTail(t, tail, nil))
			require.Empty(t, readTail(t, tail, nil))

			c.change(t, path)
			restarts := 0
			require.Equal(t, c.want, readTail(t, tail, &restarts))
			require.Equal(t, c.restart, restarts == 1)
			appendTo(t, path, "\n"+lines(501, 502, "3.5"))
			require.Equal(t, lines(501, 502, "3.5"), readTail(t, tail, nil))
		})
	}
}

// TestTailMissing checks that a missing log is an error, and that the Tail continues once the log is
// back.
func TestTailMissing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	require.NoError(t, os.WriteFile(path, []byte(lines(1, 3, "2.5")), 0o666))
	tail := runlog.NewTail(path)
	require.Equal(t, lines(1, 3, "2.5"), readTail(t, tail, nil))
	require.NoError(t, os.Rename(path, path+".away"))
	_, err := tail.Read(func() { t.Error("restarted") }, func(runlog.Record) { t.Error("read") })
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, os.Rename(path+".away", path))
	appendTo(t, path, lines(4, 4, "2.5"))
	require.Equal(t, lines(4, 4, "2.5"), readTail(t, tail, nil))
}

// readTail returns the new records as lines. A restart fails the test if restarts is nil.
func readTail(t *testing.T, tail *runlog.Tail, restarts *int) string {
	t.Helper()
	var b strings.Builder
	_, err := tail.Read(func() {
		require.NotNil(t, restarts, "restarted")
		require.Zero(t, b.Len())
		*restarts++
	}, func(r runlog.Record) {
		b.WriteString(lines(r.Step, r.Step, fmt.Sprint(float64(*r.TrainLoss))))
	})

	require.NoError(t, err)
	return b.String()
}

func appendTo(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(text)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}
