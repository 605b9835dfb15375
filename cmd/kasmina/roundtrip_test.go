package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

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

// TestRoundTrip trains adapters, merges and saves them, and checks that the saved model and the server generate the
// same 1,000 greedy tokens, and that the run's GGUF file has the same weights as the saved model.
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
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, []string{"serve", "--model", out, "--device", "cpu", "--addr", "127.0.0.1:0", "--precision", "f32"}, w, io.Discard)
		w.Close()
	}()
	lines := bufio.NewScanner(r)
	require.True(t, lines.Scan())
	url := regexp.MustCompile(`http://[^/]+`).FindString(lines.Text())
	go io.Copy(io.Discard, r)
	answer, err := http.Post(url+"/v1/completions", "application/json",
		strings.NewReader(`{"prompt":"Permission is","temperature":0,"max_tokens":1000,"ignore_eos":true}`))
	require.NoError(t, err)
	var got completion
	require.NoError(t, json.NewDecoder(answer.Body).Decode(&got))
	answer.Body.Close()
	require.Equal(t, 1000, got.Usage.Completion)
	require.Equal(t, want.String(), got.Choices[0].Text)
	cancel()
	http.DefaultClient.CloseIdleConnections()
	require.ErrorIs(t, <-ended, context.Canceled)
}

// TestServerIsKilled kills the server in the middle of a stream, and checks that the client notices, and that a
// new server answers at the same address at once.
func TestServerIsKilled(t *testing.T) {
	addr, body := "127.0.0.1:0", `{"prompt":"Permission","temperature":0,"max_tokens":90,"ignore_eos":true`
	var want string
	for i := range 3 {
		c := program(t, nil, "serve", "--model", tiny, "--device", "cpu", "--addr", addr)
		stdout, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		t.Cleanup(func() { c.Process.Kill() })
		lines := bufio.NewScanner(stdout)
		require.True(t, lines.Scan(), "server %d does not start", i)
		addr = regexp.MustCompile(`127\.0\.0\.1:\d+`).FindString(lines.Text())
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
