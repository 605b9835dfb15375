package grammar

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"sync"
)

// A Vocabulary holds the texts of a model's tokens.
type Vocabulary struct {
	words int // of a mask
	end   []int
	texts [][]byte
	trie  []branch
}

// A branch is a node of a tree of the tokens' bytes. The branches are in the order of a walk through the tree.
type branch struct {
	depth  int32 // number of bytes before this one
	next   int32 // branch after all that start with this one
	tokens []int32
	byte   byte
}

// NewVocabulary returns a vocabulary. The element i of texts holds the bytes that the token i adds to a text.
// Tokens without bytes are never generated. The tokens of end end a text.
func NewVocabulary(texts [][]byte, end []int) *Vocabulary {
	v := &Vocabulary{words: (len(texts) + 63) / 64, texts: slices.Clone(texts)}
	for _, id := range end {
		if id >= 0 && id < len(texts) {
			v.end = append(v.end, id)
			v.texts[id] = nil
		}
	}

	var sorted []int32
	for id, t := range v.texts {
		if len(t) > 0 {
			sorted = append(sorted, int32(id))
		}
	}
	slices.SortFunc(sorted, func(a, b int32) int {
		return cmp.Or(bytes.Compare(v.texts[a], v.texts[b]), cmp.Compare(a, b))
	})

	var path []int32 // the branches of the last token
	leave := func(depth int) {
		for _, b := range path[depth:] {
			v.trie[b].next = int32(len(v.trie))
		}
		path = path[:depth]
	}
	var last []byte
	for _, id := range sorted {
		text := v.texts[id]
		common := 0
		for common < len(last) && common < len(text) && last[common] == text[common] {
			common++
		}
		leave(common)
		for i := common; i < len(text); i++ {
			path = append(path, int32(len(v.trie)))
			v.trie = append(v.trie, branch{depth: int32(i), byte: text[i]})
		}
		b := &v.trie[path[len(path)-1]]
		b.tokens = append(b.tokens, id)
		last = text
	}
	leave(0)
	return v
}

// A Matcher finds the tokens that can follow in texts of a grammar. It can be used by several goroutines.
type Matcher struct {
	vocabulary *Vocabulary
	grammar    *Grammar

	mu        sync.Mutex
	automaton *automaton
	masks     int // number of masks in the automaton's states
	path      []*state
}

// Matcher returns a matcher for the texts of a grammar, or [ErrNothing] if there are none.
func (v *Vocabulary) Matcher(g *Grammar) (*Matcher, error) {
	m := &Matcher{vocabulary: v, grammar: g}
	if !m.reset() {
		return nil, ErrNothing
	}
	return m, nil
}

// reset makes a new automaton, and reports whether any text follows the grammar.
func (m *Matcher) reset() bool {
	root := m.grammar.build()
	if !prune(root) {
		return false
	}
	m.automaton, m.masks = newAutomaton(root), 0
	return true
}

// The largest numbers of frames, states and masks that a matcher keeps. A text of 1,000 characters with a
// limited length takes 1,000 states.
const (
	mostFrames = 1 << 17
	mostStates = 1 << 13
	mostMasks  = 1 << 9
)

// New returns a constraint for a new text.
func (m *Matcher) New() *Constraint {
	m.mu.Lock()
	defer m.mu.Unlock()

	// The lexers keep all states they have ever had.
	if m.automaton.nextID > 4*mostFrames {
		m.reset()
	}
	return &Constraint{matcher: m, automaton: m.automaton, state: m.automaton.first}
}

// A Constraint follows one text and knows the tokens that can come next. It implements sampler.Constraint. It
// is not safe for concurrent use.
type Constraint struct {
	matcher   *Matcher
	automaton *automaton
	state     *state
	ended     bool
}

// Allowed returns the tokens that can follow, as bits: token i is bit i%64 of element i/64. The caller must not
// modify them. If the text can end, they include the tokens that end texts.
func (c *Constraint) Allowed() ([]uint64, error) {
	m := c.matcher
	m.mu.Lock()
	defer m.mu.Unlock()
	if c.ended {
		return nil, fmt.Errorf("grammar: the text has ended")
	}

	if c.state.mask == nil {
		if a := c.automaton; len(a.frames) > mostFrames || len(a.states) > mostStates || m.masks >= mostMasks {
			a.forget()
			m.masks = 0
		}
		c.state.mask = m.find(c.automaton, c.state)
		m.masks++
	}
	for _, bits := range c.state.mask {
		if bits != 0 {
			return c.state.mask, nil
		}
	}
	return nil, fmt.Errorf("grammar: the model's vocabulary has no token that can follow")
}

// find walks through the vocabulary to find the tokens that can follow in a state.
func (m *Matcher) find(a *automaton, from *state) []uint64 {
	v := m.vocabulary
	mask := make([]uint64, v.words)
	if from.ends {
		for _, id := range v.end {
			mask[id/64] |= 1 << (id % 64)
		}
	}

	path := append(m.path[:0], from) // path[i] is the state after i bytes
	for i := 0; i < len(v.trie); {
		b := &v.trie[i]
		path = path[:b.depth+1]
		s := a.step(path[b.depth], b.byte)
		if s == a.none {
			i = int(b.next)
			continue
		}
		path = append(path, s)
		for _, id := range b.tokens {
			mask[id/64] |= 1 << (id % 64)
		}
		i++
	}
	m.path = path[:0]
	return mask
}

// Accept adds a token to the text. It returns an error, and changes nothing, for a token that is not allowed.
func (c *Constraint) Accept(id int) error {
	m := c.matcher
	m.mu.Lock()
	defer m.mu.Unlock()
	if !c.ended && slices.Contains(m.vocabulary.end, id) && c.state.ends {
		c.ended = true
		return nil
	}

	s := c.state
	if c.ended || id < 0 || id >= len(m.vocabulary.texts) || len(m.vocabulary.texts[id]) == 0 {
		return fmt.Errorf("grammar: the token %d cannot follow", id)
	}
	for _, b := range m.vocabulary.texts[id] {
		if s = c.automaton.step(s, b); s == c.automaton.none {
			return fmt.Errorf("grammar: the token %d cannot follow", id)
		}
	}
	c.state = s
	return nil
}

// Done reports whether the text is complete and nothing can follow.
func (c *Constraint) Done() bool {
	return c.ended || c.automaton.finished(c.state)
}

// Complete reports whether the text can end.
func (c *Constraint) Complete() bool { return c.ended || c.state.ends }
