// Package graft has the strategies by which α rises while the blueprint of a seed is grafted.
package graft

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/guard"
)

// Progress is what a strategy knows of a seed in stage Grafting when an epoch ends.
type Progress struct {
	Seed  int
	Alpha float64 // so far
	// in Grafting, with the one that ends: 1, 2, ... up to 65535, where it stops
	Epochs      int
	Performance float64    // as last reported in Metrics
	Stale       bool       // Performance has been seen before: nothing was scored in the epoch
	Interval    int        // epochs from the score before to a new Performance; 0 counts as 1
	Drift       float64    // relative change of the chunk's running moments over the epoch
	GradNorm    float64    // last gradient norm of the seed's chunk
	Memory      [2]float32 // what the strategy returned last, saved with the seed; zero at first
}

// Strategy decides how α rises while a seed is grafted. The lattice keeps α in [0, 1] and never
// lets it fall.
//
// The fields of a strategy are its parameters. It is saved as its name and its JSON, and read back
// as the type that [Register] has for the name. The lattice works with what it reads back, and
// refuses a strategy that comes back as something else. A parameter in an unexported field is lost,
// for example.
type Strategy interface {
	Name() string
	Check() error // whether the parameters make sense
	// Advance returns α for the next epoch, what the strategy wants to remember, and whether α is
	// where it shall end. Then it is not asked again until the next grafting. It is called by
	// several goroutines at once, for different seeds, while the lattice is locked. It must not
	// call the lattice's methods, which would wait for ever. NaN or a panic is no answer, of which
	// a StrategyFailed event tells.
	Advance(Progress) (alpha float64, memory [2]float32, done bool)
}

var (
	registry sync.RWMutex
	decoders = map[string]func([]byte) (Strategy, error){
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

// Register makes a strategy type known, so that lattices which use it can be loaded: S{}.Name() is
// its name, and its JSON gives its parameters. It returns an error when S is a pointer or an
// interface, or the name is empty or taken.
func Register[S Strategy]() error {
	if t := reflect.TypeFor[S](); t.Kind() == reflect.Pointer || t.Kind() == reflect.Interface {
		return fmt.Errorf("graft.Register: %v is a %v, want a type that holds its parameters "+
			"itself",
			t, t.Kind())
	}
	var s S
	var name string
	err := guard.Call(blueprints.ErrPanic, "Name", func() error { name = s.Name(); return nil })
	if err != nil {
		return fmt.Errorf("graft.Register: %T: %w", s, err)
	}
	registry.Lock()
	defer registry.Unlock()
	if _, taken := decoders[name]; name == "" || taken {
		return fmt.Errorf("graft.Register: the name %q of %T is empty or taken", name, s)
	}
	decoders[name] = decode[S]
	return nil
}

// Saved is a strategy as it is stored.
type Saved struct {
	Name   string          `json:"name"`
	Params json.RawMessage `json:"params"`
}

// Entry is a strategy in a lattice's table of them, beside what will be stored of it.
type Entry struct {
	Strategy
	Saved Saved
}

// Name is that of the strategy, empty in an entry without one.
func (e Entry) Name() string {
	if e.Strategy == nil {
		return ""
	}
	return e.Strategy.Name()
}

// Check is that of the strategy; an entry without one makes no sense.
func (e Entry) Check() error {
	if e.Strategy == nil {
		return errors.New("the strategy is nil, want an entry that NewEntry or Load returns")
	}
	return e.Strategy.Check()
}

// Advance is that of the strategy. An entry without one leaves all as it is.
func (e Entry) Advance(p Progress) (alpha float64, memory [2]float32, done bool) {
	if e.Strategy == nil {
		return p.Alpha, p.Memory, false
	}
	return e.Strategy.Advance(p)
}

// NewEntry returns an error unless s can be stored and loaded. The strategy in the result is what
// would be loaded, which the caller cannot change.
func NewEntry(s Strategy) (entry Entry, err error) {
	err = guard.Call(blueprints.ErrPanic, "a method of the strategy", func() (err error) {
		entry, err = newEntry(s)
		return err
	})
	return entry, err
}

func newEntry(s Strategy) (Entry, error) {
	if s == nil {
		return Entry{}, errors.New("the strategy is nil, want one such as graft.FixedRamp")
	}
	if v := reflect.ValueOf(s); v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return Entry{}, fmt.Errorf("it is a nil %T", s)
		}
		if held, ok := v.Elem().Interface().(Strategy); ok {
			s = held
		}
	}
	if err := s.Check(); err != nil {
		return Entry{}, err
	}
	params, err := json.Marshal(s)
	if err != nil {
		return Entry{}, fmt.Errorf("strategy %q: %w", s.Name(), err)
	}
	entry, err := Saved{s.Name(), params}.Load()
	if err != nil {
		return Entry{}, err
	}
	if !reflect.DeepEqual(entry.Strategy, s) {
		return Entry{}, fmt.Errorf("strategy %q: the %T %+v is stored as %s, which is loaded as "+
			"the %T %+v: its parameters must be exported fields that JSON keeps",
			s.Name(), s, s, params, entry.Strategy, entry.Strategy)
	}
	return entry, nil
}

// Load returns the strategy that is stored as s, or an error wrapping [ErrUnknown] when its name is
// not registered.
func (s Saved) Load() (Entry, error) {
	registry.RLock()
	decode, known := decoders[s.Name]
	registry.RUnlock()
	if !known {
		return Entry{}, fmt.Errorf("strategy %q is %w: register it with graft.Register, so that "+
			"lattices with it can be loaded", s.Name, ErrUnknown)
	}
	var strategy Strategy
	err := guard.Call(blueprints.ErrPanic, "decoding or Check", func() (err error) {
		if strategy, err = decode(s.Params); err == nil {
			err = strategy.Check()
		}
		return err
	})
	if err != nil {
		return Entry{}, fmt.Errorf("strategy %q: %w", s.Name, err)
	}
	return Entry{strategy, s}, nil
}

// ErrUnknown is wrapped by the error of a strategy whose name is not registered.
var ErrUnknown = errors.New("not known")
