package runlog

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/internal/eventtest"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// records returns the records of a log.
func records(t *testing.T, path string) (all []Record) {
	t.Helper()
	require.NoError(t, Read(path, func(r Record) { all = append(all, r) }))
	return all
}

// TestEpochLines checks that epoch records contain every seed of every layer once, with its stage,
// health, trial and events, and that Read accepts the records however many seeds there are.
func TestEpochLines(t *testing.T) {
	const many = 3*lineSeeds + 1
	epoch := eventtest.Run(4, 5)[1]
	epoch.Kind = llm.EpochEnd
	epoch.Reports = []state.Report{{Epoch: 7, Seeds: make([]state.SeedReport, many)},
		{Epoch: 7, Seeds: make([]state.SeedReport, 2)}}
	for _, r := range epoch.Reports {
		for i := range r.Seeds {
			r.Seeds[i] = state.SeedReport{Seed: i, Stage: state.Grafting, Alpha: 1. / 3,
				Kind: blueprints.LoRA, Slot: 3, EpochsInStage: 2, Delta: -1. / 3, Stability: 0.75,
				Drift: 0.125, Gradient: state.Gradient{Norm: 2}, NonFiniteG: 1, CanAdvance: true,
				Health: state.Health{Variance: 1234567, Mean: -0.5, Min: math.Inf(-1),
					Max: math.MaxFloat64, DeadRatio: 0.25, SNR: math.NaN()}}
		}
	}

	epoch.Reports[1].Seeds[1] = state.SeedReport{Seed: 1}
	epoch.SeedEvents = []state.Event{
		{Kind: state.StageChanged, Layer: 1, Seed: 1, Epoch: 6, From: state.Culled},
		{Kind: state.RampFinished, Seed: many - 1, Epoch: 7, Value: 0.25},
		{Kind: state.StrategyFailed, Layer: 1, Seed: 1, Epoch: 7,
			Reason: strings.Repeat("x", 2*maxReason) + "\ngoroutine 1"},
	}

	path := filepath.Join(t.TempDir(), "log.jsonl")
	eventtest.Send(t, JSON(path), epoch)
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, line := range bytes.SplitAfter(content, []byte("\n")) {
		require.Less(t, len(line), maxRecord/4)
		require.True(t, len(line) == 0 || json.Valid(line), "%s", line)
	}

	var found [2][]SeedRecord
	for _, r := range records(t, path) {
		require.Equal(t, "epoch", r.Event)
		require.Equal(t, 5, r.Step)
		require.Equal(t, 7, *r.Epoch)
		found[*r.Layer] = append(found[*r.Layer], r.States...)
	}

	require.Len(t, found[0], many)
	for i, s := range found[0] {
		require.Equal(t, i, s.Seed)
		require.Equal(t, "Grafting", s.Stage)
		require.EqualValues(t, 0.3333, s.Alpha)
		require.EqualValues(t, 1235000, s.Health.Variance)
		require.EqualValues(t, -0.5, s.Health.Mean)
		require.EqualValues(t, 0.25, s.Health.DeadRatio)
		require.EqualValues(t, math.MaxFloat64, s.Health.Max)
		require.True(t, math.IsNaN(float64(s.Health.Min)) && math.IsNaN(float64(s.Health.SNR)))
		require.Equal(t, "LoRA", s.Kind)
		require.Equal(t, []int{3, 2, 1}, []int{s.Slot, s.Epochs, s.NonFinite})
		require.Equal(t, &TrialRecord{Delta: -0.3333, Stability: 0.75}, s.Trial)
		require.EqualValues(t, 0.125, s.Drift)
		require.EqualValues(t, 2, s.GradNorm)
		require.True(t, s.CanAdvance)
		require.Equal(t, i == many-1, s.Events != nil)
	}

	require.Equal(t, []EventRecord{{Kind: "RampFinished", Epoch: 7, From: "Dormant", To: "Dormant",
		Value: 0.25}}, found[0][many-1].Events)
	require.Len(t, found[1], 2)
	require.Equal(t, SeedRecord{Seed: 1, Stage: "Dormant", Events: []EventRecord{
		{Kind: "StageChanged", Epoch: 6, From: "Culled", To: "Dormant"},
		{Kind: "StrategyFailed", Epoch: 7, From: "Dormant", To: "Dormant",
			Reason: strings.Repeat("x", maxReason)},
	}}, found[1][1])
}

