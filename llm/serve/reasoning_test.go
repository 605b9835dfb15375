package serve

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// thinkTemplate is a template of a model that marks its reasoning.
const thinkTemplate = `{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}
{% endfor %}{% if add_generation_prompt %}assistant: {% if started %}<think>
{% endif %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}`

// TestReasoning checks that the reasoning is separated from the answer, byte by byte, in both APIs.
func TestReasoning(t *testing.T) {
	for _, k := range []struct {
		text, more, reasoning, answer string
	}{
		{"<think>\nLet me see.\n\n</think>\n\nHello", "", "\nLet me see.", "Hello"},
		{"\n<think>a < b</think>x", "", "a < b", "x"},
		{"<think></think>\n\nHello", "", "", "Hello"},
		{"<think>no end </thin", "", "no end </thin", ""},
		{"Hello <think>a</think>", "", "", "Hello <think>a</think>"},
		{" Hello", "", "", " Hello"},
		{"<thin", "", "", "<thin"},
		{"<think>a</think>b", `,"reasoning_format":"none"`, "", "<think>a</think>b"},
		{"yes.\n</think>\nHello", `,"chat_template_kwargs":{"started":true}`, "yes.", "Hello"},
		{`{"a":1}`, `,"chat_template_kwargs":{"started":true},"response_format":{"type":"json_object"}`, "", `{"a":1}`},
	} {
		m := newModel(t, &fake{answer: bytewise(k.text)}, thinkTemplate)
		c := serveModel(t, m, Options{})
		body := `{"max_tokens":100,"temperature":0,"messages":[{"role":"user","content":"Hi"}]` + k.more
		message := c.ok(chatPath, body+"}").at("choices.0.message").(map[string]any)
		require.Equal(t, k.answer, message["content"], k.text)
		if k.reasoning == "" {
			require.NotContains(t, message, "reasoning_content")
		} else {
			require.Equal(t, k.reasoning, message["reasoning_content"], k.text)
		}

		var reasoning, answer strings.Builder
		for _, e := range c.stream(chatPath, body+`,"stream":true}`) {
			if s, ok := e.at("choices.0.delta.reasoning_content").(string); ok {
				require.Empty(t, answer.String(), "reasoning after the answer")
				reasoning.WriteString(s)
			}
			if s, ok := e.at("choices.0.delta.content").(string); ok {
				answer.WriteString(s)
			}
		}
		require.Equal(t, k.reasoning, reasoning.String(), k.text)
		require.Equal(t, k.answer, answer.String(), k.text)

		if k.more != "" {
			continue
		}
		content := c.ok(messagesPath, body+"}")["content"].([]any)
		var blocks []string
		for _, b := range content {
			block := b.(map[string]any)
			blocks = append(blocks, fmt.Sprint(block["type"], block["thinking"], block["text"]))
		}
		var want []string
		if k.reasoning != "" {
			want = append(want, "thinking"+k.reasoning+fmt.Sprint(nil))
		}
		if k.answer != "" || k.reasoning == "" {
			want = append(want, "text"+fmt.Sprint(nil)+k.answer)
		}
		require.Equal(t, want, blocks, k.text)

		reasoning.Reset()
		answer.Reset()
		starts, signed := []string{}, 0
		for _, e := range c.stream(messagesPath, body+`,"stream":true}`) {
			if e.name == "content_block_start" {
				starts = append(starts, e.at("content_block.type").(string))
			}
			if e.at("delta.type") == "signature_delta" {
				require.Equal(t, "thinking", starts[len(starts)-1])
				signed++
			}
			if s, ok := e.at("delta.thinking").(string); ok {
				reasoning.WriteString(s)
			}
			if s, ok := e.at("delta.text").(string); ok {
				answer.WriteString(s)
			}
		}
		require.Equal(t, k.reasoning, reasoning.String(), k.text)
		require.Equal(t, k.answer, answer.String(), k.text)
		require.Len(t, starts, len(want))
		require.Equal(t, strings.Count(strings.Join(starts, " "), "thinking"), signed)
	}
}

