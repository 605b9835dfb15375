// Package state holds the seeds of a Kasmina layer. It knows what each of them is doing, how far it
// is blended in, and what has been measured of its chunk of the activations. It has the rules by
// which a seed moves from stage to stage.
//
// A layer cuts the D features of an activation tensor [rows, D] into S equal chunks of C = D/S.
// Seed s looks after columns sC to (s+1)C. A [Lattice] keeps all seeds of one layer, one array per
// field, each seed under a checksum that every change renews. It may be used from any number of
// goroutines: a controller can send commands while a graph runs. A forward pass takes what it needs
// from it at its start, so a command takes effect at the next pass.
//
// A typical life: [Lattice.RequestGermination] gives a dormant seed a blueprint and a slot of the
// layer's parameters. [Lattice.Transition] starts its training, later its grafting.
// [Lattice.StepEpoch], called once an epoch, moves α. So it goes on until the blueprint is
// fossilized, or culled and the seed recycled. The table of stages is at [Stage].
//
// A [Network] holds the lattices of all layers of a model. Commands to it act on several seeds at
// once and wait for the end of a step. They bring the parameters of the seeds' slots with them. A
// [Controller] decides on commands by the network's reports; package control has some.
package state

import (
	"errors"
	"fmt"
	"math"
	"sync"
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
	ErrShape      = errors.New("lattice of another shape")
)

// Lattice is the state of all seeds of one Kasmina layer. Make one with [NewLattice] or load one
// with UnmarshalBinary; the zero value has no seeds.
type Lattice struct {
	mu        sync.RWMutex
	id        uint64
	n, hidden int
	config    config

	epoch       uint32
	step        uint64  // passes with telemetry so far
	loss        float64 // the host's, as last reported; 0: never
	curve       []Point
	seeds       *seedState
	sums        *columns.Checksums
	strategies  []graft.Entry
	ring        ring
	recorder    recorder
	marked      marked
	deferred    *Measured     // where passes leave their figures; nil for here
	training    atomic.Uint64 // the step of training that blueprints in graphs draw their α for
	ahead       uint64        // batches between the last one taken in and the one that is measured
	timing      timing
	posed       map[int]Stage // what forward passes see in place of seeds' own stages
	quarantined []Event       // when the lattice was loaded, to be told with the next epoch's end
	pending     []Event       // what has happened under the lock
	outbox      outbox.Outbox[Event]
	users       map[uint16]int // living seeds of each slot
	// what a Network keeps of the slots of seeds that are being grafted
	kept map[int]SlotParams
}

// config is what the options of a lattice set. It is saved with the lattice.
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
	Noise       float64         `json:"noise,omitempty"` // of α
	Telemetry   Telemetry       `json:"telemetry"`
}

const defaultTransitions = 4

// Option configures a new lattice.
type Option func(*config) error

// WithoutGates makes the table of transitions the only rule: no thresholds on epochs, errors or
// performance.
func WithoutGates() Option {
	return func(c *config) error {
		c.Gates = false
		return nil
	}
}

// WithThresholds sets the conditions of the gates. The default is [DefaultThresholds].
func WithThresholds(t Thresholds) Option {
	return func(c *config) error {
		c.Thresholds = t
		return t.Check()
	}
}

// WithEmbargo sets how many epochs must pass between the end of a blueprint's life and
// [Lattice.Recycle]. The default is 10.
func WithEmbargo(epochs int) Option {
	return func(c *config) error {
		c.Embargo = epochs
		return inRange("WithEmbargo: epochs", epochs, 0, math.MaxInt32)
	}
}

// WithRenormalization sets after how many epochs a seed's running statistics are cut back to the
// weight of one pass. They weigh all passes alike, and would not follow the present. The default is
// 16.
func WithRenormalization(epochs int) Option {
	return func(c *config) error {
		c.Renormalize = epochs
		return inRange("WithRenormalization: epochs", epochs, 1, math.MaxInt32)
	}
}

// At makes the lattice one of seeds that grow elsewhere than on chunks. Such seeds have no slots
// and no features: hidden is their number. In depth all of them grow the one stack of a model's
// blocks, one after the other. There [DepthThresholds] take the place of the default ones. At a
// weight and in the stream each has a place of its own, and parameters of its own from Training on.
func At(site blueprints.Site) Option {
	return func(c *config) error {
		if c.Site = site; site == blueprints.Depth {
			c.Thresholds = DepthThresholds()
		}
		_, err := site.MarshalText()
		return err
	}
}

// WithSlots tells the lattice how many slots the layer's weights have, slot 0 ("none") included. So
// a request for one that does not exist fails at once. Without it such a request fails when the
// graph runs.
func WithSlots(slots int) Option {
	return func(c *config) error {
		c.Slots = slots
		return inRange("WithSlots: slots", slots, 1, math.MaxUint16+1)
	}
}

