package growth

import (
	"encoding/json"
	"flag"
	"fmt"
	"image/png"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestMain(m *testing.M) {
	randtest.OneProcessor()
	speedTime = 50 * time.Millisecond
	os.Exit(m.Run())
}

// TestArmText checks that the written form of an arm omits defaults and can be parsed again.
func TestArmText(t *testing.T) {
	for text, written := range map[string]string{
		"blocks=12":                            "blocks=12",
		"lr=2e-3,blocks=12,kind=stack":         "blocks=12,lr=0.002",
		"blocks=3-12,share=auto":               "blocks=3-12",
		"blocks=3-12,share=curve":              "blocks=3-12,share=curve",
		"blocks=3-6-12,share=patient":          "blocks=3-6-12,share=patient",
		"blocks=3-6-12,share=0.05-0.2":         "blocks=3-6-12,share=0.05-0.2",
		"blocks=4-12,share=0.1,kind=middle":    "blocks=4-12,share=0.1,kind=middle",
		"blocks=2-3,share=0.1,kind=new":        "blocks=2-3,share=0.1,kind=new",
		"blocks=2-4-6,share=forecast,kind=new": "blocks=2-4-6,share=forecast,kind=new",
		"optimizer=muon,blocks=1,norms=qk":     "blocks=1,optimizer=muon,norms=qk",
		"blocks=2-4,share=0.5,moments=fresh":   "blocks=2-4,share=0.5,moments=fresh",
		"blocks=2,decay=late,outputs=zero":     "blocks=2,decay=late,outputs=zero",
	} {
		a, err := parseArm(text)
		require.NoError(t, err)
		require.Equal(t, written, a.String())

		var again arm
		require.NoError(t, again.UnmarshalText([]byte(written)))
		require.Equal(t, a, again)
	}
}

func TestBadArms(t *testing.T) {
	for want, text := range map[string]string{
		"it has no blocks":                          "lr=0.1",
		`"depth" is not a key, want one of blocks,`: "depth=12",
		`lr is "fast"`:                              "blocks=12,lr=fast",
		`lr is "0": want a number above 0`:          "blocks=12,lr=0",
		`kind is "tall": want stack or`:             "blocks=12,kind=tall",
		"want at least 1 block":                     "blocks=0",
		"share needs a model that grows":            "blocks=12,share=0.1",
		"1 growths have 2 shares":                   "blocks=3-12,share=0.1-0.2",
		"the controller grows a model only once":    "blocks=3-6-12",
		"kind=stack cannot make 12 blocks of 5":     "blocks=5-12,share=0.1",
		"kind=middle cannot make 11 blocks of 6":    "blocks=6-11,share=0.1,kind=middle",
		"all growths have the same size":            "blocks=2-4-8,share=forecast,kind=new",
		"kind=new cannot make 3 blocks of 5":        "blocks=5-3,share=0.1,kind=new",
		"kind=stack cannot make 3 blocks of 12":     "blocks=12-3,share=0.1",
		"Growths[0].Share is 1, want 0 to less":     "blocks=3-12,share=1",
		`rewarm is "-1": want a number of steps`:    "blocks=3-12,share=0.1,rewarm=-1",
		`share is "0.1-x"`:                          "blocks=3-12,share=0.1-x",
		"Growths[1].Share is 0.1, want 0.2 to le":   "blocks=3-6-12,share=0.2-0.1",
	} {
		_, err := parseArm(text)
		require.ErrorContains(t, err, want, text)
	}
}

func mustArm(t *testing.T, text string) arm {
	t.Helper()
	a, err := parseArm(text)
	require.NoError(t, err)
	return a
}

// TestPlanTunes checks that learning rates are tuned with the first random seed only, and that the other
// seeds and the growing arms use the best rate.
func TestPlanTunes(t *testing.T) {
	p := plan{budgets: []float64{5}, equal: []string{"flops"}, seeds: []uint64{7, 8},
		rates: []float64{0.001, 0.002},
		arms: []arm{mustArm(t, "blocks=4"), mustArm(t, "blocks=2,lr=0.01"),
			mustArm(t, "blocks=2-4,share=0.1"), mustArm(t, "blocks=2-4,share=0.1,optimizer=muon")}}
	records := map[string]record{}
	names := func() (all []string) {
		for _, j := range p.jobs(records) {
			all = append(all, fmt.Sprintf("%d %v", j.Seed, j.Arm))
		}
		return all
	}

	finish := func(loss map[string]float64) {
		for _, j := range p.jobs(records) {
			r := record{job: j, Loss: loss[j.Arm.String()]}
			if r.Loss == 0 {
				r.Failed = "diverged"
			}
			records[j.name()] = r
		}
	}

	require.Equal(t, []string{"7 blocks=4,lr=0.001", "7 blocks=4,lr=0.002", "7 blocks=2,lr=0.01",
		"7 blocks=4,lr=0.001,optimizer=muon", "7 blocks=4,lr=0.002,optimizer=muon", "8 blocks=2,lr=0.01"},
		names())
	finish(map[string]float64{"blocks=4,lr=0.001": 3, "blocks=4,lr=0.002": 2, "blocks=2,lr=0.01": 4,
		"blocks=4,lr=0.001,optimizer=muon": 5})
	require.Equal(t, []string{"7 blocks=2-4,share=0.1,lr=0.002",
		"7 blocks=2-4,share=0.1,lr=0.001,optimizer=muon", "8 blocks=4,lr=0.002",
		"8 blocks=2-4,share=0.1,lr=0.002", "8 blocks=2-4,share=0.1,lr=0.001,optimizer=muon"}, names())
	finish(map[string]float64{})
	require.Empty(t, names())
}

// TestRows checks that arms are compared with the static arm of the lowest mean loss, seed by seed.
func TestRows(t *testing.T) {
	s := &study{dir: t.TempDir(), records: map[string]record{}}
	add := func(arm string, seed uint64, failed string, losses ...float64) {
		r := record{job: job{mustArm(t, arm), 10, "flops", seed}, Failed: failed, Seconds: 2, Tokens: 1e6}
		for i, loss := range losses {
			r.Curve = append(r.Curve, curvePoint{Share: float64(i+1) / float64(len(losses)), Loss: loss})
			r.Loss = loss
		}
		require.NoError(t, s.add(r))
	}

	add("blocks=4,lr=0.1", 1, "", 5, 3)
	add("blocks=4,lr=0.1", 2, "", 5, 4)
	add("blocks=2,lr=0.1", 1, "", 5, 3.4)
	add("blocks=2,lr=0.1", 2, "", 5, 3.8)
	add("blocks=2,lr=0.2", 1, "", 1) // the lowest loss, but from a single random seed
	add("blocks=2-4,share=0.5,lr=0.1", 1, "", 5, 3.4, 2, 2)
	add("blocks=2-4,share=0.5,lr=0.1", 2, "", 5, 4, 3, 3)
	add("blocks=1-4,share=0.5,lr=0.1", 1, "", 9, 8)
	add("blocks=1-4,share=0.5,lr=0.1", 2, "diverged", 9)

	rows := s.rows()
	find := func(arm string) row {
		i := slices.IndexFunc(rows, func(r row) bool { return r.Arm.String() == arm })
		require.GreaterOrEqual(t, i, 0, arm)
		return rows[i]
	}
	require.True(t, find("blocks=4,lr=0.1").Best)
	grown := find("blocks=2-4,share=0.5,lr=0.1")
	require.InDelta(t, 2.5, grown.Loss, 1e-12)
	require.InDelta(t, 0.7071, grown.Deviation, 1e-4)
	require.InDelta(t, 1, *grown.Gain, 1e-12)
	// Seed 1 has a loss of 3 at 0.5 + 0.25·0.4/1.4, and seed 2 has one of 4 at 0.5.
	require.InDelta(t, (0.5+0.25*0.4/1.4+0.5)/2, *grown.Reached, 1e-12)
	worse := find("blocks=1-4,share=0.5,lr=0.1")
	require.InDelta(t, -5, *worse.Gain, 1e-12)
	require.Nil(t, worse.Reached)
	require.Equal(t, 1, worse.Failed)

	var table strings.Builder
	require.NoError(t, writeTable(&table, rows))
	require.Contains(t, table.String(),
		"| `blocks=2-4,share=0.5,lr=0.1` | 1-2 | 2.5000 ± 0.7071 | +1.0000 | 0.54 | 1.0 | 2.0 |")
	require.Contains(t, table.String(),
		"| `blocks=1-4,share=0.5,lr=0.1` | 1 | 8.0000, and 1 diverged | -5.0000 | never | 1.0 | 2.0 |")
}

// TestBestArm checks that means are compared over the same random seeds.
func TestBestArm(t *testing.T) {
	newRow := func(losses map[uint64]float64) row {
		r := row{runs: map[uint64]record{}}
		for seed, loss := range losses {
			r.runs[seed] = record{Loss: loss}
		}
		return r
	}
	all := func(row) bool { return true }

	rows := []row{
		newRow(map[uint64]float64{3: 1}),
		newRow(map[uint64]float64{2: 1, 3: 1}), // the lowest mean, but without random seed 1
		newRow(map[uint64]float64{1: 4, 2: 5}),
		newRow(map[uint64]float64{1: 3, 2: 5}),
		newRow(nil),
	}
	best, seeds := bestArm(rows, nil, all)
	require.Equal(t, 3, best)
	require.Equal(t, []uint64{1, 2}, seeds)

	best, seeds = bestArm(rows, []uint64{2, 3}, all)
	require.Equal(t, 1, best)
	require.Equal(t, []uint64{2, 3}, seeds)

	best, seeds = bestArm(rows, []uint64{4}, all)
	require.Equal(t, -1, best)
	require.Empty(t, seeds)
	best, _ = bestArm(rows, nil, func(row) bool { return false })
	require.Equal(t, -1, best)
}

// TestRegrets checks that a controller is compared with the best other arm of its budget, over the common random seeds, and
// with arms that were better with fewer random seeds.
func TestRegrets(t *testing.T) {
	s := &study{dir: t.TempDir(), records: map[string]record{}}
	add := func(budget float64, arm string, losses ...float64) {
		for seed, loss := range losses {
			if loss > 0 {
				require.NoError(t, s.add(record{job: job{mustArm(t, arm), budget, "time", uint64(seed)}, Loss: loss}))
			}
		}
	}

	add(5, "blocks=2-4,share=forecast,lr=0.1", 3, 4)
	add(5, "blocks=2-4,share=forecast,lr=0.2", 2)     // the lowest loss, but from a single random seed
	add(5, "blocks=4,lr=0.1", 3.5, 3.75)              // −0.125 on average
	add(5, "blocks=2-4,share=0.2,lr=0.1", 0, 3.25)    // better than blocks=4 with its only random seed
	add(5, "blocks=2-4,share=0.1,lr=0.1", 0, 3.9)     // better than the controller, but worse than blocks=4
	add(5, "blocks=2,lr=0.1", 4, 5)                   // worse
	add(5, "blocks=1,lr=0.1", 0, 0, 1)                // no common random seed
	add(5, "blocks=2-4,share=patient,lr=0.1", 0, 3.5) // the other controller
	add(10, "blocks=2-4,share=forecast,lr=0.1", 3)    // better than all others
	add(10, "blocks=4,lr=0.1", 3.5, 1)                // with the common random seed
	add(20, "blocks=2-4,share=forecast,lr=0.1", 0, 3) // nothing to compare with
	add(20, "blocks=4,lr=0.1", 3.5)
	add(40, "blocks=4,lr=0.1", 3.5)

	var table strings.Builder
	require.NoError(t, writeTable(&table, s.rows()))
	_, got, ok := strings.Cut(table.String(), "Regret: ")
	require.True(t, ok)
	require.Equal(t, []string{
		"| 5 | time | `blocks=2-4,share=forecast,lr=0.1` | `blocks=4,lr=0.1` | 0-1 | -0.1250 | 0.7071 |",
		"| 5 | time | `blocks=2-4,share=forecast,lr=0.1` | `blocks=2-4,share=0.2,lr=0.1` | 1 | +0.7500 | 0.7071 |",
		"| 5 | time | `blocks=2-4,share=patient,lr=0.1` | `blocks=2-4,share=0.2,lr=0.1` | 1 | +0.2500 | 0.7071 |",
		"| 10 | time | `blocks=2-4,share=forecast,lr=0.1` | `blocks=4,lr=0.1` | 0 | -0.5000 | 1.7678 |",
	}, strings.Split(strings.TrimSpace(got), "\n")[4:])
}

// benchArgs returns the arguments of a very short benchmark.
func benchArgs(t *testing.T, data, out string, more ...string) []string {
	return append([]string{"-device", "cpu", "-data", data, "-out", out, "-vocab", "0",
		"-layers", "4", "-dim", "16", "-heads", "2", "-seq", "16", "-batch", "4", "-heldout", "256",
		"-budgets", "1", "-seeds", "3"}, more...)
}

// TestBench makes a small benchmark in two calls. The second call must make only the missing runs, and
// its report must include all runs.
func TestBench(t *testing.T) {
	data, out := textFolder(t), t.TempDir()
	var stdout, stderr strings.Builder
	args := benchArgs(t, data, out, "-equal", "flops,time", "-lr", "0.01", "blocks=4",
		"blocks=2-4,share=0.3,rewarm=3,moments=fresh,norms=qk,outputs=zero,decay=late,lr=0.01")
	require.NoError(t, Study(t.Context(), args, &stdout, &stderr), &stderr)

	kept := filepath.Join(out, "flops-1-seed3-blocks=4,lr=0.01.json")
	before, err := os.Stat(kept)
	require.NoError(t, err)
	stdout.Reset()
	require.NoError(t, Study(t.Context(), append(args, "blocks=1-4,share=0.2"), &stdout, &stderr), &stderr)
	after, err := os.Stat(kept)
	require.NoError(t, err)
	require.Equal(t, before.ModTime(), after.ModTime())

	var rows []row
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &rows))
	require.Len(t, rows, 6)
	require.Contains(t, stdout.String(), "1 tokens per parameter, equal time")

	s, err := loadStudy(out)
	require.NoError(t, err)
	require.Len(t, s.records, 6)
	static := s.records["flops-1-seed3-blocks=4,lr=0.01"]
	for name, r := range s.records {
		require.Empty(t, r.Failed, name)
		require.Equal(t, r.Loss, r.Loss, name)
		require.InDelta(t, 1, r.Curve[len(r.Curve)-1].Share, 1e-9, name)
		require.NotEmpty(t, r.Training, name)
		if r.Equal == "flops" {
			// Runs end with the step that spends the budget.
			require.InDelta(t, static.FLOPs, r.FLOPs, 0.02*static.FLOPs, name)
		}
		if r.Arm.grows() {
			// On a busy machine, a step can take so much of a run's time that no growth fits in.
			if r.Equal == "flops" || len(r.Growths) > 0 {
				require.Len(t, r.Growths, 1, name)
				require.Equal(t, 4, r.Growths[0].Blocks, name)
			}
			if r.Equal == "flops" {
				require.InDelta(t, r.Arm.shares[0], r.Growths[0].Share, 0.05, name)
			}
			require.FileExists(t, filepath.Join(out, "decisions", name+".jsonl"))
		}
	}

	picture, err := os.Open(filepath.Join(out, "gains.png"))
	require.NoError(t, err)
	defer picture.Close()
	_, err = png.Decode(picture)
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(out, "table.md"))

	stdout.Reset()
	require.NoError(t, Study(t.Context(), []string{"-report", "-out", out}, &stdout, io.Discard))
	require.Contains(t, stdout.String(), "`blocks=1-4,share=0.2,lr=0.01`")

	// Packed runs are still known: the table does not change, and no run is repeated.
	table := stdout.String()
	stdout.Reset()
	require.NoError(t, Study(t.Context(), []string{"-pack", "-out", out}, &stdout, io.Discard))
	require.Equal(t, table, stdout.String())
	require.NoFileExists(t, kept)
	stdout.Reset()
	require.NoError(t, Study(t.Context(), args, &stdout, io.Discard))
	require.Equal(t, table, stdout.String())
	require.NoFileExists(t, kept)

	require.ErrorContains(t, Study(t.Context(), benchArgs(t, data, out, "-batch", "5", "blocks=4,lr=0.01"),
		io.Discard, io.Discard), "contains runs of another model, text or precision")
}

