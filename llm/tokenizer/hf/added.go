package hf

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/split"
)

// An addedToken is a token that is matched in a text before the text is split into pieces.
type addedToken struct {
	id         int
	content    string
	singleWord bool // only matches if no word continues before or after it
	lstrip     bool // includes the white space before it
	rstrip     bool // includes the white space after it
	normalized bool // matched in the normalized text, with its own text normalized too
	special    bool
}

const (
	maxAdded        = 1 << 16 // tokens; Gemma 3 has 6,415
	maxAddedContent = 512     // bytes
)

// readAdded reads the added tokens.
func readAdded(v value) ([]addedToken, error) {
	var all []addedToken
	err := v.elements(func(i int, item value) error {
		if i == maxAdded {
			return fmt.Errorf("added_tokens: it has more than %d tokens", maxAdded)
		}
		o := newObject(fmt.Sprintf("added_tokens[%d]", i), item)
		t := addedToken{
			id:         o.integer("id"),
			content:    o.text("content"),
			singleWord: o.boolOr("single_word", false),
			lstrip:     o.boolOr("lstrip", false),
			rstrip:     o.boolOr("rstrip", false),
			normalized: o.boolOr("normalized", true),
			special:    o.boolOr("special", false),
		}
		if len(t.content) == 0 || len(t.content) > maxAddedContent {
			o.fail("content", fmt.Errorf("it has %d bytes, want 1 to %d", len(t.content),
				maxAddedContent))
		}
		all = append(all, t)
		return o.done()
	})

	return all, err
}

// addTokens adds tokens to the vocabulary. Rust's tokenizers ignores the ids in the file. Instead, a
// token gets its id from the model or, if it is not in the model, the next free id. If the file
// specifies a different id, addTokens returns an error.
func (m *model) addTokens(added []addedToken) error {
	known := map[string]bool{}
	count := 0
	for _, t := range m.tokens {
		if t.ok {
			count++
		}
	}

	next := count
	for i, t := range added {
		where := fmt.Sprintf("added_tokens[%d], %.60q", i, t.content)
		if known[t.content] {
			return fmt.Errorf("%s: it occurs twice", where)
		}
		known[t.content] = true
		id, ok := m.find(t.content)
		if !ok {
			id = int32(next)
			next++
		}
		if t.id != int(id) {
			return fmt.Errorf("%s: it has id %d, but its place in the vocabulary is %d", where,
				t.id, id)
		}
		if ok {
			continue
		}
		if t.id >= maxIDs {
			return fmt.Errorf("%s: it has id %d, want less than %d", where, t.id, maxIDs)
		}
		for len(m.tokens) <= t.id {
			m.tokens = append(m.tokens, token{})
		}
		if other := m.tokens[t.id]; other.ok {
			return fmt.Errorf("%s: its id %d already belongs to %.60q", where, t.id, other.text)
		}
		m.tokens[t.id] = token{t.content, true}
	}

	return nil
}

// A matcher finds the leftmost token in a text and, at the same position, the longest.
type matcher struct {
	begins [256]bool             // whether any token starts with the byte
	next   map[edge]int32        // the nodes of a trie
	tokens map[int32]*addedToken // by node
}

type edge struct {
	node int32
	b    byte
}

func newMatcher() *matcher {
	return &matcher{next: map[edge]int32{}, tokens: map[int32]*addedToken{}}
}

// add adds a token that matches the pattern.
func (m *matcher) add(t *addedToken, pattern []byte) error {
	if len(pattern) == 0 {
		return errors.New("the normalizer removes all of it")
	}

	m.begins[pattern[0]] = true
	node := int32(0)
	for _, b := range pattern {
		n, ok := m.next[edge{node, b}]
		if !ok {
			n = int32(len(m.next) + 1)
			m.next[edge{node, b}] = n
		}
		node = n
	}

	if other := m.tokens[node]; other != nil {
		return fmt.Errorf("it matches the same text as %.60q", other.content)
	}

	m.tokens[node] = t
	return nil
}

// find returns the first token at or after a position with its range, or nil.
func (m *matcher) find(text []byte, at int) (t *addedToken, from, to int) {
	for ; at < len(text); at++ {
		if !m.begins[text[at]] {
			continue
		}
		node := int32(0)
		for end := at; end < len(text); end++ {
			n, ok := m.next[edge{node, text[end]}]
			if !ok {
				break
			}
			node = n
			if found := m.tokens[node]; found != nil {
				t, to = found, end+1
			}
		}
		if t != nil {
			return t, at, to
		}
	}

	return nil, 0, 0
}

// split calls next for the tokens in a text, including the white space that belongs to them, and for the
// parts between tokens. If ordinary is set, special tokens count as text.
func (m *matcher) split(text []byte, ordinary bool, next func(t *addedToken, part []byte)) {
	end := 0 // end of the last part
	for at := 0; ; {
		t, from, to := m.find(text, at)
		if t == nil {
			break
		}
		at = to
		if ordinary && t.special || t.singleWord && !isWhole(text, from, to) {
			continue
		}
		if t.lstrip {
			from = max(end, spaceBefore(text, from))
		}
		if t.rstrip {
			to = spaceAfter(text, to)
		}
		if end < from {
			next(nil, text[end:from])
		}
		next(t, nil)
		end = to
	}

	if end < len(text) {
		next(nil, text[end:])
	}
}

// isWhole reports whether the range is not adjacent to further word characters.
func isWhole(text []byte, from, to int) bool {
	before, n := utf8.DecodeLastRune(text[:from])
	if n > 0 && split.IsWord(before) {
		return false
	}
	next, n := utf8.DecodeRune(text[to:])
	return n == 0 || !split.IsWord(next)
}

// spaceBefore returns the start of the white space before a position.
func spaceBefore(text []byte, at int) int {
	for at > 0 {
		r, n := utf8.DecodeLastRune(text[:at])
		if !split.IsSpace(r) {
			break
		}
		at -= n
	}
	return at
}

// spaceAfter returns the end of the white space after a position.
func spaceAfter(text []byte, at int) int {
	for at < len(text) {
		r, n := utf8.DecodeRune(text[at:])
		if !split.IsSpace(r) {
			break
		}
		at += n
	}
	return at
}
