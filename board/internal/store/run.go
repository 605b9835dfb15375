// Package store holds a board's data about its runs. It keeps copies, so readers and runs never wait
// for each other.
package store

import (
	"cmp"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kasmina-go/kasmina/llm"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/state"
)

// Limits of the data of a run.
const (
	maxEvents  = 1 << 17
	maxSamples = 20
	maxText    = 1 << 14 // bytes of a sample or a reason
	maxEvals   = 1 << 14
)

// A Run holds the data of one run. Its methods may be called from any goroutine.
type Run struct {
	id      string
	dropped atomic.Int64
	changed atomic.Int64 // counts changes

	mu      sync.Mutex
	run     api.Run
	silent  bool // the log has not changed for a long time
	history int  // counts removals of data viewers may have seen
	layers  []llm.Lattice
	steps   steps
	evals   []eval
	reports []state.Report // as far as records contain them
	exact   []state.Report // of a trainer that the board watches
	version int            // of the reports
	at      int            // step of the reports
	events  []api.Event
	next    int // number of the next event
	groups  groups
	samples []api.Sample
	sampled int           // number of samples so far
	before  time.Duration // duration of the run before this process
	recent  speed
	lattice []byte // JSON of the picture of version drawn
	drawn   int
	deltas  delta
	sent    sentStatus
}

// NewRun returns a run that has not started.
func NewRun(id, name string, settings map[string]string) *Run {
	return &Run{id: id, run: waiting(id, name, settings)}
}

// waiting returns the status of a run that has not started.
func waiting(id, name string, settings map[string]string) api.Run {
	nan := api.Float(math.NaN())
	return api.Run{ID: id, Name: name, State: "waiting", Settings: settings, Loss: nan,
		Rate: nan, GradNorm: nan, Speed: nan, MeanSpeed: nan, ValLoss: nan, ValBPB: nan,
		BestLoss: nan, Left: nan}
}

// ID returns the identifier of the run.
func (r *Run) ID() string { return r.id }

// Clear removes all data except the name. It is called when another run replaces this one.
func (r *Run) Clear(settings map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.changed.Add(1)
	r.clear(settings)
}

// clear implements Clear.
func (r *Run) clear(settings map[string]string) {
	r.run = waiting(r.id, r.run.Name, settings)
	r.layers, r.steps, r.evals, r.events, r.samples = nil, steps{}, nil, nil, nil
	r.groups.cut(func(int) bool { return true })
	r.before, r.recent, r.silent = 0, speed{}, false
	r.forgetReports()
	r.rewritten()
}

// rewritten records that data viewers may have received was removed, so that they receive the whole
// run again.
func (r *Run) rewritten() {
	r.history++
	r.deltas, r.sampled = delta{}, len(r.samples)
}

// forgetReports discards the reports of the seeds.
func (r *Run) forgetReports() {
	r.reports, r.exact, r.at, r.run.Epoch, r.run.Stages = nil, nil, 0, 0, nil
	r.version++
}

// startOver discards everything except the settings, without the facts about the computer. The run may have
// replaced another run, whose log it continues.
func (r *Run) startOver() {
	settings := maps.Clone(r.run.Settings)
	maps.DeleteFunc(settings, isFact)
	r.clear(settings)
}

// resumeAt discards everything later than a step, because the run repeats those steps.
func (r *Run) resumeAt(step int) {
	beyond := func(at int) bool { return at > step }
	before := []int{r.steps.thinned, len(r.evals), len(r.events), len(r.samples)}

	r.steps.cut(step)
	r.evals = slices.DeleteFunc(r.evals, func(e eval) bool { return beyond(int(e.step)) })
	r.events = slices.DeleteFunc(r.events, func(e api.Event) bool { return beyond(e.Step) })
	cut := r.groups.cut(beyond)
	r.samples = slices.DeleteFunc(r.samples, func(s api.Sample) bool { return beyond(s.Step) })
	if r.run.Saved != "" && beyond(r.run.SavedAt) {
		r.run.Saved, r.run.SavedAt = "", 0
	}
	if len(r.reports) > 0 && beyond(r.at) {
		r.forgetReports()
	}

	after := []int{r.steps.thinned, len(r.evals), len(r.events), len(r.samples)}
	if cut || !slices.Equal(after, before) {
		r.rewritten()
	}

	r.before = 0
	if n := len(r.steps.points); n > 0 {
		r.before = time.Duration(r.steps.points[n-1].time * float64(time.Second))
	}
}

