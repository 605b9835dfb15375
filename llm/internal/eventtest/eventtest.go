// Package eventtest generates the events of a run for tests of callbacks.
package eventtest

import (
	"math"
	"testing"
	"time"

	"github.com/kasmina-go/kasmina/llm"
)

// Run returns the events of a run with the given steps, each of 1.5 s and 1000 tokens, and an evaluation
// after every fifth step.
func Run(from, to int) []llm.Event {
	e := llm.Event{Kind: llm.RunStart, Step: from, Steps: to, Loss: math.NaN(), ValLoss: math.NaN(),
		ValBPB: math.NaN(),
		Params: 1234567, AllParams: 1234567, Seeds: 64, StepTokens: 1000, LearningRate: 3e-4, GradNorm: math.Inf(1)}
	events := []llm.Event{e}
	for e.Step < to {
		e.Step++
		e.Kind, e.Elapsed = llm.StepEnd, e.Elapsed+1500*time.Millisecond
		e.RunTokens += 1000
		e.Loss = 5 / float64(e.Step)
		events = append(events, e)
		if e.Step%5 == 0 {
			e.Kind, e.ValLoss = llm.EvalEnd, e.Loss+0.5
			e.ValBPB = e.ValLoss / math.Ln2
			events = append(events, e)
		}
	}

	e.Kind = llm.RunEnd
	return append(events, e)
}

// Send passes the events to a callback, which must accept every event.
func Send(t testing.TB, c llm.Callback, events ...llm.Event) {
	t.Helper()
	for _, e := range events {
		if err := c(e); err != nil {
			t.Fatal(err)
		}
	}
}
