// Package chat writes conversations as models were trained on them. It goes by the chat template of
// Hugging Face that lies beside a model: a text of the template language Jinja.
package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/builtins"
	"github.com/nikolalohinski/gonja/v2/config"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/loaders"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// A Message is one turn of a conversation.
type Message struct {
	Role    string // such as "system", "user" or "assistant"
	Content string
}

// A Template writes conversations. All methods may be called at the same time.
type Template struct {
	source string
	tokens map[string]any // the special tokens that a template may name, such as bos_token
}

const (
	templateName = "chat_template.jinja"
	configName   = "tokenizer_config.json"

	maxTemplate = 1 << 20 // bytes
	maxConfig   = 16 << 20
	maxText     = 64 << 20 // bytes of a conversation
)

// ErrNoTemplate is the error of a folder without a chat template.
var ErrNoTemplate = errors.New("there is no chat template")

// Load reads the chat template of a model's folder: chat_template.jinja, or what
// tokenizer_config.json says, of several templates the one named default. The special tokens are
// those of tokenizer_config.json.
func Load(folder string) (*Template, error) {
	config, err := read(filepath.Join(folder, configName), maxConfig)
	if err != nil {
		return nil, fmt.Errorf("chat: Load: %w", err)
	}
	source, err := read(filepath.Join(folder, templateName), maxTemplate)
	if err != nil {
		return nil, fmt.Errorf("chat: Load: %w", err)
	}
	t, err := parse(string(source), config)
	if err != nil {
		return nil, fmt.Errorf("chat: Load: %s: %w", folder, err)
	}
	return t, nil
}

// read returns what a file holds, and nothing if there is none.
func read(path string, limit int64) ([]byte, error) {
	text, err := regular.Read(path, limit, "one has")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return text, err
}

// Parse reads a template, and the special tokens of a tokenizer_config.json, which may be nil. An
// empty template is the one in tokenizer_config.json.
func Parse(source string, config []byte) (*Template, error) {
	t, err := parse(source, config)
	if err != nil {
		return nil, fmt.Errorf("chat: Parse: %w", err)
	}
	return t, nil
}

// specialTokens are the names that templates have for tokens.
var specialTokens = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
	"cls_token", "mask_token"}

// Source returns the text of the template.
func (t *Template) Source() string { return t.source }

func parse(source string, raw []byte) (*Template, error) {
	members := map[string]json.RawMessage{}
	if raw != nil {
		if err := json.Unmarshal(raw, &members); err != nil {
			return nil, fmt.Errorf("%s: %w", configName, err)
		}
	}
	t := &Template{source: source, tokens: map[string]any{}}
	for _, name := range specialTokens {
		text, err := tokenText(members[name])
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", configName, name, err)
		}
		if text != "" {
			t.tokens[name] = text
		}
	}
	if source == "" {
		var err error
		if t.source, err = templateOf(members["chat_template"]); err != nil {
			return nil, fmt.Errorf("%s: chat_template: %w", configName, err)
		}
	}
	if t.source == "" {
		return nil, ErrNoTemplate
	}
	if _, err := t.compile(time.Time{}, t.limits(nil, nil)); err != nil {
		return nil, err
	}
	return t, nil
}

// tokenText returns the text of a token that is a string, or an object with its content.
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

// templateOf returns the template that a configuration has, or the default of several.
func templateOf(raw json.RawMessage) (source string, err error) {
	switch {
	case len(raw) == 0:
		return "", nil
	case raw[0] != '[':
		err = json.Unmarshal(raw, &source)
		return source, err
	}
	var several []struct{ Name, Template string }
	if err := json.Unmarshal(raw, &several); err != nil {
		return "", err
	}
	for _, t := range several {
		if t.Name == "default" {
			return t.Template, nil
		}
	}
	return "", errors.New("it has several templates, and none is named default")
}

// Options say how a conversation is written.
type Options struct {
	// AddGenerationPrompt ends the text with the beginning of the assistant's next turn.
	AddGenerationPrompt bool
	// Variables are what else the template asks for, such as "enable_thinking". Strings, numbers
	// and booleans are supported; tools and documents are not.
	Variables map[string]any
	// Now is the time that a template may write. The zero time is the time of the call.
	Now time.Time
}

// Render returns a conversation as text. It begins with the beginning of a text if the template
// says so: encode it by Encode of a tokenizer, not EncodeWhole. A conversation that the template
// refuses is an error, and so is what it asks for and is not supported, such as tools. A text of a
// special token in a message becomes that token when it is encoded.
func (t *Template) Render(messages []Message, o Options) (string, error) {
	if o.Now.IsZero() {
		o.Now = time.Now()
	}
	text, err := t.render(messages, o)
	if err != nil {
		return "", fmt.Errorf("chat: Template.Render: %w", err)
	}
	return text, nil
}

func (t *Template) render(messages []Message, o Options) (text string, err error) {
	variables := map[string]any{"add_generation_prompt": o.AddGenerationPrompt}
	for _, name := range slices.Sorted(maps.Keys(o.Variables)) {
		v := o.Variables[name]
		switch v.(type) {
		case string, bool, int, float64:
			variables[name] = v
		default:
			return "",
				fmt.Errorf("the variable %s is a %T, which is not supported: want a string, "+
					"bool, int or float64", name, v)
		}
	}
	turns := make(list, len(messages))
	for i, m := range messages {
		turns[i] = map[string]any{"role": m.Role, "content": m.Content}
	}
	variables["messages"] = turns
	maps.Copy(variables, t.tokens)
	// A template is compiled for each use: what it compiles to holds state.
	compiled, err := t.compile(o.Now, t.limits(messages, o.Variables))
	if err != nil {
		return "", err
	}
	defer recovered(&err)
	var out strings.Builder
	err = compiled.Execute(&paper{to: &out, most: maxText}, exec.NewContext(variables))
	if err != nil {
		return "", err
	}
	return out.String(), nil
}

