// Package llm trains language models whose blocks may carry Kasmina layers. It holds the trainer:
// steps, growth, checkpoints, callbacks. What else users need has a name here too, and is in rooms:
//
//	llm/arch       configurations, and the parameters that follow from them
//	llm/model      parameters and seed lattices, their files
//	llm/graph      a model as a graph
//	llm/infer      losses, logits and text without gradients
//	llm/engine     what computes a trainer's steps
//	llm/callback   what a run does between steps
//	llm/event      what a run tells, spends and records
//	llm/data       text, tokens and batches
//	llm/tokenizer  from text to token ids and back
//	llm/sampler    from logits to a token
//	llm/runlog     what a run shows and writes
//	llm/plot       pictures
//	llm/baseline   what a model is compared with
//	llm/gpu        the engine on a GPU
//
//	data.Open  →  data.Tokenize  →  data.Loader  ┐
//	Config  →  NewModel  ────────────────────────┼→  Trainer  →  callbacks: runlog.Progress,
//	optim.AdamW or optim.Muon  ──────────────────┘    runlog.JSON, Evaluate, Checkpoint and more
//
// A [Model] is parameters and seed lattices; [Model.Graph] lays them out as a Gorgonia graph, as
// often as needed. The [Trainer] only steps: what a run shows, measures and saves is up to
// callbacks, and a program adds its own. The same seeds give the same bits on any number of cores.
// A run that was killed goes on from its checkpoint as if nothing had happened.
package llm

import (
	"context"
	"io"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/llm/engine"
	"github.com/kasmina-go/kasmina/llm/event"
	"github.com/kasmina-go/kasmina/llm/graph"
	"github.com/kasmina-go/kasmina/llm/infer"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/model"
	"github.com/kasmina-go/kasmina/optim"
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

// AllLogits returns the logits of a model at all positions of a sequence: see [infer.AllLogits].
func AllLogits(ctx context.Context, m *Model, tokens []int) (*tensor.Dense, error) {
	return infer.AllLogits(ctx, m, tokens)
}

// NewGenerator returns a generator that uses the model's parameters as they are at each call: see
// [infer.NewGenerator].
func NewGenerator(m *Model) (*Generator, error) { return infer.NewGenerator(m) }

// Engines are in package engine.
type (
	// Engine computes what a trainer asks for: [engine.Engine].
	Engine = engine.Engine
	// Scaler is an engine that scales the loss: [engine.Scaler].
	Scaler = engine.Scaler
	// Sensor is an engine that measures blueprints: [engine.Sensor].
	Sensor = engine.Sensor
	// Listener is an engine that tells gradients: [engine.Listener].
	Listener = engine.Listener
	// Stepper is an engine that makes the last batch's gradients and the update in one:
	// [engine.Stepper].
	Stepper = engine.Stepper
	// Parallel is an engine of one of several processes: [engine.Parallel].
	Parallel = engine.Parallel
	// Busier is a Parallel engine that can declare long work: [engine.Busier].
	Busier = engine.Busier
	// ParallelStepper is one whose update does not wait for losses: [engine.ParallelStepper].
	ParallelStepper = engine.ParallelStepper
	// StepResult is what a step of several processes has come to: [engine.StepResult].
	StepResult = engine.StepResult
	// Keeper is an engine that leaves its parameters to the next one: [engine.Keeper].
	Keeper = engine.Keeper
	// Kept is what it has left: [engine.Kept].
	Kept = engine.Kept
	// LossScale is a loss scale, and how it fared: [engine.LossScale].
	LossScale = engine.LossScale
	// Profiler is an engine that times its ops while it trains: [engine.Profiler].
	Profiler = engine.Profiler
	// OpTime is what the nodes of one op took in a step, on average: [engine.OpTime].
	OpTime = engine.OpTime
	// Measurer is an engine that measures what its device reaches at best: [engine.Measurer].
	Measurer = engine.Measurer
	// Ceiling is what a device reaches at best: [engine.Ceiling].
	Ceiling = engine.Ceiling
	// Chooser is an engine that tells the ways in which it computes ops: [engine.Chooser].
	Chooser = engine.Chooser
	// Choice is the way in which an op of some shape is computed: [engine.Choice].
	Choice = engine.Choice
	// Tracer is an engine that profiles a step of training: [engine.Tracer].
	Tracer = engine.Tracer
	// Profile is where the time of a step on a GPU went, kernel by kernel: [engine.Profile].
	Profile = engine.Profile
)

// Why an update cannot be trusted: see [engine.ErrGradients].
var (
	ErrGradients = engine.ErrGradients
	ErrOverflow  = engine.ErrOverflow
)

// CPUEngine returns what makes the engine of a trainer on the CPU, as TrainConfig.Engine does where
// it is nil. Its options are for the machine that trains, such as cpuops.WithMonitor.
func CPUEngine(opts ...cpuops.Option) func(*Model, optim.Optimizer, TrainConfig) (Engine, error) {
	return func(m *Model, o optim.Optimizer, c TrainConfig) (Engine, error) {
		g, err := c.Graph(m)
		if err != nil {
			return nil, err
		}
		return engine.NewCPU(m, g, o, c.Clip, opts...)
	}
}

// Graph builds the graph of a model whose gradients c asks for.
func (c TrainConfig) Graph(m *Model) (*Graph, error) {
	opts := []GraphOption{graph.WithLossShare(c.Accumulate)}
	if c.Recompute {
		opts = append(opts, WithRecompute())
	}
	if c.listen != nil {
		opts = append(opts, graph.WithGradients(c.listen...))
	}
	return m.Graph(ForTraining, c.Batch, opts...)
}

// What a run tells and decides is in package event.
type (
	// Event is what a callback sees: [event.Event].
	Event = event.Event
	// EventKind says what happened in a training run: [event.Kind].
	EventKind = event.Kind
	// A Callback reacts to the events of a training run: [event.Callback].
	Callback = event.Callback
	// Budget is what a run may spend: [event.Budget].
	Budget = event.Budget
	// Request is something that somebody asks of a run: [event.Request].
	Request = event.Request
	// Decision is a line of a record of growth: [event.Decision].
	Decision = event.Decision
	// Record is all that a controller and the clock have decided in a run: [event.Record].
	Record = event.Record
)

// The events of a run: see [event.Kind].
const (
	RunStart    = event.RunStart
	Complete    = event.Complete
	StepEnd     = event.StepEnd
	EvalEnd     = event.EvalEnd
	Saved       = event.Saved
	Sampled     = event.Sampled
	Profiled    = event.Profiled
	Interrupted = event.Interrupted
	RunEnd      = event.RunEnd
	Chosen      = event.Chosen
	Failed      = event.Failed
	EpochEnd    = event.EpochEnd
	Corrupted   = event.Corrupted
	Reshaped    = event.Reshaped
	Measured    = event.Measured
	Noted       = event.Noted
)

// ReadRecord reads what a Growth.Record has written. It returns an error that names the line which
// is no decision.
func ReadRecord(r io.Reader) (*Record, error) { return event.ReadRecord(r) }
