package optim

import (
	"fmt"
	"slices"
	"strings"
)

// Choice is an optimizer that programs offer by its name, for example in a command line.
type Choice struct {
	Name string

	// Rate is the learning rate that suits the optimizer, as a multiple of the one that suits AdamW.
	Rate float64

	build func(lr float64, opts []Option) (Partial, error)
}

// choices lists the optimizers that have names. A new optimizer is added here, and nowhere else, to be
// offered by all programs.
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

// ByName returns the choice with that name. The error lists the names that exist.
func ByName(name string) (Choice, error) {
	i := slices.IndexFunc(choices, func(c Choice) bool { return c.Name == name })
	if i < 0 {
		return Choice{}, fmt.Errorf("optimizer %q is not known, want one of %s", name,
			strings.Join(ChoiceNames(), ", "))
	}
	return choices[i], nil
}

// New returns the optimizer with the peak learning rate lr, which is the optimizer's own rate and not
// AdamW's, and settings that are usual for language models: betas of 0.9 and 0.95 and a weight decay
// of 0.1 where the optimizer has no others of its own. Options come after these settings and
// override them.
func (c Choice) New(lr float64, opts ...Option) (Partial, error) {
	if c.build == nil {
		return nil, fmt.Errorf("optim: a choice is its zero value: ByName returns choices")
	}
	return c.build(lr, opts)
}

// optionsOf returns options that every optimizer takes as the options of one optimizer, whose option
// type is O.
func optionsOf[O any](opts []Option) []O {
	own := make([]O, len(opts))
	for i, o := range opts {
		own[i] = any(o).(O)
	}
	return own
}
