package serve

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
)

// unsupportedByMessages are the parameters of Anthropic's API that would change the answer.
var unsupportedByMessages = map[string]string{
	"mcp_servers": "[]",
	"container":   "",
}

// messagesFormat is the format of /v1/messages.
type messagesFormat struct {
	job   *job
	id    string
	block int    // index of the current content block
	open  string // its type, or "" before the first
}

// stopReasons translates OpenAI's names.
var stopReasons = map[string]string{endStop: "end_turn", endLength: "max_tokens", endTools: "tool_use"}

// ended returns why an answer ended.
func ended(e ending) (reason string, stop any) {
	if e.stopText != "" {
		return "stop_sequence", e.stopText
	}
	return stopReasons[e.reason], nil
}

// usage counts the tokens of an answer. As in Anthropic's API, input tokens are those that are not cached.
func (f *messagesFormat) usage(drawn, cached int) map[string]int {
	return map[string]int{"input_tokens": f.job.prompt - cached, "cache_read_input_tokens": cached,
		"cache_creation_input_tokens": 0, "output_tokens": drawn}
}

// object returns an answer without its content.
func (f *messagesFormat) object(content []any, reason, stop any, drawn, cached int) map[string]any {
	return map[string]any{"id": f.id, "type": "message", "role": "assistant", "model": f.job.model.Name,
		"content": content, "stop_reason": reason, "stop_sequence": stop,
		"usage": f.usage(drawn, cached)}
}

func (f *messagesFormat) whole(results []result) any {
	r, content := results[0], []any{}
	if r.reasoning != "" {
		content = append(content, map[string]any{"type": "thinking", "thinking": r.reasoning, "signature": ""})
	}
	if r.text != "" || len(r.calls) == 0 && r.reasoning == "" {
		content = append(content, map[string]any{"type": "text", "text": r.text})
	}
	for _, c := range r.calls {
		content = append(content, map[string]any{"type": "tool_use", "id": newID("toolu_"), "name": c.name,
			"input": json.RawMessage(c.arguments)})
	}
	reason, stop := ended(r.ending)
	return f.object(content, reason, stop, r.drawn, r.cached)
}

// named returns an event with its name as the type.
func named(name string, members map[string]any) event {
	members["type"] = name
	return event{name: name, data: members}
}

func (f *messagesFormat) start() []event {
	return []event{named("message_start", map[string]any{"message": f.object([]any{}, nil, nil, 0, 0)})}
}

// begin ends the current content block and starts another one.
func (f *messagesFormat) begin(kind string, block map[string]any) (events []event) {
	events = f.end()
	f.open, block["type"] = kind, kind
	return append(events, named("content_block_start", map[string]any{"index": f.block,
		"content_block": block}))
}

// end ends the current content block.
func (f *messagesFormat) end() (events []event) {
	if f.open == "" {
		return nil
	}
	if f.open == "thinking" { // clients expect a signature, even if it is empty
		events = append(events, f.delta("signature_delta", "signature", ""))
	}
	events = append(events, named("content_block_stop", map[string]any{"index": f.block}))
	f.open = ""
	f.block++
	return events
}

func (f *messagesFormat) delta(kind, member, text string) event {
	return named("content_block_delta", map[string]any{"index": f.block,
		"delta": map[string]any{"type": kind, member: text}})
}

func (f *messagesFormat) next(p piece) (events []event) {
	if p.reasoning != "" {
		if f.open != "thinking" {
			events = f.begin("thinking", map[string]any{"thinking": "", "signature": ""})
		}
		return append(events, f.delta("thinking_delta", "thinking", p.reasoning))
	}

	if p.text != "" {
		if f.open != "text" {
			events = f.begin("text", map[string]any{"text": ""})
		}
		return append(events, f.delta("text_delta", "text", p.text))
	}

	if p.call != nil {
		events = f.begin("tool_use", map[string]any{"id": newID("toolu_"), "name": p.call.name,
			"input": map[string]any{}})
		return append(events, f.delta("input_json_delta", "partial_json", p.call.arguments))
	}
	return nil
}

func (f *messagesFormat) finish(results []result) (events []event) {
	if f.open == "" && f.block == 0 { // an empty answer
		events = f.begin("text", map[string]any{"text": ""})
	}
	events = append(events, f.end()...)

	reason, stop := ended(results[0].ending)
	return append(events,
		named("message_delta", map[string]any{
			"delta": map[string]any{"stop_reason": reason, "stop_sequence": stop},
			"usage": f.usage(results[0].drawn, results[0].cached)}),
		named("message_stop", map[string]any{}))
}

