// Package chat renders conversations with the chat template of a Hugging Face model, in the form the
// model was trained on.
//
// A chat template is a text in the template language Jinja. The package renders the same text as
// transformers does with Jinja2. If a template uses an unsupported feature, the error names it.
package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat/internal/jinja"
)

// A Message is one turn of a conversation.
type Message struct {
	Role    string // such as "system", "user" or "assistant"
	Content string
}

// A Template renders conversations. It is safe for concurrent use.
type Template struct {
	sources Sources
	tokens  map[string]string // special tokens that templates can use, such as bos_token
	main    *jinja.Template

	// tools is the template for conversations with tools, or nil if main handles them too. toolsErr
	// reports why a separate template cannot be used.
	tools    *jinja.Template
	toolsErr error
}

// Sources are the chat templates of a model, keyed by name. Most models provide only the one named
// "default".
type Sources map[string]string

const (
	// TemplateFile is the file with the default template of a model.
	TemplateFile = "chat_template.jinja"
	// TemplateFolder is the folder that contains further templates, such as tool_use.jinja.
	TemplateFolder = "additional_chat_templates"

	// DefaultName is the name of the default template.
	DefaultName = "default"

	configFile  = "tokenizer_config.json"
	toolUseName = "tool_use"

	maxTemplate = 1 << 20 // bytes
	maxConfig   = 16 << 20
)

// renderTimeout limits the time for one conversation. Tests set it.
var renderTimeout = jinja.DefaultTimeout

// ErrNoTemplate reports a model without a chat template.
var ErrNoTemplate = errors.New("there is no chat template")

// Load reads the chat templates of a model's folder. The default template is chat_template.jinja, or
// else the one in tokenizer_config.json. A template named tool_use is used for conversations with
// tools. The special tokens are taken from tokenizer_config.json.
func Load(folder string) (*Template, error) {
	sources, config, err := loadSources(folder)
	if err != nil {
		return nil, fmt.Errorf("chat: Load: %w", err)
	}
	t, err := parse(sources, config)
	if err != nil {
		return nil, fmt.Errorf("chat: Load: %s: %w", folder, err)
	}
	return t, nil
}

// LoadSources reads the chat templates of a model's folder as Load does, but does not check that
// they can be rendered. It returns ErrNoTemplate if the model has no default template.
func LoadSources(folder string) (Sources, error) {
	sources, config, err := loadSources(folder)
	if err != nil {
		return nil, fmt.Errorf("chat: LoadSources: %w", err)
	}
	if _, err := sources.complete(config); err != nil {
		return nil, fmt.Errorf("chat: LoadSources: %s: %w", folder, err)
	}
	return sources, nil
}

// ParseSources returns the templates in the chat_template of a tokenizer_config.json, which is either one
// template or a list of named templates. It returns ErrNoTemplate if there is no default template.
func ParseSources(raw json.RawMessage) (Sources, error) {
	sources, err := templatesOf(raw)
	if err == nil && sources[DefaultName] == "" {
		err = ErrNoTemplate
	}
	if err != nil {
		return nil, fmt.Errorf("chat: ParseSources: %w", err)
	}
	return sources, nil
}

// loadSources reads the template files and the configuration of a folder.
func loadSources(folder string) (Sources, []byte, error) {
	config, err := read(filepath.Join(folder, configFile), maxConfig)
	if err != nil {
		return nil, nil, err
	}

	sources := Sources{}
	paths := []string{filepath.Join(folder, TemplateFile)}
	entries, err := os.ReadDir(filepath.Join(folder, TemplateFolder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}

	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".jinja") {
			paths = append(paths, filepath.Join(folder, TemplateFolder, e.Name()))
		}
	}

	for i, path := range paths {
		text, err := read(path, maxTemplate)
		if err != nil {
			return nil, nil, err
		}
		name := strings.TrimSuffix(filepath.Base(path), ".jinja")
		if i == 0 {
			name = DefaultName
		}
		if len(text) > 0 {
			sources[name] = string(text)
		}
	}

	return sources, config, nil
}

