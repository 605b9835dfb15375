// Package store keeps what a board knows of its runs. It holds copies, so that who reads them never
// waits for a run, nor a run for them.
package store

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/state"
)

// Limits of what is kept of a run.
const (
	maxEvents  = 1 << 17
	maxSamples = 20
	maxText    = 1 << 14 // bytes of a sample or a reason
	maxEvals   = 1 << 14
)

// Run is what is known of one run. Its methods may be called from any goroutine.
type Run struct {
	id      string
	dropped atomic.Int64
	changed atomic.Int64 // counts changes

	mu      sync.Mutex
	run     api.Run
	silent  bool // nothing has been heard of the run for long
	history int  // counts how often something was taken out of what viewers have seen
	layers  []arch.Lattice
	steps   steps
	evals   []eval
	reports []state.Report
	version int // of the reports
	at      int // their step
	events  []api.Event
	next    int // number of the next event
	samples []api.Sample
	sampled int // samples that there have been
	before  time.Duration
	recent  speed
	lattice []byte // JSON of the picture, of the version latticeOf
	drawn   int
	deltas  delta
	told    standing
}

// NewRun returns a run that has not begun.
func NewRun(id, name string, settings map[string]string) *Run {
	return &Run{id: id, run: waiting(id, name, settings)}
}

// waiting returns the status of a run that has not begun.
func waiting(id, name string, settings map[string]string) api.Run {
	nan := api.Float(math.NaN())
	return api.Run{ID: id, Name: name, State: "waiting", Settings: settings, Loss: nan,
		Rate: nan, GradNorm: nan, Speed: nan, ValLoss: nan, ValBPB: nan, Left: nan}
}

// ID returns the run's.
func (r *Run) ID() string { return r.id }

// Clear forgets all of the run but its name, for another run that has taken its place.
func (r *Run) Clear(settings map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.changed.Add(1)
	r.run = waiting(r.id, r.run.Name, settings)
	r.layers, r.steps, r.evals, r.events, r.samples = nil, steps{}, nil, nil, nil
	r.before, r.recent, r.silent = 0, speed{}, false
	r.forgetReports()
	r.rewritten()
}

// rewritten records that data have been removed that viewers may have received, so that they are
// sent the whole run again.
func (r *Run) rewritten() {
	r.history++
	r.deltas, r.sampled = delta{}, len(r.samples)
}

// forgetReports discards the reports of the seeds.
func (r *Run) forgetReports() {
	r.reports, r.at, r.run.Epoch, r.run.Stages = nil, 0, 0, nil
	r.version++
}

// resumeAt discards everything later than a step, because the run makes those steps again. If the
// run starts over, it discards everything.
func (r *Run) resumeAt(step int) {
	afresh := step == 0 && len(r.steps.points) > 0
	beyond := func(at int) bool { return at > step || afresh }
	was := []int{r.steps.thinned, len(r.evals), len(r.events), len(r.samples)}

	r.steps.cut(step)
	r.evals = slices.DeleteFunc(r.evals, func(e eval) bool { return beyond(int(e.step)) })
	r.events = slices.DeleteFunc(r.events, func(e api.Event) bool { return beyond(e.Step) })
	r.samples = slices.DeleteFunc(r.samples, func(s api.Sample) bool { return beyond(s.Step) })
	if r.run.Saved != "" && beyond(r.run.SavedAt) {
		r.run.Saved, r.run.SavedAt = "", 0
	}
	if len(r.reports) > 0 && beyond(r.at) {
		r.forgetReports()
	}
	if is := []int{r.steps.thinned, len(r.evals), len(r.events), len(r.samples)}; !slices.Equal(is,
		was) {
		r.rewritten()
	}

	r.before = 0
	if n := len(r.steps.points); n > 0 {
		r.before = time.Duration(r.steps.points[n-1].time * float64(time.Second))
	}
}

