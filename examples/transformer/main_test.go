package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/internal/seedtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/state"
)

// textFolder returns a folder of small files.
func textFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 30 {
		var text strings.Builder
		for range 200 {
			text.WriteString([]string{"func ", "return ", "if err != nil {\n", "}\n",
				"x := y\n"}[r.IntN(5)])
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i, ".txt")),
			[]byte(text.String()), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// small returns the arguments of a run that takes a moment.
func small(data, out string, more ...string) []string {
	return append([]string{"-data", data, "-out", out, "-dim", "16", "-layers", "2", "-heads", "2",
		"-seq", "16", "-batch", "2",
		"-seeds", "4", "-sample", "10", "-heldout", "500"}, more...)
}

// train runs the program and returns its last line and what it told the user.
func train(t *testing.T, args ...string) (result map[string]any, told string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	if err := run(context.Background(), args, &stdout, &stderr); err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &result); err != nil {
		t.Fatalf("the last line: %v\n%s", err, stdout.String())
	}
	return result, stderr.String()
}

func read(t *testing.T, elements ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(elements...))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRun(t *testing.T) {
	for _, kasmina := range []bool{true, false} {
		out := filepath.Join(t.TempDir(), "a", "b")
		result, told := train(t, small(textFolder(t), out, "-steps", "20", "-eval-every", "8",
			fmt.Sprint("-kasmina=", kasmina),
			fmt.Sprint("-documents=", !kasmina), "-monitor=3")...)
		if !strings.Contains(told, "LinearCrossEntropyGrad") || !strings.Contains(told, "Update") {
			t.Errorf("-monitor prints no table:\n%s", told)
		}
		if log := string(read(t, out, "log.jsonl")); !strings.Contains(log, `"event":"profile"`) ||
			strings.Count(log, `"event":"ways"`) != 1 {
			t.Errorf("the log lacks the times of ops, or the ways:\n%s", log)
		}
		for _, key := range []string{"tokens_per_s", "train_loss", "val_bpb", "order2_bpb",
			"gzip_bpb", "params"} {
			if v, ok := result[key].(float64); !ok || v <= 0 {
				t.Errorf("%s is %v, want a positive number", key, result[key])
			}
		}
		seeds := 0.0
		if kasmina {
			seeds = 8
		}
		if result["steps"] != 20.0 || result["seeds"] != seeds {
			t.Errorf("steps %v and seeds %v, want 20 and %v", result["steps"],
				result["seeds"], seeds)
		}
		if sample := string(read(t, out, "sample.txt")); !strings.HasPrefix(sample, "func ") ||
			len(sample) != 15 {
			t.Errorf("sample %q", sample)
		}
		if strings.Count(told, "val ") < 3 {
			t.Errorf("3 evaluations do not show:\n%s", told)
		}
		if !bytes.HasPrefix(read(t, out, "loss.png"), []byte("\x89PNG")) ||
			bytes.Count(read(t, out, "log.jsonl"), []byte("\n")) < 20 {
			t.Error("no loss curve or log")
		}
		if m, err := llm.LoadModel(context.Background(), filepath.Join(out,
			checkpointName)); err != nil || m.Config.Documents == kasmina {
			t.Errorf("the model is %+v, %v", m, err)
		}
	}
}

// TestLogOfSeeds wants the log to follow each seed: once an epoch its stage, α and health. All that
// it went through from one epoch to the next must be there too.
func TestLogOfSeeds(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	train(t, small(textFolder(t), out, "-steps", "20")...) // in epochs of 10
	type address struct{ epoch, layer, seed int }
	seeds, life := map[address]runlog.SeedRecord{}, map[address][]string{}
	require.NoError(t, runlog.Read(filepath.Join(out, logName), func(r runlog.Record) {
		for _, s := range r.States {
			require.Equal(t, 10**r.Epoch, r.Step)
			at := address{*r.Epoch, *r.Layer, s.Seed}
			require.NotContains(t, seeds, at)
			seeds[at] = s
			for _, e := range s.Events {
				if e.Kind == state.StageChanged.String() {
					life[address{0, *r.Layer, s.Seed}] = append(life[address{0, *r.Layer, s.Seed}],
						e.To)
				}
			}
		}
	}))
	require.Len(t, seeds, 2*2*4) // epochs, layers, seeds of each
	for at, s := range seeds {
		want := map[int]string{1: "Stabilization", 2: "Fossilized"}[at.epoch]
		require.Equal(t, want, s.Stage, "%v", at)
		require.Equal(t, want == "Fossilized", s.Alpha == 1, "%v", at)
		require.Positive(t, s.Health.Variance, "%v", at)
	}
	require.Len(t, life, 2*4)
	for at, stages := range life {
		require.Equal(t, []string{"Germinated", "Training", "Grafting",
			"Stabilization", "Evaluating",
			"FineTuning", "Fossilized"}, stages, "%v", at)
	}
}

