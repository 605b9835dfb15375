package grammar

import (
	"strings"
	"unicode/utf8"
)

// A content is a deterministic automaton over the characters of a string. As with a lexer, every
// reachable state can be completed to an accepted text.
type content interface {
	start() int
	next(state int, r rune) int
	// any reports whether next succeeds for at least one character from low to high. Surrogates do not
	// count.
	any(state int, low, high rune) bool
	accepts(state int) bool
}

// A textLexer accepts the texts that its content accepts, either in UTF-8 or as JSON strings.
type textLexer struct {
	content content
	json    bool
	states  table[textState]
}

// A textState is a state of a textLexer.
type textState struct {
	content int
	part    string // bytes of an incomplete character or escape sequence
	quotes  int8   // number of quotation marks of a JSON string so far
}

func newText(c content, json bool) *node {
	return newLexeme(&textLexer{content: c, json: json})
}

func (t *textLexer) start() int {
	c := t.content.start()
	if c == dead {
		return dead
	}
	return t.states.id(textState{content: c})
}

// similar returns a state that behaves like the given state for a number of bytes, which reduces the
// number of states to examine.
func (t *textLexer) similar(state, bytes int) int {
	l, ok := t.content.(length)
	if !ok {
		return state
	}
	s := t.states.values[state]
	s.content = l.similar(s.content, bytes)
	return t.states.id(s)
}

func (t *textLexer) accepts(state int) bool {
	s := t.states.values[state]
	if t.json {
		return s.quotes == 2
	}
	return s.part == "" && t.content.accepts(s.content)
}

func (t *textLexer) next(state int, b byte) int {
	s := t.states.values[state]
	if t.json {
		switch {
		case s.quotes == 2 || s.quotes == 0 && b != '"':
			return dead
		case s.quotes == 0 || b == '"' && s.part == "" && t.content.accepts(s.content):
			s.quotes++
			return t.states.id(s)
		case s.part == "" && (b == '"' || b < ' '):
			return dead
		}
	}

	s.part += string([]byte{b})
	var ranges []runeRange
	whole := false
	if t.json && s.part[0] == '\\' {
		ranges, whole = escaped(s.part)
	} else {
		ranges, whole = encoded(s.part)
	}

	if whole {
		s.content, s.part = t.content.next(s.content, ranges[0].low), ""
		if s.content == dead {
			return dead
		}
		return t.states.id(s)
	}
	for _, r := range ranges {
		if t.content.any(s.content, r.low, r.high) {
			return t.states.id(s)
		}
	}
	return dead
}

// A runeRange is a range of characters, which may include surrogates although they are no characters.
type runeRange struct{ low, high rune }

// encoded returns the characters with UTF-8 encodings that start with the given bytes, and whether the
// bytes are a complete encoding.
func encoded(part string) (ranges []runeRange, whole bool) {
	r, n := utf8.DecodeRuneInString(part)
	switch {
	case n == len(part) && (r != utf8.RuneError || n > 1):
		return []runeRange{{r, r}}, true
	case utf8.FullRuneInString(part):
		return nil, false // invalid
	}

	length, least := 2, rune(0x80)
	switch {
	case part[0] >= 0xF0:
		length, least = 4, 0x10000
	case part[0] >= 0xE0:
		length, least = 3, 0x800
	}
	bits := rune(part[0]) & (1<<(7-length) - 1)
	for i := 1; i < len(part); i++ {
		bits = bits<<6 | rune(part[i]&0x3F)
	}
	missing := 6 * (length - len(part))
	return []runeRange{{max(bits<<missing, least), min((bits+1)<<missing-1, utf8.MaxRune)}}, false
}

// The characters that JSON writes as a backslash and a letter.
const (
	escapes = `"\/bfnrt`
	escapee = "\"\\/\b\f\n\r\t"
)

