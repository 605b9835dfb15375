package serve

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"math"
	"time"

	"github.com/kasmina-go/kasmina/llm/sampler"
)

// unsupported lists parameters of OpenAI's API, and of other servers with that API, that this server
// does not implement. The value for each lists the JSON texts, separated by spaces, that do not
// change the answer and are therefore accepted.
var unsupported = map[string]string{
	"suffix":                 `""`,
	"use_beam_search":        "false",
	"min_tokens":             "0",
	"functions":              "[]",
	"function_call":          `"none"`,
	"audio":                  "",
	"modalities":             `["text"]`,
	"web_search_options":     "",
	"prompt_logprobs":        "0",
	"typical_p":              "1 1.0",
	"guided_regex":           "",
	"guided_grammar":         "",
	"structured_outputs":     "",
	"mirostat":               "0",
	"dry_multiplier":         "0 0.0",
	"xtc_probability":        "0 0.0",
	"dynatemp_range":         "0 0.0",
	"bad_words":              "[]",
	"allowed_token_ids":      "",
	"truncate_prompt_tokens": "",
}

// newID returns a random id.
func newID(prefix string) string {
	var random [12]byte
	rand.Read(random[:])
	return prefix + hex.EncodeToString(random[:])
}

// usage counts the tokens of a request.
type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
	Details    struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// usageOf counts the tokens of n results for each prompt.
func usageOf(prompt, n int, results []result) *usage {
	u := &usage{Prompt: prompt, Total: prompt}
	for i, r := range results {
		if i%n == 0 { // the other results share its prompt
			u.Details.Cached += r.cached
		}
		u.Completion += r.drawn
		u.Total += r.drawn
	}
	return u
}

// openAI is the common part of the formats of OpenAI's API.
type openAI struct {
	job          *job
	id, object   string
	created      int64
	logProbs     bool
	includeUsage bool
	each         int // results for each prompt
}

// base reads the parameters that both kinds of completions have.
func (s *Server) base(p *params, prefix, object string) (openAI, sampler.Config) {
	f := openAI{id: newID(prefix), object: object, created: time.Now().Unix()}
	m, err := s.find(p.text("model"))
	if p.err != nil || err != nil {
		if p.err == nil {
			p.err = err
		}
		m = s.models[0]
	}

	j := &job{model: m, stream: p.bool("stream", false), stop: p.stops("stop"), end: m.End}
	f.job = j
	j.end = append(j.end[:len(j.end):len(j.end)], p.ids("stop_token_ids", m)...)
	if p.bool("ignore_eos", false) {
		j.end = nil
	}

	var options struct {
		IncludeUsage bool `json:"include_usage"`
	}
	p.decode("stream_options", "an object", &options)
	if p.has("stream_options") && !j.stream {
		p.fail("stream_options", "it is only for streams: set stream to true")
	}
	f.includeUsage = options.IncludeUsage

	if n := p.integer("n", 1, 1, maxChoices); p.integer("best_of", n, 1, math.MaxInt32) != n {
		p.fail("best_of", "it differs from n, and the server returns every answer that it generates: leave it out")
	}
	p.refuse(unsupported)
	c := p.sampling(m)
	p.penalties(m, &c)
	return f, c
}

// addChoices adds n choices for a prompt. Choices differ in their seeds.
func (j *job) addChoices(p *params, n int, prompt []int, limit int, c sampler.Config, param string) {
	if err := j.model.checkPrompt(prompt, param); err != nil {
		if p.err == nil {
			p.err = err
		}
		return
	}

	j.prompt += len(prompt)
	for range n {
		d := c
		d.Seed += uint64(len(j.choices))
		j.choices = append(j.choices, choice{prompt, min(limit, j.model.Context-len(prompt)), d})
	}
	if len(j.choices) > maxChoices {
		p.fail(param, "the request asks for more than %d answers", maxChoices)
	}
}

// limit returns the largest number of tokens, which has two names in OpenAI's API.
func (p *params) limit(usual, low int) int {
	for _, name := range []string{"max_completion_tokens", "max_tokens"} {
		if p.has(name) {
			return p.integer(name, 0, low, math.MaxInt32)
		}
	}
	return usual
}

