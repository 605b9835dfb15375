package chat

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
)

//go:generate python3 testdata/golden.py

// golden is what transformers makes of conversations, by testdata/golden.py.
type golden struct {
	Conversations map[string][][2]string
	Templates     map[string]struct {
		Source string
		Cases  map[string]struct{ Text, Error *string }
	}
}

const tokens = `{"bos_token":{"content":"<bos>"},"eos_token":"<eos>"}`

var now = time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)

func readGolden(t *testing.T, path string) (g golden) {
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(raw, &g))
	require.NotEmpty(t, g.Templates)
	return g
}

// render renders a case, which is named after its conversation and whether the assistant is next.
func (g golden) render(template *Template, name string) (string, error) {
	conversation, prompt, _ := strings.Cut(name, "/")
	var messages []Message
	for _, m := range g.Conversations[conversation] {
		messages = append(messages, Message{m[0], m[1]})
	}
	return template.Render(messages, Options{AddGenerationPrompt: prompt == "True", Now: now})
}

func TestGolden(t *testing.T) {
	g := readGolden(t, "testdata/golden.json")
	for name, c := range g.Templates {
		template, err := Parse(c.Source, []byte(tokens))
		require.NoError(t, err, name)
		for of, want := range c.Cases {
			text, err := g.render(template, of)
			if want.Error != nil {
				require.ErrorContains(t, err, *want.Error, "%s: %s", name, of)
				continue
			}
			require.NoError(t, err, "%s: %s", name, of)
			require.Equal(t, *want.Text, text, "%s: %s", name, of)
		}
	}
}

// TestSameAsTransformers compares with the templates of published models, which fetch.sh and
// golden.py put into the folder KASMINA_TOKENIZERS. A template may be unsupported, which is an
// error, but its text is never another.
func TestSameAsTransformers(t *testing.T) {
	folder := os.Getenv("KASMINA_TOKENIZERS")
	if folder == "" {
		t.Skip("KASMINA_TOKENIZERS names no folder: see llm/tokenizer/hf/fetch.sh")
	}
	g := readGolden(t, filepath.Join(folder, "chat.json"))
	supported := 0
	for name, c := range g.Templates {
		template, err := Parse(c.Source, []byte(tokens))
		if err != nil {
			t.Logf("%s: %v", name, err)
			continue
		}
		if g.compare(t, name, template) {
			supported++
		}
	}
	t.Logf("%d of %d templates are supported in all cases", supported, len(g.Templates))
}

// compare compares the cases of a template, and reports whether it is supported in all.
func (g golden) compare(t *testing.T, name string, template *Template) bool {
	var failure error
	for of, want := range g.Templates[name].Cases {
		text, err := g.render(template, of)
		switch {
		case want.Error != nil: // an undefined name, which is nothing to our engine, or a refusal
		case err != nil:
			failure = err
		default:
			require.Equal(t, *want.Text, text, "%s: %s", name, of)
		}
	}
	if failure != nil {
		t.Logf("%s: %.400v", name, failure)
	}
	return failure == nil
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	_, err := Load(dir)
	require.ErrorIs(t, err, ErrNoTemplate)
	write(configName, `{"bos_token":"<s>","chat_template":[{"name":"tools","template":"x"},`+
		`{"name":"default","template":"{{ bos_token }}{{ messages[0].content }}"}]}`)
	hi := []Message{{"user", "hi"}}
	render := func() string {
		template, err := Load(dir)
		require.NoError(t, err)
		text, err := template.Render(hi, Options{Variables: map[string]any{"flag": true}})
		require.NoError(t, err)
		return text
	}
	require.Equal(t, "<s>hi", render())
	write(templateName, "{{ flag }}") // which goes before the configuration
	require.Equal(t, "True", render())
	write(configName, `{"bos_token":7}`)
	_, err = Load(dir)
	require.ErrorContains(t, err, "bos_token")
}

func TestWhatIsNotSupported(t *testing.T) {
	for _, c := range []struct{ source, want string }{
		{"{% include '/etc/passwd' %}", "'include' not found"},
		{"{% for %}", "for"},
		{"{{ (1 }}", "Unbalanced"},
		{"{{ range(1000000) }}", "more than 100000"},
		{"{{ strftime_now('%Q') }}", "%Q"},
		{"{{ messages | tojson }}", "tojson of tools"},
		{"{{ messages[0].content.translate() }}", "translate"},
		{"{{ raise_exception('no') }}", "refuses the conversation: no"},
		{"{% for i in range(99999) %}" + strings.Repeat("x", 1000) + "{% endfor %}",
			"more than 67108864 bytes"},
		{strings.Repeat("x", maxTemplate+1), "want at most"},
	} {
		template, err := Parse(c.source, nil)
		if err == nil {
			_, err = template.Render([]Message{{"user", "hi"}}, Options{})
		}
		require.ErrorContains(t, err, c.want, "%.80s", c.source)
	}
	template, err := Parse("{{ tools }}", nil)
	require.NoError(t, err)
	_, err = template.Render(nil, Options{Variables: map[string]any{"tools": []any{}}})
	require.ErrorContains(t, err, "the variable tools is a []interface {}")
}

