package gguf

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/hf"
)

// folderWith returns a copy of the tiny model with some members of its files replaced.
func folderWith(t *testing.T, files map[string]string) *hf.Folder {
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(tiny)))
	for name, members := range files {
		path := filepath.Join(dir, name)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		var all map[string]any
		require.NoError(t, json.Unmarshal(text, &all))
		require.NoError(t, json.Unmarshal([]byte(members), &all))
		text, err = json.Marshal(all)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, text, 0o666))
	}

	f, err := hf.Open(dir)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

const (
	byteLevel   = `{"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}`
	onlyBytes   = `{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}`
	prefixSpace = `{"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}`
)

// TestPreTokenizers checks which pre-tokenizers are written, and that those unknown to llama.cpp are
// rejected.
func TestPreTokenizers(t *testing.T) {
	sequence := func(stages ...string) string {
		all := ""
		for i, s := range stages {
			if i > 0 {
				all += ","
			}
			all += s
		}
		return `{"type": "Sequence", "pretokenizers": [` + all + `]}`
	}

	split := func(pattern, rest string) string {
		text, err := json.Marshal(pattern)
		require.NoError(t, err)
		return `{"type": "Split", "pattern": {"Regex": ` + string(text) + `}, ` + rest + `}`
	}
	qwen, llama, isolated := "", "", `"behavior": "Isolated", "invert": false`
	for pattern, name := range splitters {
		switch name {
		case "qwen2":
			qwen = pattern
		case "llama-bpe":
			llama = pattern
		}
	}

	for pre, want := range map[string]string{
		byteLevel: "gpt-2",
		sequence(`{"type": "Digits", "individual_digits": true}`, byteLevel): "smollm",
		sequence(split(qwen, isolated), onlyBytes):                           "qwen2",
		// Same as llama-bpe without looking up whole pieces.
		sequence(split(llama, isolated), onlyBytes): "dbrx",

		prefixSpace:                    "",
		onlyBytes:                      "",
		`{"type": "ByteLevel"}`:        "", // add_prefix_space defaults to true
		sequence(byteLevel, onlyBytes): "",
		sequence(split(`\\s+`, isolated), onlyBytes):                               "",
		sequence(`{"type": "Digits", "individual_digits": false}`, byteLevel):      "",
		sequence(`{"type": "Digits", "individual_digits": true}`, onlyBytes):       "",
		sequence(`{"type": "Digits", "individual_digits": true}`, prefixSpace):     "",
		sequence(split(qwen, isolated), byteLevel):                                 "",
		sequence(split(qwen, isolated), prefixSpace):                               "",
		sequence(split(qwen, `"behavior": "Removed", "invert": false`), onlyBytes): "",
		sequence(split(qwen, `"behavior": "Isolated", "invert": true`), onlyBytes): "",
		sequence(split(qwen, isolated), `{"type": "Digits", "individual_digits": true}`,
			onlyBytes): "",
	} {
		all := &fields{}
		f := folderWith(t, map[string]string{"tokenizer.json": `{"pre_tokenizer": ` + pre + `}`})
		err := addTokenizer(all, f, 400)
		if want == "" {
			require.Error(t, err, pre)
			continue
		}
		require.NoError(t, err, pre)
		require.Contains(t, string(all.bytes), "tokenizer.ggml.pre"+string([]byte{kindString, 0, 0, 0,
			byte(len(want)), 0, 0, 0, 0, 0, 0, 0})+want)
	}
}

