package llm

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/kasmina-go/kasmina/llm/internal/settings"
	"github.com/kasmina-go/kasmina/optim"
)

// ErrSettings is wrapped by the error of a checkpoint whose run was set up in another way than the
// trainer, so that its continuation would not have the bits of an uninterrupted run.
var ErrSettings = errors.New("checkpoint of a run with other settings")

// growthSettings are those of the trainer as it is now.
func (t *Trainer) growthSettings() *settings.Growth {
	g := t.growth
	if g == nil {
		return &settings.Growth{}
	}
	return settings.GrowthOf(g.Controller, g.Every, g.Validation.Fingerprint())
}

func (t *Trainer) settings() *settings.Settings {
	c := t.Config
	s := &settings.Settings{
		Plain: settings.Plain{Batch: c.Batch, Accumulate: c.Accumulate, Clip: c.Clip,
			Epoch: c.Epoch, Seed: t.Loader.Config().Seed,
			Tokenizer: t.Loader.Tokens().Tokenizer(),
			Optimizer: fmt.Sprintf("%T", t.Optimizer), Engine: t.engine.Name()},
		Steps:  c.Steps,
		Rates:  settings.RatesOf(c.Schedule, c.Steps),
		Growth: cmp.Or(t.grew, t.growthSettings()),
	}
	if o, ok := t.Optimizer.(interface {
		Rule(name string, shape []int) optim.Rule
	}); ok {
		s.Rules = map[string]optim.Rule{}
		for _, p := range t.Model.Params {
			s.Rules[p.Name] = o.Rule(p.Name, p.Value.Shape())
		}
	}
	return s
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
	Steps     bool // how many there were, the place in the schedule; else the run is at step 0
}

// WithNewData goes on with the data of the trainer's loader, also where it is not that of the run
// that wrote the checkpoint, instead of refusing it with data.ErrChanged. The loader begins at the
// start of that data, and losses on the text before are forgotten. It goes with WithNewSettings,
// for a schedule of its own, say.
func WithNewData(keep Keep) ResumeOption {
	return func(r *resumption) { r.newData = &keep }
}
