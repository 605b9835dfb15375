package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// tool runs the command on a store and returns what it prints.
func tool(t *testing.T, args ...string) string {
	t.Helper()
	var out, errs bytes.Buffer
	require.NoError(t, run(args, &out, &errs), "%v, %v", args, errs.String())
	return out.String()
}

func TestCommands(t *testing.T) {
	dir := t.TempDir()
	exported, store, other := filepath.Join(dir, "in.json"), filepath.Join(dir, "a.json"),
		filepath.Join(dir, "b.json")
	const content = `{"Card, RMSNorm 4x4": {"way": "warp-4", "cold_ns": 2500, "warm_ns": 1500}, "Card, Attention": {"way": "mma"}}`
	require.NoError(t, os.WriteFile(exported, []byte(content), 0o644))
	require.Equal(t, "2 choices added\n", tool(t, "-store", store, "import", exported))
	listed := tool(t, "-store", store, "list")
	if strings.Count(listed, "\n") != 2 || !strings.Contains(listed, "warp-4") || !strings.Contains(listed, "2.5µs") {
		t.Errorf("list: %q", listed)
	}
	again := filepath.Join(dir, "out.json")
	require.NoError(t, os.WriteFile(again, []byte(tool(t, "-store", store, "-match", "RMSNorm", "export")), 0o644))
	tool(t, "-store", other, "import", again)
	if got := tool(t, "-store", other, "list"); strings.Count(got, "\n") != 1 || !strings.Contains(listed, got) {
		t.Errorf("exported, imported and listed: %q", got)
	}
	require.Equal(t, "1 choices added\n",
		tool(t, "-store", filepath.Join(dir, "c.json"), "-match", "RMSNorm", "import", exported))
	require.Equal(t, "none of the 2 choices that are stored matches\n",
		tool(t, "-store", store, "-match", "Linear", "list"))
	require.Equal(t, "1 choices cleared\n", tool(t, "-store", store, "-match", "RMSNorm", "clear"))
	if got := tool(t, "-store", store, "list"); strings.Contains(got, "RMSNorm") || !strings.Contains(got, "Attention") {
		t.Errorf("after clear: %q", got)
	}
}

func TestRefused(t *testing.T) {
	store := filepath.Join(t.TempDir(), "a.json")
	for _, args := range [][]string{{}, {"sort"}, {"list", "export"}, {"list", "-match", "x"}, {"import"}, {"import", store}} {
		var out, errs bytes.Buffer
		require.Error(t, run(append([]string{"-store", store}, args...), &out, &errs), args)
	}
}
