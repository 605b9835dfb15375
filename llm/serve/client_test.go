package serve

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/shared"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// serveTiny serves the model tiny on the CPU.
func serveTiny(t *testing.T, o Options) *client {
	f, err := hf.Open(tiny)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	b, err := llm.NewBatcher(m, llm.BatcherOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	model, err := NewModel(f, b.Generator(), f.Config.Seq)
	require.NoError(t, err)
	return serveModel(t, model, o)
}

// greedy continues a prompt by up to n tokens with a separate generator.
func greedy(t *testing.T, prompt []int, n int) string {
	m, err := hf.Load(t.Context(), tiny)
	require.NoError(t, err)
	g, err := llm.NewGenerator(m)
	require.NoError(t, err)
	defer g.Close()
	s, err := sampler.New(sampler.Config{})
	require.NoError(t, err)
	d := tok.NewDecoder(true)
	require.NoError(t, d.Prime(prompt))
	var text strings.Builder
	for id, err := range g.Generate(t.Context(), prompt, n, s) {
		require.NoError(t, err)
		if id == endOfText {
			break
		}
		part, err := d.Next(id)
		require.NoError(t, err)
		text.Write(part)
	}
	text.Write(d.Flush())
	return text.String()
}

// TestOpenAIClient uses the server through OpenAI's client and compares the answers with a generator's
// texts.
func TestOpenAIClient(t *testing.T) {
	noLeak(t)
	c := serveTiny(t, Options{Keys: []string{"secret"}})
	ai := openai.NewClient(option.WithBaseURL(c.url+"/v1"), option.WithAPIKey("secret"), option.WithMaxRetries(0))
	models, err := ai.Models.List(t.Context())
	require.NoError(t, err)
	require.Len(t, models.Data, 1)
	require.Equal(t, "tiny", models.Data[0].ID)

	rendered, err := c.server.models[0].Template.RenderJSON([]byte(`[{"role":"user","content":"Permission"}]`),
		chat.Options{AddGenerationPrompt: true})
	require.NoError(t, err)
	want := greedy(t, tok.Encode([]byte(rendered)), 30)
	request := openai.ChatCompletionNewParams{Model: "tiny", MaxTokens: openai.Int(30), Temperature: openai.Float(0),
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Permission")},
		Logprobs: openai.Bool(true), TopLogprobs: openai.Int(4)}
	answer, err := ai.Chat.Completions.New(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, want, answer.Choices[0].Message.Content)
	var all strings.Builder
	for _, p := range answer.Choices[0].Logprobs.Content {
		require.Equal(t, p.Token, p.TopLogprobs[0].Token, "the most probable token has not been drawn")
		require.InDelta(t, p.Logprob, p.TopLogprobs[0].Logprob, 0)
		all.WriteString(p.Token)
	}
	require.Equal(t, want, all.String())

	request.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := ai.Chat.Completions.NewStreaming(t.Context(), request)
	var sum openai.ChatCompletionAccumulator
	for stream.Next() {
		require.True(t, sum.AddChunk(stream.Current()))
	}
	require.NoError(t, stream.Err())
	require.Equal(t, want, sum.Choices[0].Message.Content)
	require.Equal(t, answer.Choices[0].FinishReason, sum.Choices[0].FinishReason)
	require.Equal(t, answer.Usage.CompletionTokens, sum.Usage.CompletionTokens)

	before, _ := tok.Affixes()
	text, err := ai.Completions.New(t.Context(), openai.CompletionNewParams{Model: "tiny", MaxTokens: openai.Int(20),
		Temperature: openai.Float(0), Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("Permission is")}})
	require.NoError(t, err)
	require.Equal(t, greedy(t, append(before, tok.Encode([]byte("Permission is"))...), 20), text.Choices[0].Text)

	var failed *openai.Error
	request.StreamOptions = openai.ChatCompletionStreamOptionsParam{}
	request.Temperature = openai.Float(-3)
	_, err = ai.Chat.Completions.New(t.Context(), request)
	require.ErrorAs(t, err, &failed)
	require.Equal(t, 400, failed.StatusCode)
	require.Equal(t, "temperature", failed.Param)
	require.Equal(t, "invalid_request_error", failed.Type)
	other := openai.NewClient(option.WithBaseURL(c.url+"/v1"), option.WithAPIKey("wrong"), option.WithMaxRetries(0))
	_, err = other.Models.List(t.Context())
	require.ErrorAs(t, err, &failed)
	require.Equal(t, 401, failed.StatusCode)
}

