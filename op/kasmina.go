// The parts of Kasmina:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/kasmina
//   - GPU: cudaops/internal/lower/kasmina.go,
//     cudaops/internal/kernel/kasmina
//   - test cases and benchmark: internal/opcase/kasmina.go

package op

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/enum"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/state"
)

// ErrNonFinite is wrapped by the error of a run if a Kasmina layer with the option [StopOnNonFinite]
// encounters NaN or Inf. Errors from Gorgonia's own machines must first pass through [RunError].
var ErrNonFinite = errors.New("NaN or Inf")

// ErrBlueprint is blueprints.ErrPanic. It is wrapped by the error of a run if a function of a
// registered blueprint panicked. The error names the seed and the kind, and includes the stack.
// Errors from Gorgonia's own machines must first pass through [RunError].
var ErrBlueprint = blueprints.ErrPanic

// Stability selects how a [Kasmina] layer treats extreme inputs of active seeds.
type Stability uint8

const (
	// Adaptive scales chunk rows with magnitudes above 10⁶ down by a power of two, evaluates them,
	// and scales the result back up, so that intermediate results do not overflow. It computes the
	// same function as Fast.
	Adaptive = Stability(seed.Adaptive)
	// Fast computes the formulas without changes.
	Fast = Stability(seed.Fast)
	// Strict replaces x by 0 where |x| < ε, for the blend and the transform. It also clamps x to mean
	// ± 6σ of the seed's input in the previous pass with telemetry. No gradient passes where this
	// changes x, but it does pass where x is already 0.
	Strict = Stability(seed.Strict)
)

var stabilityNames = [...]string{"Adaptive", "Fast", "Strict"}

// String returns the mode's name.
func (s Stability) String() string {
	return enum.Name(s, "Stability", stabilityNames[:])
}

// MarshalText implements encoding.TextMarshaler. The text is the mode's name. It returns an error if s is
// not a valid mode.
func (s Stability) MarshalText() ([]byte, error) {
	if int(s) >= len(stabilityNames) {
		return nil, fmt.Errorf("op: %v is not one of %q", s, stabilityNames)
	}
	return []byte(s.String()), nil
}

// UnmarshalText implements encoding.TextUnmarshaler. It returns an error if name is not the name of a
// mode.
func (s *Stability) UnmarshalText(name []byte) error {
	i := slices.Index(stabilityNames[:], string(name))
	if i < 0 {
		return fmt.Errorf("op: the stability mode is %.100q, want one of %q", name, stabilityNames)
	}
	*s = Stability(i)
	return nil
}

// KasminaConfig holds the settings made by the options of [Kasmina].
type KasminaConfig struct {
	Stability       Stability
	Epsilon         float64
	GradClip        float64 // maximum norm of a row's gradient for each seed; 0 for no limit
	AdaptiveClip    float64 // limits these norms to running mean + AdaptiveClip·σ; 0 for no limit
	StopOnNonFinite bool
	NoTelemetry     bool
	Graphs          []int // seeds whose blueprints are computed by the surrounding graph
}

// KasminaOption configures a [Kasmina] layer.
type KasminaOption func(*KasminaConfig) error

// WithStability sets the stability mode. The default is [Adaptive].
func WithStability(s Stability) KasminaOption {
	return func(c *KasminaConfig) error {
		c.Stability = s
		if int(s) >= len(stabilityNames) {
			return fmt.Errorf("WithStability: the mode is %d, want Adaptive, Fast or Strict", s)
		}
		return nil
	}
}

// WithEpsilon sets ε. Activations with magnitudes below ε count as dead, and ε also keeps
// denominators away from 0. The default is 1e-8.
func WithEpsilon(eps float64) KasminaOption {
	return func(c *KasminaConfig) error {
		c.Epsilon = eps
		return positive("WithEpsilon: eps", eps)
	}
}

// WithGradClip multiplies the output's gradient g, for each row and seed, by min(1, limit/(‖g‖ +
// ε)).
func WithGradClip(limit float64) KasminaOption {
	return func(c *KasminaConfig) error {
		c.GradClip = limit
		return positive("WithGradClip: limit", limit)
	}
}

// WithAdaptiveGradClip clips like [WithGradClip] with limit = mean + deviations·σ, where mean and σ
// are taken over the norms of the seed's gradient in the rows of all passes with telemetry so far.
// The first pass is not clipped.
func WithAdaptiveGradClip(deviations float64) KasminaOption {
	return func(c *KasminaConfig) error {
		c.AdaptiveClip = deviations
		return positive("WithAdaptiveGradClip: deviations", deviations)
	}
}

// StopOnNonFinite makes a run return an error that wraps [ErrNonFinite] and names the seed when x or
// the output's gradient contains NaN or Inf. Without this option, such values are only counted and
// reported (see [state.SeedReport]).
//
// NaN and Inf are also only counted in a gradient that carries a loss scale above 1 (precision
// Float16 on a GPU), because the scale may be the cause and the step is skipped. Errors from
// Gorgonia's own machines must first pass through [RunError].
func StopOnNonFinite() KasminaOption {
	return func(c *KasminaConfig) error {
		c.StopOnNonFinite = true
		return nil
	}
}