// TestScrub wants damage to a seed to be told and logged before it ends the run. It may not be told
// where the user does not want to hear of it.
func TestScrub(t *testing.T) {
	const damage = "layer 1: seed state is corrupt: seed 3 does not match its checksum: bit 3 of " +
		"alpha"
	folder := textFolder(t)
	for _, scrub := range []string{"1h", "0"} {
		o, err := parse(small(folder, filepath.Join(t.TempDir(), "out"), "-device",
			"cpu", "-steps", "20",
			"-scrub", scrub), io.Discard)
		require.NoError(t, err)
		texts, err := openData(o, io.Discard)
		require.NoError(t, err)
		require.NoError(t, texts.tokenize(t.Context(), o, io.Discard))
		tr, err := newTrainer(o, texts.tokens)
		require.NoError(t, err)
		defer tr.Close()
		var told strings.Builder
		require.NoError(t, addCallbacks(tr, o, texts, &told))
		seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(1), 3)
		require.ErrorIs(t, tr.Run(t.Context()), state.ErrCorrupt)
		log := string(read(t, o.out, logName))
		if scrub == "0" {
			require.NotContains(t, told.String(), "corrupt   ")
			require.NotContains(t, log, `"event":"corrupt"`)
			continue
		}
		require.Contains(t, told.String(), "corrupt   "+damage)
		require.Regexp(t, `"event":"corrupt","step":1,.*"error":"`+damage, log)
	}
}

// endsAfter is a context that ends once it has been asked n times.
type endsAfter struct {
	context.Context
	n *int
}

func (c endsAfter) Err() error {
	if *c.n--; *c.n < 0 {
		return context.Canceled
	}
	return nil
}

// endsInTraining is a context that ends once training has asked it n times, and where the run tells
// that it begins to train.
func endsInTraining(n int) (context.Context, io.Writer) {
	left := math.MaxInt
	return endsAfter{context.Background(), &left}, writerFunc(func(b []byte) {
		if strings.HasPrefix(string(b), "to beat ") {
			left = n
		}
	})
}

// TestResume interrupts a run and resumes it, with no option but -out and -data repeated. It must
// leave the same checkpoint, byte for byte, as one in which nothing happened, and be complete after
// that.
func TestResume(t *testing.T) {
	data, dir := textFolder(t), t.TempDir()
	straight, broken := filepath.Join(dir, "straight"), filepath.Join(dir, "broken")
	options := []string{"-steps", "40", "-optimizer", "adamw", "-clip", "0.5", "-accumulate", "2",
		"-seed", "9", "-prompt", "if"}
	train(t, small(data, straight, options...)...)
	ctx, stderr := endsInTraining(50) // asked twice a step of two batches
	err := run(ctx, small(data, broken, options...), io.Discard, stderr)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "-resume") {
		t.Fatalf("got %v, want context.Canceled and a hint", err)
	}
	result, told := train(t, "-resume", "-out", broken, "-data", data)
	if result["steps"] != 40.0 || strings.Contains(told, "changed") || strings.Contains(told,
		"settings") || !strings.Contains(told, "at step 2") {
		t.Errorf("result %v\n%s", result, told)
	}
	if !bytes.Equal(read(t, straight, checkpointName), read(t, broken, checkpointName)) {
		t.Error("the checkpoints differ")
	}
	if a, b := read(t, straight, "sample.txt"), read(t, broken, "sample.txt"); !bytes.Equal(a, b) {
		t.Errorf("samples %q and %q", a, b)
	}
	again, _ := train(t, "-resume="+filepath.Join(broken, checkpointName), "-data", data, "-out",
		filepath.Join(dir, "again"))
	if again["val_bpb"] != result["val_bpb"] || again["steps"] != 40.0 {
		t.Errorf("the complete run gives %v, want %v", again, result)
	}
}