// parseMessages reads a request to /v1/messages.
func (s *Server) parseMessages(p *params) (*job, format, error) {
	if !p.has("max_tokens") {
		p.fail("max_tokens", "it is missing")
	}

	limit := p.integer("max_tokens", 1, 1, math.MaxInt32)
	j, con, err := s.messagesJob(p)
	if err != nil {
		return nil, nil, err
	}

	c := p.sampling(j.model)
	p.refuse(unsupportedByMessages)
	w := p.readOutput()
	p.readCalls(j, &w, con)
	if p.err != nil {
		return nil, nil, p.err
	}

	j.reasons = reasons(j.model.Template)
	prompt, err := con.encode(j)
	if err != nil {
		return nil, nil, err
	}
	if err := s.constrain(j, w); err != nil {
		return nil, nil, err
	}
	j.addChoices(p, 1, prompt, limit, c, "messages")
	return j, &messagesFormat{job: j, id: newID("msg_")}, p.err
}

// readOutput reads the parameters of Anthropic's API that restrict the answer.
func (p *params) readOutput() (w wanted) {
	if p.has("output_format") {
		var f answerFormat
		p.decode("output_format", "an object with a type", &f)
		p.readFormat(&w, "output_format", f)
	}

	var config map[string]json.RawMessage
	p.decode("output_config", "an object", &config)
	for _, name := range slices.Sorted(maps.Keys(config)) {
		var f answerFormat
		switch value := config[name]; {
		case isNull(value), name == "effort":
		case name == "format" && json.Unmarshal(value, &f) == nil:
			p.readFormat(&w, "output_config", f)
		default:
			p.fail("output_config", "this server does not support %.40s: leave it out", name)
		}
	}
	return w
}

// countTokens answers with the number of tokens of a conversation.
func (s *Server) countTokens(w http.ResponseWriter, r *http.Request) {
	p, err := s.read(w, r)
	if err != nil {
		refuse(w, r, err)
		return
	}
	j, con, err := s.messagesJob(p)
	if err != nil {
		refuse(w, r, err)
		return
	}
	prompt, err := con.encode(j)
	if err != nil {
		refuse(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]int{"input_tokens": len(prompt)})
}

// messagesJob reads the common parameters of Anthropic's API.
func (s *Server) messagesJob(p *params) (*job, *conversation, error) {
	m, err := s.find(p.text("model"))
	if p.err != nil {
		return nil, nil, p.err
	}
	if err != nil {
		return nil, nil, err
	}

	j := &job{model: m, stream: p.bool("stream", false), stop: p.stops("stop_sequences"), end: m.End}
	con := &conversation{model: m}
	con.readMessageTools(p, j)
	con.readThinking(p)
	if p.err != nil {
		return nil, nil, p.err
	}
	if err := con.readMessages(p); err != nil {
		return nil, nil, err
	}

	con.lookForCalls(j)
	if j.oneTool && con.tools != nil && j.tools == unknownCalls {
		p.fail("tool_choice", "the model's tool calls have a format that the server does not recognize, so "+
			"it cannot limit them: leave out disable_parallel_tool_use")
	}
	return j, con, p.err
}

// readMessageTools reads the tools and converts them to the format of OpenAI's API.
func (c *conversation) readMessageTools(p *params, j *job) {
	var tools []struct {
		Type, Name, Description string
		InputSchema             json.RawMessage `json:"input_schema"`
	}
	p.decode("tools", "an array of tools", &tools)

	type function struct {
		Name        string          `json:"name"`
		Description string          `json:"description,omitempty"`
		Parameters  json.RawMessage `json:"parameters"`
	}
	type openAITool struct {
		Type     string   `json:"type"`
		Function function `json:"function"`
	}
	var all []openAITool
	for i, t := range tools {
		if t.Name == "" || isNull(t.InputSchema) || t.Type != "" && t.Type != "custom" {
			p.fail("tools", "tool %d has no name or no input_schema, or is one that the server would have to "+
				"run itself", i)
			return
		}
		all = append(all, openAITool{"function", function{t.Name, t.Description, t.InputSchema}})
		c.known = append(c.known, tool{t.Name, t.InputSchema})
	}
	if all != nil {
		c.tools = encode(all)
	}

	choice := struct {
		Type, Name string
		One        bool `json:"disable_parallel_tool_use"`
	}{Type: "auto"}
	p.decode("tool_choice", "an object", &choice)
	j.oneTool = choice.One
	switch {
	case choice.Type == "auto":
	case choice.Type == "none":
		c.tools = nil
	case c.tools == nil:
		p.fail("tool_choice", "there are no tools")
	case choice.Type == "any":
		c.forced = new(string)
	case choice.Type == "tool" && choice.Name != "":
		c.forced = &choice.Name
	default:
		p.fail("tool_choice", `its type is %.40q, want "auto", "any", "none", or "tool" with a name`, choice.Type)
	}
}

