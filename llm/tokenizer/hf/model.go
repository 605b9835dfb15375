package hf

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/bytelevel"
	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/merge"
)

const (
	maxIDs    = 1 << 20 // ids; the largest known vocabulary has 2^18
	maxMerges = 1 << 21
)

// A model is a byte-pair encoding: a vocabulary and a list of pairs to merge.
//
// If byteLevel is set, the keys of ids are the decoded bytes of tokens, and a piece is initially divided
// into bytes. Otherwise, it is divided into characters.
type model struct {
	tokens   []token          // by id
	ids      map[string]int32 // ids of tokens
	excluded map[string]int32 // ids of tokens that never occur in a piece, such as special tokens
	merges   *merge.Table

	byteLevel    bool
	byteFallback bool
	fuseUnknown  bool
	ignoreMerges bool
	unknown      int32 // token for characters without a token, or none

	bytes     [256]int32 // tokens of single bytes, or none
	fallback  [256]int32 // tokens <0x00> to <0xFF>, or none
	junctions junctions
	longest   int // length of the longest token in bytes
}

// A token is an entry of the vocabulary.
type token struct {
	text string
	ok   bool // the id belongs to a token
}

const none = -1

// readModel reads the model of a file.
func readModel(v value, byteLevel bool) (*model, error) {
	o := newObject("model", v)
	if kind := o.textOr("type", "BPE"); kind != "BPE" {
		return nil, o.unsupported(kind)
	}

	m := &model{byteLevel: byteLevel, unknown: none}
	m.fuseUnknown = o.boolOr("fuse_unk", false)
	m.byteFallback = o.boolOr("byte_fallback", false)
	m.ignoreMerges = o.boolOr("ignore_merges", false)
	if dropout, ok := o.take("dropout"); ok && string(dropout) != "0.0" && string(dropout) != "0" {
		o.fail("dropout", fmt.Errorf("%s is not supported, want null: the same text would get "+
			"different ids each time", dropout.short()))
	}

	for _, key := range []string{"continuing_subword_prefix", "end_of_word_suffix"} {
		if affix := o.textOr(key, ""); affix != "" {
			o.fail(key, fmt.Errorf("%.40q is not supported, want none", affix))
		}
	}

	if m.byteFallback && byteLevel {
		o.fail("byte_fallback", errors.New("it is not supported with a ByteLevel pre-tokenizer"))
	}

	unknown := o.textOr("unk_token", "")
	vocab, _ := o.must("vocab")
	merges, _ := o.must("merges")
	if err := o.done(); err != nil {
		return nil, err
	}

	if err := m.readVocab(vocab); err != nil {
		return nil, fmt.Errorf("model.vocab: %w", err)
	}

	if unknown != "" {
		id, ok := m.find(unknown)
		if !ok {
			return nil, fmt.Errorf("model.unk_token: %.60q is not in the vocabulary", unknown)
		}
		m.unknown = id
	}

	if err := m.readMerges(merges); err != nil {
		return nil, fmt.Errorf("model.merges: %w", err)
	}

	m.findBytes()
	return m, nil
}

// readVocab reads the tokens and their ids.
func (m *model) readVocab(v value) error {
	type entry struct{ id, end int }
	var entries []entry
	var arena []byte // a single allocation for all tokens
	largest := 0
	err := v.members(func(key []byte, member value) error {
		id, err := member.integer(maxIDs - 1)
		if err != nil {
			return fmt.Errorf("%.60q: %w", key, err)
		}
		if len(entries) == maxIDs {
			return fmt.Errorf("it has more than %d tokens", maxIDs)
		}
		arena = append(arena, key...)
		entries = append(entries, entry{id, len(arena)})
		largest = max(largest, id)
		return nil
	})
	if err != nil {
		return err
	}

	if largest > 2*len(entries)+1024 {
		return fmt.Errorf("it has %d tokens, but ids up to %d", len(entries), largest)
	}

	m.tokens = make([]token, largest+1)
	m.ids = make(map[string]int32, len(entries))
	m.excluded = map[string]int32{}
	texts, from := string(arena), 0
	for _, e := range entries {
		text := texts[from:e.end]
		from = e.end
		if t := m.tokens[e.id]; t.ok {
			return fmt.Errorf("%.60q and %.60q both have id %d", t.text, text, e.id)
		}
		m.tokens[e.id] = token{text, true}
		m.longest = max(m.longest, len(text))
	}

	return m.indexTokens(len(texts))
}

