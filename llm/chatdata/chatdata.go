// Package chatdata reads fine-tuning data for chat models and converts it to token ids, with a mask
// of the tokens to learn.
//
// A data file holds JSON Lines, with one example per line, in any of these layouts.
//
//	{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
//	{"prompt": "2 + 2 =", "completion": " 4"}
//	{"text": "Any text. The model learns all tokens."}
//	{"prompt": "Hi", "chosen": " Hello!", "rejected": " Go away."}
//
// A prompt, a completion, and the answers of a preference pair are either strings or lists of
// messages. A conversation may include "tools" and "chat_template_kwargs" for the chat template.
// Other members of a line are ignored. A data file can also be a parquet file with the same members
// as columns.
//
// ReadFile yields the examples of a file:
//
//	for example, err := range chatdata.ReadFile("chat.jsonl", nil) {
//		...
//		sequences, err := encoder.Encode(example)
//		...
//	}
//
// An Encoder renders examples with a model's chat template. From a conversation, the model learns
// only the assistant's words and the token that ends each of its turns; everything else is context.
//
// NewLoader packs the sequences of a data set into batches for training.
package chatdata

import (
	"encoding/json"
	"fmt"
)

// A Format is the layout of an example.
type Format int

// The formats. Parsing tries them in this order, so a line that matches several formats is read as
// the first one.
const (
	Preference       Format = iota + 1 // a prompt with a chosen and a rejected answer
	Conversation                       // a list of messages
	PromptCompletion                   // a prompt with its completion
	PlainText                          // text without a prompt
)

var formatNames = [...]string{Preference: "preference pair", Conversation: "conversation",
	PromptCompletion: "prompt with completion", PlainText: "text"}

// String returns the format's name, such as "conversation".
func (f Format) String() string {
	if f < Preference || f > PlainText {
		return fmt.Sprintf("Format(%d)", int(f))
	}
	return formatNames[f]
}

// Content is text or a list of messages.
type Content struct {
	Text     string
	Messages []Message // nil for text
}

// IsChat reports whether the content is a list of messages.
func (c Content) IsChat() bool { return c.Messages != nil }

// A Message is one message of a conversation.
type Message struct {
	Role string
	Text string          // the content if it is a string, and "" otherwise
	JSON json.RawMessage // the whole message, unchanged
}

// An Example is one line of a data file, or one row of a parquet file.
type Example struct {
	File    string
	Line    int  // the number of the line or row, counted from 1
	Parquet bool // whether Line is the number of a row
	Format

	Prompt     Content // empty for conversations and text
	Completion Content // the text to learn; in a preference pair, the chosen answer
	Rejected   Content // in a preference pair, the rejected answer

	Tools     json.RawMessage            // nil if the example has none
	Variables map[string]json.RawMessage // further variables of the chat template
}

// A Problem reports an example that cannot be used, or that may not teach the model what its author
// expects.
type Problem struct {
	File    string
	Line    int  // the number of the line or row, or 0 for a problem of the whole file
	Parquet bool // whether Line is the number of a row of a parquet file

	What string // a description of the problem
	Fix  string // advice to the user, or ""
	Show string // the conversation as the model would see it, or ""
}

// Error returns the location, the description and the advice, on one line.
func (p *Problem) Error() string {
	text := location(p.File, p.Line, p.Parquet) + ": " + p.What
	if p.Fix != "" {
		text += ": " + p.Fix
	}
	return text
}

// location returns the place of a line or row. Line 0 stands for the whole file.
func location(file string, line int, parquet bool) string {
	switch {
	case line == 0:
		return file
	case parquet:
		return fmt.Sprintf("%s, row %d", file, line)
	}
	return fmt.Sprintf("%s:%d", file, line)
}

// problem returns a Problem of an example.
func (x *Example) problem(fix, format string, args ...any) *Problem {
	return &Problem{File: x.File, Line: x.Line, Parquet: x.Parquet, What: fmt.Sprintf(format, args...), Fix: fix}
}
