package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// write creates a file with the given lines.
func write(t *testing.T, name string, lines ...any) string {
	t.Helper()
	var b bytes.Buffer
	for _, l := range lines {
		if s, ok := l.(string); ok {
			b.WriteString(s + "\n")
			continue
		}
		line, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(append(line, '\n'))
	}

	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, b.Bytes(), 0o666); err != nil {
		t.Fatal(err)
	}

	return path
}

func TestTable(t *testing.T) {
	ours := write(t, "ours",
		result{Bench: "run", Peer: project, Card: "Card", Driver: "1.2",
			Date: "2026-01-02", Command: "bench"},
		result{Bench: "copy_2GiB", Peer: project, Us: 1000, GBps: 4000},
		result{Bench: "gemm_8192_bf16", Peer: project, Us: 1500, TFLOPs: 700},
		result{Bench: "norm", Peer: project, Us: 100, GBps: 3000},
		result{Bench: "train", Peer: project, Us: 50_000, TFLOPs: 400,
			TokensPS: 500_000, PeakGiB: 10})

	theirs := write(t, "theirs", "",
		result{Bench: "run", Peer: "torch", Card: "Card", Versions: "torch 9"},
		result{Bench: "gemm_8192_bf16", Peer: "cublas", Us: 1400, TFLOPs: 800},
		result{Bench: "norm", Peer: "slow", Us: 9999, GBps: 30},
		result{Bench: "norm", Peer: "quick", Us: 150, GBps: 2000},
		result{Bench: "norm", Peer: "slow", Us: 200, GBps: 1500},
		`{"bench":"train","peer":"compiled","us":55000,"tok_s":450000,"tflops":360,"peak_gib":20.5,"other":1}`,
		result{Bench: "alone", Peer: "quick", Us: 12.3, GBps: 0.5})

	var b strings.Builder
	if err := printTable(&b, []string{ours, theirs}); err != nil {
		t.Fatal(err)
	}

	const head = "| measurement | this project | baselines | ratio to the best baseline | share of the " +
		"ceiling |\n" +
		"| --- | --- | --- | --- | --- |\n"
	const want = "- kasmina: Card, driver 1.2, 2026-01-02, `bench`\n" +
		"- torch: Card, torch 9\n" +
		"\n" + head +
		"| copy_2GiB | 4000 GB/s, 1000 µs | – | – | 100% |\n" +
		"| gemm_8192_bf16 | 700 TFLOP/s, 1500 µs | cublas: 800 TFLOP/s, 1400 µs | 0.93 | 88% |\n" +
		"| norm | 3000 GB/s, 100 µs | quick: 2000 GB/s, 150 µs; slow: 1500 GB/s, 200 µs | 1.50 | 75% |\n" +
		"| alone | – | quick: 0.500 GB/s, 12 µs | – | – |\n" +
		"\n" + head +
		"| train | 500000 tokens/s, 50.0 ms, 10.0 GiB | compiled: 450000 tokens/s, 55.0 ms, 20.5 GiB | 1.10 | 50% |\n"

	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}

func TestTableRefuses(t *testing.T) {
	for name, files := range map[string][]string{
		"no files":    nil,
		"no file":     {filepath.Join(t.TempDir(), "none")},
		"no JSON":     {write(t, "f", result{Bench: "a", Peer: "b"}, "PASS")},
		"no bench":    {write(t, "f", `{"peer":"x","us":1}`)},
		"wrong types": {write(t, "f", `{"bench":"a","peer":"x","us":"1"}`)},
	} {
		if err := printTable(&strings.Builder{}, files); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestOptions(t *testing.T) {
	good := options{models: []string{"llama124M"}, steps: 1}
	if err := good.check(gpuGroups()); err != nil || !good.has("copy") || !good.has("recompute") {
		t.Errorf("the default: %v, groups %v", err, good.groups)
	}

	for name, o := range map[string]options{
		"group": {groups: []string{"copy", "nothing"}, steps: 1},
		"model": {models: []string{"llama124m"}, steps: 1},
		"steps": {},
		"batch": {steps: 1, batch: -1},
	} {
		if err := o.check(gpuGroups()); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// TestTableNeedsRegularFile checks that only regular files are accepted. Reading a pipe could block, and a device
// could be endless.
func TestTableNeedsRegularFile(t *testing.T) {
	for _, path := range []string{t.TempDir(), os.DevNull} {
		_, err := readResults(path)
		require.ErrorContains(t, err, "want a regular file")
	}
}
