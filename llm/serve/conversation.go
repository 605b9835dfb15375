package serve

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// A conversation holds the input of a chat template.
type conversation struct {
	model     *Model
	messages  json.RawMessage // an array, as in OpenAI's API
	tools     json.RawMessage // nil without tools
	known     []tool          // the same tools
	forced    *string         // name of the tool that must be called, or "" for any; nil if none must be
	variables map[string]any
	unended   bool // whether the answer continues the last message
}

// readTools reads the tools, and whether the model may choose to call them.
func (c *conversation) readTools(p *params) {
	var tools []struct {
		Type     string
		Function tool
	}
	p.decode("tools", "an array of tools", &tools)
	for i, t := range tools {
		if t.Type != "function" || t.Function.Name == "" {
			p.fail("tools", `tool %d is not a function with a name: want {"type":"function","function":{`+
				`"name":…}}`, i)
		}
		c.known = append(c.known, t.Function)
	}
	if len(tools) > 0 {
		c.tools = p.all["tools"]
	}

	if !p.has("tool_choice") {
		return
	}
	var choice string
	json.Unmarshal(p.all["tool_choice"], &choice)
	var one struct {
		Type     string
		Function struct{ Name string }
	}
	if choice == "" {
		p.decode("tool_choice", "a string or an object", &one)
	}
	switch {
	case choice == "auto":
	case choice == "none":
		c.tools = nil
	case choice == "required" && c.tools != nil:
		c.forced = new(string)
	case choice == "" && one.Type == "function" && one.Function.Name != "" && c.tools != nil:
		c.forced = &one.Function.Name
	case c.tools == nil:
		p.fail("tool_choice", "there are no tools")
	default:
		p.fail("tool_choice", `it is %.60s, want "auto", "none", "required" or {"type":"function","function":`+
			`{"name":…}}`, p.all["tool_choice"])
	}
}

// lookForCalls makes a job look for calls of the tools, if it knows the format of the model's calls.
func (c *conversation) lookForCalls(j *job) {
	if c.tools == nil {
		return
	}
	j.tools = callFormatOf(j.model.Template)
	for _, t := range c.known {
		j.names = append(j.names, t.Name)
	}
}

// readOptions reads the options for the template, under the names that vLLM gave them.
func (c *conversation) readOptions(p *params) {
	var variables map[string]json.RawMessage
	p.decode("chat_template_kwargs", "an object", &variables)
	c.variables = map[string]any{}
	for name, value := range variables {
		c.variables[name] = value
	}
	c.unended = p.bool("continue_final_message", false)
	p.refuse(map[string]string{"chat_template": "", "add_generation_prompt": fmt.Sprint(!c.unended)})
}

// encode returns the tokens of the conversation, and notes in the job whether they end within the reasoning.
func (c *conversation) encode(j *job) ([]int, error) {
	if c.model.Template == nil {
		why := ""
		if err := c.model.NoTemplate; err != nil && !errors.Is(err, chat.ErrNoTemplate) {
			why = " that can be used (" + err.Error() + ")"
		}
		return nil, invalid("", "the model %s has no chat template%s: use /v1/completions, which continues a text",
			c.model.Name, why)
	}

	messages, last, err := normalize(c.messages)
	if err != nil {
		return nil, err
	}

	options := chat.Options{AddGenerationPrompt: !c.unended, Variables: c.variables}
	if c.tools != nil {
		if options.Variables == nil {
			options.Variables = map[string]any{}
		}
		options.Variables["tools"] = c.tools
	}

	text, err := c.model.Template.RenderJSON(messages, options)
	if err != nil {
		return nil, invalid("messages", "the model's chat template does not accept the conversation: %v",
			err)
	}

	if c.unended {
		if last = strings.TrimSpace(last); last == "" {
			return nil, invalid("messages", "the last message has no text to continue")
		}
		at := strings.LastIndex(text, last)
		if at < 0 {
			return nil, invalid("messages", "the chat template changes the text of the last message, so it "+
				"cannot be continued")
		}
		text = text[:at+len(last)]
	}
	j.thinks = !c.unended && strings.HasSuffix(strings.TrimRight(text, whiteSpace), thinkBegin)
	return c.model.Tokenizer.Encode([]byte(text)), nil
}

// A message is a message of OpenAI's chat API, with the members that templates use.
type message struct {
	Role       string     `json:"role"`
	Content    any        `json:"content"`
	Name       string     `json:"name,omitempty"`
	Reasoning  string     `json:"reasoning_content,omitempty"`
	ToolCalls  []jsonCall `json:"tool_calls,omitempty"`
	ToolCallID string     `json:"tool_call_id,omitempty"`
}

// normalize checks messages and brings them into the form that templates expect: texts are strings, and
// the arguments of tool calls are objects. It also returns the text of the last message.
func normalize(raw json.RawMessage) (all json.RawMessage, last string, err error) {
	var list []json.RawMessage
	if isNull(raw) || json.Unmarshal(raw, &list) != nil || len(list) == 0 {
		return nil, "", invalid("messages", "want an array of at least one message")
	}

	messages := make([]message, len(list))
	for i, raw := range list {
		where := fmt.Sprintf("messages.%d", i)
		var in struct {
			Role, Name string
			Content    json.RawMessage
			Reasoning  string `json:"reasoning_content"`
			ToolCallID string `json:"tool_call_id"`
			ToolCalls  []struct {
				ID       string
				Function struct{ Name, Arguments string }
			} `json:"tool_calls"`
		}
		if err := json.Unmarshal(raw, &in); err != nil {
			return nil, "", invalid(where, "%v", err)
		}

		m := message{Role: in.Role, Name: in.Name, Reasoning: in.Reasoning, ToolCallID: in.ToolCallID}
		switch in.Role {
		case "":
			return nil, "", invalid(where+".role", "it is missing")
		case "developer": // OpenAI's newer name, which few templates know
			m.Role = "system"
		}

		if last, err = textOf(in.Content, where+".content"); err != nil {
			return nil, "", err
		}
		m.Content = last
		if isNull(in.Content) {
			if len(in.ToolCalls) == 0 {
				return nil, "", invalid(where+".content", "it is missing")
			}
			m.Content = nil
		}

		for _, c := range in.ToolCalls {
			call := jsonCall{ID: c.ID, Type: "function",
				Function: jsonFunction{c.Function.Name, c.Function.Arguments}}
			if arguments := strings.TrimSpace(c.Function.Arguments); strings.HasPrefix(arguments, "{") &&
				json.Valid([]byte(arguments)) {
				call.Function.Arguments = json.RawMessage(arguments)
			}
			m.ToolCalls = append(m.ToolCalls, call)
		}
		messages[i] = m
	}

	return encode(messages), last, nil
}

// textOf returns the text of a message: a string, or parts with the type text.
func textOf(raw json.RawMessage, where string) (string, error) {
	if isNull(raw) {
		return "", nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, nil
	}

	var parts []struct {
		Type string
		Text *string
	}
	if json.Unmarshal(raw, &parts) != nil {
		return "", invalid(where, "want a string or an array of parts")
	}

	texts := make([]string, len(parts))
	for i, p := range parts {
		if p.Type != "text" || p.Text == nil {
			return "", invalid(fmt.Sprintf("%s.%d", where, i), "it has the type %.40q, and this server only "+
				"takes text", p.Type)
		}
		texts[i] = *p.Text
	}
	return strings.Join(texts, "\n"), nil
}