// WithoutTelemetry makes the layer read its lattice without changing it: nothing is measured, and NaN and Inf
// are not counted. Use it for evaluation, sampling and gradient checks, where running the layer must not affect
// later results. With [StopOnNonFinite], the run still returns an error for NaN and Inf.
func WithoutTelemetry() KasminaOption {
	return func(c *KasminaConfig) error {
		c.NoTelemetry = true
		return nil
	}
}

// WithGraphs names seeds whose kinds are graphs (see package llm/site). The code that builds the
// surrounding graph adds the results of these graphs to y, while the layer measures the chunks of
// these seeds and passes them on unchanged.
func WithGraphs(seeds ...int) KasminaOption {
	return func(c *KasminaConfig) error {
		c.Graphs = slices.Clone(seeds)
		return nil
	}
}

func positive(what string, v float64) error {
	if !(v > 0) || math.IsInf(v, 0) {
		return fmt.Errorf("%s is %v, want a finite number above 0", what, v)
	}
	return nil
}

// KasminaOp is the op that [Kasmina] applies. With Replaying set, it is the replay of such an op.
type KasminaOp struct {
	opbase.Base
	Lattice   *state.Lattice
	Config    KasminaConfig
	Replaying bool
	inputs    gorgonia.Nodes
	run       *kasminaRun // shared by the op, its replays and its backward ops
}

// Kasmina applies the seeds of a lattice to x, each to its own chunk of the features:
//
//	y = x                    in the stages Dormant, Germinated, Training, Culled, Cancelled and RolledBack
//	y = x + α(t(x) − x)      in Grafting, Stabilization and Evaluating, with the seed's α, and in FineTuning and
//	                         Fossilized, with α = 1
//
// Here t is the transform of the seed's blueprint, with the weights and the scale of the seed's slot
// (see package blueprints). x and y are [rows, D], where D is the lattice's number of hidden
// features, and each of its S seeds owns C = D/S columns. weights is [slots, W] and scales is
// [slots]. x, weights and scales are all float32 or all float64.
//
// Slot 0 means "none", so row 0 is never read and usable slots start at 1. For a seed with slot 0,
// t(x) = x in every stage. Several seeds may share a slot, in which case their gradients are added.
//
// W must be at least C. A kind uses the first [blueprints.Size] weights of a row, and the rest
// receive no gradient. Kinds that mix features need at least 2C weights, and W determines their rank.
// If W is too small for a kind, the error wraps [blueprints.ErrWidth]. It is returned by Kasmina if a
// seed already uses the kind, by [state.Lattice.RequestGermination] if the lattice knows W from
// [state.WithWidth], and otherwise by the run.
//
// A slot whose weights and scale are all 0 counts as unwritten. The first pass that uses such a slot
// writes the identity start of the seed's kind into it (see [blueprints.Identity]), so weights and
// scales may start as gorgonia.Zeroes. Slots with any other contents are left unchanged. To reuse
// one, write a new start with [blueprints.Identity] or a [state.Network].
//
// Gradients follow from the formulas. They reach weights and scales in the stages Grafting,
// Stabilization and FineTuning, and also in Training, where y = x and dx = g although the parameters
// learn as if the output were t(x). In all other stages, the gradients of weights and scales are 0.
//
// A solver with momentum or weight decay changes parameters even if their gradient is 0. To keep a
// frozen blueprint unchanged, bit for bit, the solver must not decay the weights, and it must discard
// its state for slots that are no longer trained by any seed. See [state.Lattice.LearningSlots] and
// the method Forget of optim.Optimizer.
//
// A forward pass takes a snapshot of the lattice when it starts, and its backward pass uses the
// same snapshot. If a goroutine changes a stage or α in between, the change takes effect in the
// next forward pass. Both passes record their figures in the lattice (see [state.Lattice.Report]).
//
// A lattice belongs to one activation. Several graphs may contain a layer with the same lattice, for
// example one for training and one for evaluation. However, each pass with telemetry counts as one
// step of the lattice, so if several such layers run in a training step, create all but one with
// [WithoutTelemetry].
//
// Use [WithoutTelemetry] for gradient checks as well, because the limits of strict mode and of adaptive
// clipping must not change between evaluations. Clipped gradients are not the derivatives of the output.
// Neither are the gradients of weights and scales in Training, Evaluating and Fossilized, and a gradient
// check reports them as wrong. examples/gradcheck shows how to check them.
func Kasmina(x, weights, scales *gorgonia.Node, lattice *state.Lattice,
	opts ...KasminaOption) (*gorgonia.Node, error) {
	const name = "Kasmina"
	ax, aw, as := arg{"x", x}, arg{"weights", weights}, arg{"scales", scales}
	if err := checkFloats(name, ax, aw, as); err != nil {
		return nil, err
	}

	if err := checkKasminaShapes(name, ax, aw, as, lattice); err != nil {
		return nil, err
	}

	c := KasminaConfig{Epsilon: 1e-8}
	for _, o := range opts {
		if err := o(&c); err != nil {
			return nil, fmt.Errorf("op.%s: %w", name, err)
		}
	}

	if c.GradClip > 0 && c.AdaptiveClip > 0 {
		return nil, fmt.Errorf(
			"op.%s: WithGradClip(%v) and WithAdaptiveGradClip(%v) exclude each other",
			name, c.GradClip, c.AdaptiveClip)
	}

	o := &KasminaOp{Lattice: lattice, Config: c, inputs: gorgonia.Nodes{x, weights, scales},
		run: &kasminaRun{}}
	o.init()
	return gorgonia.ApplyOp(o, x, weights, scales)
}

