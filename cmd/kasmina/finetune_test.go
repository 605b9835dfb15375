package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/failpoint"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/optim"
)

// writeTuning writes a file of prompts with completions, and returns its path.
func writeTuning(t testing.TB, examples int) string {
	t.Helper()
	var text strings.Builder
	for i := range examples {
		fmt.Fprintf(&text, `{"prompt": "Permission %d is ", "completion": "%s"}`+"\n", i%7,
			[]string{"granted", "hereby given", "without charge"}[i%3])
	}
	path := filepath.Join(t.TempDir(), "tune.jsonl")
	require.NoError(t, os.WriteFile(path, []byte(text.String()), 0o666))
	return path
}

// writePairs writes a file of preference pairs, and returns its path.
func writePairs(t testing.TB, pairs int) string {
	t.Helper()
	var text strings.Builder
	for i := range pairs {
		fmt.Fprintf(&text, `{"prompt": "Permission %d is ", "chosen": "granted %d", "rejected": "%sdenied"}`+"\n",
			i%7, i, strings.Repeat("not ", i%3))
	}
	path := filepath.Join(t.TempDir(), "pairs.jsonl")
	require.NoError(t, os.WriteFile(path, []byte(text.String()), 0o666))
	return path
}

// finetuneArgs returns a command line that tunes the tiny model.
func finetuneArgs(data, out string, more ...string) []string {
	return append([]string{"finetune", "-m", tiny, "-d", data, "-o", out, "--device", "cpu", "-n", "12", "--lr",
		"0.01", "--eval-every", "6", "--save-every", "5"}, more...)
}

// lastLine parses the JSON object at the end of the output.
func lastLine(t *testing.T, out string) (result tuned) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &result), out)
	return result
}

// TestFinetune checks that the model learns with every method, and that PEFT or transformers could load
// the files.
func TestFinetune(t *testing.T) {
	data := writeTuning(t, 40)
	for name, c := range randtest.Sample(t, 4, map[string]struct {
		more  []string
		loads string // adapter or model
	}{
		"lora":              {nil, "adapter"},
		"rslora, two":       {[]string{"--method", "rslora", "--targets", "q_proj,layers.1.*.up_proj", "--rank", "4"}, "adapter"},
		"dora with dropout": {[]string{"--method", "dora", "--dropout", "0.1", "--alpha", "16"}, "adapter"},
		"lora, merged":      {[]string{"--merge"}, "model"},
		"nf4":               {[]string{"--base", "nf4"}, "adapter"},
		"f8, dora":          {[]string{"--base", "f8", "--method", "dora", "--recompute"}, "adapter"},
		"bf16, merged":      {[]string{"--base", "bf16", "--merge"}, "model"},
		"nf4, last":         {[]string{"--base", "nf4", "--method", "last", "--blocks", "1"}, "model"},
		"full":              {[]string{"--method", "full", "--recompute"}, "model"},
		"last":              {[]string{"--method", "last", "--blocks", "1"}, "model"},
	}, "lora", "full") {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "out")
			out, err := kasmina(t, finetuneArgs(data, dir, c.more...)...)
			require.NoError(t, err)
			result := lastLine(t, out)
			require.Equal(t, 12, result.Steps)
			require.Equal(t, dir, result.Out)
			require.Less(t, result.TrainLoss, 2.0)
			require.Less(t, *result.ValLoss, 2.0)
			require.Positive(t, result.TokensPerS)
			require.Positive(t, result.PeakGiB)
			require.Positive(t, result.TrainedParams)

			f, err := hf.Open(tiny)
			require.NoError(t, err)
			defer f.Close()
			require.FileExists(t, filepath.Join(dir, "tokenizer.json"))
			require.FileExists(t, filepath.Join(dir, "chat_template.jinja"))
			if c.loads == "model" {
				require.NoFileExists(t, filepath.Join(dir, "adapter_config.json"))
				_, err = hf.Load(t.Context(), dir)
				require.NoError(t, err)
				return
			}

			require.NoFileExists(t, filepath.Join(dir, configName))
			base, err := f.Load(t.Context())
			require.NoError(t, err)
			m, err := hf.LoadAdapter(t.Context(), dir, base, f)
			require.NoError(t, err)
			trained := 0
			for _, p := range m.Params {
				if llm.IsAdapterParam(p.Name) {
					trained += p.Value.Shape().TotalSize()
				}
			}
			require.Equal(t, trained, result.TrainedParams)

			// The same command again has nothing to do and says the same.
			again, err := kasmina(t, finetuneArgs(data, dir, c.more...)...)
			require.NoError(t, err)
			require.Equal(t, out, again)

			_, err = kasmina(t, finetuneArgs(data, dir, append(c.more, "--seed", "9")...)...)
			require.ErrorContains(t, err, "or start a new run with another --out")

			// Merged, the adapters are in the model.
			merged := filepath.Join(t.TempDir(), "merged")
			_, err = kasmina(t, "convert", "-m", dir, "-o", merged, "--precision", "f32")
			require.NoError(t, err)
			whole, err := hf.Load(t.Context(), merged)
			require.NoError(t, err)
			plain, err := hf.Plain(m)
			require.NoError(t, err)
			for i, p := range plain.Params {
				require.Equal(t, p.Value.Data(), whole.Params[i].Value.Data(), p.Name)
			}
			_, err = kasmina(t, "train", "-m", dir, "-d", license, "-o", filepath.Join(t.TempDir(), "out"))
			require.ErrorContains(t, err, "merge them into their model with kasmina convert")
		})
	}
}

