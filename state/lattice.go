// Package state manages the seeds of Kasmina layers. For each seed, it holds the stage, the
// blueprint, how far the blueprint is blended into the model, and telemetry of the seed's part of
// the activations. It also defines the rules for moving from stage to stage.
//
// A Kasmina layer divides the D features of an activation tensor [rows, D] into S chunks of C = D/S
// features, so that seed s owns columns sC to (s+1)C−1. A [Lattice] holds the S seeds of one layer as
// one array per field. Each seed's fields are protected by a checksum, which every change updates.
//
// # A seed's life
//
// A seed starts [Dormant]. [Lattice.RequestGermination] gives it a blueprint and a slot, that is, a
// row of the layer's parameters. [Lattice.Transition] then starts its training and later its
// grafting. [Lattice.StepEpoch], called at the end of every epoch, raises α and reports which gates
// have opened. The seed's life ends when the blueprint is fossilized, or when it is given up and
// [Lattice.Recycle] makes the seed dormant again.
//
// The stages are as follows, where y is the seed's output for an input chunk x and t is the
// blueprint's transform:
//
//	stage          y               blueprint learns  next stages
//	Dormant        x               –                 Germinated
//	Germinated     x               no                Training, Cancelled
//	Training       x               yes               Grafting, Culled, Cancelled
//	Grafting       x + α(t(x) − x) yes, α rises      Stabilization, RolledBack
//	Stabilization  x + α(t(x) − x) yes               Evaluating, RolledBack
//	Evaluating     x + α(t(x) − x) no                FineTuning, Culled, RolledBack
//	FineTuning     t(x)            yes               Fossilized, Culled, RolledBack
//	Fossilized     t(x)            no                none
//	Culled         x               –                 Dormant, by Recycle
//	Cancelled      x               –                 Dormant, by Recycle
//	RolledBack     x               –                 Dormant, by Recycle
//
// Most transitions are also guarded by a gate, which requires a minimum number of epochs and imposes
// conditions on measured figures (see [Thresholds]). [WithoutGates] removes the gates.
//
// # Where to start
//
// [NewLattice] creates the lattice that op.Kasmina takes. Printing [Lattice.Report] shows a table of
// the seeds.
//
// A [Network] holds the lattices of all layers of a model. Its commands act on several seeds at once,
// take effect between two steps, and keep the parameters of the slots up to date. A [Controller]
// issues commands based on the network's reports; package control provides several.
//
// Lattices and networks are safe for concurrent use, so a controller can send commands while a graph
// runs. A forward pass copies the state when it starts, so a command takes effect in the next pass.
package state

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/state/graft"
	"github.com/kasmina-go/kasmina/state/internal/columns"
	"github.com/kasmina-go/kasmina/state/internal/outbox"
)

// Errors that callers can test for with [errors.Is].
var (
	ErrSeed       = errors.New("no such seed")
	ErrTransition = errors.New("transition not allowed")
	ErrGate       = errors.New("gate is shut")
	ErrEmbargo    = errors.New("seed is under embargo")
	ErrCorrupt    = errors.New("seed state is corrupt")
	ErrSchema     = errors.New("schema version is too new")
	ErrArgument   = errors.New("invalid argument")
	ErrShape      = errors.New("lattice has a different shape")
)

// Lattice is the state of all seeds of one Kasmina layer. Create one with [NewLattice] or load one
// with UnmarshalBinary. The zero value has no seeds.
type Lattice struct {
	mu        changeLock
	id        uint64
	n, hidden int
	config    config

	epoch       uint32
	step        uint64  // passes recorded so far
	loss        float64 // the host's last reported loss; 0 if none was reported
	curve       []Point
	seeds       *seedState
	sums        *columns.Checksums
	strategies  []graft.Entry
	ring        ring
	recorder    recorder
	marked      marked
	deferred    *Measured     // where passes record their figures; nil for the lattice itself
	training    atomic.Uint64 // training step that seeds the α noise of blueprints in graphs
	ahead       uint64        // batches between the last one recorded and the one being measured
	timing      timing
	overrides   map[int]Stage // stages seen by forward passes instead of the seeds' own
	quarantined []Event       // reset while loading; reported at the end of the next epoch
	pending     []Event       // events queued under the lock
	outbox      outbox.Outbox[Event]
	users       map[uint16]int // number of living seeds of each slot
	// kept holds, for seeds being grafted, the parameters of their slots before grafting began. A
	// Network uses them for rollbacks.
	kept map[int]SlotParams
}

// config holds a lattice's options, which are saved with it.
type config struct {
	Site        blueprints.Site `json:"site,omitempty"`
	Gates       bool            `json:"gates"`
	Thresholds  Thresholds      `json:"thresholds"`
	Embargo     int             `json:"embargo"`
	Renormalize int             `json:"renormalize"`
	Slots       int             `json:"slots"`
	Width       int             `json:"width,omitempty"`
	History     int             `json:"history"`
	Transitions int             `json:"transitions"`
	Quarantine  bool            `json:"quarantine,omitempty"`
	Noise       float64         `json:"noise,omitempty"` // relative width of the noise on α
	Telemetry   Telemetry       `json:"telemetry"`
}

