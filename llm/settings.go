package llm

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/optim"
)

// ErrSettings is wrapped by the error of a checkpoint whose run was set up in another way than the
// trainer, so that its continuation would not have the bits of an uninterrupted run.
var ErrSettings = errors.New("checkpoint of a run with other settings")

// settings are what decides the bits of a run besides the model's shape and the data.
type settings struct {
	plainSettings
	// what the optimiser does with each parameter
	Rules map[string]optim.Rule `json:"rules,omitempty"`
	Steps int                   `json:"steps"`
	Rates []jsonfloat.Float     `json:"rates"` // the schedule at step i·Steps/len(Rates)

	Growth *growthSettings `json:"growth"` // nil in older checkpoints, where nobody knows
}

// growthSettings are what decides how a run grows. The zero value is a run that does not.
type growthSettings struct {
	Controller string          `json:"controller,omitempty"` // its type
	Options    json.RawMessage `json:"options,omitempty"`    // the controller as JSON
	Every      int             `json:"every,omitempty"`
	Validation string          `json:"validation,omitempty"` // fingerprint of the text
}

// maxControllerOptions bounds what a checkpoint says of a controller; of more it has the
// fingerprint.
const maxControllerOptions = 4 << 10

// growthSettings are those of the trainer as it is now.
func (t *Trainer) growthSettings() *growthSettings {
	g := t.growth
	if g == nil {
		return &growthSettings{}
	}
	s := &growthSettings{Controller: fmt.Sprintf("%T", g.Controller), Every: g.Every,
		Validation: g.Validation.Fingerprint()}
	options, err := json.Marshal(g.Controller)
	switch {
	case err != nil: // its type has to do
	case len(options) > maxControllerOptions:
		s.Options = fmt.Appendf(nil, `"%x"`,
			sha256.Sum256(append([]byte("controller "), options...)))
	default:
		s.Options = options
	}
	return s
}

// growsAs says in what the trainer does not grow as a checkpoint's run did.
func (t *Trainer) growsAs(there *growthSettings) []string {
	here := t.growthSettings()
	switch {
	case there == nil:
		return nil
	case here.Controller == "" && there.Controller != "":
		return []string{fmt.Sprintf("the run grew by a %s, and this trainer does not grow: call "+
			"Grow", there.Controller)}
	case here.Controller != "" && there.Controller == "":
		return []string{fmt.Sprintf("the run did not grow, and this trainer does, by a %s",
			here.Controller)}
	}
	var diff []string
	for _, d := range []struct{ what, here, there string }{
		{"the controller", here.Controller, there.Controller},
		{"Growth.Every", fmt.Sprint(here.Every), fmt.Sprint(there.Every)},
		{"the fingerprint of Growth.Validation", here.Validation, there.Validation},
	} {
		if d.here != d.there {
			diff = append(diff, fmt.Sprintf("%s is %s here and %s there", d.what, d.here, d.there))
		}
	}
	if here.Controller == there.Controller {
		diff = append(diff, optionDifferences(here.Options, there.Options)...)
	}
	return diff
}

// optionDifferences names the fields in which the JSON of two controllers differs.
func optionDifferences(here, there json.RawMessage) []string {
	var fields [2]map[string]json.RawMessage
	for i, options := range []json.RawMessage{here, there} {
		if json.Unmarshal(options, &fields[i]) == nil {
			continue
		}
		if bytes.Equal(here, there) {
			return nil
		}
		return []string{fmt.Sprintf("the controller as JSON is %s here and %s there", here, there)}
	}
	all := maps.Clone(fields[0])
	maps.Copy(all, fields[1])
	var diff []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if x, y := fields[0][name], fields[1][name]; !bytes.Equal(x, y) {
			diff = append(diff, fmt.Sprintf("the controller's %s is %s here and %s there",
				name, cmp.Or(string(x), "none"), cmp.Or(string(y), "none")))
		}
	}
	return diff
}

type plainSettings struct {
	Batch      int     `json:"batch"`
	Accumulate int     `json:"accumulate"`
	Clip       float64 `json:"clip"`
	Epoch      int     `json:"epoch"`
	Seed       uint64  `json:"seed"` // of the loader
	Tokenizer  string  `json:"tokenizer"`
	Optimizer  string  `json:"optimizer"`
	Engine     string  `json:"engine,omitempty"` // its name; older checkpoints have none
}

// ratePoints is how many values of the schedule stand for it.
const ratePoints = 32

// ratePoint returns the step of value i of the schedule of a run of the given number of steps.
func ratePoint(i, steps int) int { return int(float64(i) * float64(steps) / ratePoints) }

