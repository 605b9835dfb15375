package llm

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// profiled is an engine that has timed an op.
type profiled struct {
	Engine
	ops []OpTime
}

func (p *profiled) OpTimes() ([]OpTime, error) { return p.ops, nil }

func TestMonitor(t *testing.T) {
	ops := []OpTime{{Op: "Linear", Tasks: 7, Time: 2 * time.Millisecond, FLOPs: 1e9, Bytes: 1e6, Ways: []string{"fast"}}, {Op: "RMSNorm", Time: time.Millisecond}}
	for name, times := range map[string][]OpTime{"timed": ops, "nothing yet": nil} {
		tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
		tr.engine = &profiled{tr.engine, times}
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
		if len(lines) != 3 || !strings.Contains(lines[1], "66.7") || !strings.Contains(lines[1], "fast") {
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

// TestMonitorOnCPU wants the table and the log of a run on the CPU to have its ops and the update, and the ways once a run.
func TestMonitorOnCPU(t *testing.T) {
	t.Setenv("KASMINA_WAYS", "")
	tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
	tr.Config.Steps = 4
	e, err := CPUEngine(cpuops.WithMonitor(2))(tr.Model, tr.Optimizer, tr.Config)
	require.NoError(t, err)
	tr.engine = e
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
			i := slices.IndexFunc(e.Choices, func(c Choice) bool { return c.Op == "LinearAdd" })
			require.GreaterOrEqual(t, i, 0, "%v", e.Choices)
			c := e.Choices[i]
			require.Equal(t, []any{"fused", 2, optime.ByRule}, []any{c.Way, c.Of, c.Source})
		case Profiled:
			require.Contains(t, out.String(), e.Ops[0].Op)
		}
	}
	require.Equal(t, []EventKind{RunStart, Chosen, StepEnd, StepEnd, Profiled, StepEnd, StepEnd,
		Profiled, RunEnd, RunStart, Chosen, StepEnd, RunEnd}, kinds)
}

// traced is an engine whose profile is there after some steps.
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

func (p *traced) Profile() (*Profile, error) {
	if p.steps < p.takes {
		return nil, nil
	}
	return &Profile{Device: "Some GPU", Period: time.Millisecond, Spans: []optime.Span{{Kernel: "norm", Op: "RMSNorm", Time: time.Microsecond}}}, nil
}

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
		tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default()) // of two steps
		e := &traced{Engine: tr.engine, takes: test.takes}
		tr.engine = e
		path := filepath.Join(t.TempDir(), "new", "trace.json")
		var out strings.Builder
		tr.On(ProfileStep(tr, &out, path, test.after))
		if err := tr.Run(context.Background()); (err != nil) != (test.fails != "") || err != nil && !strings.Contains(err.Error(), test.fails) {
			t.Errorf("%+v: %v", test, err)
		}
		if !strings.Contains(out.String(), test.want) {
			t.Errorf("%+v: it prints %q", test, out.String())
		}
		trace, err := os.ReadFile(path)
		if (err == nil) != (test.want == "RMSNorm") || err == nil && !strings.Contains(string(trace), `"traceEvents"`) {
			t.Errorf("%+v: the trace %q, %v", test, trace, err)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(file, "trace.json"), filepath.Dir(file)} {
		tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
		e := &traced{Engine: tr.engine, takes: 1}
		tr.engine = e
		tr.On(ProfileStep(tr, io.Discard, path, 1))
		if err := tr.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "cannot be written") || tr.Step() != 0 {
			t.Errorf("a trace at %s: %v after %d steps", path, err, tr.Step())
		}
	}
	tr := smallTrainer(t, Config{Vocab: 8, Dim: 8, Layers: 1, Heads: 1, Seq: 2}.Default())
	tr.On(ProfileStep(tr, io.Discard, "", 1))
	if err := tr.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "llm/gpu") {
		t.Errorf("on the CPU: %v", err)
	}
}
