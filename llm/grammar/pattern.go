package grammar

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"regexp/syntax"
	"slices"
	"unicode"
)

// A pattern accepts texts of least to most characters that match a regular expression. If most is
// negative, there is no upper limit.
//
// A state is the set of all places in the compiled expression that can match the next character and still
// reach the end.
type pattern struct {
	length length
	prog   *syntax.Prog
	live   []lengths // by place: the possible numbers of characters of the rest of the text
	steps  int       // that compiling took
	states []patternState
	keys   table[string] // of the states
}

type patternState struct {
	places []uint32
	ends   bool // whether the expression matches the text so far
	count  int  // number of characters, as in length
}

// lengths is a set of numbers of characters, as bits. If texts have no largest length, the number n means
// n or more characters.
type lengths []uint64

func (l lengths) has(n int) bool { return l[n/64]>>(n%64)&1 != 0 }
func (l lengths) set(n int)      { l[n/64] |= 1 << (n % 64) }

// hasAny reports whether the set contains a number from low to high.
func (l lengths) hasAny(low, high int) bool {
	for w := low / 64; w <= high/64; w++ {
		bits := l[w]
		if w == low/64 {
			bits &= ^uint64(0) << (low % 64)
		}
		if w == high/64 {
			bits &= ^uint64(0) >> (63 - high%64)
		}
		if bits != 0 {
			return true
		}
	}

	return false
}

// The limits for regular expressions keep the time and the memory of a request small.
const (
	mostPlaces = 5_000
	mostSteps  = 1 << 26 // to find the lengths
)

// escapeSequence finds the escape sequences of a regular expression.
var escapeSequence = regexp.MustCompile(`\\(u[0-9a-fA-F]{4}|.)`)

// newPattern compiles a regular expression. It may match anywhere in the text, unless it is anchored.
func newPattern(expression string, l length) (*pattern, error) {
	// Go writes \u00E9 as \x{00E9}.
	translated := escapeSequence.ReplaceAllStringFunc(expression, func(s string) string {
		if len(s) == 6 {
			return `\x{` + s[2:] + `}`
		}
		return s
	})

	tree, err := syntax.Parse(translated, syntax.Perl)
	if err != nil {
		return nil, fmt.Errorf("the regular expression %.60q is not supported: %w", expression, err)
	}

	if err := checkRegexp(tree); err != nil {
		return nil, fmt.Errorf("the regular expression %.60q is not supported: %w", expression, err)
	}

	anything := &syntax.Regexp{Op: syntax.OpStar, Sub: []*syntax.Regexp{{Op: syntax.OpAnyChar}}}
	whole := &syntax.Regexp{Op: syntax.OpConcat, Sub: []*syntax.Regexp{anything, tree, anything}}
	prog, err := syntax.Compile(whole.Simplify())
	if err != nil {
		return nil, fmt.Errorf("the regular expression %.60q is not supported: %w", expression, err)
	}

	p := &pattern{length: l, prog: prog}
	if len(prog.Inst) > mostPlaces || !p.findLengths() {
		return nil, fmt.Errorf("the regular expression %.60q, or its combination with a length, is too large",
			expression)
	}

	return p, nil
}

// checkRegexp returns an error for assertions other than ^ and $. It makes dots exclude the line ends that
// JavaScript knows.
func checkRegexp(re *syntax.Regexp) error {
	switch re.Op {
	case syntax.OpWordBoundary, syntax.OpNoWordBoundary:
		return errors.New(`\b and \B are not supported`)
	case syntax.OpBeginLine, syntax.OpEndLine:
		return errors.New("the flag m is not supported")
	case syntax.OpAnyCharNotNL:
		re.Op = syntax.OpCharClass
		re.Rune = []rune{0, '\n' - 1, '\n' + 1, '\r' - 1, '\r' + 1, '\u2027', '\u202A', unicode.MaxRune}
	}

	for _, sub := range re.Sub {
		if err := checkRegexp(sub); err != nil {
			return err
		}
	}

	return nil
}

// horizon returns the largest number in the sets of lengths.
func (p *pattern) horizon() int { return max(1, p.length.least, p.length.most) }

// closure adds the places that can be reached from pc without a character. It reports whether the end of
// the expression can be reached. Once the expression has required the end of the text, atEnd, no places are
// added.
func (p *pattern) closure(pc uint32, atStart, atEnd bool, places map[uint32]bool, seen map[[2]uint32]bool) (ends bool) {
	key := [2]uint32{pc, 0}
	if atEnd {
		key[1] = 1
	}

	if seen[key] {
		return false
	}

	seen[key] = true

	i := &p.prog.Inst[pc]
	next := func(pc uint32) bool { return p.closure(pc, atStart, atEnd, places, seen) }
	switch i.Op {
	case syntax.InstMatch:
		return true
	case syntax.InstAlt, syntax.InstAltMatch:
		one, other := next(i.Out), next(i.Arg)
		return one || other
	case syntax.InstCapture, syntax.InstNop:
		return next(i.Out)
	case syntax.InstEmptyWidth:
		switch syntax.EmptyOp(i.Arg) {
		case syntax.EmptyBeginText:
			return atStart && next(i.Out)
		case syntax.EmptyEndText:
			return p.closure(i.Out, atStart, true, places, seen)
		}
	case syntax.InstRune, syntax.InstRune1, syntax.InstRuneAny, syntax.InstRuneAnyNotNL:
		if !atEnd {
			places[pc] = true
		}
	}

	return false
}