const defaultTransitions = 4

// Option configures a new lattice.
type Option func(*config) error

// WithoutGates removes the thresholds on epochs, errors and performance, so that only the table of
// transitions restricts a seed's stages.
func WithoutGates() Option {
	return func(c *config) error {
		c.Gates = false
		return nil
	}
}

// WithThresholds sets the conditions of the gates. The default is [DefaultThresholds], or
// [DepthThresholds] in depth.
func WithThresholds(t Thresholds) Option {
	return func(c *config) error {
		c.Thresholds = t
		return t.Check()
	}
}

// WithEmbargo sets the number of epochs between the end of a blueprint's life and the first
// successful [Lattice.Recycle]. The default is 10.
func WithEmbargo(epochs int) Option {
	return func(c *config) error {
		c.Embargo = epochs
		return inRange("WithEmbargo: epochs", epochs, 0, math.MaxInt32)
	}
}

// WithRenormalization sets the period, in epochs, after which a seed's running statistics are cut
// back to the weight of one pass. They weight all passes equally and would otherwise adapt ever more
// slowly. The default is 16, and the minimum is 1.
func WithRenormalization(epochs int) Option {
	return func(c *config) error {
		c.Renormalize = epochs
		return inRange("WithRenormalization: epochs", epochs, 1, math.MaxInt32)
	}
}

// At sets the site of the seeds. The default is [blueprints.Chunk].
//
// Seeds at other sites have no slots and no features; the hidden argument of [NewLattice] is their
// number. In depth, all seeds grow the model's single stack of blocks, one after another, and the
// default thresholds are [DepthThresholds]. At a weight and in the stream, each seed has its own
// place and, from Training on, its own parameters.
func At(site blueprints.Site) Option {
	return func(c *config) error {
		if c.Site = site; site == blueprints.Depth {
			c.Thresholds = DepthThresholds()
		}
		_, err := site.MarshalText()
		return err
	}
}

// WithSlots sets the number of slots of the layer's weights, including slot 0 ("none"). A request
// for a slot that does not exist then fails at once instead of when the graph runs.
func WithSlots(slots int) Option {
	return func(c *config) error {
		c.Slots = slots
		return inRange("WithSlots: slots", slots, 1, math.MaxUint16+1)
	}
}

// WithWidth sets the number of weights in a slot, which is the number of columns of the layer's
// weights. A request for a blueprint that needs more then fails at once instead of when the graph
// runs.
func WithWidth(weights int) Option {
	return func(c *config) error {
		c.Width = weights
		return inRange("WithWidth: weights", weights, 1, math.MaxInt32)
	}
}

// WithTelemetry sets the initial telemetry; [Lattice.SetTelemetry] changes it later. The default is
// mode [Production] with the hierarchical reduction.
func WithTelemetry(t Telemetry) Option {
	return func(c *config) error {
		c.Telemetry = t
		return t.Check()
	}
}

// WithHistory sets the number of telemetry reports that [Lattice.History] keeps. The default is 4.
func WithHistory(reports int) Option {
	return func(c *config) error {
		c.History = reports
		return inRange("WithHistory: reports", reports, 0, 1<<16)
	}
}

// WithTransitions sets how many of its most recent transitions each seed remembers, at four bytes
// each; see [Lattice.Transitions]. The default is 4.
func WithTransitions(n int) Option {
	return func(c *config) error {
		c.Transitions = n
		return inRange("WithTransitions: n", n, 0, math.MaxUint8)
	}
}

// WithQuarantine resets seeds that do not match their checksums, both when an epoch ends and when
// the lattice is loaded. The next end of an epoch reports them in Quarantined events. Without this
// option, corruption is an error wrapping [ErrCorrupt] in both cases.
func WithQuarantine() Option {
	return func(c *config) error {
		c.Quarantine = true
		return nil
	}
}

// WithAlphaNoise blends the blueprint of a seed in Grafting with a random α, drawn uniformly between
// (1 − width)·α and (1 + width)·α and limited to 1, where α is the one set by the strategy. This
// keeps the host from becoming dependent on the blueprint before the blueprint has been judged.
// width is from 0 to 1; the default is 0, which means no noise.
//
// On a chunk, every pass with telemetry draws an α. At a weight and in the stream, where the
// blueprint is part of the model's graph, every training step does. In depth, nothing is drawn,
// because new blocks participate fully from the start.
func WithAlphaNoise(width float64) Option {
	return func(c *config) error {
		if c.Noise = width; !(width >= 0 && width <= 1) {
			return fmt.Errorf("WithAlphaNoise: width is %v, want 0 to 1", width)
		}
		return nil
	}
}

// inRange returns an error naming what unless lo ≤ v ≤ hi.
func inRange(what string, v, lo, hi int) error {
	if v < lo || v > hi {
		return fmt.Errorf("%s is %d, want %d to %d", what, v, lo, hi)
	}
	return nil
}

var lattices atomic.Uint64

