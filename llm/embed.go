package llm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
)

// Pooling selects how Embed combines the states of a text's tokens into one vector.
type Pooling uint8

const (
	MeanPooling Pooling = iota // the mean of the states of all tokens
	LastPooling                // the state of the last token, which has seen the whole text
)

// withStates makes a ForLogits graph end with the normalized states of its rows, instead of their logits.
func withStates() GraphOption { return func(b *graphBuilder) { b.states = true } }

// An embedJob is a request for the vector of a text.
type embedJob struct {
	ctx     context.Context
	tokens  []int
	adapter int
	pooling Pooling
	vector  []float64
	err     error
	done    chan struct{}
}

// Embed returns a vector of Config.Dim numbers for each text, which combines the states of its tokens after the last norm.
//
// Only generators of a [Batcher] can embed texts. The batcher embeds several texts in one pass, between the passes that
// continue its other texts.
func (g *Generator) Embed(ctx context.Context, texts [][]int, p Pooling) ([][]float64, error) {
	switch {
	case g == nil || g.embed == nil:
		return nil, errors.New("llm: Embed: the generator is not one of a Batcher")
	case p > LastPooling:
		return nil, fmt.Errorf("llm: Embed: there is no pooling %d", p)
	}
	vectors, err := g.embed(ctx, texts, p)
	if err != nil {
		return nil, fmt.Errorf("llm: Embed: %w", err)
	}
	return vectors, nil
}

// embed implements Embed for the model with an adapter.
func (b *Batcher) embed(ctx context.Context, texts [][]int, adapter int, p Pooling) ([][]float64, error) {
	jobs := make([]*embedJob, len(texts))
	for i, tokens := range texts {
		if err := b.check(tokens); err != nil {
			return nil, fmt.Errorf("text %d: %w", i, err)
		}
		jobs[i] = &embedJob{ctx: ctx, tokens: slices.Clone(tokens), adapter: adapter, pooling: p,
			done: make(chan struct{})}
	}

	b.mu.Lock()
	b.embeds = append(b.embeds, jobs...)
	b.mu.Unlock()

	select {
	case b.arrived <- struct{}{}:
	default:
	}

	vectors := make([][]float64, len(jobs))
	for i, j := range jobs {
		select {
		case <-j.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-b.done:
			return nil, context.Cause(b.stopped)
		}
		if j.err != nil {
			return nil, j.err
		}
		vectors[i] = j.vector
	}
	return vectors, nil
}

// embedTokens is the approximate number of tokens in a pass that embeds texts. It is limited because texts that are being
// continued must wait for the pass.
const embedTokens = 512

// embedSome embeds some of the waiting texts, in one pass.
func (b *Batcher) embedSome() {
	b.mu.Lock()
	b.embeds = slices.DeleteFunc(b.embeds, func(j *embedJob) bool { return j.ctx.Err() != nil })
	jobs := slices.Clone(b.embeds)
	b.mu.Unlock()
	if len(jobs) == 0 {
		return
	}

	// Choose the text that has waited longest, and others that are at most as long.
	window := len(jobs[0].tokens)
	jobs = slices.DeleteFunc(jobs, func(j *embedJob) bool { return len(j.tokens) > window })
	slices.SortStableFunc(jobs[1:], func(x, y *embedJob) int { return cmp.Compare(len(y.tokens), len(x.tokens)) })
	jobs = jobs[:min(len(jobs), max(1, embedTokens/window))]

	err := b.embedPass(jobs, window)
	for _, j := range jobs {
		if err != nil {
			j.err = err
		}
		close(j.done)
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	b.embeds = slices.DeleteFunc(b.embeds, func(j *embedJob) bool { return slices.Contains(jobs, j) })
}

// embedPass computes the vectors of texts with at most window tokens.
func (b *Batcher) embedPass(jobs []*embedJob, window int) error {
	if b.model != nil {
		defer take(b.model)()
	}
	if err := b.prepare(); err != nil {
		return err
	}

	r, err := b.embedder(scoreShape{sequences: roundRows(len(jobs)), window: min(roundWindow(window), b.config.Seq)})
	if err != nil {
		return err
	}
	window = r.IDs.Shape()[0] / r.Batch

	ids, rows := make([]int, r.IDs.Shape()[0]), make([]int, r.IDs.Shape()[0])
	adapters := slices.Repeat([]int{noAdapter}, len(ids))
	for i, j := range jobs {
		copy(ids[i*window:], j.tokens)
		for k := range window {
			adapters[i*window+k] = j.adapter
		}
	}
	for i := range rows {
		rows[i] = i
	}

	b.selected.Set(adapters)
	b.rowSet = adapters
	if err := errors.Join(gorgonia.Let(r.IDs, idTensor(ids)), gorgonia.Let(r.Rows, idTensor(rows)),
		b.letAdapters(r.Graph)); err != nil {
		return err
	}

	states, err := r.compute(b.stopped, r.States)
	if err != nil {
		return err
	}

	for i, j := range jobs {
		switch x := states.(type) {
		case []float32:
			j.vector = pool(x[i*window*b.config.Dim:], len(j.tokens), b.config.Dim, j.pooling)
		case []float64:
			j.vector = pool(x[i*window*b.config.Dim:], len(j.tokens), b.config.Dim, j.pooling)
		default:
			return fmt.Errorf("the states are a %T", states)
		}
	}
	return nil
}

// pool returns the vector of a text with the given states.
func pool[T float32 | float64](states []T, tokens, dim int, p Pooling) []float64 {
	first := 0
	if p == LastPooling {
		first = tokens - 1
	}

	vector := make([]float64, dim)
	for row := first; row < tokens; row++ {
		for i, x := range states[row*dim:][:dim] {
			vector[i] += float64(x) / float64(tokens-first)
		}
	}
	return vector
}

// embedder returns a runner for passes of a shape that embed texts.
func (b *Batcher) embedder(shape scoreShape) (Runner, error) {
	if r, ok := b.embedders[shape]; ok {
		return r, nil
	}
	if len(b.embedders) == scoreGraphs {
		if err := b.closeEmbedders(); err != nil {
			return Runner{}, err
		}
	}

	opts := []GraphOption{WithWindow(shape.window), WithAllPositions(), withStates(), withAdapters(b.adapters, &b.selected)}
	if b.inference != nil {
		opts = append(opts, WithAdapterSet(b.inference.Adapters))
	}
	g, err := BuildGraph(b.parts(), ForLogits, shape.sequences, opts...)
	if err != nil {
		return Runner{}, err
	}
	r, err := b.runner(g)
	if err != nil {
		return Runner{}, err
	}

	if b.embedders == nil {
		b.embedders = map[scoreShape]Runner{}
	}
	b.embedders[shape] = r
	return r, nil
}

func (b *Batcher) closeEmbedders() (err error) {
	for shape, r := range b.embedders {
		err = errors.Join(err, r.close())
		delete(b.embedders, shape)
	}
	return err
}
