package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBinariesMatchSources(t *testing.T) {
	names, err := units("..")
	require.NoError(t, err)
	require.NotEmpty(t, names)
	for _, name := range names {
		want, err := sourceHash("..", name)
		require.NoError(t, err)
		require.Equal(t, want, binaryHash("..", name))
	}
	fatbins, _ := filepath.Glob("../*/*.fatbin")
	require.Len(t, fatbins, len(names))
}

func TestHashCoversAllThatMatters(t *testing.T) {
	dir := t.TempDir()
	for _, folder := range []string{"family", "include"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, folder), 0o755))
	}
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	hash := func() string {
		h, err := sourceHash(dir, "family/a")
		require.NoError(t, err)
		return string(h)
	}
	write("family/a.cu", "#include \"b.cuh\"\nint a;\n")
	write("family/b.cuh", "#include <stdint.h>\n# include \"c.cuh\"\n")
	write("include/c.cuh", "#pragma once\n")
	first := hash()
	write("family/a.cu", "#include \"b.cuh\"\r\nint a;\r\n")
	require.Equal(t, first, hash(), "line endings count")
	write("family/a.cu", "// a\n#include \"b.cuh\"  // b\n  // c\nint a;\n")
	require.Equal(t, first, hash(), "comments count")
	for _, text := range []string{"int a;  // b \\", `asm("int a;  // b");`} {
		write("family/a.cu", "#include \"b.cuh\"\n"+text+"\n")
		second := hash()
		write("family/a.cu", "#include \"b.cuh\"\n"+strings.Replace(text, "b", "c", 1)+"\n")
		require.NotEqual(t, second, hash(), text)
	}
	write("family/a.cu", "#include \"b.cuh\"\nint a;\n")
	write("include/c.cuh", "#pragma once\nint c;\n")
	require.NotEqual(t, first, hash(), "what an included file includes does not count")
	require.NoError(t, os.Remove(filepath.Join(dir, "include", "c.cuh")))
	if _, err := sourceHash(dir, "family/a"); err == nil {
		t.Error("no error for a missing file")
	}
}
