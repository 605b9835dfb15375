package store

import (
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/llm/runlog"
	"github.com/kasmina-go/kasmina/state"
)

// maxLogged bounds the seeds of a layer that a log may tell of: a file may say anything.
const maxLogged = 1 << 20

// maxLayers bounds its layers.
const maxLayers = 1 << 12

// Read takes in a line of a run's log.
func (r *Run) Read(l runlog.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.changed.Add(1)
	a := &r.run
	a.Step, a.Elapsed = l.Step, api.Float(l.ElapsedSeconds)
	set := func(to *api.Float, from *api.Float) {
		if from != nil {
			*to = *from
		}
	}
	set(&a.Loss, l.TrainLoss)
	set(&a.Rate, l.LearningRate)
	set(&a.GradNorm, l.GradNorm)
	set(&a.Speed, l.TokensPerS)
	set(&a.ValLoss, l.ValLoss)
	set(&a.ValBPB, l.ValBPB)
	if l.FLOPsPerS != nil {
		r.computes(float64(*l.FLOPsPerS))
	}
	if len(l.Lattices) > 0 && len(l.Lattices) <= maxLayers {
		r.layers = l.Lattices
	}
	if a.Steps > 0 {
		a.Share = min(1, api.Float(l.Step)/api.Float(a.Steps))
	}
	seconds := r.before.Seconds() + l.ElapsedSeconds
	switch l.Event {
	case "start":
		r.startLogged(l)
	case "step":
		r.steps.add(point{float64(l.Step), seconds, float64(a.Loss), float64(a.Rate),
			float64(a.GradNorm), float64(a.Speed)})
	case "eval":
		if len(r.evals) < maxEvals {
			r.evals = append(r.evals,
				eval{float64(l.Step), seconds, float64(a.ValLoss), float64(a.ValBPB)})
		}
	case "sample":
		r.sample(api.Sample{Step: l.Step, Text: clip(l.Text)})
	case "saved":
		a.Saved, a.SavedAt = l.Path, l.Step
	case "note", "reshaped":
		r.note(l.Step, l.Text)
	case "ceiling":
		if l.Ceiling != nil {
			r.measured(*l.Ceiling)
		}
	case "epoch":
		r.epochLogged(l)
	case "failed", "interrupted":
		a.State = map[string]string{"failed": "failed", "interrupted": "stopped"}[l.Event]
	case "end":
		if l.Error == "" {
			a.State = "ended"
		} else if a.State == "running" {
			a.State = "stopped"
		}
	}
	if l.Error != "" && l.Event != "corrupt" {
		a.Error = clip(l.Error)
	}
}

func (r *Run) startLogged(l runlog.Record) {
	a := &r.run
	a.State, a.Error, a.Started, a.Budget = "running", "", l.Time, clip(l.Budget)
	a.Steps = 0
	if l.Steps != nil {
		a.Steps = *l.Steps
	}
	if l.Params != nil {
		a.Params = *l.Params
	}
	if l.Seeds != nil {
		a.Seeds = *l.Seeds
	}
	r.onMachine(l.Machine, true)
	r.resumeAt(l.Step)

	// The line does not say what these were at this step.
	nan := api.Float(math.NaN())
	a.Loss, a.Rate, a.GradNorm, a.Speed, a.ValLoss, a.ValBPB = nan, nan, nan, nan, nan, nan
	if n := len(r.steps.points); n > 0 {
		p := r.steps.points[n-1]
		a.Loss, a.Rate, a.GradNorm = api.Float(p.loss), api.Float(p.rate), api.Float(p.norm)
	}
	if n := len(r.evals); n > 0 {
		a.ValLoss, a.ValBPB = api.Float(r.evals[n-1].loss), api.Float(r.evals[n-1].bpb)
	}
}

// maxMachine bounds the facts of a machine that a log may tell.
const maxMachine = 64

// onMachine adds what the run is computed on to its settings, or has it replace what was known of
// that. Whoever has the settings of before keeps them as they were.
func (r *Run) onMachine(machine map[string]string, replace bool) {
	if len(machine) == 0 || len(machine) > maxMachine {
		return
	}
	all := maps.Clone(r.run.Settings)
	if all == nil {
		all = map[string]string{}
	}
	maps.DeleteFunc(all, func(name, _ string) bool {
		return replace && strings.HasPrefix(name, machinePrefix)
	})
	for _, name := range slices.Sorted(maps.Keys(machine)) {
		all[machinePrefix+clip(name)] = clip(machine[name]) // two clipped names may be the same
	}
	r.run.Settings = all
}

// machinePrefix begins the names of settings that are facts of the machine.
const machinePrefix = "on: "

// epochLogged takes in seeds of a layer.
func (r *Run) epochLogged(l runlog.Record) {
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
	for _, s := range l.States {
		if s.Seed < 0 || s.Seed >= maxLogged || s.Seed > len(report.Seeds) {
			continue // seeds are told in order
		}
		if s.Seed == len(report.Seeds) {
			report.Seeds = append(report.Seeds, state.SeedReport{Seed: s.Seed})
		}
		to := &report.Seeds[s.Seed]
		to.Stage, to.Alpha = stageNamed(s.Stage), float64(s.Alpha)
		if h := s.Health; h != nil {
			to.Health = state.Health{Variance: float64(h.Variance),
				Mean: float64(h.Mean), Min: float64(h.Min),
				Max: float64(h.Max), DeadRatio: float64(h.DeadRatio), SNR: float64(h.SNR)}
		}
		for _, e := range s.Events {
			r.event(api.Event{Step: l.Step, Epoch: e.Epoch, Layer: *l.Layer,
				Seed: s.Seed, Kind: clip(e.Kind),
				From: clip(e.From), To: clip(e.To), Value: e.Value, Reason: clip(e.Reason)})
		}
	}
	r.version++
	r.at = l.Step
	r.run.Epoch, r.run.Stages = *l.Epoch, stages(r.reports)
}

// stageNamed returns a stage by its name; Dormant for one that is not known.
func stageNamed(name string) state.Stage {
	for s := state.Dormant; s <= state.RolledBack; s++ {
		if s.String() == name {
			return s
		}
	}
	return state.Dormant
}

// Silent notes whether the run's log has been unchanged for long. A run that has not told of its end
// is silent then, until its log changes again: it may be busy, or have been killed.
func (r *Run) Silent(silent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.silent != silent {
		r.silent = silent
		r.changed.Add(1)
	}
}

// Configure replaces the run's settings, except for the facts about the machine, which the log
// reports.
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