// TestFinetunePrefers checks that the model learns from preference pairs with every loss, on one process and
// on two, and that the log has the rewards.
func TestFinetunePrefers(t *testing.T) {
	pairs := writePairs(t, 40)
	for name, more := range randtest.Sample(t, 2, map[string][]string{
		"lora":   {"--beta", "0.3"},
		"full":   {"--method", "full", "--preference-loss", "ipo"},
		"robust": {"--preference-loss", "robust", "--label-smoothing", "0.1"},
	}, "lora") {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "out")
			out, err := kasmina(t, finetuneArgs(pairs, dir, more...)...)
			require.NoError(t, err)
			result := lastLine(t, out)
			require.Equal(t, 12, result.Steps)
			require.Greater(t, *result.RewardMargin, 0.1)
			require.GreaterOrEqual(t, *result.RewardAccuracy, 0.5)

			steps, evaluations := 0, 0
			require.NoError(t, runlog.Read(filepath.Join(dir, runFolder, logName), func(r runlog.Record) {
				switch r.Event {
				case "step":
					require.NotNil(t, r.Rewards)
					steps++
				case "eval":
					require.InDelta(t, r.Rewards.Chosen-r.Rewards.Rejected, r.Rewards.Margin, 1e-9)
					evaluations++
				}
			}))
			require.Equal(t, []int{12, 2}, []int{steps, evaluations})

			together := filepath.Join(t.TempDir(), "out")
			two, err := program(t, nil, finetuneArgs(pairs, together, append(more, "--gpus", "2")...)...).Output()
			require.NoError(t, err)
			other := lastLine(t, string(two))
			require.Equal(t, result.TrainLoss, other.TrainLoss)
			require.Equal(t, *result.RewardMargin, *other.RewardMargin)
		})
	}

	told := stderrOf(t, finetuneArgs(pairs, filepath.Join(t.TempDir(), "out"), "--lr", "0")...)
	for _, want := range []string{"loss sigmoid with beta 0.1", "learning rate 1e-05", "40 examples, 2 examples held out"} {
		require.Contains(t, told, want)
	}
}

// TestFinetuneResumes checks that an interrupted and resumed run writes the same bytes as an
// uninterrupted one.
func TestFinetuneResumes(t *testing.T) {
	adapter := []string{"adapter_model.safetensors", "adapter_config.json"}
	for name, c := range randtest.Sample(t, 1, map[string]struct {
		data        string
		more, files []string
	}{
		"dora":               {writeTuning(t, 40), []string{"--method", "dora", "--dropout", "0.1"}, adapter},
		"pairs":              {writePairs(t, 40), nil, adapter},
		"pairs, all weights": {writePairs(t, 40), []string{"--method", "full"}, []string{"model.safetensors"}},
	}) {
		t.Run(name, func(t *testing.T) { finetuneResumes(t, c.data, c.more, c.files) })
	}
}

