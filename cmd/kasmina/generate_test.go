package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// TestSamplingOptions checks the sampling settings for options that are given, zero, or missing.
func TestSamplingOptions(t *testing.T) {
	file := hf.Generation{Sample: true, Temperature: 0.5, TopK: 20, TopP: 0.9, MinP: 0.1, Repetition: 1.05}
	for _, c := range []struct {
		args []string
		file hf.Generation
		want sampler.Config
	}{
		{nil, file, sampler.Config{Temperature: 0.5, TopK: 20, TopP: 0.9, MinP: 0.1, Repetition: 1.05}},
		{[]string{"--top-k", "0", "--top-p", "0"}, file,
			sampler.Config{Temperature: 0.5, TopP: sampler.MostProbable, MinP: 0.1, Repetition: 1.05}},
		{[]string{"--top-k", "50", "--top-p", "1"}, file,
			sampler.Config{Temperature: 0.5, TopK: 50, TopP: 1, MinP: 0.1, Repetition: 1.05}},
		{nil, hf.Generation{Sample: true, Temperature: 1}, // a top_k and a top_p of 0
			sampler.Config{Temperature: 1, TopP: sampler.MostProbable}},
		{[]string{"--temperature", "2"}, hf.Generation{Temperature: 1, TopK: 50, TopP: 1},
			sampler.Config{Temperature: 2, TopK: 50, TopP: 1}},
		{[]string{"--temperature", "0"}, file, sampler.Config{TopK: 20, TopP: 0.9, MinP: 0.1, Repetition: 1.05}},
	} {
		var o generateOptions
		command := o.command()
		require.NoError(t, command.ParseFlags(c.args))
		c.want.Seed, c.want.Vocab = 1, 400
		require.Equal(t, c.want, o.sampler(command, c.file, 400), c.args)
	}
}

// TestTopPOfZero checks that every seed gives the most likely text.
func TestTopPOfZero(t *testing.T) {
	args := []string{"generate", "--model", tiny, "--device", "cpu", "--prompt", "Permission", "--n",
		"20"}
	greedy, err := kasmina(t, append(args, "--temperature", "0")...)
	require.NoError(t, err)
	for seed := range 3 {
		got, err := kasmina(t, append(args, "--temperature", "1", "--top-p", "0", "--seed",
			strconv.Itoa(seed))...)
		require.NoError(t, err)
		require.Equal(t, greedy, got)
	}
}

// TestPromptEndsInsideACharacter checks that the bytes of an unfinished character are printed once.
func TestPromptEndsInsideACharacter(t *testing.T) {
	for _, prompt := range []string{"caf\xe9", "caf\xc3", "\xe2\x82", "\xf0\x9f\x98", "\xff", "é"} {
		got, err := kasmina(t, "generate", "--model", tiny, "--device", "cpu", "--prompt", prompt,
			"--n", "0")
		require.NoError(t, err)
		require.Equal(t, prompt+"\n", got)
	}
}

// TestMoreTokensThanModel uses a tokenizer with one token more than its model, as in the published Gemma
// 3.
func TestMoreTokensThanModel(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "model")
	require.NoError(t, os.CopyFS(dir, os.DirFS(tiny)))
	path := filepath.Join(dir, "tokenizer.json")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var tok map[string]any
	require.NoError(t, json.Unmarshal(text, &tok))
	tok["added_tokens"] = append(tok["added_tokens"].([]any), map[string]any{"id": 400,
		"content": "<picture>", "special": true})
	text, err = json.Marshal(tok)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, text, 0o666))

	r := readReference(t)
	out, err := kasmina(t, "generate", "--model", dir, "--device", "cpu", "--prompt", r.Prompt, "--n",
		"30", "--temperature", "0")
	require.NoError(t, err)
	require.Equal(t, r.Text+"\n", out)
	_, err = kasmina(t, "generate", "--model", dir, "--device", "cpu", "--prompt", "a<picture>")
	require.ErrorContains(t, err, `the token "<picture>" with the id 400, and the model has 400 tokens`)

	_, err = kasmina(t, "eval", "--model", dir, "--device", "cpu", "--data", license)
	require.NoError(t, err)
	_, err = kasmina(t, "convert", "--model", dir, "--gguf", "f32", "--out",
		filepath.Join(t.TempDir(), "m.gguf"))
	require.NoError(t, err)
	_, err = kasmina(t, "train", "--model", dir, "--device", "cpu", "--data", license, "--steps", "1",
		"--batch", "1", "--seq", "16", "--quiet", "--out", filepath.Join(t.TempDir(), "trained"))
	require.NoError(t, err)
}

