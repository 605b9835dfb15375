package llm

import (
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/engine"
	"github.com/kasmina-go/kasmina/llm/graph"
	"github.com/kasmina-go/kasmina/optim"
)

// Engines are in package engine.
type (
	// Engine computes what a trainer asks for: [engine.Engine].
	Engine = engine.Engine
	// Scaler is an engine that scales the loss: [engine.Scaler].
	Scaler = engine.Scaler
	// Sensor is an engine that measures blueprints: [engine.Sensor].
	Sensor = engine.Sensor
	// Stepper is an engine that makes the last batch's gradients and the update in one:
	// [engine.Stepper].
	Stepper = engine.Stepper
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
// it is nil, with options for the machine that trains, such as cpuops.WithMonitor.
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
	return m.Graph(ForTraining, c.Batch, opts...)
}
