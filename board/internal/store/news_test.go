package store

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/runlog"
)

// stepEvent returns the event at the end of a step of one second.
func stepEvent(step int) llm.Event {
	return llm.Event{Kind: llm.StepEnd, Step: step, Steps: math.MaxInt32,
		Loss: 1 / float64(step), GradNorm: 2,
		LearningRate: 1e-3, Elapsed: time.Duration(step) * time.Second,
		RunTokens: int64(step), ValLoss: math.NaN()}
}

// seen adds the steps of the series in a message to a viewer's steps.
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

// TestNews checks that viewers receive every point once, however often they ask, also when the
// points of a long run have been merged.
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

// TestResumed checks that the points of repeated steps replace the old ones.
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

// TestEventsBounded checks that the latest events and groups are kept, with their numbers, however
// many there are.
func TestEventsBounded(t *testing.T) {
	r := NewRun("0", "run", nil)
	const n = 2*maxEvents + 5
	for i := range n {
		r.Take(llm.Event{Kind: llm.Noted, Step: i})
	}
	last := r.Events(n-1, 10)
	require.Len(t, last, 1)
	require.Equal(t, n-1, last[0].Step)
	require.Equal(t, n-1, last[0].Number)
	require.LessOrEqual(t, len(r.events), 2*maxEvents)

	groups := r.Groups(n-1, 10)
	require.Len(t, groups, 1)
	require.Equal(t, n-1, groups[0].Step)
	require.LessOrEqual(t, len(r.groups.all), 2*maxGroups)
}

// BenchmarkViewers measures the cost of a step with 20 viewers that receive every step.
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

// TestResumedLog checks that a resumption removes everything after its step, and that viewers who
// have received it are told to discard it.
func TestResumedLog(t *testing.T) {
	r := NewRun("0", "run", nil)
	read := func(lines ...string) {
		for _, line := range lines {
			var l runlog.Record
			require.NoError(t, json.Unmarshal([]byte(line), &l))
			r.Read(l)
		}
	}
	read(`{"event":"start","step":0,"steps":100}`)
	for step := 1; step <= 10; step++ {
		at := fmt.Sprintf(`"step":%d,"elapsed_s":%d`, step, step)
		read(`{"event":"epoch","epoch":1,"layer":0,`+at+`,"states":[{"seed":0,"stage":"Training",`+
			`"events":[{"kind":"StageChanged","epoch":1,"from":"Dormant","to":"Training"}]}]}`,
			`{"event":"note","text":"x",`+at+`}`, `{"event":"eval","val_loss":`+fmt.Sprint(step)+
				`,"val_bpb":1,`+at+`}`, `{"event":"sample","text":"x",`+at+`}`,
			`{"event":"saved","path":"m",`+at+`}`, `{"event":"step","train_loss":`+fmt.Sprint(step)+
				`,`+at+`}`)
	}
	var c Cursor
	var b bytes.Buffer
	require.NoError(t, r.News(&b, &c))
	before := r.Events(0, 100)

	read(`{"event":"start","step":6,"steps":100}`)
	s := r.Series()
	require.Equal(t, []api.Float{1, 2, 3, 4, 5, 6}, s.Step)
	require.Equal(t, []api.Float{1, 2, 3, 4, 5, 6}, s.EvalStep)
	status := r.Status()
	require.Equal(t, api.Float(6), status.Loss)
	require.Equal(t, api.Float(6), status.ValLoss)
	require.Empty(t, status.Saved)
	require.Empty(t, status.Stages, "what the seeds were at step 6 is not known")
	full := r.Full()
	require.Len(t, full.Samples, 6)
	require.Len(t, full.Groups, 12)
	require.Len(t, r.Events(0, 100), 12)
	require.Empty(t, full.Lattice.Layers)

	b.Reset()
	require.NoError(t, r.News(&b, &c))
	news := b.String()
	require.True(t, strings.HasPrefix(news, "event: again\ndata: {\"run\":\"0\"}\n\n"), news)
	require.Contains(t, news, `"all":true`)
	require.Contains(t, news, `"eval_step":[1,2,3,4,5,6]`)
	require.NotContains(t, news, `"step":7`)

	// New events have numbers that no viewer has seen.
	read(`{"event":"note","step":7,"elapsed_s":1,"text":"y"}`,
		`{"event":"eval","step":7,"elapsed_s":1,"val_loss":42,"val_bpb":1}`)
	fresh := r.Events(before[len(before)-1].Number+1, 100)
	require.Len(t, fresh, 1)
	require.Equal(t, "y", fresh[0].To)
	s = r.Series()
	require.Equal(t, []api.Float{1, 2, 3, 4, 5, 6, 42}, s.ValLoss)
	require.Equal(t, api.Float(7), s.EvalTime[6], "6 s before and 1 s since")
	b.Reset()
	require.NoError(t, r.News(&b, &c))
	require.NotContains(t, b.String(), "event: again")
	require.Contains(t, b.String(), `"eval_step":[7]`)

	// A run that starts over in the same folder removes everything.
	read(`{"event":"start","step":0,"steps":5}`)
	full = r.Full()
	require.Empty(t, full.Series.Step)
	require.Empty(t, full.Series.EvalStep)
	require.Empty(t, full.Groups)
	require.Empty(t, r.Events(0, 100))
	require.Empty(t, full.Samples)
}

