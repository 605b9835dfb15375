package gguf

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

const maxTokenizer = 64 << 20

// The types of tokens.
const (
	normal  = 1
	control = 3
	defined = 4 // by the user
	unused  = 5
)

// file is what is read of a tokenizer.json that package hf has found sound.
type file struct {
	PreTokenizer json.RawMessage `json:"pre_tokenizer"`
	AddedTokens  []struct {
		ID      int    `json:"id"`
		Content string `json:"content"`
		Special bool   `json:"special"`
	} `json:"added_tokens"`
	Model struct {
		ByteFallback bool              `json:"byte_fallback"`
		Vocab        map[string]int    `json:"vocab"`
		Merges       []json.RawMessage `json:"merges"`
	} `json:"model"`
}

// splitters are the names that llama.cpp has for splitting patterns, which it does not read from
// the file. They are by the pattern, or by the type of a pre-tokenizer without one.
var splitters = map[string]string{
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}` + rest: "llama-bpe",
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}` + rest:      "qwen2",
	"Digits":    "smollm",
	"ByteLevel": "gpt-2",
}

// rest is how both patterns end.
const rest = `| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// addTokenizer adds the tokenizer of a folder, whose model has vocab tokens.
func addTokenizer(all *fields, f *hf.Folder, vocab int) error {
	tok, err := tokenizers.Load(f.Dir)
	if err != nil {
		return err
	}
	text, err := regular.Read(filepath.Join(f.Dir, "tokenizer.json"), maxTokenizer,
		"a tokenizer.json has")
	if err != nil {
		return err
	}
	var t file
	if err := json.Unmarshal(text, &t); err != nil {
		return fmt.Errorf("tokenizer.json: %w", err)
	}
	if t.Model.ByteFallback || !strings.Contains(string(t.PreTokenizer), `"ByteLevel"`) {
		return errors.New("tokenizer.json: only byte-level encodings can be written")
	}
	tokens, types := make([]string, vocab), make([]int32, vocab)
	for id := range tokens {
		tokens[id], types[id] = fmt.Sprintf("[PAD%d]", id), unused
	}
	for token, id := range t.Model.Vocab {
		if id >= vocab {
			return fmt.Errorf("tokenizer.json: the token %.60q has the id %d, and the model has %d "+
				"tokens", token, id, vocab)
		}
		tokens[id], types[id] = token, normal
	}
	for _, a := range t.AddedTokens {
		if a.ID >= vocab { // no text that the model can read has this token
			continue
		}
		tokens[a.ID], types[a.ID] = a.Content, defined
		if a.Special {
			types[a.ID] = control
		}
	}
	merges, err := t.merges()
	if err != nil {
		return err
	}
	splitter, err := t.splitter()
	if err != nil {
		return err
	}
	all.set("tokenizer.ggml.model", "gpt2")
	all.set("tokenizer.ggml.pre", splitter)
	all.set("tokenizer.ggml.tokens", tokens)
	all.set("tokenizer.ggml.token_type", types)
	all.set("tokenizer.ggml.merges", merges)
	return addSpecial(all, f, tok)
}

// splitter returns what llama.cpp calls the pre-tokenizer.
func (t *file) splitter() (string, error) {
	type stage struct {
		Type    string
		Pattern struct{ Regex string }
	}
	var all struct {
		stage
		Pretokenizers []stage
	}
	if err := json.Unmarshal(t.PreTokenizer, &all); err != nil {
		return "", fmt.Errorf("tokenizer.json: pre_tokenizer: %w", err)
	}
	splits := all.stage
	if len(all.Pretokenizers) > 0 {
		splits = all.Pretokenizers[0]
	}
	if name, ok := splitters[cmp.Or(splits.Pattern.Regex, splits.Type)]; ok {
		return name, nil
	}
	return "", fmt.Errorf("tokenizer.json: llama.cpp has no name for the pre_tokenizer %.300s",
		t.PreTokenizer)
}

// merges are pairs, with a space between them.
func (t *file) merges() ([]string, error) {
	all := make([]string, len(t.Model.Merges))
	for i, m := range t.Model.Merges {
		var pair []string
		if json.Unmarshal(m, &all[i]) == nil {
			continue
		}
		if err := json.Unmarshal(m, &pair); err != nil {
			return nil, fmt.Errorf("tokenizer.json: merges[%d]: %w", i, err)
		}
		all[i] = strings.Join(pair, " ")
	}
	return all, nil
}

// addSpecial adds what begins and ends a text, and the chat template.
func addSpecial(all *fields, f *hf.Folder, tok *tokenizers.Tokenizer) error {
	before, _ := tok.Affixes()
	begin := tok.BeginningOfText()
	if len(before) > 0 {
		begin = before[0]
	}
	if begin >= 0 {
		all.set("tokenizer.ggml.bos_token_id", begin)
	}
	if len(f.Generation.End) > 0 {
		all.set("tokenizer.ggml.eos_token_id", f.Generation.End[0])
	} else if end := tok.EndOfDocument(); end >= 0 {
		all.set("tokenizer.ggml.eos_token_id", end)
	}
	if f.Generation.Pad >= 0 {
		all.set("tokenizer.ggml.padding_token_id", f.Generation.Pad)
	}
	all.set("tokenizer.ggml.add_bos_token", len(before) > 0)
	return addTemplates(all, f)
}

// addTemplates copies the chat templates, which need not be ones that this module can render.
func addTemplates(all *fields, f *hf.Folder) error {
	sources, err := chat.LoadSources(f.Dir)
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
