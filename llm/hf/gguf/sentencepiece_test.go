package gguf

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSentencePiece compares the tokens of texts with those of llama.cpp and of Hugging Face's tokenizers, which agree.
// It compares the decoded texts with those of Hugging Face's tokenizers. sentencepiece.py generated the file and the texts.
func TestSentencePiece(t *testing.T) {
	f, err := Open("testdata/sentencepiece.gguf")
	require.NoError(t, err)
	defer f.Close()
	tok, err := f.Tokenizer()
	require.NoError(t, err)

	for _, x := range expectedTexts(t) {
		ids := tok.Encode([]byte(x.Text))
		require.Equal(t, x.Special, append([]int{}, ids...), x.Text)
		if !strings.Contains(x.Text, "<|user|>") { // which llama.cpp also finds in ordinary text
			require.Equal(t, x.Ordinary, append([]int{}, tok.EncodeOrdinary([]byte(x.Text))...), x.Text)
		}
		text, err := tok.Decode(ids)
		require.NoError(t, err)
		require.Equal(t, x.Decoded, string(text))
		require.Equal(t, append([]int{1}, ids...), tok.EncodeWhole([]byte(x.Text)))
	}
	require.Equal(t, []int{2}, f.Generation.End)
	_, err = f.Load(t.Context())
	require.NoError(t, err)
}

// expectedText is a text with the tokens that llama.cpp finds in it.
type expectedText struct {
	Text, Decoded     string
	Ordinary, Special []int
}

// expectedTexts returns the texts that sentencepiece.py generated.
func expectedTexts(t *testing.T) (texts []expectedText) {
	file, err := os.ReadFile("testdata/sentencepiece.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(file, &texts))
	return texts
}

// TestSaveSentencePiece checks that a saved file has the vocabulary of the original file, and finds the same tokens in
// texts.
func TestSaveSentencePiece(t *testing.T) {
	f, err := Open("testdata/sentencepiece.gguf")
	require.NoError(t, err)
	defer f.Close()
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "saved.gguf")
	require.NoError(t, Save(t.Context(), path, f, m, F32, nil))

	original, _ := read(t, "testdata/sentencepiece.gguf")
	saved, _ := read(t, path)
	used := len(original["tokenizer.ggml.tokens"].([]any)) - 1 // the last token is unused
	require.Equal(t, original["tokenizer.ggml.tokens"].([]any)[:used], saved["tokenizer.ggml.tokens"].([]any)[:used])
	for _, name := range []string{"model", "pre", "token_type", "bos_token_id", "eos_token_id",
		"unknown_token_id", "add_bos_token", "add_eos_token"} {
		require.Equal(t, original["tokenizer.ggml."+name], saved["tokenizer.ggml."+name], name)
	}
	require.Equal(t, true, saved["tokenizer.ggml.add_space_prefix"])

	again, err := Open(path)
	require.NoError(t, err)
	defer again.Close()
	tok, err := again.Tokenizer()
	require.NoError(t, err)
	for _, x := range expectedTexts(t) {
		require.Equal(t, x.Special, append([]int{}, tok.Encode([]byte(x.Text))...), x.Text)
	}

	none, err := Differences(f)
	require.NoError(t, err)
	require.Empty(t, none)
}

// sentencePieceFile returns the tokenizer.json of the test file, with members replaced.
func sentencePieceFile(t *testing.T, members string) *file {
	f, err := Open("testdata/sentencepiece.gguf")
	require.NoError(t, err)
	defer f.Close()
	text, err := f.Text("tokenizer.json")
	require.NoError(t, err)
	var all map[string]any
	require.NoError(t, json.Unmarshal([]byte(text), &all))
	require.NoError(t, json.Unmarshal([]byte(members), &all))
	text, err = json.Marshal(all)
	require.NoError(t, err)
	var x file
	require.NoError(t, json.Unmarshal(text, &x))
	return &x
}

