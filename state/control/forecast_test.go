package control_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// A simulation is a run with a budget of FLOPs. After a steep start, its loss follows the law of
// Forecast.
type simulation struct {
	blocks   int
	epochs   int     // of a run that never grows
	budget   float64 // tokens per parameter that the model would see without growth
	perToken bool
	harm     float64 // added to the loss after growth
	noise    float64 // standard deviation of the loss
	fall     float64 // of the loss at fallTokens, after a plateau
	starting float64 // share that the start of the run takes
	growing  float64 // share that each growth takes
	block    float64 // parameters; blockParameters if 0
	size     float64 // number of tokens that limits the loss like a block does; 27·blockParameters if 0
}

const (
	blockParameters = 0.8e6
	steepTokens     = 10e6 // until the end of the steep start
	fallTokens      = 16e6
)

// cost returns the FLOPs per token, relative to a block. Embeddings cost as much as two blocks.
func (s simulation) cost(blocks int) float64 { return float64(blocks) + 2 }

// result describes a simulated run.
type result struct {
	blocks     int       // at the end
	worth      []float64 // tokens that the model was worth before each growth
	share      float64   // of the first growth
	rolledBack bool
	loss       float64
	notes      []string
	whys       []string
	review     []string
}

// run simulates a run that follows f.
func (s simulation) run(t *testing.T, f *control.Forecast) result {
	t.Helper()
	random := randtest.New(t)
	if s.block == 0 {
		s.block, s.size = blockParameters, 27*blockParameters
	}

	blocks := s.blocks
	tokens := s.budget * s.block * float64(s.blocks)
	plan := state.RunPlan{EpochTokens: tokens / float64(s.epochs), PerToken: s.perToken}
	f.Costs(func(_ blueprints.Kind, size int) float64 { return s.cost(size*blocks) / s.cost(blocks) })
	f.Plan(func() state.RunPlan {
		plan.Blocks, plan.Parameters = blocks, s.block*float64(blocks)
		return plan
	})
	require.NoError(t, f.Check())

	law := func(blocks int, tokens float64) float64 {
		return 1.5 + 6000*(1/math.Sqrt(tokens)+1/math.Sqrt(s.size*float64(blocks))) +
			4*math.Exp(-tokens/(steepTokens/4)) + s.fall/(1+math.Exp((tokens-fallTokens)/1.5e6))
	}

	var res result
	r := state.Report{Site: blueprints.Depth, Seeds: []state.SeedReport{{Seed: 0}, {Seed: 1}}}
	worth, share := 0.0, s.starting
	for share < 1 {
		r.Epoch++
		worth += plan.EpochTokens
		if s.perToken {
			share += 1 / float64(s.epochs)
		} else {
			share += s.cost(blocks) / s.cost(s.blocks) / float64(s.epochs)
		}

		res.loss = law(blocks, worth)
		if len(plan.Growths) > 0 {
			res.loss += s.harm
		}
		rounded := math.Floor(min(1, share)*1024) / 1024 // as a trainer rounds it
		r.Curve = append(r.Curve, state.Point{Epoch: r.Epoch, Share: rounded,
			Loss: res.loss + s.noise*random.NormFloat64()})
		for i := range r.Seeds {
			r.Seeds[i].EpochsInStage++
			stage := r.Seeds[i].Stage
			r.Seeds[i].CanAdvance = stage == state.Evaluating || stage == state.FineTuning
		}

		reports := []state.Report{r}
		res.notes = append(res.notes, f.Notes(reports)...)
		idle := r
		idle.Epoch++ // an epoch without a new point adds no note
		require.Empty(t, f.Notes([]state.Report{idle}))
		for _, c := range f.Decide(reports) {
			seed := &r.Seeds[c.Seed]
			res.whys = append(res.whys, c.Why)
			switch {
			case c.Action == state.Germinate:
				seed.Size, seed.Kind = c.Request.Size, c.Request.Kind
				if len(res.worth) == 0 {
					res.share = share
				}
				res.worth = append(res.worth, worth)
				plan.Growths = append(plan.Growths, state.RunGrowth{Epoch: r.Epoch, Blocks: blocks})
				share += s.growing
				now := law(blocks, worth)
				blocks *= c.Request.Size
				for lo, hi := worth/10, worth; hi-lo > 1; { // the tokens after which the grown model has this loss
					if worth = (lo + hi) / 2; law(blocks, worth) > now {
						lo = worth
					} else {
						hi = worth
					}
				}
			case c.To == state.RolledBack:
				res.rolledBack = true
				blocks = plan.Growths[len(plan.Growths)-1].Blocks
				plan.Growths = plan.Growths[:len(plan.Growths)-1]
			}
			if c.Action == state.Move {
				seed.Stage, seed.EpochsInStage = c.To, 0
			}
		}
	}

	res.blocks, res.review = blocks, f.Review([]state.Report{r})
	return res
}

