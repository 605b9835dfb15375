package gguf

import (
	"cmp"
	"fmt"
	"slices"
	"unicode/utf8"
)

const (
	space = "▁" // stands for a space in the tokens of SentencePiece

	// Limits against files that would take too long to open. Published vocabularies stay far below them.
	longestPiece   = 256 // bytes
	mostPieceSplit = 32  // average number of merges per token
)

// sentencePiece completes a tokenizer.json for SentencePiece's byte-pair encoding, which llama.cpp calls "llama". It has
// scores instead of merges: starting with the characters of a text, it repeatedly joins the two neighbors that form the
// token with the highest score.
func (d *document) sentencePiece(v *vocabulary, t map[string]any) error {
	scores, err := all[float32](d, "tokenizer.ggml.scores")
	if err != nil {
		return err
	}
	if len(scores) != len(v.tokens) {
		return fmt.Errorf("tokenizer.ggml.scores has %d elements, want %d", len(scores), len(v.tokens))
	}
	merges, err := v.scoredMerges(scores)
	if err != nil {
		return err
	}

	// Spaces become visible characters. Unless the file says otherwise, encoding also puts a space before the text, which
	// decoding removes.
	spaces := map[string]any{"type": "Replace", "pattern": map[string]any{"String": " "}, "content": space}
	normalizers := []any{spaces}
	decoders := []any{
		map[string]any{"type": "Replace", "pattern": map[string]any{"String": space}, "content": " "},
		map[string]any{"type": "ByteFallback"},
		map[string]any{"type": "Fuse"},
	}
	if d.bool("tokenizer.ggml.add_space_prefix", true) {
		normalizers = []any{map[string]any{"type": "Prepend", "prepend": space}, spaces}
		decoders = append(decoders, map[string]any{"type": "Strip", "content": " ", "start": 1, "stop": 0})
	}
	t["normalizer"] = map[string]any{"type": "Sequence", "normalizers": normalizers}
	t["decoder"] = map[string]any{"type": "Sequence", "decoders": decoders}

	model := map[string]any{"type": "BPE", "fuse_unk": true, "byte_fallback": true, "vocab": v.vocab(), "merges": merges}
	if id := d.number("tokenizer.ggml.unknown_token_id", 0); id >= 0 && id < len(v.tokens) && v.types[id] == unknown {
		model["unk_token"] = v.tokens[id]
	}
	t["model"] = model
	return nil
}

// scoredMerges returns the pairs of tokens that form another token when joined, sorted by the score of that token. Among
// equal scores, the pair with the longer first token comes first, as in Hugging Face's conversion of such encodings.
// As in SentencePiece, only normal tokens are joined, so that no ordinary text becomes a control token.
func (v *vocabulary) scoredMerges(scores []float32) ([][2]string, error) {
	type merge struct {
		pair  [2]string
		score float32
	}
	normals := map[string]bool{}
	for id, token := range v.tokens {
		if v.types[id] != normal {
			continue
		}
		switch {
		case !utf8.ValidString(token):
			return nil, fmt.Errorf("token %d, %.60q, is not UTF-8", id, token)
		case len(token) > longestPiece:
			return nil, fmt.Errorf("token %d, %.60q, has %d bytes, want at most %d", id, token, len(token), longestPiece)
		case scores[id] != scores[id]:
			return nil, fmt.Errorf("tokenizer.ggml.scores has no number for token %d", id)
		}
		normals[token] = true
	}

	var all []merge
	for id, token := range v.tokens {
		if v.types[id] != normal {
			continue
		}
		for at := range token {
			if at > 0 && normals[token[:at]] && normals[token[at:]] {
				all = append(all, merge{[2]string{token[:at], token[at:]}, scores[id]})
			}
		}
		if len(all) > mostPieceSplit*len(v.tokens) {
			return nil, fmt.Errorf("its tokens join in more than %d ways", mostPieceSplit*len(v.tokens))
		}
	}
	slices.SortStableFunc(all, func(a, b merge) int {
		return cmp.Or(cmp.Compare(b.score, a.score), utf8.RuneCountInString(b.pair[0])-utf8.RuneCountInString(a.pair[0]))
	})

	pairs := make([][2]string, len(all))
	for i, m := range all {
		pairs[i] = m.pair
	}
	return pairs, nil
}