// NewLattice returns the state of a layer with the given number of seeds, all dormant, over hidden
// features.
//
// It returns an error wrapping [ErrArgument] if hidden is not a positive multiple of seeds, if an
// option is invalid, or if the seeds need more memory than the computer has, where that is known (on
// Linux).
func NewLattice(seeds, hidden int, opts ...Option) (*Lattice, error) {
	if seeds < 1 || hidden < 1 || hidden%seeds != 0 {
		return nil,
			fmt.Errorf("state.NewLattice: %w: hidden is %d and seeds is %d, want positive "+
				"numbers, hidden a multiple of seeds",
				ErrArgument, hidden, seeds)
	}
	if uint64(seeds) > math.MaxUint32 {
		return nil, fmt.Errorf("state.NewLattice: %w: seeds is %d, want at most %d", ErrArgument,
			seeds, uint32(math.MaxUint32))
	}

	c := config{Gates: true, Thresholds: DefaultThresholds(), Embargo: 10, Renormalize: 16,
		History: 4, Transitions: defaultTransitions}
	for _, o := range opts {
		if err := o(&c); err != nil {
			return nil, fmt.Errorf("state.NewLattice: %w: %w", ErrArgument, err)
		}
	}

	if err := memory.Check(fmt.Sprintf("%d seeds take", seeds),
		seedBytes(seeds, c.Transitions)); err != nil {
		return nil, fmt.Errorf("state.NewLattice: %w: %w", ErrArgument, err)
	}

	ramp, err := graft.NewEntry(defaultStrategy)
	if err != nil {
		return nil, fmt.Errorf("state.NewLattice: %w", err)
	}

	l := &Lattice{}
	l.install(&image{n: seeds, hidden: hidden, config: c, strategies: []graft.Entry{ramp},
		seeds: newSeedState(seeds, c.Transitions)})
	cpu.Parallel(seeds, 1024, l.seal)
	return l, nil
}

// install replaces the lattice's contents with img. The caller holds the lock, or the only reference.
func (l *Lattice) install(img *image) {
	if l.id == 0 {
		l.id = lattices.Add(1)
	}
	l.n, l.hidden, l.config, l.curve = img.n, img.hidden, img.config, img.curve
	l.epoch, l.step, l.loss = img.epoch, img.step, img.loss
	l.strategies, l.seeds = img.strategies, img.seeds
	l.sums = checksums(l.seeds.columns(), Schema)
	l.quarantined = img.quarantined
	l.countUsers()
	l.ring, l.timing, l.overrides, l.kept = ring{}, timing{}, nil, map[int]SlotParams{}
}

// ID returns a number that is unique among the lattices of this process. It is not saved.
func (l *Lattice) ID() uint64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.id
}

// Seeds returns the number of seeds.
func (l *Lattice) Seeds() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.n
}

// Hidden returns the number of features of the layer.
func (l *Lattice) Hidden() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.hidden
}

// Site returns the site of the seeds.
func (l *Lattice) Site() blueprints.Site {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Site
}

// Slots returns the number of slots set by [WithSlots], or 0.
func (l *Lattice) Slots() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Slots
}

// Width returns the number of weights per slot set by [WithWidth], or 0.
func (l *Lattice) Width() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Width
}

// Fits returns an error wrapping [blueprints.ErrWidth] that names a seed if its blueprint needs more
// than width weights per slot.
func (l *Lattice) Fits(width int) error {
	l.mu.RLock()
	defer l.mu.RUnlock()

	if l.n == 0 || l.config.Site != blueprints.Chunk {
		return nil
	}
	return l.seeds.fit(l.hidden, width)
}

// fit returns an error if the blueprint of a seed does not fit slots of the given width.
func (s *seedState) fit(hidden, width int) error {
	var fits [math.MaxUint8 + 1]bool // kinds known to fit
	for seed, kind := range s.kind {
		if s.slot[seed] == 0 || Stage(s.stage[seed]).Ended() || fits[kind] {
			continue
		}
		if _, err := blueprints.Size(blueprints.Kind(kind), hidden/len(s.kind), width); err != nil {
			return fmt.Errorf("seed %d: %w", seed, err)
		}
		fits[kind] = true
	}
	return nil
}

// Epoch returns the number of epochs that have ended.
func (l *Lattice) Epoch() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return int(l.epoch)
}

// Stage returns the stage of a seed, or an error wrapping [ErrSeed] if seed is out of range.
func (l *Lattice) Stage(seed int) (Stage, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()

	if err := l.checkSeed("Stage", seed); err != nil {
		return 0, err
	}
	return Stage(l.seeds.stage[seed]), nil
}

// checkSeed returns an error wrapping ErrSeed and naming the method if seed is out of range.
func (l *Lattice) checkSeed(method string, seed int) error {
	if l.n == 0 {
		return fmt.Errorf("state.%s: %w: the lattice has no seeds", method, ErrSeed)
	}
	if seed < 0 || seed >= l.n {
		return fmt.Errorf("state.%s: %w: seed is %d, want 0 to %d", method, ErrSeed, seed, l.n-1)
	}
	return nil
}