// TestForecastDependsOnTheBudget checks that a model does not grow on a small budget, grows to a middle
// depth on a larger one, and grows to the largest depth early on a large one. The run must end no higher
// than runs without growth at each of these depths.
func TestForecastDependsOnTheBudget(t *testing.T) {
	for _, c := range []struct {
		budget float64 // tokens per parameter of the first model
		blocks int
	}{{8, 3}, {60, 6}, {200, 12}, {800, 12}} {
		s := simulation{blocks: 3, epochs: 200, budget: c.budget}
		f := control.NewForecast(blueprints.Stack, 4)
		got := s.run(t, f)
		require.Equal(t, c.blocks, got.blocks, "budget %v: %v", c.budget, got.whys)
		if c.blocks == 3 {
			require.Contains(t, got.notes[len(got.notes)/2], "would not pay off")
			continue
		}

		require.Less(t, got.share, 0.15)
		require.False(t, got.rolledBack)
		for _, blocks := range []int{3, 6, 12} {
			static := s
			static.blocks = blocks
			static.budget = s.budget * 3 / float64(blocks) * s.cost(3) / s.cost(blocks)
			require.Less(t, got.loss, static.run(t, never()).loss, "budget %v, %d blocks", c.budget, blocks)
		}
	}
}

// never returns a controller that finds no growth to choose from.
func never() *control.Forecast {
	f := control.NewForecast(blueprints.Stack, 2)
	f.Tolerance = 0.99
	return f
}

// TestForecastGrowsTwice checks that a second growth follows the first one if that is allowed, and that it
// is about as good as a single growth.
func TestForecastGrowsTwice(t *testing.T) {
	f := control.NewForecast(blueprints.Stack, 4)
	f.Growths = 2
	s := simulation{blocks: 3, epochs: 200, budget: 200}
	got := s.run(t, f)
	require.Equal(t, 12, got.blocks, got.whys)
	require.Less(t, got.loss, 1.005*s.run(t, control.NewForecast(blueprints.Stack, 4)).loss)
	require.Equal(t, 2, strings.Count(strings.Join(got.whys, "\n"), "; it grows"))
}

// TestForecastWideBlocks checks a model of 124 million parameters with the budget of a run in which growth from 3
// to 12 blocks at a share of 0.10 to 0.14 ended lower than growth at 0.2 and 0.4, and than 12 blocks from the start.
func TestForecastWideBlocks(t *testing.T) {
	f := control.NewForecast(blueprints.Stack, 4)
	f.Growths = 2
	s := simulation{blocks: 3, epochs: 500, budget: 24, block: 7.1e6, size: 37e6}
	got := s.run(t, f)
	require.Equal(t, 12, got.blocks, got.notes)
	require.Less(t, got.share, 0.1)
	require.False(t, got.rolledBack)

	// A patient model delays its second growth until a token of the model with 6 blocks is worth less than its cost,
	// according to the law, and ends lower.
	patient := control.NewForecast(blueprints.Stack, 4)
	patient.Growths, patient.Patient = 2, true
	hasty := got
	got = s.run(t, patient)
	difference := (1/math.Sqrt(6) - 1/math.Sqrt(12)) / math.Sqrt(37e6)
	best := math.Pow((math.Cbrt(s.cost(12)/s.cost(6))-1)/difference, 2)
	require.Len(t, got.worth, 2)
	require.InEpsilon(t, best, got.worth[1], 0.2)
	require.Less(t, hasty.worth[1], best/2)
	require.Less(t, got.loss, hasty.loss)
}

