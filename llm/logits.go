package llm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/tensor"
)

// AllLogits returns the logits of a model at all positions of a sequence, a tensor [len(tokens),
// Vocab] of the model's type. Row i holds the logits for the token that follows tokens[:i+1].
//
// AllLogits runs on the CPU. If a trainer is running, it waits for the end of the current step. It
// stops when ctx is done.
func AllLogits(ctx context.Context, m *Model, tokens []int) (*tensor.Dense, error) {
	logits, err := allLogits(ctx, m, tokens)
	if err != nil {
		return nil, fmt.Errorf("llm: AllLogits: %w", err)
	}
	return logits, nil
}

func allLogits(ctx context.Context, m *Model, tokens []int) (logits *tensor.Dense, err error) {
	if err := checkMade(m); err != nil {
		return nil, err
	}
	defer take(m)()

	switch {
	case len(tokens) == 0:
		return nil, errors.New("there are no tokens, want at least one")
	case len(tokens) > m.Config.Seq:
		return nil, fmt.Errorf("there are %d tokens, want at most Config.Seq, %d", len(tokens), m.Config.Seq)
	}

	if err := m.Config.Knows(slices.Values(tokens)); err != nil {
		return nil, err
	}

	if err := pull(m, paramNames(m)...); err != nil {
		return nil, err
	}

	parts := m.Parts()
	parts.Config.Seq = len(tokens)
	g, err := BuildGraph(parts, ForLogits, 1, WithAllPositions())
	if err != nil {
		return nil, err
	}

	r, err := runnerOnCPU(g)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Machine.Close()) }()

	return r.All(ctx, tokens)
}