// chunk returns the members that all objects of an answer have.
func (f *openAI) chunk(object string, choices ...any) map[string]any {
	if choices == nil {
		choices = []any{}
	}
	return map[string]any{"id": f.id, "object": object, "created": f.created,
		"model": f.job.model.Name, "choices": choices, "system_fingerprint": nil}
}

// part returns an event with a part of a choice.
func (f *openAI) part(object string, choice any) event {
	c := f.chunk(object, choice)
	if f.includeUsage {
		c["usage"] = nil
	}
	return event{data: c}
}

// last returns the events that end a stream.
func (f *openAI) last(object string, results []result) (events []event) {
	if f.includeUsage {
		c := f.chunk(object)
		c["usage"] = usageOf(f.job.prompt, f.each, results)
		events = append(events, event{data: c})
	}
	return append(events, event{raw: "[DONE]"})
}

// text returns the text of a token, and its bytes.
func (m *Model) text(id int) (string, []int) {
	text, err := m.Tokenizer.DecodeWhole([]int{id})
	if err != nil {
		return "", []int{} // a gap in the vocabulary
	}
	numbers := make([]int, len(text))
	for i, b := range text {
		numbers[i] = int(b)
	}
	return string(text), numbers
}

// finite returns a log-probability that JSON can represent.
func finite(x float64) float64 { return max(x, -9999) }

// jsonProb is a token of the chat API.
type jsonProb struct {
	Token   string     `json:"token"`
	LogProb float64    `json:"logprob"`
	Bytes   []int      `json:"bytes"`
	Top     []jsonProb `json:"top_logprobs,omitzero"`
}

func (m *Model) jsonProb(p sampler.TokenProb) jsonProb {
	text, bytes := m.text(p.ID)
	return jsonProb{Token: text, LogProb: finite(p.LogProb), Bytes: bytes}
}

// chatLogProbs returns the log-probabilities of tokens in the format of /v1/chat/completions.
func (m *Model) chatLogProbs(tokens []token) any {
	content := []jsonProb{}
	for _, t := range tokens {
		p := m.jsonProb(t.TokenProb)
		p.Top = []jsonProb{}
		for _, other := range t.top {
			p.Top = append(p.Top, m.jsonProb(other))
		}
		content = append(content, p)
	}
	return map[string]any{"content": content, "refusal": nil}
}

// jsonCall is a tool call of the chat API.
type jsonCall struct {
	Index    *int         `json:"index,omitempty"`
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function jsonFunction `json:"function"`
}

type jsonFunction struct {
	Name      string `json:"name"`
	Arguments any    `json:"arguments"`
}

// chatFormat is the format of /v1/chat/completions.
type chatFormat struct {
	openAI
	calls []int // number of calls in each choice so far
}

func (f *chatFormat) whole(results []result) any {
	choices := []any{}
	for i, r := range results {
		message := map[string]any{"role": "assistant", "content": r.text, "refusal": nil}
		if r.reasoning != "" {
			message["reasoning_content"] = r.reasoning
		}
		if len(r.calls) > 0 {
			var calls []jsonCall
			for _, c := range r.calls {
				calls = append(calls, jsonCall{ID: newID("call_"), Type: "function",
					Function: jsonFunction{c.name, c.arguments}})
			}
			message["tool_calls"] = calls
			if r.text == "" {
				message["content"] = nil
			}
		}

		c := map[string]any{"index": i, "message": message, "finish_reason": r.reason, "logprobs": nil}
		if f.logProbs {
			c["logprobs"] = f.job.model.chatLogProbs(r.tokens)
		}
		choices = append(choices, c)
	}

	body := f.chunk(f.object, choices...)
	body["usage"] = usageOf(f.job.prompt, f.each, results)
	return body
}

const chatChunk = "chat.completion.chunk"

func (f *chatFormat) start() (events []event) {
	f.calls = make([]int, len(f.job.choices))
	for i := range f.job.choices {
		events = append(events, f.part(chatChunk, map[string]any{"index": i, "finish_reason": nil,
			"delta": map[string]any{"role": "assistant", "content": ""}, "logprobs": nil}))
	}
	return events
}