// TestForecastWaitsForTheFall checks that a second growth does not take place while the loss falls fast after
// a plateau.
func TestForecastWaitsForTheFall(t *testing.T) {
	f := control.NewForecast(blueprints.Stack, 4)
	f.Growths = 2
	got := simulation{blocks: 3, epochs: 400, budget: 100, fall: 1.5}.run(t, f)
	require.Len(t, got.worth, 2)
	require.Less(t, got.worth[0], fallTokens)
	require.Greater(t, got.worth[1], 1.7*fallTokens)
}

// TestForecastRollsBack checks that a growth that ends worse is rolled back, that a harmless one is kept
// in spite of noise, and that both verdicts name predictions and observations.
func TestForecastRollsBack(t *testing.T) {
	s := simulation{blocks: 3, epochs: 400, budget: 200, noise: 0.02}
	got := s.run(t, control.NewForecast(blueprints.Stack, 4))
	require.False(t, got.rolledBack)
	require.Contains(t, strings.Join(got.whys, "\n"), "since it has settled, the loss is")

	s.harm = 1
	got = s.run(t, control.NewForecast(blueprints.Stack, 4))
	require.True(t, got.rolledBack)
	require.Equal(t, 3, got.blocks)
	require.Contains(t, got.whys[len(got.whys)-1], "after a rollback")
}

// TestForecastIgnoresStalls checks that a model grows after as many tokens as usual if a run on a budget of time
// loses the first tenth of its time to the choice of kernels.
func TestForecastIgnoresStalls(t *testing.T) {
	s := simulation{blocks: 3, epochs: 400, budget: 100, fall: 1.5}
	grow := func() result {
		f := control.NewForecast(blueprints.Stack, 4)
		f.Growths = 2
		return s.run(t, f)
	}

	want := grow()
	s.starting = 0.1
	got := grow()
	require.Len(t, got.worth, len(want.worth))
	for i := range got.worth {
		require.InEpsilon(t, want.worth[i], got.worth[i], 0.25)
	}
}

// TestForecastForgivesStalls checks that a growth that takes a twentieth of the run, as on a GPU that has to load its
// kernels, is not rolled back, and that the predictions made soon afterward do not take the model for a slow one.
func TestForecastForgivesStalls(t *testing.T) {
	s := simulation{blocks: 3, epochs: 200, budget: 200}
	want := s.run(t, control.NewForecast(blueprints.Stack, 4))
	s.growing = 0.05
	got := s.run(t, control.NewForecast(blueprints.Stack, 4))
	require.Equal(t, want.blocks, got.blocks)
	require.False(t, got.rolledBack)

	predicted := regexp.MustCompile(`predicted final loss ([\d.]+), and [\d.]+ after a rollback`)
	first := predicted.FindStringSubmatch(strings.Join(got.notes, "\n"))
	require.Len(t, first, 2, got.notes)
	loss, err := strconv.ParseFloat(first[1], 64)
	require.NoError(t, err)
	require.InEpsilon(t, got.loss, loss, 0.02)
}

// TestForecastPerToken checks that a run limited by steps grows within the bounds of Depth if it is short,
// and earlier if it is long.
func TestForecastPerToken(t *testing.T) {
	for _, c := range []struct{ budget, from, to float64 }{{4, 0.4, 0.56}, {100, 0.05, 0.3}} {
		got := simulation{blocks: 3, epochs: 200, budget: c.budget, perToken: true}.run(t,
			control.NewForecast(blueprints.Stack, 2))
		require.Equal(t, 6, got.blocks)
		require.GreaterOrEqual(t, got.share, c.from, "budget %v", c.budget)
		require.LessOrEqual(t, got.share, c.to, "budget %v", c.budget)
	}
}

