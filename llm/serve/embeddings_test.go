package serve

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
)

const embeddingsPath = "/v1/embeddings"

// An embeddingFake is a fake that embeds texts: the first number of a vector is the sum of the tokens.
type embeddingFake struct{ *fake }

func (f embeddingFake) Embed(ctx context.Context, texts [][]int, p llm.Pooling) (all [][]float64, err error) {
	for _, ids := range texts {
		sum := 0.0
		for _, id := range ids {
			sum += float64(id)
		}
		all = append(all, []float64{sum, float64(p), 1})
	}
	return all, ctx.Err()
}

// TestEmbeddings checks that OpenAI's client gets the model's vectors, in both formats.
func TestEmbeddings(t *testing.T) {
	noLeak(t)
	c := serveTiny(t, Options{Keys: []string{"secret"}})
	c.key = "secret"
	m := c.server.models[0]
	ai := openai.NewClient(option.WithBaseURL(c.url+"/v1"), option.WithAPIKey("secret"), option.WithMaxRetries(0))
	texts := []string{"Permission is", "hereby granted, free of charge", "é"}
	var ids [][]int
	count := 0
	for _, text := range texts {
		ids = append(ids, m.Tokenizer.EncodeWhole([]byte(text)))
		count += len(ids[len(ids)-1])
	}
	raw, err := m.Generator.(Embedder).Embed(t.Context(), ids, llm.MeanPooling)
	require.NoError(t, err)

	request := openai.EmbeddingNewParams{Model: "tiny", Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: texts}}
	answer, err := ai.Embeddings.New(t.Context(), request)
	require.NoError(t, err)
	require.Len(t, answer.Data, 3)
	require.EqualValues(t, count, answer.Usage.PromptTokens)
	require.EqualValues(t, count, answer.Usage.TotalTokens)
	require.Equal(t, "tiny", answer.Model)
	for i, d := range answer.Data {
		require.EqualValues(t, i, d.Index)
		require.InDeltaSlice(t, unit(raw[i]), d.Embedding, 1e-6)
		length := 0.0
		for _, x := range d.Embedding {
			length += x * x
		}
		require.InDelta(t, 1, length, 1e-5)
	}

	// Other forms of the same request give the same vectors, and texts in one request do not affect each other.
	body := c.ok(embeddingsPath, fmt.Sprintf(`{"input":%s,"encoding_format":"base64"}`, encode(texts)))
	for i := range texts {
		text := body.at(fmt.Sprintf("data.%d.embedding", i)).(string)
		raw, err := base64.StdEncoding.DecodeString(text)
		require.NoError(t, err)
		require.Len(t, raw, 4*len(answer.Data[i].Embedding))
		for k, x := range answer.Data[i].Embedding {
			require.InDelta(t, x, math.Float32frombits(binary.LittleEndian.Uint32(raw[4*k:])), 1e-6)
		}
	}
	request.Input = openai.EmbeddingNewParamsInputUnion{OfString: openai.String(texts[1])}
	one, err := ai.Embeddings.New(t.Context(), request)
	require.NoError(t, err)
	require.InDeltaSlice(t, answer.Data[1].Embedding, one.Data[0].Embedding, 1e-5)
	var tokens []int64
	for _, id := range ids[1] {
		tokens = append(tokens, int64(id))
	}
	request.Input = openai.EmbeddingNewParamsInputUnion{OfArrayOfTokenArrays: [][]int64{tokens, {3}}}
	request.Dimensions = openai.Int(int64(len(raw[0])))
	two, err := ai.Embeddings.New(t.Context(), request)
	require.NoError(t, err)
	require.InDeltaSlice(t, one.Data[0].Embedding, two.Data[0].Embedding, 1e-5)
	request.Input = openai.EmbeddingNewParamsInputUnion{OfArrayOfTokens: tokens}
	one, err = ai.Embeddings.New(t.Context(), request)
	require.NoError(t, err)
	require.InDeltaSlice(t, one.Data[0].Embedding, two.Data[0].Embedding, 1e-5)

	last, err := m.Generator.(Embedder).Embed(t.Context(), ids[:1], llm.LastPooling)
	require.NoError(t, err)
	body = c.ok(embeddingsPath, fmt.Sprintf(`{"input":%q,"pooling":"last"}`, texts[0]))
	got := body.at("data.0.embedding").([]any)
	for i, x := range unit(last[0]) {
		require.InDelta(t, x, got[i], 1e-6)
	}
}

// unit returns a vector divided by its length.
func unit(v []float64) (u []float64) {
	sum := 0.0
	for _, x := range v {
		sum += x * x
	}
	for _, x := range v {
		u = append(u, x/math.Sqrt(sum))
	}
	return u
}

// TestEmbeddingErrors checks that wrong requests name the parameter at fault.
func TestEmbeddingErrors(t *testing.T) {
	c := serve(t, embeddingFake{&fake{answer: says("a")}}, Options{})
	for _, k := range []struct {
		body   string
		status int
		param  any
	}{
		{`{}`, 400, "input"},
		{`{"input":null}`, 400, "input"},
		{`{"input":5}`, 400, "input"},
		{`{"input":[]}`, 400, "input"},
		{`{"input":[[]]}`, 400, "input"},
		{`{"input":[400]}`, 400, "input"},
		{`{"input":["a",{}]}`, 400, "input"},
		{`{"input":"` + strings.Repeat("a b ", 200) + `"}`, 400, "input"},
		{`{"input":["a"` + strings.Repeat(`,"a"`, maxInputs) + `]}`, 400, "input"},
		{`{"input":"a","model":"x"}`, 404, "model"},
		{`{"input":"a","encoding_format":"hex"}`, 400, "encoding_format"},
		{`{"input":"a","dimensions":2}`, 400, "dimensions"},
		{`{"input":"a","dimensions":0}`, 400, "dimensions"},
		{`{"input":"a","pooling":"max"}`, 400, "pooling"},
	} {
		status, e := c.post(embeddingsPath, k.body)
		require.Equal(t, k.status, status, "%.100s: %v", k.body, e)
		require.Equal(t, k.param, e.at("error.param"), "%.100s: %v", k.body, e)
	}
	c.ok(embeddingsPath, `{"input":"a","dimensions":3,"user":"me"}`)

	c = serve(t, &fake{answer: says("a")}, Options{})
	status, e := c.post(embeddingsPath, `{"input":"a"}`)
	require.Equal(t, 400, status)
	require.Contains(t, e.at("error.message"), "cannot embed texts")
}

// TestNormalized checks vectors with extreme numbers.
func TestNormalized(t *testing.T) {
	for _, v := range [][]float64{{3e300, 4e300}, {3e-300, 4e-300}, {3, 4}} {
		got, err := normalized(v)
		require.NoError(t, err)
		require.InDeltaSlice(t, []float32{0.6, 0.8}, got, 1e-7)
	}
	for _, v := range [][]float64{{0, 0}, {1, math.NaN()}, {math.NaN(), 1}, {math.Inf(1), 1}, nil} {
		_, err := normalized(v)
		require.Error(t, err, v)
	}
}
