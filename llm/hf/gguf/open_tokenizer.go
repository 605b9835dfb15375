package gguf

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// A preTokenizer describes one of llama.cpp's pre-tokenizers.
type preTokenizer struct {
	splitter string // key of splitters
	whole    bool   // pieces that are tokens are not merged
	begin    bool   // texts have a start-of-text token unless the file says otherwise
}

// preTokenizers maps llama.cpp's names to pre-tokenizers. Several models have the same one.
var preTokenizers = func() map[string]preTokenizer {
	all := map[string]preTokenizer{}
	for splitter, name := range splitters {
		all[name] = preTokenizer{splitter: splitter, whole: name == "llama-bpe", begin: name == "llama-bpe"}
	}

	llama := all["llama-bpe"]
	for _, name := range []string{"llama3", "llama-v3"} {
		all[name] = llama
	}
	all["dbrx"], all["smaug-bpe"] = preTokenizer{splitter: llama.splitter}, preTokenizer{splitter: llama.splitter}
	for _, name := range []string{"starcoder", "refact", "command-r", "codeshell"} {
		all[name] = all["smollm"]
	}
	for _, name := range []string{"olmo", "mpt", "jais", "phi-2"} {
		all[name] = all["gpt-2"]
	}
	for _, name := range []string{"stablelm2", "deepseek-r1-qwen", "megrez"} {
		all[name] = all["qwen2"]
	}
	return all
}()

// stages returns the pre_tokenizer of a tokenizer.json.
func (p preTokenizer) stages() any {
	bytes := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	sequence := func(first any) any {
		return map[string]any{"type": "Sequence", "pretokenizers": []any{first, bytes}}
	}
	switch p.splitter {
	case "ByteLevel":
		return bytes
	case "Digits ByteLevel":
		return sequence(map[string]any{"type": "Digits", "individual_digits": true})
	}
	bytes["use_regex"] = false
	return sequence(map[string]any{"type": "Split", "pattern": map[string]any{"Regex": p.splitter},
		"behavior": "Isolated", "invert": false})
}

// An encoding is a kind of tokenizer.
type encoding struct {
	begin, end int         // default ids of the tokens at the start and the end of a text; -1 for none
	begins     func() bool // whether texts have a start-of-text token unless the file says otherwise
	complete   func(v *vocabulary, tokenizer map[string]any) error
}

// encodings maps llama.cpp's names for encodings to the encodings.
func (d *document) encodings() map[string]encoding {
	return map[string]encoding{
		"gpt2":  {-1, -1, func() bool { return preTokenizers[d.text("tokenizer.ggml.pre")].begin }, d.byteLevel},
		"llama": {1, 2, func() bool { return true }, d.sentencePiece},
	}
}

// A vocabulary has the tokens of a file.
type vocabulary struct {
	tokens []string
	types  []int
	ids    map[string]int // of tokens that occur in texts
}

// tokenizer returns the files of the tokenizer, for a model with size tokens, and generation_config.json.
func (d *document) tokenizer(size int) (map[string][]byte, error) {
	v, err := d.vocabulary(size)
	if err != nil {
		return nil, err
	}
	kind, ok := d.encodings()[d.text("tokenizer.ggml.model")]
	if !ok {
		return nil, fmt.Errorf("its tokenizer is %.40q, and only byte-level encodings (gpt2) and SentencePiece's byte-pair "+
			"encodings (llama) can be read", d.text("tokenizer.ggml.model"))
	}

	special := func(name string, missing int) int { return d.number("tokenizer.ggml."+name+"_token_id", missing) }
	begin, end, pad := special("bos", kind.begin), special("eos", kind.end), special("padding", -1)
	for _, id := range []int{begin, end, pad} {
		if id >= len(v.tokens) {
			return nil, fmt.Errorf("a special token has the id %d, and the vocabulary has %d tokens", id, len(v.tokens))
		}
	}

	var before, after []int
	if begin >= 0 && d.bool("tokenizer.ggml.add_bos_token", kind.begins()) {
		before = []int{begin}
	}
	if end >= 0 && d.bool("tokenizer.ggml.add_eos_token", false) {
		after = []int{end}
	}
	tokenizer := v.file(before, after)
	if err := kind.complete(v, tokenizer); err != nil {
		return nil, err
	}

	config := map[string]any{}
	for name, id := range map[string]int{"bos_token": begin, "eos_token": end, "pad_token": pad} {
		if id >= 0 {
			config[name] = v.tokens[id]
		}
	}
	if err := d.templates(config); err != nil {
		return nil, err
	}

	texts := map[string][]byte{}
	for name, content := range map[string]any{
		"tokenizer.json":         tokenizer,
		"tokenizer_config.json":  config,
		"generation_config.json": d.generation(v, begin, end, pad),
	} {
		if texts[name], err = json.Marshal(content); err != nil {
			return nil, err
		}
	}
	return texts, nil
}

// vocabulary reads the tokens.
func (d *document) vocabulary(size int) (*vocabulary, error) {
	v := &vocabulary{ids: map[string]int{}}
	var err error
	if v.tokens, err = all[string](d, "tokenizer.ggml.tokens"); err != nil {
		return nil, err
	}
	if len(v.tokens) != size {
		return nil, fmt.Errorf("it has %d tokens, and the model %d", len(v.tokens), size)
	}

	v.types = make([]int, size)
	if d.fields["tokenizer.ggml.token_type"] == nil {
		return nil, errors.New("the field tokenizer.ggml.token_type is missing")
	}
	types, err := all[int64](d, "tokenizer.ggml.token_type")
	if err != nil {
		return nil, err
	}
	if len(types) != size {
		return nil, fmt.Errorf("tokenizer.ggml.token_type has %d elements, want %d", len(types), size)
	}

	for id, t := range types {
		v.types[id] = int(t)
		if t == unused {
			continue
		}
		if other, ok := v.ids[v.tokens[id]]; ok {
			return nil, fmt.Errorf("the tokens %d and %d are both %.60q", other, id, v.tokens[id])
		}
		v.ids[v.tokens[id]] = id
	}
	return v, nil
}

