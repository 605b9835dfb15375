package serve

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

const tiny = "../hf/testdata/tiny"

// endOfText is the token that ends a text of the model tiny.
const endOfText = 1

// A fake is a model that always gives the same answer, or what script returns for a prompt.
type fake struct {
	answer []int
	script func(prompt []int) []int
	wait   func(ctx context.Context) error // called before each token

	active, most atomic.Int64 // number of texts being generated, and its maximum so far
}

func (f *fake) Generate(ctx context.Context, prompt []int, n int, s *sampler.Sampler) iter.Seq2[int, error] {
	return func(yield func(int, error) bool) {
		active := f.active.Add(1)
		for most := f.most.Load(); active > most && !f.most.CompareAndSwap(most, active); {
			most = f.most.Load()
		}
		defer f.active.Add(-1)

		answer := f.answer
		if f.script != nil {
			answer = f.script(prompt)
		}
		for i := range n {
			if f.wait != nil {
				if err := f.wait(ctx); err != nil {
					yield(0, err)
					return
				}
			}
			if ctx.Err() != nil {
				yield(0, context.Cause(ctx))
				return
			}

			logits := make([]float32, 400)
			for id := range logits {
				logits[id] = -float32(id) / 100
			}
			logits[answer[i%len(answer)]] = 20
			if !yield(sampler.Draw(s, logits)) {
				return
			}
		}
	}
}

// slow returns a wait function that takes the given time.
func slow(d time.Duration) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

var tok = func() *tokenizers.Tokenizer {
	t, err := tokenizers.Load(tiny)
	if err != nil {
		panic(err)
	}
	return t
}()

// says returns the tokens of an answer, followed by endOfText.
func says(text string) []int { return append(tok.Encode([]byte(text)), endOfText) }

// bytewise returns a text with one token for each byte, followed by endOfText.
func bytewise(text string) (ids []int) {
	for _, b := range []byte(text) {
		for id := range tok.VocabSize() {
			if s, err := tok.DecodeWhole([]int{id}); err == nil && len(s) == 1 && s[0] == b {
				ids = append(ids, id)
				break
			}
		}
	}
	return append(ids, endOfText)
}

const chatTemplate = `{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}`

func newModel(t testing.TB, g Generator, template string) *Model {
	t.Helper()
	parsed, err := chat.Parse(template, nil)
	require.NoError(t, err)
	return &Model{Name: "tiny", Generator: g, Tokenizer: tok, Template: parsed, Context: 128, Vocab: 400,
		End: []int{endOfText}}
}

// A client sends requests to a server of a test.
type client struct {
	t      testing.TB
	server *Server
	url    string
	key    string
}

// serve starts a server of a model with chatTemplate and returns a client for it.
func serve(t testing.TB, g Generator, o Options) *client {
	return serveModel(t, newModel(t, g, chatTemplate), o)
}

func serveModel(t testing.TB, m *Model, o Options) *client {
	t.Helper()
	s, err := New(o, m)
	require.NoError(t, err)
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	return &client{t: t, server: s, url: h.URL}
}

func (c *client) do(method, path, body string, header ...string) *http.Response {
	c.t.Helper()
	r, err := http.NewRequestWithContext(c.t.Context(), method, c.url+path, strings.NewReader(body))
	require.NoError(c.t, err)
	if c.key != "" {
		r.Header.Set("Authorization", "Bearer "+c.key)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := http.DefaultClient.Do(r)
	require.NoError(c.t, err)
	c.t.Cleanup(func() { answer.Body.Close() })
	return answer
}

// An object is a JSON object.
type object map[string]any

// at returns the value at a path, such as "choices.0.text", or nil if there is none.
func (o object) at(path string) any {
	var v any = map[string]any(o)
	for _, key := range strings.Split(path, ".") {
		switch x := v.(type) {
		case map[string]any:
			v = x[key]
		case []any:
			i := int(key[0] - '0')
			if i >= len(x) {
				return nil
			}
			v = x[i]
		default:
			return nil
		}
	}
	return v
}

// post sends a request and returns the answer.
func (c *client) post(path, body string) (int, object) {
	c.t.Helper()
	answer := c.do("POST", path, body)
	text, err := io.ReadAll(answer.Body)
	require.NoError(c.t, err)
	var o object
	require.NoError(c.t, json.Unmarshal(text, &o), "%s", text)
	return answer.StatusCode, o
}

// ok sends a request that must succeed.
func (c *client) ok(path, body string) object {
	c.t.Helper()
	status, o := c.post(path, body)
	require.Equal(c.t, 200, status, "%v", o)
	return o
}

// A serverEvent is an event of a stream.
type serverEvent struct {
	name string
	data string
	object
}

// stream sends a request and returns the events.
func (c *client) stream(path, body string) (events []serverEvent) {
	c.t.Helper()
	return c.events(c.do("POST", path, body))
}

// events returns the events of an answer.
func (c *client) events(answer *http.Response) (events []serverEvent) {
	c.t.Helper()
	if answer.StatusCode != 200 {
		text, _ := io.ReadAll(answer.Body)
		c.t.Fatalf("status %d: %s", answer.StatusCode, text)
	}
	require.Equal(c.t, "text/event-stream", answer.Header.Get("Content-Type"))

	var e serverEvent
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		switch line := lines.Text(); {
		case line == "":
			if e.data != "[DONE]" {
				require.NoError(c.t, json.Unmarshal([]byte(e.data), &e.object), "%s", e.data)
			}
			events = append(events, e)
			e = serverEvent{}
		case strings.HasPrefix(line, "event: "):
			e.name = line[len("event: "):]
		case strings.HasPrefix(line, "data: "):
			e.data = line[len("data: "):]
		default:
			c.t.Fatalf("unexpected line %q", line)
		}
	}
	require.NoError(c.t, lines.Err())
	return events
}

const (
	chatPath     = "/v1/chat/completions"
	textPath     = "/v1/completions"
	messagesPath = "/v1/messages"
)

