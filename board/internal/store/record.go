package store

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/optime"
	"github.com/kasmina-go/kasmina/state"
)

// Limits for the content of a log, which is a file and may contain anything.
const (
	maxLogged  = 1 << 20 // seeds per layer
	maxLayers  = 1 << 12
	maxMachine = 64 // facts about the computer
)

// Take adds an event of a trainer. The event's reports must not change afterwards.
//
// Take adds the same records that a log contains for the event, so a board watching a trainer, a
// board reading logs and a report all show the same numbers. In addition, Take keeps the exact
// reports, which controllers need but logs lack.
func (r *Run) Take(e llm.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.changed.Add(1)

	records := runlog.Records(e)
	if e.Kind == llm.RunStart {
		initial := e
		initial.Kind, initial.SeedEvents = llm.EpochEnd, nil
		records = append(records, runlog.Records(initial)...)
	}
	for _, l := range records {
		l.Lattices = e.Lattices // a log omits the locations of many seeds
		r.read(l)
	}

	if len(e.Reports) > 0 && (e.Kind == llm.RunStart || e.Kind == llm.EpochEnd) {
		r.exact = e.Reports
		for i := range min(len(r.reports), len(e.Reports)) {
			r.reports[i].Site, r.reports[i].Slots = e.Reports[i].Site, e.Reports[i].Slots
		}
	}
}

// Read adds a record of a run's log.
func (r *Run) Read(l runlog.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.changed.Add(1)
	r.read(l)
}

func (r *Run) read(l runlog.Record) {
	if l.Event == "" { // a line of some other file
		return
	}

	a := &r.run
	if l.Event == "start" && l.Step == 0 && a.State != "waiting" {
		r.startOver()
	}

	a.Step = l.Step
	if len(l.Lattices) > 0 && len(l.Lattices) <= maxLayers {
		r.layers = l.Lattices
	}
	params := a.Params
	if l.Params != nil {
		a.Params = *l.Params
	}
	if l.AllParams != nil {
		a.AllParams = *l.AllParams
	}
	if l.Seeds != nil {
		a.Seeds = *l.Seeds
	}
	if l.Event == "start" {
		r.start(l)
	}

	seconds := r.before.Seconds() + l.ElapsedSeconds
	a.Elapsed = api.Float(seconds)
	if l.Share != nil {
		a.Share = *l.Share
	} else if a.Steps > 0 {
		a.Share = min(1, api.Float(l.Step)/api.Float(a.Steps))
	}

	switch l.Event {
	case "step":
		r.step(l, seconds)
	case "eval":
		r.evaluated(l, seconds)
	case "sample":
		r.sample(api.Sample{Step: l.Step, Text: clip(l.Text)})
	case "saved":
		a.Saved, a.SavedAt = l.Path, l.Step
	case "note":
		r.note(Noted, l.Text)
	case "reshaped":
		r.reshaped(l, params)
	case "ceiling":
		if l.Ceiling != nil {
			r.measured(*l.Ceiling)
		}
	case "epoch":
		r.epoch(l)
	case "interrupted":
		a.State = "stopped"
	case "failed":
		a.State, a.Error = "failed", clip(l.Error)
	case "end":
		r.end(l)
	}
}

// start adds the start or the resumption of a run.
func (r *Run) start(l runlog.Record) {
	a := &r.run
	a.State, a.Error, a.Started, a.Budget = "running", "", l.Time, clip(l.Budget)
	a.Steps, a.Share, a.Left, a.ParamsAt = 0, 0, api.Float(math.NaN()), 0
	if l.Steps != nil {
		a.Steps = *l.Steps
	}
	r.onMachine(l.Machine, true)
	r.resumeAt(l.Step)

	// The start record does not contain the values of the last step before it.
	nan := api.Float(math.NaN())
	a.Loss, a.Rate, a.GradNorm, a.Speed, a.MeanSpeed = nan, nan, nan, nan, nan
	if n := len(r.steps.points); n > 0 {
		p := r.steps.points[n-1]
		a.Loss, a.Rate, a.GradNorm = api.Float(p.loss), api.Float(p.rate), api.Float(p.norm)
	}
	r.recallEvaluations()
	r.recent = speed{since: l.ElapsedSeconds, began: l.ElapsedSeconds, step: l.Step}
	if l.Share != nil {
		r.recent.share = float64(*l.Share)
	}
}

