package serve

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/stoptext"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// A callFormat is a format of tool calls.
type callFormat uint8

const (
	unknownCalls callFormat = iota // calls remain text
	// markedCalls is the format of Hermes, Qwen 2.5, Qwen 3 and many other models: a JSON object with "name" and
	// "arguments" between two marks.
	markedCalls
	// bareCalls is the format of Llama 3.1 and 3.2: the whole answer is a JSON object with "name" and "parameters".
	bareCalls
)

const (
	callBegin = "<tool_call>"
	callEnd   = "</tool_call>"
)

const whiteSpace = " \t\r\n"

// callFormatOf returns the format of tool calls in a chat template.
func callFormatOf(t *chat.Template) callFormat {
	if t == nil {
		return unknownCalls
	}
	switch source := t.ToolSource(); {
	case strings.Contains(source, callBegin) && strings.Contains(source, callEnd) &&
		strings.Contains(source, `"arguments`) && !strings.Contains(source, "<function="):
		return markedCalls
	case strings.Contains(source, `{"name": function name, "parameters": dictionary`):
		return bareCalls
	}
	return unknownCalls
}

// A finder finds tool calls in a text.
type finder interface {
	// add returns the parts of the text that are complete. Whatever is not a valid call remains text.
	add(text string) []piece
	// flush returns what remains at the end of the text.
	flush() []piece
}

// finder returns a finder for the calls of a job.
func (j *job) finder() finder {
	if j.tools == bareCalls {
		return &bareFinder{names: j.names, one: j.oneTool}
	}
	return &callFinder{}
}

// A callFinder finds markedCalls.
type callFinder struct {
	held   string // white space, or a possible start of a mark
	inside bool   // whether held is the text after callBegin
	space  string // white space before that mark
	called bool   // whether only white space has followed the last call
}

// add implements finder.
func (f *callFinder) add(text string) (parts []piece) {
	f.held += text
	for {
		mark := callBegin
		if f.inside {
			mark = callEnd
		}
		before, after, ok := strings.Cut(f.held, mark)
		if !ok {
			break
		}

		f.held, f.inside = after, !f.inside
		switch call, valid := parseCall(before); {
		case f.inside:
			text := strings.TrimRight(before, whiteSpace)
			f.space = before[len(text):]
			if text != "" {
				parts, f.called = append(parts, piece{text: text}), false
			}
		case valid:
			parts, f.called = append(parts, piece{call: &call}), true
		default:
			f.called = false
			parts = append(parts, piece{text: f.space + callBegin + before + callEnd})
		}
	}

	if f.inside {
		return parts
	}

	// Keep white space back, which may separate the text from a call.
	rest := f.held[:len(f.held)-stoptext.Overlap(f.held, callBegin)]
	rest = strings.TrimRight(rest, whiteSpace)
	if rest != "" {
		parts, f.called = append(parts, piece{text: rest}), false
	}
	f.held = f.held[len(rest):]
	return parts
}

// flush implements finder.
func (f *callFinder) flush() []piece {
	text := f.held
	switch {
	case f.inside:
		text = f.space + callBegin + text
	case f.called && strings.TrimSpace(text) == "":
		return nil
	}
	f.held = ""
	return []piece{{text: text}}
}

// A jsonToolCall is a call as models write it.
type jsonToolCall struct {
	Name       string          `json:"name"`
	Arguments  json.RawMessage `json:"arguments"`
	Parameters json.RawMessage `json:"parameters"`
}

// call returns the call, or false if it is not valid.
func (c jsonToolCall) call() (toolCall, bool) {
	arguments := c.Arguments
	if arguments == nil {
		arguments = c.Parameters
	}
	if arguments == nil {
		arguments = json.RawMessage("{}")
	}
	return toolCall{c.Name, string(arguments)}, c.Name != "" && arguments[0] == '{'
}

// parseCall parses the text between the marks.
func parseCall(text string) (toolCall, bool) {
	var call jsonToolCall
	if json.Unmarshal([]byte(text), &call) != nil {
		return toolCall{}, false
	}
	return call.call()
}

// A bareFinder finds bareCalls.
type bareFinder struct {
	names []string // of the functions that can be called
	one   bool     // whether there can be only one call
	held  string   // the text so far, as long as it can be a call
	text  bool     // whether the text cannot be a call
}

// add implements finder. Calls are complete at the end of the text.
func (f *bareFinder) add(text string) []piece {
	if f.text {
		return []piece{{text: text}}
	}
	f.held += text

	// Calls begin with the name.
	const begin = `{"name":`
	start := strings.Map(func(r rune) rune {
		if strings.ContainsRune(whiteSpace, r) {
			return -1
		}
		return r
	}, f.held[:min(len(f.held), 100)])
	if strings.HasPrefix(start, begin) || strings.HasPrefix(begin, start) {
		return nil
	}
	f.text = true
	return []piece{{text: f.held}}
}

// flush implements finder.
func (f *bareFinder) flush() (parts []piece) {
	if f.text {
		return nil
	}

	for rest := f.held; strings.TrimSpace(rest) != "" || len(parts) == 0; {
		var one jsonToolCall
		d := json.NewDecoder(strings.NewReader(rest))
		err := d.Decode(&one)
		call, valid := one.call()
		if err != nil || !valid || !slices.Contains(f.names, call.name) {
			return []piece{{text: f.held}}
		}
		parts = append(parts, piece{call: &call})
		rest = strings.TrimLeft(rest[d.InputOffset():], whiteSpace+";") // between several calls
	}
	if f.one {
		parts = parts[:1]
	}
	return parts
}