// with returns a request to answer "Hi" with more members, such as `"n":2`.
func with(members ...string) string {
	return `{` + strings.Join(append([]string{`"messages":[{"role":"user","content":"Hi"}]`,
		`"temperature":0`}, members...), ",") + `}`
}

// joined returns the text of a choice in a stream of the chat API.
func joined(t testing.TB, events []serverEvent, choice int) (text, reason string) {
	for _, e := range events {
		if e.data == "[DONE]" || e.at("choices.0") == nil || e.at("choices.0.index") != float64(choice) {
			continue
		}
		if s, ok := e.at("choices.0.delta.content").(string); ok {
			require.NotContains(t, s, "\uFFFD")
			text += s
		}
		if s, ok := e.at("choices.0.finish_reason").(string); ok {
			reason = s
		}
	}
	return text, reason
}

// TestChat checks the members of an answer.
func TestChat(t *testing.T) {
	var prompt []int
	c := serve(t, &fake{script: func(p []int) []int { prompt = p; return says("Hello there!") }}, Options{})
	began := time.Now().Unix()
	a := c.ok(chatPath, with())
	ended := time.Now().Unix()
	require.Equal(t, "Hello there!", a.at("choices.0.message.content"))
	require.Equal(t, "assistant", a.at("choices.0.message.role"))
	require.Equal(t, "stop", a.at("choices.0.finish_reason"))
	require.Equal(t, "chat.completion", a["object"])
	require.Equal(t, "tiny", a["model"])
	require.Regexp(t, "^chatcmpl-", a["id"])
	require.GreaterOrEqual(t, a["created"], float64(began))
	require.LessOrEqual(t, a["created"], float64(ended))

	want := tok.Encode([]byte("user: Hi\nassistant: "))
	require.Equal(t, want, prompt)
	require.InDelta(t, len(want), a.at("usage.prompt_tokens"), 0)
	require.InDelta(t, len(says("Hello there!")), a.at("usage.completion_tokens"), 0)
	require.InDelta(t, len(want)+len(says("Hello there!")), a.at("usage.total_tokens"), 0)
}

// TestChatStream checks the events of a stream, and that their texts add up to the whole answer.
func TestChatStream(t *testing.T) {
	text := "Grüße, 世界! 🎉 done"
	c := serve(t, &fake{answer: bytewise(text)}, Options{})
	require.Equal(t, text, c.ok(chatPath, with()).at("choices.0.message.content"))

	events := c.stream(chatPath, with(`"stream":true`))
	got, reason := joined(t, events, 0)
	require.Equal(t, text, got)
	require.Equal(t, "stop", reason)
	require.Equal(t, "assistant", events[0].at("choices.0.delta.role"))
	require.Equal(t, "[DONE]", events[len(events)-1].data)
	for _, e := range events[:len(events)-1] {
		require.Equal(t, events[0].at("id"), e.at("id"))
		require.Equal(t, "chat.completion.chunk", e.at("object"))
		require.NotContains(t, e.object, "usage")
	}
	require.Equal(t, map[string]any{}, events[len(events)-2].at("choices.0.delta"))

	events = c.stream(chatPath, with(`"stream":true`, `"stream_options":{"include_usage":true}`))
	last := events[len(events)-2]
	require.Empty(t, last.at("choices"))
	require.InDelta(t, len(bytewise(text)), last.at("usage.completion_tokens"), 0)
	require.Contains(t, events[0].object, "usage")
	require.Nil(t, events[0].at("usage"))
}

// TestStop checks that stop texts end an answer and never appear, wherever tokens divide them.
func TestStop(t *testing.T) {
	for _, k := range []struct{ answer, stop, want, reason string }{
		{"one two three", `" two"`, "one", "stop"},
		{"one two three", `["three","two"]`, "one ", "stop"},
		{"one two three", `"four"`, "one two three", "stop"},
		{"aaab", `"aab"`, "a", "stop"},
		{"ababac", `["abac"]`, "ab", "stop"},
		{"one", `"one"`, "", "stop"},
		{"one ", `" two"`, "one ", "stop"}, // the start of a stop text at the end
		{"ab", `["abc","b"]`, "a", "stop"}, // one is complete while another may come
		{"x世y", `"世"`, "x", "stop"},        // within a character
		{"x世", `"世界"`, "x世", "stop"},       // its start at the end
		{"User: a\nUser: b", `"\nUser:"`, "User: a", "stop"},
	} {
		for name, ids := range map[string][]int{"tokens": says(k.answer), "bytes": bytewise(k.answer)} {
			c := serve(t, &fake{answer: ids}, Options{})
			a := c.ok(chatPath, with(`"stop":`+k.stop))
			require.Equal(t, k.want, a.at("choices.0.message.content"), "%s %v", name, k)
			require.Equal(t, k.reason, a.at("choices.0.finish_reason"))
			text, _ := joined(t, c.stream(chatPath, with(`"stop":`+k.stop, `"stream":true`)), 0)
			require.Equal(t, k.want, text, "%s %v", name, k)
		}
	}
}

// TestLength checks that an answer ends at the limit or when the context is full.
func TestLength(t *testing.T) {
	c := serve(t, &fake{answer: bytewise("x")[:1]}, Options{})
	prompt := len(tok.Encode([]byte("user: Hi\nassistant: ")))
	for body, want := range map[string]int{
		with(`"max_tokens":3`):                              3,
		with(`"max_completion_tokens":5`, `"max_tokens":3`): 5,
		with(`"max_tokens":1000`):                           128 - prompt,
		with():                                              128 - prompt,
	} {
		a := c.ok(chatPath, body)
		require.Equal(t, strings.Repeat("x", want), a.at("choices.0.message.content"))
		require.Equal(t, "length", a.at("choices.0.finish_reason"))
	}

	// A character that is cut by the limit is not emitted as if it were complete.
	c = serve(t, &fake{answer: bytewise("a世")}, Options{})
	a := c.ok(chatPath, with(`"max_tokens":3`))
	require.Equal(t, "a\uFFFD\uFFFD", a.at("choices.0.message.content"))

	// OpenAI's older API draws 16 tokens unless asked otherwise, and may draw none.
	c = serve(t, &fake{answer: bytewise("x")[:1]}, Options{})
	require.Equal(t, strings.Repeat("x", 16), c.ok(textPath, `{"prompt":"a"}`).at("choices.0.text"))
	require.Equal(t, "ab", c.ok(textPath, `{"prompt":"ab","max_tokens":0,"echo":true}`).at("choices.0.text"))

	long := strings.Repeat("z", 128)
	status, e := c.post(textPath, `{"prompt":"`+long+`"}`)
	require.Equal(t, 400, status)
	require.Equal(t, "context_length_exceeded", e.at("error.code"))
	require.Equal(t, "prompt", e.at("error.param"))
}

