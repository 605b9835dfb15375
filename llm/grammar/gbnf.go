package grammar

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Parse returns a grammar that is written in GBNF, the notation of llama.cpp:
//
//	root  ::= "yes" | "no" | list
//	list  ::= "[" item ("," item){0,9} "]"   # a comment
//	item  ::= [a-z]+
//
// A text follows the grammar if it follows the rule root. Rules must not start with themselves.
func Parse(source string) (*Grammar, error) {
	if _, err := parseRules(source); err != nil {
		return nil, fmt.Errorf("grammar: Parse: %w", err)
	}

	g, err := newGrammar(func() *node {
		root, err := parseRules(source)
		if err != nil {
			panic(err) // it has been parsed before
		}
		return root
	})
	if err != nil {
		return nil, errors.New("grammar: Parse: no text follows the rule root")
	}

	return g, nil
}

// A ruleParser parses GBNF.
type ruleParser struct {
	source  string
	at      int
	rules   map[string]*node
	defined map[string]bool
	depth   int
}

func parseRules(source string) (root *node, err error) {
	if !utf8.ValidString(source) {
		return nil, errors.New("the grammar is not valid UTF-8")
	}

	p := &ruleParser{source: source, rules: map[string]*node{}, defined: map[string]bool{}}
	for p.space(true); p.at < len(source); p.space(true) {
		if err := p.rule(); err != nil {
			line := 1 + strings.Count(source[:p.at], "\n")
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
	}

	for _, name := range slices.Sorted(maps.Keys(p.rules)) {
		if !p.defined[name] {
			return nil, fmt.Errorf("the rule %.60q is used but not defined", name)
		}
	}

	if !p.defined["root"] {
		return nil, errors.New("the rule root is missing")
	}

	if name := leftRecursive(p.rules); name != "" {
		return nil, fmt.Errorf("the rule %.60q can start with itself, which is not supported: use repetition", name)
	}

	return p.rules["root"], nil
}

// named returns the node for a rule.
func (p *ruleParser) named(name string) *node {
	if p.rules[name] == nil {
		p.rules[name] = newChoice()
	}
	return p.rules[name]
}

// space skips spaces and comments, and line ends too if lines is set.
func (p *ruleParser) space(lines bool) {
	for p.at < len(p.source) {
		switch c := p.source[p.at]; {
		case c == ' ', c == '\t', lines && (c == '\n' || c == '\r'):
			p.at++
		case c == '#':
			for p.at < len(p.source) && p.source[p.at] != '\n' {
				p.at++
			}
		default:
			return
		}
	}
}

// take skips a text if it comes next.
func (p *ruleParser) take(text string) bool {
	ok := strings.HasPrefix(p.source[p.at:], text)
	if ok {
		p.at += len(text)
	}
	return ok
}

// name returns the name of a rule, or "".
func (p *ruleParser) name() string {
	start := p.at
	for p.at < len(p.source) {
		c := p.source[p.at]
		if c != '-' && c != '_' && !(c >= '0' && c <= '9') && !(c|0x20 >= 'a' && c|0x20 <= 'z') {
			break
		}
		p.at++
	}
	return p.source[start:p.at]
}

func (p *ruleParser) rule() error {
	name := p.name()
	if name == "" {
		return fmt.Errorf("want the name of a rule, not %.20q", p.source[p.at:])
	}

	if p.space(false); !p.take("::=") {
		return fmt.Errorf("want ::= after the name %.60q", name)
	}

	if p.defined[name] {
		return fmt.Errorf("the rule %.60q is defined twice", name)
	}

	p.defined[name] = true

	p.space(true)
	n, err := p.alternatives(false)
	if err != nil {
		return err
	}

	p.named(name).parts = []*node{n}
	if p.at < len(p.source) && p.source[p.at] != '\n' && p.source[p.at] != '\r' {
		return fmt.Errorf("want the end of the line, not %.20q", p.source[p.at:])
	}

	return nil
}

// alternatives parses sequences separated by |. Within parentheses, lines can end anywhere.
func (p *ruleParser) alternatives(nested bool) (*node, error) {
	if p.depth++; p.depth > mostDepth {
		return nil, errors.New("parentheses are nested too deeply")
	}
	defer func() { p.depth-- }()

	all := newChoice()
	for {
		n, err := p.sequence(nested)
		if err != nil {
			return nil, err
		}
		all.parts = append(all.parts, n)
		if !p.take("|") {
			return all, nil
		}
		p.space(true)
	}
}

func (p *ruleParser) sequence(nested bool) (*node, error) {
	all := newSequence()
	for p.at < len(p.source) {
		var n *node
		var err error
		switch c := p.source[p.at]; {
		case c == '"':
			n, err = p.literal()
		case c == '[':
			n, err = p.class()
		case c == '.':
			p.at++
			n = newText(length{1, 1}, false)
		case c == '(':
			p.at++
			p.space(true)
			if n, err = p.alternatives(true); err == nil && !p.take(")") {
				err = errors.New("a parenthesis is not closed")
			}
		default:
			name := p.name()
			if name == "" {
				return all, nil
			}
			n = p.named(name)
		}
		if err != nil {
			return nil, err
		}

		p.space(nested)
		if n, err = p.repeated(n); err != nil {
			return nil, err
		}
		all.parts = append(all.parts, n)
		p.space(nested)
	}

	return all, nil
}

// repeated parses the repetition after a part of a sequence.
func (p *ruleParser) repeated(n *node) (*node, error) {
	for {
		switch {
		case p.take("*"):
			n = newRepetition(n, 0, -1)
		case p.take("+"):
			n = newRepetition(n, 1, -1)
		case p.take("?"):
			n = newRepetition(n, 0, 1)
		case p.take("{"):
			inside, _, ok := strings.Cut(p.source[p.at:], "}")
			first, second, isRange := strings.Cut(inside, ",")
			least, err := strconv.Atoi(strings.TrimSpace(first))
			most := least
			if isRange {
				if second = strings.TrimSpace(second); second == "" {
					most = -1
				} else if most, err = strconv.Atoi(second); err == nil && most < least {
					ok = false
				}
			}
			if !ok || err != nil || least < 0 || least > mostRepeat || most > mostRepeat {
				return nil, fmt.Errorf("want a repetition such as {2}, {2,} or {2,5}, not {%.20s", inside)
			}
			p.at += len(inside) + 1
			n = newRepetition(n, least, most)
		default:
			return n, nil
		}
		p.space(false)
	}
}

// character returns the next character of a literal or a class.
func (p *ruleParser) character() (rune, error) {
	r, size := utf8.DecodeRuneInString(p.source[p.at:])
	if size == 0 || r == '\n' {
		return 0, errors.New("a literal or a class is not closed")
	}

	p.at += size
	if r != '\\' {
		return r, nil
	}

	if p.at == len(p.source) {
		return 0, errors.New("a literal or a class is not closed")
	}

	c := p.source[p.at]
	p.at++
	switch c {
	case 'n':
		return '\n', nil
	case 'r':
		return '\r', nil
	case 't':
		return '\t', nil
	case '\\', '"', '[', ']':
		return rune(c), nil
	case 'x', 'u', 'U':
		size := map[byte]int{'x': 2, 'u': 4, 'U': 8}[c]
		if p.at+size <= len(p.source) {
			code, err := strconv.ParseUint(p.source[p.at:p.at+size], 16, 32)
			if err == nil && code <= unicode.MaxRune && utf8.ValidRune(rune(code)) {
				p.at += size
				return rune(code), nil
			}
		}
	}

	return 0, fmt.Errorf(`there is no escape sequence \%c`, c)
}

func (p *ruleParser) literal() (*node, error) {
	p.at++
	var text strings.Builder
	for !p.take(`"`) {
		r, err := p.character()
		if err != nil {
			return nil, err
		}
		text.WriteRune(r)
	}

	if text.Len() == 0 {
		return newSequence(), nil
	}

	return mark(text.String()), nil
}

// class parses a class of characters.
func (p *ruleParser) class() (*node, error) {
	p.at++
	var expression strings.Builder
	expression.WriteString("^[")
	if p.take("^") {
		expression.WriteString("^")
	}

	empty := true
	for !p.take("]") {
		low, err := p.character()
		if err != nil {
			return nil, err
		}
		high := low
		if strings.HasPrefix(p.source[p.at:], "-") && !strings.HasPrefix(p.source[p.at:], "-]") {
			p.at++
			if high, err = p.character(); err != nil {
				return nil, err
			}
		}
		if low > high {
			return nil, fmt.Errorf("the range %c-%c is empty", low, high)
		}
		fmt.Fprintf(&expression, `\x{%x}-\x{%x}`, low, high)
		empty = false
	}

	if empty {
		return nil, errors.New("a class is empty")
	}

	content, err := newPattern(expression.String()+"]$", length{1, 1})
	if err != nil {
		return nil, err
	}

	return newText(content, false), nil
}

// leftRecursive returns the name of a rule that can start with itself, or "". An automaton would enter such a
// rule forever.
func leftRecursive(rules map[string]*node) string {
	const visiting, visited = 1, 2
	state := map[*node]int{}
	empty := emptyNodes(rules)
	var starts func(n *node) bool
	starts = func(n *node) bool {
		switch state[n] {
		case visiting:
			return true
		case visited:
			return false
		}
		state[n] = visiting
		for _, p := range n.parts {
			if starts(p) {
				return true
			}
			if n.kind == sequence && !empty[p] {
				break
			}
		}
		state[n] = visited
		return false
	}

	for _, name := range slices.Sorted(maps.Keys(rules)) {
		if starts(rules[name]) {
			return name
		}
	}

	return ""
}

// emptyNodes returns the nodes that match the empty text.
func emptyNodes(rules map[string]*node) map[*node]bool {
	empty := map[*node]bool{}
	var visit func(n *node, seen map[*node]bool)
	for before := -1; before < len(empty); {
		before = len(empty)
		visit = func(n *node, seen map[*node]bool) {
			if seen[n] {
				return
			}
			seen[n] = true
			all, any := true, false
			for _, p := range n.parts {
				visit(p, seen)
				all, any = all && empty[p], any || empty[p]
			}
			switch {
			case n.kind == sequence && all, n.kind == choice && any, n.kind == repetition && (n.min == 0 || all),
				n.kind == lexeme && n.lexer.start() != dead && n.lexer.accepts(n.lexer.start()):
				empty[n] = true
			}
		}
		seen := map[*node]bool{}
		for _, name := range slices.Sorted(maps.Keys(rules)) {
			visit(rules[name], seen)
		}
	}

	return empty
}