// step adds a step.
func (r *Run) step(l runlog.Record, seconds float64) {
	a := &r.run
	a.Loss, a.Rate, a.GradNorm = number(l.TrainLoss), number(l.LearningRate), number(l.GradNorm)
	a.MeanSpeed = number(l.TokensPerS)
	tokens := math.Round(float64(a.MeanSpeed) * l.ElapsedSeconds)
	flops := float64(number(l.FLOPsPerS)) * l.ElapsedSeconds
	if !math.IsNaN(tokens) {
		a.Tokens = int64(tokens)
	}

	done := float64(l.Step-r.recent.step) / float64(max(a.Steps-r.recent.step, 1))
	if l.Share != nil {
		done = (float64(*l.Share) - r.recent.share) / (1 - r.recent.share)
	}
	tokensPerS, flopsPerS, left := r.recent.add(l.ElapsedSeconds, tokens, flops, done)
	a.Speed, a.Left = api.Float(tokensPerS), api.Float(left)
	r.computes(flopsPerS)
	r.steps.add(point{float64(l.Step), seconds, float64(a.Loss), float64(a.Rate),
		float64(a.GradNorm), tokensPerS})
}

// evaluated adds an evaluation.
func (r *Run) evaluated(l runlog.Record, seconds float64) {
	if len(r.evals) < maxEvals {
		r.evals = append(r.evals, eval{float64(l.Step), seconds, float64(number(l.ValLoss)),
			float64(number(l.ValBPB))})
		r.recallEvaluations()
	}
}

// recallEvaluations updates the latest and the best held-out loss of the status.
func (r *Run) recallEvaluations() {
	a, nan := &r.run, api.Float(math.NaN())
	if len(r.evals) == 0 {
		a.ValLoss, a.ValBPB, a.BestLoss, a.BestStep = nan, nan, nan, 0
		return
	}

	last := r.evals[len(r.evals)-1]
	a.ValLoss, a.ValBPB = api.Float(last.loss), api.Float(last.bpb)
	a.BestLoss, a.BestStep = nan, 0
	for _, e := range r.evals {
		if !(e.loss >= float64(a.BestLoss)) && !math.IsNaN(e.loss) {
			a.BestLoss, a.BestStep = api.Float(e.loss), int(e.step)
		}
	}
}

// end records how the run ended.
func (r *Run) end(l runlog.Record) {
	a := &r.run
	switch {
	case l.Error == "":
		a.State = "ended"
	case a.State != "failed":
		a.State = "stopped"
	}
	if l.Error != "" {
		a.Error = clip(l.Error)
	}
	if l.TokensPerS != nil {
		a.MeanSpeed = *l.TokensPerS
	}
	a.Left = 0
}

// reshaped records a change of the model's shape, or why it failed. before is the previous number of
// parameters.
func (r *Run) reshaped(l runlog.Record, before int) {
	if l.Error != "" {
		r.note(Noted, l.Text+": "+l.Error)
		return
	}
	r.note(Grown, l.Text)
	if l.Params != nil && before != r.run.Params {
		r.run.ParamsAt = l.Step
	}
	if len(l.Lattices) > 0 && len(r.reports) > len(l.Lattices) {
		r.reports = r.reports[:len(l.Lattices)]
		r.version++
	}
}

// number returns the value of an optional field. A missing value, like null in the log, is NaN.
func number(x *api.Float) api.Float {
	if x == nil {
		return api.Float(math.NaN())
	}
	return *x
}

// computes records the speed of the run in operations per second.
func (r *Run) computes(flops float64) {
	if math.IsNaN(flops) {
		flops = 0
	}
	r.run.FLOPs = api.Float(flops)
	if r.run.Ceiling > 0 {
		r.run.CeilingShare = r.run.FLOPs / r.run.Ceiling
	}
}

// measured records the peak of the device, which is also listed among the settings.
func (r *Run) measured(c optime.Ceiling) {
	r.run.Ceiling = api.Float(c.Product)
	r.computes(float64(r.run.FLOPs))
	facts := map[string]string{}
	if c.Product > 0 {
		facts["peak of products"] = fmt.Sprintf("%.4g TFLOP/s of %s", c.Product/1e12, clip(c.Type))
	}
	if c.Copy > 0 {
		facts["peak of copies"] = fmt.Sprintf("%.4g GB/s", c.Copy/1e9)
	}
	r.onMachine(facts, false)
}

// machinePrefix marks the settings that are facts about the computer.
const machinePrefix = "on: "

// isFact reports whether a setting is a fact about the computer.
func isFact(name, _ string) bool { return strings.HasPrefix(name, machinePrefix) }

// onMachine adds facts about the computer to the settings. If replace is set, it first removes the
// facts known so far. The map of settings is replaced rather than modified, because statuses that
// were returned earlier share it.
func (r *Run) onMachine(machine map[string]string, replace bool) {
	if len(machine) == 0 || len(machine) > maxMachine {
		return
	}

	all := maps.Clone(r.run.Settings)
	if all == nil {
		all = map[string]string{}
	}
	if replace {
		maps.DeleteFunc(all, isFact)
	}
	for _, name := range slices.Sorted(maps.Keys(machine)) { // clipping may make names equal
		all[machinePrefix+clip(name)] = clip(machine[name])
	}
	r.run.Settings = all
}