// TestResumeWithMoreSteps wants a run that has ended to go on by its new plan, and the user to hear
// what that means.
func TestResumeWithMoreSteps(t *testing.T) {
	data, out := textFolder(t), filepath.Join(t.TempDir(), "out")
	train(t, small(data, out, "-steps", "20")...)
	checkpoint := filepath.Join(out, checkpointName)
	result, told := train(t, "-out", out, "-resume", checkpoint, "-data", data, "-steps", "30")
	for _, words := range []string{"at step 20", `-steps from "20" to "30"`, "another model",
		"learning rate of step"} {
		if !strings.Contains(told, words) {
			t.Errorf("the user does not hear %q:\n%s", words, told)
		}
	}
	if result["steps"] != 30.0 {
		t.Errorf("result %v", result)
	}
	err := run(context.Background(), []string{"-out", out, "-resume", "-data", data, "-steps",
		"10"}, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(),
		"step 30, want 0 to TrainConfig.Steps, which is 10") {
		t.Errorf("fewer steps than were done: %v", err)
	}
}

// TestShortRunsGrow wants all seeds of a run of any length to have fossilized at its end.
func TestShortRunsGrow(t *testing.T) {
	data := textFolder(t)
	for _, steps := range []string{"1", "5", "21"} {
		out := filepath.Join(t.TempDir(), "out")
		train(t, small(data, out, "-steps", steps)...)
		m, err := llm.LoadModel(context.Background(), filepath.Join(out, checkpointName))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range m.Kasmina.Lattices() {
			for i, s := range l.Report().Seeds {
				if s.Stage != state.Fossilized {
					t.Errorf("%s steps: seed %d is in stage %v", steps, i, s.Stage)
				}
			}
		}
	}
}

// TestGrow wants a model that begins with half its blocks to end with all of them.
func TestGrow(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	train(t, small(textFolder(t), out, "-steps", "200", "-layers", "2", "-grow", "2")...)
	m, err := llm.LoadModel(t.Context(), filepath.Join(out, checkpointName))
	require.NoError(t, err)
	if len(m.Config.Grown) > 0 { // else it has done no good, and is taken back
		require.Equal(t, 2, m.Config.Layers)
	}
	require.Empty(t, m.Config.Kasmina)
	require.ErrorContains(t, run(t.Context(), small(textFolder(t), t.TempDir(), "-grow", "2",
		"-layers", "2", "-steps", "70"), io.Discard, io.Discard), "plan at least 80 steps")
}

// TestGrowthByDefault wants a new run's model to grow, and such a run to take as long. It does not
// grow where it is asked for what a growing model has not, or no growth could end.
func TestGrowthByDefault(t *testing.T) {
	type plan struct{ grow, blocks, steps, layers int }
	for args, want := range map[string]plan{
		"":                         {2, 2, 1280, 0},
		"-steps 2000":              {2, 2, 2000, 0},
		"-layers 6":                {2, 3, 1280, 0},
		"-grow 4":                  {4, 1, 1280, 0},
		"-layers 3":                {1, 3, 1040, 3},
		"-kasmina":                 {1, 4, 1040, 4},
		"-kasmina=false":           {1, 4, 1040, 0},
		"-judge":                   {1, 4, 1040, 4},
		"-seeds 8":                 {1, 4, 1040, 4},
		"-kasmina -steps 50":       {1, 4, 50, 4},
		"-steps 99":                {1, 4, 99, 4},
		"-preset 124M":             {1, 12, 2000, 12},
		"-preset 124M -grow 4":     {4, 3, 2000, 0},
		"-preset 124M -steps 1280": {1, 12, 1280, 12},
	} {
		o, err := parse(strings.Fields(args), io.Discard)
		require.NoError(t, err, args)
		require.Equal(t, want, plan{o.grow, o.model.Layers, o.train.Steps, len(o.model.Kasmina)}, args)
	}
}

