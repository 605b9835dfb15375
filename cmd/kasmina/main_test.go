package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/processor"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm/hf"
)

const (
	testdata = "../../llm/hf/testdata"
	tiny     = testdata + "/tiny"
	license  = "../../LICENSE"
)

// run executes a command line in this process, as main does except for interrupts and several ranks.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	root := newRoot()
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}

// kasmina runs the command.
func kasmina(t *testing.T, args ...string) (stdout string, err error) {
	var out, stderr bytes.Buffer
	err = run(t.Context(), args, &out, &stderr)
	t.Log(stderr.String())
	return out.String(), err
}

// kasminaWithProgress is like kasmina and also returns what the command has written to standard error.
func kasminaWithProgress(t *testing.T, args ...string) (stdout, progress string, err error) {
	var out, stderr bytes.Buffer
	err = run(t.Context(), args, &out, &stderr)
	return out.String(), stderr.String(), err
}

// reference holds the results of transformers with the model.
type reference struct {
	Seq, Tokens  int
	Loss         float64
	Prompt, Text string
}

func readReference(t *testing.T) (r reference) {
	text, err := os.ReadFile(testdata + "/tiny.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &r))
	return r
}

// devices returns the available devices by their name for --device.
func devices(t *testing.T) []string {
	d, err := cudaops.Open()
	if errors.Is(err, cudaops.ErrNoDevice) {
		return []string{"cpu"}
	}
	require.NoError(t, err)
	require.NoError(t, d.Close())
	return []string{"cpu", "cuda"}
}

// TestEval compares losses with transformers on the same windows, with long and with short options.
func TestEval(t *testing.T) {
	r := readReference(t)
	text, err := os.ReadFile(license)
	require.NoError(t, err)
	for i, device := range append(devices(t), "auto") {
		files := []string{"--model", tiny, "--data=" + license}
		if i%2 > 0 {
			files = []string{"-m", tiny, "-d" + license}
		}
		out, err := kasmina(t, append(files, "eval", "--seq", strconv.Itoa(r.Seq), "--device",
			device)...)
		require.NoError(t, err)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		var s score
		require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &s))
		require.Equal(t, r.Tokens, s.Tokens)
		require.InEpsilon(t, r.Loss, s.Loss, 1e-5)
		// The scored tokens cover nearly all bytes.
		require.InEpsilon(t, s.Loss*float64(s.Tokens)/0.6931471805599453/float64(len(text)), s.BPB,
			0.05)
	}
}

// TestGenerate checks that generate prints the greedy text of transformers and nothing else.
func TestGenerate(t *testing.T) {
	r := readReference(t)
	for _, device := range devices(t) {
		out, err := kasmina(t, "generate", "--model", tiny, "--prompt", r.Prompt, "-n", "30",
			"--temperature", "0", "--device", device)
		require.NoError(t, err)
		require.Equal(t, r.Text+"\n", out)
	}

	first, err := kasmina(t, "generate", "--model", tiny, "--prompt", "a", "-n", "20",
		"--temperature", "1.5", "--seed", "3")
	require.NoError(t, err)
	again, err := kasmina(t, "generate", "--model", tiny, "--prompt", "a", "-n", "20",
		"--temperature", "1.5", "--seed", "3")
	require.NoError(t, err)
	require.Equal(t, first, again)
	answer, err := kasmina(t, "generate", "--model", tiny, "--prompt", "Permission", "--chat", "-n",
		"5")
	require.NoError(t, err)
	require.NotContains(t, answer, "assistant:")
	for option, wrong := range map[string]string{"--temperature": "NaN", "--top-p": "-2",
		"--top-k": "-2"} {
		_, err := kasmina(t, "generate", "--model", tiny, "--prompt", "a", "--temperature", "1", option,
			wrong)
		require.ErrorContains(t, err, wrong, option)
	}
}

