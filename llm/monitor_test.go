package llm

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"
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
		tr.Model.mirror = tr.engine
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
