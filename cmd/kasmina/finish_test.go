package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/hf"
)

// TestOutputsAreChecked checks that a run fails before its first step if it cannot write one of its outputs
// at the end.
func TestOutputsAreChecked(t *testing.T) {
	blocked := func(name string) func(out string) {
		return func(out string) {
			require.NoError(t, os.MkdirAll(filepath.Join(out, runFolder, name, "x"), 0o777))
			// The command refuses a folder that does not belong to a run.
			require.NoError(t, runDir{out}.writeManifest(&manifest{Options: map[string]string{}}))
		}
	}

	unmergeable := filepath.Join(t.TempDir(), "model")
	require.NoError(t, os.CopyFS(unmergeable, os.DirFS(tiny)))
	require.NoError(t, os.Mkdir(filepath.Join(unmergeable, "vocab.json"), 0o777))

	spaced := filepath.Join(t.TempDir(), "model")
	require.NoError(t, os.CopyFS(spaced, os.DirFS(tiny)))
	text, err := os.ReadFile(filepath.Join(spaced, "tokenizer.json"))
	require.NoError(t, err)
	text = bytes.ReplaceAll(text, []byte(`"add_prefix_space": false`), []byte(`"add_prefix_space": true`))
	require.NoError(t, os.WriteFile(filepath.Join(spaced, "tokenizer.json"), text, 0o666))

	for name, c := range map[string]struct {
		model   string
		prepare func(out string)
		more    []string
		want    string
	}{
		"folder":     {tiny, func(out string) { require.NoError(t, os.WriteFile(out, nil, 0o666)) }, nil, "--out"},
		"tokenizer":  {unmergeable, nil, nil, "could not be saved"},
		"merge":      {unmergeable, nil, []string{"--adapters", "all"}, "could not be saved"},
		"checkpoint": {tiny, blocked(checkpointName), []string{"--resume"}, checkpointName},
		"best":       {tiny, blocked(bestName), []string{"--keep-best"}, bestName},
		"GGUF":       {spaced, nil, []string{"--gguf", "f16"}, "--gguf: the trained model could not be saved"},
		"GGUF file":  {tiny, blocked(ggufName), []string{"--gguf", "f16"}, ggufName},
	} {
		t.Run(name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out")
			if c.prepare != nil {
				c.prepare(out)
			}
			_, err := kasmina(t, append([]string{"train", "-m", c.model, "-d", license, "-o", out, "-b", "1", "-n",
				"2", "--seq", "16", "--device", "cpu"}, c.more...)...)
			require.ErrorContains(t, err, c.want)
			log, err := os.ReadFile(filepath.Join(out, runFolder, logName))
			if err == nil {
				require.NotContains(t, string(log), `"event":"step"`)
			}
		})
	}
}

// TestTrainGGUF checks that --gguf also writes the trained model for llama.cpp.
func TestTrainGGUF(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	stderrOf(t, short(out, "--gguf", "q8_0")...)
	described, err := kasmina(t, "inspect", filepath.Join(out, ggufName))
	require.NoError(t, err)
	require.Contains(t, described, "blk.1.ffn_down.weight")

	// A kill between the two models loses neither of the two.
	stoppedOut := stopped(t, "publish", "config.json", "--gguf", "q8_0")
	stderrOf(t, short(stoppedOut, "--gguf", "q8_0")...)
	want, err := os.ReadFile(filepath.Join(out, ggufName))
	require.NoError(t, err)
	got, err := os.ReadFile(filepath.Join(stoppedOut, ggufName))
	require.NoError(t, err)
	require.Equal(t, len(want), len(got))
}

// TestKeepBest checks that --keep-best saves the model of the best evaluation. Because the learning rate
// is far too high, this is not the last one.
func TestKeepBest(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	stderr := stderrOf(t, short(out, "--keep-best", "--eval-every", "1", "--lr", "5", "--schedule",
		"constant", "--steps", "6")...)
	var b best
	text, err := os.ReadFile(filepath.Join(out, runFolder, bestFigures))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &b))
	require.Less(t, b.Step, 6)
	require.Contains(t, stderr, fmt.Sprintf("best      the model after step %d", b.Step))

	last := filepath.Join(t.TempDir(), "out")
	stderrOf(t, short(last, "--eval-every", "1", "--lr", "5", "--schedule", "constant", "--steps",
		fmt.Sprint(b.Step))...)
	require.Equal(t, trained(t, last), trained(t, out))
}

// TestFullDisk checks that the error of a full disk recommends giving the same command again.
func TestFullDisk(t *testing.T) {
	o := &trainOptions{common: common{out: t.TempDir()}}
	full := fmt.Errorf("writing: %w", syscall.ENOSPC)
	require.ErrorContains(t, o.remedy(full), "give the same command again to continue from the start")
	require.NoError(t, os.MkdirAll(o.in(""), 0o777))
	require.NoError(t, os.WriteFile(o.in(checkpointName), nil, 0o666))
	require.ErrorContains(t, o.remedy(full), "give the same command again to continue from the last checkpoint")
	require.ErrorIs(t, o.remedy(full), syscall.ENOSPC)
	require.NoError(t, o.remedy(nil))
	require.EqualError(t, o.remedy(errors.New("other")), "other")
}

// TestReports checks that train and convert name the saved files and possible next commands.
func TestReports(t *testing.T) {
	out := filepath.Join(t.TempDir(), "my out")
	stderr := stderrOf(t, short(out)...)
	require.Contains(t, stderr, "saved     the model in "+out)
	require.Contains(t, stderr, "next      kasmina generate -m '"+out+"' -p TEXT")
	require.Contains(t, stderr, "kasmina eval -m '"+out+"' -d FILE")
	require.Contains(t, stderr, "settings  adamw, learning rate 0.0001")
	require.Contains(t, stderr, "memory    245.2 KiB for the optimizer's moments")

	copied := filepath.Join(t.TempDir(), "copied")
	stderr = stderrOf(t, "convert", "-m", tiny, "-o", copied)
	require.Contains(t, stderr, "saved     "+copied+" (")
	require.Contains(t, stderr, "next      kasmina generate -m "+copied)

	bare := filepath.Join(t.TempDir(), "bare")
	require.NoError(t, os.CopyFS(bare, os.DirFS(testdata+"/llama2")))
	stderr = stderrOf(t, "convert", "-m", bare, "-o", filepath.Join(t.TempDir(), "x"))
	require.Contains(t, stderr, "tokenizer "+bare+" has none to copy")
	require.NotContains(t, stderr, "next")
	require.Equal(t, `'it'\''s'`, quoted("it's"))
}

// TestFrozen checks that the number of trainable parameters is reported separately with adapters.
func TestFrozen(t *testing.T) {
	stderr := stderrOf(t, short(filepath.Join(t.TempDir(), "out"), "--adapters", "all", "--rank", "2")...)
	f, err := hf.Open(tiny)
	require.NoError(t, err)
	defer f.Close()
	require.Regexp(t, `training [\d,]+ of [\d,]+ parameters \([\d.]+%\)`, stderr)
	require.Contains(t, stderr, "frozen model of 31,392 parameters")
	require.False(t, strings.Contains(stderr, "weight decay 0.1"))
}
