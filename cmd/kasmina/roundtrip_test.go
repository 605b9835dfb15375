package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/hf/gguf"
	"github.com/kasmina-go/kasmina/llm/sampler"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// completion is a response from /v1/completions.
type completion struct {
	Choices []struct {
		Text   string
		Reason string `json:"finish_reason"`
	}
	Usage struct {
		Completion int `json:"completion_tokens"`
	}
}

// TestRoundTrip trains adapters, merges and saves them, and checks that the saved model and its GGUF file generate
// the same 1,000 greedy tokens, also when they are served, and that the run's GGUF file has the same weights as the
// saved model.
func TestRoundTrip(t *testing.T) {
	model := filepath.Join(t.TempDir(), "model")
	// The saved model must not round its weights to bfloat16, because the GGUF file keeps them in
	// float32.
	_, err := kasmina(t, "convert", "--model", tiny, "--out", model, "--precision", "f32")
	require.NoError(t, err)
	text, err := os.ReadFile(filepath.Join(model, "config.json"))
	require.NoError(t, err)
	text = regexp.MustCompile(`"max_position_embeddings": \d+`).ReplaceAll(text, []byte(`"max_position_embeddings": 1100`))
	require.NoError(t, os.WriteFile(filepath.Join(model, "config.json"), text, 0o666))

	out := filepath.Join(t.TempDir(), "tuned")
	_, err = kasmina(t, "train", "-m", model, "-d", license, "-o", out, "-n", "4", "-b", "2", "--seq", "32", "--lr", "0.01",
		"--adapters", "all", "--gguf", "f32", "--device", "cpu", "--quiet")
	require.NoError(t, err)
	converted := filepath.Join(t.TempDir(), "converted.gguf")
	_, err = kasmina(t, "convert", "--model", out, "--out", converted, "--gguf", "f32")
	require.NoError(t, err)
	weights := func(path string) []byte { // the last bytes of the file
		d, err := gguf.Describe(path)
		require.NoError(t, err)
		size := 0
		for _, x := range d.Tensors {
			n := 4
			for _, d := range x.Shape {
				n *= d
			}
			size += n
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Greater(t, size, 100_000)
		return text[len(text)-size:]
	}
	require.True(t, bytes.Equal(weights(filepath.Join(out, ggufName)), weights(converted)), "the weights differ")

	m, err := hf.Load(t.Context(), out)
	require.NoError(t, err)
	tok, err := tokenizers.Load(out)
	require.NoError(t, err)
	g, err := llm.NewGenerator(m)
	require.NoError(t, err)
	defer g.Close()
	s, err := sampler.New(sampler.Config{Vocab: min(m.Config.Vocab, tok.VocabSize())})
	require.NoError(t, err)
	before, _ := tok.Affixes()
	prompt := append(before, tok.Encode([]byte("Permission is"))...)
	d := tok.NewDecoder(true)
	require.NoError(t, d.Prime(prompt))
	var want strings.Builder
	for id, err := range g.Generate(t.Context(), prompt, 1000, s) {
		require.NoError(t, err)
		part, err := d.Next(id)
		require.NoError(t, err)
		want.Write(part)
	}
	want.Write(d.Flush())

	// Serve the weights in float32, the type of the saved files.
	for _, model := range []string{out, filepath.Join(out, ggufName)} {
		got := complete(t, `{"prompt":"Permission is","temperature":0,"max_tokens":1000,"ignore_eos":true}`,
			"--model", model, "--precision", "f32")
		require.Equal(t, 1000, got.Usage.Completion)
		require.Equal(t, want.String(), got.Choices[0].Text, model)
	}
}

// complete starts a server with the given arguments on the CPU, and returns its answer to a request for a completion.
func complete(t *testing.T, body string, args ...string) (got completion) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, append([]string{"serve", "--device", "cpu", "--addr", "127.0.0.1:0"}, args...), w, io.Discard)
		w.Close()
	}()
	lines := bufio.NewScanner(r)
	require.True(t, lines.Scan(), "the server does not start")
	url := regexp.MustCompile(`http://[^/]+`).FindString(lines.Text())
	go io.Copy(io.Discard, r)

	answer, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	require.NoError(t, json.NewDecoder(answer.Body).Decode(&got))
	answer.Body.Close()
	cancel()
	http.DefaultClient.CloseIdleConnections()
	require.ErrorIs(t, <-ended, context.Canceled)
	return got
}

