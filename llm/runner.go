package llm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/data"
)

// Machine computes a graph, as cpuops.Machine and cudaops.Machine do.
type Machine interface {
	Run(ctx context.Context) error
	Value(*gorgonia.Node) (gorgonia.Value, error)
	Close() error
}

// Runner is a graph on a machine. Only one goroutine may use it at a time.
type Runner struct {
	*Graph
	Machine Machine
}

var errNoRunner = errors.New("llm: a Runner needs a Graph and a Machine")

// Run computes a graph with a loss on a batch, and returns the loss.
func (r Runner) Run(b data.Batch) (float64, error) { return r.RunContext(context.Background(), b) }

// RunContext computes a graph with a loss on a batch, and returns the loss. It returns context.Cause(ctx)
// if ctx is done. A cpuops.Machine checks ctx during the batch, other machines only before it.
func (r Runner) RunContext(ctx context.Context, b data.Batch) (float64, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}

	if r.Graph == nil || r.Machine == nil {
		return 0, errNoRunner
	}

	if err := r.Let(b); err != nil {
		return 0, err
	}

	data, err := r.compute(ctx, r.Loss)
	if err != nil {
		return 0, err
	}

	switch x := data.(type) {
	case float32:
		return float64(x), nil
	case float64:
		return x, nil
	}

	return 0, fmt.Errorf("the loss is a %T", data)
}

// Next computes a graph for logits, and returns the logits, a []float32 or []float64, for the token that
// follows the given ones. It returns an error if ctx is canceled first.
func (r Runner) Next(ctx context.Context, tokens []int) (any, error) {
	if r.Graph == nil || r.Machine == nil {
		return nil, errNoRunner
	}
	if err := r.LetTokens(tokens); err != nil {
		return nil, err
	}
	return r.compute(ctx, r.Logits)
}

// All computes a graph with the logits of all positions of one sequence, which must have as many
// positions as there are tokens, and returns a copy of the logits. On a cpuops.Machine, it stops when
// ctx is done.
func (r Runner) All(ctx context.Context, tokens []int) (*tensor.Dense, error) {
	if r.Graph == nil || r.Machine == nil {
		return nil, errNoRunner
	}

	if r.IDs == nil || r.Rows == nil || r.Rows.Shape()[0] != len(tokens) || r.IDs.Shape()[0] != len(tokens) {
		return nil, errNoGraph
	}

	rows := make([]int, len(tokens))
	for i := range rows {
		rows[i] = i
	}

	if err := gorgonia.Let(r.IDs, idTensor(slices.Clone(tokens))); err != nil {
		return nil, err
	}

	if err := gorgonia.Let(r.Rows, idTensor(rows)); err != nil {
		return nil, err
	}

	if _, err := r.compute(ctx, r.Logits); err != nil {
		return nil, err
	}

	v, err := r.Machine.Value(r.Logits)
	if err != nil {
		return nil, err
	}

	logits, ok := v.(*tensor.Dense)
	if !ok {
		return nil, fmt.Errorf("the logits are a %T", v)
	}

	return logits.Clone().(*tensor.Dense), nil
}

// run computes the graph.
func (r Runner) run(ctx context.Context) error {
	if err := r.seeds.steer(); err != nil {
		return err
	}
	return r.Machine.Run(ctx)
}

// compute computes the graph and returns the value of a node.
func (r Runner) compute(ctx context.Context, n *gorgonia.Node) (any, error) {
	if err := r.run(ctx); err != nil {
		return nil, err
	}

	v, err := r.Machine.Value(n)
	if err != nil {
		return nil, err
	}

	return v.Data(), nil
}

// logitsReader is a machine that can return a value without a copy.
type logitsReader interface {
	Read(*gorgonia.Node) (any, error)
}

// logits computes a graph for logits. The next computation may overwrite the result.
func (r Runner) logits(ctx context.Context) (any, error) {
	m, ok := r.Machine.(logitsReader)
	if !ok {
		return r.compute(ctx, r.Logits)
	}

	if err := r.run(ctx); err != nil {
		return nil, err
	}
	return m.Read(r.Logits)
}

