package hf

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"

	"github.com/kasmina-go/kasmina/llm/tokenizer/internal/split"
)

// findPattern returns what finds a regular expression that is none of the published ones. It means
// the same in Oniguruma and here, or is an error, as is one that can match nothing or that takes
// exponential time.
func findPattern(pattern string) (finder, error) {
	pattern, err := portable(pattern)
	if err != nil {
		return nil, err
	}
	// Without a limit, a match cannot fail.
	re, err := regexp2.Compile(pattern, regexp2.None, regexp2.OptionMaxBacktrackingStackSize(-1))
	if err != nil {
		return nil, err
	}
	return func(text []byte, match func(from, to int)) {
		runes := make([]rune, 0, len(text))
		places := make([]int, 0, len(text)+1) // of runes and the end
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

// portable returns a pattern in which categories such as \p{L} are the characters that Oniguruma
// has in them. Else it returns an error that names what is not supported.
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
		p.fail("a match of nothing")
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

// A patternParser reads a pattern from left to right.
type patternParser struct {
	rest    string
	length  int // of the pattern
	err     error
	inClass bool
	written []rewritten
}

// rewritten is what stands in the place of a part of the pattern.
type rewritten struct {
	from, to int
	text     string
}

// An expression is what the parser must know of a part of a pattern.
type expression struct {
	empty     bool // it can match nothing
	unbounded bool // a part of it can be repeated without end
	choice    bool // it can match one text in several ways, or texts of several lengths
	degree    int  // repetitions one behind the other: the time is this power of a text's length
}

// maxDegree is the most repetitions that stand one behind the other. Published patterns have two.
const maxDegree = 3

// fail notes the first error and ends the parse.
func (p *patternParser) fail(what string) {
	if p.err == nil {
		p.err = fmt.Errorf("%s is not supported, at %.40q", what, p.rest)
		if p.rest == "" {
			p.err = errors.New(what + " is not supported")
		}
	}
	p.rest = ""
}

func (p *patternParser) take(prefix string) bool {
	rest, ok := strings.CutPrefix(p.rest, prefix)
	p.rest = rest
	return ok
}

func (p *patternParser) alternatives(depth int) (x expression) {
	if depth > 16 {
		p.fail("a group inside of 16 others")
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

func (p *patternParser) sequence(depth int) expression {
	x := expression{empty: true}
	for p.rest != "" && p.rest[0] != '|' && p.rest[0] != ')' {
		y := p.repeated(p.atom(depth))
		x.empty = x.empty && y.empty
		x.unbounded = x.unbounded || y.unbounded
		x.choice = x.choice || y.choice
		if x.degree += y.degree; x.degree > maxDegree {
			p.fail(fmt.Sprintf("more than %d repetitions one behind the other", maxDegree))
		}
	}
	return x
}

// repeated reads the quantifier behind an expression, if there is one.
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
		if x.choice { // each time in another way: in all, exponentially many
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
	p.take("?") // as few as possible
	if p.rest != "" && strings.ContainsRune("*+?{", rune(p.rest[0])) {
		p.fail("a quantifier of a quantifier")
	}
	return x
}

// counted reads {m}, {m,} or {m,n}.
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
	const few = 8
	if x.choice = x.choice || two; x.unbounded || high > low+few {
		x.degree++
	}
	return x
}

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

func (p *patternParser) group(depth int) expression {
	// The one group of published patterns in which capitals count as small letters. In others the
	// engines differ: what matches ß, or the sign of Kelvin.
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

// characters writes those of a category, or all others, in the place of what stands before rest.
func (p *patternParser) characters(category string, other bool, rest string) {
	ranges, ok := split.Category(category)
	if !ok {
		p.fail("this category")
		return
	}
	if other {
		ranges = others(ranges)
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

// others returns the characters outside of ranges.
func others(ranges [][2]rune) (all [][2]rune) {
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

// class reads [...]. Oniguruma and regexp2 have classes in classes, and write them otherwise.
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
