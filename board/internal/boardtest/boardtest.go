// Package boardtest makes the events of runs for the tests of a board.
package boardtest

import (
	"math"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// Seeds is the number of seeds in each of the two layers of the runs.
const Seeds = 64

// Growing returns the events of a run of 30 steps on a budget. At the end of each of its three
// epochs, all seeds advance by two stages. After step 20, the model grows from 1000 to 4000
// parameters.
func Growing() []llm.Event {
	e := llm.Event{Kind: llm.RunStart, Steps: math.MaxInt32, Budget: llm.Budget{Time: time.Minute},
		ValLoss: math.NaN(), ValBPB: math.NaN(), Params: 1000, Seeds: 2 * Seeds}
	reports := func(epoch int, stage state.Stage) (all []state.Report) {
		for range 2 {
			r := state.Report{Epoch: epoch, Seeds: make([]state.SeedReport, Seeds)}
			for i := range r.Seeds {
				r.Seeds[i] = state.SeedReport{Seed: i, Stage: stage, Drift: 1. / 3,
					Kind: blueprints.Residual, Slot: 1, EpochsInStage: 1}
				if i == 1 && stage >= state.Evaluating {
					r.Seeds[i].Delta, r.Seeds[i].Improvement, r.Seeds[i].Stability = 0.0625, 0.02, 0.75
				}
			}
			all = append(all, r)
		}
		return all
	}

	all := []llm.Event{e}
	add := func(kind llm.EventKind) { all, e.Kind = append(all, e), 0; all[len(all)-1].Kind = kind }

	for step := 1; step <= 30; step++ {
		e.Step, e.Share = step, float64(step)/40
		e.Elapsed += time.Duration(300+step) * time.Millisecond
		e.RunTokens, e.RunFLOPs = e.RunTokens+1024, e.RunFLOPs+float64(e.Params)*6e6
		e.Loss, e.GradNorm, e.LearningRate = 3/float64(step), 0.1*float64(step), 1e-3
		if step == 5 {
			e.GradNorm = math.NaN()
		}
		if step == 2 {
			e.Ceiling = optime.Ceiling{Product: 7e10, Type: "bfloat16"}
			add(llm.Measured)
		}
		if step%10 == 0 {
			epoch := step / 10
			e.Reports = reports(epoch, state.Stage(2*epoch))
			for layer := range 2 {
				for seed := range Seeds {
					for half := range 2 {
						to := state.Stage(2*epoch - 1 + half)
						e.SeedEvents = append(e.SeedEvents, state.Event{Kind: state.StageChanged,
							Layer: layer, Seed: seed, Epoch: epoch, From: to - 1, To: to,
							Reason: "the timetable"})
					}
				}
			}
			add(llm.EpochEnd)
			e.Reports, e.SeedEvents = nil, nil
		}
		if step == 20 {
			e.Params, e.Seeds, e.Text = 4000, 2*Seeds, "3 blocks become 12"
			add(llm.Reshaped)
			e.Text = ""
		}
		add(llm.StepEnd)
		if step%5 == 0 {
			e.ValLoss, e.ValBPB = e.Loss+0.1, e.Loss/2
			add(llm.EvalEnd)
		}
	}

	add(llm.RunEnd)
	return all
}
