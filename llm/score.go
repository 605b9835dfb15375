package llm

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"

	"gorgonia.org/gorgonia"
)

// A Continuation is a text whose last tokens are scored.
type Continuation struct {
	Tokens []int // context and scored tokens, at most Config.Seq+1
	Scored int   // number of tokens to score; at least one token precedes them
}

// A ContinuationScore is the score of a [Continuation].
type ContinuationScore struct {
	LogProb float64 // natural logarithm of the probability of the scored tokens, given the context
	Greedy  bool    // whether each scored token is the most probable one at its position
}

const (
	// scoreTokens is the approximate number of tokens in a pass of Score.
	scoreTokens = 4096
	// scoreLogits limits the number of logits that a pass of Score computes.
	scoreLogits = 1 << 26
	// scoreGraphs is the number of graphs that Score keeps for passes of different shapes.
	scoreGraphs = 4
)

// scoreShape is the shape of a pass of Score.
type scoreShape struct{ sequences, window, rows int }

// A scoredInput is a continuation without its last token. Continuations that differ only in the last token
// share an input.
type scoredInput struct {
	tokens []int
	rows   int   // number of positions at the end that need logits
	texts  []int // indices of the continuations
}

// Score scores any number of continuations. It computes them in passes of a few thousand tokens, with
// similar lengths together, and shares the work among continuations that differ only in their last token.
//
// On the CPU it checks ctx during a pass, otherwise between passes.
func (i *Inference) Score(ctx context.Context, texts []Continuation) ([]ContinuationScore, error) {
	scores, err := i.score(ctx, texts)
	if err != nil {
		return nil, fmt.Errorf("llm: Score: %w", err)
	}
	return scores, nil
}

func (i *Inference) score(ctx context.Context, texts []Continuation) ([]ContinuationScore, error) {
	m, err := i.parts()
	if err != nil {
		return nil, err
	}

	inputs, err := scoredInputs(m.Config, texts)
	if err != nil {
		return nil, err
	}

	scores := make([]ContinuationScore, len(texts))
	for len(inputs) > 0 {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}

		n := passSize(m.Config, inputs)
		if err := i.scorePass(ctx, m, inputs[:n], texts, scores); err != nil {
			return nil, err
		}
		inputs = inputs[n:]
	}

	return scores, nil
}

// scoredInputs checks the continuations and returns their inputs, the longest ones first.
func scoredInputs(c Config, texts []Continuation) (inputs []scoredInput, err error) {
	byTokens := map[string]int{}
	for n, t := range texts {
		switch {
		case t.Scored < 1 || t.Scored >= len(t.Tokens):
			return nil, fmt.Errorf("continuation %d has %d tokens and scores %d, want at least one scored "+
				"token and one before it", n, len(t.Tokens), t.Scored)
		case len(t.Tokens) > c.Seq+1:
			return nil, fmt.Errorf("continuation %d has %d tokens, want at most %d, one more than "+
				"Config.Seq", n, len(t.Tokens), c.Seq+1)
		}
		if err := c.Knows(slices.Values(t.Tokens)); err != nil {
			return nil, fmt.Errorf("continuation %d: %w", n, err)
		}

		tokens := t.Tokens[:len(t.Tokens)-1]
		key := tokensKey(tokens)
		at, ok := byTokens[key]
		if !ok {
			at = len(inputs)
			byTokens[key] = at
			inputs = append(inputs, scoredInput{tokens: tokens})
		}
		inputs[at].rows = max(inputs[at].rows, t.Scored)
		inputs[at].texts = append(inputs[at].texts, n)
	}

	slices.SortStableFunc(inputs, func(a, b scoredInput) int { return cmp.Compare(len(b.tokens), len(a.tokens)) })
	return inputs, nil
}

// tokensKey returns a string that differs for different tokens.
func tokensKey(tokens []int) string {
	key := make([]byte, 0, 3*len(tokens))
	for _, id := range tokens {
		key = binary.AppendUvarint(key, uint64(id))
	}
	return string(key)
}

// passSize returns how many of the inputs, sorted by length, form the next pass.
func passSize(c Config, inputs []scoredInput) int {
	window, rows := len(inputs[0].tokens), 0
	for n, in := range inputs {
		rows += in.rows
		if n > 0 && ((n+1)*window > scoreTokens || rows*c.Vocab > scoreLogits) {
			return n
		}
	}
	return len(inputs)
}

