package hf

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"

	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/split"
)

// findPattern returns a finder for a regular expression that is not one of the published patterns. It
// returns an error if the expression has different meanings in Oniguruma and regexp2, if it can match
// an empty text, or if it takes exponential time.
func findPattern(pattern string) (finder, error) {
	pattern, err := portable(pattern)
	if err != nil {
		return nil, err
	}

	// Without a time limit, matching cannot fail.
	re, err := regexp2.Compile(pattern, regexp2.None, regexp2.OptionMaxBacktrackingStackSize(-1))
	if err != nil {
		return nil, err
	}

	return func(text []byte, match func(from, to int)) {
		runes := make([]rune, 0, len(text))
		places := make([]int, 0, len(text)+1) // the offsets of the runes and of the end
		for at := 0; at < len(text); {
			r, n := utf8.DecodeRune(text[at:])
			runes, places = append(runes, r), append(places, at)
			at += n
		}
		places = append(places, len(text))
		re.FindRunesMatches(runes, 0, func(m regexp2.MatchView) bool {
			from, length, _ := m.GroupRange(0)
			match(places[from], places[from+length])
			return true
		})
	}, nil
}

const maxPattern = 4096 // bytes

// portable returns the pattern with categories such as \p{L} replaced by the characters that belong to
// them in Oniguruma. It returns an error that names an unsupported construct.
func portable(pattern string) (string, error) {
	if len(pattern) > maxPattern {
		return "", fmt.Errorf("the pattern has %d bytes, want at most %d", len(pattern), maxPattern)
	}

	p := patternParser{rest: pattern, length: len(pattern)}
	x := p.alternatives(0)
	if p.err == nil && p.rest != "" {
		p.fail("an unmatched )")
	}

	if p.err == nil && x.empty {
		p.fail("an empty match")
	}

	if p.err != nil {
		return "", p.err
	}

	var out strings.Builder
	done := 0
	for _, w := range p.written {
		out.WriteString(pattern[done:w.from])
		out.WriteString(w.text)
		done = w.to
	}

	out.WriteString(pattern[done:])
	return out.String(), nil
}

// A patternParser parses a pattern from left to right.
type patternParser struct {
	rest    string
	length  int // length of the pattern
	err     error
	inClass bool
	written []rewritten
}

// rewritten holds the replacement for a part of the pattern.
type rewritten struct {
	from, to int
	text     string
}

// An expression describes a part of a pattern for the parser.
type expression struct {
	empty     bool // it can match an empty text
	unbounded bool // it contains a repetition without a limit
	choice    bool // it can match the same text in several ways, or texts of different lengths
	degree    int  // number of successive repetitions; the time grows with this power of the text's length
}

// maxDegree limits the number of successive repetitions. Published patterns have two.
const maxDegree = 3

// fail records the first error and ends parsing.
func (p *patternParser) fail(what string) {
	if p.err == nil {
		p.err = fmt.Errorf("%s is not supported, at %.40q", what, p.rest)
		if p.rest == "" {
			p.err = errors.New(what + " is not supported")
		}
	}
	p.rest = ""
}

// take consumes the prefix, and reports whether it was there.
func (p *patternParser) take(prefix string) bool {
	rest, ok := strings.CutPrefix(p.rest, prefix)
	p.rest = rest
	return ok
}

// alternatives parses sequences separated by |.
func (p *patternParser) alternatives(depth int) (x expression) {
	if depth > 16 {
		p.fail("groups nested deeper than 16")
	}

	for {
		y := p.sequence(depth)
		x.empty = x.empty || y.empty
		x.unbounded = x.unbounded || y.unbounded
		x.choice = x.choice || y.choice
		x.degree = max(x.degree, y.degree)
		if !p.take("|") {
			return x
		}
		x.choice = true
	}
}

// sequence parses successive atoms with their quantifiers.
func (p *patternParser) sequence(depth int) expression {
	x := expression{empty: true}
	for p.rest != "" && p.rest[0] != '|' && p.rest[0] != ')' {
		y := p.repeated(p.atom(depth))
		x.empty = x.empty && y.empty
		x.unbounded = x.unbounded || y.unbounded
		x.choice = x.choice || y.choice
		if x.degree += y.degree; x.degree > maxDegree {
			p.fail(fmt.Sprintf("more than %d successive repetitions", maxDegree))
		}
	}

	return x
}

// repeated parses the optional quantifier of an expression.
func (p *patternParser) repeated(x expression) expression {
	if p.rest == "" {
		return x
	}

	switch c := p.rest[0]; {
	case c == '?':
		p.take("?")
		x.empty, x.choice = true, true
	case c == '*' || c == '+':
		if x.unbounded {
			p.fail("a repetition of a repetition")
			return x
		}
		if x.choice { // each repetition has several possibilities, so the time is exponential
			p.fail("a repetition of a choice")
			return x
		}
		p.rest = p.rest[1:]
		x.unbounded, x.choice, x.degree = true, true, 1
		x.empty = x.empty || c == '*'
	case c == '{':
		return p.counted(x)
	default:
		return x
	}

	p.take("?") // a lazy quantifier
	if p.rest != "" && strings.ContainsRune("*+?{", rune(p.rest[0])) {
		p.fail("a quantifier of a quantifier")
	}

	return x
}