// readThinking reads whether the model should reason before it answers, and passes the choice to the chat template under
// the name that most templates use.
func (c *conversation) readThinking(p *params) {
	if !p.has("thinking") {
		return
	}

	var thinking struct{ Type string }
	p.decode("thinking", "an object with a type", &thinking)
	switch {
	case thinking.Type != "enabled" && thinking.Type != "adaptive" && thinking.Type != "disabled":
		p.fail("thinking", `its type is %.40q, want "enabled", "adaptive" or "disabled"`, thinking.Type)
	case reasons(c.model.Template):
		c.variables = map[string]any{"enable_thinking": thinking.Type != "disabled"}
	case thinking.Type == "enabled":
		p.fail("thinking", "the chat template of the model %s has no reasoning: leave it out", c.model.Name)
	}
}

// readMessages converts the system text and the messages to messages of OpenAI's API. If the last
// message is the assistant's, the answer continues it.
func (c *conversation) readMessages(p *params) error {
	var messages []message
	if p.has("system") {
		text, err := textOf(p.all["system"], "system")
		if err != nil {
			return err
		}
		messages = append(messages, message{Role: "system", Content: text})
	}

	var list []struct {
		Role    string
		Content json.RawMessage
	}
	p.decode("messages", "an array of messages", &list)
	if p.err != nil {
		return p.err
	}
	if len(list) == 0 {
		return invalid("messages", "want an array of at least one message")
	}

	for i, m := range list {
		where := fmt.Sprintf("messages.%d", i)
		if m.Role != "user" && m.Role != "assistant" && m.Role != "system" {
			return invalid(where+".role", `it is %.40q, want "user", "assistant" or "system"`, m.Role)
		}
		more, err := blocks(m.Role, m.Content, where+".content")
		if err != nil {
			return err
		}
		messages = append(messages, more...)
	}

	last := messages[len(messages)-1]
	c.unended = last.Role == "assistant" && last.ToolCalls == nil
	c.messages = encode(messages)
	return nil
}

// blocks converts a message of Anthropic's API to messages of OpenAI's API. Each result of a tool becomes a
// separate message.
func blocks(role string, raw json.RawMessage, where string) ([]message, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil && !isNull(raw) {
		return []message{{Role: role, Content: text}}, nil
	}

	var parts []struct {
		Type, Text, ID, Name string
		Thinking             string
		Input                json.RawMessage
		ToolUseID            string `json:"tool_use_id"`
		Content              json.RawMessage
	}
	if json.Unmarshal(raw, &parts) != nil || len(parts) == 0 {
		return nil, invalid(where, "want a string or an array of content blocks")
	}

	var results []message
	var texts []string
	m := message{Role: role}
	for i, b := range parts {
		at := fmt.Sprintf("%s.%d", where, i)
		switch {
		case b.Type == "text":
			texts = append(texts, b.Text)
		case b.Type == "thinking" && role == "assistant":
			m.Reasoning += b.Thinking
		case b.Type == "tool_use" && role == "assistant":
			if isNull(b.Input) {
				b.Input = json.RawMessage("{}")
			}
			m.ToolCalls = append(m.ToolCalls, jsonCall{ID: b.ID, Type: "function",
				Function: jsonFunction{b.Name, string(b.Input)}})
		case b.Type == "tool_result" && role == "user":
			result, err := textOf(b.Content, at+".content")
			if err != nil {
				return nil, err
			}
			results = append(results, message{Role: "tool", Content: result, ToolCallID: b.ToolUseID})
		default:
			return nil, invalid(at, "a block of the type %.40q in a message of the role %s is not supported",
				b.Type, role)
		}
	}

	if len(texts) > 0 || m.ToolCalls != nil || results == nil {
		m.Content = strings.Join(texts, "\n")
		results = append(results, m)
	}
	return results, nil
}