// TestPrompts checks the forms of a prompt.
func TestPrompts(t *testing.T) {
	before, _ := tok.Affixes()
	f := &fake{script: func(p []int) []int { return append(p[len(before):len(p):len(p)], endOfText) }}
	c := serve(t, f, Options{Slots: 2})
	ids := tok.Encode([]byte("cd"))
	raw, err := json.Marshal(append(before, ids...))
	require.NoError(t, err)
	for prompt, want := range map[string][]any{
		`"ab"`:                      {"ab"},
		`["ab","cd","ef"]`:          {"ab", "cd", "ef"},
		string(raw):                 {"cd"},
		`[` + string(raw) + `,"x"]`: {"cd", "x"},
	} {
		a := c.ok(textPath, `{"prompt":`+prompt+`,"n":2,"max_tokens":50}`)
		require.Len(t, a["choices"], 2*len(want))
		for i := range 2 * len(want) {
			require.InDelta(t, i, a.at("choices."+string(rune('0'+i))+".index"), 0)
			require.Equal(t, want[i/2], a.at("choices."+string(rune('0'+i))+".text"))
		}
	}
	require.LessOrEqual(t, f.most.Load(), int64(2), "more texts at the same time than slots")

	a := c.ok(textPath, `{"prompt":"ab","echo":true}`)
	require.Equal(t, "abab", a.at("choices.0.text"))
	require.Equal(t, "text_completion", a["object"])
}

// TestMessagesForTemplate checks the text that a model sees.
func TestMessagesForTemplate(t *testing.T) {
	template := `{{ messages|tojson }}{% if tools %}{{ tools|tojson }}{% endif %}{% if add_generation_prompt %}>{% endif %}{{ extra }}`
	var prompt string
	f := &fake{script: func(p []int) []int {
		text, _ := tok.Decode(p)
		prompt = string(text)
		return says("ok")
	}}
	m := newModel(t, f, template)
	m.Context = 4096
	c := serveModel(t, m, Options{})
	for body, want := range map[string]string{
		`{"messages":[{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`: `[{"role": "system", "content": "a\nb"}]>`,
		`{"messages":[{"role":"assistant","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"z\":1,\"a\":[]}"}}]},` +
			`{"role":"tool","tool_call_id":"c1","content":"r"}],"chat_template_kwargs":{"extra":"!"}}`: `[{"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", ` +
			`"arguments": {"z": 1, "a": []}}}]}, {"role": "tool", "content": "r", "tool_call_id": "c1"}]>!`,
		`{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"b":1,"a":2}}}]}`: `[{"role": "user", "content": "a"}][{"type": "function", "function": {"name": "f", ` +
			`"parameters": {"b": 1, "a": 2}}}]>`,
		`{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none"}`: `[{"role": "user", "content": "a"}]>`,
		`{"messages":[{"role":"assistant","content":"abc"}],"continue_final_message":true}`:                                       `[{"role": "assistant", "content": "abc`,
	} {
		c.ok(chatPath, body)
		require.Equal(t, want, prompt)
	}

	for body, want := range map[string]string{
		`{"max_tokens":5,"system":"s","messages":[{"role":"user","content":"a"}]}`:                                             `[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]>`,
		`{"max_tokens":5,"messages":[{"role":"user","content":"a"},{"role":"system","content":[{"type":"text","text":"s"}]}]}`: `[{"role": "user", "content": "a"}, {"role": "system", "content": "s"}]>`,
		`{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"text","text":"a"}]},{"role":"assistant","content":"b"}]}`: `[{"role": "user", "content": "a"}, ` +
			`{"role": "assistant", "content": "b`,
		`{"max_tokens":5,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t1","name":"f","input":{"x":1}}]},` +
			`{"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":"r"},{"type":"text","text":"go"}]}],` +
			`"tools":[{"name":"f","input_schema":{"type":"object"}}]}`: `[{"role": "assistant", "content": "", "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", ` +
			`"arguments": {"x": 1}}}]}, {"role": "tool", "content": "r", "tool_call_id": "t1"}, {"role": "user", "content": "go"}]` +
			`[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]>`,
	} {
		a := c.ok(messagesPath, body)
		require.Equal(t, want, prompt)
		delete(a, "x")
		n := c.ok(messagesPath+"/count_tokens", body)
		require.Equal(t, a.at("usage.input_tokens"), n["input_tokens"])
		require.Equal(t, n, c.ok(messagesPath+"/count_tokens", strings.Replace(body, `"max_tokens":5,`, "", 1)))
	}
}

