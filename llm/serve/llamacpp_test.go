package serve

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFormatsOfLlamaCpp checks response formats from the tests of llama.cpp's server.
func TestFormatsOfLlamaCpp(t *testing.T) {
	m := newModel(t, random{5}, chatTemplate)
	m.Context = 1024
	c := serveModel(t, m, Options{})
	for format, want := range map[string]string{
		`"response_format":{"type":"json_object","schema":{"const":"42"}}`:                      `^"42"$`,
		`"response_format":{"type":"json_object","schema":{"items":[{"type":"integer"}]}}`:      `^\[\s*(-?\d+)?\s*\]$`,
		`"response_format":{"type":"json_schema","json_schema":{"schema":{"const":"foooooo"}}}`: `^"foooooo"$`,
		`"json_schema":{"const":"42"}`:    `^"42"$`,
		`"grammar":"root ::= \"a\"{5,5}"`: `^aaaaa$`,
	} {
		a := c.ok(chatPath, with(format))
		require.Regexp(t, want, a.at("choices.0.message.content"), format)
		require.Equal(t, "stop", a.at("choices.0.finish_reason"))
	}

	for _, format := range []string{`{"type":"sound"}`, `{"type":"json_object","schema":123}`,
		`{"type":"json_object","schema":{"type":123}}`, `{"type":"json_object","schema":{"type":"hiccup"}}`} {
		status, e := c.post(chatPath, with(`"response_format":`+format))
		require.Equal(t, 400, status)
		require.Equal(t, "response_format", e.at("error.param"))
	}
}

// TestMixedPrompts checks prompts that mix tokens and text.
func TestMixedPrompts(t *testing.T) {
	var got []int
	c := serve(t, &fake{script: func(prompt []int) []int { got = prompt; return says("ok") }}, Options{})
	before, _ := tok.Affixes()
	encoded := tok.Encode([]byte("the copy"))
	for prompt, want := range map[string][]int{
		`[5,6,"the copy",7]`: append(append([]int{5, 6}, encoded...), 7),
		`["the copy",7]`:     append(append(append([]int{}, before...), encoded...), 7),
		`[[5,"the copy"]]`:   append([]int{5}, encoded...),
		`[5,6]`:              {5, 6},
	} {
		c.ok(textPath, `{"prompt":`+prompt+`}`)
		require.Equal(t, want, got, prompt)
	}
	for _, prompt := range []string{`[5,null]`, `[5,{}]`, `[1.5,"a"]`, `[["a",null,3]]`} {
		status, e := c.post(textPath, `{"prompt":`+prompt+`}`)
		require.Equal(t, 400, status, prompt)
		require.Equal(t, "prompt", e.at("error.param"))
	}
}

// TestTooLongStream checks that the server rejects a stream with too long a prompt before the stream
// starts, with an error code that clients can recognize.
func TestTooLongStream(t *testing.T) {
	c := serve(t, &fake{answer: says("ok")}, Options{})
	prompt := make([]int, 128)
	ids, err := json.Marshal(prompt)
	require.NoError(t, err)
	status, e := c.post(textPath, `{"stream":true,"prompt":`+string(ids)+`}`)
	require.Equal(t, 400, status)
	require.Equal(t, "context_length_exceeded", e.at("error.code"))
	require.Contains(t, e.at("error.message"), "128 tokens")
}

// TestSeveralChoices checks that the choices of a response differ, and that each choice is complete.
func TestSeveralChoices(t *testing.T) {
	c := serve(t, random{2}, Options{})
	a := c.ok(chatPath, with(`"n":3`, `"temperature":1`, `"max_tokens":8`, `"seed":1`))
	seen := map[any]bool{}
	for _, choice := range a.at("choices").([]any) {
		choice := object(choice.(map[string]any))
		require.Equal(t, "assistant", choice.at("message.role"))
		require.Contains(t, []any{"length", "stop"}, choice["finish_reason"])
		seen[choice.at("message.content")] = true
	}
	require.Len(t, seen, 3)

	// The same seed gives the same answers, and a different seed gives different answers.
	require.Equal(t, a.at("choices"), c.ok(chatPath, with(`"n":3`, `"temperature":1`, `"max_tokens":8`, `"seed":1`)).at("choices"))
	require.NotEqual(t, a.at("choices"), c.ok(chatPath, with(`"n":3`, `"temperature":1`, `"max_tokens":8`, `"seed":9`)).at("choices"))
}

// TestToolErrors checks that the model sees a failed tool's result, and the text before the result.
func TestToolErrors(t *testing.T) {
	var got []int
	m := newModel(t, &fake{script: func(prompt []int) []int { got = prompt; return says("ok") }}, chatTemplate)
	c := serveModel(t, m, Options{})
	body := `{"max_tokens":5,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"tool_use",` +
		`"id":"1","name":"f","input":{}}]},{"role":"user","content":[{"type":"text","text":"Here:"},{"type":"tool_result",` +
		`"tool_use_id":"1","is_error":true,"content":"not found"}]}]`
	c.ok(messagesPath, body+"}")
	text, err := tok.DecodeWhole(got)
	require.NoError(t, err)
	require.Contains(t, string(text), "tool: not found\n")
	require.Contains(t, string(text), "user: Here:\n")
	require.InDelta(t, len(got), c.ok(messagesPath+"/count_tokens", body+"}")["input_tokens"], 0)
}

// TestTextStream checks that the parts of a stream add up to the whole answer, with its log-probabilities, for several texts
// with several answers each.
func TestTextStream(t *testing.T) {
	c := serve(t, random{2}, Options{})
	for _, more := range []string{"", `,"logprobs":2`, `,"echo":true`, `,"stop":["e"]`, `,"max_tokens":0`} {
		body := `{"prompt":["ab","c"],"n":2,"seed":3,"temperature":1,"max_tokens":9` + more
		whole := c.ok(textPath, body+"}")

		events := c.stream(textPath, body+`,"stream":true,"stream_options":{"include_usage":true}}`)
		require.Equal(t, "[DONE]", events[len(events)-1].data)
		last := events[len(events)-2]
		require.Empty(t, last.at("choices"))
		require.Equal(t, whole["usage"], last.object["usage"])

		for i := range 4 {
			var text string
			var reasons, tokens, probs, offsets []any
			for _, e := range events[:len(events)-2] {
				require.Nil(t, e.object["usage"])
				if e.at("choices.0.index") != float64(i) {
					continue
				}
				text += e.at("choices.0.text").(string)
				if reason := e.at("choices.0.finish_reason"); reason != nil {
					reasons = append(reasons, reason)
				}
				if p, ok := e.at("choices.0.logprobs").(map[string]any); ok {
					tokens = append(tokens, p["tokens"].([]any)...)
					probs = append(probs, p["token_logprobs"].([]any)...)
					offsets = append(offsets, p["text_offset"].([]any)...)
				}
			}

			choice := object(whole.at("choices").([]any)[i].(map[string]any))
			require.Equal(t, choice["text"], text, more)
			require.Equal(t, []any{choice["finish_reason"]}, reasons, more)
			if strings.Contains(more, "logprobs") {
				require.Equal(t, choice.at("logprobs.tokens"), tokens)
				require.Equal(t, choice.at("logprobs.token_logprobs"), probs)
				require.Equal(t, choice.at("logprobs.text_offset"), offsets)
			} else {
				require.Empty(t, tokens)
			}
		}
	}
}
