package chatdata

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/kasmina-go/kasmina/internal/parquetjson"
)

// maxLine limits the length of a line in bytes, so that a file without line breaks does not exhaust
// memory.
const maxLine = 64 << 20

// Read yields the examples of a file of JSON Lines in order. Empty lines are skipped.
//
// A line that is not a valid example yields a *[Problem], and reading continues with the next line.
// Any other error, such as a read error from r, ends the sequence. Problems refer to the file by
// name.
func Read(r io.Reader, name string) iter.Seq2[Example, error] {
	return func(yield func(Example, error) bool) {
		lines := bufio.NewReaderSize(r, 1<<16)
		for number := 1; ; number++ {
			line, err := readLine(lines)
			if err != nil && err != io.EOF {
				yield(Example{}, fmt.Errorf("chatdata: reading line %d of %s: %w", number, name, err))
				return
			}
			if number == 1 {
				if bytes.HasPrefix(line, []byte(parquetjson.Magic)) {
					yield(Example{}, fmt.Errorf("chatdata: %s is a parquet file, which ReadFile and ReadParquet can read "+
						"from a regular file, but not from a stream", name))
					return
				}
				line = bytes.TrimPrefix(line, []byte("\ufeff"))
			}

			if line = bytes.TrimSpace(line); len(line) > 0 {
				x := Example{File: name, Line: number}
				if p := x.parseLine(line); p != nil {
					if !yield(Example{}, p) {
						return
					}
				} else if !yield(x, nil) {
					return
				}
			}
			if err == io.EOF {
				return
			}
		}
	}
}

// readLine returns the next line, valid until the next call. The last line comes with io.EOF.
func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if !errors.Is(err, bufio.ErrBufferFull) {
		return line, err
	}

	long := slices.Clone(line)
	for errors.Is(err, bufio.ErrBufferFull) {
		if len(long) > maxLine {
			return nil, fmt.Errorf("it is longer than %d MiB: JSON Lines have one example per line",
				maxLine>>20)
		}
		line, err = r.ReadSlice('\n')
		long = append(long, line...)
	}

	return long, err
}

// parseLine reads a line into the example.
func (x *Example) parseLine(line []byte) *Problem {
	if !utf8.Valid(line) {
		return x.problem("save the file as UTF-8", "the line is not valid UTF-8")
	}

	var members map[string]json.RawMessage
	if err := json.Unmarshal(line, &members); err != nil {
		return x.notAnObject(line, err)
	}

	for name, value := range members {
		if string(value) == "null" {
			delete(members, name) // a table of several formats contains null in the unused columns
		}
	}

	return x.parse(members)
}

// formatOf returns the format of an object with the given members, or 0 if it has none.
func formatOf(members map[string]json.RawMessage) Format {
	has := func(name string) bool { _, ok := members[name]; return ok }
	switch {
	case has("chosen") && has("rejected"):
		return Preference
	case has("messages"):
		return Conversation
	case has("prompt") && has("completion"):
		return PromptCompletion
	case has("text"):
		return PlainText
	}
	return 0
}

// parse reads the members of an object into the example.
func (x *Example) parse(members map[string]json.RawMessage) (p *Problem) {
	switch x.Format = formatOf(members); x.Format {
	case Preference:
		p = x.preference(members)
	case Conversation:
		x.Completion, p = x.content(members, "messages")
		if p == nil && !x.Completion.IsChat() {
			p = x.problem(messagesFix, `"messages" is not a list`)
		}
	case PromptCompletion:
		p = x.promptCompletion(members)
	case PlainText:
		p = x.plainText(members)
	default:
		p = x.unknown(members)
	}

	if p != nil {
		return p
	}

	return x.templateVariables(members)
}

const (
	formats = `"messages", "prompt" and "completion", "text", or "chosen" and "rejected"`
	layouts = "give it " + formats

	messagesFix = `write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ` +
		`"content": "..."}]}`
)

