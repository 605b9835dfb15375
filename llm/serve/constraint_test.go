package serve

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/sampler"
)

// random is a model with random logits. It prefers to end strings, arrays and objects.
type random struct{ seed uint64 }

func (m random) Generate(_ context.Context, _ []int, n int, s *sampler.Sampler) iter.Seq2[int, error] {
	return func(yield func(int, error) bool) {
		r := rand.New(rand.NewPCG(m.seed, 0))
		logits := make([]float32, 400)
		for range n {
			for id := range logits {
				logits[id] = float32(3 * r.NormFloat64())
				if text := string(tok.Bytes(id)); strings.ContainsAny(text, `"}]>`) {
					logits[id] += 4
				}
			}
			if !yield(sampler.Draw(s, logits)) {
				return
			}
		}
	}
}

const person = `{"type":"object","properties":{"name":{"type":"string","maxLength":20},` +
	`"age":{"type":"integer","minimum":0,"maximum":150}},"required":["name","age"],"additionalProperties":false}`

// valid checks that a text matches a schema.
func valid(t *testing.T, schema, text string) {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	require.NoError(t, err)
	c := jsonschema.NewCompiler()
	require.NoError(t, c.AddResource("schema.json", v))
	compiled, err := c.Compile("schema.json")
	require.NoError(t, err)
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	require.NoError(t, err, text)
	require.NoError(t, compiled.Validate(value), text)
}

// TestAnswerFormats checks that even a model with random logits answers in the requested format.
func TestAnswerFormats(t *testing.T) {
	isPerson := func(t *testing.T, text string) { valid(t, person, text) }
	isObject := func(t *testing.T, text string) {
		require.NoError(t, json.Unmarshal([]byte(text), &map[string]any{}), text)
	}
	for i, k := range []struct {
		path, member string
		check        func(t *testing.T, text string)
	}{
		{chatPath, `"response_format":{"type":"json_schema","json_schema":{"name":"person","strict":true,"schema":` + person + `}}`, isPerson},
		{chatPath, `"response_format":{"type":"json_object"}`, isObject},
		{chatPath, `"response_format":{"type":"json_object","schema":` + person + `}`, isPerson},
		{chatPath, `"json_schema":` + person, isPerson},
		{chatPath, `"guided_json":` + string(encode(person)), isPerson},
		{chatPath, `"guided_choice":["yes","no"]`, func(t *testing.T, text string) { require.Contains(t, []string{"yes", "no"}, text) }},
		{chatPath, `"grammar":"root ::= \"a\"{3} [b-d]+ \"!\""`, func(t *testing.T, text string) { require.Regexp(t, "^aaa[b-d]+!$", text) }},
		{textPath, `"json_schema":` + person, isPerson},
		{messagesPath, `"output_format":{"type":"json_schema","schema":` + person + `}`, isPerson},
		{messagesPath, `"output_config":{"effort":"low","format":{"type":"json_schema","schema":` + person + `}}`, isPerson},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			complete := 0
			for seed := range uint64(8) {
				m := newModel(t, random{seed}, chatTemplate)
				m.Context = 2048
				c := serveModel(t, m, Options{})
				body := `{"prompt":"a","max_tokens":400,"messages":[{"role":"user","content":"a"}],` + k.member
				a := c.ok(k.path, body+"}")
				text, reason := textOfAnswer(a)
				if reason == "length" || reason == "max_tokens" {
					require.InDelta(t, 400, firstOf(a.at("usage.completion_tokens"), a.at("usage.output_tokens")), 0)
					continue
				}
				complete++
				k.check(t, text)
				if k.path == chatPath && seed == 0 {
					events := c.stream(k.path, body+`,"stream":true,"seed":1}`)
					text, _ = joined(t, events, 0)
					k.check(t, text)
				}
			}
			require.Positive(t, complete, "no answer is complete")
		})
	}

	// A truncated answer reports the truncation.
	m := newModel(t, random{1}, chatTemplate)
	c := serveModel(t, m, Options{})
	a := c.ok(chatPath, with(`"json_schema":`+person, `"max_tokens":3`))
	require.Equal(t, "length", a.at("choices.0.finish_reason"))
}

