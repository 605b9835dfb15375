package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/opbench"
)

// here returns the first line of a run on a card.
func here(card string) result { return result{Bench: whereabouts, Peer: project, Card: card} }

// TestAgainst checks that everything more than 3% slower is named, starting with the slowest, and that
// the fastest of several measurements counts.
func TestAgainst(t *testing.T) {
	before, err := readEarlier(write(t, "before", here("C"),
		result{Bench: "norm", Peer: project, Us: 100},
		result{Bench: "train", Peer: project, Us: 50_000},
		result{Bench: "train", Peer: project + "_bf16", Us: 30_000},
		result{Bench: "gone", Peer: project, Us: 1},
		result{Bench: "peak", Peer: project, TFLOPs: 1},
		result{Bench: "norm", Peer: "gorgonia", Us: 10},
		here("C"), result{Bench: "norm", Peer: project, Us: 120}))

	require.NoError(t, err)
	require.NoError(t, before.fits(here("C")))
	require.NoError(t, (*earlier)(nil).fits(here("C")), "without -against any machine will do")

	var b strings.Builder
	now := []result{here("C"), {Bench: "norm", Peer: project, Us: 102.9},
		{Bench: "norm", Peer: project, Us: 200},
		{Bench: "train", Peer: project, Us: 51_000},
		{Bench: "train", Peer: project + "_bf16", Us: 20_000},
		{Bench: "peak", Peer: project, TFLOPs: 0.5}, {Bench: "norm", Peer: "gorgonia", Us: 1000}}
	require.NoError(t, before.compare(&b, now))
	require.Contains(t, b.String(), "3 compared with")
	require.Contains(t, b.String(), ", 0 slower by more than 3%, 1 not in both")

	b.Reset()
	err = before.compare(&b, append(now[:0:0], result{Bench: "norm", Peer: project, Us: 103.1},
		result{Bench: "train", Peer: project, Us: 60_000},
		result{Bench: "train", Peer: project + "_bf16", Us: 30_000}))
	require.EqualError(t, err, "slower than before: train, norm")
	require.Contains(t, b.String(),
		"| what | before | now | slower by |\n| --- | --- | --- | --- |\n"+
			"| train | 50000.0 µs | 60000.0 µs | 20.0% |\n| norm | 100.0 µs | 103.1 µs | 3.1% |\n")
	require.NotContains(t, b.String(), "train_bf16")
}

// TestAgainstRefuses checks that files without measurements of this machine are rejected.
func TestAgainstRefuses(t *testing.T) {
	norm := result{Bench: "norm", Peer: project, Us: 100}
	for name, file := range map[string]string{
		"no such file":              filepath.Join(t.TempDir(), "none"),
		"line 1":                    write(t, "f", "PASS"),
		"no line names the machine": write(t, "f", norm),
		"runs on A and on B":        write(t, "f", here("A"), norm, here("B"), norm),
		"no line names the machine: want": write(t, "f",
			result{Bench: whereabouts, Peer: "torch", Card: "A"}, norm),
	} {
		_, err := readEarlier(file)
		require.ErrorContains(t, err, name)
	}

	e, err := readEarlier(write(t, "f", here("NVIDIA H200"), norm))
	require.NoError(t, err)
	require.ErrorContains(t, e.fits(here("NVIDIA H100")),
		"measured on NVIDIA H200, but this is NVIDIA H100")
	require.ErrorContains(t, e.compare(&strings.Builder{},
		[]result{here("NVIDIA H200"), {Bench: "other", Peer: project, Us: 1}}),
		"shares no measurement with this run")
}

// TestRunRefuses checks that the file of another machine is rejected before anything is measured.
func TestRunRefuses(t *testing.T) {
	path := write(t, "f", here("another card"), result{Bench: "copy_256MiB_cpu",
		Peer: project, Us: 1})
	emitted = nil
	err := options{groups: []string{"copy"}, steps: 1, models: modelNames()}.run("cpu", 1, path)
	require.ErrorContains(t, err, "measured on another card")
	for _, r := range emitted {
		require.Equal(t, whereabouts, r.Bench)
	}
	require.ErrorContains(t, options{}.run("tpu", 1, ""), "want cuda or cpu")
}

// TestOpShapes checks that every op that opbench times has a usual shape.
func TestOpShapes(t *testing.T) {
	for _, o := range opbench.Ops() {
		require.Len(t, o.Usual, len(strings.Split(o.Shape, ", ")), o.Name)
	}
}