// epoch adds the states of the seeds of a layer.
func (r *Run) epoch(l runlog.Record) {
	if l.Layer == nil || l.Epoch == nil || *l.Layer < 0 || *l.Layer >= maxLayers {
		return
	}
	for len(r.reports) <= *l.Layer {
		r.reports = append(r.reports, state.Report{})
	}

	report := &r.reports[*l.Layer]
	report.Epoch = *l.Epoch
	if *l.Layer < len(r.layers) {
		report.Site = r.layers[*l.Layer].Site
	}
	for i := range l.States {
		s := &l.States[i]
		if s.Seed < 0 || s.Seed >= maxLogged || s.Seed > len(report.Seeds) {
			continue // seeds are recorded in order
		}
		if s.Seed == len(report.Seeds) {
			report.Seeds = append(report.Seeds, state.SeedReport{})
		}
		report.Seeds[s.Seed] = seedReport(s)
		for _, e := range s.Events {
			r.event(api.Event{Step: l.Step, Epoch: e.Epoch, Layer: *l.Layer, Seed: s.Seed,
				Kind: clip(e.Kind), From: clip(e.From), To: clip(e.To), Value: e.Value,
				Reason: clip(e.Reason)})
		}
	}
	r.version++
	r.at = l.Step
	r.run.Epoch, r.run.Stages = *l.Epoch, stages(r.reports)
}

// seedReport returns the report of a seed as far as its record contains it.
func seedReport(s *runlog.SeedRecord) state.SeedReport {
	to := state.SeedReport{Seed: s.Seed, Stage: stageNamed(s.Stage), Alpha: float64(s.Alpha),
		Drift: float64(s.Drift), Slot: s.Slot, Size: s.Size, EpochsInStage: s.Epochs,
		CanAdvance: s.CanAdvance, NonFiniteX: s.NonFinite}
	to.Gradient.Norm = float64(s.GradNorm)
	if kind, ok := blueprints.ByName(s.Kind); ok {
		to.Kind = kind
	}
	if t := s.Trial; t != nil {
		to.Delta, to.Improvement = float64(t.Delta), float64(t.Improvement)
		to.Stability = float64(t.Stability)
	}
	if h := s.Health; h != nil {
		to.Health = state.Health{Variance: float64(h.Variance), Mean: float64(h.Mean),
			Min: float64(h.Min), Max: float64(h.Max), DeadRatio: float64(h.DeadRatio),
			SNR: float64(h.SNR)}
	}
	return to
}

// stageNamed returns the stage with the given name, or Dormant for an unknown name.
func stageNamed(name string) state.Stage {
	for s := state.Dormant; s <= state.RolledBack; s++ {
		if s.String() == name {
			return s
		}
	}
	return state.Dormant
}

// Silent records whether the run's log has stopped changing for a long time. A run that falls silent
// before its end may be busy, or its program may have been killed.
func (r *Run) Silent(silent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.silent != silent {
		r.silent = silent
		r.changed.Add(1)
	}
}

// Configure replaces the run's settings, except for the facts about the computer, which the log
// contains.
func (r *Run) Configure(settings map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	all := maps.Clone(settings)
	if all == nil {
		all = map[string]string{}
	}
	for name, value := range r.run.Settings {
		if strings.HasPrefix(name, machinePrefix) {
			all[name] = value
		}
	}
	r.run.Settings = all
	r.changed.Add(1)
}

// speed measures the speed of a run over the last seconds, from the totals in its records.
type speed struct {
	since  float64 // seconds at the start of the current interval
	tokens float64 // total at that time
	flops  float64 // total at that time
	last   float64 // tokens per second of the last complete interval
	rate   float64 // operations per second of that interval

	// Where this process started, for extrapolating the remaining time.
	began float64 // seconds
	step  int
	share float64 // of a run with a budget
}

// interval is the shortest interval over which a speed is measured.
const interval = 2 * time.Second

// add takes the totals after a step, at the given number of seconds. done is the completed fraction
// of this process's share of the run. It returns the speeds in tokens and operations per second, and
// the seconds left if the run continues at its average pace, or NaN if that is unknown.
func (s *speed) add(seconds, tokens, flops, done float64) (tokensPerS, flopsPerS, left float64) {
	if done > 0 {
		left = max(0, (1-done)/done*(seconds-s.began))
	} else {
		left = math.NaN()
	}
	if math.IsNaN(tokens) { // a log without speeds
		return math.NaN(), 0, left
	}

	if d := seconds - s.since; d > interval.Seconds() || s.last == 0 && d > 0 {
		s.last, s.rate = (tokens-s.tokens)/d, (flops-s.flops)/d
		s.since, s.tokens, s.flops = seconds, tokens, flops
	}
	return s.last, s.rate, left
}