func (f *chatFormat) next(p piece) []event {
	delta := map[string]any{}
	c := map[string]any{"index": p.choice, "delta": delta, "finish_reason": nil, "logprobs": nil}
	switch {
	case p.end != nil:
		c["finish_reason"] = p.end.reason
	case p.call != nil:
		at := f.calls[p.choice]
		f.calls[p.choice]++
		delta["tool_calls"] = []jsonCall{{&at, newID("call_"), "function",
			jsonFunction{p.call.name, p.call.arguments}}}
	case p.reasoning != "":
		delta["reasoning_content"] = p.reasoning
	default:
		delta["content"] = p.text
	}

	if f.logProbs && len(p.tokens) > 0 {
		c["logprobs"] = f.job.model.chatLogProbs(p.tokens)
	}
	return []event{f.part(chatChunk, c)}
}

func (f *chatFormat) finish(results []result) []event { return f.last(chatChunk, results) }

// parseChat reads a request to /v1/chat/completions.
func (s *Server) parseChat(p *params) (*job, format, error) {
	base, c := s.base(p, "chatcmpl-", "chat.completion")
	f := &chatFormat{openAI: base}
	j := f.job
	if f.logProbs = p.bool("logprobs", false); f.logProbs {
		c.LogProbs, c.Top = true, p.integer("top_logprobs", 0, 0, maxTop)
	} else if p.has("top_logprobs") && p.integer("top_logprobs", 0, 0, maxTop) > 0 {
		p.fail("top_logprobs", "set logprobs to true, too")
	}

	con := conversation{model: j.model, messages: p.all["messages"]}
	con.readTools(p)
	con.readOptions(p)
	con.lookForCalls(j)
	j.oneTool = !p.bool("parallel_tool_calls", true)
	if j.oneTool && con.tools != nil && j.tools == unknownCalls {
		p.fail("parallel_tool_calls", "the model's tool calls have a format that the server does not "+
			"recognize, so it cannot limit them: leave it out")
	}

	switch format := p.text("reasoning_format"); format { // of llama.cpp
	case "", "auto", "deepseek":
		j.reasons = reasons(j.model.Template)
	case "none":
	default:
		p.fail("reasoning_format", `it is %.40q, want "auto", "deepseek" or "none"`, format)
	}

	n, limit := p.integer("n", 1, 1, maxChoices), p.limit(math.MaxInt32, 1)
	f.each = n
	w := p.readWanted()
	p.readCalls(j, &w, &con)
	if p.err != nil {
		return nil, nil, p.err
	}

	prompt, err := con.encode(j)
	if err != nil {
		return nil, nil, err
	}
	if err := s.constrain(j, w); err != nil {
		return nil, nil, err
	}
	j.addChoices(p, n, prompt, limit, c, "messages")
	return j, f, p.err
}

// textFormat is the format of /v1/completions.
type textFormat struct {
	openAI
	echo    []string // text before each answer
	offsets []int    // characters of each answer so far
}

// textLogProbs returns the log-probabilities of tokens in the format of /v1/completions.
func (f *textFormat) textLogProbs(tokens []token, choice int) any {
	m := f.job.model
	texts, probs, tops, offsets := []string{}, []float64{}, []map[string]float64{}, []int{}
	for _, t := range tokens {
		text, _ := m.text(t.ID)
		top := map[string]float64{}
		for _, other := range t.top {
			s, _ := m.text(other.ID)
			if _, ok := top[s]; !ok {
				top[s] = finite(other.LogProb)
			}
		}
		texts, probs = append(texts, text), append(probs, finite(t.LogProb))
		tops, offsets = append(tops, top), append(offsets, f.offsets[choice])
		f.offsets[choice] += len([]rune(text))
	}
	return map[string]any{"tokens": texts, "token_logprobs": probs, "top_logprobs": tops,
		"text_offset": offsets}
}

func (f *textFormat) choice(i int, text string, tokens []token, reason any) map[string]any {
	c := map[string]any{"index": i, "text": text, "finish_reason": reason, "logprobs": nil}
	if f.logProbs && tokens != nil {
		c["logprobs"] = f.textLogProbs(tokens, i)
	}
	return c
}

func (f *textFormat) whole(results []result) any {
	choices := []any{}
	for i, r := range results {
		choices = append(choices, f.choice(i, f.echo[i]+r.text, append([]token{}, r.tokens...), r.reason))
	}
	body := f.chunk(f.object, choices...)
	body["usage"] = usageOf(f.job.prompt, f.each, results)
	return body
}