// Drop counts an event that was lost because the queue was full.
func (r *Run) Drop() { r.dropped.Add(1); r.changed.Add(1) }

// Changed returns a number that changes whenever the run does.
func (r *Run) Changed() int64 { return r.changed.Load() }

// Status returns the status of the run.
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

// Kinds of events that concern the run as a whole. Their field To contains the text.
const (
	Noted   = "Noted"   // a request, or a growth that was not possible
	Grown   = "Grown"   // the model has grown
	Refused = "Refused" // a command was rejected
)

// note adds an event that concerns no seed.
func (r *Run) note(kind, text string) {
	r.event(api.Event{Step: r.run.Step, Epoch: r.run.Epoch, Layer: -1, Seed: -1, Kind: kind,
		To: clip(text)})
}

// Refuse adds events for commands that were rejected, with the reason.
func (r *Run) Refuse(commands []state.Command, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.changed.Add(1)
	for _, c := range commands {
		if c.Action == state.Measure { // applies to all seeds
			c.Layer, c.Seed = -1, -1
		}
		r.event(api.Event{Step: r.run.Step, Epoch: r.run.Epoch, Layer: c.Layer, Seed: c.Seed,
			Kind: Refused, To: clip(why.Error()), Reason: clip(c.Why)})
	}
}

// event adds an event to the list of events and to its group.
func (r *Run) event(e api.Event) {
	if len(r.events) >= 2*maxEvents {
		r.events = append([]api.Event(nil), r.events[maxEvents:]...)
	}
	e.Number, e.Place = r.next, place(r.layers, e.Layer, e.Seed)
	r.events = append(r.events, e)
	r.next++
	r.groups.add(e, float64(r.run.Elapsed))
}

func (r *Run) sample(s api.Sample) {
	if len(r.samples) >= maxSamples {
		r.samples = append(r.samples[:0], r.samples[1:]...)
	}
	r.samples = append(r.samples, s)
	r.sampled++
}

// clip limits the length of a text.
func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(s[:maxText], "")
}

// Series returns the curves of the run.
func (r *Run) Series() api.Series {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.series(0, 0)
}

// series returns the points from index step on and the evaluations from index evaluation on.
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

// Lattice returns the JSON of the picture of all seeds. The caller must not modify it: viewers share
// it.
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

// Events returns up to n events, the oldest first, starting with the given number.
func (r *Run) Events(from, n int) []api.Event {
	r.mu.Lock()
	defer r.mu.Unlock()

	// Numbers of events that a resumption has removed are not used again, so numbers and indices
	// differ.
	at, _ := slices.BinarySearchFunc(r.events, from, func(e api.Event, number int) int {
		return cmp.Compare(e.Number, number)
	})
	return append([]api.Event{}, r.events[at:min(len(r.events), at+n)]...)
}

// Groups returns up to n groups of events, the oldest first, starting with the given number.
func (r *Run) Groups(from, n int) []api.Group {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.groups.from(from, n)
}

// Seed returns the state of a seed and its latest events. It returns false if there is no such
// seed.
func (r *Run) Seed(layer, number int) (api.Seed, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if layer < 0 || layer >= len(r.reports) || number < 0 || number >= len(r.reports[layer].Seeds) {
		return api.Seed{}, false
	}

	s := r.seed(layer, number)
	s.Events = []api.Event{}
	for _, e := range r.events {
		if e.Layer == layer && e.Seed == number {
			s.Events = append(s.Events, e)
		}
	}
	s.Events = latest(s.Events)
	return s, true
}