// WithWidth tells the lattice how many weights a slot has, the number of columns of the layer's
// weights. So a request for a blueprint that needs more fails at once. Without it such a request
// fails when the graph runs.
func WithWidth(weights int) Option {
	return func(c *config) error {
		c.Width = weights
		return inRange("WithWidth: weights", weights, 1, math.MaxInt32)
	}
}

// WithTelemetry sets what is measured at first; [Lattice.SetTelemetry] changes it later. The
// default is the mode [Production] with the hierarchical reduction.
func WithTelemetry(t Telemetry) Option {
	return func(c *config) error {
		c.Telemetry = t
		return t.Check()
	}
}

// WithHistory sets how many telemetry reports [Lattice.History] keeps. The default is 4.
func WithHistory(reports int) Option {
	return func(c *config) error {
		c.History = reports
		return inRange("WithHistory: reports", reports, 0, 1<<16)
	}
}

// WithTransitions sets how many of its last transitions each seed remembers; see
// [Lattice.Transitions]. The default is 4. Each takes four bytes a seed.
func WithTransitions(n int) Option {
	return func(c *config) error {
		c.Transitions = n
		return inRange("WithTransitions: n", n, 0, math.MaxUint8)
	}
}

// WithQuarantine makes a seed that does not match its checksum a new, dormant one, when an epoch
// ends and when the lattice is loaded. The next epoch's end tells of it in a Quarantined event.
// Without it both are errors wrapping [ErrCorrupt].
func WithQuarantine() Option {
	return func(c *config) error {
		c.Quarantine = true
		return nil
	}
}

// WithAlphaNoise blends a blueprint, in stage Grafting, with an α that is drawn anew. It is drawn
// evenly from (1 − width)·α to (1 + width)·α, at most 1, where α is the schedule's. So the host does
// not come to depend on the blueprint before the verdict. The default is 0, none. On a chunk every
// pass of training draws. Where what a blueprint computes is part of a model's graph, as at a weight
// and in the stream, every step does. In depth there is no α: new blocks are there as a whole.
func WithAlphaNoise(width float64) Option {
	return func(c *config) error {
		if c.Noise = width; !(width >= 0 && width <= 1) {
			return fmt.Errorf("WithAlphaNoise: width is %v, want 0 to 1", width)
		}
		return nil
	}
}

func inRange(what string, v, lo, hi int) error {
	if v < lo || v > hi {
		return fmt.Errorf("%s is %d, want %d to %d", what, v, lo, hi)
	}
	return nil
}

var lattices atomic.Uint64

// NewLattice returns the state of a layer of the given number of seeds, all dormant, over hidden
// features. hidden must be a multiple of seeds. More seeds than the computer has memory for are an
// error, where that is known (on Linux).
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
	for i, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("state.NewLattice: %w: option %d is nil", ErrArgument, i)
		}
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

// install makes img the lattice's contents. The caller holds the lock, or the only reference.
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
	l.ring, l.timing, l.posed, l.kept = ring{}, timing{}, nil, map[int]SlotParams{}
}

// ID returns a number that no other lattice of this process has. It is not saved.
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

// Site returns where the seeds grow.
func (l *Lattice) Site() blueprints.Site {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Site
}

// Slots returns the number of slots that [WithSlots] gave, or 0.
func (l *Lattice) Slots() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Slots
}

// Width returns the number of weights of a slot that [WithWidth] gave, or 0.
func (l *Lattice) Width() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.config.Width
}

// Fits returns an error if a seed has a blueprint that needs more than the given number of weights
// a slot. It wraps [blueprints.ErrWidth] and names the seed.
func (l *Lattice) Fits(width int) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.n == 0 || l.config.Site != blueprints.Chunk {
		return nil
	}
	return l.seeds.fit(l.hidden, width)
}

func (s *seedState) fit(hidden, width int) error {
	var fine [math.MaxUint8 + 1]bool // of each kind, whether it is known to fit
	for seed, kind := range s.kind {
		if s.slot[seed] == 0 || Stage(s.stage[seed]).Ended() || fine[kind] {
			continue
		}
		if _, err := blueprints.Size(blueprints.Kind(kind), hidden/len(s.kind), width); err != nil {
			return fmt.Errorf("seed %d: %w", seed, err)
		}
		fine[kind] = true
	}
	return nil
}

// Epoch returns how many epochs have ended.
func (l *Lattice) Epoch() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return int(l.epoch)
}

// Stage returns the stage of a seed.
func (l *Lattice) Stage(seed int) (Stage, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if err := l.checkSeed("Stage", seed); err != nil {
		return 0, err
	}
	return Stage(l.seeds.stage[seed]), nil
}

func (l *Lattice) checkSeed(method string, seed int) error {
	if l.n == 0 {
		return fmt.Errorf("state.%s: %w: the lattice has none", method, ErrSeed)
	}
	if seed < 0 || seed >= l.n {
		return fmt.Errorf("state.%s: %w: seed is %d, want 0 to %d", method, ErrSeed, seed, l.n-1)
	}
	return nil
}