// TestBenchLimit checks that a benchmark without time left starts no run and lists the missing ones.
func TestBenchLimit(t *testing.T) {
	out := t.TempDir()
	var stderr strings.Builder
	err := Study(t.Context(), benchArgs(t, textFolder(t), out, "-limit", "1ms", "blocks=4,lr=0.01"), io.Discard, &stderr)
	require.ErrorContains(t, err, "there are no records of runs in")
	require.Contains(t, stderr.String(), "2 of 2 runs are left for the next call")
}

// TestBenchParts checks that -prepare makes no run, and that -only makes the runs with matching names.
func TestBenchParts(t *testing.T) {
	text, out := textFolder(t), t.TempDir()
	arms := []string{"blocks=4,lr=0.01", "blocks=2,lr=0.01", "blocks=1-2-4,share=forecast,lr=0.01"}
	study := func(more ...string) error {
		args := append(benchArgs(t, text, out, "-equal", "flops"), more...)
		return Study(t.Context(), append(args, arms...), io.Discard, io.Discard)
	}

	require.NoError(t, study("-prepare"))
	require.NoFileExists(t, filepath.Join(out, "study.json"))
	require.NoError(t, study("-only", "seed3-blocks=(2|1-2-4),"))
	s, err := loadStudy(out)
	require.NoError(t, err)
	require.Len(t, s.records, 2)
	forecast := s.records["flops-1-seed3-blocks=1-2-4,share=forecast,lr=0.01"]
	require.NotEmpty(t, forecast.Notes)
	require.Contains(t, forecast.Notes[0], "the 1-block model would reach")
}