// seed returns the state of a seed without its events. Values that also appear in the log are taken
// from its records, so that the page and the report agree to the last digit.
func (r *Run) seed(layer, number int) api.Seed {
	s := seed(&r.reports[layer], layer, number)
	if layer < len(r.exact) && number < len(r.exact[layer].Seeds) {
		x := seed(&r.exact[layer], layer, number)
		s.Performance, s.SNR, s.GradVar, s.GradMax, s.Clips = x.Performance, x.SNR, x.GradVar,
			x.GradMax, x.Clips
		s.CanCull, s.CanRecycle, s.RampOver, s.LastUpdate = x.CanCull, x.CanRecycle, x.RampOver,
			x.LastUpdate
	}
	s.Place = place(r.layers, layer, number)
	return s
}

// maxSeedEvents limits the events of a seed that are returned together.
const maxSeedEvents = 500

// latest returns the last maxSeedEvents events.
func latest(events []api.Event) []api.Event {
	return events[max(0, len(events)-maxSeedEvents):]
}

// Reports returns the reports for a controller. They are exact if the board watches the trainer.
func (r *Run) Reports() []api.Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	reports := r.reports
	if r.exact != nil {
		reports = r.exact
	}

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

// Kinds returns the names of the blueprints that may grow at each site of the run's lattices.
func (r *Run) Kinds() map[string][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[string][]string{}
	for _, l := range r.reports {
		all[l.Site.String()] = kinds(l.Site)
	}
	return all
}

// History returns the stages of the seeds over the epochs.
func (r *Run) History() api.History {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stageHistory()
}

// maxRows limits the number of seeds in a history. If there are more, only every nth is included.
const maxRows = 1500

func (r *Run) stageHistory() api.History {
	var first []int
	total := 0
	for _, report := range r.reports {
		first = append(first, total)
		total += len(report.Seeds)
	}
	h := api.History{Epochs: r.run.Epoch, Every: max(1, (total+maxRows-1)/maxRows)}
	h.Rows = make([][]int, (total+h.Every-1)/h.Every)

	for _, e := range r.events {
		if e.Kind != state.StageChanged.String() && e.Kind != state.Quarantined.String() ||
			e.Layer < 0 || e.Layer >= len(first) || e.Seed < 0 ||
			e.Seed >= len(r.reports[e.Layer].Seeds) {
			continue
		}
		row := first[e.Layer] + e.Seed
		if row%h.Every != 0 {
			continue
		}
		to := &h.Rows[row/h.Every]
		*to = append(*to, e.Epoch, int(stageNamed(e.To)))
	}
	return h
}

// Full is the content of a report.
type Full struct {
	Run     api.Run      `json:"run"`
	Series  api.Series   `json:"series"`
	Groups  []api.Group  `json:"groups"`
	Samples []api.Sample `json:"samples"`
	Lattice api.Lattice  `json:"lattice"`
	History api.History  `json:"history"`
	Seeds   []api.Seed   `json:"seeds"`
}

// maxFull limits the dormant seeds of a report that have no history.
const maxFull = 4096

// Full returns the content of a report on the run.
func (r *Run) Full() Full {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Full{Run: r.status(), Series: r.series(0, 0), Groups: r.groups.from(0, math.MaxInt32),
		Samples: append([]api.Sample{}, r.samples...),
		Lattice: api.Lattice{Version: r.version, Epoch: r.run.Epoch, Step: r.at,
			Layers: picture(r.reports, r.layers)},
		History: r.stageHistory(), Seeds: r.seeds()}
}

// seeds returns the states of all seeds with their latest events.
func (r *Run) seeds() []api.Seed {
	type address struct{ layer, seed int }
	events := map[address][]api.Event{}
	for _, e := range r.events {
		at := address{e.Layer, e.Seed}
		events[at] = append(events[at], e)
	}

	all := []api.Seed{}
	plain := 0
	for layer := range r.reports {
		for number := range r.reports[layer].Seeds {
			own := latest(events[address{layer, number}])
			if len(own) == 0 && r.reports[layer].Seeds[number].Stage == state.Dormant {
				if plain++; plain > maxFull {
					continue
				}
			}
			s := r.seed(layer, number)
			s.Events = own
			all = append(all, s)
		}
	}
	return all
}
