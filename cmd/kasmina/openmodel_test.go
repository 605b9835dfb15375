package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// tunedFolders holds what [tunedAdapters] returns. All tests share it, so they must not change the folders.
var tunedFolders struct{ adapters, merged []string }

// tunedAdapters returns folders of adapters of the tiny model, tuned on different texts, and each merged
// into the model.
func tunedAdapters(t *testing.T) (adapters, merged []string) {
	t.Helper()
	if tunedFolders.adapters != nil {
		return tunedFolders.adapters, tunedFolders.merged
	}

	dir := sharedDir(t)
	for i, method := range []string{"lora", "dora", "outer"} {
		name := filepath.Join(dir, method)
		more := []string{"--method", method, "--seed", string(rune('3' + i))}
		if method == "outer" {
			more = []string{"--targets", "all-linear,embed_tokens,lm_head"}
		}
		_, err := kasmina(t, finetuneArgs(writeTuning(t, 40), name, more...)...)
		require.NoError(t, err)
		whole := filepath.Join(dir, "merged", method)
		require.NoError(t, os.MkdirAll(filepath.Dir(whole), 0o777))
		_, err = kasmina(t, "convert", "-m", name, "-o", whole, "--precision", "f32")
		require.NoError(t, err)
		adapters, merged = append(adapters, name), append(merged, whole)
	}

	tunedFolders.adapters, tunedFolders.merged = adapters, merged
	return adapters, merged
}

// TestAdapterOption checks that the commands compute with adapters what they compute with the model into which
// the adapters are merged, however the adapters are named.
func TestAdapterOption(t *testing.T) {
	adapters, merged := tunedAdapters(t)
	task := filepath.Join(t.TempDir(), "task.jsonl")
	require.NoError(t, os.WriteFile(task, []byte(`{"goal": "Permission 3 is", "sol1": "granted", "sol2": "xyz", "label": 0}`+
		"\n"), 0o666))
	for name, args := range randtest.Sample(t, 2, map[string][]string{
		"generate": {"generate", "-p", "Permission 3 is ", "-n", "20", "-t", "0"},
		"chat":     {"chat", "-n", "20", "-t", "0"},
		"eval":     {"eval", "-d", "openmodel_test.go", "--seq", "64"},
		"tasks":    {"eval", "--tasks", task + "=piqa"},
	}) {
		t.Run(name, func(t *testing.T) {
			output := func(more ...string) string {
				args := append(append([]string{args[0], "--device", "cpu", "--precision", "f32"}, args[1:]...), more...)
				var out bytes.Buffer
				root := newRoot()
				root.SetIn(strings.NewReader("Hello\n"))
				root.SetOut(&out)
				root.SetErr(io.Discard)
				root.SetArgs(args)
				require.NoError(t, root.ExecuteContext(t.Context()), "%v", args)
				return out.String()
			}

			plain := output("-m", tiny)
			for i, dir := range adapters {
				want := output("-m", merged[i])
				for _, more := range [][]string{{"-m", tiny, "--adapter", dir}, {"-m", dir}} {
					got := output(more...)
					if name == "eval" { // sums of another order
						require.InDelta(t, scoreIn(t, want).Loss, scoreIn(t, got).Loss, 1e-5)
						continue
					}
					require.Equal(t, want, got, more)
				}
				if name != "tasks" {
					require.NotEqual(t, plain, want)
				}
			}
		})
	}
}

// scoreIn parses the last line of "kasmina eval".
func scoreIn(t *testing.T, out string) (s score) {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &s))
	return s
}

