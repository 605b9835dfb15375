package serve

import (
	"encoding/json"
	"strings"

	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// The format of tool calls that Hermes, Qwen 2.5, Qwen 3 and many other models use: a JSON object with
// "name" and "arguments" between two marks.
const (
	callBegin = "<tool_call>"
	callEnd   = "</tool_call>"
)

const whiteSpace = " \t\r\n"

// callsRecognized reports whether a chat template uses the format of tool calls that callFinder
// recognizes. The calls of other models remain text.
func callsRecognized(t *chat.Template) bool {
	if t == nil {
		return false
	}
	source := t.ToolSource()
	return strings.Contains(source, callBegin) && strings.Contains(source, callEnd) &&
		strings.Contains(source, `"arguments`) && !strings.Contains(source, "<function=")
}

// A callFinder finds tool calls in a text.
type callFinder struct {
	held   string // white space, or a possible start of a mark
	inside bool   // whether held is the text after callBegin
	space  string // white space before that mark
	called bool   // whether only white space has followed the last call
}

// add returns the parts of the text that are complete. Whatever is not a valid call remains text.
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
	rest := f.held[:len(f.held)-overlap(f.held, callBegin)]
	rest = strings.TrimRight(rest, whiteSpace)
	if rest != "" {
		parts, f.called = append(parts, piece{text: rest}), false
	}
	f.held = f.held[len(rest):]
	return parts
}

// flush returns what remains at the end of the text.
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

// parseCall parses the text between the marks.
func parseCall(text string) (toolCall, bool) {
	var call struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	}
	if json.Unmarshal([]byte(text), &call) != nil || call.Name == "" {
		return toolCall{}, false
	}

	if call.Arguments == nil {
		call.Arguments = json.RawMessage("{}")
	}
	if call.Arguments[0] != '{' {
		return toolCall{}, false
	}
	return toolCall{call.Name, string(call.Arguments)}, true
}