// TestOlderLogs checks that Read accepts logs from before there were epoch records.
func TestOlderLogs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	require.NoError(t, os.WriteFile(path, []byte(
		`{"time":"2026-01-02T03:04:05Z","event":"start","step":0,"elapsed_s":0,"steps":5,"params":9,`+
			`"seeds":64}
{"event":"step","step":1,"elapsed_s":1.5,"train_loss":2.5,"grad_norm":null}
`), 0o666))
	all := records(t, path)
	require.Len(t, all, 2)
	require.Equal(t, 64, *all[0].Seeds)
	require.EqualValues(t, 2.5, *all[1].TrainLoss)
	require.Nil(t, all[1].GradNorm)
	require.Nil(t, all[1].States)
}

// TestManyValues checks that Read skips lines that would need many times their size in memory.
func TestManyValues(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	for _, field := range []string{"states", "ops", "choices"} {
		value := strings.Repeat("{},", maxRecord/3-100) + "{}"
		line := `{"step":1,"` + field + `":[` + value + "]}\n"
		require.Less(t, len(line), maxRecord)
		log := line + `{"step":7}` + "\n"
		require.NoError(t, os.WriteFile(path, []byte(log), 0o666))
		var steps []int
		bounded.Run(t, int64(len(log)), func() {
			require.NoError(t, Read(path, func(r Record) { steps = append(steps, r.Step) }))
		})
		require.Equal(t, []int{7}, steps)
	}
}

// TestPlaces checks that the log contains requests, the peak of the device, and the locations of
// the seeds unless there are too many.
func TestPlaces(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	all := eventtest.Run(0, 2)
	few := llm.Lattice{Name: "weights", Site: blueprints.Weight, Places: []string{"block 0, q"}}
	all[0].Lattices = []llm.Lattice{few, {Name: "many", Places: make([]string, maxPlaces)}}
	note, ceiling := all[1], all[1]
	note.Kind, note.Text = llm.Noted, "a person asked"
	ceiling.Kind, ceiling.Ceiling = llm.Measured, optime.Ceiling{Product: 1e12, Type: "bfloat16"}
	eventtest.Send(t, JSON(path), append(all[:len(all)-1:len(all)-1], note, ceiling,
		all[len(all)-1])...)

	var events []string
	require.NoError(t, Read(path, func(r Record) {
		events = append(events, r.Event)
		switch r.Event {
		case "start":
			require.Equal(t, []llm.Lattice{few, {Name: "many"}}, r.Lattices)
		case "note":
			require.Equal(t, "a person asked", r.Text)
		case "ceiling":
			require.Equal(t, optime.Ceiling{Product: 1e12, Type: "bfloat16"}, *r.Ceiling)
		}
	}))

	require.Contains(t, events, "note")
	require.Contains(t, events, "ceiling")
	require.Len(t, all[0].Lattices[1].Places, maxPlaces, "the event itself was modified")
}

// TestReshaped checks that the record of a growth contains the new numbers of parameters and seeds,
// and that step records of a run with a budget contain the completed fraction.
func TestReshaped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	e := eventtest.Run(0, 2)[1]
	e.Budget, e.Share = llm.Budget{Time: 60e9}, 0.25
	grown := e
	grown.Kind, grown.Text, grown.Params, grown.Seeds = llm.Reshaped, "3 blocks become 6", 99, 12
	eventtest.Send(t, JSON(path), e, grown)

	all := records(t, path)
	require.Len(t, all, 2)
	require.EqualValues(t, 0.25, *all[0].Share)
	require.Equal(t, []int{99, 12}, []int{*all[1].Params, *all[1].Seeds})
	require.Equal(t, "3 blocks become 6", all[1].Text)
}
