package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"runtime/debug"
	"sync"

	"github.com/kasmina-go/kasmina/blueprints"
)

// Graft is what a strategy knows of a seed in stage Grafting when an epoch ends.
type Graft struct {
	Seed        int
	Alpha       float64    // so far
	Epochs      int        // in Grafting, the epoch that ends included: 1, 2, ... up to 65535, where the count stops
	Performance float64    // as last reported in Metrics
	Stale       bool       // Performance has been seen before: nothing was scored in the epoch
	Interval    int        // epochs from the score before to a new Performance; 0 counts as 1
	Drift       float64    // relative change of the chunk's running moments over the epoch
	GradNorm    float64    // last gradient norm of the seed's chunk
	Memory      [2]float32 // what the strategy returned last; zero when grafting begins. It is saved with the seed.
}

// Strategy decides how α rises while a seed is grafted. The lattice keeps α in [0, 1] and never lets it fall.
//
// The fields of a strategy are its parameters. It is saved as its name and its JSON, and read back as the type that
// [RegisterStrategy] has for the name. The lattice works with what it reads back, and refuses a strategy that comes back
// as something else, because a parameter is in an unexported field for example.
type Strategy interface {
	Name() string
	Check() error // whether the parameters make sense
	// Advance returns α for the next epoch, what the strategy wants to remember, and whether α is where it shall end; then
	// it is not asked again until the next grafting. It is called by several goroutines at once, for different seeds, while
	// the lattice is locked: it must not call the lattice's methods, which would wait for ever. NaN or a panic is no answer,
	// of which a StrategyFailed event tells.
	Advance(Graft) (alpha float64, memory [2]float32, done bool)
}

// Ramp is the curve of a [FixedRamp].
type Ramp uint8

// The ramps. f goes from 0 to 1.
const (
	Linear  Ramp = iota // f
	Cosine              // (1 − cos πf)/2
	Sigmoid             // the logistic function of 12f − 6, stretched to reach 0 and 1
)

// FixedRamp takes α from 0 to Target in the given number of epochs.
type FixedRamp struct {
	Ramp   Ramp    `json:"ramp"`
	Epochs int     `json:"epochs"`
	Target float64 `json:"target"`
}

// defaultStrategy is that of a germination request which names none.
var defaultStrategy = FixedRamp{Linear, 50, 1}

// Name returns "FixedRamp".
func (FixedRamp) Name() string { return "FixedRamp" }

// Check returns an error unless Ramp is known, Epochs is from 1 to 65535, as far as a lattice counts, and Target is in (0, 1].
func (s FixedRamp) Check() error {
	if s.Ramp > Sigmoid {
		return fmt.Errorf("FixedRamp: Ramp is %d, want Linear, Cosine or Sigmoid", s.Ramp)
	}
	return checkRamp(s.Name(), s.Epochs, s.Target)
}

// Advance returns Target times the ramp's height at g.Epochs/Epochs.
func (s FixedRamp) Advance(g Graft) (alpha float64, memory [2]float32, done bool) {
	f := min(1, float64(g.Epochs)/float64(s.Epochs))
	switch s.Ramp {
	case Cosine:
		f = (1 - math.Cos(math.Pi*f)) / 2
	case Sigmoid:
		f = (1 + math.Tanh(6*f-3)/math.Tanh(3)) / 2
	}
	return s.Target * f, g.Memory, g.Epochs >= s.Epochs
}

var (
	strategyMu sync.RWMutex
	strategies = map[string]func([]byte) (Strategy, error){
		"FixedRamp": decode[FixedRamp], "PerformanceLinked": decode[PerformanceLinked],
		"DriftControlled": decode[DriftControlled], "GradNormGated": decode[GradNormGated],
	}
)

func decode[S Strategy](params []byte) (Strategy, error) {
	var s S
	if err := json.Unmarshal(params, &s); err != nil {
		return nil, err
	}
	return s, nil
}

