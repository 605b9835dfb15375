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