// notAnObject explains a line that is not a JSON object.
func (x *Example) notAnObject(line []byte, err error) *Problem {
	switch {
	case line[0] == '[' && x.Line == 1:
		return x.problem("write one object per line, for example with jq -c '.[]'",
			"the file is a JSON array, not JSON Lines")
	case string(line) == "{":
		return x.problem("write each example on one line, for example with jq -c .",
			"the example is spread over several lines")
	case json.Valid(line):
		return x.problem(layouts, "the line is not a JSON object")
	}

	if line[0] != '{' {
		return x.problem(layouts+"; plain text can be the value of \"text\"", "the line is not a JSON object")
	}
	return x.problem("check the quotes, commas and braces of this line", "the line is not valid JSON (%v)",
		err)
}

// unit returns what holds an example: a line, or a row of a parquet file.
func (x *Example) unit() string {
	if x.Parquet {
		return "row"
	}
	return "line"
}

// unknown explains an object that matches no format.
func (x *Example) unknown(members map[string]json.RawMessage) *Problem {
	has := func(name string) bool { _, ok := members[name]; return ok }
	switch {
	case has("conversations"):
		return x.problem(`rename "conversations" to "messages", "from" to "role" (human becomes user, gpt `+
			`becomes assistant) and "value" to "content"`, "this is the layout of ShareGPT")
	case has("instruction") && has("output"):
		return x.problem(`join "instruction" and "input" to "prompt", and rename "output" to "completion"`,
			"this is the layout of Alpaca")
	case has("prompt"):
		return x.problem(`add "completion", or "chosen" and "rejected"`, "the prompt has no answer")
	case has("completion"):
		return x.problem(`add "prompt", or rename "completion" to "text"`, "the completion has no prompt")
	case has("chosen") || has("rejected"):
		return x.problem("a preference pair needs both", `only one of "chosen" and "rejected" is there`)
	}

	names := make([]string, 0, len(members))
	for name := range members {
		names = append(names, fmt.Sprintf("%q", name))
	}

	slices.Sort(names)
	switch {
	case len(names) == 0 && x.Parquet:
		return x.problem(layouts, "the row is empty")
	case len(names) == 0:
		return x.problem(layouts, "the object is empty")
	case x.Parquet:
		return x.problem(layouts+", for example with rename_column of datasets", "no format has the columns %s",
			strings.Join(names, ", "))
	}
	return x.problem(layouts, "no format has the members %s", strings.Join(names, ", "))
}

// content reads a member that is a string or a list of messages.
func (x *Example) content(members map[string]json.RawMessage, name string) (c Content, p *Problem) {
	value := members[name]
	switch value[0] {
	case '"':
		if err := json.Unmarshal(value, &c.Text); err != nil {
			return c, x.problem("", "%q: %v", name, err)
		}
		return c, nil
	case '[':
		c.Messages, p = x.messages(value, name)
		return c, p
	}

	return c, x.problem("", "%q is neither a string nor a list of messages", name)
}

// messages reads a list of messages.
func (x *Example) messages(value json.RawMessage, name string) ([]Message, *Problem) {
	var list []json.RawMessage
	if err := json.Unmarshal(value, &list); err != nil {
		return nil, x.problem("", "%q: %v", name, err)
	}

	if len(list) == 0 {
		return nil, x.problem("remove the "+x.unit(), "%q is an empty list", name)
	}

	all := make([]Message, len(list))
	for i, text := range list {
		m, err := parseMessage(text)
		if err != nil {
			return nil, x.problem("", "message %d of %q %v", i+1, name, err)
		}
		all[i] = m
	}

	return all, nil
}

// parseMessage reads a message. Its error continues a sentence about the message.
func parseMessage(text json.RawMessage) (Message, error) {
	m := Message{JSON: text}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(text, &members); err != nil || members == nil {
		return m, errors.New(`is not an object with "role" and "content"`)
	}

	if members["from"] != nil && members["role"] == nil {
		return m, errors.New(`has "from" instead of "role", as in the layout of ShareGPT: rename "from" to ` +
			`"role" (human becomes user, gpt becomes assistant) and "value" to "content"`)
	}

	if err := json.Unmarshal(members["role"], &m.Role); err != nil || m.Role == "" {
		return m, errors.New(`has no "role": give it one, such as user or assistant`)
	}

	content, ok := members["content"]
	_, calls := members["tool_calls"]
	switch {
	case !ok && !calls:
		return m, errors.New(`has no "content"`)
	case !ok || string(content) == "null" || content[0] == '[':
		return m, nil // a tool call without text, or a message consisting of text and image parts
	case content[0] != '"':
		return m, errors.New(`has a "content" that is neither a string nor a list of parts: write it as a string`)
	}

	return m, json.Unmarshal(content, &m.Text)
}