func checkKasminaShapes(name string, x, weights, scales arg, lattice *state.Lattice) error {
	if err := checkDims(name, x, 2, "[rows, D]"); err != nil {
		return err
	}

	if err := checkDims(name, weights, 2, "[slots, W]"); err != nil {
		return err
	}

	if err := checkDims(name, scales, 1, "[slots]"); err != nil {
		return err
	}

	if lattice == nil {
		return fmt.Errorf("op.%s: lattice is nil, want one made by state.NewLattice", name)
	}

	seeds, d := lattice.Seeds(), x.node.Shape()[1]
	if seeds == 0 {
		return fmt.Errorf("op.%s: lattice has no seeds, want one made by state.NewLattice", name)
	}

	if d%seeds != 0 {
		return fmt.Errorf(
			"op.%s: x has %d features (shape %v), want a multiple of the lattice's %d seeds",
			name, d, x.node.Shape(), seeds)
	}

	if d != lattice.Hidden() {
		return fmt.Errorf("op.%s: x has %d features (shape %v), want the lattice's %d", name, d,
			x.node.Shape(), lattice.Hidden())
	}

	slots, width := weights.node.Shape()[0], weights.node.Shape()[1]
	if width < d/seeds {
		return fmt.Errorf("op.%s: weights has shape %v, want [slots, W] with W at least %d = %d "+
			"features / %d seeds", name, weights.node.Shape(), d/seeds, d, seeds)
	}

	if err := checkShape(name, scales, fmt.Sprintf("one for each slot of weights %v",
		weights.node.Shape()), slots); err != nil {
		return err
	}

	if want := lattice.Slots(); want > 0 && want != slots {
		return fmt.Errorf(
			"op.%s: weights has %d slots (shape %v), want %d, as set by state.WithSlots",
			name, slots, weights.node.Shape(), want)
	}

	if want := lattice.Width(); want > 0 && want != width {
		return fmt.Errorf("op.%s: weights has rows of %d (shape %v), want %d, as set by "+
			"state.WithWidth", name, width, weights.node.Shape(), want)
	}

	if err := lattice.Fits(width); err != nil {
		return fmt.Errorf("op.%s: weights has shape %v: %w", name, weights.node.Shape(), err)
	}

	return nil
}

// Chunk returns C, the number of features of a seed, or 0 for a zero KasminaOp.
func (o *KasminaOp) Chunk() int {
	if !o.initialized() {
		return 0
	}
	return o.InputShape(0)[1] / o.Lattice.Seeds()
}

// initialized reports whether the op was created by [Kasmina].
func (o *KasminaOp) initialized() bool { return o.run != nil && o.Lattice != nil && len(o.inputs) > 0 }

func (o *KasminaOp) init() {
	config := fmt.Sprintf("lattice=%d %+v replaying=%v", o.Lattice.ID(), o.Config, o.Replaying)
	x := o.inputs[0]
	opbase.Init(&o.Base, o, "Kasmina", config, o.inputs, x.Dtype(), x.Shape(),
		kasmina[float32], kasmina[float64])
}

// DiffWRT reports that the op is differentiable in x, weights and scales.
func (o *KasminaOp) DiffWRT(int) []bool { return []bool{true, true, true} }

// SymDiff returns the gradients of x, weights and scales.
func (o *KasminaOp) SymDiff(inputs gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, inputs, output, grad); err != nil {
		return nil, err
	}
	b := &KasminaGradOp{Forward: o}
	in := gorgonia.Nodes{inputs[0], inputs[1], inputs[2], output, grad}
	return backward(&b.Base, b, "KasminaGrad", o, in, 3, kasminaGrad[float32], kasminaGrad[float64])
}

// Replay returns an op that repeats the last run of o from the same snapshot of the lattice and
// adds nothing to the telemetry. The replay returns an error if o has not run or is a zero value.
func (o *KasminaOp) Replay() gorgonia.Op {
	if !o.initialized() {
		return new(KasminaOp)
	}
	r := &KasminaOp{Lattice: o.Lattice, Config: o.Config, Replaying: true,
		inputs: o.inputs, run: o.run}
	r.init()
	return r
}

// KasminaGradOp computes the packed gradients [dx | dweights | dscales] from x, weights, scales,
// the forward output and its gradient.
type KasminaGradOp struct {
	opbase.Base
	Forward *KasminaOp
}
