package optim

import (
	"fmt"
	"math"
	"strings"
)

// Match selects parameters by name and shape.
type Match func(name string, shape []int) bool

// Vectors matches parameters with fewer than two dimensions, such as the weights of norms and
// biases.
func Vectors(_ string, shape []int) bool { return len(shape) < 2 }

// NameContains matches parameters with any of the parts in their names.
func NameContains(parts ...string) Match {
	return func(name string, _ []int) bool {
		for _, p := range parts {
			if strings.Contains(name, p) {
				return true
			}
		}
		return false
	}
}

// hyper holds the settings that can differ between parameters: the factor on the learning rate, the weight
// decay, and the decay rates of the two moments.
type hyper struct{ scale, decay, beta1, beta2 float64 }

// GroupOption changes a setting for the parameters of a group.
type GroupOption func(*group) error

// group is a set of parameters with settings of their own.
type group struct {
	match Match
	set   []func(*hyper) // apply the group's options to the base settings
	betas bool           // whether the option Betas was given
}

// LRScale multiplies the learning rate of the group. 0 freezes the group.
func LRScale(s float64) GroupOption {
	return func(g *group) error {
		g.set = append(g.set, func(h *hyper) { h.scale = s })
		return notNegative("LRScale", s)
	}
}

// Decay sets the weight decay of the group.
func Decay(d float64) GroupOption {
	return func(g *group) error {
		g.set = append(g.set, func(h *hyper) { h.decay = d })
		return notNegative("Decay", d)
	}
}

// Betas sets the decay rates of the two moments for the group.
func Betas(beta1, beta2 float64) GroupOption {
	return func(g *group) error {
		g.set, g.betas = append(g.set, func(h *hyper) { h.beta1, h.beta2 = beta1, beta2 }), true
		return checkBetas("Betas", beta1, beta2)
	}
}

func newGroup(match Match, opts []GroupOption) (group, error) {
	g := group{match: match}
	for _, opt := range opts {
		if err := opt(&g); err != nil {
			return g, fmt.Errorf("WithGroup: %w", err)
		}
	}

	return g, nil
}

// common holds the settings shared by all optimizers.
type common struct {
	lr     float64
	base   hyper   // for parameters in no group
	groups []group // in the order of precedence
}

// LR returns the learning rate of the next step.
func (c *common) LR() float64 { return c.lr }

// resolve returns the settings of a parameter: the base settings, without decay for vectors, as modified
// by the first matching group.
func (c *common) resolve(name string, shape []int) hyper {
	base := c.base
	if Vectors(name, shape) {
		base.decay = 0
	}

	for _, g := range c.groups {
		if g.match(name, shape) {
			h := base
			for _, set := range g.set {
				set(&h)
			}
			return h
		}
	}

	return base
}

func notNegative(what string, x float64) error {
	if !(x >= 0) || math.IsInf(x, 0) {
		return fmt.Errorf("%s: got %v, want a finite number of at least 0", what, x)
	}
	return nil
}

func positive(what string, x float64) error {
	if !(x > 0) || math.IsInf(x, 0) {
		return fmt.Errorf("%s: got %v, want a finite number above 0", what, x)
	}
	return nil
}

func belowOne(what string, x float64) error {
	if !(x >= 0 && x < 1) {
		return fmt.Errorf("%s: got %v, want a number of at least 0 and below 1", what, x)
	}
	return nil
}

func checkBetas(what string, beta1, beta2 float64) error {
	if err := belowOne(what, beta1); err != nil {
		return err
	}
	return belowOne(what, beta2)
}
