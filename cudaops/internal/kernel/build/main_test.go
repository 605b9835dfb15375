package main

import (
	"crypto/sha256"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/fatbin"
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

// TestSignaturesMatchBinaries checks that signatures.txt is up to date, and that the machine code
// for every architecture fits it.
func TestSignaturesMatchBinaries(t *testing.T) {
	names, err := units("..")
	require.NoError(t, err)
	var want fatbin.Table
	text, err := os.ReadFile(filepath.Join("..", signatures))
	require.NoError(t, err)
	require.NoError(t, want.UnmarshalText(text))

	got := fatbin.Table{}
	for _, name := range names {
		binary, err := os.ReadFile(filepath.Join("..", name+".fatbin"))
		require.NoError(t, err)
		kernels, err := fatbin.Signatures(binary)
		require.NoError(t, err)
		maps.Copy(got, kernels)
		for _, capability := range []int{80, 89, 90, 100} {
			layouts, err := fatbin.Layouts(binary, capability)
			require.NoError(t, err)
			require.Len(t, layouts, len(kernels), name)
			for kernel, layout := range layouts {
				_, err := want[kernel].Of(layout)
				require.NoError(t, err, "%s for compute capability %d", kernel, capability)
			}
		}
	}

	require.Equal(t, want, got)
}

func TestSourceHash(t *testing.T) {
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
	require.Equal(t, first, hash(), "line endings must not matter")
	write("family/a.cu", "// a\n#include \"b.cuh\"  // b\n  // c\nint a;\n")
	require.Equal(t, first, hash(), "comments must not matter")
	for _, text := range []string{"int a;  // b \\", `asm("int a;  // b");`} {
		write("family/a.cu", "#include \"b.cuh\"\n"+text+"\n")
		second := hash()
		write("family/a.cu", "#include \"b.cuh\"\n"+strings.Replace(text, "b", "c", 1)+"\n")
		require.NotEqual(t, second, hash(), text)
	}

	write("family/a.cu", "#include \"b.cuh\"\nint a;\n")
	write("include/c.cuh", "#pragma once\nint c;\n")
	require.NotEqual(t, first, hash(), "headers of headers must matter")
	require.NoError(t, os.Remove(filepath.Join(dir, "include", "c.cuh")))
	if _, err := sourceHash(dir, "family/a"); err == nil {
		t.Error("no error for a missing file")
	}
}

// TestBuild checks that build compiles changed units only, only once, and only with the right
// version of the compiler.
func TestBuild(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("the compiler here is a script for sh")
	}

	dir, home := t.TempDir(), t.TempDir()
	for _, folder := range []string{filepath.Join(dir, "family"), filepath.Join(home, "bin")} {
		require.NoError(t, os.Mkdir(folder, 0o755))
	}

	require.NoError(t, os.WriteFile(filepath.Join(dir, "family", "a.cu"), []byte("int a;"), 0o644))
	t.Setenv("CUDA_HOME", home)
	compilerSays := func(release, then string) {
		require.NoError(t, os.WriteFile(filepath.Join(home, "bin", "nvcc"), []byte("#!/bin/sh\n"+
			`[ "$1" = --version ] && echo "release `+release+`, V" && exit`+"\n"+then+"\n"), 0o755))
	}
	require.ErrorContains(t, build(dir), "nvcc is not nvcc from CUDA 13.0")
	compilerSays("12.4", "")
	require.ErrorContains(t, build(dir), "12.4")
	compilerSays("13.0", "exit 3")
	require.ErrorContains(t, build(dir), "a.cu: exit status 3")
	image, err := os.ReadFile(filepath.Join("..", "gemm", "gemm_symmetric.fatbin"))
	require.NoError(t, err)
	compiled := filepath.Join(home, "compiled")
	require.NoError(t, os.WriteFile(compiled, image[:len(image)-sha256.Size], 0o644))
	compilerSays("13.0", `cp "`+compiled+`" "$3"`) // the file named by -fatbin -o
	require.NoError(t, build(dir))
	text, err := os.ReadFile(filepath.Join(dir, signatures))
	require.NoError(t, err)
	require.Contains(t, string(text), "gemm_symmetric")
	want, err := sourceHash(dir, "family/a")
	require.NoError(t, err)
	require.Equal(t, want, binaryHash(dir, "family/a"))
	compilerSays("13.0", "exit 3")
	require.NoError(t, build(dir))
}