// read returns the contents of a file, or nothing if the file doesn't exist.
func read(path string, limit int64) ([]byte, error) {
	text, err := regular.Read(path, limit, "one has")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return text, err
}

// Parse parses a template. config holds the contents of a tokenizer_config.json, which defines the
// special tokens, or is nil. If source is empty, Parse uses the templates in config.
func Parse(source string, config []byte) (*Template, error) {
	sources := Sources{}
	if source != "" {
		sources[DefaultName] = source
	}
	t, err := parse(sources, config)
	if err != nil {
		return nil, fmt.Errorf("chat: Parse: %w", err)
	}
	return t, nil
}

// specialTokens are the names of special tokens in templates.
var specialTokens = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
	"cls_token", "mask_token"}

// Source returns the text of the default template.
func (t *Template) Source() string { return t.sources[DefaultName] }

// ToolSource returns the text of the template for conversations with tools.
func (t *Template) ToolSource() string {
	if source := t.sources[toolUseName]; source != "" {
		return source
	}
	return t.Source()
}

// complete decodes a configuration and adds its templates unless s already has a default template.
func (s Sources) complete(config []byte) (map[string]json.RawMessage, error) {
	members := map[string]json.RawMessage{}
	if config != nil {
		if err := json.Unmarshal(config, &members); err != nil {
			return nil, fmt.Errorf("%s: %w", configFile, err)
		}
	}

	if s[DefaultName] != "" {
		return members, nil
	}

	configured, err := templatesOf(members["chat_template"])
	if err != nil {
		return nil, fmt.Errorf("%s: chat_template: %w", configFile, err)
	}

	for name, source := range configured {
		if s[name] == "" {
			s[name] = source
		}
	}

	if s[DefaultName] == "" {
		return nil, ErrNoTemplate
	}

	return members, nil
}

func parse(sources Sources, config []byte) (*Template, error) {
	members, err := sources.complete(config)
	if err != nil {
		return nil, err
	}

	t := &Template{sources: sources, tokens: map[string]string{}}
	for _, name := range specialTokens {
		text, err := tokenText(members[name])
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", configFile, name, err)
		}
		if text != "" {
			t.tokens[name] = text
		}
	}

	if t.main, err = jinja.Parse(sources[DefaultName]); err != nil {
		return nil, err
	}

	if source := sources[toolUseName]; source != "" {
		t.tools, t.toolsErr = jinja.Parse(source)
	}

	return t, nil
}

// tokenText returns the text of a token, which is a string or an object with a content.
func tokenText(raw json.RawMessage) (text string, err error) {
	if len(raw) == 0 || string(raw) == "null" {
		return "", nil
	}
	if raw[0] == '"' {
		err = json.Unmarshal(raw, &text)
		return text, err
	}
	var token struct{ Content string }
	err = json.Unmarshal(raw, &token)
	return token.Content, err
}

// templatesOf returns the templates of a configuration: a single template, or a list of named ones.
func templatesOf(raw json.RawMessage) (Sources, error) {
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, nil
	case raw[0] != '[':
		var source string
		err := json.Unmarshal(raw, &source)
		return Sources{DefaultName: source}, err
	}

	var named []struct{ Name, Template string }
	if err := json.Unmarshal(raw, &named); err != nil {
		return nil, err
	}

	sources := Sources{}
	for _, t := range named {
		sources[t.Name] = t.Template
	}

	if sources[DefaultName] == "" {
		return nil, errors.New("it has several templates, and none is named default")
	}

	return sources, nil
}

// Options are the settings for rendering a conversation.
type Options struct {
	// AddGenerationPrompt ends the text with the start of the assistant's next turn.
	AddGenerationPrompt bool
	// Variables are further variables of the template, such as "enable_thinking", "tools" and
	// "documents". A value is nil, a string, a bool, an int, a float64, a slice of these, or a
	// json.RawMessage, which keeps the order of keys. A variable replaces the special token of the
	// same name.
	Variables map[string]any
	// Now is the time for templates that write it. The zero time means the time of the call.
	Now time.Time
}

