// Package choose selects a variant for each call of a program. A choice comes from rules given by the
// user, from stored results, or from timing all variants on generated operands.
//
// This is the only compiler pass that runs work on the device, through an executor. It changes nothing
// about a call except the variant.
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
	"github.com/kasmina-go/kasmina/internal/variantrule"
	"github.com/kasmina-go/kasmina/optime"
)

// Config configures a Chooser.
type Config struct {
	Mode     Mode // must not be Default
	Rules    variantrule.Rules
	Path     string  // file of stored choices; "" to keep choices in memory only
	MinFLOPs float64 // smallest FLOPs of a product worth timing; 0 for the default
	Device   gpu.DeviceInfo
	Version  int // CUDA driver version
	// Given contains the choices of another machine, which the chooser adopts instead of timing. It is
	// nil to choose independently.
	Given  []optime.Choice
	Logger *slog.Logger
	Warn   func(message string)
}

// Chooser chooses the variants of a machine's calls.
type Chooser struct {
	Config
	x        *run.Executor
	store    *store // nil if timing is disabled
	choices  []*optime.Choice
	known    map[string]*optime.Choice // choices by op and shape, also from discarded programs
	given    map[string]string         // names of given variants, with the keys of known; nil if no choices are given
	toldFull bool                      // the user has been told that there was no memory for timing
}

const (
	// defaultMinFLOPs is the default minimum of FLOPs for timing a product.
	defaultMinFLOPs = 1e9
	// productVariants is the maximum number of cuBLASLt variants to time, taken in the order of the
	// library's heuristic.
	productVariants = 12
)

// New returns a chooser that times variants on x.
func New(x *run.Executor, c Config) *Chooser {
	t := &Chooser{Config: c, x: x, known: map[string]*optime.Choice{}}
	if t.MinFLOPs == 0 {
		t.MinFLOPs = defaultMinFLOPs
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

// StopTiming disables timing. Choices that remain are made by rule.
func (t *Chooser) StopTiming() { t.store, t.given = nil, nil }

// Choices returns the choices of the current program in the order they were made.
func (t *Chooser) Choices() (made []optime.Choice) {
	for _, c := range t.choices {
		made = append(made, *c)
	}
	return made
}

// Reset clears the list of choices made, so that another program can be compiled from the same graph.
func (t *Chooser) Reset() { t.choices = nil }

// Tunes reports whether timing may influence choices, here or on the machine that provided the given
// choices.
func (t *Chooser) Tunes() bool { return t.store != nil || t.given != nil }

// Variants lists the variants of a kernel that support a launch.
func (t *Chooser) Variants(params any) []kernel.Variant { return t.x.Kernels.Variants(params) }

// worthTiming reports whether a product of the given size should be timed.
func (t *Chooser) worthTiming(flops float64) bool { return t.Tunes() && flops >= t.MinFLOPs }

// Program chooses a variant for every call of a program.
func (t *Chooser) Program(p *program.Program) error {
	for _, c := range p.Calls {
		if err := t.ChooseVariant(c); err != nil {
			return fmt.Errorf("%s: %w", c.Node, err)
		}
	}
	return nil
}

// ChooseVariant chooses the variant of a call unless this has already been done.
func (t *Chooser) ChooseVariant(c *program.Call) error {
	if err := t.product(c); err != nil {
		return err
	}

	if _, ok := c.Params.(kernel.Tuned); !ok || c.Choice != nil || hasEmptyOperand(c) {
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

// hasEmptyOperand reports whether any bound operand of a call is empty.
func hasEmptyOperand(c *program.Call) bool {
	return slices.ContainsFunc(c.Args, func(a program.Arg) bool {
		return a.Bound() && a.Len() == 0
	})
}

// Choose chooses among alternative lists of calls. If timing is disabled or not worthwhile, it chooses
// the first alternative that the rules allow.
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

// choose returns the index of the variant for a group, and a record of the choice.
func (t *Chooser) choose(j program.Group) (variant int, c *optime.Choice, err error) {
	key := j.Op + " " + j.Shape
	var names []string
	for _, a := range j.Alternatives {
		names = append(names, a.Name)
	}

	if c := t.known[key]; c != nil && slices.Contains(names, c.Variant) {
		if !slices.Contains(t.choices, c) {
			t.choices = append(t.choices, c)
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
	} else if t.store != nil && len(left) > 1 && (j.FLOPs == 0 || j.FLOPs >= t.MinFLOPs) {
		if variant, err = t.fastestStored(j, left, c); err != nil {
			return 0, nil, fmt.Errorf("timing %s %s: %w", j.Op, j.Shape, err)
		}
	}

	c.Variant = names[variant]
	t.known[key], t.choices = c, append(t.choices, c)
	return variant, c, nil
}

// fastestStored returns the fastest of the variants in left. It uses the stored choice if there is one
// and otherwise times the variants and stores the result.
func (t *Chooser) fastestStored(j program.Group, left []int, c *optime.Choice) (int, error) {
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
		t.warnNotTimed(j, err)
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
	if err := t.store.put(key, storedChoice{Variant: c.Variants[variant], Cold: c.Cold}); err != nil {
		t.Warn(err.Error())
	}

	return variant, nil
}

// warnNotTimed reports why a group is not timed. Running out of memory is harmless, so it is logged
// only once.
func (t *Chooser) warnNotTimed(j program.Group, err error) {
	if !errors.Is(err, gpu.OutOfMemory) {
		t.Warn(fmt.Sprintf("%s %s is not tuned: %v", j.Op, j.Shape, err))
		return
	}

	if !t.toldFull {
		t.Logger.Info(fmt.Sprintf("cudaops: the card has no memory left for timing kernels, so a rule of "+
			"thumb chooses the variants of %s and other new ops: this is harmless, but may be slower "+
			"(%v)", j.Op, err))
	}

	t.toldFull = true
}

// product plans the product computed by a call, if any, and sets its variant. All calls with the same
// product share one choice.
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

// productGroup returns the alternatives for timing a product. If the product adds a matrix, the timed
// product adds a separate one. This makes no difference to cuBLASLt's variants, so without variants of
// our own the group's shape ignores the addition.
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

// ownVariants lists this module's variants for a product, provided that the product is worth timing or
// a rule requests such a variant. Products with a scaling factor have no variants.
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

// productOp is the name of matrix products in rules and choices.
const productOp = "Matmul"
