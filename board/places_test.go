package board_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/board/internal/store"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// judged is the reason for which a controller rolls a seed back.
const judged = "34 epochs have not brought what FineTuning asks for: the loss is 0.0021 higher with " +
	"it (0.07%), and 70% of the text's batches agree"

// everywhere adds the events of a run of 600 steps. Its model has seeds at all sites: Kasmina
// layers, every linear layer of the given number of blocks, the stream, and depth.
func everywhere(t *testing.T, run *store.Run, blocks int, sample string) {
	t.Helper()
	r := randtest.New(t)
	c := llm.Config{Layers: blocks, Kasmina: []int{0, 1, 2, 3}, Streams: []int{1, 3}, Depth: 2}
	c.Weights = c.WeightSites("q", "k", "v", "o", "gate", "up", "down")
	e := llm.Event{Kind: llm.RunStart, Steps: 1000, StepTokens: 4096, ValLoss: math.NaN(),
		ValBPB: math.NaN(), Params: 123_600_000, Lattices: c.Lattices()}
	reports := func(epoch int) (all []state.Report) {
		e.Seeds = 0
		for _, l := range c.Lattices() {
			n := max(len(l.Places), 2)
			if l.Site == blueprints.Chunk {
				n = 16
			}
			report := state.Report{Epoch: epoch, Site: l.Site, Seeds: make([]state.SeedReport, n)}
			for i := range report.Seeds {
				s := &report.Seeds[i]
				s.Seed, s.Health.DeadRatio = i, r.Float64()/2
				if r.IntN(3) == 0 && epoch > 0 {
					s.Stage = state.Stage(r.IntN(8))
					s.Alpha = float64(s.Stage.Share(0.5))
				}
			}
			all, e.Seeds = append(all, report), e.Seeds+n
		}
		return all
	}

	e.Reports = reports(0)
	run.Take(e)
	for step := 1; step <= 600; step++ {
		e.Kind, e.Step, e.Share, e.Elapsed = llm.StepEnd, step, float64(step)/1000,
			time.Duration(step)*time.Second/2
		e.Loss, e.GradNorm = 2+8/math.Sqrt(float64(step+3))+r.NormFloat64()/20, 0.5+r.Float64()/4
		e.LearningRate = 6e-4 * min(float64(step)/100, 1)
		e.RunTokens, e.RunFLOPs = int64(step)*4096, float64(step)*4e12
		run.Take(e)
		if step == 1 {
			e.Kind, e.Ceiling = llm.Measured, optime.Ceiling{Product: 2e13, Type: "bfloat16"}
			run.Take(e)
		}
		if step%100 == 0 {
			e.Kind, e.ValLoss, e.ValBPB = llm.EvalEnd, e.Loss+0.05, (e.Loss+0.05)/2.5
			run.Take(e)
		}
	}

	e.Kind, e.Reports = llm.EpochEnd, reports(60)
	seed := &e.Reports[4].Seeds[7*2+1]
	seed.Stage, seed.Kind, seed.EpochsInStage = state.RolledBack, blueprints.LoRA, 0
	seed.Delta, seed.Improvement, seed.Stability = -0.0021, -0.0007, 0.7
	for i, s := range []state.Stage{state.Germinated, state.Training, state.Grafting,
		state.Stabilization, state.Evaluating, state.RolledBack} {
		told := state.Event{Kind: state.StageChanged, Layer: 4, Seed: 7*2 + 1, Epoch: 10 * (i + 1),
			From: s - 1, To: s}
		if s == state.RolledBack {
			told.From, told.Reason = state.Evaluating, judged
		}
		e.SeedEvents = append(e.SeedEvents, told)
	}

	for i := range 12 {
		e.SeedEvents = append(e.SeedEvents, state.Event{Kind: state.StageChanged, Seed: i, Epoch: 60,
			To: state.Germinated, Reason: "their features are dead"})
	}

	run.Take(e)
	e.Kind, e.Text = llm.Noted, "Ada asked on the board to save: before lunch"
	run.Take(e)
	e.Kind, e.Text = llm.Sampled, sample
	run.Take(e)
}

// TestEverywhere checks that the page finds and names seeds at all sites, even if there are
// thousands, and shows the reasons for their changes. Names and samples must be shown literally.
func TestEverywhere(t *testing.T) {
	t.Parallel()
	w := browser(t)
	b, err := board.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	const name = "<script>document.title = 'broken'</script>"
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	for _, run := range []struct {
		id, name, sample string
		blocks           int
	}{{"0", "the run", "func main() {\n\tfmt.Println(", 12}, {"1", name, name + " func", 500}} {
		everywhere(t, b.Add(run.name), run.blocks, run.sample)
		w.view(1280, 900, "light")
		w.Do(chromedp.Navigate(url))
		w.see("#chart-loss canvas", "#legend li")
		eval[bool](w, "Board.choose('"+run.id+"'); true")
		require.Eventually(t, func() bool {
			return eval[bool](w, "Board.shown() === '"+run.id+"' && Lattice.layers().length === 7")
		}, patience, 50*time.Millisecond)
		require.Eventually(t, func() bool { return w.text("#name") == run.name }, patience,
			50*time.Millisecond)
		eval[bool](w, "Lattice.select({layer: 4, seed: 15}); true")
		w.see("#seed-events li")
		require.Equal(t, "block 2, k: RolledBack", w.text("#seed-title"))
		require.Contains(t, w.text("#seed-story"), "from Evaluating to RolledBack after step 600, "+
			"epoch 60, because "+judged)
		require.Contains(t, w.text("#events"), "12 seeds (block 0, seed 0; block 0, seed 1; "+
			"block 0, seed 2 and 9 more): Dormant → Germinated because their features are dead")
		require.Contains(t, w.text("#events"), "Ada asked on the board to save: before lunch")
		require.Equal(t, run.sample, w.text("#sample"))
		require.Contains(t, w.text("#tiles"), "share of the peak40%of 20.00 TFLOP/s")
		require.NotEqual(t, "broken", eval[string](w, "document.title"))
		for _, v := range []struct {
			width  int64
			scheme string
			name   string
		}{{1280, "light", ""}, {1280, "dark", "-dark"}, {390, "light", "-phone"}} {
			if *screenshots == "" && v.width > 390 {
				continue // nobody looks
			}
			w.view(v.width, 900, v.scheme)
			if run.id == "0" {
				w.shoot("board" + v.name + ".png")
			} else {
				w.shoot("board-thousands" + v.name + ".png")
			}
		}
		w.accessible(fmt.Sprint("run ", run.id, " on a phone"))
	}

	require.Contains(t, w.text("#runs"), name)
	require.Empty(t, w.Complaints(), "the browser's console")
}