// TestServeAdapters checks that a server offers a model and its adapters by their names.
func TestServeAdapters(t *testing.T) {
	randtest.Concurrent(t)
	adapters, merged := tunedAdapters(t)
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"both":    {[]string{"-m", tiny, "--adapter", adapters[0], "--adapter", adapters[1]}, []string{"tiny", "lora", "dora"}},
		"adapter": {[]string{"-m", adapters[1]}, []string{"dora"}},
		"outer":   {[]string{"-m", adapters[2]}, []string{"outer"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, in := io.Pipe()
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() {
				args := append([]string{"serve", "--addr", "127.0.0.1:0", "--device", "cpu", "--precision", "f32"}, c.args...)
				done <- run(ctx, args, in, io.Discard)
				in.Close()
			}()
			defer func() { stop(); <-done }()

			lines := bufio.NewReader(out)
			first, err := lines.ReadString('\n')
			require.NoError(t, err)
			go io.Copy(io.Discard, lines)
			require.Contains(t, first, strings.Join(c.want, ", ")+" at ")
			url := regexp.MustCompile(`http://\S+/v1`).FindString(first)

			var list struct{ Data []struct{ ID string } }
			response, err := http.Get(url + "/models")
			require.NoError(t, err)
			require.NoError(t, json.NewDecoder(response.Body).Decode(&list))
			response.Body.Close()
			var names []string
			for _, m := range list.Data {
				names = append(names, m.ID)
			}
			require.Equal(t, c.want, names)

			for i, model := range []string{"lora", "dora", "outer"} {
				want, err := kasmina(t, "generate", "-m", merged[i], "-p", "Permission 3 is ", "-n", "20", "-t", "0",
					"--device", "cpu", "--precision", "f32")
				require.NoError(t, err)
				response, err := http.Post(url+"/completions", "application/json", strings.NewReader(
					`{"model": "`+model+`", "prompt": "Permission 3 is ", "max_tokens": 20, "temperature": 0}`))
				require.NoError(t, err)
				var answer struct{ Choices []struct{ Text string } }
				require.NoError(t, json.NewDecoder(response.Body).Decode(&answer))
				response.Body.Close()
				if !slices.Contains(names, model) {
					require.Equal(t, http.StatusNotFound, response.StatusCode)
					continue
				}
				require.Equal(t, strings.TrimSuffix(want, "\n"), "Permission 3 is "+answer.Choices[0].Text)
			}
		})
	}
}

func TestAdapterOptionErrors(t *testing.T) {
	adapters, _ := tunedAdapters(t)
	lost := filepath.Join(t.TempDir(), "lost")
	require.NoError(t, os.CopyFS(lost, os.DirFS(adapters[0])))
	config := filepath.Join(lost, "adapter_config.json")
	text, err := os.ReadFile(config)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(config, regexp.MustCompile(`"base_model_name_or_path": "[^"]*"`).ReplaceAll(text,
		[]byte(`"base_model_name_or_path": "some/model"`)), 0o666))

	for want, args := range map[string][]string{
		"is given 2 times, want once":                 {"generate", "-m", tiny, "--adapter", adapters[0], "--adapter", adapters[1], "-p", "a"},
		"holds adapters: give their model":            {"generate", "-m", adapters[0], "--adapter", adapters[1], "-p", "a"},
		"--adapter: stat nowhere: no such file":       {"generate", "-m", tiny, "--adapter", "nowhere", "-p", "a"},
		"holds a whole model: name it with --model":   {"generate", "-m", tiny, "--adapter", tiny, "-p", "a"},
		"has no adapter_config.json: name a folder":   {"generate", "-m", tiny, "--adapter", t.TempDir(), "-p", "a"},
		"some/model, which is not a folder":           {"generate", "-m", lost, "-p", "a"},
		"adapter 0: it changes the embedding or the":  {"serve", "--addr", "127.0.0.1:0", "-m", tiny, "--adapter", adapters[2]},
		"another model with the name lora, which":     {"serve", "--addr", "127.0.0.1:0", "-m", tiny, "--adapter", adapters[0], "--adapter", adapters[0]},
		"download it, or name its folder with --mode": {"convert", "-m", lost, "-o", filepath.Join(t.TempDir(), "out")},
	} {
		if args[0] != "convert" {
			args = append(args, "--device", "cpu")
		}
		_, err := kasmina(t, args...)
		require.ErrorContains(t, err, want)
	}
}

// TestUnfinishedRun checks that the folder of a run that has not finished is recognized as such.
func TestUnfinishedRun(t *testing.T) {
	d := runDir{filepath.Join(t.TempDir(), "out")}
	require.NoError(t, os.MkdirAll(d.in(""), 0o777))
	require.NoError(t, os.WriteFile(d.in(manifestName), []byte("{}"), 0o666))
	_, err := kasmina(t, "generate", "--model", d.out, "--prompt", "x")
	require.EqualError(t, err, "the run in "+d.out+" has not finished, so it has no model yet: to finish it, repeat "+
		"the command that started it")

	require.NoError(t, os.WriteFile(filepath.Join(d.out, "config.json"), []byte("{}"), 0o666))
	_, err = kasmina(t, "generate", "--model", d.out, "--prompt", "x")
	require.NotContains(t, err.Error(), "has not finished")
}