// RegisterStrategy makes a strategy type known, so that lattices which use it can be loaded: S{}.Name() is its name, and
// its JSON gives its parameters. It returns an error when S is a pointer or an interface, or the name is empty or taken.
func RegisterStrategy[S Strategy]() error {
	if t := reflect.TypeFor[S](); t.Kind() == reflect.Pointer || t.Kind() == reflect.Interface {
		return fmt.Errorf("state.RegisterStrategy: %v is a %v, want a type that holds its parameters itself", t, t.Kind())
	}
	var s S
	var name string
	if err := guard("Name", func() error { name = s.Name(); return nil }); err != nil {
		return fmt.Errorf("state.RegisterStrategy: %T: %w", s, err)
	}
	strategyMu.Lock()
	defer strategyMu.Unlock()
	if _, taken := strategies[name]; name == "" || taken {
		return fmt.Errorf("state.RegisterStrategy: the name %q of %T is empty or taken", name, s)
	}
	strategies[name] = decode[S]
	return nil
}

// savedStrategy is a strategy as it is stored.
type savedStrategy struct {
	Name   string          `json:"name"`
	Params json.RawMessage `json:"params"`
}

// tableStrategy is a strategy in a lattice's table of them, beside what will be stored of it.
type tableStrategy struct {
	Strategy
	saved savedStrategy
}

// newTableStrategy returns an error unless s can be stored and loaded. The strategy in the result is what would be loaded,
// which the caller of s cannot change.
func newTableStrategy(s Strategy) (entry tableStrategy, err error) {
	err = guard("a method of the strategy", func() (err error) {
		entry, err = storedStrategy(s)
		return err
	})
	return entry, err
}

func storedStrategy(s Strategy) (tableStrategy, error) {
	if v := reflect.ValueOf(s); v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return tableStrategy{}, fmt.Errorf("it is a nil %T", s)
		}
		if held, ok := v.Elem().Interface().(Strategy); ok {
			s = held
		}
	}
	if err := s.Check(); err != nil {
		return tableStrategy{}, err
	}
	params, err := json.Marshal(s)
	if err != nil {
		return tableStrategy{}, fmt.Errorf("strategy %q: %w", s.Name(), err)
	}
	entry, err := savedStrategy{s.Name(), params}.load()
	if err != nil {
		return tableStrategy{}, err
	}
	if !reflect.DeepEqual(entry.Strategy, s) {
		return tableStrategy{}, fmt.Errorf("strategy %q: the %T %+v is stored as %s, which is loaded as the %T %+v: "+
			"its parameters must be exported fields that JSON keeps", s.Name(), s, s, params, entry.Strategy, entry.Strategy)
	}
	return entry, nil
}

// load returns the strategy that is stored as s, or an error wrapping errUnknown when its name is not registered.
func (s savedStrategy) load() (tableStrategy, error) {
	strategyMu.RLock()
	decode, known := strategies[s.Name]
	strategyMu.RUnlock()
	if !known {
		return tableStrategy{}, fmt.Errorf("strategy %q is %w: register it with RegisterStrategy, so that lattices with it can be loaded",
			s.Name, errUnknown)
	}
	var strategy Strategy
	err := guard("decoding or Check", func() (err error) {
		if strategy, err = decode(s.Params); err == nil {
			err = strategy.Check()
		}
		return err
	})
	if err != nil {
		return tableStrategy{}, fmt.Errorf("strategy %q: %w", s.Name, err)
	}
	return tableStrategy{strategy, s}, nil
}

var errUnknown = errors.New("not known")

// guard returns f's error, or one wrapping [blueprints.ErrPanic] that says where f has panicked: what a user's functions do must
// leave nothing half done.
func guard(where string, f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w in %s: %v\n\n%s", blueprints.ErrPanic, where, r, debug.Stack())
		}
	}()
	return f()
}
