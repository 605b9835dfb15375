// Package settings compares the settings of two runs, such as a run and the checkpoint it resumes
// from. Resuming is bit-exact only if the settings are equal.
package settings

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/optim"
)

// Settings holds everything that determines the results of a run, bit for bit, besides the model's
// shape and the data.
type Settings struct {
	Plain
	Rules map[string]optim.Rule `json:"rules,omitempty"` // of the optimizer, by parameter
	Steps int                   `json:"steps"`
	Rates []jsonfloat.Float     `json:"rates"` // the schedule at step i·Steps/len(Rates)

	// the annealing at share i/(len(Anneal)−1); empty without annealing
	Anneal []jsonfloat.Float `json:"anneal,omitempty"`

	Growth *Growth `json:"growth"` // nil if unknown, as in older checkpoints
}

// Growth holds the settings that determine how a run grows. The zero value means that the run does not
// grow.
type Growth struct {
	Controller string          `json:"controller,omitempty"` // its type
	Options    json.RawMessage `json:"options,omitempty"`    // the controller as JSON
	Every      int             `json:"every,omitempty"`
	Validation string          `json:"validation,omitempty"` // fingerprint of the text
	Governor   json.RawMessage `json:"governor,omitempty"`   // as JSON; missing in older files

	Rewarm       int  `json:"rewarm,omitempty"`
	FreshMoments bool `json:"fresh_moments,omitempty"`
}

// Plain holds the settings that consist of a single value.
type Plain struct {
	Batch      int     `json:"batch"`
	Accumulate int     `json:"accumulate"`
	Clip       float64 `json:"clip"`
	Epoch      int     `json:"epoch"`
	Seed       uint64  `json:"seed"` // of the loader
	Frozen     bool    `json:"frozen,omitempty"`
	Directed   bool    `json:"directed,omitempty"`
	Tuned      string  `json:"tuned,omitempty"`      // patterns with spaces between them
	Preference string  `json:"preference,omitempty"` // the loss of preference pairs
	Tokenizer  string  `json:"tokenizer"`
	Optimizer  string  `json:"optimizer"`
	Budget     string  `json:"budget,omitempty"`
	Engine     string  `json:"engine,omitempty"` // its name; missing in older checkpoints
}

// ratePoints is the number of values that represent a schedule.
const ratePoints = 32

// ratePoint returns the step of value i of the schedule of a run of the given number of steps.
func ratePoint(i, steps int) int { return int(float64(i) * float64(steps) / ratePoints) }

// RatesOf returns values that represent the schedule.
func RatesOf(schedule optim.Schedule, steps int) []jsonfloat.Float {
	var rates []jsonfloat.Float
	for i := range ratePoints {
		rates = append(rates, jsonfloat.Float(schedule(ratePoint(i, steps))))
	}
	return rates
}

// AnnealingOf returns values that represent an annealing, or nil for a nil annealing.
func AnnealingOf(a optim.Annealing) (values []jsonfloat.Float) {
	if a == nil {
		return nil
	}
	for i := range ratePoints + 1 {
		values = append(values, jsonfloat.Float(a(float64(i)/ratePoints)))
	}
	return values
}

// Differences describes how settings, together with a schedule, differ from a checkpoint's. A
// different number of Steps alone is not reported, because it only determines where a run ends,
// unless the schedule depends on it.
func (here *Settings) Differences(there Settings, schedule optim.Schedule) []string {
	if there.Engine == "" {
		there.Engine = here.Engine
	}

	diff := Fields(here.Plain, there.Plain)
	if here.Optimizer == there.Optimizer {
		diff = append(diff, ruleDifferences(here.Rules, there.Rules)...)
	}

	if !slices.Equal(here.Anneal, there.Anneal) {
		diff = append(diff, "the annealing of the learning rate differs")
	}

	if len(there.Rates) != ratePoints {
		return append(diff, fmt.Sprintf("the schedule has %d values there, want %d",
			len(there.Rates), ratePoints))
	}

	for i, rate := range there.Rates {
		// A schedule need not have values outside the run.
		if step := ratePoint(i, there.Steps); step >= 0 && step < here.Steps {
			if r := schedule(step); r != float64(rate) {
				return append(diff, fmt.Sprintf("the learning rate of step %d is %v here and %v "+
					"there", step+1, r, rate))
			}
		}
	}

	return diff
}

// DifferencesOfRanks describes how the settings of two processes of one run differ.
func (here *Settings) DifferencesOfRanks(there Settings) []string {
	diff := append(Fields(here.Plain, there.Plain), ruleDifferences(here.Rules, there.Rules)...)
	if !slices.Equal(here.Rates, there.Rates) {
		diff = append(diff, "the schedule of the learning rate differs")
	}
	if !slices.Equal(here.Anneal, there.Anneal) {
		diff = append(diff, "the annealing of the learning rate differs")
	}
	return append(diff, here.Growth.Differences(there.Growth)...)
}

// ruleDifferences describes each difference once, with the first parameter that shows it.
func ruleDifferences(here, there map[string]optim.Rule) []string {
	var diff []string
	params := map[string][]string{}
	for _, name := range slices.Sorted(maps.Keys(here)) {
		// parameters of blocks that exist in only one of the runs
		if _, both := there[name]; !both && len(there) > 0 {
			continue
		}
		for _, d := range Fields(here[name], there[name]) {
			if params[d] == nil {
				diff = append(diff, d)
			}
			params[d] = append(params[d], name)
		}
	}

	for i, d := range diff {
		diff[i] = fmt.Sprintf("the optimizer's %s for %s", d, params[d][0])
		if more := len(params[d]) - 1; more > 0 {
			diff[i] += fmt.Sprintf(" and %d more", more)
		}
	}

	return diff
}

// Fields describes the fields that differ between two structs of the same type, with both values.
func Fields(here, there any) []string {
	var diff []string
	a, b := reflect.ValueOf(here), reflect.ValueOf(there)
	for i := range a.NumField() {
		if a.Type().Field(i).Anonymous {
			diff = append(diff, Fields(a.Field(i).Interface(), b.Field(i).Interface())...)
			continue
		}
		if x, y := shown(a.Field(i)), shown(b.Field(i)); x != y {
			diff = append(diff, fmt.Sprintf("%s is %s here and %s there", a.Type().Field(i).Name, x,
				y))
		}
	}

	return diff
}

// shown formats a field for an error. It quotes strings, because a file may contain control
// characters that a terminal would interpret.
func shown(v reflect.Value) string {
	if v.Kind() == reflect.String {
		return strconv.Quote(v.String())
	}
	return fmt.Sprint(v)
}
