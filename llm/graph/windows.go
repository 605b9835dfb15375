package graph

import "context"

// Windows computes logits for a sequence on machines that know no cache of keys and values: each
// token takes a pass over a window that holds all. It grows with them, to twice as many each time:
// while a window is small, a pass takes little more than reading the weights does.
type Windows struct {
	model Model
	make  func(*Graph) (Machine, error)
	now   Runner
	rows  int // of it, 0 before there is one
}

// smallestWindow is how many positions a GPU computes in the time of one.
const smallestWindow = 128

// NewWindows returns windows of a model, which make has machines for.
func NewWindows(m Model, make func(*Graph) (Machine, error)) *Windows {
	return &Windows{model: m, make: make}
}

// Next returns the logits for what follows the tokens, which fit the model's window.
func (w *Windows) Next(ctx context.Context, tokens []int) (any, error) {
	rows := smallestWindow
	for rows < len(tokens) {
		rows *= 2
	}
	if rows = min(rows, w.model.Config.Seq); rows > w.rows {
		g, err := Build(w.model, ForLogits, 1, WithWindow(rows))
		if err != nil {
			return nil, err
		}
		if err := w.Close(); err != nil {
			return nil, err
		}
		m, err := w.make(g)
		if err != nil {
			return nil, err
		}
		w.now, w.rows = Runner{g, m}, rows
	}
	return w.now.Next(ctx, tokens)
}

// WithWindow makes a graph one of sequences of so many positions, in the place of Config.Seq.
func WithWindow(positions int) Option { return func(b *builder) { b.blocks.Seq = positions } }

// Close frees the machine.
func (w *Windows) Close() error {
	if w.rows == 0 {
		return nil
	}
	w.rows = 0
	return w.now.Machine.Close()
}