// TestHostileTemplates wants templates that loop, call themselves or grow without end to be refused
// soon, and to take little memory.
func TestHostileTemplates(t *testing.T) {
	long := patience
	defer func() { patience = long }()
	double := "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}"
	for _, c := range []struct{ source, want string }{
		{"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "more than 32 macros call each other"},
		{"{% macro f(x) %}{{ x ~ x }}{% endmacro %}{{ " + strings.Repeat("f(", 30) + "'12345678'" +
			strings.Repeat(")", 30) + " }}", "more than 1048"},
		{"{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "loops that call themselves"},
		{"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
			"takes longer than 1s"},
		{"{% for i in range(99999) %}{% for j in range(99999) if j is even %}{% endfor %}" +
			"{% endfor %}", "takes longer than 1s"},
		{double + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "more than 1048"},
		{double + "{% set ns.x = ns.x + ns.x %}{% endfor %}", "more than 1048"},
		{double + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}", ""},
		{double + "{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}", "more than 1048"},
		{double + "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}", "more than 1048"},
		{double + "{% set ns.x = ns.x | list | join(ns.x) %}{% endfor %}", "more than 1048"},
		{double + "{% set ns.x = ns.x.join(ns.x | list) %}{% endfor %}", "more than 1048"},
		{"{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}", "deeper than 32"},
		{"{% set l = [1] %}{% set x = l.append(l) %}{{ l }}", ""},
		{"{% set x %}{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaa' }}{% endfor %}{% endset %}",
			"more than 1048"},
		{"{% set n = 99999999999 %}{{ 'x' * n }}", "more than 1048"},
		{"{{ 'x' * 99999999999 }}", "* is supported between"},
		{"{{ 9 ** 9 ** 9 }}", "** is supported between"},
		{"{{ 'x' | indent(99999999999) }}", "more than 1048"},
		{"{{ 'x' | center(99999999999) }}", "'center' not found"},
		{"{{ lipsum(99999999) }}", "lipsum is not callable"},
		{"{% extends 'chat_template.jinja' %}", "'extends' not found"},
		{"{{ " + strings.Repeat("(", 33) + "1" + strings.Repeat(")", 33) + " }}", "deeper than 32"},
		{"{{ " + strings.Repeat("[", 1<<19) + " }}", "deeper than 32"},
		{"{{ 1" + strings.Repeat("+1", 600) + " }}", "more than 1000 words"},
		{"{{ x" + strings.Repeat(".x", 1<<14) + " }}", "more than 16384 bytes"},
		// which the engine takes for text, and this package for tags within a string
		{"{{ '}} {{ " + strings.Repeat("(", 33) + "1 }} {{ ' }}", ""},
		{strings.Repeat("{% if 1 %}", 101) + strings.Repeat("{% endif %}", 101),
			"more than 100 tags"},
		{"{% set gonja.version = 1 %}{{ gonja.version }}", ""},
	} {
		if patience = long; c.want == "" || strings.Contains(c.want, "longer") {
			patience = time.Second // the others end at their own limit, however busy the machine is
		}
		bounded.Run(t, 512<<20, func() { // of which most is freed again at once
			template, err := Parse(c.source, nil)
			if err == nil {
				_, err = template.Render([]Message{{"user", "hi"}}, Options{})
			}
			if c.want != "" {
				require.ErrorContains(t, err, c.want, "%.80s", c.source)
			}
		})
	}
}

// TestProducts wants texts to be repeated as in Jinja, and what looks like it in a text to stay.
func TestProducts(t *testing.T) {
	template, err := Parse(`{% set n = 3 %}{% set m = n * n %}{{ "ab" * n ~ m }}{{ '(n * n)' }}`+
		`{{ [n * n, "=" * n] | join("n * n") }}{% filter upper | trim %} x{% endfilter %}`, nil)
	require.NoError(t, err)
	text, err := template.Render(nil, Options{})
	require.NoError(t, err)
	require.Equal(t, "ababab9(n * n)9n * n===X", text)
}

func FuzzParse(f *testing.F) {
	for _, source := range []string{"{{ bos_token }}",
		"{% for m in messages %}{{ m.role }}{% endfor %}",
		"{{ (a if b else c) }}", "{#", "{{ '", "{% set x = [1, 2 if a else 3] %}{{ x[-1] }}"} {
		f.Add(source, []byte(tokens))
	}
	f.Add("{% macro f(x) %}{{ x ~ f(x) }}{% endmacro %}{% for i in range(9) %}{{ f(i) }}{% endfor %}",
		[]byte("{}"))
	f.Add("{% set ns = namespace(x=[]) %}{% set ns.x = ns.x + [ns] %}{{ ns.x | join(ns.y * n) }}",
		[]byte("{}"))
	patience = time.Second
	f.Add("", []byte(`{"bos_token":null,"chat_template":[{"name":"default","template":"x"}]}`))
	f.Fuzz(func(t *testing.T, source string, config []byte) {
		template, err := Parse(source, config)
		if err != nil {
			return
		}
		_, _ = template.Render([]Message{{"user", "hi"}}, Options{Now: now})
	})
}
