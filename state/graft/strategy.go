// Package graft provides the strategies that raise α while a seed's blueprint is grafted:
// [FixedRamp], [PerformanceLinked], [DriftControlled] and [GradNormGated]. Programs can add
// strategies with [Register].
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

// Progress is the input of a strategy at the end of an epoch: the state of a seed in stage
// Grafting.
type Progress struct {
	Seed  int
	Alpha float64 // current α
	// Epochs counts the epochs in Grafting from 1, including the one just ended, and saturates at
	// 65535.
	Epochs      int
	Performance float64    // as last reported in Metrics
	Stale       bool       // Performance is old: no score was reported in this epoch
	Interval    int        // epochs between the previous score and a new Performance; 0 counts as 1
	Drift       float64    // relative change of the chunk's running moments over the epoch
	GradNorm    float64    // last gradient norm of the seed's chunk
	Memory      [2]float32 // the memory returned by the last Advance, saved with the seed; zero initially
}

// Strategy decides how α rises while a seed is grafted. The lattice keeps α in [0, 1] and never
// lowers it.
//
// The fields of a strategy are its parameters. A strategy is saved as its name and its JSON encoding,
// and decoded as the type that [Register] associates with the name. The lattice uses the decoded
// form, and rejects strategies that differ from theirs, for example because a parameter is in an
// unexported field.
type Strategy interface {
	Name() string
	Check() error // returns an error for invalid parameters
	// Advance returns α for the next epoch, the memory for the next call, and whether α has reached
	// its final value. In that case it is not called again until the next grafting.
	//
	// Several goroutines call Advance concurrently, for different seeds, while the lattice is locked.
	// It must not call methods of the lattice, which would block forever. If it panics or returns
	// NaN, α remains unchanged and the lattice reports a StrategyFailed event.
	Advance(Progress) (alpha float64, memory [2]float32, done bool)
}

var (
	registry sync.RWMutex
	decoders = map[string]func([]byte) (Strategy, error){
		"FixedRamp": decode[FixedRamp], "PerformanceLinked": decode[PerformanceLinked],
		"DriftControlled": decode[DriftControlled], "GradNormGated": decode[GradNormGated],
	}
)

// decode decodes the parameters of a strategy of type S.
func decode[S Strategy](params []byte) (Strategy, error) {
	var s S
	if err := json.Unmarshal(params, &s); err != nil {
		return nil, err
	}
	return s, nil
}

// Register registers a strategy type under the name S{}.Name(), so that lattices using it can be
// loaded. It returns an error if S is a pointer or an interface, or if the name is empty or taken.
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

// Saved is the stored form of a strategy.
type Saved struct {
	Name   string          `json:"name"`
	Params json.RawMessage `json:"params"`
}

// Entry is a strategy together with its stored form.
type Entry struct {
	Strategy
	Saved Saved
}

// Name returns the name of the strategy, or "" for an entry without one.
func (e Entry) Name() string {
	if e.Strategy == nil {
		return ""
	}
	return e.Strategy.Name()
}

// Check checks the strategy. It returns an error for an entry without one.
func (e Entry) Check() error {
	if e.Strategy == nil {
		return errors.New("the strategy is nil, want an entry that NewEntry or Load returns")
	}
	return e.Strategy.Check()
}

// Advance calls the strategy's Advance. An entry without one keeps α and the memory.
func (e Entry) Advance(p Progress) (alpha float64, memory [2]float32, done bool) {
	if e.Strategy == nil {
		return p.Alpha, p.Memory, false
	}
	return e.Strategy.Advance(p)
}

// NewEntry returns an entry for s, or an error if s cannot be stored and restored. The entry's
// strategy is the restored one, so later changes of s do not affect it.
func NewEntry(s Strategy) (entry Entry, err error) {
	err = guard.Call(blueprints.ErrPanic, "a method of the strategy", func() (err error) {
		entry, err = newEntry(s)
		return err
	})
	return entry, err
}

// newEntry implements NewEntry without protection against panics.
func newEntry(s Strategy) (Entry, error) {
	if s == nil {
		return Entry{}, errors.New("the strategy is nil, want one such as graft.FixedRamp")
	}

	if v := reflect.ValueOf(s); v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return Entry{}, fmt.Errorf("the strategy is a nil %T", s)
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
			"the %T %+v: its parameters must be exported fields that JSON encodes",
			s.Name(), s, s, params, entry.Strategy, entry.Strategy)
	}
	return entry, nil
}

// Load decodes the strategy. If its name is not registered, the error wraps [ErrUnknown].
func (s Saved) Load() (Entry, error) {
	registry.RLock()
	decode, known := decoders[s.Name]
	registry.RUnlock()
	if !known {
		return Entry{}, fmt.Errorf("strategy %q is %w: register it with graft.Register so that "+
			"lattices that use it can be loaded", s.Name, ErrUnknown)
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

// ErrUnknown is wrapped by the error for a strategy with an unregistered name.
var ErrUnknown = errors.New("not known")