func (x *Example) plainText(members map[string]json.RawMessage) (p *Problem) {
	if x.Completion, p = x.content(members, "text"); p != nil {
		return p
	}
	if x.Completion.IsChat() {
		return x.problem(`rename "text" to "messages"`, `"text" is a list of messages`)
	}
	if x.Completion.Text == "" {
		return x.problem("remove the "+x.unit(), "the text is empty")
	}
	return nil
}

func (x *Example) promptCompletion(members map[string]json.RawMessage) (p *Problem) {
	if x.Prompt, p = x.content(members, "prompt"); p != nil {
		return p
	}

	if x.Completion, p = x.content(members, "completion"); p != nil {
		return p
	}

	if x.Prompt.IsChat() != x.Completion.IsChat() {
		return x.problem("make both strings or both lists of messages",
			`of "prompt" and "completion", one is a string and the other a list of messages`)
	}

	return nil
}

// preference reads a preference pair. If conversations have no separate prompt, the prompt consists of
// the messages that both answers start with.
func (x *Example) preference(members map[string]json.RawMessage) (p *Problem) {
	if x.Completion, p = x.content(members, "chosen"); p != nil {
		return p
	}

	if x.Rejected, p = x.content(members, "rejected"); p != nil {
		return p
	}

	if _, ok := members["prompt"]; ok {
		if x.Prompt, p = x.content(members, "prompt"); p != nil {
			return p
		}
	} else {
		x.implicitPrompt()
	}

	if x.Completion.IsChat() != x.Rejected.IsChat() || x.Prompt.IsChat() != x.Completion.IsChat() {
		return x.problem("make all of them strings or all of them lists of messages",
			`"prompt", "chosen" and "rejected" are partly strings and partly lists of messages`)
	}

	if slices.EqualFunc(x.Completion.Messages, x.Rejected.Messages, sameMessage) &&
		x.Completion.Text == x.Rejected.Text {
		return x.problem("remove the "+x.unit(), "the chosen and the rejected answer are equal")
	}

	return nil
}

// implicitPrompt moves the messages that both answers start with to the prompt.
func (x *Example) implicitPrompt() {
	chosen, rejected := &x.Completion, &x.Rejected
	if !chosen.IsChat() || !rejected.IsChat() {
		return
	}

	n := 0
	for n < min(len(chosen.Messages), len(rejected.Messages)) &&
		sameMessage(chosen.Messages[n], rejected.Messages[n]) {
		n++
	}

	x.Prompt.Messages = slices.Clip(chosen.Messages[:n])
	chosen.Messages, rejected.Messages = chosen.Messages[n:], rejected.Messages[n:]
}

func sameMessage(a, b Message) bool {
	return a.Role == b.Role && a.Text == b.Text && bytes.Equal(a.JSON, b.JSON)
}

// templateVariables reads "tools" and "chat_template_kwargs".
func (x *Example) templateVariables(members map[string]json.RawMessage) *Problem {
	if tools, ok := members["tools"]; ok {
		if tools[0] == '"' { // JSON in a string, as in tables with columns of simple types
			var text string
			if err := json.Unmarshal(tools, &text); err != nil || !json.Valid([]byte(text)) {
				return x.problem("make it a list", `"tools" is a string that does not hold JSON`)
			}
			tools = json.RawMessage(text)
		}
		var list []json.RawMessage
		if err := json.Unmarshal(tools, &list); err != nil {
			return x.problem("make it a list of tools with JSON schemas", `"tools" is not a list`)
		}
		if len(list) > 0 {
			x.Tools = tools
		}
	}

	if value, ok := members["chat_template_kwargs"]; ok {
		if err := json.Unmarshal(value, &x.Variables); err != nil {
			return x.problem("make it an object", `"chat_template_kwargs" is not an object`)
		}
	}

	return nil
}