// escaped is like encoded for an escape sequence of JSON. Characters beyond 0xFFFF are pairs of surrogates,
// such as \uD83D\uDE00.
func escaped(part string) (ranges []runeRange, whole bool) {
	everything := []runeRange{{0, utf8.MaxRune}}
	if len(part) == 1 {
		return everything, false
	}
	if i := strings.IndexByte(escapes, part[1]); i >= 0 {
		return []runeRange{{rune(escapee[i]), rune(escapee[i])}}, true
	}
	if part[1] != 'u' {
		return nil, false
	}

	low, high, ok := hexRange(part[2:min(len(part), 6)])
	highSurrogates := runeRange{max(low, 0xD800), min(high, 0xDBFF)}
	switch {
	case !ok:
		return nil, false
	case len(part) < 6 && highSurrogates.low > highSurrogates.high:
		return []runeRange{{low, high}}, false
	case len(part) < 6:
		return []runeRange{{low, high}, {pair(highSurrogates.low, 0xDC00), pair(highSurrogates.high, 0xDFFF)}}, false
	case low >= 0xDC00 && low <= 0xDFFF:
		return nil, false
	case low < 0xD800 || low > 0xDBFF:
		return []runeRange{{low, low}}, true
	}

	// The second surrogate follows.
	rest := part[6:]
	if !strings.HasPrefix(`\u`, rest[:min(len(rest), 2)]) {
		return nil, false
	}
	second, last, ok := hexRange(rest[min(len(rest), 2):])
	second, last = max(second, 0xDC00), min(last, 0xDFFF)
	if !ok || second > last {
		return nil, false
	}
	return []runeRange{{pair(low, second), pair(low, last)}}, len(rest) == 6
}

// pair returns the character of a pair of surrogates.
func pair(high, low rune) rune { return 0x10000 + (high-0xD800)<<10 + (low - 0xDC00) }

// hexRange returns the range of numbers with four hexadecimal digits that start with the given ones.
func hexRange(digits string) (low, high rune, ok bool) {
	for i := range 4 {
		d := [2]int{0, 15}
		if i < len(digits) {
			n := strings.IndexByte("0123456789abcdef", digits[i]|0x20)
			if n < 0 || digits[i] < '0' {
				return 0, 0, false
			}
			d = [2]int{n, n}
		}
		low, high = low<<4|rune(d[0]), high<<4|rune(d[1])
	}
	return low, high, true
}

// A length accepts texts by their number of characters, from least to most; a negative most means no
// limit. The state is the number of characters read, capped where more characters make no difference.
type length struct{ least, most int }

func (l length) start() int {
	if l.most >= 0 && l.least > l.most {
		return dead
	}
	return 0
}

func (l length) next(state int, _ rune) int {
	switch {
	case state == l.most:
		return dead
	case l.most < 0:
		return min(state+1, l.least)
	}
	return state + 1
}

// similar returns a state that behaves like the given state for a number of characters.
func (l length) similar(state, characters int) int {
	unlimited := func(state int) bool { return l.most < 0 || l.most-state > characters }
	switch {
	case state+characters < l.least && unlimited(0):
		return 0
	case state >= l.least && unlimited(state):
		return l.least
	}
	return state
}

func (l length) any(state int, low, high rune) bool {
	return l.next(state, low) != dead && !(low >= 0xD800 && high <= 0xDFFF)
}

func (l length) accepts(state int) bool { return state >= l.least }

// An others accepts all texts except the listed ones. A state is the index in starts of the text read so
// far, or len(starts) if no listed text starts with this text.
type others struct {
	starts table[string]
	listed map[string]bool
}

func newOthers(texts []string) *others {
	o := &others{listed: map[string]bool{}}
	o.starts.id("")
	for _, t := range texts {
		o.listed[t] = true
		for i := range t {
			o.starts.id(t[:i])
		}
		o.starts.id(t)
	}
	return o
}

func (o *others) start() int { return 0 }

func (o *others) next(state int, r rune) int {
	if state < len(o.starts.values) {
		if id, ok := o.starts.ids[o.starts.values[state]+string(r)]; ok {
			return id
		}
	}
	return len(o.starts.values)
}

func (o *others) any(_ int, low, high rune) bool { return !(low >= 0xD800 && high <= 0xDFFF) }

func (o *others) accepts(state int) bool {
	return state == len(o.starts.values) || !o.listed[o.starts.values[state]]
}
