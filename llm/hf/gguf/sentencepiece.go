package gguf

import (
	"cmp"
	"encoding/json"
	"errors"
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

// addSentencePiece adds a byte-pair encoding of SentencePiece, which llama.cpp calls "llama".
func (t *file) addSentencePiece(all *fields, v *vocabulary) error {
	if t.Model.IgnoreMerges {
		return errors.New("tokenizer.json: ignore_merges is true, which llama.cpp does not support for encodings of " +
			"SentencePiece")
	}
	rule, err := t.spaces()
	if err != nil {
		return err
	}
	if err := t.markBytes(v); err != nil {
		return err
	}
	unknownID, hasUnknown := t.Model.Vocab[t.Model.Unknown]
	if hasUnknown {
		v.types[unknownID] = unknown
	}
	scores, err := t.scores(v)
	if err != nil {
		return err
	}

	addTokens(all, "llama", "default", v)
	all.set("tokenizer.ggml.scores", scores)
	all.set("tokenizer.ggml.add_space_prefix", rule.prefix)
	if hasUnknown {
		all.set("tokenizer.ggml.unknown_token_id", unknownID)
	}
	return nil
}

// markBytes gives the tokens that stand for single bytes their type. llama.cpp needs all of them.
func (t *file) markBytes(v *vocabulary) error {
	for b := range 256 {
		token := fmt.Sprintf("<0x%02X>", b)
		id, ok := t.Model.Vocab[token]
		if !ok {
			return fmt.Errorf("tokenizer.json: byte_fallback is true, but there is no token %s", token)
		}
		v.types[id] = single
	}
	return nil
}

// scores returns scores with which llama.cpp joins the same tokens as the merges: the earlier a token's first merge, the
// higher the score. It returns an error if no scores can do so.
//
// If a token can be joined from several pairs, the order of its merges is lost. llama.cpp joins the leftmost pair first.
func (t *file) scores(v *vocabulary) ([]float32, error) {
	merges, err := t.merges()
	if err != nil {
		return nil, err
	}
	normals := map[string]int{} // ids of the normal tokens
	for id, token := range v.tokens {
		if v.types[id] == normal {
			normals[token] = id
		}
	}

	scores := make([]float32, len(v.tokens))
	for id, kind := range v.types {
		if kind == normal {
			scores[id] = -float32(len(merges)) // lower than any joined token
		}
	}

	joined, listed, last := map[string]bool{}, map[[2]string]bool{}, ""
	for _, pair := range merges {
		token := pair[0] + pair[1]
		id, ok := normals[token]
		if !ok { // a special token is found in the text before anything is joined
			continue
		}

		listed[pair] = true
		if token == last {
			continue
		}
		if joined[token] {
			return nil, fmt.Errorf("tokenizer.json: the token %.60q has merges before and after those of %.60q, which the "+
				"scores of llama.cpp cannot express", token, last)
		}
		scores[id] = -float32(len(joined))
		joined[token], last = true, token
	}

	// llama.cpp joins whatever forms a token.
	all, err := v.scoredMerges(scores)
	if err != nil {
		return nil, fmt.Errorf("tokenizer.json: %w", err)
	}
	for _, pair := range all {
		if !listed[pair] {
			return nil, fmt.Errorf("tokenizer.json: llama.cpp would join the tokens %.60q and %.60q, for which there is no "+
				"merge", pair[0], pair[1])
		}
	}
	return scores, nil
}

// A normalizer is one normalizer of a tokenizer.json, or a sequence of them.
type normalizer struct {
	Type        string
	Normalizers []normalizer
	Prepend     string
	Pattern     struct{ String string }
	Content     string
}

// A spaceRule describes how a SentencePiece encoding treats spaces, apart from making them visible.
type spaceRule struct {
	prefix    bool // a space is put before a text, and before the text after each special token
	onlyFirst bool // not after special tokens
	onlyOne   bool // not before text that begins with a space
}

// spaces returns the treatment of spaces, which older files describe as normalizers, and newer ones as a pre-tokenizer.
func (t *file) spaces() (rule spaceRule, err error) {
	steps := t.Normalizer.Normalizers
	if t.Normalizer.Type != "Sequence" && t.Normalizer.Type != "" {
		steps = []normalizer{t.Normalizer}
	}
	var pre struct {
		Type        string
		Replacement string
		Scheme      string `json:"prepend_scheme"`
		Split       *bool
	}
	if len(t.PreTokenizer) > 0 {
		if err := json.Unmarshal(t.PreTokenizer, &pre); err != nil {
			return rule, fmt.Errorf("tokenizer.json: pre_tokenizer: %w", err)
		}
	}

	visible := func(n normalizer) bool {
		return n.Type == "Replace" && n.Pattern.String == " " && n.Content == space
	}
	switch {
	case pre.Type == "" && len(steps) == 1 && visible(steps[0]):
		return rule, nil
	case pre.Type == "" && len(steps) == 2 && steps[0].Type == "Prepend" && steps[0].Prepend == space && visible(steps[1]):
		return spaceRule{prefix: true}, nil
	case pre.Type == "Metaspace" && pre.Replacement == space && pre.Split != nil && !*pre.Split && len(steps) == 0:
		prefix := pre.Scheme != "never"
		return spaceRule{prefix: prefix, onlyFirst: pre.Scheme == "first", onlyOne: prefix}, nil
	}
	return rule, fmt.Errorf("tokenizer.json: llama.cpp has no equivalent of the normalizer %.40q together with the "+
		"pre_tokenizer %.40q, or of their settings, for encodings of SentencePiece", t.Normalizer.Type, pre.Type)
}

// spaceDifferences describes, for users, texts in which llama.cpp finds other tokens because it treats spaces differently.
func (t *file) spaceDifferences() (all []string) {
	rule, err := t.spaces()
	if err != nil {
		return nil
	}
	if rule.onlyOne {
		all = append(all, "llama.cpp puts a space before every text, and the tokenizer does not if the text begins with "+
			"one: such texts get other tokens there")
	}
	if rule.onlyFirst {
		all = append(all, "llama.cpp puts a space before the text after each special token, and the tokenizer does not: "+
			"messages of a chat begin with other tokens there")
	}

	// A normalizer that puts a space before a text also puts one before the texts of normalized tokens.
	if t.Normalizer.Type != "" && rule.prefix {
		for _, a := range t.AddedTokens {
			if a.Normalized == nil || *a.Normalized {
				all = append(all, fmt.Sprintf("the tokenizer finds added tokens such as %.60q only at the beginning of a text "+
					"or after a space, and llama.cpp finds them everywhere", a.Content))
				break
			}
		}
	}
	return all
}
