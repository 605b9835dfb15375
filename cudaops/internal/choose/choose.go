// Package choose decides how each call of a program is computed, where there are several variants. It
// goes by rules that users give, by what was stored, or by timing all variants on operands made up for
// that. Of the passes it alone asks the device, by way of an executor; it changes nothing of a call
// but its variant.
package choose

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/optime"
	"github.com/kasmina-go/kasmina/internal/variantrule"
)

// Config says what a chooser may do.
type Config struct {
	Mode    Mode // not Default
	Rules   variantrule.Rules
	Path    string  // of the stored choices; "" for none
	Least   float64 // operations of a product that is worth timing; 0 for the usual
	Device  gpu.DeviceInfo
	Version int // of the driver
	// Given are the choices of another machine, which this one takes over in the place of timing;
	// nil for none.
	Given  []optime.Choice
	Logger *slog.Logger
	Warn   func(message string)
}

// Chooser chooses the variants of a machine.
type Chooser struct {
	Config
	x     *run.Executor
	store *store // nil where nothing is timed
	made  []*optime.Choice
	known map[string]*optime.Choice // by op and shape, also of a program that is not made use of
	given map[string]string         // variants, as in known; nil where none are given
	full  bool                      // has been told: there was no memory to time in
}

const (
	// leastOperations is the multiplications and additions from which on a product is worth timing.
	leastOperations = 1e9
	// productWays is how many variants are timed, of those that cuBLASLt thinks the fastest.
	productVariants = 12
)

// New returns a chooser whose timings run on x.
func New(x *run.Executor, c Config) *Chooser {
	t := &Chooser{Config: c, x: x, known: map[string]*optime.Choice{}}
	if t.Least == 0 {
		t.Least = leastOperations
	}

	switch {
	case c.Given != nil:
		t.given = map[string]string{}
		for _, g := range c.Given {
			t.given[g.Op+" "+g.Shape] = g.Variant
		}
	case c.Mode != Off:
		t.store = open(c.Path, c.Warn)
	}

	return t
}

// Settle ends timing: what is not chosen yet goes by rule.
func (t *Chooser) Settle() { t.store, t.given = nil, nil }

// Made returns what was chosen so far, in that order.
func (t *Chooser) Made() (made []optime.Choice) {
	for _, c := range t.made {
		made = append(made, *c)
	}
	return made
}

// Again starts over for another program of the same graph.
func (t *Chooser) Again() { t.made = nil }

// Tunes reports whether anything may be timed, here or where the given choices come from.
func (t *Chooser) Tunes() bool { return t.store != nil || t.given != nil }

// Variants lists the variants in which a kernel can do a launch.
func (t *Chooser) Variants(params any) []kernel.Variant { return t.x.Kernels.Variants(params) }

// worthTiming reports whether so many operations are.
func (t *Chooser) worthTiming(flops float64) bool { return t.Tunes() && flops >= t.Least }

// Program chooses for every call of a program.
func (t *Chooser) Program(p *program.Program) error {
	for _, c := range p.Calls {
		if err := t.ChooseVariant(c); err != nil {
			return fmt.Errorf("%s: %w", c.Node, err)
		}
	}
	return nil
}

// ChooseWay chooses the variant of a call, unless that has been done.
func (t *Chooser) ChooseVariant(c *program.Call) error {
	if err := t.product(c); err != nil {
		return err
	}

	if _, ok := c.Params.(kernel.Tuned); !ok || c.Choice != nil || hasNone(c) {
		return nil
	}

	g, variants := program.VariantsOf(c, t.Variants)
	if len(variants) < 2 {
		return nil
	}

	g.Plain = len(variants) - 1
	variant, choice, err := t.choose(g)
	if err != nil {
		return err
	}

	c.SetVariant(variants[variant])
	c.Choice = choice
	return nil
}

// hasNone reports whether a call has an operand without elements.
func hasNone(c *program.Call) bool {
	return slices.ContainsFunc(c.Args, func(a program.Arg) bool {
		return a.Bound() && a.Len() == 0
	})
}

// Choose chooses among several lists of calls. Without tuning, and where that is not worth it, the
// first is taken, unless a rule asks for another one.
func (t *Chooser) Choose(g program.Group) (alternative int, choice *optime.Choice, err error) {
	for _, a := range g.Alternatives {
		for _, c := range a.Calls {
			if err := t.product(c); err != nil {
				return 0, nil, err
			}
		}
	}
	return t.choose(g)
}

// choose returns the variant for a job, and the choice of it.
func (t *Chooser) choose(j program.Group) (variant int, c *optime.Choice, err error) {
	key := j.Op + " " + j.Shape
	var names []string
	for _, a := range j.Alternatives {
		names = append(names, a.Name)
	}

	if c := t.known[key]; c != nil && slices.Contains(names, c.Variant) {
		if !slices.Contains(t.made, c) {
			t.made = append(t.made, c)
		}
		return slices.Index(names, c.Variant), c, nil
	}

	c = &optime.Choice{Op: j.Op, Shape: j.Shape, Of: len(names), Variants: names, Source: optime.ByRule}
	left, forced := t.Rules.Allowed(j.Op, names, t.Warn)
	variant = left[0]
	if forced {
		c.Source = optime.Forced
	}

	if given, ok := t.given[key]; ok {
		if variant = slices.Index(names, given); !slices.Contains(left, variant) {
			return 0, nil, fmt.Errorf("%s %s is computed in the variant %q elsewhere, and here there "+
				"are %q: use the same kind of GPU, CUDA and rules everywhere, or no tuning",
				j.Op, j.Shape, given, names)
		}
		if len(left) > 1 && !forced {
			c.Source = optime.Stored
		}
	} else if t.store != nil && len(left) > 1 && (j.FLOPs == 0 || j.FLOPs >= t.Least) {
		if variant, err = t.timed(j, left, c); err != nil {
			return 0, nil, fmt.Errorf("timing %s %s: %w", j.Op, j.Shape, err)
		}
	}

	c.Variant = names[variant]
	t.known[key], t.made = c, append(t.made, c)
	return variant, c, nil
}

