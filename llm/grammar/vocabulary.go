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
	words   int // of a mask
	longest int // number of bytes of the longest token
	end     []int
	texts   [][]byte
	sorted  []int32 // tokens by text
	trie    []branch
}

// A branch is a node of a tree of the tokens' bytes. The branches are in the order of a walk through the tree,
// which is the order of the sorted tokens.
type branch struct {
	depth int32 // number of bytes before this one
	next  int32 // branch after all that start with this one
	first int32 // index of the first sorted token that ends here
	count int32 // number of tokens that end here
	byte  byte
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

	for id, t := range v.texts {
		if len(t) > 0 {
			v.sorted = append(v.sorted, int32(id))
			v.longest = max(v.longest, len(t))
		}
	}
	slices.SortFunc(v.sorted, func(a, b int32) int {
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
	for i, id := range v.sorted {
		text := v.texts[id]
		common := 0
		for common < len(last) && common < len(text) && last[common] == text[common] {
			common++
		}
		leave(common)
		for depth := common; depth < len(text); depth++ {
			path = append(path, int32(len(v.trie)))
			v.trie = append(v.trie, branch{depth: int32(depth), byte: text[depth], first: int32(i)})
		}
		v.trie[path[len(path)-1]].count++
		last = text
	}
	leave(0)
	return v
}

// add adds the tokens that end at a branch to a mask.
func (v *Vocabulary) add(mask []uint64, b *branch) {
	for _, id := range v.sorted[b.first:][:b.count] {
		mask[id/64] |= 1 << (id % 64)
	}
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

// Limits for the caches of a matcher. A text of 1,000 characters with a limited length takes 1,000
// states.
const (
	mostFrames = 1 << 17
	mostStates = 1 << 13
	mostBytes  = 32 << 20 // of the masks of states, and as much for those of lexemes
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
		a, size := c.automaton, 8*m.vocabulary.words
		if len(a.frames) > mostFrames || len(a.states) > mostStates || m.masks*size > mostBytes {
			a.forget()
			m.masks = 0
		}
		if len(a.locals)*size > mostBytes {
			clear(a.locals)
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

// find returns the tokens that can follow in a state.
func (m *Matcher) find(a *automaton, from *state) []uint64 {
	v := m.vocabulary
	mask := make([]uint64, v.words)
	if from.ends {
		for _, id := range v.end {
			mask[id/64] |= 1 << (id % 64)
		}
	}

	for _, f := range from.frames {
		l := m.local(a, f)
		for i, bits := range l.mask {
			mask[i] |= bits
		}
		if len(l.exits) == 0 || f.up == nil {
			continue
		}

		then := a.after(f)
		for _, exit := range l.exits {
			m.walk(a, then, exit, mask)
		}
	}
	return mask
}

// walk adds the tokens that start with the bytes up to a branch and can follow in a state, which has been
// reached with these bytes.
func (m *Matcher) walk(a *automaton, from *state, exit int32, mask []uint64) {
	v := m.vocabulary
	depth := v.trie[exit].depth + 1
	path := append(m.path[:0], from) // path[i] is the state after i more bytes
	for i := exit + 1; i < v.trie[exit].next; {
		b := &v.trie[i]
		path = path[:b.depth-depth+1]
		s := a.step(path[len(path)-1], b.byte)
		if s == a.none {
			i = b.next
			continue
		}
		path = append(path, s)
		v.add(mask, b)
		i++
	}
	m.path = path[:0]
}

// A localMask describes the tokens that can follow within a lexeme.
type localMask struct {
	mask []uint64
	// exits are the branches where the lexeme can end before the tokens do.
	exits []int32
}

type localKey struct {
	node *node
	at   int
}

// local returns the tokens that can follow within a frame's lexeme. They do not depend on the frames above, so
// that all strings, for example, share them.
func (m *Matcher) local(a *automaton, f *frame) *localMask {
	v, lexer := m.vocabulary, f.node.lexer
	at := f.at
	if t, ok := lexer.(*textLexer); ok {
		at = t.similar(at, v.longest)
	}
	key := localKey{f.node, at}
	if l := a.locals[key]; l != nil {
		return l
	}

	l := &localMask{mask: make([]uint64, v.words)}
	path := []int{at} // path[i] is the lexer's state after i bytes
	for i := int32(0); i < int32(len(v.trie)); {
		b := &v.trie[i]
		path = path[:b.depth+1]
		s := f.node.step(path[b.depth], b.byte)
		if s == dead {
			i = b.next
			continue
		}
		path = append(path, s)
		v.add(l.mask, b)
		if b.next > i+1 && f.node.cache[s].accepts {
			l.exits = append(l.exits, i)
		}
		i++
	}
	a.locals[key] = l
	return l
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
