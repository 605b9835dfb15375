package llm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/llm/graph"
)

// Graphs are built and run by package graph.
type (
	// Param is a trainable tensor of a model: [graph.Param].
	Param = graph.Param
	// Graph is a model's computation on one batch: [graph.Graph].
	Graph = graph.Graph
	// GraphKind says what a graph computes: [graph.Kind].
	GraphKind = graph.Kind
	// GraphOption changes how a graph is built: [graph.Option].
	GraphOption = graph.Option
	// Machine computes a graph: [graph.Machine].
	Machine = graph.Machine
	// Runner is a model's graph on a machine: [graph.Runner].
	Runner = graph.Runner
)

// The kinds of graph.
const (
	ForTraining = graph.ForTraining // the loss and its gradients
	ForLoss     = graph.ForLoss     // the loss alone
	ForLogits   = graph.ForLogits   // the logits of one position of each sequence
)

// WithRecompute is [graph.WithRecompute].
func WithRecompute() GraphOption { return graph.WithRecompute() }

// Graph builds the model's computation on batches of the given number of sequences. ForTraining it
// includes the gradients of all parameters; run it on a machine made with
// gorgonia.BindDualValues(g.Params...).
func (m *Model) Graph(kind GraphKind, batch int, opts ...GraphOption) (*Graph, error) {
	if err := m.made(); err != nil {
		return nil, fmt.Errorf("llm: Graph: %w", err)
	}
	return graph.Build(m.parts(), kind, batch, opts...)
}

// parts is what graphs of the model are built of.
func (m *Model) parts() graph.Model {
	return graph.Model{Config: m.Config, Params: m.Params, Kasmina: m.Kasmina}
}
