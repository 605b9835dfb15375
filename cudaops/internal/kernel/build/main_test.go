package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestBinariesMatchSources(t *testing.T) {
	names, err := units("..")
	if err != nil || len(names) == 0 {
		t.Fatalf("units: %v, %v", names, err)
	}
	for _, name := range names {
		want, err := sourceHash("..", name, allTargets)
		if err != nil {
			t.Fatal(err)
		}
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
		if err := os.Mkdir(filepath.Join(dir, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	hash := func(targets string) string {
		h, err := sourceHash(dir, "family/a", targets)
		if err != nil {
			t.Fatal(err)
		}
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
	if err := os.Remove(filepath.Join(dir, "include", "c.cuh")); err != nil {
		t.Fatal(err)
	}
	if _, err := sourceHash(dir, "family/a", "sm_80"); err == nil {
		t.Error("no error for a missing file")
	}
}