// TestLogProbs checks log-probabilities in both of OpenAI's APIs. The concatenated tokens must equal the text, or start with
// it if a stop text has cut it.
func TestLogProbs(t *testing.T) {
	c := serve(t, &fake{answer: says("Permission granted. Stop here")}, Options{})
	for _, more := range []string{"", `,"stop":" here"`, `,"max_tokens":3`} {
		a := c.ok(chatPath, with(`"logprobs":true`, `"top_logprobs":3`+more))
		content := a.at("choices.0.message.content").(string)
		var all strings.Builder
		for _, p := range a.at("choices.0.logprobs.content").([]any) {
			p := object(p.(map[string]any))
			require.InDelta(t, 0, p["logprob"], 1e-3)
			require.Len(t, p["top_logprobs"], 3)
			require.Equal(t, p["token"], p.at("top_logprobs.0.token"))
			require.Len(t, p["bytes"], len(p["token"].(string)))
			all.WriteString(p["token"].(string))
		}
		require.True(t, strings.HasPrefix(all.String(), content), "%q %q", all.String(), content)
		if !strings.Contains(more, "stop") {
			require.Equal(t, content, all.String())
		}

		var streamed strings.Builder
		for _, e := range c.stream(chatPath, with(`"stream":true`, `"logprobs":true`, `"top_logprobs":3`+more)) {
			if list, ok := e.at("choices.0.logprobs.content").([]any); ok {
				for _, p := range list {
					streamed.WriteString(p.(map[string]any)["token"].(string))
				}
			}
		}
		require.Equal(t, all.String(), streamed.String())
	}

	a := c.ok(textPath, `{"prompt":"a","temperature":0,"logprobs":2,"max_tokens":3}`)
	require.Len(t, a.at("choices.0.logprobs.tokens"), 3)
	require.Len(t, a.at("choices.0.logprobs.token_logprobs"), 3)
	require.Len(t, a.at("choices.0.logprobs.top_logprobs.0"), 2)
	require.InDelta(t, 0, a.at("choices.0.logprobs.text_offset.0"), 0)
	require.InDelta(t, len(a.at("choices.0.logprobs.tokens.0").(string)), a.at("choices.0.logprobs.text_offset.1"), 0)
	require.Nil(t, c.ok(chatPath, with()).at("choices.0.logprobs"))
}

// TestSampling checks that settings reach the sampler.
func TestSampling(t *testing.T) {
	answer := says("e")
	c := serve(t, &fake{answer: answer}, Options{})
	e, text := answer[0], func(members ...string) any {
		return c.ok(chatPath, with(append(members, `"max_tokens":1`)...)).at("choices.0.message.content")
	}
	id, err := json.Marshal(e)
	require.NoError(t, err)
	require.Equal(t, "e", text())
	require.NotEqual(t, "e", text(`"logit_bias":{"`+string(id)+`":-100}`))
	require.NotEqual(t, "e", text(`"logit_bias":{"`+string(id)+`":-50}`))
	require.Equal(t, "", text(`"stop_token_ids":[`+string(id)+`]`))

	// At a high temperature, texts depend on the seed, and choices differ.
	hot := func(seed string) any {
		return c.ok(chatPath, with(`"temperature":50`, `"max_tokens":20`, `"n":2`, seed))["choices"]
	}
	require.Equal(t, hot(`"seed":7`), hot(`"seed":7`))
	require.NotEqual(t, hot(`"seed":7`), hot(`"seed":8`))
	require.NotEqual(t, hot(`"seed":null`), hot(`"seed":null`))
	both := hot(`"seed":-7`).([]any)
	require.NotEqual(t, both[0].(map[string]any)["message"], both[1].(map[string]any)["message"])
	for _, narrow := range []string{`"top_k":1`, `"top_p":0`, `"min_p":1`} {
		require.Equal(t, "e", text(`"temperature":50`, narrow), narrow)
	}

	// A repetition penalty includes the prompt.
	biased := func(more string) any {
		return c.ok(textPath, fmt.Sprintf(`{"prompt":[%d],"temperature":0,"max_tokens":1,"logit_bias":{"%d":10}%s}`,
			e, bytewise("z")[0], more)).at("choices.0.text")
	}
	require.Equal(t, "e", biased(""))
	require.Equal(t, "z", biased(`,"repetition_penalty":100`))

	// Other penalties count only tokens that have been drawn.
	a := c.ok(textPath, `{"prompt":"a","temperature":0,"max_tokens":30,"presence_penalty":2,"frequency_penalty":2,"ignore_eos":true}`)
	b := c.ok(textPath, `{"prompt":"a","temperature":0,"max_tokens":30,"ignore_eos":true}`)
	require.NotEqual(t, a.at("choices.0.text"), b.at("choices.0.text"))
}

const toolTemplate = `{% if tools %}Answer with <tool_call>{"name": …, "arguments": …}</tool_call>.
{{ tools|tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}`

const tools = `"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]`

// TestToolCalls checks which parts of an answer become tool calls. Invalid calls remain text.
func TestToolCalls(t *testing.T) {
	call := `<tool_call>
{"name": "f", "arguments": {"x": "<b>"}}
</tool_call>`
	for _, k := range []struct {
		answer, more, text string
		calls              int
		reason             string
	}{
		{"no call", "", "no call", 0, "stop"},
		{call, "", "", 1, "tool_calls"},
		{"Let me see.\n" + call, "", "Let me see.", 1, "tool_calls"},
		{call + "\n" + call, "", "", 2, "tool_calls"},
		{call + "\n" + call, `,"parallel_tool_calls":false`, "", 1, "tool_calls"},
		{call + " and more \n", "", " and more \n", 1, "tool_calls"},
		{"a \n<tool_call>broken</tool_call> b", "", "a \n<tool_call>broken</tool_call> b", 0, "stop"},
		{"a <tool_call>{\"name\":\"f\"", "", "a <tool_call>{\"name\":\"f\"", 0, "stop"},
		{"1 < 2 <tool", "", "1 < 2 <tool", 0, "stop"},
		{"text \n", "", "text \n", 0, "stop"},
		{`<tool_call>{"name":"f","arguments":[1]}</tool_call>`, "", `<tool_call>{"name":"f","arguments":[1]}</tool_call>`, 0, "stop"},
	} {
		m := newModel(t, &fake{answer: bytewise(k.answer)}, toolTemplate)
		m.Context = 2048
		c := serveModel(t, m, Options{})
		a := c.ok(chatPath, with(tools+k.more))
		text, _ := a.at("choices.0.message.content").(string)
		require.Equal(t, k.text, text)
		require.Equal(t, k.reason, a.at("choices.0.finish_reason"))
		calls, _ := a.at("choices.0.message.tool_calls").([]any)
		require.Len(t, calls, k.calls)
		for _, c := range calls {
			c := object(c.(map[string]any))
			require.Equal(t, "f", c.at("function.name"))
			require.Equal(t, `{"x": "<b>"}`, c.at("function.arguments"))
			require.Regexp(t, "^call_", c["id"])
		}

		events := c.stream(chatPath, with(tools+k.more, `"stream":true`))
		text, reason := joined(t, events, 0)
		require.Equal(t, k.text, text)
		require.Equal(t, k.reason, reason)
		n := 0
		for _, e := range events {
			if call := e.at("choices.0.delta.tool_calls.0"); call != nil {
				require.InDelta(t, n, object(call.(map[string]any))["index"], 0)
				n++
			}
		}
		require.Equal(t, k.calls, n)

		// Without tools, everything is text.
		require.Equal(t, k.answer, c.ok(chatPath, with()).at("choices.0.message.content"))
	}
}