// TestSaveIsCheckedFirst checks that a run which could not save its model fails before its first step.
func TestSaveIsCheckedFirst(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "model")
	require.NoError(t, os.CopyFS(dir, os.DirFS(tiny)))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "vocab.json"), 0o777)) // so it cannot be copied
	for _, more := range [][]string{nil, {"--grow", "2"}} {
		out := filepath.Join(t.TempDir(), "out")
		_, err := kasmina(t, append([]string{"train", "--model", dir, "--device", "cpu", "--data",
			license, "--steps", "100000", "--batch", "1", "--seq", "16", "--quiet", "--out", out},
			more...)...)
		require.ErrorContains(t, err, "the trained model could not be saved")
		require.ErrorContains(t, err, "vocab.json")
		require.NoFileExists(t, filepath.Join(out, "config.json"))
	}
}

// TestJSONSchema checks that generated texts and answers match a schema, and that an unsupported one is rejected.
func TestJSONSchema(t *testing.T) {
	schema := filepath.Join(t.TempDir(), "schema.json")
	require.NoError(t, os.WriteFile(schema, []byte(`{"type":"object","properties":{"size":{"enum":["small","large"]},`+
		`"count":{"type":"integer","minimum":1,"maximum":9}},"required":["size","count"]}`), 0o600))
	var answer struct {
		Size  string
		Count int
	}
	out, err := kasmina(t, "generate", "--model", tiny, "-p", "Permission", "-t", "1", "--json-schema", schema)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(out, "Permission")), &answer), out)
	require.Contains(t, []string{"small", "large"}, answer.Size)
	require.Contains(t, []int{1, 2, 3, 4, 5, 6, 7, 8, 9}, answer.Count)

	require.NoError(t, os.WriteFile(schema, []byte(`{"type":"array","uniqueItems":true}`), 0o600))
	_, err = kasmina(t, "generate", "--model", tiny, "-p", "Permission", "--json-schema", schema)
	require.ErrorContains(t, err, "uniqueItems")
	_, err = kasmina(t, "chat", "--model", tiny, "--json-schema", schema)
	require.ErrorContains(t, err, "uniqueItems")
}

// TestLookupFlag checks that --lookup does not change a text.
func TestLookupFlag(t *testing.T) {
	for _, more := range [][]string{{"-t", "0"}, {"-t", "0.5", "-s", "3"}} {
		args := append([]string{"generate", "--model", tiny, "-p", "copy copy copy copy", "-n", "60", "--device", "cpu"}, more...)
		want, err := kasmina(t, args...)
		require.NoError(t, err)
		got, err := kasmina(t, append(args, "--lookup", "8")...)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}

// TestStopText checks that generated text ends before a stop text, and that the prompt may contain it.
func TestStopText(t *testing.T) {
	args := []string{"generate", "--model", tiny, "-p", "Permission is", "-n", "30", "-t", "0"}
	whole, err := kasmina(t, args...)
	require.NoError(t, err)
	text := strings.TrimSuffix(strings.TrimPrefix(whole, "Permission is"), "\n")
	stop := text[5:8]
	before, _, _ := strings.Cut(text, stop)

	got, err := kasmina(t, append(args, "--stop", stop, "--stop", "never", "--stop", "Permission is")...)
	require.NoError(t, err)
	require.Equal(t, "Permission is"+before+"\n", got)
	got, err = kasmina(t, append(args, "--stop", text+"!")...)
	require.NoError(t, err)
	require.Equal(t, whole, got)
	_, err = kasmina(t, append(args, "--stop=")...)
	require.ErrorContains(t, err, "--stop is empty")
}