// TestInspect checks that inspect lists every tensor and describes the folder.
func TestInspect(t *testing.T) {
	out, err := kasmina(t, "inspect", tiny)
	require.NoError(t, err)
	f, err := hf.Open(tiny)
	require.NoError(t, err)
	defer f.Close()
	for _, x := range f.Tensors() {
		require.Contains(t, out, x.Name)
	}

	require.Contains(t, out, "llama")
	require.Contains(t, out, "hf-400-")
	require.Contains(t, out, "moments take    245.2 KiB (adamw), 173.2 KiB (muon), 122.6 KiB (lion)")

	out, err = kasmina(t, "inspect", filepath.Join(tiny, "model.safetensors"))
	require.NoError(t, err)
	require.Contains(t, out, "model.layers.1.mlp.down_proj.weight")
	require.Contains(t, out, "32×64")
	file := filepath.Join(t.TempDir(), "m.gguf")
	_, err = kasmina(t, "convert", "--model", tiny, "--out", file, "--gguf", "q8_0")
	require.NoError(t, err)
	out, err = kasmina(t, "inspect", "--model", file)
	require.NoError(t, err)
	require.Contains(t, out, "blk.1.ffn_down.weight")
	require.Contains(t, out, "tokenizer.chat_template")
	_, err = kasmina(t, "inspect", license)
	require.ErrorContains(t, err, "inspect takes a model's folder")
}

// TestConvert checks that converting keeps the bytes of weights and tokenizer, or changes the type as
// requested.
func TestConvert(t *testing.T) {
	out := filepath.Join(t.TempDir(), "a", "out")
	_, err := kasmina(t, "convert", "--model", tiny, "--out", out)
	require.NoError(t, err)
	for _, name := range []string{"config.json", "generation_config.json", "tokenizer.json",
		"tokenizer_config.json", "chat_template.jinja"} {
		want, err := os.ReadFile(filepath.Join(tiny, name))
		require.NoError(t, err)
		got, err := os.ReadFile(filepath.Join(out, name))
		require.NoError(t, err)
		require.Equal(t, want, got, name)
	}

	_, err = kasmina(t, "convert", "--model", tiny, "--out", out)
	require.ErrorContains(t, err, "is not empty")
	file := filepath.Join(t.TempDir(), "m.gguf")
	_, err = kasmina(t, "convert", "--model", tiny, "--out", file, "--gguf", "q8_0")
	require.NoError(t, err)
	head, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "GGUF", string(head[:4]))
	_, err = kasmina(t, "convert", "--model", tiny, "--out", file, "--gguf", "f32")
	require.ErrorContains(t, err, "exists: name a new file, or remove that one")
	same, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, head, same)
	other := filepath.Join(t.TempDir(), "f16")
	_, err = kasmina(t, "convert", "--model", tiny, "--out", other, "--precision", "f16")
	require.NoError(t, err)
	f, err := hf.Open(other)
	require.NoError(t, err)
	defer f.Close()
	require.Equal(t, "F16", f.Tensors()[0].Type)
}

// TestTrain checks that a run lowers the loss, continues, grows if it sees enough tokens for that to pay off,
// and writes a folder that can be loaded.
func TestTrain(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(text, bytes.Repeat([]byte("The quick brown fox jumps. "), 400),
		0o666))
	loss := func(dir string) (s score) {
		out, err := kasmina(t, "eval", "--model", dir, "--data", text, "--seq", "32")
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal([]byte(out), &s))
		return s
	}

	for _, c := range randtest.SampleOf(t, 2, []struct {
		grow, batch string
		grows       bool
	}{{"2", "16", true}, {"0", "2", false}, {"2", "2", false}}) {
		out := filepath.Join(t.TempDir(), "out")
		args := []string{"train", "--model", tiny, "--data", text, "--out", out,
			"--steps", "100", "--batch", c.batch,
			"--seq", "32", "--lr", "0.003", "--device", "cpu", "--grow", c.grow}
		_, err := kasmina(t, args...)
		require.NoError(t, err)
		require.Less(t, loss(out).Loss, loss(tiny).Loss-1)
		f, err := hf.Open(out)
		require.NoError(t, err)
		log, err := os.ReadFile(filepath.Join(out, "run", logName))
		require.NoError(t, err)
		grew := bytes.Contains(log, []byte("2 blocks to 4"))
		require.Equal(t, c.grows, grew)
		refused := bytes.Contains(log, []byte("the model has kept its blocks"))
		require.Equal(t, c.grow == "2" && !c.grows, refused)
		require.Equal(t, grew && !bytes.Contains(log, []byte("taken back")), f.Config.Layers == 4)
		require.Equal(t, "BF16", f.Tensors()[0].Type)
		require.NoError(t, f.Close())
		checkpoint, err := filepath.Glob(filepath.Join(out, "run", checkpointName+"*"))
		require.NoError(t, err)
		require.Len(t, checkpoint, 2) // including the optimizer's state
	}
}

