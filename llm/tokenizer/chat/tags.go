package chat

import (
	"errors"
	"fmt"
	"io"
	"strings"

	structures "github.com/nikolalohinski/gonja/v2/builtins/control_structures"
	"github.com/nikolalohinski/gonja/v2/config"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/nodes"
	"github.com/nikolalohinski/gonja/v2/parser"
	lexer "github.com/nikolalohinski/gonja/v2/tokens"
)

// checkTag refuses a tag that would take long to rewrite.
func checkTag(code string) error {
	depth := 0
	for at := 0; at < len(code); at++ {
		switch code[at] {
		case '\'', '"':
			at = endOfString(code, at) - 1
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			depth--
		}
		if depth > maxBrackets {
			break
		}
	}
	if len(code) > maxTag || depth > maxBrackets {
		return fmt.Errorf("a tag has more than %d bytes, or brackets deeper than %d within each "+
			"other: %.60q", maxTag, maxBrackets, code)
	}
	return nil
}

// checkTokens refuses tags that the engine would take long to understand, or whose results have no
// bound.
func checkTokens(source string, c *config.Config) error {
	words, depth := 0, 0
	for all := lexer.LexAll(source, c); ; all.Next() {
		t := all.Current()
		if t == nil || t.Type == lexer.EOF {
			return nil
		}
		words++
		switch t.Type {
		case lexer.Error:
			return errors.New(t.Val)
		case lexer.VariableBegin, lexer.BlockBegin:
			words, depth = 0, 0
		case lexer.LeftParenthesis, lexer.LeftBracket, lexer.LeftBrace:
			depth++
		case lexer.RightParenthesis, lexer.RightBracket, lexer.RightBrace:
			depth--
		case lexer.Multiply, lexer.Power:
			return fmt.Errorf("line %d: %s is supported between a text or a name and a name alone",
				t.Line, t.Val)
		}
		if words > maxWords || depth > maxBrackets {
			return fmt.Errorf("line %d: a tag has more than %d words, or brackets deeper than %d "+
				"within each other", t.Line, maxWords, maxBrackets)
		}
	}
}

// structureSet returns the tags that templates may use, within limits.
func (l *limits) structureSet() *exec.ControlStructureSet {
	all := map[string]parser.ControlStructureParser{}
	for _, name := range []string{"if", "for", "set", "macro", "do", "break", "continue", "raw",
		"filter"} {
		own, _ := structures.All.Get(name)
		all[name] = func(p, args *parser.Parser) (nodes.ControlStructure, error) {
			if l.nested++; l.nested > maxNested {
				return nil, fmt.Errorf("more than %d tags within each other", maxNested)
			}
			defer func() { l.nested-- }()
			if err := l.look(); err != nil {
				return nil, err
			}
			switch name {
			case "set":
				return l.set(p, args, own)
			case "filter":
				return l.filter(p, args)
			}
			s, err := own(p, args)
			if err != nil {
				return nil, err
			}
			return l.within(s)
		}
	}
	return exec.NewControlStructureSet(all)
}

// within puts limits to a tag.
func (l *limits) within(s nodes.ControlStructure) (nodes.ControlStructure, error) {
	switch own := s.(type) {
	case *structures.ForControlStructure:
		if own.Recursive {
			return nil, errors.New("loops that call themselves are not supported")
		}
		at := own.ObjectEvaluator.Position()
		own.ObjectEvaluator = &nodes.FilteredExpression{Expression: own.ObjectEvaluator,
			Filters: []*nodes.FilterCall{{Token: at, Name: items}}}
		own.BodyWrapper.Nodes = append([]nodes.Node{l.mark(at, nil)}, own.BodyWrapper.Nodes...)
	case *structures.MacroControlStructure:
		l.macro(own.Macro)
	}
	return &limited{s, func(r *exec.Renderer, tag *nodes.ControlStructureBlock) error {
		if err := l.look(); err != nil {
			return err
		}
		return s.(exec.ControlStructure).Execute(r, tag)
	}}, nil
}

