package grammar

// A node is a part of a grammar. Nodes form a graph, which has cycles if a schema refers to itself.
type node struct {
	kind     kind
	parts    []*node // of a sequence or choice; the only part of a repetition
	min, max int     // of a repetition; max is -1 without a limit
	lexer    lexer   // of a lexeme

	// productive is whether any text matches, and done whether that has been established.
	productive bool

	cache []*lexerState // of the lexer, by number; nil until computed
}

// A lexerState caches the transitions of a lexer.
type lexerState struct {
	next    [256]int32 // unknown until computed
	accepts bool
}

const unknown = -2

// step returns the state of a lexeme's lexer after one more byte, or dead. The cache then has the new state.
func (n *node) step(at int, b byte) int {
	s := n.state(at)
	if s.next[b] == unknown {
		next := n.lexer.next(at, b)
		s.next[b] = int32(next)
		if next != dead {
			n.state(next)
		}
	}
	return int(s.next[b])
}

// state returns the cached state of a lexeme's lexer.
func (n *node) state(at int) *lexerState {
	for at >= len(n.cache) {
		n.cache = append(n.cache, nil)
	}
	if n.cache[at] == nil {
		s := &lexerState{accepts: n.lexer.accepts(at)}
		for b := range s.next {
			s.next[b] = unknown
		}
		n.cache[at] = s
	}
	return n.cache[at]
}

type kind uint8

const (
	choice     kind = iota // one of the parts; without parts, nothing matches
	sequence               // all parts in order
	repetition             // the part, min to max times
	lexeme                 // the texts that the lexer accepts
)

// A lexer is a deterministic automaton over bytes. Every state it reaches can be completed to a text that
// it accepts. States are small integers.
type lexer interface {
	// start returns the state before the first byte, or dead if the lexer accepts no text at all.
	start() int
	// next returns the state after one more byte, or dead.
	next(state int, b byte) int
	// accepts reports whether the text can end in a state.
	accepts(state int) bool
}

// dead is the state of a lexer after bytes that no text starts with.
const dead = -1

func newChoice(parts ...*node) *node   { return &node{kind: choice, parts: parts} }
func newSequence(parts ...*node) *node { return &node{kind: sequence, parts: parts} }
func newLexeme(l lexer) *node          { return &node{kind: lexeme, lexer: l} }

func newRepetition(part *node, least, most int) *node {
	return &node{kind: repetition, parts: []*node{part}, min: least, max: most}
}

// prune removes all alternatives that no text matches, and reports whether any text matches the root.
func prune(root *node) bool {
	var all []*node
	seen := map[*node]bool{}
	var visit func(n *node)
	visit = func(n *node) {
		if seen[n] {
			return
		}
		seen[n] = true
		all = append(all, n)
		for _, p := range n.parts {
			visit(p)
		}
	}
	visit(root)

	// Nothing is productive at first, so texts that would never end count as unproductive.
	for changed := true; changed; {
		changed = false
		for _, n := range all {
			if !n.productive && n.canMatch() {
				n.productive, changed = true, true
			}
		}
	}

	for _, n := range all {
		switch {
		case n.kind == choice:
			n.parts = productiveOnes(n.parts)
		case n.kind == repetition && !n.parts[0].productive:
			n.max = 0
		}
	}
	return root.productive
}

// canMatch reports whether a text matches the node, as far as is known of its parts.
func (n *node) canMatch() bool {
	switch n.kind {
	case lexeme:
		return n.lexer.start() != dead
	case choice:
		return len(productiveOnes(n.parts)) > 0
	case sequence:
		return len(productiveOnes(n.parts)) == len(n.parts)
	}
	return n.min == 0 || n.parts[0].productive
}

func productiveOnes(nodes []*node) (all []*node) {
	for _, n := range nodes {
		if n.productive {
			all = append(all, n)
		}
	}
	return all
}

// A literal accepts one text. Its state is the number of bytes so far.
type literal string

func (l literal) start() int { return 0 }

func (l literal) next(state int, b byte) int {
	if state < len(l) && l[state] == b {
		return state + 1
	}
	return dead
}

func (l literal) accepts(state int) bool { return state == len(l) }