// TestGGUFModels checks that the commands compute with a GGUF file what they compute with the folder that it was
// converted from, at the precision of the file.
func TestGGUFModels(t *testing.T) {
	task := filepath.Join(t.TempDir(), "task.jsonl")
	require.NoError(t, os.WriteFile(task, []byte(`{"goal": "Permission 3 is", "sol1": "granted", "sol2": "xyz", "label": 0}`+
		"\n"), 0o666))
	for _, kind := range randtest.SampleOf(t, 2, []string{"q8_0", "f32", "f16", "bf16"}) {
		t.Run(kind, func(t *testing.T) {
			// The folder has the weights of the file, as far as folders can.
			folder, file := filepath.Join(t.TempDir(), "tiny"), filepath.Join(t.TempDir(), "tiny.gguf")
			stored := kind
			if kind == "q8_0" {
				stored = "f32"
			}
			_, err := kasmina(t, "convert", "--model", tiny, "--out", folder, "--precision", stored)
			require.NoError(t, err)
			_, err = kasmina(t, "convert", "--model", folder, "--out", file, "--gguf", kind)
			require.NoError(t, err)

			precision := "f32"
			if kind == "bf16" || kind == "q8_0" {
				precision = kind
			}
			for name, args := range map[string][]string{
				"generate":      {"generate", "-p", "Permission 3 is ", "-n", "40", "-t", "0"},
				"generate chat": {"generate", "-p", "Hello", "--chat", "-n", "40", "-t", "0"},
				"lookup":        {"generate", "-p", "Permission 3 is ", "-n", "40", "-t", "0", "--lookup", "4"},
				"eval":          {"eval", "-d", "openmodel_test.go", "--seq", "64"},
				"tasks":         {"eval", "--tasks", task + "=piqa"},
			} {
				want, err := kasmina(t, append(args, "--device", "cpu", "--precision", precision, "-m", folder)...)
				require.NoError(t, err)
				got, err := kasmina(t, append(args, "--device", "cpu", "-m", file)...)
				require.NoError(t, err)
				require.Equal(t, want, got, name)
			}

			body := `{"model":"tiny","prompt":"Permission is","temperature":0,"max_tokens":40}`
			want := complete(t, body, "-m", folder, "--precision", precision)
			require.NotEmpty(t, want.Choices)
			require.Equal(t, want, complete(t, body, "-m", file))
		})
	}

	// A file can be converted back, tuned, and be the model of adapters.
	file, folder := filepath.Join(t.TempDir(), "tiny.gguf"), filepath.Join(t.TempDir(), "again")
	_, err := kasmina(t, "convert", "--model", tiny, "--out", file, "--gguf", "f32")
	require.NoError(t, err)
	_, err = kasmina(t, "convert", "--model", file, "--out", folder)
	require.NoError(t, err)
	args := []string{"generate", "-p", "Permission", "-n", "40", "-t", "0", "--device", "cpu", "--precision", "f32", "-m"}
	want, err := kasmina(t, append(args, folder)...)
	require.NoError(t, err)
	got, err := kasmina(t, append(args, file)...)
	require.NoError(t, err)
	require.Equal(t, want, got)

	tuned := filepath.Join(t.TempDir(), "tuned")
	_, err = kasmina(t, finetuneArgs(writeTuning(t, 40), tuned, "-m", file)...)
	require.NoError(t, err)
	want, err = kasmina(t, append(args, folder, "--adapter", tuned)...)
	require.NoError(t, err)
	got, err = kasmina(t, append(args, tuned)...) // the adapters name their model
	require.NoError(t, err)
	require.Equal(t, want, got)

	_, err = kasmina(t, "generate", "-m", "roundtrip_test.go", "-p", "x")
	require.ErrorContains(t, err, "neither a folder nor a GGUF file")
}

// TestServerIsKilled kills the server in the middle of a stream, and checks that the client notices, and that a
// new server answers at the same address at once.
func TestServerIsKilled(t *testing.T) {
	const body = `{"prompt":"Permission","temperature":0,"max_tokens":90,"ignore_eos":true`

	// An unused port below those that systems assign by themselves, so that no other program takes it between two servers.
	addr := ""
	for addr == "" {
		if l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 5000+rand.IntN(5000))); err == nil {
			addr = l.Addr().String()
			require.NoError(t, l.Close())
		}
	}

	var want string
	for i := range 3 {
		c := program(t, nil, "serve", "--model", tiny, "--device", "cpu", "--addr", addr)
		stdout, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		t.Cleanup(func() { c.Process.Kill() })
		lines := bufio.NewScanner(stdout)
		require.True(t, lines.Scan(), "server %d does not start", i)
		require.Contains(t, lines.Text(), addr)
		go io.Copy(io.Discard, stdout)

		url := fmt.Sprintf("http://%s/v1/completions", addr)
		answer, err := http.Post(url, "application/json", strings.NewReader(body+"}"))
		require.NoError(t, err)
		var whole completion
		require.NoError(t, json.NewDecoder(answer.Body).Decode(&whole))
		answer.Body.Close()
		if want == "" {
			want = whole.Choices[0].Text
		}
		require.Equal(t, want, whole.Choices[0].Text)

		// Killed between the first event and the last.
		stream, err := http.Post(url, "application/json", strings.NewReader(body+`,"stream":true,"n":64}`))
		require.NoError(t, err)
		_, err = io.ReadFull(stream.Body, make([]byte, 100))
		require.NoError(t, err)
		require.NoError(t, c.Process.Kill())
		rest, err := io.ReadAll(stream.Body)
		stream.Body.Close()
		require.Error(t, err, "the stream seems to be complete")
		require.NotContains(t, string(rest), "[DONE]")
		c.Wait()
		http.DefaultClient.CloseIdleConnections()
	}
}