// finetuneResumes compares the files of an interrupted run with those of an uninterrupted one.
func finetuneResumes(t *testing.T, data string, more, files []string) {
	whole := filepath.Join(t.TempDir(), "out")
	out, err := kasmina(t, finetuneArgs(data, whole, more...)...)
	require.NoError(t, err)

	stopped := filepath.Join(t.TempDir(), "out")
	args := finetuneArgs(data, stopped, more...)
	ctx, stop := context.WithCancel(t.Context())
	steps := 0
	failpoint.Set(func(point, path string) {
		if point == "event" && path == llm.StepEnd.String() {
			if steps++; steps == 7 {
				stop()
			}
		}
	})
	err = run(ctx, args, &bytes.Buffer{}, &bytes.Buffer{})
	failpoint.Set(nil)
	require.ErrorContains(t, err, "stopped after step 7")

	resumed, err := kasmina(t, args...)
	require.NoError(t, err)
	a, b := lastLine(t, out), lastLine(t, resumed)
	require.Equal(t, a.TrainLoss, b.TrainLoss)
	require.Equal(t, a.ValLoss, b.ValLoss)
	require.Equal(t, a.RewardMargin, b.RewardMargin)
	for _, name := range files {
		want, err := os.ReadFile(filepath.Join(whole, name))
		require.NoError(t, err)
		have, err := os.ReadFile(filepath.Join(stopped, name))
		require.NoError(t, err)
		require.Equal(t, want, have, name)
	}
}

// TestFinetuneRanks checks that two processes have the bytes of one.
func TestFinetuneRanks(t *testing.T) {
	data := writeTuning(t, 40)
	dir := t.TempDir()
	alone, together := filepath.Join(dir, "alone"), filepath.Join(dir, "together")
	more := []string{"--dropout", "0.1", "--batch", "1", "--accumulate", "4", "--base", "nf4", "--recompute-mlps", "1"}
	one, err := kasmina(t, finetuneArgs(data, alone, more...)...)
	require.NoError(t, err)
	two, err := program(t, nil, finetuneArgs(data, together, append(more, "--gpus", "2")...)...).Output()
	require.NoError(t, err)

	a, b := lastLine(t, one), lastLine(t, string(two))
	require.Equal(t, a.TrainLoss, b.TrainLoss)
	require.Equal(t, a.ValLoss, b.ValLoss)
	for _, name := range []string{"adapter_model.safetensors", "adapter_config.json"} {
		want, err := os.ReadFile(filepath.Join(alone, name))
		require.NoError(t, err)
		have, err := os.ReadFile(filepath.Join(together, name))
		require.NoError(t, err)
		require.Equal(t, want, have, name)
	}
}

// TestFinetuneRefuses checks that data and options that cannot be used stop the command before it trains.
func TestFinetuneRefuses(t *testing.T) {
	good := writeTuning(t, 10)
	file := func(lines ...string) string {
		path := filepath.Join(t.TempDir(), "bad.jsonl")
		require.NoError(t, os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o666))
		return path
	}

	const gpt2 = "../../llm/hf/testdata/tiny-gpt2"
	bad := file(`{"prompt": "a", "completion": "b"}`, `{"prompt": "a"}`, `{"text": `)
	for want, args := range map[string][]string{
		bad + ":2: the prompt has no answer":          finetuneArgs(bad, "OUT"),
		bad + ":3: the line is not valid":             finetuneArgs(bad, "OUT"),
		"2 problems, and nothing was trained":         finetuneArgs(bad, "OUT"),
		"--beta has no effect, because":               finetuneArgs(good, "OUT", "--beta", "0.2"),
		"β is 0, want":                                finetuneArgs(writePairs(t, 9), "OUT", "--beta", "0"),
		"--seq is 20, and the longest pair of":        finetuneArgs(writePairs(t, 9), "OUT", "--seq", "20"),
		"--seq 3\" shows all of them":                 finetuneArgs(good, "OUT", "--seq", "3"),
		"--seq is 4000, and the model has":            finetuneArgs(good, "OUT", "--seq", "4000", "--model", gpt2),
		"instead (add --merge)":                       finetuneArgs(good, "OUT", "--model", gpt2),
		"no such file":                                finetuneArgs(filepath.Join(t.TempDir(), "none"), "OUT"),
		"the answer would be cut off":                 finetuneArgs(file(`{"text": "`+strings.Repeat("a b ", 400)+`"}`), "OUT"),
		"--base is \"q8_0\", want":                    finetuneArgs(good, "OUT", "--base", "q8_0"),
		"with --method full, all weights learn":       finetuneArgs(good, "OUT", "--base", "nf4", "--method", "full"),
		"--method is \"other\"":                       finetuneArgs(good, "OUT", "--method", "other"),
		"--base nf4 does not work with --method seed": finetuneArgs(good, "OUT", "--base", "nf4", "--method", "seeds"),
		"--alpha has no effect with --method":         finetuneArgs(good, "OUT", "--alpha", "3", "--method", "seeds"),
		"--rank: the rank is 1000, want 1 to":         finetuneArgs(good, "OUT", "--rank", "1000", "--method", "seeds"),
		"needs the number of --blocks":                finetuneArgs(good, "OUT", "--method", "last"),
		"--blocks: llm: the last 3 blocks of a model that has 2": finetuneArgs(good, "OUT", "--method", "last",
			"--blocks", "3"),
		"no linear layer of the model matches \"c_attn\"": finetuneArgs(good, "OUT", "--targets", "c_attn"),
	} {
		out := filepath.Join(t.TempDir(), "out")
		args = slices.Clone(args)
		args[slices.Index(args, "OUT")] = out
		_, err := kasmina(t, args...)
		require.ErrorContains(t, err, want)
		require.NoDirExists(t, out)
	}
}

