package hf

import (
	"unicode/utf8"

	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/merge"
)

// An encoder holds the cache and the buffers for encoding in one goroutine.
type encoder struct {
	model  *model
	cut    func(piece []byte, first bool) // splits a piece and calls append for the parts
	cache  merge.Cache
	merger *merge.Merger
	tokens []int32
	ids    []int
}

func newEncoder(m *model, stages []stage) *encoder {
	e := &encoder{model: m, merger: merge.NewMerger(m.merges)}
	e.cut = func(piece []byte, _ bool) { e.append(piece) }
	for i := len(stages) - 1; i >= 0; i-- {
		next, s := e.cut, stages[i]
		e.cut = func(piece []byte, first bool) { s.cut(piece, first, next) }
	}
	return e
}

// append appends the tokens of a piece that no pre-tokenizer splits further.
func (e *encoder) append(piece []byte) {
	m := e.model
	if m.ignoreMerges && len(piece) <= m.longest {
		if id, ok := m.ids[string(piece)]; ok {
			e.ids = append(e.ids, int(id))
			return
		}
	}

	if m.byteLevel {
		e.merge(piece)
		return
	}

	from, before := 0, rune(none)
	for at := 0; at < len(piece); {
		r, n := utf8.DecodeRune(piece[at:])
		if m.character(piece[at:at+n]) == none {
			r = none
		}
		if r != none && before != none && !m.junctions.join(before, r) {
			e.merge(piece[from:at])
			from = at
		}
		at += n
		before = r
	}

	e.merge(piece[from:])
}

// merge appends the tokens of a piece that can be merged independently.
func (e *encoder) merge(piece []byte) {
	tokens, ok := e.cache.Find(piece)
	if !ok {
		e.tokens = e.model.appendSymbols(e.tokens[:0], piece)
		tokens = e.merger.Merge(e.tokens)
		e.cache.Add(piece, tokens)
	}
	for _, id := range tokens {
		e.ids = append(e.ids, int(id))
	}
}

// character returns the token of a character, or none.
func (m *model) character(c []byte) int32 {
	if len(c) == 1 {
		return m.bytes[c[0]]
	}
	if id, ok := m.ids[string(c)]; ok {
		return id
	}
	return none
}

// appendSymbols appends the initial tokens of a piece: the tokens of its characters or, in byte-level
// encodings, of its bytes. A character without a token becomes the tokens <0xNN> of its bytes if they
// all exist. Otherwise, it becomes the unknown token. Like Rust's tokenizers, appendSymbols adds the
// unknown token only before the next character that has a token.
func (m *model) appendSymbols(tokens []int32, piece []byte) []int32 {
	waiting := false // an unknown token has not been added yet
	for at := 0; at < len(piece); {
		n := 1
		if !m.byteLevel && piece[at] >= utf8.RuneSelf {
			_, n = utf8.DecodeRune(piece[at:])
		}
		c := piece[at : at+n]
		at += n
		if id := m.character(c); id != none {
			if waiting {
				tokens = append(tokens, m.unknown)
				waiting = false
			}
			tokens = append(tokens, id)
			continue
		}
		if m.fallsBack(c) {
			for _, b := range c {
				tokens = append(tokens, m.fallback[b])
			}
			continue
		}
		if waiting && !m.fuseUnknown {
			tokens = append(tokens, m.unknown)
		}
		waiting = m.unknown != none
	}

	if waiting {
		tokens = append(tokens, m.unknown)
	}

	return tokens
}

func (m *model) fallsBack(c []byte) bool {
	for _, b := range c {
		if m.fallback[b] == none {
			return false
		}
	}
	return true
}
