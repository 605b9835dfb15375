package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDataCheck checks files with and without problems.
func TestDataCheck(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data.jsonl")
	write := func(lines ...string) {
		require.NoError(t, os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o666))
	}
	check := func(args ...string) (string, checked, error) {
		out, err := kasmina(t, append([]string{"data", "check", path, "--model", tiny}, args...)...)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		var last checked
		if lines[len(lines)-1] != "" {
			require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &last))
		}
		return out, last, err
	}

	write(`{"prompt": "Permission is ", "completion": "granted"}`, `{"text": "The Software"}`)
	out, last, err := check()
	require.NoError(t, err)
	require.Contains(t, out, "Permission is ⟦granted")
	require.Equal(t, 2, last.Examples)
	require.Equal(t, 1, last.Rows)
	require.Less(t, last.Learned, last.Tokens)

	_, last, err = check("--seq", "2")
	require.ErrorContains(t, err, "2 problems")
	require.Equal(t, 2, last.Problems)

	write(`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}`)
	out, _, err = check()
	require.ErrorContains(t, err, "1 problem")
	require.Contains(t, out, "without a token at which the model stops")
	require.Contains(t, out, path+":1: ")

	write()
	out, _, err = check()
	require.ErrorContains(t, err, "1 problem")
	require.Contains(t, out, "the file has no examples")

	_, _, err = check("--show", "-1")
	require.ErrorContains(t, err, "must not be negative")
	_, err = kasmina(t, "data", "check", filepath.Join(t.TempDir(), "none"), "--model", tiny)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestParquetCommands checks that the commands give a parquet file the results of a file of JSON Lines with the same
// examples, and that problems name its rows.
func TestParquetCommands(t *testing.T) {
	folder := filepath.Join("..", "..", "llm", "chatdata", "testdata", "parquet")
	lines, table := filepath.Join(folder, "completions.jsonl"), filepath.Join(folder, "completions.parquet")

	want, err := kasmina(t, "data", "check", lines, "--model", tiny)
	require.NoError(t, err)
	have, err := kasmina(t, "data", "check", table, "--model", tiny)
	require.NoError(t, err)
	require.Contains(t, have, table+", row 1 (")
	places := strings.NewReplacer(table+", row ", "FILE ", lines+":", "FILE ", "to row ", "to ", "to line ", "to ")
	require.Equal(t, places.Replace(want), places.Replace(have))

	tune := func(path string) ([]byte, tuned) {
		dir := filepath.Join(t.TempDir(), "out")
		out, err := kasmina(t, finetuneArgs(path, dir, "--keep", path, "--forget", "10", "--steps", "4")...)
		require.NoError(t, err)
		adapter, err := os.ReadFile(filepath.Join(dir, "adapter_model.safetensors"))
		require.NoError(t, err)
		return adapter, lastLine(t, out)
	}
	adapter, result := tune(lines)
	adapter2, result2 := tune(table)
	require.Equal(t, adapter, adapter2)
	require.Equal(t, *result.ValLoss, *result2.ValLoss)
	require.Equal(t, *result.KeepLoss, *result2.KeepLoss)

	out := filepath.Join(t.TempDir(), "out")
	bad := filepath.Join(folder, "bytes.parquet")
	_, err = kasmina(t, finetuneArgs(bad, out)...)
	require.ErrorContains(t, err, bad+`, row 2: the column "text" has bytes that are not UTF-8`)
	require.ErrorContains(t, err, "3 problems, and nothing was trained")
	_, err = kasmina(t, finetuneArgs(writeTuning(t, 10), out, "--keep", bad)...)
	require.ErrorContains(t, err, "--keep: "+bad+" has 3 problems")
	require.NoDirExists(t, out)
}
