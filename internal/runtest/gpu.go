package runtest

import (
	"context"
	"errors"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
)

// gpuEngine is the interface of a GPU engine.
type gpuEngine interface {
	llm.Stepper
	llm.Sensor
	llm.Keeper
	llm.Listener
	llm.PreferenceMeter
}

// faultyGPU wraps the engine of a GPU so that calls can fail.
type faultyGPU struct {
	gpuEngine
	in *injector
}

// faultyScaler wraps the engine of a GPU that scales the loss.
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

// Step counts as a call of Gradients and a call of Update.
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

func (f faultyGPU) LogProbs(ctx context.Context, b data.Batch) ([]float64, error) {
	if err := f.in.call("LogProbs"); err != nil {
		return nil, err
	}
	return f.gpuEngine.LogProbs(ctx, b)
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

func (f faultyGPU) Forget(ranges ...llm.ParamRange) error {
	if err := f.in.call("Forget"); err != nil {
		return err
	}
	return f.gpuEngine.Forget(ranges...)
}

func (f faultyGPU) Figures() ([]llm.SeedFigures, error) {
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

// Close releases all resources even if it fails.
func (f faultyGPU) Close() error { return errors.Join(f.gpuEngine.Close(), f.in.call("Close")) }

// Keep does not fail, because its caller could not tell whether the engine has been closed.
func (f faultyGPU) Keep() (llm.Kept, error) {
	kept, err := f.gpuEngine.Keep()
	if err != nil {
		return nil, err
	}
	return faultyKept{kept, f.in}, nil
}

// faultyKept wraps memory handed over from one engine to the next, so that creating the next engine
// can fail.
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

// memory returns the bytes of a slice of numbers without copying them.
func memory(data any) []byte { return safetensors.Memory(data) }