func (t *Trainer) settings() settings {
	c := t.Config
	s := settings{plainSettings: plainSettings{Batch: c.Batch, Accumulate: c.Accumulate,
		Clip: c.Clip, Epoch: c.Epoch,
		Seed: t.Loader.Config().Seed, Tokenizer: t.Loader.Tokens().Tokenizer(),
		Optimizer: fmt.Sprintf("%T", t.Optimizer),
		Engine:    t.engine.Name()},
		Steps: c.Steps, Growth: cmp.Or(t.grew, t.growthSettings())}
	if o, ok := t.Optimizer.(interface {
		Rule(name string, shape []int) optim.Rule
	}); ok {
		s.Rules = map[string]optim.Rule{}
		for _, p := range t.Model.Params {
			s.Rules[p.Name] = o.Rule(p.Name, p.Value.Shape())
		}
	}
	for i := range ratePoints {
		s.Rates = append(s.Rates, jsonfloat.Float(c.Schedule(ratePoint(i, c.Steps))))
	}
	return s
}

// differs says in what the trainer's settings are not those of a checkpoint. Steps alone is no
// difference: it only says where a run ends, unless the schedule follows it.
func (t *Trainer) differs(there settings) []string {
	here := t.settings()
	if there.Engine == "" {
		there.Engine = here.Engine
	}
	diff := differences(here.plainSettings, there.plainSettings)
	if here.Optimizer == there.Optimizer {
		diff = append(diff, ruleDifferences(here.Rules, there.Rules)...)
	}
	if len(there.Rates) != ratePoints {
		return append(diff, fmt.Sprintf("the schedule has %d values there, want %d",
			len(there.Rates), ratePoints))
	}
	for i, rate := range there.Rates {
		// A schedule need not have values outside the run.
		if step := ratePoint(i, there.Steps); step >= 0 && step < t.Config.Steps {
			if r := t.Config.Schedule(step); r != float64(rate) {
				return append(diff, fmt.Sprintf("the learning rate of step %d is %v here and %v "+
					"there", step+1, r, rate))
			}
		}
	}
	return diff
}

// ruleDifferences names each difference once, with the first parameter that shows it.
func ruleDifferences(here, there map[string]optim.Rule) []string {
	var diff []string
	params := map[string][]string{}
	for _, name := range slices.Sorted(maps.Keys(here)) {
		for _, d := range differences(here[name], there[name]) {
			if params[d] == nil {
				diff = append(diff, d)
			}
			params[d] = append(params[d], name)
		}
	}
	for i, d := range diff {
		diff[i] = fmt.Sprintf("%s of the optimiser for %s", d, params[d][0])
		if more := len(params[d]) - 1; more > 0 {
			diff[i] += fmt.Sprintf(" and %d more", more)
		}
	}
	return diff
}

// differences names the fields in which two structs of one type differ, with both values.
func differences(here, there any) []string {
	var diff []string
	a, b := reflect.ValueOf(here), reflect.ValueOf(there)
	for i := range a.NumField() {
		if x, y := fmt.Sprint(a.Field(i)), fmt.Sprint(b.Field(i)); x != y {
			diff = append(diff, fmt.Sprintf("%s is %s here and %s there", a.Type().Field(i).Name, x,
				y))
		}
	}
	return diff
}

// withRemedy lists differences and says what can be done about them.
func withRemedy(differences []string) string {
	return strings.Join(differences, "; ") +
		": set up the trainer as that run was, or Resume with the option WithNewSettings"
}

// oldFingerprint is how long the fingerprint of a text was while it stood for names and sizes.
const oldFingerprint = 16

// A ResumeOption changes what Resume accepts.
type ResumeOption func(*resumption)

type resumption struct {
	newSettings bool
	report      func(differences []string)
	newData     *Keep
}

// tell reports differences that were accepted.
func (r *resumption) tell(differences []string) {
	if len(differences) > 0 && r.report != nil {
		r.report(differences)
	}
}

// WithNewSettings goes on with the trainer's settings where they are not those of the run that
// wrote the checkpoint, instead of refusing it with ErrSettings. If there are such, report, unless
// it is nil, is told of them once everything is loaded. A loader of another seed begins its next
// epoch. Another tokenizer is refused all the same: to the model, its ids would mean nothing. Other
// data is another matter: see [WithNewData].
func WithNewSettings(report func(differences []string)) ResumeOption {
	return func(r *resumption) { r.newSettings, r.report = true, report }
}

// Keep says what a run keeps that goes on with other data. The model and its lattices it always
// keeps.
type Keep struct {
	Optimizer bool // what the optimiser remembers; else it starts anew
	// the number of steps so far, and with it the place in the schedule; else the run is at step 0
	Steps bool
}

// WithNewData goes on with the data of the trainer's loader, also where it is not that of the run
// that wrote the checkpoint, instead of refusing it with data.ErrChanged. The loader begins at the
// start of that data, and losses on the text before are forgotten. It goes with WithNewSettings,
// for a schedule of its own, say.
func WithNewData(keep Keep) ResumeOption {
	return func(r *resumption) { r.newData = &keep }
}
