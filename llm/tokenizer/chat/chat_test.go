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

var hi = []Message{{"user", "hi"}}

func writeFile(t *testing.T, path, text string) {
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	_, err := Load(dir)
	require.ErrorIs(t, err, ErrNoTemplate)
	_, err = LoadSources(dir)
	require.ErrorIs(t, err, ErrNoTemplate)

	writeFile(t, filepath.Join(dir, configFile), `{"bos_token":"<s>","chat_template":[{"name":"rag",`+
		`"template":"x"},{"name":"default","template":"{{ bos_token }}{{ messages[0].content }}"}]}`)
	render := func(variables map[string]any) string {
		template, err := Load(dir)
		require.NoError(t, err)
		text, err := template.Render(hi, Options{Variables: variables})
		require.NoError(t, err)
		return text
	}

	require.Equal(t, "<s>hi", render(nil))
	require.Equal(t, "[BOS]hi", render(map[string]any{"bos_token": "[BOS]"}))

	// The file takes precedence over the configuration.
	writeFile(t, filepath.Join(dir, TemplateFile), "{{ flag }}")
	require.Equal(t, "True", render(map[string]any{"flag": true}))

	writeFile(t, filepath.Join(dir, configFile), `{"bos_token":7}`)
	_, err = Load(dir)
	require.ErrorContains(t, err, "bos_token")
}

// TestToolUse checks that the template tool_use is used for conversations with tools, as in
// transformers.
func TestToolUse(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, TemplateFile), "plain {{ tools is none }}")
	path := filepath.Join(dir, TemplateFolder, "tool_use.jinja")
	writeFile(t, path, "{{ tools[0].name }}")

	template, err := Load(dir)
	require.NoError(t, err)
	text, err := template.Render(hi, Options{})
	require.NoError(t, err)
	require.Equal(t, "plain True", text)
	withTools := Options{Variables: map[string]any{"tools": json.RawMessage(`[{"name":"now"}]`)}}
	text, err = template.Render(hi, withTools)
	require.NoError(t, err)
	require.Equal(t, "now", text)

	// A template that cannot be parsed matters only when it is used, and doesn't prevent copying it.
	writeFile(t, path, "{% block x %}")
	template, err = Load(dir)
	require.NoError(t, err)
	_, err = template.Render(hi, Options{})
	require.NoError(t, err)
	_, err = template.Render(hi, withTools)
	require.ErrorContains(t, err, `the template tool_use: line 1: the tag "block" is not supported`)
	sources, err := LoadSources(dir)
	require.NoError(t, err)
	require.Equal(t, Sources{"default": "plain {{ tools is none }}", "tool_use": "{% block x %}"}, sources)
}

// TestUnsupported checks that anything that isn't rendered as in Jinja2 causes an error that names
// it.
func TestUnsupported(t *testing.T) {
	for _, c := range []struct{ source, want string }{
		{"{% include '/etc/passwd' %}", `the tag "include" is not supported`},
		{"\n{% extends 'chat_template.jinja' %}", `line 2: the tag "extends" is not supported`},
		{"{% for x in y recursive %}{% endfor %}", "recursive loops are not supported"},
		{"{% for %}", "expected an expression, got end of statement block"},
		{"{% do x %}", `unknown tag "do"`},
		{"{{ (1 }}", `unexpected "}", expected ")"`},
		{"{{ range(1000000) }}", "more than 100000"},
		{"{{ strftime_now('%Q') }}", "%Q"},
		{"{{ messages | map('upper') }}", "printing a generator is not supported"},
		{"{{ messages[0].content.translate() }}", "the method translate"},
		{"{{ messages[0].content.append }}{{ messages[0].foo.bar }}", "has no attribute 'foo'"},
		{"{{ messages.append(1) }}", "the attribute 'append' of a value of type list is unsafe"},
		{"{{ messages[0].__class__ }}", "the attribute __class__ is not supported"},
		{"{{ 'x' | pprint }}", `the filter "pprint" is not supported`},
		{"{{ 'x' | nothing }}", `no filter named "nothing"`},
		{"{{ 'x' is nothing }}", `no test named "nothing"`},
		{"{{ 1 + 'a' }}", "+ is not supported between a value of type int and a value of type str"},
		{"{{ 1 // 0 }}", "division by zero"},
		{"{{ 2 ** 0.5 }}", "** with the exponent 0.5 is not supported"},
		{"{{ 1e308 * 10 }}", "infinite numbers and NaN are not supported"},
		{"{{ raise_exception('no') }}", "refuses the conversation: no"},
		{"{{ lipsum(99999999) }}", "the function lipsum is not supported"},
		{"{% set é = 1 %}", "the character 'é' outside of strings is not supported"},
		{"{{ '\\ud800' }}", "the escape \\ud800 in a string is not supported"},
		{"{{ x.y }}", "the variable x is undefined"},
		{"\xff", "not valid UTF-8"},
		{strings.Repeat("x", maxTemplate+1), "want at most"},
	} {
		template, err := Parse(c.source, nil)
		if err == nil {
			_, err = template.Render(hi, Options{})
		}
		require.ErrorContains(t, err, c.want, "%.80s", c.source)
	}
}

