package growth

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/control"
)

// An arm is one of the configurations that a study compares: the depth of a model, its growth and its optimization.
// It is written as key=value pairs separated by commas:
//
//	blocks=12,lr=0.002
//	blocks=3-12,share=0.1,kind=middle,rewarm=40
//
// Keys with default values are left out, so that equal arms have equal names.
type arm struct {
	blocks    []int     // at the start and after each growth: one number for a static model
	shares    []float64 // of the budget, one for each growth; empty if the controller decides
	curve     bool      // control.Depth decides by the curve alone, without bounds
	forecast  bool      // control.Forecast decides, within the given number of growths
	patient   bool      // control.Forecast waits for the best moment (Forecast.Patient)
	kind      string    // stack, interleave, middle or new
	rate      float64   // peak learning rate; 0 for the best rate of the static arms
	optimizer string    // one of optim.ChoiceNames
	decay     string    // of the learning rate: cosine, linear, or late (constant for half of the run)
	rewarm    int       // llm.Growth.Rewarm
	moments   string    // kept or fresh, of copied blocks
	outputs   string    // random or zero, at the start of training
	norms     string    // none or qk
	boundary  float64   // llm.Config.Boundary
}

// armKeys lists the keys of an arm in the order of its written form, each with its default, parser and
// formatter.
var armKeys = []struct {
	name   string
	normal string
	parse  func(a *arm, value string) error
	format func(a arm) string
}{
	{"blocks", "", func(a *arm, v string) (err error) {
		a.blocks, err = parseList(v, strconv.Atoi)
		return err
	}, func(a arm) string { return formatList(a.blocks) }},
	{"share", "auto", func(a *arm, v string) (err error) {
		a.shares, a.curve, a.patient = nil, v == "curve", v == "patient"
		a.forecast = a.patient || v == "forecast"
		if a.curve || a.forecast || v == "auto" {
			return nil
		}
		a.shares, err = parseList(v, parseNumber)
		return err
	}, func(a arm) string {
		switch {
		case a.curve:
			return "curve"
		case a.patient:
			return "patient"
		case a.forecast:
			return "forecast"
		}
		return formatList(a.shares)
	}},
	{"lr", "tuned", func(a *arm, v string) (err error) {
		if a.rate = 0; v == "tuned" {
			return nil
		}
		if a.rate, err = parseNumber(v); err == nil && a.rate <= 0 {
			err = errors.New("want a number above 0")
		}
		return err
	}, func(a arm) string {
		if a.rate == 0 {
			return "tuned"
		}
		return formatNumber(a.rate)
	}},
	wordKey("kind", func(a *arm) *string { return &a.kind }, "stack", "interleave", "middle", "new"),
	wordKey("optimizer", func(a *arm) *string { return &a.optimizer },
		optim.ChoiceNames()...),
	wordKey("decay", func(a *arm) *string { return &a.decay }, "cosine", "linear", "late"),
	{"rewarm", "0", func(a *arm, v string) (err error) {
		if a.rewarm, err = strconv.Atoi(v); err == nil && a.rewarm < 0 {
			err = errors.New("want a number of steps")
		}
		return err
	}, func(a arm) string { return strconv.Itoa(a.rewarm) }},
	wordKey("moments", func(a *arm) *string { return &a.moments }, "kept", "fresh"),
	wordKey("outputs", func(a *arm) *string { return &a.outputs }, "random", "zero"),
	wordKey("norms", func(a *arm) *string { return &a.norms }, "none", "qk"),
	{"boundary", "0", func(a *arm, v string) (err error) {
		if a.boundary, err = parseNumber(v); err == nil && a.boundary < 0 {
			err = errors.New("want a number of at least 0")
		}
		return err
	}, func(a arm) string { return formatNumber(a.boundary) }},
}

// armKey is the element type of armKeys.
type armKey = struct {
	name   string
	normal string
	parse  func(a *arm, value string) error
	format func(a arm) string
}

// wordKey returns a key that takes one of a few words. The first word is the default.
func wordKey(name string, field func(*arm) *string, words ...string) armKey {
	return armKey{name, words[0],
		func(a *arm, v string) error {
			if !slices.Contains(words, v) {
				return fmt.Errorf("want %s", strings.Join(words, " or "))
			}
			*field(a) = v
			return nil
		},
		func(a arm) string { return *field(&a) }}
}

func parseNumber(s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err == nil && (math.IsNaN(v) || math.IsInf(v, 0)) {
		err = errors.New("want a finite number")
	}
	return v, err
}

