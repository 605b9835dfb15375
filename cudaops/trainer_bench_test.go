package cudaops_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	engine "github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// idle is a context of a device that computes nothing, but takes a while for each graph, and measures how long it has nothing to
// do before each: without what the host takes to wake up from its waiting, which is another operating system's there.
type idle struct {
	gpu.Context
	done   time.Time               // when the device has done all that it was given
	marks  map[gpu.Event]time.Time // when it has done what stands before an event
	woken  time.Time               // when the host has last waited
	waited []time.Duration         // before each graph
}

const graphTime = 3 * time.Millisecond

func (c *idle) Launch(*gpu.Function, gpu.LaunchConfig, gpu.Stream, *gpu.Args) error {
	return nil
}

func (c *idle) Blas() (gpu.Blas, error) {
	b, err := c.Context.Blas()
	return idleBlas{b}, err
}

type idleBlas struct{ gpu.Blas }

func (b idleBlas) Plan(m gpu.MatmulSpec, workspace, want int) (gpu.MatmulPlan, error) {
	p, err := b.Blas.Plan(m, workspace, want)
	return idlePlan{p}, err
}

type idlePlan struct{ gpu.MatmulPlan }

func (idlePlan) Run(int, gpu.MatmulArgs, gpu.Stream) error { return nil }

// CopyToHost gives zeros: a loss, a norm and figures of layers that are finite.
func (c *idle) CopyToHost(dst []byte, _ gpu.Ptr, _ gpu.Stream) error {
	clear(dst)
	return nil
}

func (c *idle) Record(e gpu.Event, s gpu.Stream) error {
	c.marks[e] = c.done
	return c.Context.Record(e, s)
}

func (c *idle) SyncEvent(e gpu.Event) error {
	c.wait(c.marks[e])
	return c.Context.SyncEvent(e)
}

func (c *idle) SyncStream(s gpu.Stream) error {
	c.wait(c.done)
	return c.Context.SyncStream(s)
}

func (c *idle) wait(until time.Time) {
	if d := time.Until(until); d > 0 {
		time.Sleep(d)
		c.woken = time.Now()
	}
}

func (c *idle) LaunchGraph(*gpu.Graph, gpu.Stream) error {
	now, from := time.Now(), c.done
	if c.woken.After(from) {
		from = c.woken
	}
	c.waited = append(c.waited, max(0, now.Sub(from)))
	if now.After(c.done) {
		c.done = now
	}
	c.done = c.done.Add(graphTime)
	return nil
}

// BenchmarkTrainer measures what the host does in a step of training on 32 × 1024 tokens, with a log and a bar, and for how much of
// that a device would wait that computes nothing: before the run, and between that and the update.
func BenchmarkTrainer(b *testing.B) {
	for _, seeds := range []int{0, 16} {
		for _, ahead := range []bool{false, true} {
			b.Run(fmt.Sprintf("seeds=%d/ahead=%v", seeds, ahead), func(b *testing.B) { benchmarkTrainer(b, seeds, ahead) })
		}
	}
}

func benchmarkTrainer(b *testing.B, seeds int, ahead bool) {
	must := func(err error) {
		if err != nil {
			b.Helper()
			b.Fatal(err)
		}
	}
	const batch, warm = 32, 5
	config := llm.Config{Vocab: 512, Dim: 32, Layers: 12, Heads: 2, FF: 32, Seq: 1024, Seeds: seeds}
	for layer := range config.Layers {
		if seeds > 0 {
			config.Kasmina = append(config.Kasmina, layer)
		}
	}
	model, err := llm.NewModel(config.Default(), tensor.Float32, 1, state.WithoutGates())
	must(err)
	path := filepath.Join(b.TempDir(), "text")
	must(os.WriteFile(path, bytes.Repeat([]byte("if err != nil { return err }\n"), 1<<17), 0o666))
	corpus, err := data.Open(path)
	must(err)
	tokens, err := data.Tokenize(b.Context(), corpus.Train, tokenizer.Bytes{})
	must(err)
	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: batch, Seq: config.Seq})
	must(err)
	optimizer, err := optim.NewAdamW()
	must(err)
	device, fakes := cudaops.OpenFake(b)
	c := &idle{marks: map[gpu.Event]time.Time{}}
	cudaops.Wrap(device, func(inner gpu.Context) gpu.Context { c.Context = inner; return c })
	make := engine.Engine(device, cudaops.Float32, fakes, cudaops.WithTuning(cudaops.TuneOff))
	t, err := llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{Steps: b.N + warm, Batch: batch, Clip: 1, Epoch: 1 << 30,
		Schedule: func(step int) float64 { return 1e-3 / float64(1+step) },
		Engine: func(m *llm.Model, o optim.Optimizer, c llm.TrainConfig) (llm.Engine, error) {
			e, err := make(m, o, c)
			if !ahead {
				e = waiting{e}
			}
			return e, err
		}})
	must(err)
	t.On(runlog.JSON(filepath.Join(b.TempDir(), "log")), runlog.Progress(io.Discard), func(e llm.Event) error {
		if e.Kind == llm.StepEnd && e.Step == warm {
			c.waited = nil
			b.ResetTimer()
		}
		return nil
	})
	must(t.Run(b.Context()))
	b.StopTimer()
	what := []string{"µs-before-run", "µs-before-update"} // by turns
	if ahead {
		slices.Reverse(what) // the first run had begun
	}
	for i, what := range what {
		var all []time.Duration
		for ; i < len(c.waited); i += 2 {
			all = append(all, c.waited[i])
		}
		if slices.Sort(all); len(all) > 0 {
			b.ReportMetric(float64(all[len(all)/2].Nanoseconds())/1e3, what)
		}
	}
	must(t.Close())
}