// TestOpenAIClientRequests uses the parameters of requests through OpenAI's client, and checks the errors that it reports.
func TestOpenAIClientRequests(t *testing.T) {
	noLeak(t)
	m := newModel(t, random{3}, toolTemplate)
	m.Context = 4096
	c := serveModel(t, m, Options{MaxBody: 20_000})
	ai := openai.NewClient(option.WithBaseURL(c.url+"/v1"), option.WithAPIKey("any"), option.WithMaxRetries(0))
	schema := map[string]any{"type": "object", "properties": map[string]any{"x": map[string]any{"enum": []int{1, 2}}},
		"required": []string{"x"}, "additionalProperties": false}
	base := openai.ChatCompletionNewParams{Model: "tiny", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Hi")},
		Seed: openai.Int(1), MaxCompletionTokens: openai.Int(1000)}

	request := base
	request.ResponseFormat.OfJSONSchema = &shared.ResponseFormatJSONSchemaParam{
		JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{Name: "number", Strict: openai.Bool(true), Schema: schema}}
	request.N = openai.Int(3)
	answer, err := ai.Chat.Completions.New(t.Context(), request)
	require.NoError(t, err)
	require.Len(t, answer.Choices, 3)
	for _, choice := range answer.Choices {
		require.Equal(t, "stop", choice.FinishReason)
		require.Regexp(t, `^\{\s*"x"\s*:\s*[12]\s*\}$`, choice.Message.Content)
	}

	request = base
	request.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
		Name: "g", Parameters: schema})}
	request.ToolChoice.OfAuto = openai.String("required")
	request.ParallelToolCalls = openai.Bool(false)
	answer, err = ai.Chat.Completions.New(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, "tool_calls", answer.Choices[0].FinishReason)
	calls := answer.Choices[0].Message.ToolCalls
	require.Len(t, calls, 1)
	require.Equal(t, "g", calls[0].Function.Name)

	stream := ai.Chat.Completions.NewStreaming(t.Context(), request)
	var sum openai.ChatCompletionAccumulator
	for stream.Next() {
		require.True(t, sum.AddChunk(stream.Current()))
	}
	require.NoError(t, stream.Err())
	require.Equal(t, calls[0].Function.Arguments, sum.Choices[0].Message.ToolCalls[0].Function.Arguments)

	// The model sees the call and its result.
	request.Messages = append(request.Messages, answer.Choices[0].Message.ToParam(), openai.ToolMessage("42", calls[0].ID))
	request.ToolChoice.OfAuto = openai.String("none")
	_, err = ai.Chat.Completions.New(t.Context(), request)
	require.NoError(t, err)

	texts := ai.Completions.NewStreaming(t.Context(), openai.CompletionNewParams{Model: "tiny", MaxTokens: openai.Int(7),
		Seed: openai.Int(1), Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("Hi")}})
	var text strings.Builder
	for texts.Next() {
		text.WriteString(texts.Current().Choices[0].Text)
	}
	require.NoError(t, texts.Err())
	require.NotEmpty(t, text.String())

	for want, change := range map[int]func(p *openai.ChatCompletionNewParams){
		400: func(p *openai.ChatCompletionNewParams) { p.TopP = openai.Float(2) },
		404: func(p *openai.ChatCompletionNewParams) { p.Model = "other" },
		413: func(p *openai.ChatCompletionNewParams) {
			p.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage(strings.Repeat("a", 20_000))}
		},
	} {
		request := base
		change(&request)
		_, err := ai.Chat.Completions.New(t.Context(), request)
		var failed *openai.Error
		require.ErrorAs(t, err, &failed)
		require.Equal(t, want, failed.StatusCode)
		require.NotEmpty(t, failed.Message)
	}
}

// TestManyClients lets 32 clients use the server until it has given many answers. Some disconnect and some send nonsense. All
// other clients must get the same text as a single client, and no slot or goroutine may leak.
func TestManyClients(t *testing.T) {
	noLeak(t)
	c := serveTiny(t, Options{Slots: 8, Queue: 20})
	prompts := []string{"Permission is", "THE SOFTWARE", "copy", "a b c"}
	want := make([]string, len(prompts))
	for i, p := range prompts {
		want[i] = c.ok(textPath, fmt.Sprintf(`{"prompt":%q,"temperature":0,"max_tokens":24}`, p)).at("choices.0.text").(string)
	}

	enough := int64(64)
	if randtest.Long() {
		enough = 1000
	}

	var answered, busy, gone atomic.Int64
	var clients sync.WaitGroup
	for i := range 32 {
		clients.Go(func() {
			for n := i; answered.Load() < enough; n++ {
				body := fmt.Sprintf(`{"prompt":%q,"temperature":0,"max_tokens":24,"stream":%v}`, prompts[n%4], n%3 == 0)
				switch n % 11 {
				case 5: // disconnects
					soon, leave := context.WithTimeout(t.Context(), time.Duration(n%7)*time.Millisecond)
					if a, err := c.try(soon, body); err == nil {
						io.Copy(io.Discard, a.Body)
						a.Body.Close()
					}
					leave()
					gone.Add(1)
					continue
				case 6:
					body = body[:len(body)/2]
				}

				a, err := c.try(t.Context(), body)
				if err != nil {
					t.Error(err)
					return
				}
				text, err := io.ReadAll(a.Body)
				a.Body.Close()
				switch {
				case err != nil:
					t.Error(err)
				case a.StatusCode == 429:
					busy.Add(1)
					time.Sleep(time.Millisecond)
				case n%11 == 6:
					if a.StatusCode != 400 {
						t.Errorf("nonsense: %d %s", a.StatusCode, text)
					}
				case a.StatusCode != 200:
					t.Errorf("%d %s", a.StatusCode, text)
				case n%3 == 0:
					if !strings.HasSuffix(string(text), "data: [DONE]\n\n") {
						t.Errorf("a stream ends with %.100q", text[max(0, len(text)-100):])
					}
					answered.Add(1)
				default:
					if !strings.Contains(string(text), string(encode(want[n%4]))) {
						t.Errorf("%s, want the text %q", text, want[n%4])
					}
					answered.Add(1)
				}
			}
		})
	}
	clients.Wait()
	t.Logf("%d answers, %d refused, %d disconnected", answered.Load(), busy.Load(), gone.Load())
	await(t, "no request is left", func() bool {
		running, waiting := c.server.Running()
		return running+waiting == 0
	})
	require.Equal(t, 8, c.server.slots.free)
}

// try sends a request to continue a text.
func (c *client) try(ctx context.Context, body string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, "POST", c.url+textPath, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(r)
}