// Render returns a conversation as text.
//
// The text contains the beginning-of-text token if the template writes it, so encode it with Encode
// of a tokenizer, not EncodeWhole. If a message contains the text of a special token, encoding
// produces that token. Render fails if the template rejects the conversation or uses an unsupported
// feature.
func (t *Template) Render(messages []Message, o Options) (string, error) {
	turns := make([]jinja.Value, len(messages))
	for i, m := range messages {
		role, err := jinja.FromGo(m.Role)
		if err != nil {
			return "", fmt.Errorf("chat: Template.Render: the role of message %d: %w", i, err)
		}
		content, err := jinja.FromGo(m.Content)
		if err != nil {
			return "", fmt.Errorf("chat: Template.Render: message %d: %w", i, err)
		}
		turns[i] = jinja.Dict(jinja.Field{Key: "role", Value: role},
			jinja.Field{Key: "content", Value: content})
	}

	text, err := t.render(turns, o)
	if err != nil {
		return "", fmt.Errorf("chat: Template.Render: %w", err)
	}

	return text, nil
}

// RenderJSON is like Render for messages in JSON, given as an array of objects in the form used by
// chat APIs, which may include tool calls, lists as contents, and other members. Like transformers,
// it removes null members and passes an assistant's reasoning under all of its names.
func (t *Template) RenderJSON(messages []byte, o Options) (string, error) {
	turns, err := parseMessages(messages)
	if err != nil {
		return "", fmt.Errorf("chat: Template.RenderJSON: the messages: %w", err)
	}
	text, err := t.render(turns, o)
	if err != nil {
		return "", fmt.Errorf("chat: Template.RenderJSON: %w", err)
	}
	return text, nil
}

func parseMessages(raw []byte) ([]jinja.Value, error) {
	list, err := jinja.FromJSON(raw)
	if err != nil {
		return nil, err
	}

	messages, ok := list.Items()
	if !ok {
		return nil, errors.New("want an array")
	}

	for i, m := range messages {
		fields, ok := m.Fields()
		if !ok {
			return nil, fmt.Errorf("message %d is not an object", i)
		}
		messages[i] = jinja.Dict(normalize(fields)...)
	}

	return messages, nil
}

// normalize returns the members of a message as transformers passes them to a template.
func normalize(fields []jinja.Field) []jinja.Field {
	var kept []jinja.Field
	reasoning := map[string]jinja.Value{}
	for _, f := range fields {
		if !f.Value.IsNone() {
			kept = append(kept, f)
			reasoning[f.Key] = f.Value
		}
	}

	for _, name := range []string{"reasoning_content", "thinking", "reasoning"} {
		if v, ok := reasoning[name]; ok {
			first := []jinja.Field{{Key: "thinking", Value: v}}
			return append(append(first, kept...), jinja.Field{Key: "reasoning_content", Value: v})
		}
	}

	return kept
}

func (t *Template) render(messages []jinja.Value, o Options) (string, error) {
	if o.Now.IsZero() {
		o.Now = time.Now()
	}

	given := map[string]any{"tools": nil, "documents": nil}
	for name, text := range t.tokens {
		given[name] = text
	}

	maps.Copy(given, o.Variables)
	variables := jinja.Variables{}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		value, err := jinja.FromGo(given[name])
		if err != nil {
			return "", fmt.Errorf("the variable %s: %w", name, err)
		}
		variables[name] = value
	}

	for _, name := range []string{"messages", "add_generation_prompt"} {
		if _, ok := o.Variables[name]; ok {
			return "", fmt.Errorf("the variable %s cannot be set", name)
		}
	}

	variables["messages"] = jinja.List(messages...)
	variables["add_generation_prompt"], _ = jinja.FromGo(o.AddGenerationPrompt)

	template := t.main
	if !variables["tools"].IsNone() && t.sources[toolUseName] != "" {
		if t.toolsErr != nil {
			return "", fmt.Errorf("the template %s: %w", toolUseName, t.toolsErr)
		}
		template = t.tools
	}

	return template.Render(variables, jinja.Options{Now: o.Now, Timeout: renderTimeout})
}