// TestFinetuneSeeds checks that chunk seeds learn next to a model, and that the commands use them like adapters.
func TestFinetuneSeeds(t *testing.T) {
	out := filepath.Join(t.TempDir(), "seeds")
	told := stderrOf(t, "finetune", "-m", tiny, "-d", writeTuning(t, 20), "-o", out, "--device", "cpu", "--method", "seeds",
		"--rank", "8", "--lr", "0.02", "--steps", "12", "--batch", "2", "--accumulate", "1")
	require.Contains(t, told, "seeds of rank 8 after 2 blocks")
	require.Contains(t, told, "next      kasmina chat -m "+out)
	require.Contains(t, told, "--adapter "+out)

	generated := func(more ...string) string {
		text, err := kasmina(t, append([]string{"generate", "-p", "Permission 3 is ", "-n", "20", "-t", "0", "--device", "cpu",
			"--precision", "f32"}, more...)...)
		require.NoError(t, err)
		return text
	}
	want := generated("-m", out)
	require.Equal(t, want, generated("-m", tiny, "--adapter", out))
	require.NotEqual(t, want, generated("-m", tiny))

	loss := func(more ...string) float64 {
		text, err := kasmina(t, append([]string{"eval", "-d", "finetune_test.go", "--seq", "64", "--device", "cpu"}, more...)...)
		require.NoError(t, err)
		return scoreIn(t, text).Loss
	}
	require.Equal(t, loss("-m", out), loss("-m", tiny, "--adapter", out))
	require.NotEqual(t, loss("-m", out), loss("-m", tiny))

	_, err := kasmina(t, "convert", "-m", out, "-o", filepath.Join(t.TempDir(), "x"))
	require.ErrorContains(t, err, "it holds chunk seeds, which models in the format of transformers do not have")
}

// TestFinetunePrints checks that the command prints its defaults.
func TestFinetunePrints(t *testing.T) {
	told := stderrOf(t, "finetune", "-m", tiny, "-d", writeTuning(t, 40), "-o", filepath.Join(t.TempDir(), "out"),
		"--device", "cpu", "--epochs", "1", "--prompt", "Permission 3 is ")
	for _, want := range []string{"40 examples, 2 examples held out", "lora of rank 16, alpha 32 and dropout 0 on 14 linear layers",
		"learning rate 0.0002", "then linear to 0", "without weight decay", "of 8 sequences, seed 1", "assistant: ",
		"precision matrix products in f32, on a CPU",
		"may be too few to learn the examples: for more, raise --epochs",
		"saved     the adapters in"} {
		require.Contains(t, told, want)
	}
}

// TestSummaryOf checks that problems that several lines share are listed once.
func TestSummaryOf(t *testing.T) {
	var all []*chatdata.Problem
	for line := range 30 {
		all = append(all, &chatdata.Problem{File: "x", Line: line + 1, What: "the prompt has no answer"})
	}
	all = append(all, &chatdata.Problem{File: "x", Line: 31, What: "the line is not valid"})
	require.Equal(t, "\n  x:1: the prompt has no answer (the same in 29 more examples)\n  x:31: the line is not valid",
		summaryOf(all))
	for line := range 30 {
		all = append(all, &chatdata.Problem{File: "x", Line: line + 40, What: fmt.Sprint("problem ", line)})
	}
	require.Contains(t, summaryOf(all), "problem 7\n  and 22 problems of other kinds")
}

