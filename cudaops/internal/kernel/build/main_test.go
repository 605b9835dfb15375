package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBinariesMatchSources(t *testing.T) {
	names, err := units("..")
	if err != nil || len(names) == 0 {
		t.Fatalf("units: %v, %v", names, err)
	}
	for _, name := range names {
		want, err := sourceHash("..", name, allTargets)
		require.NoError(t, err)
		if !bytes.Equal(binaryHash("..", name), want) {
			t.Errorf("%s.fatbin was not made from these sources for all GPUs: run go generate "+
				"./cudaops/internal/kernel", name)
		}
	}
	fatbins, _ := filepath.Glob("../*/*.fatbin")
	if len(fatbins) != len(names) {
		t.Errorf("%d .fatbin files for %d .cu files", len(fatbins), len(names))
	}
}

func TestHashCoversAllThatMatters(t *testing.T) {
	dir := t.TempDir()
	for _, folder := range []string{"family", "include"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, folder), 0o755))
	}
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	hash := func(targets string) string {
		h, err := sourceHash(dir, "family/a", targets)
		require.NoError(t, err)
		return string(h)
	}
	write("family/a.cu", "#include \"b.cuh\"\nint a;\n")
	write("family/b.cuh", "#include <stdint.h>\n# include \"c.cuh\"\n")
	write("include/c.cuh", "#pragma once\n")
	first := hash("sm_80")
	if hash("sm_90a") == first {
		t.Error("the targets do not count")
	}
	write("family/a.cu", "#include \"b.cuh\"\r\nint a;\r\n")
	if hash("sm_80") != first {
		t.Error("line endings count")
	}
	write("include/c.cuh", "#pragma once\nint c;\n")
	if hash("sm_80") == first {
		t.Error("what an included file includes does not count")
	}
	require.NoError(t, os.Remove(filepath.Join(dir, "include", "c.cuh")))
	if _, err := sourceHash(dir, "family/a", "sm_80"); err == nil {
		t.Error("no error for a missing file")
	}
}