func formatNumber(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

// parseList reads values separated by dashes.
func parseList[T any](s string, parse func(string) (T, error)) (all []T, err error) {
	for part := range strings.SplitSeq(s, "-") {
		v, err := parse(part)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

func formatList[T any](all []T) string {
	var parts []string
	for _, v := range all {
		parts = append(parts, fmt.Sprint(v))
	}
	return strings.Join(parts, "-")
}

// parseArm reads an arm as String writes it.
func parseArm(text string) (a arm, err error) {
	for _, k := range armKeys {
		if k.normal != "" {
			if err := k.parse(&a, k.normal); err != nil {
				return a, fmt.Errorf("arm %q: default of %s: %w", text, k.name, err)
			}
		}
	}

	for pair := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(pair, "=")
		i := slices.IndexFunc(armKeys, func(k armKey) bool { return k.name == name })
		if i < 0 {
			var names []string
			for _, k := range armKeys {
				names = append(names, k.name)
			}
			return a, fmt.Errorf("arm %q: %q is not a key, want one of %s", text, name,
				strings.Join(names, ", "))
		}
		if err := armKeys[i].parse(&a, value); err != nil {
			return a, fmt.Errorf("arm %q: %s is %q: %w", text, name, value, err)
		}
	}

	if err := a.check(); err != nil {
		return a, fmt.Errorf("arm %q: %w", text, err)
	}

	return a, nil
}

// String returns the arm without keys that have default values.
func (a arm) String() string {
	var pairs []string
	for _, k := range armKeys {
		if v := k.format(a); v != k.normal && v != "" {
			pairs = append(pairs, k.name+"="+v)
		}
	}
	return strings.Join(pairs, ",")
}

func (a arm) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

func (a *arm) UnmarshalText(text []byte) (err error) {
	*a, err = parseArm(string(text))
	return err
}

// grows reports whether the arm's model grows.
func (a arm) grows() bool { return len(a.blocks) > 1 }

// depth returns the final number of blocks.
func (a arm) depth() int { return a.blocks[len(a.blocks)-1] }

func (a arm) check() error {
	switch {
	case len(a.blocks) == 0:
		return errors.New("it has no blocks, want one such as blocks=12 or blocks=3-12")
	case slices.Min(a.blocks) < 1:
		return errors.New("want at least 1 block")
	case !a.grows() && (len(a.shares) > 0 || a.curve || a.forecast):
		return errors.New("share needs a model that grows, such as blocks=3-12")
	case a.grows() && len(a.shares) > 0 && len(a.shares) != len(a.blocks)-1:
		return fmt.Errorf("%d growths have %d shares, want one for each, or none to let the "+
			"controller decide", len(a.blocks)-1, len(a.shares))
	case len(a.shares) == 0 && !a.forecast && len(a.blocks) > 2:
		return errors.New("the controller grows a model only once: give the shares for several growths, or " +
			"share=forecast")
	}

	first := 0
	for i := range a.blocks[1:] {
		_, size, err := a.growth(i)
		if err != nil {
			return err
		}

		if i == 0 {
			first = size
		} else if a.forecast && !a.multiplies() && size != first {
			return fmt.Errorf("with kind=%s and share=forecast, all growths have the same size, want such blocks "+
				"or fixed shares", a.kind)
		}
	}

	if s := a.schedule(); s != nil {
		return s.Check()
	}

	return nil
}

// multiplies reports whether the arm's kind multiplies the number of blocks.
func (a arm) multiplies() bool { return a.kind == "stack" || a.kind == "interleave" }

// growth returns the kind and size of growth i.
func (a arm) growth(i int) (kind blueprints.Kind, size int, err error) {
	kind = map[string]blueprints.Kind{"stack": blueprints.Stack, "interleave": blueprints.Interleave,
		"middle": blueprints.Middle, "new": blueprints.NewBlocks}[a.kind]
	from, to := a.blocks[i], a.blocks[i+1]
	for size = 1; ; size++ {
		order, err := blueprints.Order(kind, from, size)
		if err != nil && size > 1 || len(order) > to {
			return kind, 0, fmt.Errorf("kind=%s cannot make %d blocks of %d", a.kind, to, from)
		}
		if len(order) == to {
			return kind, size, nil
		}
	}
}

// schedule returns the controller of an arm with fixed shares, or nil for other arms.
func (a arm) schedule() *control.Schedule {
	if len(a.shares) == 0 {
		return nil
	}
	s := &control.Schedule{}
	for i, share := range a.shares {
		kind, size, _ := a.growth(i) // check has seen it
		s.Growths = append(s.Growths, control.Planned{Share: share, Kind: kind, Size: size})
	}
	return s
}

// controller returns the controller of the arm's model.
func (a arm) controller() state.Controller {
	if s := a.schedule(); s != nil {
		return s
	}
	kind, size, _ := a.growth(0) // check has seen it
	if a.forecast {
		f := control.NewForecast(kind, size)
		f.Growths, f.Patient = len(a.blocks)-1, a.patient
		if a.multiplies() {
			f.Size = a.depth() / a.blocks[0]
		}
		return f
	}

	d := control.NewDepth(kind, size)
	if a.curve {
		d.Begin = 0
	}
	return d
}

// config returns the initial configuration of the arm's model. It differs from the largest model in
// depth and in the options of the arm.
func (a arm) config(largest llm.Config) llm.Config {
	c := largest
	c.Layers, c.Depth = a.blocks[0], len(a.blocks)-1
	c.ZeroOutputs, c.QKNorm, c.Boundary = a.outputs == "zero", a.norms == "qk", a.boundary
	return c
}

// annealing returns the decay of the learning rate over the budget.
func (a arm) annealing() (optim.Annealing, error) {
	switch a.decay {
	case "linear":
		return optim.LinearAnnealing(0, 0)
	case "late":
		return optim.LinearAnnealing(0.5, 0)
	}
	return optim.CosineAnnealing(floor)
}