// TestBadOptions wants an error that names the option or what it sets, and nothing left behind.
func TestBadOptions(t *testing.T) {
	data := textFolder(t)
	for args, want := range map[string]string{
		"-steps 0":              "-steps is 0",
		"-steps x":              "steps",
		"-heads 3":              "multiple of Heads",
		"-heads 5 -dim 192":     "Dim is 192, want a multiple of Heads, 5",
		"-seeds 5":              "Seeds is 5",
		"-grow 3":               "-grow is 3, want a number that divides -layers, ",
		"-grow 0":               "-grow is 0",
		"-out=":                 `-out is "", want a folder`,
		"-prompt=":              `-prompt is "", want some text`,
		"-temperature -1":       "Temperature is -1",
		"-top-p 2":              "TopP is 2",
		"-sample -1":            "-sample is -1",
		"-scrub -1s":            "-scrub is -1s",
		"-max-bytes -5":         "-max-bytes is -5",
		"-heldout 0":            "-heldout is 0",
		"-optimizer foo":        `-optimizer is "foo", want adamw or muon`,
		"-lr -1":                "WithLR: got -1",
		"-batch 0":              "-batch is 0",
		"-batch 99999999999":    "batches of 99999999999 sequences",
		"-accumulate 0":         "-accumulate is 0",
		"-eval-every -1":        "-eval-every is -1",
		"-save-every -1":        "-save-every is -1",
		"-layers 16777216":      "Layers is 16777216",
		"-clip -1":              "Clip is -1",
		"model.safetensors":     "-resume=FILE",
		"-resume a b":           "unexpected arguments",
		"-resume=no-file":       "a run begins without -resume",
		"-resume":               checkpointName,
		"-data no-such-folder":  "-data: data: Open: ",
		"-unknown":              "unknown",
		"-resume no-file -seed": "-seed",
	} {
		t.Run(args, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out")
			err := run(context.Background(), small(data, out, strings.Fields(args)...),
				io.Discard, io.Discard)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %q", err, want)
			}
			if _, err := os.Stat(out); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the run that was refused left %s: %v", out, err)
			}
		})
	}
	file := filepath.Join(data, "0.txt") // in the place of a folder
	outs := []string{file, filepath.Join(file, "a", "b")}
	// where there are symbolic links
	if link := filepath.Join(t.TempDir(), "link"); os.Symlink(link+"-to-nothing", link) == nil {
		outs = append(outs, link, filepath.Join(link, "a"))
	}
	for _, out := range outs {
		if err := run(context.Background(), small(data, out), io.Discard, io.Discard); err == nil ||
			!strings.Contains(err.Error(), "-out: no file can be made in ") ||
			strings.Contains(err.Error(), ".probe") {
			t.Errorf("-out %s: %v", out, err)
		}
	}
	if err := run(context.Background(), []string{"-help"}, io.Discard, io.Discard); !errors.Is(err,
		flag.ErrHelp) {
		t.Errorf("-help: %v", err)
	}
}

// TestNothingIsLost wants a run that begins where another one has ended to leave that one's files
// whole, in a place from which it goes on.
func TestNothingIsLost(t *testing.T) {
	data, out := textFolder(t), filepath.Join(t.TempDir(), "out")
	// which is no run
	if err := os.MkdirAll(filepath.Join(out, "before-breakfast"), 0o777); err != nil {
		t.Fatal(err)
	}
	size := 0
	for seed := range 3 {
		want := map[string][]byte{}
		if seed > 0 {
			for _, name := range []string{checkpointName, logName, sampleName} {
				want[name] = read(t, out, name)
			}
		}
		_, told := train(t, small(data, out, "-steps", "2", "-seed", fmt.Sprint(seed))...)
		kept := filepath.Join(out, fmt.Sprintf("before-%d", seed))
		if got := strings.Contains(told, "-resume -out "+kept); got != (seed > 0) {
			t.Errorf("run %d is told of %s: %v\n%s", seed, kept, got, told)
		}
		if seed > 0 {
			for _, name := range []string{checkpointName, logName, curveName, sampleName} {
				size += len(read(t, kept, name))
			}
		}
		all := fmt.Sprintf("%d earlier runs are in %s by now and take %.1f MB", seed,
			out, float64(size)/1e6)
		if got := strings.Contains(told, all); got != (seed > 1) {
			t.Errorf("run %d is told %q: %v\n%s", seed, all, got, told)
		}
		for name, b := range want {
			if !bytes.Equal(read(t, kept, name), b) {
				t.Errorf("%s of run %d has changed", name, seed)
			}
		}
	}
	// of which one token is left, too few to score
	options := small(data, out, "-vocab", "300", "-heldout", "2", "-cache", t.TempDir())
	if err := run(context.Background(), options, io.Discard, io.Discard); err == nil ||
		!strings.Contains(err.Error(), "held-out") {
		t.Errorf("two bytes of held-out text: %v", err)
	}
	if _, err := os.Stat(filepath.Join(out, "before-3")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a run that does not begin moves the one before aside: %v", err)
	}
	if _, told := train(t, "-resume", "-data", data, "-out", filepath.Join(out, "before-1"),
		"-steps", "3"); strings.Contains(told, "kept") {
		t.Errorf("the run that goes on is set aside:\n%s", told)
	}
	if result, _ := train(t, "-resume", "-data", data, "-out", out); result["steps"] != 2.0 {
		t.Errorf("the last run goes on as %v", result)
	}
}

