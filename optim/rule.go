package optim

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// Rule describes how an optimizer updates one parameter. On a CPU, machines call Step. On a GPU, they
// follow the rule with their own implementation of Kernel, and return an error if there is none.
//
// The zero Rule means that the optimizer does not know the parameter.
type Rule struct {
	Kernel  *Kernel // the formula; the fields below are its constants
	LRScale float64 // factor of the optimizer's learning rate
	Decay   float64

	// Beta1 and Beta2 are the decay rates of the kernel's moments. An optimizer with a single momentum,
	// such as Muon, uses Beta1.
	Beta1, Beta2 float64
	Eps          float64 // AdamW

	ShapeScale float64 // Muon: multiplies the learning rate of the update, but not of the decay
	Nesterov   bool    // Muon
	Iterations int     // Muon: Newton-Schulz steps
}

// Rules is implemented by optimizers that declare how they update each parameter. Machines, ranks,
// checkpoints and the code that judges growth consult the rule rather than the optimizer's type.
//
// Step returns [ErrOverflow] if an update makes a parameter NaN or infinite.
type Rules interface {
	Optimizer

	// Rule returns how the optimizer updates the parameter with the given name and shape.
	Rule(name string, shape []int) Rule
}

// Kernel is the formula of an update.
type Kernel struct {
	// Name identifies the kernel in checkpoints, in errors and to machines that implement it.
	Name string

	// Moments are the arrays that the kernel keeps for a parameter from step to step, in addition to
	// the step count. There must be at least one, because resuming takes the shape and the type of a
	// parameter from its moments.
	Moments []Moment

	// Whole reports whether the kernel can only update whole matrices. With other kernels, parameters
	// can be divided among ranks at multiples of [PartGrain].
	Whole bool

	// float32 and float64 update a parameter p, or a part of it, and its moments from the gradient g.
	// They then set g to zero.
	float32 func(p, g []float32, moments []any, s step)
	float64 func(p, g []float64, moments []any, s step)

	// check returns an error for moments that are finite and correctly shaped but unreachable by any
	// steps. It may be nil.
	check func(r Rule, e *entry) error
}

// step is a kernel's input apart from the data.
type step struct {
	Rule
	lr    float64 // learning rate of this parameter
	count int     // number of the parameter's steps, including this one
	shape []int   // shape of the whole parameter, even if the data is a part
}

// MomentNames returns the names of the kernel's moments.
func (k *Kernel) MomentNames() []string {
	if k == nil {
		return nil
	}

	names := make([]string, len(k.Moments))
	for i, m := range k.Moments {
		names[i] = m.Name
	}
	return names
}

// String returns the kernel's name.
func (k *Kernel) String() string {
	if k == nil {
		return "none"
	}
	return k.Name
}

// MarshalText returns the kernel's name.
func (k *Kernel) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText sets only the kernel's name, which suffices to compare the rules of two runs but not
// to update a parameter.
func (k *Kernel) UnmarshalText(text []byte) error {
	name := string(text)
	if strconv.Quote(name) != `"`+name+`"` { // error messages may print it to a terminal
		return fmt.Errorf("optim: the name of a kernel is %.40q, want letters and digits", name)
	}
	*k = Kernel{Name: name}
	return nil
}

// UnmarshalJSON reads a rule as encoding/json writes it. Older checkpoints, from when there were only
// two kernels, contain a boolean "Muon" instead of the kernel's name.
func (r *Rule) UnmarshalJSON(text []byte) error {
	type plain Rule // without this method
	if err := json.Unmarshal(text, (*plain)(r)); err != nil || r.Kernel != nil {
		return err
	}

	var old struct{ Muon *bool }
	if err := json.Unmarshal(text, &old); err != nil || old.Muon == nil {
		return err
	}

	r.Kernel = &Kernel{Name: adamWKernel.Name}
	if *old.Muon {
		r.Kernel.Name = muonKernel.Name
	}

	return nil
}
