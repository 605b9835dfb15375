package main

import (
	"fmt"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
	"github.com/kasmina-go/kasmina/state/graft"
)

// kinds are planted in turn. Each starts as the exact identity, so that grafting begins without a
// jolt.
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

// deepen lets a model that has one in so many of its blocks get the others while it trains, once it
// learns more slowly.
func deepen(t *llm.Trainer, times int) error {
	d := control.NewDepth(blueprints.Stack, times)
	if err := t.Grow(llm.Growth{Controller: d}); err != nil {
		return fmt.Errorf("-grow: %w", err)
	}
	return nil
}

// judgedEpochs is how many epochs a run has about whose blueprints are judged, and judgedBytes the
// text that they are judged by, every judgedEvery epochs.
const (
	judgedEpochs = 200
	judgedBytes  = 16 << 10
	judgedEvery  = 2
)

// Shares of the run's epochs that a judged blueprint may take.
const (
	rampShare     = 16 // grafting takes one in so many
	patienceShare = 6  // as does the longest wait in a stage
)

// judged lets a controller plant blueprints where features are unhealthy, a few at a time. It keeps
// those with which the loss on held-out text is lower, and rolls others back.
func judged(t *llm.Trainer, heldOut *data.Evaluation) error {
	epochs := t.Config.Steps / t.Config.Epoch
	h := control.NewHeuristic(8, t.Model.NumParams()/50)
	h.RampEpochs, h.Patience = max(1, epochs/rampShare), max(4, epochs/patienceShare)
	h.Hunger = 0.5 // below 1 the median chunk is hungry too: in a small model few others are
	err := t.Grow(llm.Growth{Controller: h, Validation: heldOut,
		Every:   judgedEvery,
		Refused: func(state.Command, error) {}}) // what is not possible is not needed
	if err != nil {
		return fmt.Errorf("-judge: %w", err)
	}
	return nil
}

// grow takes all seeds of a model through their lives on a fixed timetable. At the same step of the
// same run the same happens, whether the run was interrupted or not. A seed that is late, in a run
// of a few steps or one that was resumed with more of them, catches up. A program that decides by
// what the seeds report has a state.Controller instead.
func grow(m *llm.Model, epoch int) llm.Callback {
	return func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		for _, g := range growth {
			if e.Step < int(g.share*float64(e.Steps)) {
				break
			}
			if err := m.Kasmina.Do(advance(m.Kasmina, g.stage, e.Steps/(4*epoch))...); err != nil {
				return err
			}
		}
		return nil
	}
}

// advance returns what moves to the next stage all seeds that can go there. Grafting takes the
// given number of epochs.
func advance(seeds *state.Network, next state.Stage, graftEpochs int) (commands []state.Command) {
	for layer, r := range seeds.Report() {
		for _, s := range r.Seeds {
			c := state.Command{Action: state.Move, Layer: layer, Seed: s.Seed, To: next,
				Why: "the timetable of the run says so"}
			if next == state.Germinated {
				c.Action = state.Germinate
				c.Request = state.GerminationRequest{
					Slot: s.Seed + 1,
					Kind: kinds[s.Seed%len(kinds)],
					Strategy: graft.FixedRamp{Ramp: graft.Cosine, Epochs: max(1, graftEpochs),
						Target: 1},
				}
			}
			if s.Stage.CanBecome(next) {
				commands = append(commands, c)
			}
		}
	}
	return commands
}
