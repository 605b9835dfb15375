package main

import (
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops"
)

// torchLosses is the file of losses that torch_agree.py has written for the small model.
const torchLosses = "losses.torch-cpu-f32.json"

// written returns the folder of a fresh run of the small model, with PyTorch's losses.
func written(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := run([]string{"write", dir}, io.Discard, io.Discard); err != nil {
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

// agree trains on a device and checks that the losses of all steps are within 1e-4 of PyTorch's.
func agree(t *testing.T, device string) {
	t.Helper()
	dir := written(t)
	if err := run([]string{"train", "-device", device, dir}, io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := run([]string{"compare", "-tolerance", "1e-4", dir}, &out, io.Discard); err != nil {
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
		a, b, tolerance, want string
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
		err := run([]string{"compare", "-tolerance", c.tolerance, dir}, io.Discard, io.Discard)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error containing %q", name, err, c.want)
		}
	}
}

// TestNoise compares two programs that differ by 0.1, in runs that differ by 0.5 or by 0.05.
func TestNoise(t *testing.T) {
	for distance, want := range map[string]string{"0.5": "", "0.05": "step 2"} {
		var dirs []string
		for run := range 3 {
			dir := t.TempDir()
			dirs = append(dirs, dir)
			for program, offset := range map[string]float64{"a": 0, "b": 0.1} {
				first := 4 + offset
				if run > 0 {
					d, err := strconv.ParseFloat(distance, 64)
					if err != nil {
						t.Fatal(err)
					}
					first += d * float64(run-1)
				}
				if err := writeJSON(filepath.Join(dir, lossPrefix+program+".json"),
					[]float64{first - 1, first + 1, 3}); err != nil {
					t.Fatal(err)
				}
			}
		}
		var out strings.Builder
		err := run(append([]string{"noise", "-span", "2"}, dirs...), &out, io.Discard)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("runs that differ by %s: %v, want an error containing %q\n%s", distance,
				err, want, out.String())
		}
		if !strings.Contains(out.String(), "0.10000") {
			t.Errorf("runs that differ by %s: no difference of 0.1 in\n%s", distance, out.String())
		}
	}
}

// TestWriteText checks that a run's tokens are windows of the text, and that the seed determines their
// order.
func TestWriteText(t *testing.T) {
	text := strings.Repeat("the quick brown fox jumps over the lazy dog; ", 200)
	folder := t.TempDir()
	for _, name := range []string{"a.txt", "b.txt"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(name+text), 0o666); err != nil {
			t.Fatal(err)
		}
	}

	var orders []string
	for _, seed := range []string{"1", "2"} {
		dir := t.TempDir()
		if err := run([]string{"write", "-text", folder, "-seed", seed, "-steps", "3", dir},
			io.Discard, io.Discard); err != nil {
			t.Fatal(err)
		}
		var s settings
		if err := readJSON(filepath.Join(dir, settingsFile), &s); err != nil {
			t.Fatal(err)
		}
		all, err := batches(dir, s)
		if err != nil {
			t.Fatal(err)
		}
		var order strings.Builder
		for _, b := range all {
			for row := range s.Batch {
				at := row * s.Model.Seq
				var window []byte
				for _, id := range append(b.Inputs[at:at+s.Model.Seq:at+s.Model.Seq],
					b.Targets[at+s.Model.Seq-1]) {
					window = append(window, byte(id))
				}
				if !strings.Contains("a.txt"+text+"\x00b.txt"+text+"\x00a.txt"+
					text, string(window)) {
					t.Fatalf("seed %s: %q is no window of the text", seed, window)
				}
				order.Write(window)
			}
		}
		orders = append(orders, order.String())
	}

	if orders[0] == orders[1] {
		t.Error("two seeds give the same order")
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
		"precision": {"train", "-precision", "f4", dir},
		"gradients": {"train", "-grad-precision", "bf16", dir},
		"no run":    {"train", t.TempDir()},
		"one file":  {"compare", dir},
		"one run":   {"noise", dir},
		"span":      {"noise", "-span", "0", dir, dir},
		"no text":   {"write", "-text", filepath.Join(dir, "none"), dir},
		"rate":      {"write", "-rate", "-1", dir},
	} {
		if err := run(args, io.Discard, io.Discard); err == nil {
			t.Errorf("%s: no error", name)
		}
	}

	for want, args := range map[string][]string{
		`unknown command "walk"`:           {"walk", dir},
		"is an option":                     {"-steps", "3", dir},
		"got 2 arguments":                  {"train", dir, dir},
		"agree write " + dir + "x creates": {"train", dir + "x"},
	} {
		if err := run(args, io.Discard, io.Discard); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v: got %v, want %q", args, err, want)
		}
	}

	for _, args := range [][]string{{"-help"}, {"write", "-help"}} {
		var help strings.Builder
		if err := run(args, io.Discard, &help); err != flag.ErrHelp ||
			!strings.Contains(help.String(), "agree noise [options] FOLDER") {
			t.Errorf("%v: %v\n%s", args, err, help.String())
		}
	}

	stale := filepath.Join(dir, lossPrefix+"a.json")
	if err := os.WriteFile(stale, []byte("[1]"), 0o666); err != nil {
		t.Fatal(err)
	}

	if err := run([]string{"write", "-text", filepath.Join(dir, "none"), dir}, io.Discard,
		io.Discard); err == nil {
		t.Error("a missing text is accepted")
	}

	if _, err := os.Stat(stale); err != nil {
		t.Errorf("a failed write has removed the losses of the previous run: %v", err)
	}

	if err := run([]string{"write", dir}, io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}

	if _, err := os.Stat(stale); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the losses of the previous run still exist: %v", err)
	}

	if err := os.Truncate(filepath.Join(dir, tokenFile), 100); err != nil {
		t.Fatal(err)
	}

	if err := run([]string{"train", dir}, io.Discard, io.Discard); err == nil ||
		!strings.Contains(err.Error(), tokenFile) {
		t.Errorf("tokens are missing: %v", err)
	}
}