// TestTrainAdapters checks that LoRA lowers the loss, that the merged model can be loaded, and that only
// the linear layers have changed. It also checks that a run with a time limit ends, and that invalid
// options are rejected.
func TestTrainAdapters(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(text, bytes.Repeat([]byte("The quick brown fox jumps. "), 400),
		0o666))
	loss := func(dir string) (s score) {
		out, err := kasmina(t, "eval", "--model", dir, "--data", text, "--seq", "32", "--device", "cpu")
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal([]byte(out), &s))
		return s
	}

	weights := func(dir string) map[string][]float32 {
		m, err := hf.Load(t.Context(), dir)
		require.NoError(t, err)
		all := map[string][]float32{}
		for _, p := range m.Params {
			all[p.Name] = p.Value.Float32s()
		}
		return all
	}

	before := weights(tiny)
	for _, how := range randtest.SampleOf(t, 2, [][]string{{"grow", "--steps", "60"}, {"all", "--directed", "--steps", "60"},
		{"random", "--steps", "60"}, {"grow", "--time", "200ms"}}) {
		out := filepath.Join(t.TempDir(), "out")
		_, err := kasmina(t, append([]string{"train", "--model", tiny, "--data", text, "--out", out, "--batch",
			"2", "--seq", "32", "--lr", "0.01", "--device", "cpu", "--rank", "2", "--adapters"}, how...)...)
		require.NoError(t, err)
		timed := slices.Contains(how, "--time") // the speed of the machine determines the number of steps
		if !timed {
			require.Less(t, loss(out).Loss, loss(tiny).Loss-0.5, how)
		}
		after := weights(out)
		require.Len(t, after, len(before))
		changed := 0
		for name, w := range after {
			if strings.Contains(name, "_proj.weight") {
				if !slices.Equal(before[name], w) {
					changed++
				}
				continue
			}
			require.Equal(t, before[name], w, name)
		}
		require.True(t, timed || changed > 0, how)
	}

	for line, want := range map[string]string{
		"--adapters some":          "want grow, all or random",
		"--adapters all --rank 0":  "--rank is 0",
		"--adapters all --rank 99": "--rank is 99",
		"--adapters all --grow 2":  "want one of them",
		"--directed":               "add --adapters",
		"--time -1s":               "--time is -1s",
		"--save-every -1":          "--save-every is -1",
		"--eval-every -1":          "--eval-every is -1, want at least 0",
	} {
		_, err := kasmina(t, append(strings.Fields("train --model "+tiny+" --data "+text+" --seq 32 --out "+
			filepath.Join(t.TempDir(), "out")), strings.Fields(line)...)...)
		require.ErrorContains(t, err, want)
	}
}

// TestTrainResumes checks that an interrupted run continues.
func TestTrainResumes(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	args := []string{"train", "--model", tiny, "--data", license, "--out", out,
		"--steps", "30", "--batch", "1",
		"--seq", "16", "--device", "cpu"}
	ctx, cancel := context.WithCancel(t.Context())
	err := run(ctx, args, &bytes.Buffer{}, writer(func(p []byte) {
		if bytes.Contains(p, []byte("step")) {
			cancel()
		}
	}))
	cancel()
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "give the same command again to continue")
	require.NoFileExists(t, filepath.Join(out, "config.json"))
	_, err = kasmina(t, append(args, "--resume")...)
	require.NoError(t, err)
	f, err := hf.Open(out)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// TestTrainProgress checks that progress consists of lines without a terminal, that --quiet turns it off,
