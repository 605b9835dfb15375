package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/hf"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// TestOtherFamilies checks that the command computes the texts, losses and tokens of transformers with a
// GPT-2 and an OLMo 2.
func TestOtherFamilies(t *testing.T) {
	for _, name := range []string{"tiny-gpt2", "tiny-olmo2"} {
		t.Run(name, func(t *testing.T) { useFamily(t, name) })
	}
}

func useFamily(t *testing.T, name string) {
	model := filepath.Join(testdata, name)
	text, err := os.ReadFile(model + ".json")
	require.NoError(t, err)
	var want struct {
		reference
		Encoded map[string][]int
	}
	require.NoError(t, json.Unmarshal(text, &want))

	tok, err := tokenizers.Load(model)
	require.NoError(t, err)
	for text, ids := range want.Encoded {
		require.Equal(t, ids, append([]int{}, tok.Encode([]byte(text))...), "%q", text)
		decoded, err := tok.DecodeWhole(ids)
		require.NoError(t, err)
		require.Equal(t, text, string(decoded))
	}

	eval := func(model string) (s score) {
		out, err := kasmina(t, "eval", "--model", model, "--data", license, "--seq",
			strconv.Itoa(want.Seq), "--device", "cpu")
		require.NoError(t, err)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &s))
		return s
	}

	s := eval(model)
	require.Equal(t, want.Tokens, s.Tokens)
	require.InEpsilon(t, want.Loss, s.Loss, 1e-5)

	out, err := kasmina(t, "generate", "--model", model, "--prompt", want.Prompt, "-n", "30",
		"--temperature", "0", "--device", "cpu")
	require.NoError(t, err)
	require.Equal(t, want.Text+"\n", out)

	// A copy has the same files, and a GGUF file has the tensors that llama.cpp expects.
	dir := t.TempDir()
	_, err = kasmina(t, "convert", "--model", model, "--out", filepath.Join(dir, "copy"))
	require.NoError(t, err)
	require.Equal(t, tensorsOf(t, model), tensorsOf(t, filepath.Join(dir, "copy")))
	file := filepath.Join(dir, "model.gguf")
	_, err = kasmina(t, "convert", "--model", model, "--out", file, "--gguf", "f32")
	require.NoError(t, err)
	out, err = kasmina(t, "inspect", file)
	require.NoError(t, err)
	require.Contains(t, out, map[string]string{"tiny-gpt2": "blk.1.attn_qkv.weight",
		"tiny-olmo2": "blk.1.post_ffw_norm.weight"}[name])

	trained := filepath.Join(dir, "trained")
	_, err = kasmina(t, "train", "--model", model, "--data", license, "--out", trained, "--steps",
		"12", "--seq", "32", "--batch", "4", "--lr", "3e-3", "--device", "cpu", "--quiet")
	require.NoError(t, err)
	require.Less(t, eval(trained).Loss, s.Loss-0.02)
}

// tensorsOf describes the weights of a folder, sorted by name.
func tensorsOf(t *testing.T, dir string) []hf.TensorInfo {
	f, err := hf.Open(dir)
	require.NoError(t, err)
	defer f.Close()
	all := f.Tensors()
	slices.SortFunc(all, func(a, b hf.TensorInfo) int { return strings.Compare(a.Name, b.Name) })
	return all
}