func (f *textFormat) start() (events []event) {
	for i, text := range f.echo {
		if text != "" {
			events = append(events, f.part(f.object, f.choice(i, text, nil, nil)))
		}
	}
	return events
}

func (f *textFormat) next(p piece) []event {
	var reason any
	if p.end != nil {
		reason = p.end.reason
	}
	return []event{f.part(f.object, f.choice(p.choice, p.text, p.tokens, reason))}
}

func (f *textFormat) finish(results []result) []event { return f.last(f.object, results) }

// parseText reads a request to /v1/completions.
func (s *Server) parseText(p *params) (*job, format, error) {
	base, c := s.base(p, "cmpl-", "text_completion")
	f := &textFormat{openAI: base}
	j := f.job
	if p.has("logprobs") {
		f.logProbs = true
		c.LogProbs, c.Top = true, p.integer("logprobs", 0, 0, maxTop)
	}

	n, limit := p.integer("n", 1, 1, maxChoices), p.limit(16, 0)
	f.each = n
	echo := p.bool("echo", false)
	if echo && f.logProbs {
		p.fail("echo", "this server does not compute log-probabilities of prompts: leave out echo or logprobs")
	}
	w := p.readWanted()
	if p.err != nil {
		return nil, nil, p.err
	}

	if err := s.constrain(j, w); err != nil {
		return nil, nil, err
	}
	prompts, err := j.model.inputs(p.all["prompt"], "prompt", maxChoices, j.model.encode)
	if err != nil {
		return nil, nil, err
	}
	for _, prompt := range prompts {
		text := ""
		j.addChoices(p, n, prompt, limit, c, "prompt")
		if p.err != nil {
			return nil, nil, p.err
		}

		if echo {
			all, err := j.model.Tokenizer.Decode(prompt)
			if err != nil {
				return nil, nil, err
			}
			text = string(all)
		}
		for range n {
			f.echo = append(f.echo, text)
		}
	}

	f.offsets = make([]int, len(j.choices))
	return j, f, p.err
}

// inputs returns the tokens of a parameter with texts. Its value is a text, an array of tokens and texts, or an array
// of up to most of these. An array that contains only texts holds several texts. encode encodes a whole text.
func (m *Model) inputs(raw json.RawMessage, name string, most int, encode func(string) []int) ([][]int, error) {
	if isNull(raw) {
		return nil, invalid(name, "it is missing")
	}

	one := func(raw json.RawMessage) []int {
		var text string
		if json.Unmarshal(raw, &text) == nil && !isNull(raw) {
			return append([]int{}, encode(text)...) // not nil if the text is empty
		}
		return m.mixed(raw)
	}
	if ids := one(raw); ids != nil {
		return [][]int{ids}, nil
	}

	var several []json.RawMessage
	if json.Unmarshal(raw, &several) != nil || len(several) == 0 || len(several) > most {
		return nil, invalid(name, "want a string, an array of tokens, or an array of 1 to %d of these", most)
	}

	var prompts [][]int
	for i, raw := range several {
		ids := one(raw)
		if ids == nil {
			return nil, invalid(name, "element %d is %.40s, want a string or an array of tokens", i, raw)
		}
		prompts = append(prompts, ids)
	}
	return prompts, nil
}

// mixed returns the tokens of an array with tokens and texts, or nil if it is something else. Only a text at the
// start is preceded by the tokens that begin a text.
func (m *Model) mixed(raw json.RawMessage) (ids []int) {
	var parts []json.RawMessage
	if json.Unmarshal(raw, &parts) != nil {
		return nil
	}

	tokens := 0
	for i, part := range parts {
		var text string
		var id int
		switch {
		case json.Unmarshal(part, &id) == nil && !isNull(part):
			ids = append(ids, id)
			tokens++
		case json.Unmarshal(part, &text) != nil || isNull(part):
			return nil
		case i == 0:
			ids = m.encode(text)
		default:
			ids = append(ids, m.Tokenizer.Encode([]byte(text))...)
		}
	}
	if tokens == 0 {
		return nil
	}
	return ids
}