func TestVariables(t *testing.T) {
	template, err := Parse("{{ x }}{{ messages[0].content }}", nil)
	require.NoError(t, err)
	for _, c := range []struct {
		value any
		want  string
	}{
		{nil, "None"}, {1, "1"}, {1.5, "1.5"}, {"a", "a"}, {[]any{"a", nil, true}, "['a', None, True]"},
		{json.RawMessage(`{"z": 1, "a": [1e2, "\ud83d\ude00", 12345678901234567890]}`),
			"{'z': 1, 'a': [100.0, '😀', 12345678901234567890]}"},
	} {
		text, err := template.Render(hi, Options{Variables: map[string]any{"x": c.value}})
		require.NoError(t, err)
		require.Equal(t, c.want+"hi", text)
	}

	for name, c := range map[string]struct {
		value any
		want  string
	}{
		"x":        {map[string]any{}, "the variable x: a value of type map[string]interface {} is not supported"},
		"y":        {json.RawMessage(`{"a": "\ud83d"}`), "half a surrogate pair"},
		"z":        {json.RawMessage(`[1`), "unexpected EOF"},
		"messages": {1, "the variable messages cannot be set"},
	} {
		_, err := template.Render(hi, Options{Variables: map[string]any{name: c.value}})
		require.ErrorContains(t, err, c.want)
	}

	_, err = template.Render([]Message{{"user", "caf\xe9"}}, Options{})
	require.ErrorContains(t, err, "not valid UTF-8")
	_, err = template.RenderJSON([]byte(`{"role": "user"}`), Options{})
	require.ErrorContains(t, err, "want an array")
}