// from returns the places that can be reached from pc.
func (p *pattern) from(pc uint32, atStart bool) (places map[uint32]bool, ends bool) {
	places = map[uint32]bool{}
	ends = p.closure(pc, atStart, false, places, map[[2]uint32]bool{})
	return places, ends
}

// findLengths computes the lengths of the rests of texts. It reports whether this was possible in a
// reasonable time.
func (p *pattern) findLengths() bool {
	n := len(p.prog.Inst)
	p.live = make([]lengths, n)
	following := make([][]uint32, n)
	last := make([]bool, n) // whether the text can end after the character at a place
	edges := 0
	for pc := range n {
		p.live[pc] = make(lengths, p.horizon()/64+1)
		switch p.prog.Inst[pc].Op {
		case syntax.InstRune, syntax.InstRune1, syntax.InstRuneAny, syntax.InstRuneAnyNotNL:
		default:
			continue
		}
		if !p.matchesAny(uint32(pc)) {
			continue
		}
		places, ends := p.from(p.prog.Inst[pc].Out, false)
		last[pc] = ends
		following[pc] = slices.Sorted(maps.Keys(places))
		edges += len(places)
		if p.steps = edges * p.horizon(); p.steps > mostSteps {
			return false
		}
	}

	// extend adds a length to every place from which one more character leads to the length before.
	extend := func(length, before int) (changed bool) {
		for pc, places := range following {
			if p.live[pc].has(length) {
				continue
			}
			if slices.ContainsFunc(places, func(place uint32) bool { return p.live[place].has(before) }) {
				p.live[pc].set(length)
				changed = true
			}
		}
		return changed
	}

	for pc, ends := range last {
		if ends {
			p.live[pc].set(1)
		}
	}

	if p.length.most < 0 {
		for extend(1, 1) {
		}
	}

	for length := 2; length <= p.horizon(); length++ {
		extend(length, length-1)
	}

	return true
}

// canFinish reports whether a text with the given number of characters can be completed from a place.
func (p *pattern) canFinish(place uint32, count int) bool {
	low := max(p.length.least-count, 1)
	if p.length.most < 0 {
		return p.live[place].has(low)
	}
	return low <= p.length.most-count && p.live[place].hasAny(low, p.length.most-count)
}

// state returns the state for the places that can be reached after count characters, or dead.
func (p *pattern) state(places map[uint32]bool, ends bool, count int) int {
	s := patternState{ends: ends, count: count}
	for place := range places {
		if p.canFinish(place, count) {
			s.places = append(s.places, place)
		}
	}

	slices.Sort(s.places)

	if len(s.places) == 0 && !(s.ends && p.length.accepts(count)) {
		return dead
	}

	key := binary.LittleEndian.AppendUint32(nil, uint32(count)<<1)
	if ends {
		key[0] |= 1
	}

	for _, place := range s.places {
		key = binary.LittleEndian.AppendUint32(key, place)
	}

	id := p.keys.id(string(key))
	if id == len(p.states) {
		p.states = append(p.states, s)
	}

	return id
}

func (p *pattern) start() int {
	count := p.length.start()
	if count == dead {
		return dead
	}
	places, ends := p.from(uint32(p.prog.Start), true)
	return p.state(places, ends, count)
}

func (p *pattern) next(state int, r rune) int {
	s := p.states[state]
	count := p.length.next(s.count, r)
	if count == dead {
		return dead
	}

	places, seen, ends := map[uint32]bool{}, map[[2]uint32]bool{}, false
	for _, place := range s.places {
		if i := &p.prog.Inst[place]; i.MatchRune(r) {
			ends = p.closure(i.Out, false, false, places, seen) || ends
		}
	}

	return p.state(places, ends, count)
}

// any tries the characters where the classes of the places begin and end.
func (p *pattern) any(state int, low, high rune) bool {
	s := p.states[state]
	try := func(r rune) bool {
		return r >= low && r <= high && (r < 0xD800 || r > 0xDFFF) && p.next(state, r) != dead
	}
	if try(low) || try(0xE000) {
		return true
	}

	for _, place := range s.places {
		for _, r := range p.changes(place) {
			if try(r) || try(r+1) {
				return true
			}
		}
	}

	return false
}

// changes returns the characters at the bounds of a place's classes.
func (p *pattern) changes(place uint32) []rune {
	i := &p.prog.Inst[place]
	switch i.Op {
	case syntax.InstRuneAny, syntax.InstRuneAnyNotNL:
		return []rune{'\n'}
	}

	if syntax.Flags(i.Arg)&syntax.FoldCase == 0 {
		return i.Rune
	}

	var all []rune
	for _, r := range i.Rune {
		all = append(all, r, r-1)
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			all = append(all, f, f-1)
		}
	}

	return all
}

// matchesAny reports whether a place matches any character.
func (p *pattern) matchesAny(place uint32) bool {
	i := &p.prog.Inst[place]
	try := func(r rune) bool {
		return r >= 0 && r <= unicode.MaxRune && (r < 0xD800 || r > 0xDFFF) && i.MatchRune(r)
	}
	if try(0) || try(0xE000) {
		return true
	}

	for _, r := range p.changes(place) {
		if try(r) || try(r+1) {
			return true
		}
	}

	return false
}

func (p *pattern) accepts(state int) bool {
	s := p.states[state]
	return s.ends && p.length.accepts(s.count)
}
