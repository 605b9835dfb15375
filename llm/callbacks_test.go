package llm

import (
	"context"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/processor"
	"github.com/kasmina-go/kasmina/internal/seedtest"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// profiled is an engine that reports fixed op times.
type profiled struct {
	Engine
	ops []optime.OpTime
}

func (p *profiled) OpTimes() ([]optime.OpTime, error) { return p.ops, nil }

// TestMonitor checks when Monitor emits the times of ops, and that it prints them at the end.
func TestMonitor(t *testing.T) {
	ops := []optime.OpTime{{Op: "Linear", Tasks: 7, Time: 2 * time.Millisecond, FLOPs: 1e9, Bytes: 1e6,
		Variants: []string{"fast"}}, {Op: "RMSNorm", Time: time.Millisecond}}
	for name, times := range map[string][]optime.OpTime{"timed": ops, "nothing yet": nil} {
		tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
		tr.driver.engine = &profiled{tr.driver.engine, times}
		var out strings.Builder
		var seen []int
		tr.On(Monitor(tr, &out, 1), func(e Event) error {
			if e.Kind == Profiled {
				seen = append(seen, e.Step)
				if len(e.Ops) != 2 || e.Ops[0].Op != "Linear" {
					t.Errorf("ops %v", e.Ops)
				}
			} else if e.Ops != nil {
				t.Errorf("event %d has ops", e.Kind)
			}
			return nil
		})
		if err := tr.Run(context.Background()); err != nil {
			t.Fatal(err)
		}
		if times == nil {
			if len(seen) > 0 || out.Len() > 0 {
				t.Errorf("%s: events at %v, table %q", name, seen, out.String())
			}
			continue
		}
		if !slices.Equal(seen, []int{1, 2}) {
			t.Errorf("events at the steps %v, want 1 and 2", seen)
		}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 3 || !strings.Contains(lines[1], "66.7") ||
			!strings.Contains(lines[1], "fast") {
			t.Errorf("the table:\n%s", out.String())
		}
	}

	tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
	var out strings.Builder
	tr.On(Monitor(tr, &out, 1))
	if err := tr.Run(context.Background()); err != nil || out.Len() > 0 {
		t.Errorf("on the CPU: %v, %q", err, out.String())
	}
}

// measurer is an engine that reports a fixed ceiling.
type measurer struct{ Engine }

func (measurer) Ceiling() (optime.Ceiling, error) {
	return optime.Ceiling{Product: 3, Type: "float32"}, nil
}

// TestCeilings checks that the ceiling is measured and reported once, after the first step of a run, and
// that operations are counted.
func TestCeilings(t *testing.T) {
	tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
	c, err := tr.driver.engine.(Measurer).Ceiling()
	require.NoError(t, err)
	require.Equal(t, "float32", c.Type)
	if runtime.GOARCH == "amd64" {
		require.Greater(t, c.Product, 1e8)
	}

	tr.driver.engine = measurer{tr.driver.engine}
	var kinds []EventKind
	tr.On(Ceilings(tr), func(e Event) error {
		kinds = append(kinds, e.Kind)
		if e.Kind == Measured || e.Kind == RunEnd {
			require.Equal(t, optime.Ceiling{Product: 3, Type: "float32"}, e.Ceiling)
			require.InEpsilon(t, float64(e.RunTokens)*tr.Model.layout().FLOPs(), e.RunFLOPs, 1e-12)
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))
	require.Equal(t, []EventKind{RunStart, Measured, StepEnd, StepEnd, RunEnd},
		slices.DeleteFunc(kinds, func(k EventKind) bool { return k == Chosen }))
}

// TestMonitorOnCPU checks that the table and the events of a run on the CPU contain its ops and the
// update, and that the choices are reported once per run.
func TestMonitorOnCPU(t *testing.T) {
	t.Setenv("KASMINA_VARIANTS", "")
	tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
	tr.Config.Steps = 4
	e, err := CPUEngine(cpuops.WithMonitor(2))(tr.Model, tr.Optimizer, tr.Config)
	require.NoError(t, err)
	tr.driver.engine = e
	var out strings.Builder
	var events []Event
	tr.On(func(e Event) error { events = append(events, e); return nil }, Monitor(tr, &out, 2))
	require.NoError(t, tr.Run(context.Background()))
	tr.Config.Steps++
	require.NoError(t, tr.Run(context.Background()))
	for _, name := range []string{"LinearGrad", "SiLUMLP", "Update"} {
		require.Contains(t, out.String(), name)
	}

	var kinds []EventKind
	for _, e := range events {
		kinds = append(kinds, e.Kind)
		switch e.Kind {
		case Chosen:
			i := slices.IndexFunc(e.Choices, func(c optime.Choice) bool { return c.Op == "LinearAdd" })
			require.GreaterOrEqual(t, i, 0, "%v", e.Choices)
			c := e.Choices[i]
			require.Equal(t, []any{"fused", 2, optime.ByRule}, []any{c.Variant, c.Of, c.Source})
		case Profiled:
			require.Contains(t, out.String(), e.Ops[0].Op)
		}
	}

	require.Equal(t, []EventKind{RunStart, Chosen, StepEnd, StepEnd, Profiled, StepEnd, StepEnd,
		Profiled, RunEnd, RunStart, Chosen, StepEnd, Profiled, RunEnd}, kinds)
}

// traced is an engine that returns a profile after a number of steps.
type traced struct {
	Engine
	started, steps, takes int
}

func (p *traced) StartProfile() error {
	p.started++
	return nil
}

func (p *traced) Update() (float64, error) {
	if p.started > 0 {
		p.steps++
	}
	return p.Engine.Update()
}

func (p *traced) Profile() (*optime.Profile, error) {
	if p.steps < p.takes {
		return nil, nil
	}
	return &optime.Profile{Device: "Some GPU", Period: time.Millisecond,
		Spans: []optime.Span{{Kernel: "norm", Op: "RMSNorm", Time: time.Microsecond}}}, nil
}

// TestProfileStep checks that the right step is profiled, and the errors for runs and engines without a profile.
func TestProfileStep(t *testing.T) {
	for _, test := range []struct {
		takes, after int
		want, fails  string
	}{
		{1, 1, "RMSNorm", ""},
		{2, 1, "ended too early", ""},
		{1, 5, "ended too early", ""},
		{1, 0, "", "at least 1"},
	} {
		// a run of two steps
		tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
		e := &traced{Engine: tr.driver.engine, takes: test.takes}
		tr.driver.engine = e
		path := filepath.Join(t.TempDir(), "new", "trace.json")
		var out strings.Builder
		tr.On(ProfileStep(tr, &out, path, test.after))
		if err := tr.Run(context.Background()); (err != nil) != (test.fails != "") || err != nil &&
			!strings.Contains(err.Error(), test.fails) {
			t.Errorf("%+v: %v", test, err)
		}
		if !strings.Contains(out.String(), test.want) {
			t.Errorf("%+v: it prints %q", test, out.String())
		}
		trace, err := os.ReadFile(path)
		if (err == nil) != (test.want == "RMSNorm") || err == nil &&
			!strings.Contains(string(trace), `"traceEvents"`) {
			t.Errorf("%+v: the trace %q, %v", test, trace, err)
		}
	}

	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}

	for _, path := range []string{filepath.Join(file, "trace.json"), filepath.Dir(file)} {
		tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
		e := &traced{Engine: tr.driver.engine, takes: 1}
		tr.driver.engine = e
		tr.On(ProfileStep(tr, io.Discard, path, 1))
		if err := tr.Run(context.Background()); err == nil || !strings.Contains(err.Error(),
			"cannot be written") || tr.Step() != 0 {
			t.Errorf("a trace at %s: %v after %d steps", path, err, tr.Step())
		}
	}

	tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
	tr.On(ProfileStep(tr, io.Discard, "", 1))
	if err := tr.Run(context.Background()); err == nil ||
		!strings.Contains(err.Error(), "llm/gpu") {
		t.Errorf("on the CPU: %v", err)
	}
}

// TestScrub checks that corruption before and during a run is reported while the run continues, once
// for each location.
func TestScrub(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1 << 20})
	tr.Config.Epoch = 1 << 20 // the end of an epoch would find it too
	seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(0), 2)
	ctx, cancel := context.WithCancel(t.Context())
	var out strings.Builder
	var events []Event
	tr.On(Scrub(tr, &out, time.Millisecond), func(e Event) error {
		switch {
		case e.Kind == Corrupted:
			events = append(events, e)
			if len(events) == 2 {
				cancel()
			}
		case e.Kind == StepEnd && e.Step == 3:
			seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(1), 1)
		}
		return nil
	})

	require.ErrorIs(t, tr.Run(ctx), context.Canceled)
	require.Len(t, events, 2)
	require.Equal(t, 1, events[0].Step)
	require.GreaterOrEqual(t, events[1].Step, 4)
	for i, want := range []string{
		"layer 0: seed state is corrupt: seed 2 does not match its checksum: bit 3 of alpha has flipped",
		"layer 1: seed state is corrupt: seed 1 does not match its checksum: bit 3 of alpha has flipped",
	} {
		require.ErrorIs(t, events[i].Err, state.ErrCorrupt)
		require.ErrorContains(t, events[i].Err, want)
		require.Equal(t, 1, strings.Count(out.String(), "corrupt   "+want), out.String())
	}

	require.Equal(t, 2, strings.Count(out.String(), "\n"))
}