// TestOwnFilesStay wants files of the user's own that have the names of a run's files to be set aside,
// not overwritten.
func TestOwnFilesStay(t *testing.T) {
	data := textFolder(t)
	for _, name := range []string{sampleName, curveName} {
		out := filepath.Join(t.TempDir(), "out")
		if err := os.MkdirAll(out, 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(out, name), []byte("mine"), 0o666); err != nil {
			t.Fatal(err)
		}
		_, told := train(t, small(data, out, "-steps", "1")...)
		kept := filepath.Join(out, keptPrefix+"1")
		if got := string(read(t, kept, name)); got != "mine" {
			t.Errorf("%s is %q now", name, got)
		}
		if want := "the files that were in " + out + " are in " + kept; !strings.Contains(told, want) {
			t.Errorf("the user is not told %q:\n%s", want, told)
		}
	}
}

// TestWithoutEffect wants options of sampling to be refused where the likeliest token is always taken.
func TestWithoutEffect(t *testing.T) {
	for _, option := range [][]string{{"-top-k", "3"}, {"-top-p", "0.5"}} {
		args := small(textFolder(t), t.TempDir(), append(option, "-temperature", "0")...)
		err := run(context.Background(), args, io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), option[0]+" has no effect with -temperature 0") {
			t.Errorf("%q: %v", option, err)
		}
	}
	train(t, small(textFolder(t), t.TempDir(), "-steps", "1", "-temperature", "0")...)
}

// TestOneRunAFolder wants a second run in the folder of one that goes on to be refused, and to
// leave that one's files alone.
func TestOneRunAFolder(t *testing.T) {
	if out := os.Getenv("TRANSFORMER_CLAIM"); out != "" { // the other program
		_, err := llm.ClaimFolder(out)
		fmt.Println("claimed", err)
		io.Copy(io.Discard, os.Stdin)
		return
	}
	data, out := textFolder(t), filepath.Join(t.TempDir(), "out")
	train(t, small(data, out, "-steps", "1")...)
	release := claimElsewhere(t, out)
	for _, args := range [][]string{small(data, out, "-steps", "1"),
		{"-resume", "-data", data, "-out", out}} {
		var told strings.Builder
		err := run(context.Background(), args, io.Discard, &told)
		if !errors.Is(err, llm.ErrFolderInUse) || !strings.Contains(err.Error(), "-out: ") ||
			!strings.Contains(err.Error(), out) {
			t.Errorf("%v: got %v", args, err)
		}
		// from what the other run is about to replace
		if strings.Contains(told.String(), "resuming") {
			t.Errorf("it is resumed first: %s", &told)
		}
	}
	if _, err := os.Stat(filepath.Join(out, checkpointName)); err != nil {
		t.Errorf("the checkpoint of the run that goes on: %v", err)
	}
	release()
	train(t, small(data, out, "-steps", "1")...)
}

// claimElsewhere has another program claim a folder.
func claimElsewhere(t *testing.T, out string) (release func()) {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run=^TestOneRunAFolder$")
	c.Env = append(os.Environ(), "TRANSFORMER_CLAIM="+out)
	_, err := c.StdinPipe()
	require.NoError(t, err)
	said, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	line, err := bufio.NewReader(said).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "claimed <nil>\n", line)
	return func() {
		require.NoError(t, c.Process.Kill())
		c.Wait()
	}
}