// Drop counts an event for which there was no room.
func (r *Run) Drop() { r.dropped.Add(1); r.changed.Add(1) }

// Changed returns a number that changes with the run.
func (r *Run) Changed() int64 { return r.changed.Load() }

// Status returns where the run stands.
func (r *Run) Status() api.Run {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status()
}

func (r *Run) status() api.Run {
	s := r.run
	s.Dropped = r.dropped.Load()
	if r.silent && s.State == "running" {
		s.State = "silent"
	}
	return s
}

// Take takes in an event of the trainer. Reports must be no one else's to change.
func (r *Run) Take(e llm.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.changed.Add(1)
	a := &r.run
	if e.Lattices != nil {
		r.layers = e.Lattices
	}
	a.Step, a.Params, a.Seeds, a.Tokens = e.Step, e.Params, e.Seeds, e.RunTokens
	a.Share, a.Elapsed = api.Float(e.Share), api.Float(e.Elapsed.Seconds())
	a.ValLoss, a.ValBPB = api.Float(e.ValLoss), api.Float(e.ValBPB)
	switch e.Kind {
	case llm.RunStart:
		r.start(e)
	case llm.StepEnd:
		r.step(e)
	case llm.EvalEnd:
		if len(r.evals) < maxEvals {
			r.evals = append(r.evals, eval{float64(e.Step), r.seconds(e), e.ValLoss, e.ValBPB})
		}
	case llm.Saved:
		a.Saved, a.SavedAt = e.Path, e.Step
	case llm.Sampled:
		r.sample(api.Sample{Step: e.Step, Text: clip(e.Text)})
	case llm.EpochEnd:
		r.report(e.Step, e.Reports, e.SeedEvents)
	case llm.Measured:
		r.measured(e.Ceiling)
	case llm.Noted:
		r.note(e.Step, e.Text)
	case llm.Reshaped:
		r.note(e.Step, e.Text)
	case llm.Failed:
		a.State = "failed"
	case llm.RunEnd:
		r.end(e)
	}
}

// seconds is the run's age, that of earlier processes or runs of the trainer included.
func (r *Run) seconds(e llm.Event) float64 { return (r.before + e.Elapsed).Seconds() }

func (r *Run) start(e llm.Event) {
	a := &r.run
	a.State, a.Error, a.Started = "running", "", time.Now()
	if a.Steps = e.Steps; e.Steps >= math.MaxInt32 {
		a.Steps = 0
	}
	if e.Budget != (llm.Budget{}) {
		a.Budget = e.Budget.String()
	}
	r.resumeAt(e.Step)
	r.recent = speed{from: e.Elapsed, share: e.Share, began: e.Elapsed}
	r.report(e.Step, e.Reports, nil)
}

func (r *Run) step(e llm.Event) {
	a := &r.run
	tokens, flops, left := r.recent.step(e)
	a.Loss, a.Rate, a.GradNorm = api.Float(e.Loss), api.Float(e.LearningRate), api.Float(e.GradNorm)
	a.Speed, a.Left = api.Float(tokens), api.Float(left)
	r.computes(flops)
	r.steps.add(point{float64(e.Step), r.seconds(e), e.Loss, e.LearningRate, e.GradNorm, tokens})
}

func (r *Run) end(e llm.Event) {
	a := &r.run
	switch {
	case e.Err == nil:
		a.State = "ended"
	case a.State != "failed":
		a.State = "stopped"
	}
	if e.Err != nil {
		a.Error = clip(e.Err.Error())
	}
	a.Left = 0
}

// report takes in what is known of the seeds.
func (r *Run) report(step int, reports []state.Report, happened []state.Event) {
	for _, e := range happened {
		r.event(api.Event{Step: step, Epoch: e.Epoch, Layer: e.Layer, Seed: e.Seed,
			Kind: e.Kind.String(), From: e.From.String(), To: e.To.String(),
			Value: api.Float(e.Value), Reason: clip(e.Reason)})
	}
	if len(reports) == 0 {
		return
	}
	r.reports, r.at = reports, step
	r.version++
	r.run.Epoch, r.run.Stages = reports[0].Epoch, stages(reports)
}