// ordinary returns the number of tokens before the added tokens at the end of the vocabulary. Only these added tokens
// may be left out of the vocabulary of a tokenizer.json, and only if all smaller ids are in use.
func (v *vocabulary) ordinary() int {
	end := len(v.types)
	for end > 0 && v.types[end-1] == unused {
		end--
	}
	begin := end
	for begin > 0 && (v.types[begin-1] == control || v.types[begin-1] == defined) {
		begin--
	}
	if slices.Contains(v.types[:begin], unused) {
		return end
	}
	return begin
}

// file returns the parts of tokenizer.json that do not depend on the encoding.
func (v *vocabulary) file(before, after []int) map[string]any {
	added := []any{}
	for id, token := range v.tokens {
		switch t := v.types[id]; t {
		case control, defined, unknown:
			added = append(added, map[string]any{"id": id, "content": token, "single_word": false, "lstrip": false,
				"rstrip": false, "normalized": false, "special": t != defined})
		}
	}

	var single []any
	specials := map[string]any{}
	add := func(ids []int) {
		for _, id := range ids {
			name := v.tokens[id]
			single = append(single, map[string]any{"SpecialToken": map[string]any{"id": name, "type_id": 0}})
			specials[name] = map[string]any{"id": name, "ids": []int{id}, "tokens": []string{name}}
		}
	}
	add(before)
	single = append(single, map[string]any{"Sequence": map[string]any{"id": "A", "type_id": 0}})
	add(after)

	return map[string]any{"version": "1.0", "added_tokens": added,
		"post_processor": map[string]any{"type": "TemplateProcessing", "single": single, "pair": single,
			"special_tokens": specials}}
}

// vocab returns the ids of the tokens, except added tokens at the end of the vocabulary.
func (v *vocabulary) vocab() map[string]int {
	vocab, ordinary := map[string]int{}, v.ordinary()
	for id, token := range v.tokens {
		switch v.types[id] {
		case unused:
		case control, defined:
			if id < ordinary {
				vocab[token] = id
			}
		default:
			vocab[token] = id
		}
	}
	return vocab
}

// byteLevel completes a tokenizer.json for a byte-level encoding.
func (d *document) byteLevel(v *vocabulary, t map[string]any) error {
	merges, err := all[string](d, "tokenizer.ggml.merges")
	if err != nil {
		return err
	}
	pre, ok := preTokenizers[d.text("tokenizer.ggml.pre")]
	if !ok {
		return fmt.Errorf("tokenizer.ggml.pre is %.60q, want one of %s", d.text("tokenizer.ggml.pre"),
			strings.Join(slices.Sorted(maps.Keys(preTokenizers)), ", "))
	}
	if d.bool("tokenizer.ggml.add_space_prefix", false) {
		return errors.New("tokenizer.ggml.add_space_prefix is true, which is not supported for byte-level encodings")
	}

	t["pre_tokenizer"] = pre.stages()
	t["decoder"] = map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	t["model"] = map[string]any{"type": "BPE", "fuse_unk": false, "byte_fallback": false, "ignore_merges": pre.whole,
		"vocab": v.vocab(), "merges": merges}
	return nil
}

// templates adds the chat templates to tokenizer_config.json.
func (d *document) templates(config map[string]any) error {
	main := d.text("tokenizer.chat_template")
	if main == "" {
		return nil
	}
	if d.fields["tokenizer.chat_templates"] == nil {
		config["chat_template"] = main
		return nil
	}

	names, err := all[string](d, "tokenizer.chat_templates")
	if err != nil {
		return err
	}
	named := []any{map[string]any{"name": chat.DefaultName, "template": main}}
	for _, name := range names {
		if text := d.text("tokenizer.chat_template." + name); text != "" && name != chat.DefaultName {
			named = append(named, map[string]any{"name": name, "template": text})
		}
	}
	config["chat_template"] = named
	return nil
}

// generation returns the contents of generation_config.json. As in llama.cpp, the tokens in ending also end a text.
func (d *document) generation(v *vocabulary, begin, end, pad int) any {
	g := map[string]any{}
	if begin >= 0 {
		g["bos_token_id"] = begin
	}
	if pad >= 0 {
		g["pad_token_id"] = pad
	}

	var ends []int
	add := func(id int) {
		if id >= 0 && id < len(v.tokens) && !slices.Contains(ends, id) {
			ends = append(ends, id)
		}
	}
	add(end)
	for _, name := range []string{"eot", "eom"} {
		add(d.number("tokenizer.ggml."+name+"_token_id", -1))
	}
	for _, text := range ending {
		if id, ok := v.ids[text]; ok {
			add(id)
		}
	}
	if len(ends) > 0 {
		g["eos_token_id"] = ends
	}

	// Newer files have the publisher's settings for sampling.
	if d.fields["general.sampling.temp"] != nil {
		g["do_sample"] = true
		g["temperature"] = d.float("general.sampling.temp", 1)
		g["top_k"] = max(0, d.number("general.sampling.top_k", 0))
		g["top_p"] = d.float("general.sampling.top_p", 1)
		g["min_p"] = d.float("general.sampling.min_p", 0)
		g["repetition_penalty"] = d.float("general.sampling.penalty_repeat", 1)
	}
	return g
}
