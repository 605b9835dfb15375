package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// trained returns the contents of the model file in a folder.
func trained(t *testing.T, out string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(out, "model.safetensors"))
	require.NoError(t, err)
	return string(text)
}

// TestResumeRecallsOptions checks that --resume needs no option but --out, and that the run then has
// the same bits as without the interruption, also from another working directory.
func TestResumeRecallsOptions(t *testing.T) {
	never := filepath.Join(t.TempDir(), "out")
	more := []string{"--lr", "0.002", "--optimizer", "muon", "--schedule", "linear", "--clip", "0.5"}
	stderrOf(t, short(never, more...)...)
	out := stopped(t, "event", "Saved", more...)

	want := trained(t, never)
	t.Chdir(t.TempDir())
	_, err := kasmina(t, "train", "--out", out)
	require.ErrorContains(t, err, "holds a run: add --resume to continue it")
	stderr := stderrOf(t, "train", "--resume", "--out", out)
	require.Contains(t, stderr, "settings  muon, learning rate 0.002")
	require.NotContains(t, stderr, "other settings")
	require.Equal(t, want, trained(t, out))

	// Options on the command line override the recalled ones.
	_, err = kasmina(t, "train", "--resume", "--out", out, "--steps", "nine")
	require.ErrorContains(t, err, "steps")
	_, err = kasmina(t, "train", "--resume", "--out", filepath.Join(t.TempDir(), "none"))
	require.ErrorContains(t, err, "there is no run in ")
}

// TestExtend checks that a finished run continues from its checkpoint with more steps, and that it
// replaces its model but keeps the user's files.
func TestExtend(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	stderrOf(t, short(out)...)
	before := trained(t, out)
	require.NoError(t, os.WriteFile(filepath.Join(out, "README.md"), []byte("mine"), 0o666))

	_, err := kasmina(t, short(out, "--steps", "9")...)
	require.ErrorContains(t, err, "add --resume to extend it")
	_, err = kasmina(t, short(out, "--steps", "3")...)
	require.ErrorContains(t, err, "add --resume and more --steps to extend it")
	stderr := stderrOf(t, "train", "--resume", "--out", out, "--steps", "9")
	require.Contains(t, stderr, "from step 4 to step 9")
	require.NotEqual(t, before, trained(t, out))
	mine, err := os.ReadFile(filepath.Join(out, "README.md"))
	require.NoError(t, err)
	require.Equal(t, "mine", string(mine))
	require.Contains(t, stderrOf(t, "train", "--resume", "--out", out), "already finished")
	_, err = kasmina(t, "generate", "-m", out, "-p", "Permission", "-n", "3")
	require.NoError(t, err)

	_, err = kasmina(t, short(filepath.Join(t.TempDir(), "x"), "--adapters", "all")...)
	require.NoError(t, err)
	adapted := filepath.Join(t.TempDir(), "adapted")
	stderrOf(t, short(adapted, "--adapters", "all")...)
	_, err = kasmina(t, "train", "--resume", "--out", adapted, "--steps", "9")
	require.ErrorContains(t, err, "another --out")
}

// TestExtendKilled checks that an extended run continues after a kill at any moment, even while the files
// of its new model are being moved.
func TestExtendKilled(t *testing.T) {
	whole := filepath.Join(t.TempDir(), "out")
	stderrOf(t, short(whole)...)
	finished := filepath.Join(t.TempDir(), "out")
	require.NoError(t, os.CopyFS(finished, os.DirFS(whole)))
	stderrOf(t, "train", "--resume", "--out", whole, "--steps", "9")
	for _, at := range [][2]string{{"event", "Saved"}, {"publish", "config.json"},
		{"publish", "tokenizer.json"}, {"published", ""}} {
		out := filepath.Join(t.TempDir(), "out")
		require.NoError(t, os.CopyFS(out, os.DirFS(finished)))
		args := []string{"train", "--resume", "--out", out, "--steps", "9"}
		stopAt(t, at[0], at[1], args...)
		stderrOf(t, args...)
		require.Equal(t, trained(t, whole), trained(t, out), at)
	}
}

// TestSameOptions checks that an explicit default counts as the same option, and that options missing in
// an older version count as their defaults.
func TestSameOptions(t *testing.T) {
	for _, c := range [][2][]string{
		{{"--device", "auto"}, {"--device", "cpu"}},
		{nil, {"--precision", "f32"}},
		{nil, {"--lr", "0.0001", "--optimizer", "adamw", "--clip", "1"}},
	} {
		if _, err := openGPU(nil); err == nil {
			t.Skip("--device auto is a GPU here")
		}
		out := stopped(t, "event", "Saved", c[0]...)
		_, err := kasmina(t, short(out, c[1]...)...)
		require.NoError(t, err, c)
	}

	args := []string{"train", "-m", tiny, "-d", license, "-b", "1", "-n", "4", "--save-every", "2", "--device",
		"cpu", "-o"}
	out := filepath.Join(t.TempDir(), "out")
	stopAt(t, "event", "Saved", append(args, out)...)
	_, err := kasmina(t, append(args, out, "--seq", "128")...)
	require.NoError(t, err)

	out = stopped(t, "event", "Saved")
	path := filepath.Join(out, runFolder, manifestName)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var m manifest
	require.NoError(t, json.Unmarshal(text, &m))
	for _, name := range []string{"optimizer", "schedule", "warmup", "clip", "weight-decay", "keep-best", "gguf"} {
		require.Contains(t, m.Options, name)
		delete(m.Options, name)
	}

	m.Options["device"], m.Options["precision"], m.Options["lr"] = "auto", "", "0.0001"
	text, err = json.Marshal(m)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, text, 0o666))
	_, err = kasmina(t, short(out)...)
	require.NoError(t, err)
}
