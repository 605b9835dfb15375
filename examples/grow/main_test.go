package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"image/png"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/seedtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

func textFile(t *testing.T) string {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	var text strings.Builder
	for range 4000 {
		text.WriteString([]string{"func ", "return ", "if err != nil {\n", "}\n", "x := y\n"}[r.IntN(5)])
	}
	dir := t.TempDir()
	for i := range 4 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i, ".txt")), []byte(text.String()[i*4000:][:4000]), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestRun(t *testing.T) {
	for _, dry := range []bool{false, true} {
		out := filepath.Join(t.TempDir(), "out")
		var stdout, stderr bytes.Buffer
		args := []string{"-device", "cpu", "-data", textFile(t), "-out", out, "-steps", "200", "-layers", "2", "-dim", "16", "-heads", "2", "-seq", "16",
			"-batch", "2", "-seeds", "2", "-rank", "4", fmt.Sprint("-dry-run=", dry)}
		if err := run(context.Background(), args, &stdout, &stderr); err != nil {
			t.Fatalf("%v\n%s", err, stderr.String())
		}
		lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
		var results []comparison
		if err := json.Unmarshal([]byte(lines[len(lines)-1]), &results); err != nil {
			t.Fatal(err)
		}
		c, told := results[0], stderr.String()
		if len(results) != 1 || !(c.Plain.Loss > 0 && c.Plain.Loss < 4) || !(c.Grown.Loss > 0 && c.Grown.Loss < 4) {
			t.Errorf("results %+v", results)
		}
		if dry && (c.Grown.Loss != c.Plain.Loss || c.Grown.Parameters != c.Plain.Parameters || !strings.Contains(told, "would do: layer")) {
			t.Errorf("a dry run gives %+v\n%s", c, told)
		}
		if !dry && (!strings.Contains(told, "Training → Grafting") || !strings.Contains(told, "Evaluating → ")) {
			t.Errorf("nothing grows:\n%s", told)
		}
		picture, err := os.Open(filepath.Join(out, "lattice-1.png"))
		if err != nil {
			t.Fatal(err)
		}
		defer picture.Close()
		if _, err := png.Decode(picture); err != nil {
			t.Error(err)
		}
		if _, err := llm.LoadModel(context.Background(), filepath.Join(out,
			"grown-1.safetensors")); err != nil {
			t.Error(err)
		}
	}
}

// tiny are options of a model that trains in no time, for so many steps.
func tiny(t *testing.T, out string, steps int) []string {
	return []string{"-device", "cpu", "-data", textFile(t), "-out", out, "-steps", fmt.Sprint(steps),
		"-layers", "1", "-dim", "8", "-heads", "2", "-seq", "8", "-batch", "1", "-seeds", "2",
		"-rank", "4"}
}

// TestShortestRun wants a run in which no blueprint can be fossilized to be refused with the steps
// that this takes, and one of so many to go through.
func TestShortestRun(t *testing.T) {
	const least = 32
	for _, steps := range []int{1, least - 1, least} {
		err := run(t.Context(), tiny(t, t.TempDir(), steps), io.Discard, io.Discard)
		if steps == least {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, fmt.Sprintf("plan at least %d steps", least))
		}
	}
}

// TestShortPicture wants a picture of a run that is shorter than an epoch too. In a dry run nothing
// grows, so it may be as short as that.
func TestShortPicture(t *testing.T) {
	out := t.TempDir()
	args := append(tiny(t, out, 1), "-dry-run")
	require.NoError(t, run(t.Context(), args, io.Discard, io.Discard))
	require.FileExists(t, filepath.Join(out, "lattice-1.png"))
}

// TestScrub wants damage to a seed to be told and logged before it ends the run.
func TestScrub(t *testing.T) {
	const damage = "layer 0: seed state is corrupt: seed 1 does not match its checksum: bit 3 of alpha"
	out := t.TempDir()
	o, err := parse(append(tiny(t, out, 32), "-scrub", "1h"), io.Discard)
	require.NoError(t, err)
	text, err := openText(t.Context(), o)
	require.NoError(t, err)
	tr, err := newTrainer(o, text, nil, o.seed, true)
	require.NoError(t, err)
	defer tr.Close()
	var told strings.Builder
	addCallbacks(tr, o, o.seed, true, &told)
	seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(0), 1)
	require.ErrorIs(t, tr.Run(t.Context()), state.ErrCorrupt)
	require.Contains(t, told.String(), "corrupt   "+damage)
	log, err := os.ReadFile(filepath.Join(out, "grown-1.jsonl"))
	require.NoError(t, err)
	require.Regexp(t, `"event":"corrupt","step":1,.*"error":"`+damage, string(log))
}

func TestBadOptions(t *testing.T) {
	for want, args := range map[string][]string{
		`"x" is not an option`:     {"x"},
		"-runs is 0":               {"-runs", "0"},
		"-rank is -1":              {"-rank", "-1"},
		"-scrub is -1s":            {"-scrub", "-1s"},
		"-steps is 0":              {"-steps", "0"},
		"a divisor of -dim":        {"-seeds", "5", "-dim", "16"},
		"-device is":               {"-device", "tpu"},
		"flag provided but not de": {"-fast"},
	} {
		err := run(context.Background(), append(args, "-out", t.TempDir()), &bytes.Buffer{}, &bytes.Buffer{})
		if want == `"x" is not an option` {
			err = run(context.Background(), args, &bytes.Buffer{}, &bytes.Buffer{})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: got %v, want %q", args, err, want)
		}
	}
	if err := run(context.Background(), []string{"-h"}, &bytes.Buffer{}, &bytes.Buffer{}); err != flag.ErrHelp {
		t.Errorf("got %v", err)
	}
}