// TestBenchReplays checks that runs repeat their recorded decisions with the same bits, on a budget of time too, and that
// a run that ends differently is an error.
func TestBenchReplays(t *testing.T) {
	text, out := textFolder(t), t.TempDir()
	study := func(more ...string) (string, error) {
		var stdout strings.Builder
		err := Study(t.Context(), append(benchArgs(t, text, out), more...), &stdout, io.Discard)
		return stdout.String(), err
	}

	_, err := study("-equal", "time,flops", "-budgets", "0.5", "blocks=2-4,share=0.3,lr=0.01,rewarm=3,moments=fresh")
	require.NoError(t, err)
	got, err := study("-replay")
	require.NoError(t, err)
	require.Equal(t, 2, strings.Count(got, "the same held-out losses and weights"), got)
	require.Contains(t, got, "time-0.5-seed3-blocks=2-4,share=0.3,lr=0.01,rewarm=3,moments=fresh: replayed in ")

	const name = "flops-0.5-seed3-blocks=2-4,share=0.3,lr=0.01,rewarm=3,moments=fresh"
	path := filepath.Join(out, name+".json")
	var r record
	require.NoError(t, readJSON(path, &r))
	other := r
	other.Weights = "another sum"
	require.NoError(t, writeJSON(path, other))
	_, err = study("-replay", "-only", "^flops")
	require.EqualError(t, err, name+": it ended with other weights than the recorded run")
	require.EqualError(t, r.sameBits(record{Failed: "diverged", Steps: 3}),
		"it diverged after 3 steps, and the recorded run did not")

	// Growth at another time leads to other losses.
	require.NoError(t, writeJSON(path, r))
	path = filepath.Join(out, "decisions", name+".jsonl")
	decisions, err := os.ReadFile(path)
	require.NoError(t, err)
	var lines []string
	for line := range strings.Lines(string(decisions)) {
		if !strings.Contains(line, `"command"`) {
			lines = append(lines, line)
		}
	}
	require.NoError(t, os.WriteFile(path, []byte(strings.Join(lines, "")), 0o666))
	_, err = study("-replay", "-only", "^flops")
	require.ErrorContains(t, err, name+": it ended after ")

	_, err = study("-replay", "-only", "blocks=1")
	require.ErrorContains(t, err, "there are no records of growing runs to replay in")
	require.NoError(t, os.Remove(path))
	_, err = study("-replay", "-only", "^flops")
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, name+": its decisions are missing")
}

