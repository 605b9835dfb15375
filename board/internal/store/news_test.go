package store

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// stepEvent is the end of a step.
func stepEvent(step int) llm.Event {
	return llm.Event{Kind: llm.StepEnd, Step: step, Steps: math.MaxInt32,
		Loss: 1 / float64(step), GradNorm: 2,
		LearningRate: 1e-3, Elapsed: time.Duration(step) * time.Second,
		RunTokens: int64(step), ValLoss: math.NaN()}
}

// seen takes in what a viewer has been sent.
func seen(t *testing.T, news string, steps *[]float64) {
	t.Helper()
	for message := range strings.SplitSeq(news, "\n\n") {
		kind, data, _ := strings.Cut(message, "\ndata: ")
		if kind != "event: series" {
			continue
		}
		var m struct {
			All  bool
			Step []float64
		}
		require.NoError(t, json.Unmarshal([]byte(data), &m))
		if m.All {
			*steps = nil
		}
		*steps = append(*steps, m.Step...)
	}
}

// TestNews wants viewers that ask at their own pace to see the same points, each once. So it is
// when a run of many steps has been thinned.
func TestNews(t *testing.T) {
	r := NewRun("0", "run", nil)
	r.Take(llm.Event{Kind: llm.RunStart, Steps: math.MaxInt32})
	var often, seldom Cursor
	var a, b []float64
	var buffer bytes.Buffer
	ask := func(c *Cursor, to *[]float64) {
		buffer.Reset()
		require.NoError(t, r.News(&buffer, c))
		seen(t, buffer.String(), to)
	}
	const steps = 3*maxPoints + 7
	for step := 1; step <= steps; step++ {
		r.Take(stepEvent(step))
		if step%1000 == 0 || step == steps {
			ask(&often, &a)
		}
		if step%17_000 == 0 || step == steps {
			ask(&seldom, &b)
		}
	}
	require.Equal(t, a, b)
	require.LessOrEqual(t, len(a), maxPoints)
	for i := range a[1:] {
		require.Greater(t, a[i+1], a[i])
	}
	s := r.Series()
	require.Equal(t, 4, s.Stride)
	require.EqualValues(t, steps/4*4, s.Step[len(s.Step)-1])
	require.InEpsilon(t, (1.+1./2+1./3+1./4)/4, float64(s.Loss[0]), 1e-12, "the mean of four steps")
	buffer.Reset()
	require.NoError(t, r.News(&buffer, &often))
	require.Zero(t, buffer.Len(), "nothing is new")
}

// TestResumed wants the points of steps that a run makes again in the place of the old ones.
func TestResumed(t *testing.T) {
	r := NewRun("0", "run", nil)
	r.Take(llm.Event{Kind: llm.RunStart, Steps: 100})
	for step := 1; step <= 10; step++ {
		r.Take(stepEvent(step))
	}
	again := stepEvent(6)
	again.Kind = llm.RunStart
	r.Take(again)
	e := stepEvent(7)
	e.Loss = 42
	r.Take(e)
	s := r.Series()
	require.Len(t, s.Step, 7)
	require.EqualValues(t, 42, s.Loss[6])
}

// TestEventsBounded wants the latest events kept, with their numbers, however many there are.
func TestEventsBounded(t *testing.T) {
	r := NewRun("0", "run", nil)
	const n = 2*maxEvents + 5
	for i := range n {
		r.Take(llm.Event{Kind: llm.EpochEnd,
			SeedEvents: []state.Event{{Kind: state.StageChanged, Seed: i}}})
	}
	last := r.Events(n-1, 10)
	require.Len(t, last, 1)
	require.Equal(t, n-1, last[0].Seed)
	require.Equal(t, n-1, last[0].Number)
	require.LessOrEqual(t, len(r.events), 2*maxEvents)
}

// BenchmarkViewers is what a step costs the whole computer with 20 viewers, each told of it.
func BenchmarkViewers(b *testing.B) {
	r := NewRun("0", "run", nil)
	r.Take(llm.Event{Kind: llm.RunStart, Steps: math.MaxInt32})
	cursors := make([]Cursor, 20)
	var buffer bytes.Buffer
	step := 0
	for b.Loop() {
		step++
		r.Take(stepEvent(step))
		for i := range cursors {
			buffer.Reset()
			if err := r.News(&buffer, &cursors[i]); err != nil {
				b.Fatal(err)
			}
		}
	}
}
