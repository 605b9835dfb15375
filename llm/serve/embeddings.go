package serve

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"math"
	"net/http"

	"github.com/kasmina-go/kasmina/llm"
)

// An Embedder computes vectors of texts, as llm.Generator does. A [Generator] that implements it serves embeddings.
type Embedder interface {
	Embed(ctx context.Context, texts [][]int, p llm.Pooling) ([][]float64, error)
}

// Limits for embeddings, as in OpenAI's API.
const (
	maxInputs      = 2048
	maxInputTokens = 300_000
)

// embedding describes the vector of a text as OpenAI's API does.
type embedding struct {
	Object    string `json:"object"`
	Index     int    `json:"index"`
	Embedding any    `json:"embedding"`
}

// serveEmbeddings answers requests for the vectors of texts.
func (s *Server) serveEmbeddings(w http.ResponseWriter, r *http.Request) {
	p, err := s.read(w, r)
	if err != nil {
		refuse(w, r, err)
		return
	}
	e, err := s.parseEmbeddings(p)
	if err != nil {
		refuse(w, r, err)
		return
	}

	ctx, cancel := context.WithTimeoutCause(r.Context(), s.options.Timeout, errDeadline)
	defer cancel()
	if err := s.slots.acquire(ctx, 1); err != nil {
		refuse(w, r, s.explain(r, err))
		return
	}
	defer s.slots.release(1)

	answer, err := e.answer(ctx)
	if err != nil {
		refuse(w, r, s.explain(r, err))
		return
	}
	s.metrics.prompt(e.tokens)
	s.deadline(w)
	writeJSON(w, http.StatusOK, answer)
}

// An embeddingJob is a request for the vectors of texts.
type embeddingJob struct {
	model      *Model
	embedder   Embedder
	texts      [][]int
	tokens     int
	pooling    llm.Pooling
	base64     bool
	dimensions int // asked for, or 0
}

func (s *Server) parseEmbeddings(p *params) (*embeddingJob, error) {
	m, err := s.find(p.text("model"))
	if p.err != nil || err != nil {
		return nil, errors.Join(p.err, err)
	}

	e := &embeddingJob{model: m, dimensions: p.integer("dimensions", 0, 1, math.MaxInt32)}
	switch f := p.text("encoding_format"); f {
	case "", "float":
	case "base64":
		e.base64 = true
	default:
		p.fail("encoding_format", "it is %.40q, want float or base64", f)
	}
	switch f := p.text("pooling"); f {
	case "", "mean":
	case "last":
		e.pooling = llm.LastPooling
	default:
		p.fail("pooling", "it is %.40q, want mean or last", f)
	}
	if p.err != nil {
		return nil, p.err
	}

	var ok bool
	if e.embedder, ok = m.Generator.(Embedder); !ok {
		return nil, invalid("model", "the model %q cannot embed texts", m.Name)
	}
	if e.texts, err = m.inputs(p.all["input"], "input", maxInputs, m.encodeWhole); err != nil {
		return nil, err
	}
	for _, ids := range e.texts {
		if err := m.checkTokens(ids, "input"); err != nil {
			return nil, err
		}
		if len(ids) > m.Context {
			return nil, &apiError{status: http.StatusBadRequest, param: "input", code: "context_length_exceeded",
				message: invalid("input", "a text has %d tokens, and the model's context has %d: shorten the text", len(ids),
					m.Context).message}
		}
		e.tokens += len(ids)
	}
	if e.tokens > maxInputTokens {
		return nil, invalid("input", "the texts have %d tokens, want at most %d: send several requests", e.tokens,
			maxInputTokens)
	}
	return e, nil
}

// encodeWhole returns the tokens of a text, with the tokenizer's special tokens before and after it.
func (m *Model) encodeWhole(text string) []int { return m.Tokenizer.EncodeWhole([]byte(text)) }

// answer computes the vectors. As in OpenAI's API, their length is 1.
func (e *embeddingJob) answer(ctx context.Context) (any, error) {
	vectors, err := e.embedder.Embed(ctx, e.texts, e.pooling)
	if err != nil {
		return nil, err
	}

	data := make([]embedding, len(vectors))
	for i, v := range vectors {
		if e.dimensions != 0 && e.dimensions != len(v) {
			return nil, invalid("dimensions", "it is %d, and the vectors of the model %q have %d numbers: it was not trained "+
				"for shorter ones", e.dimensions, e.model.Name, len(v))
		}
		unit, err := normalized(v)
		if err != nil {
			return nil, err
		}
		data[i] = embedding{"embedding", i, unit}
		if e.base64 {
			raw, err := binary.Append(nil, binary.LittleEndian, unit)
			if err != nil {
				return nil, err
			}
			data[i].Embedding = base64.StdEncoding.EncodeToString(raw)
		}
	}
	return map[string]any{"object": "list", "data": data, "model": e.model.Name,
		"usage": map[string]int{"prompt_tokens": e.tokens, "total_tokens": e.tokens}}, nil
}

// normalized returns a vector divided by its length.
func normalized(v []float64) ([]float32, error) {
	largest, sum := 0.0, 0.0
	for _, x := range v {
		largest = max(largest, math.Abs(x)) // NaN if x is NaN
	}
	if !(largest > 0) || math.IsInf(largest, 0) {
		return nil, errors.New("the model's vector for a text is zero or not finite")
	}
	for _, x := range v {
		sum += x / largest * (x / largest)
	}

	unit := make([]float32, len(v))
	for i, x := range v {
		unit[i] = float32(x / largest / math.Sqrt(sum))
	}
	return unit, nil
}