// TestMessages checks the answers of Anthropic's API, whole and streamed.
func TestMessages(t *testing.T) {
	body := `{"max_tokens":300,"temperature":0,"messages":[{"role":"user","content":"Hi"}],` +
		`"stop_sequences":["STOP"],"top_p":0.9,"top_k":40,"metadata":{"user_id":"me"},"tools":[{"name":"f","input_schema":{}}]`
	for _, k := range []struct {
		answer, want, reason string
		stop                 any
		calls                int
	}{
		{"Hello", "Hello", "end_turn", nil, 0},
		{"Hello STOP", "Hello ", "stop_sequence", "STOP", 0},
		{strings.Repeat("x", 400), strings.Repeat("x", 300), "max_tokens", nil, 0},
		{`ok <tool_call>{"name":"f","arguments":{"a":1}}</tool_call>`, "ok", "tool_use", nil, 1},
		{"", "", "end_turn", nil, 0},
	} {
		m := newModel(t, &fake{answer: bytewise(k.answer)}, toolTemplate)
		m.Context = 2048
		c := serveModel(t, m, Options{})
		a := c.ok(messagesPath, body+"}")
		require.Equal(t, "message", a["type"])
		require.Equal(t, "assistant", a["role"])
		require.Equal(t, k.reason, a["stop_reason"])
		require.Equal(t, k.stop, a["stop_sequence"])
		require.Equal(t, k.want, a.at("content.0.text"))
		require.Len(t, a["content"], 1+k.calls)

		var text, names strings.Builder
		var input, reason string
		started, stopped := 0, 0
		for _, e := range c.stream(messagesPath, body+`,"stream":true}`) {
			require.Equal(t, e.name, e.at("type"))
			switch index := e.at("index"); e.name { // blocks follow each other
			case "content_block_start":
				require.InDelta(t, started, index, 0)
				require.Equal(t, started, stopped)
				started++
			case "content_block_delta":
				require.InDelta(t, started-1, index, 0)
			case "content_block_stop":
				require.InDelta(t, stopped, index, 0)
				stopped++
			}
			if e.name != "content_block_delta" {
				names.WriteString(e.name + " ")
			}
			if s, ok := e.at("delta.text").(string); ok {
				text.WriteString(s)
			}
			if s, ok := e.at("delta.partial_json").(string); ok {
				input += s
			}
			if e.name == "message_delta" {
				reason = e.at("delta.stop_reason").(string)
				require.Equal(t, a.at("usage.output_tokens"), e.at("usage.output_tokens"))
			}
		}
		block := "content_block_start content_block_stop "
		require.Equal(t, "message_start "+strings.Repeat(block, 1+k.calls)+"message_delta message_stop ", names.String())
		require.Equal(t, k.want, text.String())
		require.Equal(t, k.reason, reason)
		if k.calls > 0 {
			require.Equal(t, map[string]any{"a": 1.0}, a.at("content.1.input"))
			require.JSONEq(t, `{"a":1}`, input)
		}
	}
}

