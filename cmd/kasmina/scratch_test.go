package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/hf"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// freshSizes describe a new model that trains in a moment.
var freshSizes = []string{"--layers", "2", "--dim", "32", "--heads", "2", "--vocab", "300"}

// fresh returns the arguments of a short run from scratch.
func fresh(t *testing.T, out string, more ...string) []string {
	return slices.Concat([]string{"train", "--data", license, "--out", out, "--cache", t.TempDir(),
		"--batch", "2", "--seq", "16", "--device", "cpu"}, freshSizes, more)
}

// TestTrainFromScratch checks that a new model learns, grows on request, and can be loaded together
// with its tokenizer.
func TestTrainFromScratch(t *testing.T) {
	for _, grow := range []string{"0", "2"} {
		out := filepath.Join(t.TempDir(), "out")
		_, err := kasmina(t, fresh(t, out, "--steps", "150", "--grow", grow, "--monitor", "5")...)
		require.NoError(t, err)

		f, err := hf.Open(out)
		require.NoError(t, err)
		require.Equal(t, "llama", f.Family)
		require.Equal(t, 32, f.Config.Dim)
		require.Equal(t, 320, f.Config.Vocab)
		tok, err := tokenizers.Load(out)
		require.NoError(t, err)
		require.Equal(t, 300, tok.VocabSize())
		require.Equal(t, []int{tok.EndOfDocument()}, f.Generation.End)
		require.NoError(t, f.Close())

		log, err := os.ReadFile(filepath.Join(out, "run", logName))
		require.NoError(t, err)
		grew := bytes.Contains(log, []byte("1 blocks to 2"))
		require.Equal(t, grow == "2", grew)
		require.Equal(t, !grew || !bytes.Contains(log, []byte("taken back")), f.Config.Layers == 2)

		result, err := kasmina(t, "eval", "--model", out, "--data", license, "--seq", "16", "--device",
			"cpu")
		require.NoError(t, err)
		var s score
		require.NoError(t, json.Unmarshal([]byte(result), &s))
		require.Less(t, s.Loss, 4.8) // a uniform distribution over 300 tokens has 5.7
		_, err = kasmina(t, "generate", "--model", out, "--prompt", "Permission", "-n", "3")
		require.NoError(t, err)
	}
}

// TestScratchContinues checks that a run from scratch produces the same bits if it is interrupted and
// continued, and if two processes share it.
func TestScratchContinues(t *testing.T) {
	dir := t.TempDir()
	alone, interrupted := filepath.Join(dir, "alone"), filepath.Join(dir, "interrupted")
	more := []string{"--steps", "30", "--accumulate", "2", "--optimizer", "muon"}
	_, err := kasmina(t, fresh(t, alone, more...)...)
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	args := fresh(t, interrupted, more...)
	err = run(ctx, args, &bytes.Buffer{}, writer(func(p []byte) {
		if bytes.Contains(p, []byte("loss")) {
			cancel()
		}
	}))
	require.ErrorIs(t, err, context.Canceled)
	_, err = kasmina(t, args...)
	require.NoError(t, err)
	sameRun(t, alone, interrupted)

	together := filepath.Join(dir, "together")
	out, err := program(t, nil, fresh(t, together, append(more, "--gpus", "2")...)...).CombinedOutput()
	require.NoError(t, err, string(out))
	sameRun(t, alone, together)
}

// TestScratchNeedsItsTokenizer checks that a run does not continue without its tokenizer.
func TestScratchNeedsItsTokenizer(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	args := fresh(t, out, "--steps", "30")
	ctx, cancel := context.WithCancel(t.Context())
	err := run(ctx, args, &bytes.Buffer{}, writer(func(p []byte) {
		if bytes.Contains(p, []byte("loss")) {
			cancel()
		}
	}))
	require.ErrorIs(t, err, context.Canceled)

	require.NoError(t, os.RemoveAll(filepath.Join(out, runFolder, tokenizerFolder)))
	_, err = kasmina(t, args...)
	require.ErrorContains(t, err, "cannot continue without its tokenizer")
}