// TestScrubOfAFailedRun checks that findings are reported even if the run fails before the end of a step.
func TestScrubOfAFailedRun(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	tr.Config.Epoch = 1
	seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(0), 2)
	var told []error
	tr.On(Scrub(tr, io.Discard, time.Hour), func(e Event) error {
		if e.Kind == Corrupted {
			told = append(told, e.Err)
		}
		return nil
	})

	require.ErrorIs(t, tr.Run(t.Context()), state.ErrCorrupt)
	require.Len(t, told, 1)
}

func TestScrubRefuses(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	for want, c := range map[string]Callback{
		"the writer is nil":        Scrub(tr, nil, time.Second),
		"the period is 0s, want":   Scrub(tr, io.Discard, 0),
		"the period is -1ns, want": Scrub(tr, io.Discard, -1),
	} {
		require.ErrorContains(t, c(Event{Kind: RunStart}), want)
	}

	full := errors.New("no space left")
	seedtest.FlipAlpha(t, tr.Model.Kasmina.Lattice(0), 2)
	tr.On(Scrub(tr, failingWriter{full}, time.Second))
	require.ErrorIs(t, tr.Run(t.Context()), full)
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

// TestEventKindNames checks that events are printed with the names of their constants.
func TestEventKindNames(t *testing.T) {
	for kind, want := range map[EventKind]string{RunStart: "RunStart", RunEnd: "RunEnd",
		Failed: "Failed", Corrupted: "Corrupted", Reshaped: "Reshaped", 0: "EventKind(0)",
		99: "EventKind(99)"} {
		require.Equal(t, want, kind.String())
	}
}

// TestEpochEnd checks that callbacks receive, once per epoch and before the end of the step, a report on
// all seeds and the seed events since the last one. Events after the last epoch are reported at the end
// of the run.
func TestEpochEnd(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 7}) // epochs of 3 steps
	var events []Event
	var listened []state.Event
	_, err := tr.Model.Kasmina.Listen(func(e state.Event) { listened = append(listened, e) })
	require.NoError(t, err)
	tr.On(func(e Event) error {
		switch e.Kind {
		case StepEnd, RunEnd:
			require.Nil(t, e.Reports)
			require.Nil(t, e.SeedEvents)
			events = append(events, e)
		case EpochEnd:
			require.Equal(t, tr.Model.Kasmina.Report(), e.Reports)
			events = append(events, e)
		}
		if e.Kind == StepEnd && e.Step == 4 {
			return tr.Model.Kasmina.Lattice(1).Transition(1, state.Grafting)
		}
		if e.Kind == StepEnd && e.Step == 7 {
			return tr.Model.Germinate(0, 0, state.GerminationRequest{Slot: 4})
		}
		return nil
	})

	require.NoError(t, tr.Run(t.Context()))

	var kinds []EventKind
	var ends []Event
	var happened []state.Event
	for _, e := range events {
		kinds = append(kinds, e.Kind)
		if e.Kind == EpochEnd {
			ends, happened = append(ends, e), append(happened, e.SeedEvents...)
		}
	}

	require.Equal(t, []EventKind{StepEnd, StepEnd, EpochEnd, StepEnd, StepEnd, StepEnd, EpochEnd,
		StepEnd, StepEnd, EpochEnd, RunEnd}, kinds)
	require.Equal(t, []int{3, 6, 7}, []int{ends[0].Step, ends[1].Step, ends[2].Step})
	require.ElementsMatch(t, listened, happened)
	changed := func(layer, seed int, from, to state.Stage, epoch int) state.Event {
		return state.Event{Kind: state.StageChanged, Layer: layer, Seed: seed, From: from, To: to,
			Epoch: epoch}
	}
	require.Contains(t, ends[1].SeedEvents, changed(1, 1, state.Training, state.Grafting, 1))
	require.Equal(t, []state.Event{changed(0, 0, state.Dormant, state.Germinated, 2)},
		ends[2].SeedEvents)
	for i, r := range ends[1].Reports {
		require.Equal(t, 2, r.Epoch)
		for _, s := range r.Seeds {
			require.NotZero(t, s.Health, "layer %d, seed %d", i, s.Seed)
		}
	}
}

