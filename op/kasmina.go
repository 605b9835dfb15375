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

// ErrNonFinite is what a run's error wraps when a Kasmina layer made with [StopOnNonFinite] meets
// NaN or Inf. See [RunError] for the errors of Gorgonia's own machines.
var ErrNonFinite = errors.New("NaN or Inf")

// ErrBlueprint is what a run's error wraps when a function of a registered blueprint has panicked:
// blueprints.ErrPanic. The error names the seed and the kind, and shows the stack. See [RunError]
// for the errors of Gorgonia's own machines.
var ErrBlueprint = blueprints.ErrPanic

// Stability says what a [Kasmina] layer does about extreme inputs of seeds whose blueprint
// computes.
type Stability uint8

const (
	// Adaptive scales a chunk row whose largest magnitude passes 10⁶ down by a power of two,
	// evaluates it, and scales the result up again. So intermediate results do not overflow. It
	// computes the same function as Fast.
	Adaptive = Stability(seed.Adaptive)
	// Fast computes the formulas as they are.
	Fast = Stability(seed.Fast)
	// Strict replaces x by 0 where |x| < ε, for the blend and the transform. It clamps x to mean ±
	// 6σ of the seed's input in the previous pass with telemetry. No gradient passes where that
	// changes x; it passes where x is 0 already.
	Strict = Stability(seed.Strict)
)

var stabilityNames = [...]string{"Adaptive", "Fast", "Strict"}

// String returns the mode's name.
func (s Stability) String() string {
	return enum.Name(s, "Stability", stabilityNames[:])
}

// MarshalText implements encoding.TextMarshaler, by the mode's name.
func (s Stability) MarshalText() ([]byte, error) {
	if int(s) >= len(stabilityNames) {
		return nil, fmt.Errorf("op: %v is none of %q", s, stabilityNames)
	}
	return []byte(s.String()), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Stability) UnmarshalText(name []byte) error {
	i := slices.Index(stabilityNames[:], string(name))
	if i < 0 {
		return fmt.Errorf("op: the stability mode is %.100q, want one of %q", name, stabilityNames)
	}
	*s = Stability(i)
	return nil
}

