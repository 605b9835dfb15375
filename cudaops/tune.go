package cudaops

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/tune"
	"github.com/kasmina-go/kasmina/internal/optime"
	"github.com/kasmina-go/kasmina/internal/wayrule"
)

// Tuning says how a machine finds the fastest of several ways to compute something: those that cuBLASLt has for a matrix
// product, and the families of kernels that a norm, attention or a Kasmina layer has. Another way may add in another order:
// only with the same ways do two machines compute the same bits.
type Tuning uint8

// The kinds of tuning. What was timed is stored in the file kasmina/tune.json of the user's cache directory, by card, driver,
// build of the kernels or version of cuBLASLt, op, shape and types.
const (
	TuneDefault = Tuning(tune.Default) // TuneOff with the precision Float32, else TuneCached
	TuneOff     = Tuning(tune.Off)     // time nothing, take what cuBLASLt proposes first and what a rule of thumb says
	TuneCached  = Tuning(tune.Cached)  // take what is stored, and time, once, what is not
	TuneFull    = Tuning(tune.Full)    // time anew, and replace what is stored
)

// MarshalText is off, cached, full or default, for flag.TextVar.
func (t Tuning) MarshalText() ([]byte, error) { return []byte(tune.Mode(t).String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (t *Tuning) UnmarshalText(text []byte) error {
	for m := TuneDefault; m <= TuneFull; m++ {
		if tune.Mode(m).String() == string(text) {
			*t = m
			return nil
		}
	}
	return fmt.Errorf("the tuning is %q, want off, cached, full or default", text)
}

// WithTuning sets the tuning. The environment variable KASMINA_TUNE (off, cached or full) has precedence. Timing takes about a
// second for a small model, and ten to fifteen for one that fills the card: of products at NewMachine and [Machine.SetOptimizer], of
// other ops in the first run.
func WithTuning(t Tuning) MachineOption {
	return func(c *machineConfig) error {
		if t > TuneFull {
			return fmt.Errorf("WithTuning: got %d, want TuneDefault, TuneOff, TuneCached or TuneFull", t)
		}
		c.tuning = tune.Mode(t)
		return nil
	}
}

// WithWays forces or forbids ways to compute ops, whatever the tuning. A rule is OP=WAY or OP!=WAY, with names as in
// [Machine.Choices] and with the wildcards of [path.Match]:
//
//	cudaops.WithWays("Attention*=mma", "RMSNorm*!=rows-*")
//
// The way host, for an op of Gorgonia's own, computes it on the CPU. What a shape cannot be computed in is not forced upon
// it. The environment variable KASMINA_WAYS, rules with commas between them, adds to these and has precedence.
func WithWays(rules ...string) MachineOption {
	return func(c *machineConfig) error {
		parsed, err := wayrule.Parse(rules)
		if err != nil {
			return fmt.Errorf("WithWays: %w", err)
		}
		c.rules = append(c.rules, parsed...)
		return nil
	}
}

// Choice is the way in which a machine computes an op of some shape.
type Choice = optime.Choice

// Source says why a way was chosen.
type Source = optime.Source

// The sources of a choice.
const (
	ByRule   = optime.ByRule   // by rule of thumb
	Stored   = optime.Stored   // timed before
	Measured = optime.Measured // in this process
	Forced   = optime.Forced   // by WithWays or KASMINA_WAYS
)

// Choices returns what the machine has chosen so far, in that order.
func (m *Machine) Choices() []Choice { return slices.Clone(m.tuner.made) }

// tuner chooses the ways of a machine.
type tuner struct {
	m     *Machine
	mode  tune.Mode
	rules wayrule.Rules
	store *tune.Store // nil with TuneOff
	made  []Choice
	known map[string]int // positions in made
	older []Choice       // of a program that is not made use of
	used  []int          // positions, of one task when the monitor looks
	full  bool           // has been told: there was no memory to time in
}

func newTuner(m *Machine) (*tuner, error) {
	c := &m.config
	t := &tuner{m: m, mode: c.tuning, rules: slices.Clone(c.rules), known: map[string]int{}}
	var err error
	if t.rules, err = t.rules.WithEnvironment(); err != nil {
		return nil, err
	}
	if t.mode == tune.Default {
		if t.mode = tune.Cached; c.act == float32s {
			t.mode = tune.Off
		}
	}
	if t.mode, err = tune.Override(t.mode); err != nil || t.mode == tune.Off {
		return t, err
	}
	if c.tuneLeast == 0 {
		c.tuneLeast = tuneLeast
	}
	path := c.tunePath
	if path == "" {
		if path, err = tune.DefaultPath(); err != nil {
			m.warn(fmt.Sprintf("the choices of tuning cannot be stored: %v", err))
		}
	}
	t.store = tune.Open(path, m.warn)
	return t, nil
}

// again begins anew, for another program of the same graph, whose choices are those of the one before.
func (t *tuner) again() {
	t.older, t.made, t.used = t.made, nil, nil
	clear(t.known)
}

// use notes that a choice is made use of.
func (t *tuner) use(choice int) { t.used = append(t.used, choice) }

// cannot tells why a job is not timed; of a card that is full, which does no harm, once for all jobs.
func (t *tuner) cannot(j job, err error) {
	if !errors.Is(err, gpu.OutOfMemory) {
		t.m.warn(fmt.Sprintf("%s %s is not tuned: %v", j.op, j.shape, err))
		return
	}
	if !t.full {
		t.m.config.logger.Info(fmt.Sprintf("cudaops: the card has no memory left to time kernels in, so a rule of thumb chooses, "+
			"for %s and for what else is new here: that is harmless, but may be slower (%v)", j.op, err))
	}
	t.full = true
}

// last is the choice used last.
func (t *tuner) last() int { return t.used[len(t.used)-1] }

// on reports whether anything may be timed.
func (t *tuner) on() bool { return t.store != nil }

// allowed returns the ways that the rules leave, and whether they force one. Later rules have precedence.
func (t *tuner) allowed(op string, ways []string) (left []int, forced bool) {
	return t.rules.Allowed(op, ways, func(s string) { t.m.warn(s) })
}

// stored is a choice in the store.
type stored struct {
	Way  string        `json:"way"`
	Cold time.Duration `json:"cold_ns"`
	Warm time.Duration `json:"warm_ns"`
}

// job is something that can be computed in several ways.
type job struct {
	op, shape string   // all that its time depends on, beside the card and the build
	build     string   // what its ways are from
	ways      []string // names, that of the rule of thumb first
	plain     int      // the way whose result counts as right
	arguments []argument
	warm      bool // what it reads is in the cache when it runs, as what is small is
	computes  bool // memory does not bound it
	tiny      bool // too little to be timed: what the rules leave is chosen by rule of thumb
	run       func(way int, memory []gpu.Ptr) error
}

// choose returns the way for a job.
func (t *tuner) choose(j job) (int, error) {
	key := j.op + " " + j.shape
	if i, ok := t.known[key]; ok {
		if way := slices.Index(j.ways, t.made[i].Way); way >= 0 {
			t.use(i)
			return way, nil
		}
	}
	if i := slices.IndexFunc(t.older, func(c Choice) bool { return c.Op == j.op && c.Shape == j.shape }); i >= 0 {
		if way := slices.Index(j.ways, t.older[i].Way); way >= 0 {
			t.note(key, t.older[i])
			return way, nil
		}
	}
	c := Choice{Op: j.op, Shape: j.shape, Of: len(j.ways), Ways: j.ways, Source: ByRule}
	left, forced := t.allowed(j.op, j.ways)
	way := left[0]
	if forced {
		c.Source = Forced
	}
	if t.on() && len(left) > 1 && !j.tiny {
		var err error
		if way, err = t.timed(j, left, &c); err != nil {
			return 0, fmt.Errorf("timing %s %s: %w", j.op, j.shape, err)
		}
	}
	if way < 0 { // neither stored, nor can it be timed now
		return left[0], nil
	}
	c.Way = j.ways[way]
	t.note(key, c)
	return way, nil
}

// note adds a choice, which is made use of.
func (t *tuner) note(key string, c Choice) {
	t.known[key] = len(t.made)
	t.use(len(t.made))
	t.made = append(t.made, c)
}

// timed returns the fastest of some ways: as it is stored, or timed and stored. It is -1 while a graph is captured, when
// nothing can be timed.
func (t *tuner) timed(j job, left []int, c *Choice) (int, error) {
	d := t.m.device
	key := fmt.Sprintf("%s, CUDA %d, %s, %s %s", d.info.Name, d.version, j.build, j.op, j.shape)
	if len(left) < len(j.ways) {
		key += fmt.Sprintf(", of %v", left)
	}
	var s stored
	if t.mode == tune.Cached && t.store.Get(key, &s, t.m.warn) {
		if way := slices.Index(j.ways, s.Way); slices.Contains(left, way) {
			c.Source, c.Cold, c.Warm = Stored, s.Cold, s.Warm
			return way, nil
		}
	}
	if t.m.capturing {
		return -1, nil
	}
	x, err := newTimer(t, j)
	if err != nil {
		t.cannot(j, err)
		return left[0], x.close()
	}
	way, err := x.fastest(left)
	if err = joined(err, x.close()); err != nil {
		return 0, err
	}
	if way < 0 {
		t.m.warn(fmt.Sprintf("%s %s is not tuned: none of the ways %v gives a result on random numbers", j.op, j.shape, j.ways))
		return left[0], nil
	}
	c.Source, c.Cold, c.Warm = Measured, x.cold[way], x.warm[way]
	if err := t.store.Put(map[string]any{key: stored{j.ways[way], c.Cold, c.Warm}}); err != nil {
		t.m.warn(err.Error())
	}
	return way, nil
}

// drop tells that a way is not to be used.
func (t *tuner) drop(j job, way int, why error) {
	t.m.warn(fmt.Sprintf("%s %s is not computed in the way %s: %v", j.op, j.shape, j.ways[way], why))
}