// TestErrors checks that every bad request gets a status and names the parameter.
func TestErrors(t *testing.T) {
	c := serve(t, &fake{answer: says("ok")}, Options{MaxBody: 5000})
	for _, k := range []struct {
		path, body string
		status     int
		param      any
	}{
		{chatPath, ``, 400, nil},
		{chatPath, `{`, 400, nil},
		{chatPath, `[]`, 400, nil},
		{chatPath, `null`, 400, nil},
		{chatPath, "\xff", 400, nil},
		{chatPath, strings.Repeat("[", 4000), 400, nil},
		{chatPath, `{"a":"` + strings.Repeat("a", 5000) + `"}`, 413, nil},
		{chatPath, `{}`, 400, "messages"},
		{chatPath, `{"messages":"a"}`, 400, "messages"},
		{chatPath, `{"messages":[]}`, 400, "messages"},
		{chatPath, `{"messages":[123]}`, 400, "messages.0"},
		{chatPath, `{"messages":[{}]}`, 400, "messages.0.role"},
		{chatPath, `{"messages":[{"role":123}]}`, 400, "messages.0"},
		{chatPath, `{"messages":[{"role":"user"}]}`, 400, "messages.0.content"},
		{chatPath, `{"messages":[{"role":"user","content":1}]}`, 400, "messages.0.content"},
		{chatPath, `{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, 400, "messages.0.content.0"},
		{chatPath, `{"messages":[{"role":"user","content":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + `}]}`, 400, "messages.0.content"},
		{chatPath, `{"messages":[{"role":"user","content":"` + strings.Repeat("a", 400) + `"}]}`, 400, "messages"},
		{chatPath, with(`"model":"other"`), 404, "model"},
		{chatPath, with(`"model":5`), 400, "model"},
		{chatPath, with(`"temperature":-1`), 400, "temperature"},
		{chatPath, with(`"temperature":"hot"`), 400, "temperature"},
		{chatPath, with(`"temperature":1e999`), 400, "temperature"},
		{chatPath, with(`"top_p":1.5`), 400, "top_p"},
		{chatPath, with(`"top_k":1.5`), 400, "top_k"},
		{chatPath, with(`"min_p":2`), 400, "min_p"},
		{chatPath, with(`"presence_penalty":3`), 400, "presence_penalty"},
		{chatPath, with(`"frequency_penalty":-3`), 400, "frequency_penalty"},
		{chatPath, with(`"repetition_penalty":0`), 400, "repetition_penalty"},
		{chatPath, with(`"logit_bias":{"x":1}`), 400, "logit_bias"},
		{chatPath, with(`"logit_bias":{"400":1}`), 400, "logit_bias"},
		{chatPath, with(`"logit_bias":{"1":101}`), 400, "logit_bias"},
		{chatPath, with(`"max_tokens":0`), 400, "max_tokens"},
		{chatPath, with(`"max_completion_tokens":-1`), 400, "max_completion_tokens"},
		{chatPath, with(`"n":0`), 400, "n"},
		{chatPath, with(`"n":1000`), 400, "n"},
		{chatPath, with(`"seed":1.5`), 400, "seed"},
		{chatPath, with(`"stop":5`), 400, "stop"},
		{chatPath, with(`"stop":""`), 400, "stop"},
		{chatPath, with(`"stream":"yes"`), 400, "stream"},
		{chatPath, with(`"stream_options":{"include_usage":true}`), 400, "stream_options"},
		{chatPath, with(`"top_logprobs":2`), 400, "top_logprobs"},
		{chatPath, with(`"logprobs":true`, `"top_logprobs":21`), 400, "top_logprobs"},
		{chatPath, with(`"response_format":5`), 400, "response_format"},
		{chatPath, with(`"response_format":{"type":"sound"}`), 400, "response_format"},
		{chatPath, with(`"response_format":{"type":"json_schema","json_schema":{}}`), 400, "response_format"},
		{chatPath, with(`"response_format":{"type":"json_schema","json_schema":{"schema":{"uniqueItems":true}}}`), 400, "response_format"},
		{chatPath, with(`"response_format":{"type":"json_object"}`, `"json_schema":{}`), 400, "json_schema"},
		{chatPath, with(`"guided_choice":[]`), 400, "guided_choice"},
		{chatPath, with(`"guided_regex":"a"`), 400, "guided_regex"},
		{chatPath, with(`"functions":[{"name":"f"}]`), 400, "functions"},
		{chatPath, with(`"grammar":"root ::= a"`), 400, "grammar"},
		{chatPath, with(`"tools":5`), 400, "tools"},
		{chatPath, with(`"tools":[{"type":"function"}]`), 400, "tools"},
		{chatPath, with(tools, `"tool_choice":"required"`), 400, "tool_choice"},
		{chatPath, with(tools, `"tool_choice":{"type":"function"}`), 400, "tool_choice"},
		{chatPath, with(`"tool_choice":"required"`), 400, "tool_choice"},
		{chatPath, with(tools, `"response_format":{"type":"json_object"}`), 400, "response_format"},
		{chatPath, with(tools, `"parallel_tool_calls":false`), 400, "parallel_tool_calls"},
		{chatPath, with(`"stop_token_ids":[400]`), 400, "stop_token_ids"},
		{chatPath, with(`"chat_template":"x"`), 400, "chat_template"},
		{chatPath, with(`"chat_template_kwargs":{"messages":1}`), 400, "messages"},
		{textPath, `{}`, 400, "prompt"},
		{textPath, `{"prompt":5}`, 400, "prompt"},
		{textPath, `{"prompt":[]}`, 400, "prompt"},
		{textPath, `{"prompt":[400]}`, 400, "prompt"},
		{textPath, `{"prompt":[-1]}`, 400, "prompt"},
		{textPath, `{"prompt":["a",{}]}`, 400, "prompt"},
		{textPath, `{"prompt":["a","b"],"n":128}`, 400, "prompt"},
		{textPath, `{"prompt":"a","best_of":3}`, 400, "best_of"},
		{textPath, `{"prompt":"a","best_of":1,"n":2}`, 400, "best_of"},
		{textPath, `{"prompt":"a","suffix":"b"}`, 400, "suffix"},
		{textPath, `{"prompt":"a","echo":true,"logprobs":1}`, 400, "echo"},
		{"/v1/audio/speech", `{}`, 404, nil},
	} {
		status, e := c.post(k.path, k.body)
		require.Equal(t, k.status, status, "%.200s: %v", k.body, e)
		require.Equal(t, k.param, e.at("error.param"), "%.200s: %v", k.body, e)
		require.NotEmpty(t, e.at("error.message"))
		require.NotEmpty(t, e.at("error.type"))
	}

	for _, k := range []struct{ body, message string }{
		{`{"messages":[{"role":"user","content":"a"}]}`, "max_tokens"},
		{`{"max_tokens":5}`, "messages"},
		{`{"max_tokens":5,"messages":[{"role":"tool","content":"a"}]}`, "messages.0.role"},
		{`{"max_tokens":5,"messages":[{"role":"user","content":[]}]}`, "messages.0.content"},
		{`{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"image"}]}]}`, "messages.0.content.0"},
		{`{"max_tokens":5,"messages":[{"role":"user","content":"a"}],"thinking":{"type":"enabled"}}`, "has no reasoning"},
		{`{"max_tokens":5,"messages":[{"role":"user","content":"a"}],"thinking":{"type":"deep"}}`, "thinking"},
		{`{"max_tokens":5,"messages":[{"role":"user","content":"a"}],"tools":[{"type":"bash_20250124","name":"bash"}]}`, "tools"},
		{`{"max_tokens":5,"messages":[{"role":"user","content":"a"}],"tool_choice":{"type":"any"}}`, "tool_choice"},
	} {
		status, e := c.post(messagesPath, k.body)
		require.Equal(t, 400, status)
		require.Equal(t, "error", e["type"])
		require.Equal(t, "invalid_request_error", e.at("error.type"))
		require.Contains(t, e.at("error.message"), k.message)
	}

	answer := c.do("GET", chatPath, "")
	require.Equal(t, 405, answer.StatusCode)
	require.Equal(t, "POST", answer.Header.Get("Allow"))

	// Parameters without effect, and values that mean the default, are accepted.
	c.ok(chatPath, with(`"user":"me"`, `"unheard_of":{}`, `"response_format":{"type": "text"}`, `"n":null`,
		`"stop":null`, `"functions":null`, `"store":true`, `"metadata":{}`, `"best_of":1`))
	c.ok(textPath, `{"prompt":"a","n":2,"best_of":2}`)
}

// TestWrongAddresses checks that the server tells clients with a wrong address of the server how to correct it.
func TestWrongAddresses(t *testing.T) {
	c := serve(t, &fake{answer: says("ok")}, Options{})
	for path, want := range map[string]string{
		"/chat/completions": "there is no POST /chat/completions: add /v1 to the client's address of the server",
		"/v1/v1/messages":   "there is no POST /v1/v1/messages: the client adds /v1 itself, so remove it from the client's address of the server",
		"/v1/v1/other":      "there is no POST /v1/v1/other",
		"/other":            "there is no POST /other",
	} {
		status, e := c.post(path, with())
		require.Equal(t, 404, status)
		require.Equal(t, want, e.at("error.message"))
	}
}

// TestNoTemplate checks that chats with a model without a template are rejected, and that such a model still continues
// texts.
func TestNoTemplate(t *testing.T) {
	m := newModel(t, &fake{answer: says("ok")}, chatTemplate)
	m.Template, m.NoTemplate = nil, chat.ErrNoTemplate
	c := serveModel(t, m, Options{})
	for _, body := range []string{with(), with(tools)} {
		status, e := c.post(chatPath, body)
		require.Equal(t, 400, status)
		require.Contains(t, e.at("error.message"), "has no chat template: use /v1/completions")
	}
	m.NoTemplate = errors.New("line 3: unknown tag")
	_, e := c.post(chatPath, with())
	require.Contains(t, e.at("error.message"), "has no chat template that can be used (line 3: unknown tag): use")
	require.Equal(t, "ok", c.ok(textPath, `{"prompt":"a"}`).at("choices.0.text"))
}

// TestModels checks the list of models and the paths that need no key.
func TestModels(t *testing.T) {
	c := serve(t, &fake{answer: says("ok")}, Options{Keys: []string{"first", "second"}})
	get := func(path string) (int, string) {
		answer := c.do("GET", path, "")
		text, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		return answer.StatusCode, string(text)
	}

	for _, path := range []string{"/", "/chat.js", "/style.css", "/health"} {
		status, _ := get(path)
		require.Equal(t, 200, status, path)
	}
	for _, path := range []string{"/v1/models", "/metrics", "/v1/models/tiny", "/nothing"} {
		status, text := get(path)
		require.Equal(t, 401, status, path)
		require.Contains(t, text, "authentication_error")
	}

	c.key = "third"
	status, _ := c.post(chatPath, with())
	require.Equal(t, 401, status)
	c.key = "second"
	c.ok(chatPath, with())
	status, text := get("/v1/models")
	require.Equal(t, 200, status)
	require.Contains(t, text, `"id":"tiny"`)
	status, _ = get("/v1/models/tiny")
	require.Equal(t, 200, status)
	status, _ = get("/v1/models/other")
	require.Equal(t, 404, status)

	c.key = ""
	answer := c.do("POST", messagesPath, `{"max_tokens":5,"messages":[{"role":"user","content":"a"}]}`, "x-api-key", "first")
	require.Equal(t, 200, answer.StatusCode)
	c.key = "first"
	_, text = get("/metrics")
	require.Contains(t, text, `kasmina_requests_total{handler="POST /v1/chat/completions",status="200"} 1`)
	require.Contains(t, text, `kasmina_requests_total{handler="POST /v1/chat/completions",status="401"} 1`)
	require.Contains(t, text, fmt.Sprintf("kasmina_generated_tokens_total %d\n", 2*len(says("ok"))))
	require.Contains(t, text, "kasmina_requests_running 0\n")
}

// TestOrigins checks which web pages can use a server.
func TestOrigins(t *testing.T) {
	for _, k := range []struct {
		options      Options
		origin, host string
		status       int
		allowed      string
	}{
		{Options{}, "", "", 200, ""},
		{Options{}, "https://evil.example", "", 403, ""},
		{Options{}, "http://evil.example", "evil.example", 403, ""}, // resolves to this computer
		{Options{}, "http://localhost:8080", "localhost:8080", 200, ""},
		{Options{}, "null", "", 403, ""},
		{Options{Keys: []string{"k"}}, "https://chat.example", "chat.example", 200, ""},
		{Options{Origins: []string{"https://app.example"}}, "https://app.example", "", 200, "https://app.example"},
		{Options{Origins: []string{"https://app.example"}}, "https://evil.example", "", 403, ""},
		{Options{Origins: []string{"*"}}, "https://any.example", "", 200, "https://any.example"},
	} {
		c := serve(t, &fake{answer: says("ok")}, k.options)
		r, err := http.NewRequest("POST", c.url+chatPath, strings.NewReader(with()))
		require.NoError(t, err)
		r.Header.Set("Authorization", "Bearer k")
		if k.origin != "" {
			r.Header.Set("Origin", k.origin)
		}
		if k.host != "" {
			r.Host = k.host
		}
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		answer.Body.Close()
		require.Equal(t, k.status, answer.StatusCode, "%+v", k)
		require.Equal(t, k.allowed, answer.Header.Get("Access-Control-Allow-Origin"))
	}

	c := serve(t, &fake{answer: says("ok")}, Options{Keys: []string{"k"}, Origins: []string{"https://app.example"}})
	answer := c.do("OPTIONS", chatPath, "", "Origin", "https://app.example", "Access-Control-Request-Method",
		"POST", "Access-Control-Request-Headers", "authorization")
	require.Equal(t, 204, answer.StatusCode)
	require.Equal(t, "authorization", answer.Header.Get("Access-Control-Allow-Headers"))
	require.Contains(t, answer.Header.Get("Access-Control-Allow-Methods"), "POST")
}

// TestNewErrors checks that invalid options are rejected.
func TestNewErrors(t *testing.T) {
	m := newModel(t, &fake{}, chatTemplate)
	unnamed, small := *m, *m
	unnamed.Name, small.Context = "", 1
	for want, f := range map[string]func() (*Server, error){
		"no models":     func() (*Server, error) { return New(Options{}) },
		"Slots is -1":   func() (*Server, error) { return New(Options{Slots: -1}, m) },
		"MaxBody is -1": func() (*Server, error) { return New(Options{MaxBody: -1}, m) },
		"key is empty":  func() (*Server, error) { return New(Options{Keys: []string{""}}, m) },
		"Timeout is -1": func() (*Server, error) { return New(Options{Timeout: -1}, m) },
		"two models":    func() (*Server, error) { return New(Options{}, m, m) },
		"is nil":        func() (*Server, error) { return New(Options{}, nil) },
		"has no name":   func() (*Server, error) { return New(Options{}, &unnamed) },
		"context of 1":  func() (*Server, error) { return New(Options{}, &small) },
	} {
		_, err := f()
		require.ErrorContains(t, err, want)
	}
}

// TestNewModelErrors checks that errors name the function that was called.
func TestNewModelErrors(t *testing.T) {
	f := &hf.Folder{Dir: t.TempDir()} // without a tokenizer
	_, err := NewModel(f, nil, 8)
	require.ErrorContains(t, err, "serve: NewModel: ")
	_, err = NewAdaptedModel(f, t.TempDir(), nil, 8)
	require.ErrorContains(t, err, "serve: NewAdaptedModel: ")
}

// llamaTemplate requests tool calls in the format of Llama 3.1.
const llamaTemplate = `{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{{ tools|tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}`

// TestBareCalls checks the tool calls of models whose entire answer is a JSON object.
func TestBareCalls(t *testing.T) {
	const call = `{"name": "f", "parameters": {"x": "a};b"}}`
	for _, k := range []struct {
		answer, more, text, reason string
		calls                      int
	}{
		{call, "", "", "tool_calls", 1},
		{"\n " + call + "\n", "", "", "tool_calls", 1},
		{call + "; " + call, "", "", "tool_calls", 2},
		{call + "; " + call, `"parallel_tool_calls":false`, "", "tool_calls", 1},
		{"{\"name\":\"f\"}", "", "", "tool_calls", 1},
		{`{"name": "g", "parameters": {}}`, "", `{"name": "g", "parameters": {}}`, "stop", 0},
		{`{"name": "f", "parameters": 5}`, "", `{"name": "f", "parameters": 5}`, "stop", 0},
		{`{"name": "f", "par`, "", `{"name": "f", "par`, "stop", 0},
		{`{"nam`, "", `{"nam`, "stop", 0},
		{call + " and more", "", call + " and more", "stop", 0},
		{"{\"a\": 1}", "", "{\"a\": 1}", "stop", 0},
		{"Hello", "", "Hello", "stop", 0},
	} {
		m := newModel(t, &fake{answer: bytewise(k.answer)}, llamaTemplate)
		m.Context = 1024
		c := serveModel(t, m, Options{})
		more := []string{tools, `"temperature":0`}
		if k.more != "" {
			more = append(more, k.more)
		}
		a := c.ok(chatPath, with(more...))
		require.Equal(t, k.reason, a.at("choices.0.finish_reason"), k.answer)
		message := a.at("choices.0.message").(map[string]any)
		calls, _ := message["tool_calls"].([]any)
		require.Len(t, calls, k.calls, k.answer)
		if k.calls == 0 {
			require.Equal(t, k.text, message["content"])
		} else if k.answer != "{\"name\":\"f\"}" {
			require.JSONEq(t, `{"x": "a};b"}`, a.at("choices.0.message.tool_calls.0.function.arguments").(string))
		}

		var text strings.Builder
		streamed := 0
		for _, e := range c.stream(chatPath, with(append(more, `"stream":true`)...)) {
			if s, ok := e.at("choices.0.delta.content").(string); ok {
				text.WriteString(s)
			}
			if e.at("choices.0.delta.tool_calls") != nil {
				streamed++
			}
		}
		require.Equal(t, k.calls, streamed, k.answer)
		require.Equal(t, k.text, text.String(), k.answer)
	}

	// A call can be forced.
	m := newModel(t, random{3}, llamaTemplate)
	m.Context = 4096
	c := serveModel(t, m, Options{})
	a := c.ok(chatPath, with(`"tools":[{"type":"function","function":{"name":"g","parameters":{"type":"object","properties":`+
		`{"x":{"enum":[1,2]}},"required":["x"]}}}]`, `"tool_choice":"required"`, `"max_tokens":1500`))
	require.Equal(t, "tool_calls", a.at("choices.0.finish_reason"))
	require.Equal(t, "g", a.at("choices.0.message.tool_calls.0.function.name"))
}

// TestLimitsInErrors checks that errors about numbers say what is allowed.
func TestLimitsInErrors(t *testing.T) {
	c := serve(t, &fake{answer: says("ok")}, Options{})
	for more, want := range map[string]string{
		`"max_tokens":0`: "it is 0, want an integer of at least 1",
		`"n":1000`:       "it is 1000, want an integer from 1 to 128",
		`"top_p":2`:      "it is 2, want a number from 0 to 1",
	} {
		response, err := http.Post(c.url+chatPath, "application/json", strings.NewReader(with(more)))
		require.NoError(t, err)
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Contains(t, string(text), want)
	}
}