// TestBenchContinuesAfterFailure checks that a failing run does not prevent the remaining runs, and that
// the call returns its error. The run of the growing model fails because a file has the name of the
// folder for decisions.
func TestBenchContinuesAfterFailure(t *testing.T) {
	out := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(out, "decisions"), nil, 0o666))
	var stdout strings.Builder
	err := Study(t.Context(), benchArgs(t, textFolder(t), out, "-equal", "flops", "blocks=2-4,share=0.1,lr=0.01",
		"blocks=4,lr=0.01"), &stdout, io.Discard)
	require.ErrorContains(t, err, "flops-1-seed3-blocks=2-4,share=0.1,lr=0.01: ")
	require.Contains(t, stdout.String(), "`blocks=4,lr=0.01`")
}

func TestBadBenchOptions(t *testing.T) {
	for want, args := range map[string][]string{
		"-budgets is":                {"-budgets", "5,0"},
		"-lr is":                     {"-lr", "x"},
		"-seeds is":                  {"-seeds", "1,-2"},
		"-equal is":                  {"-equal", "steps"},
		"-device is":                 {"-device", "tpu"},
		"-batch is 0":                {"-batch", "0"},
		"-vocab is 5":                {"-vocab", "5"},
		"-limit is -1s":              {"-limit", "-1s"},
		"error parsing regexp":       {"-only", "("},
		"give the shares for":        {"blocks=1-2-4"},
		"boundary is \"-1\"":         {"blocks=4,boundary=-1"},
		"-heldout is 1":              {"-heldout", "1"},
		"-layers is 6, want a multi": {"-layers", "6"},
		"kind=stack cannot make":     {"blocks=3-4,share=0.1"},
		"Config.Dim is 17":           {"-dim", "17"},
		"study.json":                 {"-report"},
	} {
		args = append(benchArgs(t, textFolder(t), t.TempDir()), args...)
		require.ErrorContains(t, Study(t.Context(), args, io.Discard, io.Discard), want, args)
	}

	require.ErrorIs(t, Study(t.Context(), []string{"-h"}, io.Discard, io.Discard), flag.ErrHelp)
}