// computes notes how many operations a second the run makes.
func (r *Run) computes(flops float64) {
	r.run.FLOPs = api.Float(flops)
	if r.run.Ceiling > 0 {
		r.run.CeilingShare = r.run.FLOPs / r.run.Ceiling
	}
}

// measured notes what the run's device reaches at best, among its settings too.
func (r *Run) measured(c llm.Ceiling) {
	r.run.Ceiling = api.Float(c.Product)
	r.computes(float64(r.run.FLOPs))
	facts := map[string]string{}
	if c.Product > 0 {
		facts["products at best"] = fmt.Sprintf("%.4g TFLOP/s of %s", c.Product/1e12, clip(c.Type))
	}
	if c.Copy > 0 {
		facts["copies at best"] = fmt.Sprintf("%.4g GB/s", c.Copy/1e9)
	}
	r.onMachine(facts, false)
}

// note adds what concerns no seed to what has happened.
func (r *Run) note(step int, text string) {
	r.event(api.Event{Step: step, Epoch: r.run.Epoch, Layer: -1, Seed: -1, Kind: Noted,
		To: clip(text)})
}

// Noted is the kind of an event that concerns no seed; To says what has happened.
const Noted = "Noted"

// Refuse notes commands that were refused, and why.
func (r *Run) Refuse(commands []state.Command, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.changed.Add(1)
	for _, c := range commands {
		if c.Action == state.Measure { // which concerns no single seed
			c.Layer, c.Seed = -1, -1
		}
		r.event(api.Event{Step: r.run.Step, Epoch: r.run.Epoch, Layer: c.Layer, Seed: c.Seed,
			Kind: Refused, To: clip(why.Error()), Reason: clip(c.Why)})
	}
}

// Refused is the kind of an event that is a command which was refused; To says why.
const Refused = "Refused"

func (r *Run) event(e api.Event) {
	if len(r.events) >= 2*maxEvents { // the older half goes
		r.events = append([]api.Event(nil), r.events[maxEvents:]...)
	}
	e.Number, e.Place = r.next, place(r.layers, e.Layer, e.Seed)
	r.events = append(r.events, e)
	r.next++
}

func (r *Run) sample(s api.Sample) {
	if len(r.samples) >= maxSamples {
		r.samples = append(r.samples[:0], r.samples[1:]...)
	}
	r.samples = append(r.samples, s)
	r.sampled++
}

// clip bounds a text.
func clip(s string) string { return s[:min(len(s), maxText)] }

// Series returns the run's curves.
func (r *Run) Series() api.Series {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.series(0, 0)
}

func (r *Run) series(step, evaluation int) (s api.Series) {
	r.steps.since(step, &s)
	for _, e := range r.evals[min(evaluation, len(r.evals)):] {
		s.EvalStep, s.EvalTime = append(s.EvalStep, api.Float(e.step)),
			append(s.EvalTime, api.Float(e.time))
		s.ValLoss, s.ValBPB = append(s.ValLoss, api.Float(e.loss)),
			append(s.ValBPB, api.Float(e.bpb))
	}
	return s
}

// Lattice returns the JSON of the picture of all seeds. Viewers share it.
func (r *Run) Lattice() ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lattice != nil && r.drawn == r.version {
		return r.lattice, nil
	}
	l := api.Lattice{Version: r.version, Epoch: r.run.Epoch, Step: r.at,
		Layers: picture(r.reports, r.layers)}
	text, err := json.Marshal(l)
	r.lattice, r.drawn = text, r.version
	return text, err
}

// Events returns those from a number on, at most n, the oldest first.
func (r *Run) Events(from, n int) []api.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.eventsFrom(from, n)
}

