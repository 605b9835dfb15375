package hf

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/bytelevel"
	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/split"
)

// patterns holds the published patterns that divide text into pieces.
var patterns = map[string]string{"gpt2": split.GPT2, "llama3": split.Llama3, "qwen2": split.Qwen,
	"tekken": split.Tekken, "gpt4o": split.GPT4o}

// EndOfText is the special token that Train adds after all other tokens.
const EndOfText = "<|endoftext|>"

// Train learns a byte-level encoding of a text, like [tokenizer.TrainBPE], but divides the text with
// the pattern of a published model: gpt2, llama3, qwen2, tekken or gpt4o. Train returns a
// tokenizer.json, for [Parse] and Rust's tokenizers, and the matching tokenizer_config.json.
//
//	ids 0 to 255   the bytes
//	ids from 256   the results of merges, in order
//	the last id    EndOfText
//
// The vocabulary contains at most vocab tokens, a number from 257 to 2^20, and fewer once no pair
// occurs twice any longer.
func Train(ctx context.Context, text io.Reader, vocab int, pattern string,
	progress func(merges, total int) error) (tokenizerJSON, config []byte, err error) {
	expression, ok := patterns[pattern]
	if !ok {
		return nil, nil, fmt.Errorf("hf: Train: the pattern is %.40q, want one of %s", pattern,
			strings.Join(slices.Sorted(maps.Keys(patterns)), ", "))
	}

	scanner, _ := split.NewScanner(expression)
	merges, err := tokenizer.Merges(ctx, text, vocab, scanner.Next, progress)
	if err != nil {
		return nil, nil, fmt.Errorf("hf: Train: %w", err)
	}

	if tokenizerJSON, err = written(expression, merges); err != nil {
		return nil, nil, fmt.Errorf("hf: Train: %w", err)
	}

	config, err = json.MarshalIndent(map[string]any{"tokenizer_class": "PreTrainedTokenizerFast",
		"eos_token": EndOfText, "model_max_length": 1 << 30, "clean_up_tokenization_spaces": false},
		"", "  ")
	return tokenizerJSON, config, err
}

type fields = map[string]any

// written returns the tokenizer.json.
func written(expression string, merges [][2]int) ([]byte, error) {
	tokens := make([]string, 256, 256+len(merges))
	vocab := make(map[string]int, cap(tokens)+1)
	for b := range tokens {
		tokens[b] = string(bytelevel.AppendToken(nil, []byte{byte(b)}))
		vocab[tokens[b]] = b
	}

	var pairs [][2]string
	seen := map[[2]string]bool{}
	for _, m := range merges {
		pair := [2]string{tokens[m[0]], tokens[m[1]]}
		token := pair[0] + pair[1]
		tokens = append(tokens, token)
		if seen[pair] { // different ids may have the same text
			continue
		}
		seen[pair], pairs = true, append(pairs, pair)
		if _, twice := vocab[token]; !twice {
			vocab[token] = len(vocab)
		}
	}

	end := len(vocab)
	byteLevel := fields{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
		"use_regex": false}
	return json.MarshalIndent(fields{
		"version": "1.0", "truncation": nil, "padding": nil, "normalizer": nil,
		"added_tokens": []fields{{"id": end, "content": EndOfText, "single_word": false,
			"lstrip": false, "rstrip": false, "normalized": false, "special": true}},
		"pre_tokenizer": fields{"type": "Sequence", "pretokenizers": []fields{
			{"type": "Split", "pattern": fields{"Regex": expression}, "behavior": "Isolated",
				"invert": false}, byteLevel}},
		"post_processor": byteLevel,
		"decoder":        byteLevel,
		"model": fields{"type": "BPE", "dropout": nil, "unk_token": nil,
			"continuing_subword_prefix": nil, "end_of_word_suffix": nil, "fuse_unk": false,
			"byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": pairs},
	}, "", " ")
}