// indexTokens creates the map of ids. The argument is the total length of the tokens in bytes.
func (m *model) indexTokens(size int) error {
	arena := make([]byte, 0, size)
	for id, t := range m.tokens {
		if !t.ok {
			continue
		}
		text, ids := t.text, m.ids
		if m.byteLevel {
			from := len(arena)
			ok := false
			if arena, ok = bytelevel.AppendBytes(arena, t.text); !ok {
				ids = m.excluded
			} else {
				text = string(arena[from:])
			}
		}
		if other, twice := ids[text]; twice {
			return fmt.Errorf("%.60q occurs twice, with ids %d and %d", t.text, other, id)
		}
		ids[text] = int32(id)
	}

	return nil
}

// find returns the id of a token, given as written in the file.
func (m *model) find(text string) (int32, bool) {
	ids := m.ids
	if m.byteLevel {
		var scratch [128]byte
		if bytes, ok := bytelevel.AppendBytes(scratch[:0], text); ok {
			text = string(bytes)
		} else {
			ids = m.excluded
		}
	}

	id, ok := ids[text]
	return id, ok
}

// readMerges reads the pairs to merge, written as "a b" or ["a", "b"]. If a pair occurs twice, the last
// one counts, as in Rust's tokenizers.
func (m *model) readMerges(v value) error {
	type pair struct{ left, right, id int32 }
	var pairs []pair
	var text, left, right []byte
	err := v.elements(func(i int, element value) error {
		var err error
		if len(pairs) == maxMerges {
			return fmt.Errorf("it has more than %d merges", maxMerges)
		}
		if left, right, err = mergeOf(element, text[:0]); err != nil {
			return fmt.Errorf("merge %d: %w", i, err)
		}
		if len(left) == 0 || len(right) == 0 {
			return fmt.Errorf("merge %d contains an empty token: %s", i, element.short())
		}
		p := pair{}
		if p.left, err = m.mergeToken(left); err == nil {
			p.right, err = m.mergeToken(right)
		}
		if err == nil {
			text = append(append(text[:0], left...), right...)
			p.id, err = m.mergeToken(text)
		}
		if err != nil {
			return fmt.Errorf("merge %d, %s, %w", i, element.short(), err)
		}
		pairs = append(pairs, p)
		return nil
	})
	if err != nil {
		return err
	}

	m.merges = merge.NewTable(len(pairs))
	for rank, p := range pairs {
		m.merges.Add(p.left, p.right, int32(rank), p.id)
		if !m.byteLevel {
			m.junctions.add(m.tokens[p.left].text, m.tokens[p.right].text)
		}
	}

	return nil
}

// mergeOf returns the two tokens of a merge.
func mergeOf(v value, text []byte) (left, right []byte, err error) {
	if v[0] == '"' {
		if text, err = v.appendText(text); err != nil {
			return nil, nil, err
		}
		left, right, ok := bytes.Cut(text, []byte(" "))
		if !ok || bytes.IndexByte(right, ' ') >= 0 {
			return nil, nil, fmt.Errorf("it is %s, want two tokens with one space between them",
				v.short())
		}
		return left, right, nil
	}

	cuts := make([]int, 0, 2)
	err = v.elements(func(i int, element value) error {
		if i == 2 {
			return errors.New("it has more than two tokens")
		}
		var err error
		text, err = element.appendText(text)
		cuts = append(cuts, len(text))
		return err
	})

	if err == nil && len(cuts) != 2 {
		err = fmt.Errorf("it is %s, want two tokens", v.short())
	}
	if err != nil {
		return nil, nil, err
	}

	return text[:cuts[0]], text[cuts[0]:], nil
}

// mergeToken returns the id of an operand or a result of a merge.
func (m *model) mergeToken(text []byte) (int32, error) {
	id, ok := m.find(string(text))
	if !ok {
		return none, fmt.Errorf("names %.60q, which is not in the vocabulary", text)
	}
	return id, nil
}

// findBytes finds the tokens of single bytes.
func (m *model) findBytes() {
	for b := range 256 {
		m.bytes[b], m.fallback[b] = none, none
		if id, ok := m.ids[string([]byte{byte(b)})]; ok {
			m.bytes[b] = id
		}
		if id, ok := m.ids[fmt.Sprintf("<0x%02X>", b)]; ok && m.byteFallback {
			m.fallback[b] = id
		}
	}
}