// TestSuppliedTokenizer trains a new model with the tokenizer of a folder, and with a tokenizer file.
func TestSuppliedTokenizer(t *testing.T) {
	for _, path := range []string{tiny, filepath.Join(tiny, "tokenizer.json")} {
		out := filepath.Join(t.TempDir(), "out")
		_, err := kasmina(t, "train", "--layers", "1", "--dim", "32", "--heads", "2", "--tokenizer", path,
			"--data", license, "--out", out, "--cache", t.TempDir(), "--steps", "2", "--batch", "1", "--seq",
			"16", "--device", "cpu", "--documents="+strconv.FormatBool(path == tiny))
		require.NoError(t, err)

		want, err := os.ReadFile(filepath.Join(tiny, "tokenizer.json"))
		require.NoError(t, err)
		got, err := os.ReadFile(filepath.Join(out, "tokenizer.json"))
		require.NoError(t, err)
		require.Equal(t, want, got)
		_, err = os.Stat(filepath.Join(out, "tokenizer_config.json"))
		require.Equal(t, path == tiny, err == nil)
	}
}

// TestPresets checks that a preset fills in every option of a new model, and that options on the
// command line override it.
func TestPresets(t *testing.T) {
	for _, name := range presetNames {
		var o trainOptions
		c := newTrainOf(&o)
		require.NoError(t, c.ParseFlags([]string{"--preset", name, "--data", license, "--out", "x",
			"--heads", "8", "--lr", "0.5"}))
		require.NoError(t, o.resolve(c))
		o.lr = max(o.lr, o.learning.rate())
		require.NoError(t, o.check())
		require.Equal(t, 8, o.scratch.sizes.Heads)
		require.Equal(t, name != defaultPreset, o.scratch.meantForGPU())
		require.Equal(t, 0.5, o.lr)
		for option := range presets[name] {
			if option != "heads" && option != "lr" {
				require.Equal(t, presets[name][option], c.Flags().Lookup(option).Value.String(), option)
			}
		}
	}
}

// TestBadSizes checks that errors about impossible sizes name the option and come before anything is
// written.
func TestBadSizes(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	for line, want := range map[string]string{
		"--preset 1T":                              `--preset is "1T", want one of small, 124M, 350M, 925M`,
		"--preset small --layers 0":                "--layers is 0, want at least 1",
		"--layers 2 --dim -1":                      "--dim is -1, want at least 1",
		"--layers 2 --dim 30 --heads 4":            "--dim is 30, want a multiple of 8",
		"--layers 2 --heads 4 --kv-heads 3":        "--kv-heads is 3, want a divisor of --heads, 4",
		"--layers 3 --grow 2":                      "--grow is 2, want a divisor of --layers, 3",
		"--preset small --vocab 256":               "--vocab is 256, want 257 to 1048576",
		"--preset small --vocab 300 --tokenizer x": "[tokenizer vocab] were all set",
		"--preset small --tokenizer none":          "no such file",
		"--preset small --documents --tokenizer " + tiny + "/tokenizer.json": "--documents needs a tokenizer with",
		"--preset small --clip -1":       "--clip is -1",
		"--preset small --optimizer sgd": `--optimizer: optimizer "sgd" is not known`,
		"--preset small --held-out 1":    "--held-out is 1",
		"--preset small --monitor 1":     "--monitor is 1",
		"--preset small --max-bytes -1":  "--max-bytes is -1",
	} {
		_, err := kasmina(t, append([]string{"train", "--data", license, "--out", out, "--device", "cpu",
			"--cache", t.TempDir()}, strings.Fields(line)...)...)
		require.ErrorContains(t, err, want, line)
		require.NoFileExists(t, filepath.Join(out, runFolder, manifestName), line)
	}
}
