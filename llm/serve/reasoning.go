package serve

import (
	"strings"

	"github.com/kasmina-go/kasmina/internal/stoptext"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// The marks around the reasoning of DeepSeek R1, Qwen 3 and many other models, which precedes an answer.
const (
	thinkBegin = "<think>"
	thinkEnd   = "</think>"
)

// reasons reports whether a model with the given chat template marks its reasoning.
func reasons(t *chat.Template) bool { return t != nil && strings.Contains(t.Source(), thinkEnd) }

// A thinkFinder separates the reasoning from the answer that follows it.
type thinkFinder struct {
	part thinkPart
	held string // white space, or a possible start of a mark
}

// A thinkPart is a part of a text with reasoning.
type thinkPart uint8

const (
	beforeThinking thinkPart = iota
	thinking
	afterThinking // white space after the reasoning
	answering
)

// add returns the reasoning and the answer that are complete.
func (f *thinkFinder) add(text string) (reasoning, answer string) {
	f.held += text
	if f.part == beforeThinking {
		rest, found := strings.CutPrefix(strings.TrimLeft(f.held, whiteSpace), thinkBegin)
		switch {
		case found:
			f.part, f.held = thinking, rest
		case strings.HasPrefix(thinkBegin, rest): // or white space alone
			return "", ""
		default:
			f.part = answering
		}
	}

	if f.part == thinking {
		before, after, found := strings.Cut(f.held, thinkEnd)
		if !found {
			// Keep white space back, which may end the reasoning.
			whole := before[:len(before)-stoptext.Overlap(before, thinkEnd)]
			reasoning = strings.TrimRight(whole, whiteSpace)
			f.held = f.held[len(reasoning):]
			return reasoning, ""
		}
		reasoning = strings.TrimRight(before, whiteSpace)
		f.part, f.held = afterThinking, after
	}

	if f.part == afterThinking {
		if f.held = strings.TrimLeft(f.held, whiteSpace); f.held != "" {
			f.part = answering
		}
	}
	answer, f.held = f.held, ""
	return reasoning, answer
}

// flush returns what remains at the end of the text.
func (f *thinkFinder) flush() (reasoning, answer string) {
	held := f.held
	f.held = ""
	if f.part == thinking {
		return held, ""
	}
	return "", held
}