// and that a log is always written.
func TestTrainProgress(t *testing.T) {
	for _, quiet := range []bool{false, true} {
		out := filepath.Join(t.TempDir(), "out")
		args := []string{"train", "--model", tiny, "--data", license, "--out", out, "--steps", "3",
			"--batch", "1", "--seq", "16", "--device", "cpu"}
		if quiet {
			args = append(args, "--quiet")
		}
		var stdout, stderr bytes.Buffer
		require.NoError(t, run(t.Context(), args, &stdout, &stderr))
		require.Empty(t, stdout.String())
		require.NotContains(t, stderr.String(), "\r")
		require.NotContains(t, stderr.String(), "\x1b")
		if quiet {
			require.Empty(t, stderr.String())
		} else {
			require.Contains(t, stderr.String(), "] 3/3 ")
		}
		log, err := os.ReadFile(filepath.Join(out, runFolder, logName))
		require.NoError(t, err)
		require.Contains(t, string(log), `"device":"the CPU"`)
	}
}

type writer func([]byte)

func (w writer) Write(p []byte) (int, error) {
	w(p)
	return len(p), nil
}

// TestErrors checks that errors recommend the next action.
func TestErrors(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(empty, nil, 0o666))
	for line, want := range map[string]string{
		"eval --model " +
			tiny: `nothing to measure: give --data or --tasks`,
		"eval --data x":                              `required flag(s) "model" not set`,
		"eval -model x --data y":                     `unexpected argument "x": long options start with two dashes`,
		"generate x -p y":                            `unexpected argument "x": a model is given as --model x; see "kasmina generate --help"`,
		"train --preset small x --out y":             `unexpected argument "x"; see "kasmina train --help"`,
		"train --data x --out y":                     "there is no model to train: give --preset or --layers for a new one",
		"train -m x --preset small --data x --out y": "--preset has no effect with --model",
		"eval --model " + tiny + " --data " +
			empty: "no token can be scored",
		"eval --model " + tiny + " --data none": "no such file",
		"eval --model none --data " + license:   "no such file or directory: name a folder with config.json, or a GGUF file",
		"eval --model some/model --data x": "first run hf download some/model --local-dir model, and name that " +
			"folder",
		"inspect some/model":                            "hf download some/model",
		"finetune -m " + tiny + " -d " + tiny + " -o x": "--data: " + tiny + " is a folder: name a file of JSON Lines",
		"data check " + tiny + " -m " + tiny:            tiny + " is a folder: name a file of JSON Lines",
		"eval --model " + tiny +
			" --data x --seq 1": "--seq is 1, want at least 2",
		"eval --model " + tiny +
			" --modell x": `unknown flag: --modell; see "kasmina eval --help"`,
		"eval --model " + tiny + " --data x y":                          `unexpected argument "y"; see "kasmina eval --help"`,
		"eval --model " + tiny + " --data " + license + " --device tpu": "want cpu, cuda or auto",
		"eval --model " + tiny + " --data " + license +
			" --precision x": "want f32, bf16, f16 or f8",
		"eval --model " + testdata + "/llama2 --data " + license:              "has no tokenizer.json",
		"generate --model " + tiny + " --device tpu":                          "want cpu, cuda or auto",
		"generate --model " + tiny + " -n -1":                                 "--n is -1",
		"convert --model " + tiny:                                             `required flag(s) "out" not set`,
		"convert --model " + tiny + " --out x --precision int8":               "want f32, f16 or bf16",
		"train --model " + tiny + " --data " + license:                        `required flag(s) "out" not set`,
		"train --model " + tiny + " --data " + license + " --out x --steps 0": "--steps is 0",
		"train --model " + tiny + " --data " + license +
			" --out x --resume": "leave --resume out to start one",
		"train --model " + tiny + " --data " + license + " --out " + tiny: "is not empty",
		"convert --model " + tiny +
			" --out x --gguf q4": "want f32, f16, bf16 or q8_0",
		"convert --model " + tiny + " --out x --gguf f16 --precision f16": "leave one of them out",
		"frobnicate":                "unknown command",
		"inspect":                   "name a model folder or a file of weights",
		"inspect -m " + tiny + " y": `unexpected argument "y"`,
		"version now":               `unexpected argument "now"`,
	} {
		_, err := kasmina(t, strings.Fields(line)...)
		require.ErrorContains(t, err, want, line)
	}

	// An unset variable in a script must not select the current folder.
	_, err := kasmina(t, "convert", "--model", tiny, "--out", "")
	require.EqualError(t, err, "--out is empty")
}