// counted parses {m}, {m,} or {m,n}.
func (p *patternParser) counted(x expression) expression {
	var low, high int
	body, rest, _ := strings.Cut(p.rest[1:], "}")
	first, second, two := strings.Cut(body, ",")
	_, err := fmt.Sscanf(first, "%d", &low)
	if two && second != "" && err == nil {
		_, err = fmt.Sscanf(second, "%d", &high)
	}

	const most = 1000
	if err != nil || x.unbounded || low < 0 || low > most || high > most {
		p.fail("this quantifier")
		return x
	}

	if x.choice && max(low, high) > 1 {
		p.fail("a repetition of a choice")
		return x
	}

	p.rest = rest
	x.empty = x.empty || low == 0
	x.unbounded = two && second == ""
	// Many possible lengths count as a repetition without a limit.
	const few = 8
	if x.choice = x.choice || two; x.unbounded || high > low+few {
		x.degree++
	}

	return x
}

// atom parses a character, an escape, a class or a group.
func (p *patternParser) atom(depth int) expression {
	switch c := p.rest[0]; c {
	case '(':
		return p.group(depth)
	case '[':
		p.class()
	case '\\':
		p.escape()
	case '^', '$', '*', '+', '?', '{', '}':
		p.fail(fmt.Sprintf("%q", c))
	default:
		_, n := utf8.DecodeRuneInString(p.rest)
		p.rest = p.rest[n:]
	}

	return expression{}
}

// group parses a group in parentheses.
func (p *patternParser) group(depth int) expression {
	// This is the only group in published patterns that ignores case. For other groups, the engines
	// differ, for example in the matches for ß and the Kelvin sign.
	if p.take(`(?i:'s|'t|'re|'ve|'m|'ll|'d)`) {
		return expression{}
	}

	ahead := p.take("(?=") || p.take("(?!")
	if !ahead && !p.take("(?:") {
		if strings.HasPrefix(p.rest, "(?") {
			p.fail("this kind of group")
			return expression{}
		}
		p.take("(")
	}

	x := p.alternatives(depth + 1)
	if !p.take(")") {
		p.fail("a group without an end")
	}

	if ahead {
		x.empty = true
		if p.rest != "" && strings.ContainsRune("*+?{", rune(p.rest[0])) {
			p.fail("a repeated lookahead")
		}
	}

	return x
}

// escape parses an escape sequence.
func (p *patternParser) escape() {
	const literal = "\\.-+*?()[]{}^$|/'\"#&~!@%=:;,<>_` "
	switch {
	case len(p.rest) < 2:
		p.fail("a backslash at the end")
	case strings.ContainsRune("rntfsS"+literal, rune(p.rest[1])):
		p.rest = p.rest[2:]
	case strings.HasPrefix(p.rest, `\p{`) || strings.HasPrefix(p.rest, `\P{`):
		name, rest, _ := strings.Cut(p.rest[3:], "}")
		p.characters(name, p.rest[1] == 'P', rest)
	case p.rest[1] == 'd' || p.rest[1] == 'D':
		p.characters("Nd", p.rest[1] == 'D', p.rest[2:])
	case p.rest[1] == 'u' && len(p.rest) >= 6:
		if strings.Trim(p.rest[2:6], "0123456789abcdefABCDEF") != "" {
			p.fail("this escape")
			return
		}
		p.rest = p.rest[6:]
	default:
		p.fail("this escape")
	}
}

// characters replaces a category, or its complement if other is set, with a list of its characters. rest is the text
// after the category.
func (p *patternParser) characters(category string, other bool, rest string) {
	ranges, ok := split.Category(category)
	if !ok {
		p.fail("this category")
		return
	}

	if other {
		ranges = complement(ranges)
	}

	var text strings.Builder
	for _, r := range ranges {
		for i, r := range r {
			if i == 1 {
				text.WriteByte('-')
			}
			if r < 0x10000 {
				fmt.Fprintf(&text, "\\u%04x", r)
			} else {
				text.WriteRune(r)
			}
		}
	}

	set := text.String()
	if !p.inClass {
		set = "[" + set + "]"
	}

	p.written = append(p.written, rewritten{p.length - len(p.rest), p.length - len(rest), set})
	p.rest = rest
}

// complement returns the complement of the ranges.
func complement(ranges [][2]rune) (all [][2]rune) {
	next := rune(0)
	for _, r := range ranges {
		if r[0] > next {
			all = append(all, [2]rune{next, r[0] - 1})
		}
		next = r[1] + 1
	}

	if next <= utf8.MaxRune {
		all = append(all, [2]rune{next, utf8.MaxRune})
	}

	return all
}

// class parses [...]. Nested classes are errors, because Oniguruma and regexp2 write them differently.
func (p *patternParser) class() {
	p.take("[")
	p.take("^")
	p.inClass = true
	defer func() { p.inClass = false }()
	for first := true; p.err == nil; first = false {
		switch {
		case p.rest == "":
			p.fail("a class without an end")
		case p.rest[0] == ']' && first:
			p.fail("an empty class")
		case p.take("]"):
			return
		case p.rest[0] == '[' || strings.HasPrefix(p.rest, "&&"):
			p.fail("a class in a class")
		case p.rest[0] == '\\':
			p.escape()
		default:
			_, n := utf8.DecodeRuneInString(p.rest)
			p.rest = p.rest[n:]
		}
	}
}
