package runtest

import (
	"context"
	"errors"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/graph"
)

// gpuEngine is what the engine of a GPU is beside an llm.Engine.
type gpuEngine interface {
	llm.Stepper
	llm.Sensor
	llm.Keeper
	llm.Listener
}

// faultyGPU is the engine of a GPU, whose calls may fail.
type faultyGPU struct {
	gpuEngine
	in *injector
}

// faultyScaler is one that scales the loss.
type faultyScaler struct {
	faultyGPU
	scaler llm.Scaler
}

func wrapGPU(e gpuEngine, in *injector) llm.Engine {
	if s, ok := e.(llm.Scaler); ok {
		return faultyScaler{faultyGPU{e, in}, s}
	}
	return faultyGPU{e, in}
}

func (f faultyScaler) LossScale() llm.LossScale { return f.scaler.LossScale() }

func (f faultyScaler) SetLossScale(s llm.LossScale) error { return f.scaler.SetLossScale(s) }

func (f faultyGPU) Gradients(b data.Batch) (float64, error) {
	if err := f.in.call("Gradients"); err != nil {
		return 0, err
	}
	return f.gpuEngine.Gradients(b)
}

// Step counts as a call of both methods that it stands for.
func (f faultyGPU) Step(b data.Batch) (loss, norm float64, err error) {
	if err := f.in.call("Gradients"); err != nil {
		return 0, 0, err
	}
	if err := f.in.call("Update"); err != nil {
		return 0, 0, err
	}
	return f.gpuEngine.Step(b)
}

func (f faultyGPU) Update() (float64, error) {
	if err := f.in.call("Update"); err != nil {
		return 0, err
	}
	return f.gpuEngine.Update()
}

func (f faultyGPU) Loss(b data.Batch) (float64, error) {
	if err := f.in.call("Loss"); err != nil {
		return 0, err
	}
	return f.gpuEngine.Loss(b)
}

func (f faultyGPU) Push(params ...string) error {
	if err := f.in.call("Push"); err != nil {
		return err
	}
	return f.gpuEngine.Push(params...)
}

func (f faultyGPU) Pull(params ...string) error {
	if err := f.in.call("Pull"); err != nil {
		return err
	}
	return f.gpuEngine.Pull(params...)
}

func (f faultyGPU) Forget(param string, from, to int) error {
	if err := f.in.call("Forget"); err != nil {
		return err
	}
	return f.gpuEngine.Forget(param, from, to)
}

func (f faultyGPU) Figures() ([]graph.Figures, error) {
	if err := f.in.call("Figures"); err != nil {
		return nil, err
	}
	return f.gpuEngine.Figures()
}

func (f faultyGPU) Decoder() (func(context.Context, []int) (any, error), error) {
	if err := f.in.call("Decoder"); err != nil {
		return nil, err
	}
	return f.gpuEngine.Decoder()
}

// Close gives everything back also where it fails.
func (f faultyGPU) Close() error { return errors.Join(f.gpuEngine.Close(), f.in.call("Close")) }

// Keep is a Close that may not fail so, since nothing tells whether it has closed.
func (f faultyGPU) Keep() (llm.Kept, error) {
	kept, err := f.gpuEngine.Keep()
	if err != nil {
		return nil, err
	}
	return faultyKept{kept, f.in}, nil
}

// faultyKept is what an engine has left, of which the next engine may not be made.
type faultyKept struct {
	llm.Kept
	in *injector
}

func (k faultyKept) Engine(from map[string]string) (llm.Engine, error) {
	if err := k.in.call("engine"); err != nil {
		return nil, err
	}
	e, err := k.Kept.Engine(from)
	if err != nil {
		return nil, err
	}
	return wrap(e, k.in), nil
}

// memory views numbers as bytes.
func memory(data any) []byte { return safetensors.Memory(data) }
