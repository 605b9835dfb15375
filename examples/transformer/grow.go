package main

import (
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// kinds are planted in turn. Each starts as the exact identity, so that grafting begins without a jolt.
var kinds = []blueprints.Kind{blueprints.Residual, blueprints.AttentionGate, blueprints.ConvFilter}

// A stage of growth begins when the given share of the run's steps is done.
var growth = []struct {
	share float64
	stage state.Stage
}{
	{0.05, state.Germinated},
	{0.06, state.Training},
	{0.15, state.Grafting},
	{0.45, state.Stabilization},
	{0.50, state.Evaluating},
	{0.55, state.FineTuning},
	{0.95, state.Fossilized},
}

// grow takes all seeds of a model through their lives on a fixed timetable: at the same step of the same run the same
// happens, whether the run was interrupted or not. A seed that is late, in a run of a few steps or one that was resumed with
// more of them, catches up. A program that decides by what the seeds report would do so here.
func grow(m *llm.Model, epoch int) llm.Callback {
	return func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		for _, g := range growth {
			if e.Step < int(g.share*float64(e.Steps)) {
				break
			}
			for layer := range m.Lattices {
				if err := advance(m, layer, g.stage, e.Steps/(4*epoch)); err != nil {
					return err
				}
			}
		}
		return nil
	}
}

// advance moves all seeds of a layer to the next stage. Grafting takes the given number of epochs.
func advance(m *llm.Model, layer int, next state.Stage, graftEpochs int) error {
	l := m.Lattices[layer]
	for seed := range l.Seeds() {
		if s, err := l.Stage(seed); err != nil {
			return err
		} else if !s.CanBecome(next) {
			continue
		}
		var err error
		if next == state.Germinated {
			err = m.Germinate(layer, seed, state.GerminationRequest{
				Slot:     seed + 1,
				Kind:     kinds[seed%len(kinds)],
				Strategy: state.FixedRamp{Ramp: state.Cosine, Epochs: max(1, graftEpochs), Target: 1},
			})
		} else {
			err = l.Transition(seed, next)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