// TestFinetuneKeeps checks that the command stays within a forgetting budget that the same run without one
// exceeds, that the log, the progress and the result say so, and that the text can be a file of text, a file of
// examples, or the model's own.
func TestFinetuneKeeps(t *testing.T) {
	data := writeTuning(t, 40)
	rise := func(more ...string) (tuned, string, string) {
		dir := filepath.Join(t.TempDir(), "out")
		out, progress, err := kasminaWithProgress(t, finetuneArgs(data, dir, append([]string{"--eval-every", "2", "--lr",
			"0.05"}, more...)...)...)
		require.NoError(t, err)
		return lastLine(t, out), progress, dir
	}

	for name, c := range randtest.Sample(t, 2, map[string][]string{
		"text":     {"--keep", license},
		"examples": {"--keep", writeTuning(t, 60)},
		"self":     {"--keep", "self"},
		"full":     {"--keep", license, "--method", "full", "--lr", "0.01"},
		"growing":  {"--keep", license, "--grow-rank"},
		"nf4":      {"--keep", license, "--grow-rank", "--base", "nf4"},
	}, "text") {
		t.Run(name, func(t *testing.T) {
			loose, _, _ := rise(append(c, "--forget", "100")...)
			require.Zero(t, *loose.Rollbacks)
			if name == "examples" { // it learns them
				require.Negative(t, *loose.KeepRise)
				return
			}
			require.Greater(t, *loose.KeepRise, 0.01)

			budget := *loose.KeepRise / 3
			kept, progress, dir := rise(append(c, "--forget", fmt.Sprint(budget))...)
			require.LessOrEqual(t, *kept.KeepRise, budget)
			require.Positive(t, *kept.Rollbacks)
			require.Contains(t, progress, "exceeds the budget of")
			require.Contains(t, progress, "restored the model of step")

			var noted, measured bool
			require.NoError(t, runlog.Read(filepath.Join(dir, "run", logName), func(r runlog.Record) {
				noted = noted || strings.Contains(r.Text, "exceeds the budget of")
				measured = measured || r.Retention != nil && r.Retention.Rollbacks == *kept.Rollbacks
			}))
			require.True(t, noted)
			require.True(t, measured)
		})
	}

	_, err := kasmina(t, finetuneArgs(data, filepath.Join(t.TempDir(), "out"), "--keep", filepath.Join(t.TempDir(), "none"))...)
	require.ErrorContains(t, err, "--keep")
	empty := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(empty, []byte("{}\n"), 0o666))
	_, err = kasmina(t, finetuneArgs(data, filepath.Join(t.TempDir(), "out"), "--keep", empty)...)
	require.ErrorContains(t, err, "--keep")
}

// TestFinetuneGrowsRanks checks that layers get different ranks, and that the saved adapters, which PEFT reads by
// rank_pattern and alpha_pattern, compute the same as the model at the end of the run.
func TestFinetuneGrowsRanks(t *testing.T) {
	data, dir := writeTuning(t, 40), filepath.Join(t.TempDir(), "out")
	out, err := kasmina(t, finetuneArgs(data, dir, "--rank", "4", "--grow-rank", "--keep", license, "--forget", "10")...)
	require.NoError(t, err)
	result := lastLine(t, out)

	text, err := os.ReadFile(filepath.Join(dir, "adapter_config.json"))
	require.NoError(t, err)
	var c struct {
		Rank  map[string]int     `json:"rank_pattern"`
		Alpha map[string]float64 `json:"alpha_pattern"`
	}
	require.NoError(t, json.Unmarshal(text, &c))
	different := map[int]bool{}
	for name, rank := range c.Rank {
		different[rank] = true
		require.InDelta(t, 32.0/4, c.Alpha[name]/float64(rank), 1e-9)
	}
	require.Greater(t, len(different), 1)

	f, err := hf.Open(tiny)
	require.NoError(t, err)
	defer f.Close()
	base, err := f.Load(t.Context())
	require.NoError(t, err)
	m, err := hf.LoadAdapter(t.Context(), dir, base, f)
	require.NoError(t, err)
	saved, err := llm.LoadModel(t.Context(), filepath.Join(dir, "run", checkpointName))
	require.ErrorContains(t, err, "resume the run", "its base is not in the checkpoint")
	require.Nil(t, saved)
	trained := 0
	for _, p := range m.Params {
		if llm.IsAdapterParam(p.Name) {
			trained += p.Value.Shape().TotalSize()
		}
	}
	require.Equal(t, trained, result.TrainedParams)

	// With an old text, the directions stay as they were chosen, with the norm of their start.
	for _, target := range m.Config.Adapter.Targets {
		a := m.Param(target + ".lora_A.weight")
		rank, in := a.Shape()[0], a.Shape()[1]
		for k := range rank {
			square := 0.0
			for _, v := range a.Float32s()[k*in:][:in] {
				square += float64(v) * float64(v)
			}
			require.InDelta(t, 1.0/3, square, 1e-5)
		}
	}
}