// TestForecastPerTokenRefuses checks that a run limited by steps does not grow a trained model if so few
// tokens remain that more blocks would hardly lower the loss, and that the model grows if more tokens
// remain.
func TestForecastPerTokenRefuses(t *testing.T) {
	for _, c := range []struct {
		budget float64
		blocks int
	}{{0.3, 3}, {4, 6}} {
		f := control.NewForecast(blueprints.Stack, 2)
		f.Trained = true
		got := simulation{blocks: 3, epochs: 200, budget: c.budget, perToken: true}.run(t, f)
		require.Equal(t, c.blocks, got.blocks, "budget %v: %v", c.budget, got.notes)
		if c.blocks == 3 {
			require.Contains(t, got.notes[len(got.notes)-1], "would not pay off")
		}
	}
}

// TestForecastReviews checks that the review of a run repeats the predictions that led to its decisions,
// and states how far the final loss is from these predictions.
func TestForecastReviews(t *testing.T) {
	predicted := regexp.MustCompile(`predicted final loss ([\d.]+) without growth, ([\d.]+) if it now grows`)
	s := simulation{blocks: 3, epochs: 200, budget: 200}
	f := control.NewForecast(blueprints.Stack, 4)
	f.Growths = 2
	got := s.run(t, f)
	require.Len(t, got.worth, 2)
	require.Len(t, got.review, 2)
	for i, from := range []string{"from 3 to 6 blocks", "from 6 to 12 blocks"} {
		grew := slices.DeleteFunc(slices.Clone(got.whys), func(why string) bool {
			return !strings.HasSuffix(why, "; it grows")
		})
		want := predicted.FindStringSubmatch(grew[i])
		require.Len(t, want, 3)
		require.Contains(t, got.review[i], from)
		require.Contains(t, got.review[i], "the predicted final loss was "+want[2])
		require.Contains(t, got.review[i], fmt.Sprintf("the run ended at %.4f, ", got.loss))

		loss, err := strconv.ParseFloat(want[2], 64)
		require.NoError(t, err)
		require.Contains(t, got.review[i], fmt.Sprintf("%.1f%% ", 100*math.Abs(got.loss/loss-1)))
	}

	s.budget = 8
	got = s.run(t, control.NewForecast(blueprints.Stack, 4))
	require.Len(t, got.review, 1)
	require.Contains(t, got.review[0], "the model has kept its blocks")
	require.Contains(t, got.review[0], "would not pay off")
	want := predicted.FindStringSubmatch(strings.Join(got.notes, "\n"))
	require.Contains(t, got.review[0], "the predicted final loss was "+want[1])

	s.budget, s.harm, s.epochs = 200, 1, 400
	got = s.run(t, control.NewForecast(blueprints.Stack, 4))
	require.True(t, got.rolledBack)
	require.Equal(t, []string{fmt.Sprintf("growth: a growth was rolled back; the run ended at a loss of %.4f",
		got.loss)}, got.review)
}

// TestForecastPlans checks the notes of a run: the plan comes first, then a prediction follows after each
// tenth of the budget. The predicted loss approaches the actual one.
func TestForecastPlans(t *testing.T) {
	s := simulation{blocks: 3, epochs: 200, budget: 200}
	got := s.run(t, control.NewForecast(blueprints.Stack, 4))
	require.InDelta(t, 11, len(got.notes), 1)
	require.Contains(t, got.notes[0], "is expected to lower the reducible loss by")
	require.Contains(t, got.notes[1], "predicted final loss")

	// The plan compares the run with one that has more blocks from the start. 1.5 is the level of the law.
	static := s
	static.blocks, static.budget = 12, s.budget*3/12*s.cost(3)/s.cost(12)
	excess := 100 * ((static.run(t, never()).loss-1.5)/(got.loss-1.5) - 1)
	planned := regexp.MustCompile(`; a model with 12 blocks from the start would end ([\d.]+)% above that$`)
	match := planned.FindStringSubmatch(got.notes[0])
	require.Len(t, match, 2, got.notes[0])
	predicted, err := strconv.ParseFloat(match[1], 64)
	require.NoError(t, err)
	require.InDelta(t, excess, predicted, 0.5)
}