// TestNoEpochEnd checks that no EpochEnd is emitted for a model without seeds.
func TestNoEpochEnd(t *testing.T) {
	tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
	tr.Config.Epoch = 1
	tr.On(func(e Event) error {
		require.NotEqual(t, EpochEnd, e.Kind)
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
}

// BenchmarkTelemetry measures training steps of a small model with four Kasmina layers, alternately
// without telemetry, with all telemetry, and with the telemetry of every fourth step.
//
// It reports how much longer the latter two take, as the median of the ratios of all rounds, in
// wall-clock time and in processor time. Other programs disturb processor time less.
func BenchmarkTelemetry(b *testing.B) {
	c := Config{Vocab: 256, Dim: 192, Layers: 4, Heads: 4, Seq: 256, Kasmina: []int{0, 1, 2, 3},
		Seeds: 16}
	tr := newTrainerOf(b, c.Default(), 8)
	modes := []state.Telemetry{{Mode: state.Off}, {Mode: state.Production},
		{Mode: state.Sampling, Every: 4}}
	const steps = 4
	measure := func(mode state.Telemetry) (took [2]float64) {
		for _, l := range tr.Model.Kasmina.Lattices() {
			if err := l.SetTelemetry(mode); err != nil {
				b.Fatal(err)
			}
		}
		start, used := time.Now(), processor.Time(b)
		for range steps {
			if err := tr.step(); err != nil {
				b.Fatal(err)
			}
		}
		return [2]float64{time.Since(start).Seconds() / steps,
			(processor.Time(b) - used).Seconds() / steps}
	}

	measure(modes[0])
	var off []float64
	var ratios [3][2][]float64
	for round := 0; b.Loop(); round++ {
		var took [3][2]float64
		for i := range modes { // in a different order every round
			at := (i + round) % len(modes)
			took[at] = measure(modes[at])
		}
		off = append(off, took[0][0])
		for mode := range modes {
			for clock := range took[0] {
				ratios[mode][clock] = append(ratios[mode][clock], took[mode][clock]/took[0][clock])
			}
		}
	}

	median := func(v []float64) float64 {
		slices.Sort(v)
		return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
	}
	b.ReportMetric(1000*median(off), "ms/step")
	for i, name := range []string{"%all", "%sampled"} {
		b.ReportMetric(100*(median(ratios[i+1][0])-1), name)
		b.ReportMetric(100*(median(ratios[i+1][1])-1), name+"-cpu")
	}
}

func newTrainerOf(b *testing.B, c Config, batch int) *Trainer {
	b.Helper()
	m, err := NewModel(c, tensor.Float32, 1, state.WithoutGates())
	if err != nil {
		b.Fatal(err)
	}

	loader, err := data.NewLoader(&idTokens{ids: make([]int, 50000), tokenizer: "bytes", vocab: 256,
		fingerprint: "zeros"},
		data.LoaderConfig{Batch: batch, Seq: c.Seq})
	if err != nil {
		b.Fatal(err)
	}

	optimizer, err := adamW()
	if err != nil {
		b.Fatal(err)
	}

	tr, err := NewTrainer(m, loader, optimizer, TrainConfig{Steps: math.MaxInt, Batch: batch,
		Schedule: optim.Constant(1e-4)})
	if err != nil {
		b.Fatal(err)
	}

	b.Cleanup(func() { tr.Close() })
	return tr
}