// scorePass scores the continuations of some inputs.
func (i *Inference) scorePass(ctx context.Context, m ModelParts, inputs []scoredInput,
	texts []Continuation, scores []ContinuationScore) error {
	rows := 0
	for _, in := range inputs {
		rows += in.rows
	}

	r, err := i.scorer(m, scoreShape{sequences: roundRows(len(inputs)),
		window: min(roundWindow(len(inputs[0].tokens)), m.Config.Seq), rows: roundRows(rows)})
	if err != nil {
		return err
	}

	if err := r.letInputs(inputs); err != nil {
		return err
	}

	logits, err := r.compute(ctx, r.Logits)
	if err != nil {
		return err
	}

	width := r.Logits.Shape()[1]
	switch x := logits.(type) {
	case []float32:
		scoreRows(x, width, inputs, texts, scores)
	case []float64:
		scoreRows(x, width, inputs, texts, scores)
	default:
		return fmt.Errorf("the logits are a %T", logits)
	}

	return nil
}

// scorer returns a runner for a pass.
func (i *Inference) scorer(m ModelParts, shape scoreShape) (Runner, error) {
	if r, ok := i.scores[shape]; ok {
		return r, nil
	}

	if len(i.scores) == scoreGraphs {
		var err error
		for _, r := range i.scores {
			err = errors.Join(err, r.Machine.Close())
		}
		i.scores = nil
		if err != nil {
			return Runner{}, err
		}
	}

	r, err := i.runner(m, ForLogits, shape.sequences, WithWindow(shape.window), WithRows(shape.rows))
	if err != nil {
		return Runner{}, err
	}

	if i.scores == nil {
		i.scores = map[scoreShape]Runner{}
	}
	i.scores[shape] = r
	return r, nil
}

// roundWindow rounds a number of positions up by at most an eighth, or to a multiple of 8, so that few
// graphs serve sequences of similar lengths.
func roundWindow(n int) int {
	step := 8
	for step*16 <= n {
		step *= 2
	}
	return (n + step - 1) / step * step
}

// letInputs feeds inputs to a graph, and selects the rows that need logits.
func (g *Graph) letInputs(inputs []scoredInput) error {
	ids := make([]int, g.IDs.Shape()[0])
	window := len(ids) / g.Batch
	selected := make([]int, 0, g.Rows.Shape()[0])
	for n, in := range inputs {
		copy(ids[n*window:], in.tokens)
		for row := len(in.tokens) - in.rows; row < len(in.tokens); row++ {
			selected = append(selected, n*window+row)
		}
	}

	if err := gorgonia.Let(g.IDs, idTensor(ids)); err != nil {
		return err
	}
	return gorgonia.Let(g.Rows, idTensor(selected[:cap(selected)]))
}

// scoreRows computes scores from the logits of the inputs' rows. Each continuation is scored by a single
// goroutine, so that its score does not depend on the number of processors.
func scoreRows[T float32 | float64](logits []T, width int, inputs []scoredInput, texts []Continuation,
	scores []ContinuationScore) {
	var wait sync.WaitGroup
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	end := 0
	for _, in := range inputs {
		end += in.rows
		own := logits[(end-in.rows)*width : end*width]
		wait.Add(1)
		slots <- struct{}{}
		go func() {
			defer func() { <-slots; wait.Done() }()
			scoreInput(own, width, in, texts, scores)
		}()
	}

	wait.Wait()
}

// scoreInput scores the continuations of one input from the logits of its rows.
func scoreInput[T float32 | float64](logits []T, width int, in scoredInput, texts []Continuation,
	scores []ContinuationScore) {
	norms, best := make([]float64, in.rows), make([]int, in.rows)
	for row := range in.rows {
		norms[row], best[row] = logNorm(logits[row*width:][:width])
	}

	for _, n := range in.texts {
		t := texts[n]
		s := ContinuationScore{Greedy: true}
		for k, token := range t.Tokens[len(t.Tokens)-t.Scored:] {
			row := in.rows - t.Scored + k
			s.LogProb += float64(logits[row*width+token]) - norms[row]
			s.Greedy = s.Greedy && best[row] == token
		}
		scores[n] = s
	}
}

// logNorm returns log Σ exp(x) and the index of the largest x.
func logNorm[T float32 | float64](x []T) (norm float64, best int) {
	for i, v := range x {
		if v > x[best] {
			best = i
		}
	}

	top, sum := float64(x[best]), 0.0
	for _, v := range x {
		sum += math.Exp(float64(v) - top)
	}
	return top + math.Log(sum), best
}