// macro puts limits to how deep a macro is called, what it gets and what it writes.
func (l *limits) macro(m *nodes.Macro) {
	begin := func(r *exec.Renderer) error {
		if l.macros++; l.macros > maxMacros {
			return fmt.Errorf("more than %d macros call each other", maxMacros)
		}
		r.Output = &paper{to: r.Output, most: l.most}
		var given []any
		for _, p := range m.Kwargs {
			given = append(given, valueOf(r, p.Key.(*nodes.String).Val))
		}
		return l.look(append(given, valueOf(r, m.VarArgsName), valueOf(r, m.KwArgsName))...)
	}
	end := func(*exec.Renderer) error { l.macros--; return nil }
	at := m.Position()
	all := append([]nodes.Node{l.mark(at, begin)}, m.Wrapper.Nodes...)
	m.Wrapper.Nodes = append(all, l.mark(at, end))
}

func valueOf(r *exec.Renderer, name string) any {
	v, _ := r.Environment.Context.Get(name)
	return v
}

// mark is a node that looks at the time, and does something.
func (l *limits) mark(at *lexer.Token, do func(*exec.Renderer) error) nodes.Node {
	execute := func(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
		if err := l.look(); err != nil || do == nil {
			return err
		}
		return do(r)
	}
	return &nodes.ControlStructureBlock{Location: at, Name: "limits",
		ControlStructure: &limited{&nodes.Comment{Start: at}, execute}}
}

// set reads a tag that sets a variable, whose value then has limits.
func (l *limits) set(p, args *parser.Parser, own parser.ControlStructureParser) (
	nodes.ControlStructure, error) {
	name := args.Current(lexer.Name)
	if name == nil {
		return nil, errors.New("set wants a name")
	}
	if args.Peek(lexer.EOF) != nil { // up to endset
		body, _, err := p.WrapUntil("endset")
		if err != nil {
			return nil, err
		}
		return &limited{body, func(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
			text, err := l.text(r, body)
			r.Environment.Context.Set(name.Val, text)
			return err
		}}, nil
	}
	s, err := own(p, args)
	if err != nil {
		return nil, err
	}
	return &limited{s, func(r *exec.Renderer, tag *nodes.ControlStructureBlock) error {
		if err := s.(exec.ControlStructure).Execute(r, tag); err != nil {
			return err
		}
		return l.look(valueOf(r, name.Val))
	}}, nil
}

// text returns what stands between two tags.
func (l *limits) text(r *exec.Renderer, body *nodes.Wrapper) (string, error) {
	var text strings.Builder
	sub := r.Inherit()
	sub.Output = &paper{to: &text, most: l.most}
	err := sub.ExecuteWrapper(body)
	return text.String(), err
}

// filter reads a tag whose text goes through filters.
func (l *limits) filter(p, args *parser.Parser) (nodes.ControlStructure, error) {
	var calls []*nodes.FilterCall
	for !args.End() {
		call, err := args.ParseFilter()
		if err != nil {
			return nil, err
		}
		calls = append(calls, call)
		args.Match(lexer.Pipe)
	}
	body, _, err := p.WrapUntil("endfilter")
	if err != nil {
		return nil, err
	}
	return &limited{body, func(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
		text, err := l.text(r, body)
		if err != nil {
			return err
		}
		value := exec.AsValue(text)
		for _, call := range calls {
			if value = r.Evaluator().ExecuteFilter(call, value); value.IsError() {
				return value
			}
		}
		_, err = io.WriteString(r.Output, value.String())
		return err
	}}, nil
}

// limited is a tag that is executed otherwise.
type limited struct {
	nodes.ControlStructure
	execute func(*exec.Renderer, *nodes.ControlStructureBlock) error
}

// Execute does what the tag says.
func (s *limited) Execute(r *exec.Renderer, tag *nodes.ControlStructureBlock) error {
	return s.execute(r, tag)
}

// paper is a text that refuses to become too long.
type paper struct {
	to         io.Writer
	have, most int
}

func (b *paper) Write(text []byte) (int, error) {
	if b.have += len(text); b.have > b.most {
		return 0, fmt.Errorf("the text has more than %d bytes", b.most)
	}
	return b.to.Write(text)
}