// recovered makes an error of a panic of the template engine, which templates can provoke.
func recovered(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("the template engine gave up: %v", p)
	}
}

// compile returns the template as transformers compiles it.
func (t *Template) compile(now time.Time, l *limits) (template *exec.Template, err error) {
	defer recovered(&err)
	if len(t.source) > maxTemplate {
		return nil, fmt.Errorf("the template has %d bytes, want at most %d", len(t.source),
			maxTemplate)
	}
	c := config.New()
	c.TrimBlocks, c.LeftStripBlocks = true, true
	environment := &exec.Environment{
		Context:           l.globals(now),
		Filters:           l.filterSet(),
		Tests:             builtins.Tests,
		ControlStructures: l.structureSet(),
		Methods: exec.Methods{
			Str:  methods(l, stringMethods(), stringMethodNames),
			Dict: methods(l, builtins.Methods.Dict, dictMethodNames),
			List: methods(l, builtins.Methods.List, listMethodNames),
			Bool: exec.NewMethodSet[bool](nil), Int: exec.NewMethodSet[int](nil),
			Float: exec.NewMethodSet[float64](nil),
		},
	}
	source, err := withoutConditionals(t.source)
	if err == nil {
		err = checkTokens(source, c)
	}
	if err != nil {
		return nil, err
	}
	template, err = exec.NewTemplate(templateName, c, alone(source), environment)
	if err != nil { // it repeats the template
		return nil, errors.New(strings.ReplaceAll(err.Error(), source, templateName))
	}
	return template, nil
}

// globals are the functions that a template can call.
func (l *limits) globals(now time.Time) *exec.Context {
	g := exec.EmptyContext()
	for _, name := range []string{"namespace", "dict"} {
		own, _ := builtins.GlobalFunctions.Get(name)
		g.Set(name, own)
	}
	g.Set("raise_exception", func(_ *exec.Evaluator, args *exec.VarArgs) (any, error) {
		return nil, fmt.Errorf("the template refuses the conversation: %s", args.First().String())
	})
	g.Set("strftime_now", func(_ *exec.Evaluator, args *exec.VarArgs) (string, error) {
		return strftime(now, args.First().String())
	})
	g.Set("range", numbers)
	g.Set(either, chooseEither)
	g.Set(product, l.product)
	return g
}

// numbers is range. The engine's own leaves a goroutine behind where a loop ends early.
func numbers(_ *exec.Evaluator, args *exec.VarArgs) ([]int, error) {
	bounds := []int{0, 0, 1}
	for i, a := range args.Args {
		if i > 2 || !a.IsInteger() {
			return nil, errors.New("range: want one to three integers")
		}
		bounds[i] = a.Integer()
	}
	switch len(args.Args) {
	case 0:
		return nil, errors.New("range: want one to three integers")
	case 1:
		bounds[0], bounds[1] = 0, bounds[0]
	}
	from, to, step := bounds[0], bounds[1], bounds[2]
	if step == 0 {
		return nil, errors.New("range: the step is 0")
	}
	list := []int{}
	for i := from; step > 0 && i < to || step < 0 && i > to; i += step {
		if len(list) == maxItems {
			return nil, fmt.Errorf("range: more than %d numbers", maxItems)
		}
		list = append(list, i)
	}
	return list, nil
}

// toJSON writes strings, numbers and booleans. Others would be tools, whose members Go would write
// in another order than Python.
func toJSON(_ *exec.Evaluator, in *exec.Value, _ *exec.VarArgs) *exec.Value {
	var v any
	switch {
	case in.IsError():
		return in
	case in.IsNil():
	case in.IsString():
		v = in.String()
	case in.IsBool():
		v = in.Bool()
	case in.IsInteger():
		v = in.Integer()
	default:
		return exec.AsValue(errors.New("tojson of tools, lists and objects is not supported"))
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return exec.AsValue(err)
	}
	return exec.AsSafeValue(strings.TrimSuffix(out.String(), "\n"))
}

// directives are what strftime knows, in Go's words.
var directives = map[byte]string{'a': "Mon", 'A': "Monday", 'b': "Jan", 'B': "January", 'd': "02",
	'm': "01", 'y': "06", 'Y': "2006", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM",
	'j': "002"}

// strftime writes a time in the way of C and Python.
func strftime(now time.Time, format string) (string, error) {
	var out strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			out.WriteByte(format[i])
			continue
		}
		i++
		switch {
		case i == len(format):
			return "", fmt.Errorf("strftime_now: %q ends with %%", format)
		case format[i] == '%':
			out.WriteByte('%')
		case directives[format[i]] == "":
			return "", fmt.Errorf("strftime_now: %%%c of %q is not supported", format[i], format)
		default:
			out.WriteString(now.Format(directives[format[i]]))
		}
	}
	return out.String(), nil
}

// alone is the loader of a template that may not read others.
type alone string

var _ loaders.Loader = alone("")

func (a alone) Read(path string) (io.Reader, error) {
	if path != templateName {
		return nil, fmt.Errorf("the template asks for the file %q, which is not supported", path)
	}
	return strings.NewReader(string(a)), nil
}

func (a alone) Resolve(path string) (string, error) { return path, nil }

func (a alone) Inherit(string) (loaders.Loader, error) { return a, nil }
