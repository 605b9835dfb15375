package llm

import (
	"context"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/llm/graph"
	"github.com/kasmina-go/kasmina/llm/infer"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/model"
	"github.com/kasmina-go/kasmina/state"
)

// What describes a model's architecture is in package arch.
type (
	// Config describes a model: [arch.Config].
	Config = arch.Config
	// Traits are what families of models have beyond Llama 2: [arch.Traits].
	Traits = arch.Traits
	// Block is what the attention of a block has of its own: [arch.Block].
	Block = arch.Block
	// Grown is a growth of a model's stack of blocks: [arch.Grown].
	Grown = arch.Grown
	// WeightSite is a linear layer on which a seed sits: [arch.WeightSite].
	WeightSite = arch.WeightSite
	// Planted is a blueprint at a weight or in the stream: [arch.Planted].
	Planted = arch.Planted
	// KasminaOptions are the options of a model's Kasmina layers: [arch.KasminaOptions].
	KasminaOptions = arch.KasminaOptions
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

// Models are in package model, what computes and samples them in package infer.
type (
	// Model is a set of parameters and seed lattices: [model.Model].
	Model = model.Model
	// Inference is the part of an engine that has no gradients: [infer.Inference].
	Inference = infer.Inference
	// Generator draws text from a model: [infer.Generator].
	Generator = infer.Generator
)

// ErrArchitecture is wrapped by the error of a checkpoint whose model is not the one that it is
// loaded into.
var ErrArchitecture = modelfile.ErrArchitecture

// NewModel returns a model with fresh parameters of type float32 or float64: see [model.New].
func NewModel(c Config, dt tensor.Dtype, seed uint64, lattice ...state.Option) (*Model, error) {
	return model.New(c, dt, seed, lattice...)
}

// NewModelFrom returns a model whose parameters fill writes: see [model.NewFrom].
func NewModelFrom(c Config, dt tensor.Dtype, fill func(Param) error,
	lattice ...state.Option) (*Model, error) {
	return model.NewFrom(c, dt, fill, lattice...)
}

// LoadModel reads a model from a file that Model.Save or Trainer.Save wrote: see [model.Load].
func LoadModel(ctx context.Context, path string) (*Model, error) { return model.Load(ctx, path) }

// NewGenerator returns a generator that uses the model's parameters as they are at each call: see
// [infer.NewGenerator].
func NewGenerator(m *Model) (*Generator, error) { return infer.NewGenerator(m) }
