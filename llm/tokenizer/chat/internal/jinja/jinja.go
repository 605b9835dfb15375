// Package jinja renders chat templates with the text that Python's Jinja2 produces when transformers
// configures it: trim_blocks and lstrip_blocks, the immutable sandbox, loop controls, the generation
// tag, and transformers' own tojson, namespace, dict, raise_exception and strftime_now.
//
// The package implements what chat templates use. Everything else causes an error that names the
// construct, so a template never renders to different text. Because templates come from strangers,
// their time, memory and nesting are limited.
//
// Behavior that depends on the version of Python is an error if possible. One exception is the
// properties of characters, for which the package uses Go's version of Unicode. Of all characters
// known to Python 3.11, five differ, and only for islower and the test lower.
//
// The code follows Jinja2 where its behavior is subtle: lex.go and parse.go correspond to its lexer
// and parser, scope.go to its identifier tracking, and statement.go and expression.go to the Python
// code that its compiler generates.
package jinja

import (
	"fmt"
	"time"
)

// A Template is a parsed template. Several goroutines may render it concurrently.
type Template struct {
	body  []node
	loads []load

	// selfIdent is the identifier of the variable self, or "" if the template does not use it.
	selfIdent string
}

// An Error reports why a template cannot be parsed or rendered.
type Error struct {
	Line    int // line of the template, or 0 if unknown
	Message string
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return e.Message
	}
	return fmt.Sprintf("line %d: %s", e.Line, e.Message)
}

const (
	maxSource    = 1 << 20   // bytes of a template
	maxOutput    = 64 << 20  // bytes of a rendered conversation
	maxValue     = 1 << 20   // bytes of one value, in addition to four times the input
	maxMemory    = 256 << 20 // bytes allocated for values, in addition to 64 times the input
	maxItems     = 100_000   // elements of a range or list; the limit of Jinja2's sandbox for ranges
	maxBrackets  = 64        // nested brackets; four occur in published templates
	maxOperators = 1000      // operators in a row
	maxNesting   = 200       // nested expressions
	maxTags      = 100       // nested tags; ten occur in published templates
	maxMacros    = 32        // nested macro calls
	maxDepth     = 200       // nested lists and dictionaries
	maxDigits    = 4300      // digits of an integer; Python's limit for printing one
)

// DefaultTimeout is the maximum rendering time unless Options specifies otherwise. Published
// templates take milliseconds.
const DefaultTimeout = 20 * time.Second

// Options are the settings of one rendering.
type Options struct {
	// Now is the time that strftime_now formats.
	Now time.Time
	// Timeout limits the duration of the rendering. Zero means [DefaultTimeout].
	Timeout time.Duration
}

// fail aborts parsing or rendering. Parse and Render recover and return the error.
func fail(format string, args ...any) {
	panic(&Error{Message: fmt.Sprintf(format, args...)})
}

// recoverError stores the error of a call to fail in err.
func recoverError(err *error, line *int) {
	switch p := recover().(type) {
	case nil:
	case *Error:
		if p.Line == 0 {
			p.Line = *line
		}
		*err = p
	default:
		*err = fmt.Errorf("line %d: the template engine failed: %v", *line, p)
	}
}

// Parse parses a template. It reports syntax errors, unknown tags, and unsupported tags.
func Parse(source string) (t *Template, err error) {
	line := 0
	defer recoverError(&err, &line)

	if len(source) > maxSource {
		return nil, fmt.Errorf("the template has %d bytes, want at most %d", len(source), maxSource)
	}

	p := &parser{tokens: lex(source), line: &line}
	body := p.parseBody(nil)
	loads, selfIdent := resolveScopes(body, &line)
	return &Template{body, loads, selfIdent}, nil
}

// Variables are the named values that a template can use.
type Variables map[string]Value

// A Value is a value of the template language, created by [FromGo], [FromJSON], [Dict] or [List].
type Value struct{ v value }

// Render renders the template with the given variables.
func (t *Template) Render(variables Variables, o Options) (text string, err error) {
	in := newInterpreter(variables, o)
	defer recoverError(&err, &in.line)

	if t.selfIdent != "" {
		in.scope.variables[t.selfIdent] = templateReference{}
	}
	in.enter(t.loads)
	in.run(t.body)
	return in.out.String(), nil
}