// TestResumedInProcess is [TestResumedLog] for a trainer that the board watches.
func TestResumedInProcess(t *testing.T) {
	r := NewRun("0", "run", nil)
	r.Take(llm.Event{Kind: llm.RunStart, Steps: 100})
	for step := 1; step <= 10; step++ {
		e := stepEvent(step)
		r.Take(e)
		e.Kind, e.ValLoss, e.ValBPB = llm.EvalEnd, float64(step), 1
		r.Take(e)
		e.Kind, e.Text = llm.Noted, "x"
		r.Take(e)
		e.Kind, e.Text = llm.Sampled, "x"
		r.Take(e)
	}
	again := stepEvent(6)
	again.Kind, again.Elapsed = llm.RunStart, 0
	r.Take(again)
	full := r.Full()
	require.Equal(t, []api.Float{1, 2, 3, 4, 5, 6}, full.Series.EvalStep)
	require.Len(t, full.Groups, 6)
	require.Len(t, full.Samples, 6)
	e := stepEvent(7)
	e.Elapsed = time.Second
	r.Take(e)
	require.EqualValues(t, 7, r.Series().Time[6])
}

// TestReplacedRun checks that a run that starts over shows nothing of the run before, whose log it continues. The
// process before it may have been killed at any record.
func TestReplacedRun(t *testing.T) {
	lines := func(steps int, more string) (all []string) {
		all = append(all, fmt.Sprintf(`{"event":"start","step":0,"steps":%d,"params":%d%s}`, steps, 10*steps, more))
		for step := range 3 {
			at := fmt.Sprintf(`"step":%d,"elapsed_s":%d`, step, step)
			for _, record := range []string{`"event":"note","text":"x"`, `"event":"sample","text":"x"`,
				`"event":"ceiling","ceiling":{"product":1e12,"copy":1e9,"type":"float32"}`,
				`"event":"epoch","epoch":1,"layer":0,"states":[{"seed":0,"stage":"Training"}]`,
				`"event":"reshaped","text":"grown","params":7,"all_params":9,"seeds":2`,
				`"event":"eval","val_loss":1,"val_bpb":1`, `"event":"saved","path":"m"`,
				`"event":"step","train_loss":3,"tokens_per_s":5,"flops_per_s":6e11`} {
				all = append(all, "{"+record+","+at+"}")
			}
		}
		return all
	}
	read := func(r *Run, lines []string) {
		for _, line := range lines {
			var l runlog.Record
			require.NoError(t, json.Unmarshal([]byte(line), &l))
			r.Read(l)
		}
	}
	picture := func(r *Run) string {
		full := r.Full()
		full.Lattice.Version = 0 // neither versions nor numbers of events are used again
		for i := range full.Groups {
			full.Groups[i].Number = i
		}
		text, err := json.Marshal(full)
		require.NoError(t, err)
		return string(text)
	}

	settings := map[string]string{"data": "text"}
	replaced := append(lines(50, `,"machine":{"cores":"2"},"share":0.5,"budget":"1h"`), `{"event":"failed","step":2,"error":"x"}`)
	next := lines(40, "")
	for killed := range replaced {
		alone, both := NewRun("0", "run", settings), NewRun("0", "run", settings)
		read(both, replaced[:killed+1])
		for _, line := range next {
			read(both, []string{line})
			read(alone, []string{line})
			require.Equal(t, picture(alone), picture(both), "killed after %s, then %s", replaced[killed], line)
		}
	}
}
