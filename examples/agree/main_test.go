package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops"
)

// torchLosses are what torch_agree.py has written for the small model's run.
const torchLosses = "losses.torch-cpu-f32.json"

// written returns the folder of a fresh run of the small model, with PyTorch's losses.
func written(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := run([]string{"write", dir}, io.Discard); err != nil {
		t.Fatal(err)
	}
	losses, err := os.ReadFile(filepath.Join("testdata", torchLosses))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, torchLosses), losses, 0o666); err != nil {
		t.Fatal(err)
	}
	return dir
}

// agree trains and wants losses within 1e-4 of PyTorch's at every step.
func agree(t *testing.T, device string) {
	t.Helper()
	dir := written(t)
	if err := run([]string{"train", "-device", device, dir}, io.Discard); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := run([]string{"compare", "-tolerance", "1e-4", dir}, &out); err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
}

func TestCPUAgreesWithPyTorch(t *testing.T) { agree(t, "cpu") }

func TestGPUAgreesWithPyTorch(t *testing.T) {
	d, err := cudaops.Open()
	if errors.Is(err, cudaops.ErrNoDevice) {
		t.Skip("needs an NVIDIA GPU: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	agree(t, "cuda")
}

func TestCompare(t *testing.T) {
	for name, c := range map[string]struct {
		a, b, tolerance, says string
	}{
		"within":    {"[2, 1]", "[2, 1.001]", "2e-3", ""},
		"beyond":    {"[2, 1]", "[2, 1.001]", "1e-4", "step 2"},
		"length":    {"[2, 1]", "[2]", "1", "has 1 losses"},
		"no number": {"[2, 1]", `["NaN"]`, "1", "losses.b.json"},
	} {
		dir := t.TempDir()
		for file, text := range map[string]string{"losses.a.json": c.a, "losses.b.json": c.b} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		err := run([]string{"compare", "-tolerance", c.tolerance, dir}, io.Discard)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want an error that says %q", name, err, c.says)
		}
	}
}

func TestRefusals(t *testing.T) {
	dir := written(t)
	for name, args := range map[string][]string{
		"nothing":   nil,
		"command":   {"walk", dir},
		"no folder": {"train"},
		"model":     {"write", "-model", "huge", dir},
		"steps":     {"write", "-steps", "-1", dir},
		"precision": {"train", "-precision", "f8", dir},
		"no run":    {"train", t.TempDir()},
		"one file":  {"compare", dir},
	} {
		if err := run(args, io.Discard); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := os.Truncate(filepath.Join(dir, tokenFile), 100); err != nil {
		t.Fatal(err)
	}
	if err := run([]string{"train", dir}, io.Discard); err == nil || !strings.Contains(err.Error(), tokenFile) {
		t.Errorf("tokens are missing: %v", err)
	}
}
