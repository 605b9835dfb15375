package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
)

// trainer is the part of an llm.Engine that a step needs.
type trainer interface {
	Gradients(data.Batch) (loss float64, err error)
	Update() (norm float64, err error)
	Close() error
}

// training selects the device and the precision of a run.
type training struct {
	device               string
	precision, gradients cudaops.Precision
}

func (h training) String() string {
	s := fmt.Sprintf("kasmina-%s-%v", h.device, h.precision)
	if h.gradients != cudaops.Float32 {
		s += fmt.Sprintf("-gradients-%v", h.gradients)
	}
	return s
}

// train runs the steps and writes their losses. Each loss is computed before the update of its step.
func (h training) train(dir string, out io.Writer) (err error) {
	var s settings
	if err := readJSON(filepath.Join(dir, settingsFile), &s); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w; agree write %s creates a run", err, dir)
	} else if err != nil {
		return err
	}

	m, err := llm.LoadModel(context.Background(), filepath.Join(dir, modelFile))
	if err != nil {
		return err
	}

	data, err := batches(dir, s)
	if err != nil {
		return err
	}

	o, err := optim.NewAdamW(optim.WithBetas(s.Beta1, s.Beta2), optim.WithEps(s.Epsilon),
		optim.WithWeightDecay(s.Decay))
	if err != nil {
		return err
	}

	t, done, err := h.newTrainer(m, o, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close(), done()) }()

	losses := make([]float64, len(data))
	for i, b := range data {
		if losses[i], err = t.Gradients(b); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
		if err := o.SetLR(s.Rates[i]); err != nil {
			return err
		}
		if _, err := t.Update(); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}

	fmt.Fprintf(out, "%v: %d steps, loss %.4f to %.4f\n", h, len(losses), losses[0],
		losses[len(losses)-1])
	return writeJSON(filepath.Join(dir, lossPrefix+h.String()+".json"), losses)
}

// newTrainer returns the trainer for a device, and a function that closes the device afterwards.
func (h training) newTrainer(m *llm.Model, o *optim.AdamW,
	s settings) (trainer, func() error, error) {
	switch {
	case h.device == "cpu" && h.precision == cudaops.Float32 && h.gradients == cudaops.Float32:
		t, err := newHost(m, o, s)
		return t, func() error { return nil }, err
	case h.device == "cuda":
		d, err := cudaops.Open()
		if err != nil {
			return nil, nil, err
		}
		e, err := gpu.Engine(d, h.precision, cudaops.WithGradientPrecision(h.gradients))(m, o,
			llm.TrainConfig{Batch: s.Batch, Clip: s.Clip, Accumulate: 1})
		if err != nil {
			return nil, nil, errors.Join(err, d.Close())
		}
		return e, d.Close, nil
	}

	return nil, nil, fmt.Errorf(
		"-device is %q, -precision %v and -grad-precision %v, want cpu and f32, or cuda",
		h.device, h.precision, h.gradients)
}

// host trains on the CPU.
type host struct {
	*llm.Graph
	*cpuops.Machine
	*optim.AdamW
	clip float64
}

func newHost(m *llm.Model, o *optim.AdamW, s settings) (trainer, error) {
	g, err := m.Graph(llm.ForTraining, s.Batch)
	if err != nil {
		return nil, err
	}
	machine, err := cpuops.NewMachine(g.G, cpuops.WithParams(g.Params...),
		cpuops.WithOutputs(g.Loss))
	if err != nil {
		return nil, err
	}
	return &host{g, machine, o, s.Clip}, nil
}

func (t *host) Gradients(b data.Batch) (float64, error) {
	if err := t.Let(b); err != nil {
		return 0, err
	}

	if err := t.RunAll(); err != nil {
		return 0, err
	}

	loss, ok := t.Loss.Value().Data().(float32)
	if !ok {
		return 0, fmt.Errorf("the loss is a %T, want a float32", t.Loss.Value().Data())
	}

	return float64(loss), nil
}

func (t *host) Update() (float64, error) {
	grads := t.ValueGrads()
	norm, err := autodiff.ClipGlobalNorm(grads, t.clip)
	if err != nil {
		return norm, err
	}
	return norm, t.Step(grads)
}