// TestForecastPlansByTheSpeed checks that the plan knows how many tokens the run will see, although it starts with a
// stall, and although shares are rounded by more than an epoch takes.
func TestForecastPlansByTheSpeed(t *testing.T) {
	planned := regexp.MustCompile(`would reach ([\d.]+) tokens per parameter`)
	for _, starting := range []float64{0, 0.05} {
		s := simulation{blocks: 3, epochs: 2000, budget: 200, starting: starting}
		got := s.run(t, control.NewForecast(blueprints.Stack, 4))
		require.Contains(t, got.notes[0], "is expected to lower the reducible loss by")
		reach := planned.FindStringSubmatch(got.notes[0])
		require.Len(t, reach, 2)
		tokens, err := strconv.ParseFloat(reach[1], 64)
		require.NoError(t, err)
		require.InEpsilon(t, s.budget*(1-starting), tokens, 0.1)
	}
}

// TestForecastByRecordedCurves replays training curves from docs/lab/growth.md. The best arms of those
// runs grew at shares in the given ranges. On the smallest budget, 6 blocks ended lower than every model
// that had grown to 12, so they must not grow.
func TestForecastByRecordedCurves(t *testing.T) {
	var recorded []struct {
		Run   string
		Cost  float64
		Curve [][2]float64
	}
	text, err := os.ReadFile("testdata/curves.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &recorded))
	for _, run := range recorded {
		want, ok := map[string]struct {
			blocks           int
			tokens, from, to float64
		}{
			"flops-5-seed1-blocks=3,lr=0.002":                                        {3, 135.5e6, 0.1, 0.3},
			"flops-5-seed1-blocks=6,lr=0.002":                                        {6, 84.5e6, 1, 1},
			"flops-10-seed1-blocks=6,lr=0.002":                                       {6, 169e6, 0.1, 0.25},
			"flops-20-seed1-blocks=6,lr=0.002":                                       {6, 338e6, 0.05, 0.2},
			"flops-5-seed1-blocks=6,lr=0.02,optimizer=muon,decay=late,outputs=zero":  {6, 84.5e6, 1, 1},
			"flops-10-seed1-blocks=6,lr=0.02,optimizer=muon,decay=late,outputs=zero": {6, 169e6, 0.1, 0.25},
		}[run.Run]
		if !ok {
			continue // the run has grown
		}

		cost := func(blocks int) float64 { return float64(blocks)*1.065 + 2.1 } // millions per token
		decided := func(patient bool) (share float64) {
			f := control.NewForecast(blueprints.Stack, 12/want.blocks)
			f.Patient = patient
			f.Costs(func(_ blueprints.Kind, size int) float64 { return cost(size*want.blocks) / cost(want.blocks) })
			f.Plan(func() state.RunPlan {
				return state.RunPlan{Blocks: want.blocks, Parameters: float64(want.blocks) * 0.8e6,
					EpochTokens: want.tokens / float64(len(run.Curve))}
			})
			r := state.Report{Site: blueprints.Depth, Seeds: make([]state.SeedReport, 1)}
			for i, p := range run.Curve {
				r.Epoch = i + 1
				r.Curve = append(r.Curve, state.Point{Epoch: i + 1, Share: p[0], Loss: p[1]})
				if len(f.Decide([]state.Report{r})) > 0 {
					return p[0]
				}
			}
			return 1
		}

		hasty, patient := decided(false), decided(true)
		require.GreaterOrEqual(t, hasty, want.from, run.Run)
		require.GreaterOrEqual(t, patient, hasty, run.Run)
		require.LessOrEqual(t, patient, want.to, run.Run)
	}
}

func TestBadForecast(t *testing.T) {
	for want, change := range map[string]func(*control.Forecast){
		"Kind and Size":  func(f *control.Forecast) { f.Size = 1 },
		"Growths is 0":   func(f *control.Forecast) { f.Growths = 0 },
		"Settle is 0":    func(f *control.Forecast) { f.Settle = 0 },
		"Patience is 1":  func(f *control.Forecast) { f.Patience = 1 },
		"Tolerance is -": func(f *control.Forecast) { f.Tolerance = -1 },
	} {
		f := control.NewForecast(blueprints.Stack, 2)
		change(f)
		require.ErrorContains(t, f.Check(), want)
		_, err := f.LeastEpochs(nil, 1)
		require.ErrorContains(t, err, want)
	}
}