func (r *Run) eventsFrom(from, n int) []api.Event {
	at := r.eventAt(from)
	return append([]api.Event{}, r.events[at:min(len(r.events), at+n)]...)
}

// eventAt returns the index of the first event with a number from the given one on. Numbers of
// events that a resumed run has taken back are not used again.
func (r *Run) eventAt(number int) int {
	at, _ := slices.BinarySearchFunc(r.events, number, func(e api.Event, number int) int {
		return cmp.Compare(e.Number, number)
	})
	return at
}

// Seed returns what is known of a seed, and false if there is none.
func (r *Run) Seed(layer, number int) (api.Seed, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if layer < 0 || layer >= len(r.reports) || number < 0 || number >= len(r.reports[layer].Seeds) {
		return api.Seed{}, false
	}
	s := seed(&r.reports[layer], layer, number)
	s.Place, s.Events = place(r.layers, layer, number), []api.Event{}
	for _, e := range r.events {
		if e.Layer == layer && e.Seed == number {
			s.Events = append(s.Events, e)
		}
	}
	if len(s.Events) > maxSeedEvents {
		s.Events = s.Events[len(s.Events)-maxSeedEvents:]
	}
	return s, true
}

const maxSeedEvents = 500

// Reports returns what controllers decide by.
func (r *Run) Reports() []api.Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	reports := r.reports
	all := make([]api.Report, len(reports))
	for i := range reports {
		from := &reports[i]
		all[i] = api.Report{Epoch: from.Epoch, Step: from.Step,
			Site: from.Site.String(), Hidden: from.Hidden,
			Slots: from.Slots, SlotParameters: from.SlotParameters,
			Seeds: make([]api.Seed, len(from.Seeds))}
		for k := range from.Seeds {
			all[i].Seeds[k] = seed(from, i, k)
		}
	}
	return all
}

// Kinds are the names of the blueprints that may grow at each site of the run's lattices.
func (r *Run) Kinds() map[string][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[string][]string{}
	for _, l := range r.reports {
		all[l.Site.String()] = kinds(l.Site)
	}
	return all
}

// speed measures tokens a second over the last seconds.
type speed struct {
	from   time.Duration // when the present stretch began
	tokens int64         // RunTokens then
	flops  float64       // RunFLOPs then
	last   float64
	rate   float64 // FLOPs a second
	began  time.Duration
	share  float64 // of the run, when it began
}

// stretch is over how long a speed is measured at least.
const stretch = 2 * time.Second

// step takes in a step, and returns tokens and FLOPs a second, and the seconds left by the mean so
// far.
func (s *speed) step(e llm.Event) (tokensPerS, flopsPerS, left float64) {
	if d := e.Elapsed - s.from; d > stretch || s.last == 0 && d > 0 {
		s.last = float64(e.RunTokens-s.tokens) / d.Seconds()
		s.rate = (e.RunFLOPs - s.flops) / d.Seconds()
		s.from, s.tokens, s.flops = e.Elapsed, e.RunTokens, e.RunFLOPs
	}
	left = math.NaN()
	if done := e.Share - s.share; done > 0 {
		left = (1 - e.Share) / done * (e.Elapsed - s.began).Seconds()
	}
	return s.last, s.rate, left
}

// Full is all that is kept of a run.
type Full struct {
	Run     api.Run      `json:"run"`
	Series  api.Series   `json:"series"`
	Events  []api.Event  `json:"events"`
	Samples []api.Sample `json:"samples"`
	Lattice api.Lattice  `json:"lattice"`
}

// Full returns all that is kept of the run.
func (r *Run) Full() Full {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Full{Run: r.status(), Series: r.series(0, 0), Events: append([]api.Event{}, r.events...),
		Samples: append([]api.Sample{}, r.samples...),
		Lattice: api.Lattice{Version: r.version, Epoch: r.run.Epoch,
			Step: r.at, Layers: picture(r.reports, r.layers)}}
}