// TestThinking checks that a request of Anthropic's API chooses whether a model with reasoning uses it.
func TestThinking(t *testing.T) {
	var prompt string
	f := &fake{script: func(ids []int) []int {
		text, _ := tok.Decode(ids)
		prompt = string(text)
		return says("ok")
	}}
	c := serveModel(t, newModel(t, f, thinkTemplate), Options{})
	for thinking, want := range map[string]string{
		`null`: "user: Hi\nassistant: ",
		`{"type":"enabled","budget_tokens":1024}`: "user: Hi\nassistant: ",
		`{"type":"adaptive"}`:                     "user: Hi\nassistant: ",
		`{"type":"disabled"}`:                     "user: Hi\nassistant: <think></think>",
	} {
		body := `{"max_tokens":5,"messages":[{"role":"user","content":"Hi"}],"thinking":` + thinking + `}`
		a := c.ok(messagesPath, body)
		require.Equal(t, want, prompt, thinking)
		require.Equal(t, a.at("usage.input_tokens"), c.ok(messagesPath+"/count_tokens", body)["input_tokens"])
	}

	// A model without reasoning does not have to think.
	c = serve(t, &fake{answer: says("ok")}, Options{})
	for _, thinking := range []string{`{"type":"adaptive"}`, `{"type":"disabled"}`} {
		c.ok(messagesPath, `{"max_tokens":5,"messages":[{"role":"user","content":"Hi"}],"thinking":`+thinking+`}`)
	}
}

// TestReasoningOfOthers checks that the texts of models without reasoning keep such marks.
func TestReasoningOfOthers(t *testing.T) {
	c := serve(t, &fake{answer: bytewise("<think>a</think>b")}, Options{})
	a := c.ok(chatPath, `{"temperature":0,"messages":[{"role":"user","content":"Hi"}]}`)
	require.Equal(t, "<think>a</think>b", a.at("choices.0.message.content"))
}

// TestCachedTokens checks that both APIs report the tokens of a prompt that an earlier request has computed.
func TestCachedTokens(t *testing.T) {
	c := serveTiny(t, Options{})
	text := strings.Repeat("Permission is granted ", 4)
	first := c.ok(textPath, fmt.Sprintf(`{"prompt":%q,"max_tokens":3}`, text))
	require.EqualValues(t, 0, first.at("usage.prompt_tokens_details.cached_tokens"))
	all := first.at("usage.prompt_tokens").(float64)
	again := c.ok(textPath, fmt.Sprintf(`{"prompt":%q,"max_tokens":3,"n":3}`, text))
	require.Equal(t, all, again.at("usage.prompt_tokens"))
	require.Equal(t, all-1, again.at("usage.prompt_tokens_details.cached_tokens"), "the last token has to be computed")
	other := c.ok(textPath, `{"prompt":"copy","max_tokens":3}`)
	require.Less(t, other.at("usage.prompt_tokens_details.cached_tokens"), 3.0)

	body := fmt.Sprintf(`{"max_tokens":3,"messages":[{"role":"user","content":%q}]`, text)
	count := c.ok(messagesPath+"/count_tokens", body+"}").at("input_tokens").(float64)
	c.ok(messagesPath, body+"}")
	a := c.ok(messagesPath, body+"}")
	require.Equal(t, count-1, a.at("usage.cache_read_input_tokens"))
	require.EqualValues(t, 1, a.at("usage.input_tokens"))
	for _, e := range c.stream(messagesPath, body+`,"stream":true}`) {
		if e.name == "message_delta" {
			require.Equal(t, count-1, e.at("usage.cache_read_input_tokens"))
		}
	}

	metrics, err := io.ReadAll(c.do("GET", "/metrics", "").Body)
	require.NoError(t, err)
	require.Regexp(t, `(?m)^kasmina_cached_tokens_total [1-9]\d+$`, string(metrics))
}
