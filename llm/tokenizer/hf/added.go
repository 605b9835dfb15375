package hf

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/split"
)

// An addedToken is one that is found in a text before it is cut, whatever stands around it.
type addedToken struct {
	id         int
	content    string
	singleWord bool // found only if no word goes on before or behind it
	lstrip     bool // takes the white space before it
	rstrip     bool // takes the white space behind it
	normalized bool // looked for in the normalized text, as the normalizers write it
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

// addTokens adds tokens to the vocabulary. Rust's tokenizers gives them the ids of the model, or
// those behind it in turn, whatever the file says. An id that is not that one is an error.
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
			return fmt.Errorf("%s: its id %d is that of %.60q", where, t.id, other.text)
		}
		m.tokens[t.id] = token{t.content, true}
	}
	return nil
}

// A matcher finds tokens in a text: the leftmost, of those the longest.
type matcher struct {
	begins [256]bool             // whether a token begins with a byte
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

// add enters a token, which is found where the text has the pattern.
func (m *matcher) add(t *addedToken, pattern []byte) error {
	if len(pattern) == 0 {
		return errors.New("the normalizer leaves nothing of it")
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
		return fmt.Errorf("it is found where %.60q is", other.content)
	}
	m.tokens[node] = t
	return nil
}

// find returns the first token at or behind a place, and where it lies, or nil.
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

// split hands on what the tokens part a text into: them, with the white space that they take, and
// what lies between. Special tokens are text if they are ordinary.
func (m *matcher) split(text []byte, ordinary bool, next func(t *addedToken, part []byte)) {
	end := 0 // of what was handed on
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
			to = spaceBehind(text, to)
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

// isWhole reports whether no word goes on before or behind a part of a text.
func isWhole(text []byte, from, to int) bool {
	before, n := utf8.DecodeLastRune(text[:from])
	if n > 0 && split.IsWord(before) {
		return false
	}
	behind, n := utf8.DecodeRune(text[to:])
	return n == 0 || !split.IsWord(behind)
}

// spaceBefore returns where the white space before a place begins.
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

// spaceBehind returns where the white space behind a place ends.
func spaceBehind(text []byte, at int) int {
	for at < len(text) {
		r, n := utf8.DecodeRune(text[at:])
		if !split.IsSpace(r) {
			break
		}
		at += n
	}
	return at
}