// TestSpacesOfSentencePiece checks which treatments of spaces are written, and what users are told about them.
func TestSpacesOfSentencePiece(t *testing.T) {
	const replace = `{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}`
	metaspace := func(rest string) string {
		return `{"normalizer": null, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁"` + rest + `}}`
	}
	for _, c := range []struct {
		members     string
		ok, prefix  bool
		differences int
	}{
		{`{}`, true, true, 0},
		{`{"added_tokens": [{"id": 1, "content": "<s>", "normalized": true}]}`, true, true, 1},
		{`{"added_tokens": [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}]}`, true, true, 1},
		{`{"added_tokens": [{"id": 1, "content": "<s>"}], "normalizer": ` + replace + `}`, true, false, 0},
		{`{"normalizer": ` + replace + `}`, true, false, 0},
		{metaspace(`, "split": false`), true, true, 1},
		{metaspace(`, "split": false, "prepend_scheme": "always"`), true, true, 1},
		{metaspace(`, "split": false, "prepend_scheme": "first"`), true, true, 2},
		{metaspace(`, "split": false, "prepend_scheme": "never"`), true, false, 0},
		{metaspace(``), false, false, 0}, // split is true by default
		{`{"normalizer": {"type": "NFC"}}`, false, false, 0},
		{`{"normalizer": {"type": "Sequence", "normalizers": [` + replace + `, {"type": "NFC"}]}}`, false, false, 0},
		{`{"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, ` + replace + `]}}`,
			false, false, 0},
		{`{"pre_tokenizer": {"type": "Whitespace"}}`, false, false, 0},
	} {
		x := sentencePieceFile(t, c.members)
		rule, err := x.spaces()
		if !c.ok {
			require.ErrorContains(t, err, "no equivalent", c.members)
			continue
		}
		require.NoError(t, err, c.members)
		require.Equal(t, c.prefix, rule.prefix, c.members)
		require.Len(t, x.spaceDifferences(), c.differences, c.members)
	}
}

// TestScoresOfMerges checks that merges which scores cannot express are rejected.
func TestScoresOfMerges(t *testing.T) {
	write := func(change func(x *file)) error {
		x := sentencePieceFile(t, `{}`)
		change(x)
		v, err := x.vocabulary(len(x.Model.Vocab) + 2)
		require.NoError(t, err)
		return x.addSentencePiece(&fields{}, v)
	}

	require.NoError(t, write(func(x *file) {}))
	require.ErrorContains(t, write(func(x *file) { x.Model.IgnoreMerges = true }), "ignore_merges")
	require.ErrorContains(t, write(func(x *file) { delete(x.Model.Vocab, "<0x41>") }), "there is no token <0x41>")
	require.ErrorContains(t, write(func(x *file) { x.Model.Merges = x.Model.Merges[1:] }), "for which there is no merge")
	require.ErrorContains(t, write(func(x *file) {
		// Repeat the first merge at the end.
		x.Model.Merges = append(x.Model.Merges, x.Model.Merges[0])
	}), "which the scores of llama.cpp cannot express")

	// The order of the merges of different tokens is kept.
	x := sentencePieceFile(t, `{}`)
	x.Model.Merges[0], x.Model.Merges[1] = x.Model.Merges[1], x.Model.Merges[0]
	v, err := x.vocabulary(len(x.Model.Vocab) + 2)
	require.NoError(t, err)
	require.NoError(t, x.markBytes(v))
	scores, err := x.scores(v)
	require.NoError(t, err)
	merges, err := x.merges()
	require.NoError(t, err)
	score := func(i int) float32 { return scores[x.Model.Vocab[merges[i][0]+merges[i][1]]] }
	require.EqualValues(t, 0, score(0))
	require.EqualValues(t, -1, score(1))
}

// TestSentencePieceRefused checks that errors describe what is wrong with scores and tokens.
func TestSentencePieceRefused(t *testing.T) {
	whole, err := os.ReadFile("testdata/sentencepiece.gguf")
	require.NoError(t, err)
	path := t.TempDir() + "/m.gguf"
	refused := func(want, old, new string) {
		t.Helper()
		require.Len(t, new, len(old))
		require.Contains(t, string(whole), old)
		require.NoError(t, os.WriteFile(path, []byte(strings.Replace(string(whole), old, new, 1)), 0o666))
		_, err := Open(path)
		require.ErrorContains(t, err, want)
	}
	refused("tokenizer.ggml.scores is missing", "tokenizer.ggml.scores", "tokenizer.ggml.scorez")
	refused("is not UTF-8", "▁Software", "▁S\xff\xff\xffware")
	refused("are both", "▁Software", "▁SOFTWARE")
}
