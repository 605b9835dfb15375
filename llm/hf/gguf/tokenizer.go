package gguf

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"

	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// The types of tokens.
const (
	normal  = 1
	unknown = 2
	control = 3
	defined = 4 // by the user
	unused  = 5
	single  = 6 // a byte of SentencePiece's encodings
)

// file holds the parts of a tokenizer.json that this package reads. Package hf has validated the file.
type file struct {
	Normalizer   normalizer
	PreTokenizer json.RawMessage `json:"pre_tokenizer"`
	AddedTokens  []struct {
		ID      int    `json:"id"`
		Content string `json:"content"`
		Special bool   `json:"special"`
		Single  bool   `json:"single_word"`
		LStrip  bool   `json:"lstrip"`
		RStrip  bool   `json:"rstrip"`
		// Normalized reports whether the token is searched for in the normalized text. nil means true.
		Normalized *bool `json:"normalized"`
	} `json:"added_tokens"`
	Model struct {
		Unknown      string            `json:"unk_token"`
		ByteFallback bool              `json:"byte_fallback"`
		IgnoreMerges bool              `json:"ignore_merges"`
		Vocab        map[string]int    `json:"vocab"`
		Merges       []json.RawMessage `json:"merges"`
	} `json:"model"`
}

// splitters maps pre-tokenizers, in the canonical form that [file.splitter] computes, to llama.cpp's
// names for them. llama.cpp implements these pre-tokenizers itself and doesn't read them from the file.
var splitters = map[string]string{
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}` + rest: "llama-bpe",
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}` + rest:      "qwen2",
	"Digits ByteLevel": "smollm",
	"ByteLevel":        "gpt-2",
}

