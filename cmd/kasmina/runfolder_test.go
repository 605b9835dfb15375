package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/failpoint"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
)

// short returns the arguments of a run of a few steps.
func short(out string, more ...string) []string {
	return append([]string{"train", "--model", tiny, "--data", license, "--out", out, "--batch", "1",
		"--seq", "16", "--device", "cpu", "--steps", "4", "--save-every", "2"}, more...)
}

// snapshotOf returns the contents of all files in a folder, by name.
func snapshotOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		all[path] = string(text)
		return err
	}))

	return all
}

// stderrOf runs a command that must succeed and returns its standard error.
func stderrOf(t *testing.T, args ...string) string {
	t.Helper()
	var out, stderr bytes.Buffer
	require.NoError(t, run(t.Context(), args, &out, &stderr))
	return stderr.String()
}

// TestFinishedRun checks that the command of a finished run reports this and changes nothing, and that
// different commands for its folder are rejected.
func TestFinishedRun(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	stderrOf(t, short(out)...)
	before := snapshotOf(t, out)
	for _, more := range [][]string{nil, {"--resume"}, {"--save-every", "3", "--quiet"},
		{"--data", filepath.Join(filepath.Dir(license), ".", filepath.Base(license))}} {
		require.Contains(t, stderrOf(t, short(out, more...)...), "the run has already finished")
		require.Equal(t, before, snapshotOf(t, out), more)
	}

	for _, more := range [][]string{{"--steps", "3", "--lr", "0.5"}, {"--steps", "3", "--lr", "0.5",
		"--resume"}} {
		_, err := kasmina(t, short(out, more...)...)
		require.ErrorContains(t, err, `--lr was "0.0001" and is "0.5" now; --steps was "4" and is "3" now`)
		require.ErrorContains(t, err, "another --out")
		require.Equal(t, before, snapshotOf(t, out), more)
	}

	require.NoError(t, os.Remove(filepath.Join(out, "tokenizer.json")))
	_, err := kasmina(t, short(out)...)
	require.ErrorContains(t, err, "tokenizer.json")
}

// stopped returns the folder of a run that failed at a failpoint. Apart from temporary files, it looks
// like the folder of a killed run.
func stopped(t *testing.T, point, path string, more ...string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "out")
	stopAt(t, point, path, short(out, more...)...)
	return out
}

// stopAt runs a command that fails at a failpoint.
func stopAt(t *testing.T, point, path string, args ...string) {
	t.Helper()
	defer failpoint.Set(nil)
	failpoint.Set(func(p, at string) {
		if p == point && strings.Contains(at, path) {
			panic("stopped")
		}
	})
	require.PanicsWithValue(t, "stopped", func() { stderrOf(t, args...) })
}

// TestOtherOptions checks commands with different options from the run in their folder. If there is a
// checkpoint, the command must name the options and refuse to continue without --resume. If there is
// nothing to lose, it starts again.
func TestOtherOptions(t *testing.T) {
	out := stopped(t, "event", "StepEnd", "--save-every", "1", "--steps", "3")
	_, err := kasmina(t, short(out)...)
	require.NoError(t, err, "without a checkpoint")

	out = stopped(t, "event", "Saved", "--lr", "0.002")
	_, err = kasmina(t, short(out)...)
	require.ErrorContains(t, err, `--lr was "0.002" and is "0.0001" now`)
	require.NotContains(t, err.Error(), "--steps")
	_, err = kasmina(t, short(out, "--seq", "8", "--resume")...)
	require.ErrorIs(t, err, llm.ErrArchitecture)
	require.ErrorContains(t, err, `(--seq was "16" and is "8" now); the sizes of the model, `+
		"--seq, --grow and the options of adapters must stay as they were")
	require.Contains(t, stderrOf(t, short(out, "--resume", "--lr", "0.0003")...),
		`resuming  with other settings: --lr was "0.002" and is "0.0003" now`)

	// A run without a manifest comes from an older version.
	out = stopped(t, "event", "Saved")
	require.NoError(t, os.Remove(filepath.Join(out, runFolder, manifestName)))
	_, err = kasmina(t, short(out)...)
	require.ErrorContains(t, err, "add --resume to continue it")
	_, err = kasmina(t, short(out, "--resume")...)
	require.NoError(t, err)
}