// runnerOnCPU returns a runner for g on a CPU machine that keeps the given outputs.
func runnerOnCPU(g *Graph, outputs ...*gorgonia.Node) (Runner, error) {
	if g == nil || g.G == nil {
		return Runner{}, errNoGraph
	}
	m, err := cpuops.NewMachine(g.G, g.cpuOptions(cpuops.WithOutputs(outputs...))...)
	if err != nil {
		return Runner{}, err
	}
	return Runner{g, m}, nil
}

// errNoGraph is the error for a graph that is uninitialized or of the wrong kind.
var errNoGraph = errors.New("llm: the graph is nil, uninitialized or of the wrong kind, want one " +
	"from Model.Graph, for a loss or for logits")

// Let feeds a batch to a graph with a loss, and sets its seeds to the current state of their lattices.
func (g *Graph) Let(b data.Batch) error {
	if g == nil || g.IDs == nil || g.Targets == nil {
		return errNoGraph
	}

	if err := g.seeds.steer(); err != nil {
		return err
	}

	if err := gorgonia.Let(g.IDs, idTensor(b.Inputs)); err != nil {
		return err
	}

	if g.Starts != nil {
		starts := b.Starts
		if starts == nil {
			starts = make([]int, len(b.Inputs))
		}
		if err := gorgonia.Let(g.Starts, idTensor(starts)); err != nil {
			return err
		}
	}

	if g.Positions != nil {
		positions := b.Positions
		if positions == nil {
			positions = make([]int, len(b.Inputs))
			for i := range positions {
				positions[i] = i % (len(positions) / g.Batch)
			}
		}
		if err := gorgonia.Let(g.Positions, idTensor(positions)); err != nil {
			return err
		}
	}

	if err := g.letAnswers(b); err != nil {
		return err
	}

	if err := g.letShare(b.Share); err != nil {
		return err
	}

	if g.key != nil {
		if err := gorgonia.Let(g.key, idTensor([]int{b.Key})); err != nil {
			return err
		}
	}

	return gorgonia.Let(g.Targets, idTensor(b.Targets))
}

// letAnswers feeds the preference pairs of a batch to a graph with their loss.
func (g *Graph) letAnswers(b data.Batch) error {
	if g.Answers == nil {
		return nil
	}

	n := len(b.Inputs)
	if len(b.Answers) != n || len(b.Reference) != n {
		return fmt.Errorf("llm: the batch has %d tokens, the answers of %d, and references of %d: a loss of "+
			"preference pairs needs a loader of pairs", n, len(b.Answers), len(b.Reference))
	}

	if err := gorgonia.Let(g.Answers, idTensor(b.Answers)); err != nil {
		return err
	}

	next := 0
	return gorgonia.Let(g.Reference, newParamValue(g.Reference.Dtype(), []int{n}, func() float64 {
		next++
		return b.Reference[next-1]
	}))
}

// letShare sets the input for the batch's share of its step's loss, if there is one.
func (g *Graph) letShare(share float64) error {
	if g.share == nil {
		return nil
	}
	if share == 0 {
		share = 1 / float64(g.shares)
	}
	if g.share.Dtype() == tensor.Float64 {
		return gorgonia.Let(g.share, share)
	}
	return gorgonia.Let(g.share, float32(share))
}

// LetTokens feeds the tokens of one sequence to a graph, so that it computes the logits for the next
// token. The rest of the window is filled with zeros, which are invisible to a causal model from the
// last token's position.
func (g *Graph) LetTokens(tokens []int) error {
	if g == nil || g.IDs == nil || g.Rows == nil {
		return errNoGraph
	}
	window := make([]int, g.IDs.Shape()[0])
	copy(window, tokens)
	if err := gorgonia.Let(g.Rows, idTensor([]int{len(tokens) - 1})); err != nil {
		return err
	}
	return gorgonia.Let(g.IDs, idTensor(window))
}

func idTensor(x []int) *tensor.Dense {
	return tensor.New(tensor.WithShape(len(x)),
		tensor.WithBacking(x))
}