// rest is the common end of both patterns.
const rest = `| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// addTokenizer adds the folder's tokenizer. The model has vocab tokens.
func addTokenizer(all *fields, f *hf.Folder, vocab int) error {
	tok, err := f.Tokenizer()
	if err != nil {
		return err
	}

	text, err := f.Text("tokenizer.json")
	if err != nil {
		return err
	}

	var t file
	if err := json.Unmarshal(text, &t); err != nil {
		return fmt.Errorf("tokenizer.json: %w", err)
	}

	v, err := t.vocabulary(vocab)
	if err != nil {
		return err
	}

	if err := t.checkAdded(); err != nil {
		return err
	}

	switch {
	case t.Model.ByteFallback:
		err = t.addSentencePiece(all, v)
	case strings.Contains(string(t.PreTokenizer), `"ByteLevel"`):
		err = t.addByteLevel(all, v)
	default:
		err = errors.New("tokenizer.json: only byte-level encodings and byte-pair encodings of SentencePiece can be " +
			"written")
	}
	if err != nil {
		return err
	}

	return addSpecial(all, f, tok)
}

// vocabulary returns the tokens of a model with size tokens.
func (t *file) vocabulary(size int) (*vocabulary, error) {
	v := &vocabulary{tokens: make([]string, size), types: make([]int, size)}
	for id := range v.tokens {
		v.tokens[id], v.types[id] = fmt.Sprintf("[PAD%d]", id), unused
	}

	for _, token := range slices.Sorted(maps.Keys(t.Model.Vocab)) {
		id := t.Model.Vocab[token]
		if id >= size {
			return nil, fmt.Errorf("tokenizer.json: the token %.60q has the id %d, and the model has %d "+
				"tokens", token, id, size)
		}
		v.tokens[id], v.types[id] = token, normal
	}

	for _, a := range t.AddedTokens {
		if a.ID >= size { // the model has no embedding for the token
			continue
		}
		v.tokens[a.ID], v.types[a.ID] = a.Content, defined
		if a.Special {
			v.types[a.ID] = control
		}
	}

	return v, nil
}

// addTokens adds the name of the encoding and of its pre-tokenizer, and the vocabulary.
func addTokens(all *fields, encoding, splitter string, v *vocabulary) {
	types := make([]int32, len(v.types))
	for id, t := range v.types {
		types[id] = int32(t)
	}

	all.set("tokenizer.ggml.model", encoding)
	all.set("tokenizer.ggml.pre", splitter)
	all.set("tokenizer.ggml.tokens", v.tokens)
	all.set("tokenizer.ggml.token_type", types)
}

// addByteLevel adds a byte-level encoding, which llama.cpp calls "gpt2".
func (t *file) addByteLevel(all *fields, v *vocabulary) error {
	// llama.cpp doesn't normalize text. NFC is accepted nevertheless, because nearly all text is
	// already composed and all of Qwen's tokenizers use it.
	if n := t.Normalizer.Type; n != "" && n != "NFC" {
		return fmt.Errorf("tokenizer.json: llama.cpp has no normalizer for byte-level encodings, but the file has %.40q", n)
	}

	pairs, err := t.merges()
	if err != nil {
		return err
	}
	merges := make([]string, len(pairs))
	for i, pair := range pairs {
		merges[i] = pair[0] + " " + pair[1]
	}

	splitter, err := t.splitter()
	if err != nil {
		return err
	}

	addTokens(all, "gpt2", splitter, v)
	all.set("tokenizer.ggml.merges", merges)
	return nil
}

// A stage is one pre-tokenizer, with the defaults of the tokenizers library for missing fields.
type stage struct {
	Type           string
	Behavior       string
	Invert         bool
	Individual     bool `json:"individual_digits"`
	AddPrefixSpace bool `json:"add_prefix_space"`
	UseRegex       bool `json:"use_regex"`
	Pattern        struct{ Regex string }
}

func (s *stage) UnmarshalJSON(text []byte) error {
	type plain stage
	p := plain{AddPrefixSpace: true, UseRegex: true}
	err := json.Unmarshal(text, &p)
	*s = stage(p)
	return err
}

// splitter returns llama.cpp's name for the pre-tokenizer. It accepts only pre-tokenizers that split
// every text exactly as llama.cpp does.
func (t *file) splitter() (string, error) {
	var only stage
	var all struct{ Pretokenizers []stage }
	err := errors.Join(json.Unmarshal(t.PreTokenizer, &only), json.Unmarshal(t.PreTokenizer, &all))
	if err != nil {
		return "", fmt.Errorf("tokenizer.json: pre_tokenizer: %w", err)
	}

	stages := all.Pretokenizers
	if only.Type != "Sequence" {
		stages = []stage{only}
	}

	name := ""
	if last := stages[len(stages)-1]; last.Type == "ByteLevel" && !last.AddPrefixSpace {
		switch first := stages[0]; {
		case len(stages) == 1 && last.UseRegex:
			name = splitters["ByteLevel"]
		case len(stages) != 2:
		case first.Type == "Digits" && first.Individual && last.UseRegex:
			name = splitters["Digits ByteLevel"]
		case first.Type == "Split" && first.Behavior == "Isolated" && !first.Invert && !last.UseRegex:
			name = splitters[first.Pattern.Regex]
		}
	}

	if name == "" {
		return "", fmt.Errorf("tokenizer.json: llama.cpp has no equivalent of the "+
			"pre_tokenizer %.300s", t.PreTokenizer)
	}

	// Only for llama-bpe does llama.cpp look up whole pieces in the vocabulary before merging. dbrx
	// splits texts in the same way without the lookup.
	if name == "llama-bpe" && !t.Model.IgnoreMerges {
		return "dbrx", nil
	}

	if t.Model.IgnoreMerges != (name == "llama-bpe") {
		return "", fmt.Errorf("tokenizer.json: ignore_merges is %v, but llama.cpp uses %v for this "+
			"pre_tokenizer", t.Model.IgnoreMerges, name == "llama-bpe")
	}

	return name, nil
}

// checkAdded rejects added tokens that llama.cpp would match at other places in a text.
func (t *file) checkAdded() error {
	begins := map[string]string{} // maps a proper prefix to a token that starts with it
	for _, a := range t.AddedTokens {
		if a.LStrip || a.RStrip || a.Single {
			return fmt.Errorf("tokenizer.json: the added token %.60q has lstrip, rstrip or "+
				"single_word, which llama.cpp does not support", a.Content)
		}
		for n := 1; n < len(a.Content); n++ {
			begins[a.Content[:n]] = a.Content
		}
	}

	// When tokens overlap in a text, llama.cpp takes the longest, whereas the tokenizers library
	// takes the first.
	for _, a := range t.AddedTokens {
		for n := 1; n < len(a.Content); n++ {
			if other := begins[a.Content[n:]]; other != "" && other != a.Content {
				return fmt.Errorf("tokenizer.json: the added tokens %.60q and %.60q may overlap, and "+
					"llama.cpp would take the other one", a.Content, other)
			}
		}
	}

	return nil
}

// merges returns the pairs of tokens that are joined, in the order of their priority.
func (t *file) merges() ([][2]string, error) {
	all := make([][2]string, len(t.Model.Merges))
	for i, m := range t.Model.Merges {
		var text string
		if json.Unmarshal(m, &text) == nil { // in older files
			all[i][0], all[i][1], _ = strings.Cut(text, " ")
			continue
		}

		var pair []string
		if err := json.Unmarshal(m, &pair); err != nil {
			return nil, fmt.Errorf("tokenizer.json: merges[%d]: %w", i, err)
		}
		if len(pair) != 2 {
			return nil, fmt.Errorf("tokenizer.json: merges[%d] has %d tokens, want 2", i, len(pair))
		}
		all[i] = [2]string(pair)
	}

	return all, nil
}

// addSpecial adds the tokens at the start and end of a text, and the chat template.
func addSpecial(all *fields, f *hf.Folder, tok *tokenizers.Tokenizer) error {
	before, after := tok.Affixes()
	begin, end := tok.BeginningOfText(), tok.EndOfDocument()
	if len(before) > 0 {
		begin = before[0]
	}

	switch ends := f.Generation.End; {
	case len(after) > 0:
		end = after[0]
	case end < 0 && len(ends) > 0:
		end = ends[0]
	}

	if len(before) > 1 || len(after) > 1 {
		return fmt.Errorf("tokenizer.json: the post_processor puts the tokens %v before a text and %v "+
			"after it, but llama.cpp supports one each at most", before, after)
	}

	if begin >= 0 {
		all.set("tokenizer.ggml.bos_token_id", begin)
	}

	if end >= 0 {
		all.set("tokenizer.ggml.eos_token_id", end)
	}

	if err := addEnds(all, f, tok, end); err != nil {
		return err
	}

	if f.Generation.Pad >= 0 {
		all.set("tokenizer.ggml.padding_token_id", f.Generation.Pad)
	}

	all.set("tokenizer.ggml.add_bos_token", len(before) > 0)
	all.set("tokenizer.ggml.add_eos_token", len(after) > 0)
	return addTemplates(all, f)
}

// ending lists texts of tokens that make llama.cpp stop for any model.
var ending = []string{"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
	"<|end_of_text|>", "<|eom_id|>"}

// addEnds adds the tokens other than end that stop generation. llama.cpp provides fields for two
// more. Further tokens stop it only if their texts are in ending.
func addEnds(all *fields, f *hf.Folder, tok *tokenizers.Tokenizer, end int) error {
	var more []int
	for _, id := range f.Generation.End {
		if id != end && !slices.Contains(more, id) {
			more = append(more, id)
		}
	}

	// Reserve the fields for tokens that wouldn't stop llama.cpp by their texts.
	known := func(id int) int {
		text, _ := tok.Token(id)
		if slices.Contains(ending, string(text)) {
			return 1
		}
		return 0
	}

	slices.SortStableFunc(more, func(a, b int) int { return known(a) - known(b) })
	for i, id := range more {
		switch {
		case i == 0:
			all.set("tokenizer.ggml.eot_token_id", id)
		case i == 1:
			all.set("tokenizer.ggml.eom_token_id", id)
		case known(id) == 0:
			return fmt.Errorf("generation_config.json: eos_token_id is %v, but llama.cpp stops at three tokens "+
				"at most: leave some out", f.Generation.End)
		}
	}

	return nil
}

// Differences describes, for users of a file written by [Save], how llama.cpp's treatment of some
// texts differs from that of the folder's own tokenizer. It returns nil if there are no differences.
func Differences(f *hf.Folder) ([]string, error) {
	text, err := f.Text("tokenizer.json")
	if err != nil {
		return nil, fmt.Errorf("gguf: %w", err)
	}

	var t file
	if err := json.Unmarshal(text, &t); err != nil {
		return nil, fmt.Errorf("gguf: tokenizer.json: %w", err)
	}

	var differences []string
	if t.Normalizer.Type == "NFC" {
		differences = append(differences, "the tokenizer composes characters (NFC) and llama.cpp does not: text with "+
			"decomposed characters, such as e followed by U+0301 instead of é, gets other tokens there unless you compose "+
			"it first")
	}
	if t.Model.ByteFallback {
		differences = append(differences, t.spaceDifferences()...)
	}
	return differences, nil
}

// addTemplates copies the chat templates, including those this module can't render.
func addTemplates(all *fields, f *hf.Folder) error {
	sources, err := f.Templates()
	if errors.Is(err, chat.ErrNoTemplate) {
		return nil
	} else if err != nil {
		return err
	}

	all.set("tokenizer.chat_template", sources[chat.DefaultName])

	var names []string
	for _, name := range slices.Sorted(maps.Keys(sources)) {
		if name == chat.DefaultName {
			continue
		}
		key := strings.Map(func(r rune) rune {
			if r < unicode.MaxASCII && (unicode.IsLetter(r) || unicode.IsDigit(r)) {
				return r
			}
			return '_'
		}, name)
		if slices.Contains(names, key) {
			return fmt.Errorf("two chat templates would be called %q in a GGUF file", key)
		}
		all.set("tokenizer.chat_template."+key, sources[name])
		names = append(names, key)
	}

	if len(names) > 0 {
		all.set("tokenizer.chat_templates", names)
	}

	return nil
}