// timed returns the fastest of some variants: as it is stored, or timed and stored.
func (t *Chooser) timed(j program.Group, left []int, c *optime.Choice) (int, error) {
	build := t.x.Kernels.Build()
	if blas, err := t.x.Ctx.Blas(); err == nil {
		build += fmt.Sprintf(", cuBLASLt %d", blas.Version())
	}

	key := fmt.Sprintf("%s, CUDA %d, %s, %s %s, under load there and back", t.Device.Name,
		t.Version, build, j.Op, j.Shape)
	if len(left) < len(j.Alternatives) {
		key += fmt.Sprintf(", of %v", left)
	}

	if s, ok := t.store.get(key); ok && t.Mode == Cached {
		if variant := slices.Index(c.Variants, s.Variant); slices.Contains(left, variant) {
			c.Source, c.Cold = optime.Stored, s.Cold
			return variant, nil
		}
	}

	x, err := newTimer(t, j)
	if err != nil {
		t.cannot(j, err)
		return left[0], x.memory.Close()
	}

	variant, err := x.fastest(left)
	if err = run.Joined(err, x.memory.Close()); err != nil {
		return 0, err
	}

	if variant < 0 {
		t.Warn(fmt.Sprintf("%s %s is not tuned: none of the variants %v gives a result on random "+
			"numbers", j.Op, j.Shape, c.Variants))
		return left[0], nil
	}

	c.Source, c.Cold = optime.Measured, x.cold[variant]
	if err := t.store.put(key, timed{Variant: c.Variants[variant], Cold: c.Cold}); err != nil {
		t.Warn(err.Error())
	}

	return variant, nil
}

// cannot tells why a job is not timed; of a card that is full, which does no harm, once for all
// jobs.
func (t *Chooser) cannot(j program.Group, err error) {
	if !errors.Is(err, gpu.OutOfMemory) {
		t.Warn(fmt.Sprintf("%s %s is not tuned: %v", j.Op, j.Shape, err))
		return
	}

	if !t.full {
		t.Logger.Info(fmt.Sprintf("cudaops: the card has no memory left to time kernels in, so a "+
			"rule of thumb chooses, for %s and for what else is new here: that is harmless, but "+
			"may be slower (%v)", j.Op,
			err))
	}

	t.full = true
}

// product plans the product that a call is, if it is one. It is computed in the variant that is chosen
// for all products like it.
func (t *Chooser) product(c *program.Call) (err error) {
	m, ok := c.Params.(*program.Matmul)
	if !ok {
		return nil
	}

	if m.Spec, err = m.Spec.Normal(); err != nil {
		return err
	}

	variants := 1
	if t.worthTiming(m.Spec.FLOPs()) {
		variants = productVariants
	}

	p, err := t.x.Plan(m.Spec, variants)
	if err != nil {
		return err
	}

	names, own := slices.Clone(p.Variants), t.ownVariants(*m)
	for _, w := range own {
		names = append(names, w.String())
	}

	m.Variant, c.Choice, err = t.choose(productGroup(c, m, names, len(own) > 0))
	return err
}

// productGroup is a product in its variants as it is timed: a matrix that it adds is one of its own. For
// cuBLASLt's variants that makes no difference, and they are known by the product without it.
func productGroup(c *program.Call, m *program.Matmul, variants []string, own bool) program.Group {
	g := program.Group{Op: productOp, Shape: fmt.Sprintf("%+v", m.Spec), FLOPs: m.Spec.FLOPs()}
	if m.Alpha != 1 || m.Beta != 0 && m.Beta != 1 {
		g.Shape += " scaled"
	}

	if own && m.Beta == 1 {
		g.Shape += " with a matrix added"
	}

	of := func(field *gpu.Ptr) *program.Array {
		if a := c.Operand(field); a != nil {
			return a.Array
		}
		return nil
	}

	d := of(&m.D)
	g.Results = []*program.Array{d}
	var added *program.Array
	if m.Beta != 0 {
		other := *d
		other.Buffer = new(program.Buffer)
		added = &other
	}

	for i, name := range variants {
		one := *m
		one.Variant = i
		g.Alternatives = append(g.Alternatives, program.Alternative{Name: name,
			Calls: []*program.Call{program.NewCall(&one, program.Writes(&one.D, d),
				program.Reads(&one.A, of(&m.A)), program.Reads(&one.B, of(&m.B)),
				program.Reads(&one.ScaleA, of(&m.ScaleA)),
				program.Reads(&one.ScaleB, of(&m.ScaleB)), program.Reads(&one.C, added))}})
	}

	return g
}

// ownWays lists the variants that this module has for a product which is worth timing, or for which a
// rule asks for one. Sums that are multiplied by a factor have none.
func (t *Chooser) ownVariants(m program.Matmul) []kernel.Variant {
	s := m.Spec
	if m.Alpha != 1 || m.Beta != 0 && m.Beta != 1 || s.Batch > 1 || s.TransA || s.A != s.B ||
		!s.Scaled() && s.A != s.D || s.Align < program.VectorBytes {
		return nil
	}

	variants := t.Variants(run.OwnProduct(s))
	asked := func(w kernel.Variant) bool { return t.Rules.Ask(productOp, w.String()) }
	if !t.worthTiming(s.FLOPs()) && !slices.ContainsFunc(variants, asked) {
		return nil
	}

	return variants
}

// productOp is the op of matrix products among the choices.
const productOp = "Matmul"
