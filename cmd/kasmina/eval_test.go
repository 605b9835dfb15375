package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/processor"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// evaluated returns what eval prints.
func evaluated(t *testing.T, args ...string) (s score) {
	t.Helper()
	out, err := kasmina(t, append([]string{"eval", "-m", tiny, "--device", "cpu"}, args...)...)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal([]byte(out), &s))
	return s
}

// TestEvalShortText checks that a short text takes no longer with long windows, and has the same loss.
func TestEvalShortText(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	license, err := os.ReadFile(license)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(text, license[:600], 0o666))
	want := evaluated(t, "-d", text, "--seq", "700")

	start := processor.Time(t)
	got := evaluated(t, "-d", text, "--seq", "20000")
	require.Less(t, processor.Time(t)-start, 5*time.Second) // took 12 s before windows were limited to the text
	require.Equal(t, want, got)
}

// TestEvalFolder checks that the text of a folder consists of its files, one after the other.
func TestEvalFolder(t *testing.T) {
	dir, joined := t.TempDir(), filepath.Join(t.TempDir(), "text")
	text, err := os.ReadFile(license)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a"), text[:500], 0o666))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b"), text[500:900], 0o666))
	require.NoError(t, os.WriteFile(joined, text[:900], 0o666))
	require.Equal(t, evaluated(t, "-d", joined), evaluated(t, "-d", dir))

	_, err = kasmina(t, "eval", "-m", tiny, "-d", t.TempDir())
	require.ErrorContains(t, err, "--data: ")
}

// TestEvalInterrupted checks that eval ends within a batch when it is interrupted.
func TestEvalInterrupted(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(text, bytes.Repeat([]byte("a b c d e f "), 8000), 0o666))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()

	start := processor.Time(t)
	err := run(ctx, []string{"eval", "-m", tiny, "-d", text, "--seq", "30000", "--device", "cpu"}, io.Discard,
		io.Discard)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, processor.Time(t)-start, 15*time.Second) // the batch takes half a minute
}

// TestPromptFromStandardInput checks that --prompt - reads the prompt from standard input.
func TestPromptFromStandardInput(t *testing.T) {
	want, err := kasmina(t, "generate", "-m", tiny, "-p", "Permission is\n", "-n", "9", "-t", "0")
	require.NoError(t, err)
	var out bytes.Buffer
	root := newRoot()
	root.SetIn(strings.NewReader("Permission is\n"))
	root.SetOut(&out)
	root.SetArgs([]string{"generate", "-m", tiny, "-p", "-", "-n", "9", "-t", "0"})
	require.NoError(t, root.ExecuteContext(t.Context()))
	require.Equal(t, want, out.String())
}

// TestInterruptedCommands checks that commands which save nothing end in silence with the exit code of
// an interrupt.
func TestInterruptedCommands(t *testing.T) {
	randtest.Concurrent(t)
	if runtime.GOOS == "windows" {
		t.Skip("Windows does not let a process interrupt another")
	}

	text := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(text, bytes.Repeat([]byte("a b c d e f "), 8000), 0o666))
	for _, args := range [][]string{
		{"board", "--addr", "127.0.0.1:0", finishedRun(t)},
		{"eval", "-m", tiny, "-d", text, "--seq", "30000", "--device", "cpu"},
		{"generate", "-m", tiny, "-p", "a", "-n", "1000000", "-t", "1", "--device", "cpu"},
	} {
		var (
			stderr bytes.Buffer
			exit   *exec.ExitError
		)
		const first = 300 * time.Millisecond
		for delay := first; ; delay *= 2 {
			stderr.Reset()
			c := program(t, nil, args...)
			c.Stderr = &stderr
			require.NoError(t, c.Start())
			time.Sleep(delay)
			require.NoError(t, c.Process.Signal(os.Interrupt))
			require.ErrorAs(t, c.Wait(), &exit, args)
			if exit.Exited() || delay > 100*first {
				break
			}
			// On a busy machine, the signal may have come before the process was ready to handle it.
		}
		require.Equal(t, 130, exit.ExitCode(), "%s: %s", args, &stderr)
		require.NotRegexp(t, "stopping|checkpoint|canceled|interrupt", stderr.String(), args)
	}
}