// TestResumeHints wants a user who resumes with other text or another model to hear what to do.
func TestResumeHints(t *testing.T) {
	folder, out := textFolder(t), filepath.Join(t.TempDir(), "out")
	train(t, small(folder, out, "-steps", "1")...)
	resume := func(args ...string) error {
		return run(context.Background(), append([]string{"-resume", "-data", folder, "-out", out,
			"-steps", "2"}, args...), io.Discard, io.Discard)
	}
	if err := resume("-dim", "32"); !errors.Is(err, llm.ErrArchitecture) ||
		!strings.Contains(err.Error(), "without the options that differ") {
		t.Errorf("another model: %v", err)
	}
	for i := range 30 { // one of them at least is trained on
		if err := os.WriteFile(filepath.Join(folder, fmt.Sprint(i, ".txt")),
			[]byte(strings.Repeat("other text\n", 100)), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if err := resume(); !errors.Is(err, data.ErrChanged) || !strings.Contains(err.Error(),
		"without -resume another one begins") {
		t.Errorf("other text: %v", err)
	}
	if result, _ := train(t, "-resume", "-data", folder, "-out", out, "-steps", "3", "-new-data",
		"all"); result["steps"] != 3.0 {
		t.Errorf("with -new-data all the run goes on as %v", result)
	}
}

// TestForgedPaths wants nothing to be read from or written to where a checkpoint says, and the user
// to hear what it says.
func TestForgedPaths(t *testing.T) {
	data, dir := textFolder(t), t.TempDir()
	out, trap := filepath.Join(dir, "out"), filepath.Join(dir, "trap")
	train(t, small(data, out, "-steps", "1")...)
	checkpoint := filepath.Join(out, checkpointName)
	tensors, metadata, err := safetensors.Load(checkpoint)
	require.NoError(t, err)
	var notes map[string]string
	require.NoError(t, json.Unmarshal([]byte(metadata["kasmina.notes"]), &notes))
	for _, name := range []string{"out", "cache", "profile", "data", "resume"} {
		notes[name] = filepath.Join(trap, name)
	}
	notes["new-data"] = "all"
	forged, err := json.Marshal(notes)
	require.NoError(t, err)
	metadata["kasmina.notes"] = string(forged)
	require.NoError(t, safetensors.Save(checkpoint, tensors, metadata))

	err = run(t.Context(), []string{"-resume", "-out", out, "-steps", "2"}, io.Discard, io.Discard)
	require.ErrorContains(t, err, strconv.Quote(filepath.Join(trap, "data")))
	require.ErrorContains(t, err, "with -data")
	o, err := parse([]string{"-resume", "-out", out, "-data", data}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, []string{out, cacheFolder(), "", ""},
		[]string{o.out, o.cache, o.profile, o.newData})
	result, told := train(t, "-resume", "-out", out, "-data", data, "-steps", "2")
	require.Equal(t, 2.0, result["steps"], told)
	require.NoDirExists(t, trap)
	t.Chdir(filepath.Dir(data)) // the checkpoint of this run has the whole path
	_, again := train(t, "-resume", "-out", out, "-data", filepath.Base(data))
	require.NotContains(t, again, "-data from")
	for _, name := range []string{"cache", "profile"} {
		require.Contains(t, told, fmt.Sprintf("-%s from %q", name, filepath.Join(trap, name)))
	}
}

// TestEveryPathIsKnown wants an option with text for its value to be one that names no path, or to
// be among those that no checkpoint sets.
func TestEveryPathIsKnown(t *testing.T) {
	noPath := []string{"preset", "device", "precision", "optimizer", "prompt"}
	new(options).flags(io.Discard).VisitAll(func(f *flag.Flag) {
		if value, ok := f.Value.(flag.Getter); ok {
			if _, text := value.Get().(string); text && !slices.Contains(noPath, f.Name) {
				require.Contains(t, pathOptions, f.Name)
			}
		}
	})
}

// TestFailureHint wants a user whose run fails to hear of the checkpoint that it goes on from, if
// there is one.
func TestFailureHint(t *testing.T) {
	data, out := textFolder(t), filepath.Join(t.TempDir(), "out")
	fail := func(args ...string) error {
		return run(context.Background(), append([]string{"-out", out}, args...),
			io.Discard, io.Discard)
	}
	log := filepath.Join(out, logName)
	if err := os.MkdirAll(log, 0o777); err != nil { // where a file should be
		t.Fatal(err)
	}
	if err := fail(small(data, out, "-steps", "1")...); err == nil ||
		strings.Contains(err.Error(), "-resume") {
		t.Errorf("without a checkpoint: %v", err)
	}
	if err := os.Remove(log); err != nil {
		t.Fatal(err)
	}
	train(t, small(data, out, "-steps", "1")...)
	if err := errors.Join(os.Remove(log), os.Mkdir(log, 0o777)); err != nil {
		t.Fatal(err)
	}
	cache := filepath.Join(data, "0.txt") // in the place of a folder
	if err := fail(small(data, out, "-vocab", "300", "-cache", cache)...); err == nil ||
		!strings.Contains(err.Error(), "-cache names another") {
		t.Errorf("without a folder for the cache: %v", err)
	}
	hint := "-resume -out " + quoted(out) + " -data " + quoted(data) + " goes on"
	if err := fail("-resume", "-data", data, "-steps", "2"); err == nil ||
		!strings.Contains(err.Error(), hint) {
		t.Errorf("with a checkpoint: %v", err)
	}
}

// TestInterruptedWithoutCheckpoint wants an interrupted run that fails to save a checkpoint not to
// say that it goes on from there.
func TestInterruptedWithoutCheckpoint(t *testing.T) {
	data, out := textFolder(t), filepath.Join(t.TempDir(), "out")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	atFirstStep := writerFunc(func(b []byte) {
		if strings.Contains(string(b), "] 1/3 ") {
			// where a file should be
			if err := os.Mkdir(filepath.Join(out, checkpointName), 0o777); err != nil {
				t.Error(err)
			}
			cancel()
		}
	})
	err := run(ctx, small(data, out, "-steps", "3"), io.Discard, atFirstStep)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), checkpointName) ||
		strings.Contains(err.Error(), "goes on from there") {
		t.Errorf("got %v", err)
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) { f(b); return len(b), nil }

// TestSmallVocabulary wants a user whose text has too few pairs for -vocab to hear how many there
// are.
func TestSmallVocabulary(t *testing.T) {
	data, cache := textFolder(t), t.TempDir()
	for vocab, want := range map[string]bool{"258": false, "2000": true} {
		_, told := train(t, small(data, filepath.Join(t.TempDir(), "out"), "-steps", "1", "-vocab",
			vocab, "-cache", cache)...)
		if strings.Contains(told, "entries: -vocab ") != want {
			t.Errorf("-vocab %s: %v", vocab, told)
		}
	}
}

// TestThin wants the first and the last byte of a long text, in order and no more than is said, and
// a short one whole.
func TestThin(t *testing.T) {
	for _, n := range []int{1, quickBytes, quickBytes + 1, 1000003} {
		text := make([]byte, n)
		text[0], text[n-1] = 1, 1
		got := thin(text)
		if len(got) != min(n, quickBytes) || got[0] != 1 || got[len(got)-1] != 1 {
			t.Errorf("%d bytes become %d", n, len(got))
		}
	}
}

// TestStopsWhileScanning wants an interrupt to end the baseline's pass over the data.
func TestStopsWhileScanning(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	out := filepath.Join(t.TempDir(), "out")
	if err := run(ctx, small(textFolder(t), out), io.Discard, io.Discard); !errors.Is(err,
		context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	if files, _ := os.ReadDir(out); len(files) > 0 {
		t.Errorf("the run began: %v", files)
	}
}

// TestQuoted wants a shell to read a path that a hint names as it is.
func TestQuoted(t *testing.T) {
	if got := quoted(filepath.Join("runs", "a-1_b.c")); got != filepath.Join("runs", "a-1_b.c") {
		t.Errorf("a path that needs no quotes is %s", got)
	}
	if runtime.GOOS == "windows" {
		if got := quoted(`C:\my runs\a`); got != `"C:\my runs\a"` {
			t.Errorf("got %s", got)
		}
		return
	}
	for _, path := range []string{"", "runs/transformer", "my runs/it's", `a\b"c`, "$HOME/`x`",
		"~/x", "a;b|c&d*?[e](f)#!", "jürgen/läufe", "new\nline"} {
		if got, err := exec.Command("sh", "-c", "printf %s "+quoted(path)).Output(); err != nil ||
			string(got) != path {
			t.Errorf("%q becomes %q, %v", path, got, err)
		}
	}
}

// TestSizeOf wants texts of every size to have digits.
func TestSizeOf(t *testing.T) {
	for bytes, want := range map[int64]string{34681: "34.7 kB", 999: "1.0 kB",
		86_300_000: "86.3 MB"} {
		if got := sizeOf(bytes); got != want {
			t.Errorf("%d bytes are %q, want %q", bytes, got, want)
		}
	}
}
