package grammar

import (
	"cmp"
	"encoding/binary"
	"slices"
)

// An automaton recognizes the texts of a grammar, byte by byte. It is a nondeterministic pushdown
// automaton that computes each state when it is first reached. It is not safe for concurrent use.
type automaton struct {
	frames map[frameKey]*frame
	states map[string]*state
	locals map[localKey]*localMask
	nextID uint32 // of a frame
	first  *state
	none   *state // after bytes that no text starts with
}

// A frame is a place in a grammar, and the places to return to. Equal frames are identical.
type frame struct {
	frameKey
	id   uint32
	then *state // after the end of a lexeme; nil until computed
}

// A frameKey identifies a frame. The meaning of at depends on the node: the state of a lexeme's lexer, the
// next part of a sequence, or how often the part of a repetition has matched.
type frameKey struct {
	node *node
	at   int
	up   *frame // nil for the root
}

// A state is a set of frames of lexemes. A byte can follow if it can follow in at least one frame.
type state struct {
	frames []*frame
	ends   bool         // whether the text can end here
	next   *[256]*state // nil until computed; elements likewise
	mask   []uint64     // of the tokens that can follow; nil until computed
}

func newAutomaton(root *node) *automaton {
	a := &automaton{frames: map[frameKey]*frame{}, states: map[string]*state{},
		locals: map[localKey]*localMask{}, none: &state{}}
	c := closure{a: a, seen: map[frameKey]bool{}}
	c.enter(root, nil)
	a.first = a.intern(&c)
	return a
}

// step returns the state after one more byte.
func (a *automaton) step(s *state, b byte) *state {
	if s.next == nil {
		s.next = new([256]*state)
	}
	if t := s.next[b]; t != nil {
		return t
	}

	c := closure{a: a, seen: map[frameKey]bool{}}
	for _, f := range s.frames {
		if at := f.node.step(f.at, b); at != dead {
			c.lex(f.node, at, f.up)
		}
	}
	t := a.none
	if len(c.frames) > 0 || c.ends {
		t = a.intern(&c)
	}
	s.next[b] = t
	return t
}

// finished reports whether the text can only end.
func (a *automaton) finished(s *state) bool { return s.ends && len(s.frames) == 0 }

// forget frees all cached states and frames. States that are still in use remain valid.
func (a *automaton) forget() {
	for _, s := range a.states {
		s.next, s.mask = nil, nil
	}
	clear(a.states)
	clear(a.frames)
}

// after returns the state after the end of a frame's lexeme.
func (a *automaton) after(f *frame) *state {
	if f.then == nil {
		c := closure{a: a, seen: map[frameKey]bool{}}
		c.leave(f.up)
		f.then = a.intern(&c)
	}
	return f.then
}

// intern returns the state of a closure.
func (a *automaton) intern(c *closure) *state {
	slices.SortFunc(c.frames, func(x, y *frame) int { return cmp.Compare(x.id, y.id) })
	frames := slices.Compact(c.frames)
	key := make([]byte, 0, 4*len(frames)+1)
	for _, f := range frames {
		key = binary.LittleEndian.AppendUint32(key, f.id)
	}
	if c.ends {
		key = append(key, 1)
	}

	s := a.states[string(key)]
	if s == nil {
		s = &state{frames: frames, ends: c.ends}
		a.states[string(key)] = s
	}
	return s
}

// frame returns the frame for a key.
func (a *automaton) frame(key frameKey) *frame {
	f := a.frames[key]
	if f == nil {
		f = &frame{frameKey: key, id: a.nextID}
		a.frames[key] = f
		a.nextID++
	}
	return f
}

// A closure collects the lexemes that can be reached without consuming a byte.
type closure struct {
	a      *automaton
	frames []*frame
	ends   bool
	seen   map[frameKey]bool // entered with at -1, or left
}

// lex adds a lexeme with its lexer in the given state.
func (c *closure) lex(n *node, at int, up *frame) {
	if n.lexer.accepts(at) {
		c.leave(up)
	}
	if continues(n.lexer, at) {
		c.frames = append(c.frames, c.a.frame(frameKey{n, at, up}))
	}
}

// continues reports whether a byte can follow in a lexer's state.
func continues(l lexer, at int) bool {
	if !l.accepts(at) {
		return true // because every state can be completed
	}
	if l, ok := l.(literal); ok {
		return at < len(l)
	}
	for b := range 256 {
		if l.next(at, byte(b)) != dead {
			return true
		}
	}
	return false
}

// enter adds the lexemes that start a node. The node returns to up.
func (c *closure) enter(n *node, up *frame) {
	key := frameKey{n, -1, up}
	if !n.productive || c.seen[key] {
		return
	}
	c.seen[key] = true

	switch n.kind {
	case lexeme:
		c.lex(n, n.lexer.start(), up)
	case choice:
		for _, p := range n.parts {
			c.enter(p, up)
		}
	case sequence:
		c.advance(n, 0, up)
	case repetition:
		c.repeat(n, 0, up)
	}
}

// advance continues a sequence with part i.
func (c *closure) advance(n *node, i int, up *frame) {
	switch {
	case i == len(n.parts):
		c.leave(up)
	case i == len(n.parts)-1: // the last part returns to where the sequence does
		c.enter(n.parts[i], up)
	default:
		c.enter(n.parts[i], c.a.frame(frameKey{n, i + 1, up}))
	}
}

// repeat continues a repetition after its part has matched the given number of times.
func (c *closure) repeat(n *node, times int, up *frame) {
	if times >= n.min {
		c.leave(up)
	}
	if n.max < 0 || times < n.max {
		if n.max >= 0 || times < n.min { // otherwise, the exact number no longer matters
			times++
		}
		c.enter(n.parts[0], c.a.frame(frameKey{n, times, up}))
	}
}

// leave continues after a node that returns to f.
func (c *closure) leave(f *frame) {
	if f == nil {
		c.ends = true
		return
	}
	if c.seen[f.frameKey] {
		return
	}
	c.seen[f.frameKey] = true

	if f.node.kind == sequence {
		c.advance(f.node, f.at, f.up)
	} else {
		c.repeat(f.node, f.at, f.up)
	}
}
