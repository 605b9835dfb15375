package llm

import (
	"context"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/state"
)

// operations is how many calls are made beside a run. Asked for by KASMINA_OPERATIONS, 10000 take minutes.
func operations(t *testing.T) int64 {
	n, err := strconv.ParseInt(os.Getenv("KASMINA_OPERATIONS"), 10, 64)
	if err != nil {
		n = 400
	}
	t.Logf("%d operations", n)
	return n
}

// sumOf stands for a model's parameters.
func sumOf(m *Model) uint64 {
	h := fnv.New64a()
	for _, p := range m.Params {
		fmt.Fprintln(h, bitsOf(p.Value))
	}
	return h.Sum64()
}

// beside is a run, and what goes on beside it.
type beside struct {
	*testing.T
	*Trainer
	dir   string
	text  *data.Evaluation
	after sync.Map // sums of parameters: of those at the end of each step,
	files sync.Map // and of those in each file that was saved
}

// TestBesideARun wants whatever goes on beside a run to find the model between two steps: saves, loads, blueprints, samples,
// scores, commands and questions. Every file loads, and has parameters that the model had at the end of a step.
func TestBesideARun(t *testing.T) {
	left := operations(t)
	tr := newTrainer(t, trainerOptions{config: roomy(), steps: 1 << 30})
	b := &beside{T: t, Trainer: tr, dir: t.TempDir(), text: heldOut(t, 40, 1)}
	b.after.Store(sumOf(tr.Model), true)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tr.On(func(e Event) error {
		b.after.Store(sumOf(tr.Model), true)
		return nil
	}, Checkpoint(tr, filepath.Join(b.dir, "run"), 7, InBackground()))
	calls := []func(name string){b.save, b.saveRun, b.blueprint, b.sample, b.evaluate, b.ask}
	var others sync.WaitGroup
	for g, call := range calls {
		others.Go(func() {
			for atomic.AddInt64(&left, -1) >= 0 && !t.Failed() {
				call(filepath.Join(b.dir, fmt.Sprint(g)))
			}
		})
	}
	go func() { others.Wait(); cancel() }()
	require.ErrorIs(t, tr.Run(ctx), context.Canceled)
	others.Wait()
	require.NotZero(t, tr.Step())
	t.Logf("%d steps", tr.Step())
	b.files.Range(func(sum, path any) bool {
		if _, there := b.after.Load(sum); !there {
			t.Errorf("%s had parameters of no step", path)
		}
		return true
	})
	again := newTrainer(t, trainerOptions{config: roomy(), steps: 1 << 30})
	require.NoError(t, again.Resume(t.Context(), filepath.Join(b.dir, "run")))
	checkSame(t, tr, again)
}

func (b *beside) check(err error) {
	if err != nil {
		b.Error(err)
	}
}

// loaded checks a file that was saved beside the run.
func (b *beside) loaded(path string) {
	m, err := LoadModel(context.Background(), path)
	b.check(err)
	if err != nil {
		return
	}
	b.files.Store(sumOf(m), path)
}

func (b *beside) save(name string) {
	b.check(b.Model.Save(name))
	b.loaded(name)
}

func (b *beside) saveRun(name string) {
	b.check(b.Save(name))
	b.loaded(name)
	_, err := ReadNotes(name)
	b.check(err)
}

func (b *beside) blueprint(name string) {
	b.check(b.Model.SaveBlueprint(name, 0, 2))
	_, err := b.Model.ReadBlueprint(name, 0, 2)
	b.check(err)
}

func (b *beside) sample(string) {
	g, err := NewGenerator(b.Model)
	b.check(err)
	s, err := sampler.New(sampler.Config{Temperature: 1})
	b.check(err)
	for _, err := range g.Generate(context.Background(), []int{1, 2}, 3, s) {
		b.check(err)
	}
	b.check(g.Close())
}

func (b *beside) evaluate(string) {
	_, _, err := b.Evaluate(b.text)
	b.check(err)
	b.On(func(Event) error { return nil })
}

func (b *beside) ask(string) {
	if step, e := b.Step(), b.Last(); e.Step < step {
		b.Errorf("the last event is of step %d, and step %d is over", e.Step, step)
	}
	c := state.Command{Action: state.Germinate, Layer: 1, Request: state.GerminationRequest{Slot: 4, Kind: blueprints.Residual}}
	<-b.Model.Kasmina.Submit(c) // refused but for the first time
}
