package optim

import (
	"fmt"
	"slices"
	"strings"
)

// Choice is an optimizer that programs offer by name, for example on the command line.
type Choice struct {
	Name string

	// Rate is a good learning rate for the optimizer, as a multiple of a good one for AdamW.
	Rate float64

	build func(lr float64, opts []Option) (Partial, error)
}

// choices lists the named optimizers, starting with the default. All programs offer every optimizer
// added here.
var choices = []Choice{
	{"adamw", 1, chooseAdamW},
	{"muon", 1 / muonRestShare, chooseMuon},
	{"lion", 0.2, chooseLion},
	{"adamw8bit", 1, chooseAdamW8bit},
}

// Choices returns the optimizers that programs offer by name.
func Choices() []Choice { return slices.Clone(choices) }

// ChoiceNames returns the names of all choices.
func ChoiceNames() []string {
	names := make([]string, len(choices))
	for i, c := range choices {
		names[i] = c.Name
	}
	return names
}

// ByName returns the choice with the given name. The error lists all existing names.
func ByName(name string) (Choice, error) {
	i := slices.IndexFunc(choices, func(c Choice) bool { return c.Name == name })
	if i < 0 {
		return Choice{}, fmt.Errorf("optimizer %q is not known, want one of %s", name,
			strings.Join(ChoiceNames(), ", "))
	}
	return choices[i], nil
}

// New returns the optimizer with settings that suit language models: betas of 0.9 and 0.95 and a weight
// decay of 0.1, or the customary values of the optimizer if they differ. The peak learning rate lr is the
// optimizer's own, not AdamW's. Options override the settings.
func (c Choice) New(lr float64, opts ...Option) (Partial, error) {
	if c.build == nil {
		return nil, fmt.Errorf("optim: the choice is a zero value: ByName returns choices")
	}
	return c.build(lr, opts)
}

// optionsOf converts options that every optimizer takes to O, the option type of one optimizer.
func optionsOf[O any](opts []Option) []O {
	own := make([]O, len(opts))
	for i, o := range opts {
		own[i] = any(o).(O)
	}
	return own
}