// TestHostileTemplates checks that templates that loop, recurse or grow endlessly are rejected
// quickly and without much memory.
func TestHostileTemplates(t *testing.T) {
	defer func(d time.Duration) { renderTimeout = d }(renderTimeout)
	const long = 2 * time.Minute // another limit ends the rendering, even on a slow machine
	double := "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}"
	for _, c := range []struct{ source, want string }{
		{"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "more than 32 macros call each other"},
		{"{% macro f(x) %}{{ x ~ x }}{% endmacro %}{{ " + strings.Repeat("f(", 30) + "'12345678'" +
			strings.Repeat(")", 30) + " }}", "more than 104"},
		{"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
			"takes longer than 200ms"},
		{"{% for i in range(99999) %}{% for j in range(99999) if j is even %}{% endfor %}" +
			"{% endfor %}", "takes longer than 200ms"},
		{double + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "more than 104"},
		{"{% set x = 'é' * 500000 %}{% for i in range(99999) %}{% set y = x.isupper() or x | upper %}{% endfor %}",
			"takes longer than 200ms"},
		{double + "{% set ns.x = ns.x + ns.x %}{% endfor %}", "more than 104"},
		{double + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}", ""},
		{double + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}", "more than 104"},
		{double + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == ns.x[0] }}", ""},
		{double + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{% set y = ns.x %}{% set ns.x = 'aaaaaaaa' %}" +
			double[strings.Index(double, "{% for"):] + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ y == ns.x }}",
			"takes longer than 200ms"},
		{double + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}", "a key has more than"},
		{double + "{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}", "more than 104"},
		{double + "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}", "more than 104"},
		{double + "{% set ns.x = ns.x | list | join(ns.x) %}{% endfor %}", "more than 104"},
		{double + "{% set ns.x = ns.x.join(ns.x | list) %}{% endfor %}", "more than 104"},
		{double + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}", "more than 104"},
		{double + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}", "more than 104"},
		{"{% set ns = namespace(x=1) %}{% for i in range(500) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
			"deeper than 200"},
		{"{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}", "deeper than 200"},
		{"{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = ns.x + [i] %}{% endfor %}",
			"bytes of memory"},
		{"{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + [messages[0].content * 400000] %}" +
			"{% endfor %}", "bytes of memory"},
		{"{% set x %}{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaa' }}{% endfor %}{% endset %}",
			"more than 104"},
		{"{% for i in range(99999) %}" + strings.Repeat("x", 1000) + "{% endfor %}",
			"more than 67108864 bytes"},
		{"{{ 'x' * 99999999999 }}", "more than 104"},
		{"{{ [1] * 99999999999 }}", "more than 104"},
		{"{{ 9 ** (9 ** 9) }}", "more than 4300 digits"},
		{"{{ 'x' | indent(99999999999) }}", "more than 104"},
		{"{{ 'x' | center(99999999999) }}", "more than 104"},
		{"{{ '%99999999999d' % 1 }}", "more than 104"},
		{"{{ '{:99999999999}'.format(1) }}", "more than 104"},
		{"{{ [1] | batch(99999999999, 1) | list }}", "more than 104"},
		{"{{ [1] | slice(99999999999) | list }}", "more than 104"},
		{"{{ [1] | tojson(indent=99999999999) }}", "more than 104"},
		{"{{ " + strings.Repeat("(", 65) + "1" + strings.Repeat(")", 65) + " }}", "deeper than 64"},
		{"{{ " + strings.Repeat("[", 1<<19) + " }}", "deeper than 64"},
		{"{{ " + strings.Repeat("not ", 1<<17) + "1 }}", "nested too deep"},
		{"{{ " + strings.Repeat("-", 1<<19) + "1 }}", "nested too deep"},
		{"{{ 1" + strings.Repeat("+1", 1<<18) + " }}", "more than 1000 operators"},
		{"{{ x" + strings.Repeat(".x", 1<<18) + " }}", "more than 1000 operators"},
		{"{{ 1" + strings.Repeat(" if 1 else 1", 1<<16) + " }}", "nested too deep"},
		{strings.Repeat("{% if 1 %}", 101) + strings.Repeat("{% endif %}", 101), "nested deeper than 100"},
		{strings.Repeat("{% for i in x %}", 1<<15), "nested deeper than 100"},
	} {
		if renderTimeout = long; strings.Contains(c.want, "longer") {
			renderTimeout = 200 * time.Millisecond
		}
		bounded.Run(t, 512<<20, func() { // most of the memory is freed again at once
			template, err := Parse(c.source, nil)
			if err == nil {
				_, err = template.Render(hi, Options{})
			}
			if c.want != "" {
				require.ErrorContains(t, err, c.want, "%.80s", c.source)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	for _, source := range []string{"{{ bos_token }}", "{#", "{{ '", "{%- raw -%} x {% endraw +%}",
		"{% for m in messages if m.role %}{{ loop.previtem }}{{ m | tojson(indent=2) }}{% else %}x{% endfor %}",
		"{{ ('%05.1f' % 2) if b else '{:>5}'.format(x) }}{{ [1, 2][::-1] | sort(reverse=true) | map('string') | list }}",
		"{% macro f(x, y=1) %}{{ x ~ f(x) }}{{ caller() }}{% endmacro %}{% call f(1) %}{% endcall %}",
		"{% set ns = namespace(x=[]) %}{% set ns.x = ns.x + [ns] %}{{ ns.x | join(ns.y * n) }}",
		"{% generation %}{{ strftime_now('%d %b %Y') }}{% endgeneration %}"} {
		f.Add(source, []byte(tokens))
	}

	renderTimeout = time.Second
	f.Add("", []byte(`{"bos_token":null,"chat_template":[{"name":"default","template":"x"}]}`))
	f.Fuzz(func(t *testing.T, source string, config []byte) {
		template, err := Parse(source, config)
		if err == nil {
			_, err = template.Render(hi, Options{Now: now})
		}
		if err != nil {
			require.NotContains(t, err.Error(), "the template engine failed")
		}
	})
}