// TestUsage checks that errors do not include the usage, and that --help prints it to standard output.
func TestUsage(t *testing.T) {
	for _, line := range []string{"eval --none", "eval", "eval -m none -d none", "frobnicate"} {
		var stdout, stderr bytes.Buffer
		require.Error(t, run(t.Context(), strings.Fields(line), &stdout, &stderr), line)
		require.Empty(t, stdout.String(), line)
		require.Empty(t, stderr.String(), line)
	}

	for _, c := range newRoot().Commands() {
		for _, args := range [][]string{{c.Name(), "--help"}, {c.Name(), "-h"}, {"help", c.Name()}} {
			out, err := kasmina(t, args...)
			require.NoError(t, err)
			require.Contains(t, out, "Usage:\n  kasmina "+c.Name())
			require.Contains(t, out, "-h, --help")
			c.Flags().VisitAll(func(f *pflag.Flag) {
				require.Contains(t, out, "--"+f.Name+" ")
				require.NotContains(t, f.Usage, "\n", f.Name)
			})
		}
	}

	out, err := kasmina(t)
	require.NoError(t, err)
	require.Contains(t, out, "Available Commands:")
}

// TestVersion checks both spellings of the option, and the choice of the version from the build
// information.
func TestVersion(t *testing.T) {
	out, err := kasmina(t, "version")
	require.NoError(t, err)
	require.Regexp(t, `^kasmina \S.* go1\S* \w+/\w+\n$`, out)
	out, err = kasmina(t, "--version")
	require.NoError(t, err)
	require.Equal(t, "kasmina version "+buildVersion()+"\n", out)

	commit := []debug.BuildSetting{{Key: "vcs.revision", Value: "5ae1c0"},
		{Key: "vcs.modified", Value: "true"}}
	for want, info := range map[string]debug.BuildInfo{
		"v1.2.3":                            {Main: debug.Module{Version: "v1.2.3"}, Settings: commit},
		"(devel)":                           {},
		"(devel) (commit 5ae1c0)":           {Settings: commit[:1]},
		"(devel) (commit 5ae1c0, modified)": {Main: debug.Module{Version: "(devel)"}, Settings: commit},
	} {
		require.Equal(t, want, versionOf(&info))
	}
}

// TestHugeTokenizer checks that a tokenizer file of impossible size is rejected quickly.
func TestHugeTokenizer(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(tiny)))
	require.NoError(t, os.Truncate(filepath.Join(dir, "tokenizer.json"), 100<<20))
	start := processor.Time(t)
	_, err := kasmina(t, "eval", "--model", dir, "--data", license)
	require.ErrorContains(t, err, "has 104857600 bytes")
	require.Less(t, processor.Time(t)-start, time.Second)
}

// TestCompletion checks the scripts for shells and the completion of options.
func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		out, err := kasmina(t, "completion", shell)
		require.NoError(t, err)
		require.Contains(t, out, "kasmina")
	}

	for line, want := range map[string]string{
		"eval --mo":            "--model",
		"train --adapters ":    "grow all random",
		"train --preset ":      "small 124M 350M 925M",
		"train --optimizer ":   "adamw muon lion",
		"convert --gguf ":      "f32 f16 bf16 q8_0",
		"train --device ":      "auto cpu cuda",
		"eval --device ":       "auto cpu cuda",
		"train --precision ":   "f32 bf16 f16 f8",
		"convert --precision ": "f32 f16 bf16",
	} {
		out, err := kasmina(t, append([]string{"__complete"}, strings.Split(line, " ")...)...)
		require.NoError(t, err)
		lines := strings.Split(out, "\n")
		for i, value := range strings.Fields(want) {
			require.True(t, strings.HasPrefix(lines[i], value), "%s: %s", line, out)
		}
	}
}

// TestCancel checks that an interrupt ends the work.
func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := run(ctx, []string{"eval", "--model", tiny, "--data", license}, &bytes.Buffer{},
		&bytes.Buffer{})
	require.ErrorIs(t, err, context.Canceled)
}