// planner is an engine on the CPU that claims to know its memory.
type planner struct{ llm.Engine }

func (planner) MemoryPlan() llm.MemoryPlan {
	return llm.MemoryPlan{Weights: 3 << 20, Moments: 1 << 20, Run: 5 << 20, Workspace: 32 << 20}
}

func TestPrintPlan(t *testing.T) {
	c := llm.Config{Vocab: 16, Dim: 8, Layers: 1, Heads: 1, Seq: 4}.Default()
	m, err := llm.NewModel(c, tensor.Float32, 1)
	require.NoError(t, err)
	l, err := chatdata.NewLoader([]chatdata.Sequence{{Line: 1, IDs: []int{1, 2, 3}, Learn: []bool{false, true, true}}},
		data.LoaderConfig{Batch: 1, Seq: 4, Seed: 1})
	require.NoError(t, err)
	for _, knows := range []bool{false, true} {
		o, err := optim.NewAdamW(optim.WithLR(0.1))
		require.NoError(t, err)
		tr, err := llm.NewTrainer(m, l, o, llm.TrainConfig{Steps: 1, Batch: 1, Schedule: optim.Constant(0.1),
			Engine: func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
				e, err := llm.CPUEngine()(m, o, c)
				if knows {
					return planner{e}, err
				}
				return e, err
			}})
		require.NoError(t, err)
		var one, two bytes.Buffer
		roomy := &trainOptions{gpus: 1, engine: engineOptions{memory: 1}}
		require.Equal(t, knows, roomy.printPlan(&one, tr))
		tight := &trainOptions{gpus: 2, engine: engineOptions{memory: 8.5 / 1024}}
		require.Equal(t, knows, tight.printPlan(&two, tr))
		if knows {
			require.Equal(t, "memory    41.0 MiB on the GPU: 3.0 MiB of weights, 0.0 KiB of summed gradients, 1.0 MiB of optimizer "+
				"state, 5.0 MiB for a batch and 32.0 MiB of workspace\n", one.String())
			require.Contains(t, two.String(), "41.0 MiB on each GPU, not counting what the GPUs exchange: 3.0 MiB")
			require.Contains(t, two.String(), "needs more than --memory 0.00830078125 in any case: for less, add --recompute")
		}
		require.NoError(t, tr.Close())
	}
}

// TestDefaultPrecision checks that a new run on a GPU computes in bfloat16, and that the run in a folder keeps its
// precision, as far as its version recorded that.
func TestDefaultPrecision(t *testing.T) {
	for _, c := range []struct {
		options map[string]string
		want    cudaops.Precision
	}{
		{nil, cudaops.BFloat16},
		{map[string]string{"precision": "f32"}, cudaops.Float32},
		{map[string]string{"precision": ""}, cudaops.Float32},
		{map[string]string{}, cudaops.Float32},
		{map[string]string{"precision": "bf16"}, cudaops.BFloat16},
		{map[string]string{"precision": "f8", "device": "cuda"}, cudaops.Float8},
		{map[string]string{"precision": "f32", "device": "cpu"}, cudaops.BFloat16},
	} {
		o := &finetuneOptions{}
		o.out = filepath.Join(t.TempDir(), "out")
		if c.options != nil {
			require.NoError(t, os.MkdirAll(o.in(""), 0o777))
			require.NoError(t, o.dir().writeManifest(&manifest{Options: c.options}))
		}
		require.Equal(t, c.want, o.defaultPrecision(), c.options)
	}
}

// TestNextStepsWithoutChat checks that a model without a chat template is recommended for continuing texts.
func TestNextStepsWithoutChat(t *testing.T) {
	for _, method := range []string{methodSeeds, "lora", "full"} {
		o := &finetuneOptions{method: method}
		o.out = "tuned"
		var told strings.Builder
		o.printNextSteps(&told, false)
		require.Contains(t, told.String(), "next      kasmina generate -m tuned -p TEXT\n")
		require.NotContains(t, told.String(), "kasmina chat")
	}
}