// KasminaConfig is what the options of [Kasmina] set.
type KasminaConfig struct {
	Stability       Stability
	Epsilon         float64
	GradClip        float64 // largest norm of a row's gradient for each seed; 0 for none
	AdaptiveClip    float64 // the same as running mean + AdaptiveClip·σ of those norms; 0 for none
	StopOnNonFinite bool
	NoTelemetry     bool
	Graphs          []int // seeds whose blueprints the graph around the layer computes
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

// WithEpsilon sets ε, below whose magnitude an activation counts as dead, and which keeps
// denominators from 0. The default is 1e-8.
func WithEpsilon(eps float64) KasminaOption {
	return func(c *KasminaConfig) error {
		c.Epsilon = eps
		return positive("WithEpsilon: eps", eps)
	}
}

// WithGradClip scales the output's gradient g, for each row and seed, by min(1, limit/(‖g‖ + ε)).
func WithGradClip(limit float64) KasminaOption {
	return func(c *KasminaConfig) error {
		c.GradClip = limit
		return positive("WithGradClip: limit", limit)
	}
}

// WithAdaptiveGradClip clips as [WithGradClip] does, with limit = mean + deviations·σ. These are of
// the norms of the seed's gradient over the rows of all passes with telemetry so far. The first
// pass is not clipped.
func WithAdaptiveGradClip(deviations float64) KasminaOption {
	return func(c *KasminaConfig) error {
		c.AdaptiveClip = deviations
		return positive("WithAdaptiveGradClip: deviations", deviations)
	}
}

// StopOnNonFinite makes a run fail, with an error wrapping [ErrNonFinite] that names the seed, when
// x or the output's gradient holds NaN or Inf. Without it they are only counted and reported; see
// [state.SeedReport]. So are those of a gradient that carries a loss scale above 1 (precision
// Float16 on a GPU). The scale may be to blame, and the step is skipped. What Gorgonia's own
// machines return does not unwrap by itself; see [RunError].
func StopOnNonFinite() KasminaOption {
	return func(c *KasminaConfig) error {
		c.StopOnNonFinite = true
		return nil
	}
}

// WithoutTelemetry makes a layer that reads its lattice and leaves no figures in it. It is for
// evaluation, sampling and gradient checks: running it does not change what it computes. Only NaN
// and Inf, which are never hidden, are added to the lattice's counts; a run that meets none leaves
// no trace.
func WithoutTelemetry() KasminaOption {
	return func(c *KasminaConfig) error {
		c.NoTelemetry = true
		return nil
	}
}

// WithGraphs names seeds that work with kinds which are graphs (see package llm/site): whoever builds
// the graph adds to y what these compute. The layer itself passes their chunks on, and measures them.
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

// KasminaOp is the op behind [Kasmina], and with Replaying set its replay.
type KasminaOp struct {
	opbase.Base
	Lattice   *state.Lattice
	Config    KasminaConfig
	Replaying bool
	inputs    gorgonia.Nodes
	run       *kasminaRun // shared by the op, its replays and its backward ops
}

// Kasmina lets the seeds of a lattice work on x, each on its own chunk of the features:
//
//	y = x                    in the stages Dormant, Germinated, Training, Culled, Cancelled and RolledBack
//	y = x + α(t(x) − x)      in Grafting, Stabilization and Evaluating, with the seed's α, and in FineTuning and
//	                         Fossilized, with α = 1
//
// where t is the transform of the seed's blueprint, with the weights and the scale of the seed's
// slot (see the package blueprints). x and y are [rows, D], and D is the lattice's number of hidden
// features; its S seeds have C = D/S columns each. weights is [slots, W] and scales is [slots]; all
// three are float32 or all float64. Slot 0 means "none", so row 0 is never read and real slots
// start at 1. A seed in any stage whose slot is 0 has t(x) = x. Seeds may share a slot: their
// gradients add up.
//
// W is C or more: a kind uses the first of a row's weights, as many as [blueprints.Size] says, and
// the others have no gradient. The kinds with capacity need 2C or more, and W decides their rank. A
// kind for which W is too small is an error wrapping [blueprints.ErrWidth]. It comes here, if a
// seed already has the kind. It comes from [state.Lattice.RequestGermination], if the lattice knows
// W by [state.WithWidth]. Otherwise it comes when the graph runs.
//
// A slot whose weights and scale are all 0 has not been written. The first pass that computes with
// it writes the identity start of the seed's kind there, as [blueprints.Identity] has it. So
// weights and scales may begin as gorgonia.Zeroes. A slot that holds anything else stays as it is:
// one that is used again starts anew by [blueprints.Identity], or by a [state.Network].
//
// Gradients follow from the formulas. They reach weights and scales in the stages Grafting,
// Stabilization and FineTuning. They do so in Training too: there y = x and dx = g, and the
// parameters learn as if the output were t(x). Elsewhere they are 0.
//
// A parameter whose gradient is 0 is still moved by a solver that has momentum or weight decay. For
// a frozen blueprint to stay as it is, bit for bit, the solver must not decay weights. It must also
// forget what it knows of slots with which no seed learns any more. See
// [state.Lattice.LearningSlots] and Forget of optim.Optimizer.
//
// A forward pass takes a snapshot of the lattice at its start, and its backward pass goes by the
// same one. A stage or α that changes in between, from whatever goroutine, takes effect at the next
// forward pass. Both passes leave their figures in the lattice; see [state.Lattice.Report].
//
// A lattice looks after one activation. Several graphs may hold a layer with one lattice, say for
// training and for evaluation. But one pass with telemetry counts as one step of the lattice. So
// all but one of those that run in a training step should be made [WithoutTelemetry]. That also
// holds for gradient checks, in which the limits of the strict mode and of adaptive clipping must
// stand still. Gradients that are clipped are no longer those of the output. Neither are those of
// weights and scales in Training, Evaluating and Fossilized, so a gradient check reports them as
// wrong. examples/gradcheck shows what they can be compared with.
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
	for i, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("op.%s: option %d is nil", name, i)
		}
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
			"op.%s: weights has %d slots (shape %v), want %d as the lattice was told by WithSlots",
			name, slots, weights.node.Shape(), want)
	}
	if want := lattice.Width(); want > 0 && want != width {
		return fmt.Errorf("op.%s: weights has rows of %d (shape %v), want %d as the lattice was "+
			"told by WithWidth", name, width, weights.node.Shape(), want)
	}
	if err := lattice.Fits(width); err != nil {
		return fmt.Errorf("op.%s: weights has shape %v: %w", name, weights.node.Shape(), err)
	}
	return nil
}

// Chunk returns C, the number of features that a seed looks after, 0 of a zero value.
func (o *KasminaOp) Chunk() int {
	if !o.made() {
		return 0
	}
	return o.InputShape(0)[1] / o.Lattice.Seeds()
}

// made reports whether [Kasmina] has made the op.
func (o *KasminaOp) made() bool { return o.run != nil && o.Lattice != nil && len(o.inputs) > 0 }

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

// Replay returns an op that computes the last run of o again, from the same snapshot of the
// lattice, and adds nothing to the telemetry. It fails when o has not run, or is a
// zero value.
func (o *KasminaOp) Replay() gorgonia.Op {
	if !o.made() {
		return new(KasminaOp)
	}
	r := &KasminaOp{Lattice: o.Lattice, Config: o.Config, Replaying: true,
		inputs: o.inputs, run: o.run}
	r.init()
	return r
}

// KasminaGradOp computes [dx | dweights | dscales], packed, from x, weights, scales, the forward
// output and its gradient.
type KasminaGradOp struct {
	opbase.Base
	Forward *KasminaOp
}