// TestOtherText checks that a run is rejected if its text has changed, that it continues with --resume,
// and that it keeps its position if the text is the same.
func TestOtherText(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text.txt")
	whole, err := os.ReadFile(license)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(text, whole, 0o666))
	out := stopped(t, "event", "Saved", "--data", text)
	copied := filepath.Join(t.TempDir(), "out")
	require.NoError(t, os.CopyFS(copied, os.DirFS(out)))

	require.NoError(t, os.WriteFile(text, append(whole, "changed"...), 0o666))
	_, err = kasmina(t, short(out, "--data", text)...)
	require.ErrorIs(t, err, data.ErrChanged)
	require.ErrorContains(t, err, "add --resume")
	require.Contains(t, stderrOf(t, short(out, "--data", text, "--resume")...), "resuming  with another text")

	require.NoError(t, os.WriteFile(text, whole, 0o666))
	require.NotContains(t, stderrOf(t, short(copied, "--data", text, "--resume")...), "another text")
	never := filepath.Join(t.TempDir(), "out")
	_, err = kasmina(t, short(never, "--data", text)...)
	require.NoError(t, err)
	want, err := os.ReadFile(filepath.Join(never, "model.safetensors"))
	require.NoError(t, err)
	got, err := os.ReadFile(filepath.Join(copied, "model.safetensors"))
	require.NoError(t, err)
	require.Equal(t, want, got, "--resume of an unchanged run")
}

// TestForeignFolders checks that folders with foreign files are rejected before anything is written, and
// that files which appear during a run stay.
func TestForeignFolders(t *testing.T) {
	for _, name := range []string{"notes.txt", filepath.Join(runFolder, "notes.txt"),
		filepath.Join(runFolder, logName)} {
		out := filepath.Join(t.TempDir(), "out")
		require.NoError(t, os.MkdirAll(filepath.Join(out, filepath.Dir(name)), 0o777))
		require.NoError(t, os.WriteFile(filepath.Join(out, name), nil, 0o666))
		before := snapshotOf(t, out)
		for _, more := range [][]string{nil, {"--resume"}} {
			_, err := kasmina(t, short(out, more...)...)
			require.ErrorContains(t, err, "because it holds "+name)
			require.Equal(t, before, snapshotOf(t, out))
		}
	}

	out := filepath.Join(t.TempDir(), "out")
	require.NoError(t, os.MkdirAll(filepath.Join(out, runFolder), 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(out, runFolder, manifestName), []byte("{"), 0o666))
	_, err := kasmina(t, short(out)...)
	require.ErrorContains(t, err, "is corrupted")

	// A foreign config.json appears while the finished model moves to its place.
	out = stopped(t, "publish", "generation_config.json")
	config := filepath.Join(out, configName)
	require.NoError(t, os.WriteFile(config, []byte("theirs"), 0o666))
	for range 2 {
		_, err = kasmina(t, short(out)...)
		require.ErrorContains(t, err, "another program has written "+config)
		text, err := os.ReadFile(config)
		require.NoError(t, err)
		require.Equal(t, "theirs", string(text))
	}

	require.NoError(t, os.Remove(config))
	require.Contains(t, stderrOf(t, short(out)...), "its model is in")
	require.NoDirExists(t, filepath.Join(out, runFolder, stagingName))
	_, err = kasmina(t, "eval", "--model", out, "--data", license, "--seq", "32", "--device", "cpu")
	require.NoError(t, err)
}

// TestConcurrentRuns checks that only one run at a time uses a folder, and that an error before the first
// step does not create files.
func TestConcurrentRuns(t *testing.T) {
	out := filepath.Join(t.TempDir(), "a", "out")
	_, err := kasmina(t, short(out, "--data", "none")...)
	require.Error(t, err)
	require.NoDirExists(t, out)

	defer func(d time.Duration) { claimWait = d }(claimWait)
	claimWait = 50 * time.Millisecond
	c := program(t, nil, short(out, "--steps", "1000000", "--quiet")...)
	require.NoError(t, c.Start())
	defer func() {
		c.Process.Kill()
		c.Wait()
	}()

	for {
		if _, err := os.Stat(filepath.Join(out, runFolder, checkpointName)); err == nil {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}

	_, err = kasmina(t, short(out, "--steps", "1000000")...)
	require.ErrorIs(t, err, llm.ErrFolderInUse)
}

// TestManifest checks that the manifest contains exactly the options that affect the result.
func TestManifest(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	stderrOf(t, short(out)...)
	text, err := os.ReadFile(filepath.Join(out, runFolder, manifestName))
	require.NoError(t, err)
	var m manifest
	require.NoError(t, json.Unmarshal(text, &m))
	require.True(t, m.Finished)
	require.Equal(t, configName, m.Files[len(m.Files)-1])
	for name := range flagRules["train"] {
		_, has := m.Options[name]
		free := false
		for _, f := range freeOptions {
			free = free || f == name
		}
		require.NotEqual(t, free, has, name)
	}
}