// textOfAnswer returns the text of an answer of any API, and why it ended.
func textOfAnswer(a object) (text, reason string) {
	return firstOf(a.at("choices.0.message.content"), a.at("choices.0.text"), a.at("content.0.text")).(string),
		firstOf(a.at("choices.0.finish_reason"), a.at("stop_reason")).(string)
}

func firstOf(values ...any) any {
	for _, v := range values {
		if v != nil {
			return v
		}
	}
	return nil
}

// TestForcedCalls checks that a random model calls the tool that it must call, with valid arguments.
func TestForcedCalls(t *testing.T) {
	two := `"tools":[{"type":"function","function":{"name":"f","parameters":` + person + `}},` +
		`{"type":"function","function":{"name":"g","parameters":{"type":"object","properties":{"x":{"enum":[1,2]}},"required":["x"]}}}]`
	m := newModel(t, random{3}, toolTemplate)
	m.Context = 4096
	c := serveModel(t, m, Options{})
	for _, k := range []struct{ choice, names string }{
		{`"tool_choice":"required"`, "fg"},
		{`"tool_choice":{"type":"function","function":{"name":"g"}}`, "g"},
		{`"tool_choice":"required","parallel_tool_calls":false`, "fg"},
	} {
		for seed := range 5 {
			a := c.ok(chatPath, with(two, k.choice, `"max_tokens":1500`, `"temperature":1`, fmt.Sprintf(`"seed":%d`, seed)))
			if a.at("choices.0.finish_reason") == "length" {
				continue
			}
			require.Equal(t, "tool_calls", a.at("choices.0.finish_reason"))
			calls := a.at("choices.0.message.tool_calls").([]any)
			require.NotEmpty(t, calls)
			if strings.Contains(k.choice, "parallel") {
				require.Len(t, calls, 1)
			}
			for _, call := range calls {
				call := object(call.(map[string]any))
				name := call.at("function.name").(string)
				require.Contains(t, k.names, name)
				if name == "f" {
					valid(t, person, call.at("function.arguments").(string))
				}
			}
		}
	}

	// If the answer has a format, the model may still call a tool instead.
	for seed := range 10 {
		a := c.ok(chatPath, with(two, `"json_schema":`+person, `"max_tokens":1500`, `"temperature":1`, fmt.Sprintf(`"seed":%d`, seed)))
		if a.at("choices.0.finish_reason") == "stop" {
			valid(t, person, a.at("choices.0.message.content").(string))
		}
	}

	a := c.ok(messagesPath, `{"max_tokens":1500,"messages":[{"role":"user","content":"a"}],"tools":[{"name":"g","input_schema":`+
		`{"type":"object","properties":{"x":{"enum":[1,2]}},"required":["x"]}}],"tool_choice":{"type":"any"}}`)
	require.Equal(t, "tool_use", a["stop_reason"])
	require.Equal(t, "g", a.at("content.0.name"))

	status, e := c.post(chatPath, with(two, `"tool_choice":{"type":"function","function":{"name":"h"}}`))
	require.Equal(t, 400, status)
	require.Contains(t, e.at("error.message"), `no tool "h"`)
}

// TestMatchersAreKept checks that equal grammars share a matcher, and that only some are kept.
func TestMatchersAreKept(t *testing.T) {
	c := serveModel(t, newModel(t, random{1}, chatTemplate), Options{})
	m := c.server.matchers[c.server.models[0]]
	for i := range mostMatchers + 3 {
		for range 2 {
			c.ok(chatPath, with(fmt.Sprintf(`"guided_choice":["a%d"]`, i)))
		}
		require.Len(t, m.recent, min(i+1, mostMatchers))
	}
}