// TestInexpressibleTokenizers checks that other features unknown to llama.cpp are rejected.
func TestInexpressibleTokenizers(t *testing.T) {
	added := func(tokens string) string {
		return `{"added_tokens": [{"id": 0, "content": "<|begin_of_text|>", "special": true},
			{"id": 1, "content": "<|end_of_text|>", "special": true}, ` + tokens + `]}`
	}
	withEnd := func(tokens string) string {
		return `{"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A",
			"type_id": 0}}` + tokens + `], "special_tokens": {"x": {"id": "x", "ids": [1],
			"tokens": ["<|end_of_text|>"]}}}}`
	}
	const end = `, {"SpecialToken": {"id": "x", "type_id": 0}}`
	for tokenizer, want := range map[string]string{
		added(`{"id": 400, "content": "<x>"}`):                                 "",
		added(`{"id": 400, "content": "<x>", "lstrip": true}`):                 "lstrip",
		added(`{"id": 400, "content": "<x>", "rstrip": true}`):                 "rstrip",
		added(`{"id": 400, "content": "<x>", "single_word": true}`):            "single_word",
		added(`{"id": 400, "content": "<xy"}, {"id": 401, "content": "xyz>"}`): "may overlap",
		added(`{"id": 400, "content": "<xx"}, {"id": 401, "content": "xxx"}`):  "may overlap",
		`{"normalizer": {"type": "Prepend", "prepend": "_"}}`:                  "no normalizer",
		`{"normalizer": {"type": "NFC"}}`:                                      "",
		withEnd(end):                                                           "",
		withEnd(end + end):                                                     "one each at most",
	} {
		f := folderWith(t, map[string]string{"tokenizer.json": tokenizer})
		err := addTokenizer(&fields{}, f, 400)
		if want == "" {
			require.NoError(t, err, tokenizer)
		} else {
			require.ErrorContains(t, err, want)
		}
	}

	// llama.cpp looks up whole pieces for this pre-tokenizer only, not for Qwen's.
	f := folderWith(t, nil)
	path := filepath.Join(f.Dir, "tokenizer.json")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, bytes.Replace(text, []byte(`"ignore_merges": false`),
		[]byte(`"ignore_merges": true`), 1), 0o666))
	require.ErrorContains(t, addTokenizer(&fields{}, f, 400), "ignore_merges is true")
}

// TestEnds checks which token ends a text in the file, and whether it is added to each text.
func TestEnds(t *testing.T) {
	const template = `{"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id":
		"A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}], "special_tokens": {"x":
		{"id": "x", "ids": [1], "tokens": ["<|end_of_text|>"]}}}}`
	for _, c := range []struct {
		files map[string]string
		eos   uint32
		add   bool
		more  []uint32 // eot and eom
	}{
		{nil, 1, false, nil},
		{map[string]string{"generation_config.json": `{"eos_token_id": [5, 1]}`}, 1, false, []uint32{5}},
		{map[string]string{"generation_config.json": `{"eos_token_id": [5, 1, 7, 5]}`}, 1, false,
			[]uint32{5, 7}},
		{map[string]string{"tokenizer_config.json": `{"eos_token": null}`,
			"generation_config.json": `{"eos_token_id": [5, 1]}`}, 5, false, []uint32{1}},
		{map[string]string{"tokenizer.json": template}, 1, true, nil},
	} {
		f := folderWith(t, c.files)
		m, err := f.Load(t.Context())
		require.NoError(t, err)
		path := filepath.Join(t.TempDir(), "m.gguf")
		require.NoError(t, Save(t.Context(), path, f, m, F32, nil))
		fields, _ := read(t, path)
		require.Equal(t, c.eos, fields["tokenizer.ggml.eos_token_id"])
		require.Equal(t, c.add, fields["tokenizer.ggml.add_eos_token"])
		for i, name := range []string{"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"} {
			if i < len(c.more) {
				require.Equal(t, c.more[i], fields[name])
			} else {
				require.NotContains(t, fields, name)
			}
		}
	}

	// llama.cpp recognizes <|end_of_text|> by its name, so that token needs no field. Otherwise no field
	// is left for a third token.
	f := folderWith(t, map[string]string{"tokenizer_config.json": `{"eos_token": null}`,
		"generation_config.json": `{"eos_token_id": [5, 1, 7, 9]}`})
	require.NoError(t, addTokenizer(&fields{}, f, 400))
	f = folderWith(t, map[string]string{"generation_config.json": `{"eos_token_id": [5, 7, 9]}`})
	require.ErrorContains(t, addTokenizer(&fields{}, f, 400), "stops at three tokens at most")
}

// TestDifferences checks that users are informed that llama.cpp doesn't normalize text.
func TestDifferences(t *testing.T) {
	none, err := Differences(folderWith(t, nil))
	require.NoError(t, err)
	require.Empty(t, none)
	some, err := Differences(folderWith(t, map[string]string{"tokenizer.json": `{"normalizer": {"type": "NFC"}}`}))
	require.NoError(t, err)
	require.Len(t, some, 1)
	require.Contains(t, some[0], "NFC")
}

// TestQ80OfOtherWidths checks that rows which q8_0 can't divide into blocks are rejected rather than
// written in another type.
func TestQ80OfOtherWidths(t *testing.T) {
	f, m := load(t, "../testdata/qwen3")
	require.NotZero(t, m.Config.Dim%blockSize)
	_, err := tensorsOf(m, architecture{name: "qwen3"}, Q80)
	require.ErrorContains(t, err, "q8_0 takes multiples of 32: ask for f16")
	_ = f
}
