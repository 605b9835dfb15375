package model

import (
	"errors"
	"fmt"
	"sync"
)

// Mirror is where the parameters of a model are while somebody trains it, such as on a GPU.
type Mirror interface {
	// Pull makes parameters on the host, those of the given names or all, what they are there.
	Pull(params ...string) error
	// Push makes parameters there, those of the given names or all, what they are on the host.
	Push(params ...string) error
	// Forget makes zero what the optimiser remembers of values of a parameter.
	Forget(param string, from, to int) error
}

// Holder is who has the parameters of a model: a trainer.
type Holder interface {
	Mirror() Mirror // where they are; nil if on the host alone
	Spoiled() error // why no save is possible; nil if one is
}

// ErrNoContext is the error of a context that is nil.
var ErrNoContext = errors.New("the context is nil, want one such as context.Background()")

// Made returns an error for a model that nobody has made. It needs no turn, since a model never gets
// other lattices.
func Made(m *Model) error {
	if m == nil || m.Kasmina == nil {
		return ErrZero
	}
	return nil
}

// A model is changed by one goroutine at a time, whose turn it is. A step with all that it changes
// is one turn, and so is each save, score, sample's token, blueprint and command. A run has no turn
// while callbacks and listeners are called, so that these may do all of that too, and other
// goroutines with them.
//
// The turn comes before the locks of the lattices, and before a trainer's own.

// Of a model that is nil all of this goes by one that nobody has made.
func some(m *Model) *Model {
	if m == nil {
		return new(Model)
	}
	return m
}

// Take waits for a turn, for what changes no seeds.
func Take(m *Model) (done func()) {
	m = some(m)
	m.turn.Lock()
	return m.turn.Unlock
}

// Current waits for a turn in which the parameters on the host are those that the model has, wherever
// it is trained. There is an error, and no turn, if nobody has made the model, or its trainer has
// failed and left parameters that belong to no complete step.
func Current(m *Model) (done func(), err error) {
	if err := Made(m); err != nil {
		return nil, err
	}
	done = Take(m)
	if err := settle(m); err != nil {
		done()
		return nil, err
	}
	return done, nil
}

// settle is what Current does in its turn.
func settle(m *Model) error {
	if err := Pull(m); err != nil {
		return err
	}
	if m.holder != nil && m.holder.Spoiled() != nil {
		return fmt.Errorf("its trainer has failed, and its parameters are not those of a complete step: %w", m.holder.Spoiled())
	}
	return nil
}

// TakeToChange waits for a turn in which seeds change. Listeners hear of it when it is over.
func TakeToChange(m *Model) (done func()) {
	m = some(m)
	tell := m.Kasmina.HoldEvents()
	m.turn.Lock()
	return sync.OnceFunc(func() {
		m.turn.Unlock()
		tell()
	})
}

// The following are called in the model's turn.

// Hold makes h the one who has the parameters; nil if they are on the host alone.
func Hold(m *Model, h Holder) { some(m).holder = h }

// HolderOf is who has the parameters.
func HolderOf(m *Model) Holder { return some(m).holder }

// Join counts a trainer of the model, to which the lattices' commands are open from now on.
func Join(m *Model) {
	m = some(m)
	m.trainers++
	m.Kasmina.Open()
}

// Leave is the opposite of Join. With the last trainer gone, commands that wait are refused.
func Leave(m *Model) {
	m = some(m)
	if m.trainers--; m.trainers == 0 {
		m.Kasmina.Close()
	}
}

// Trainers is how many trainers of the model are open.
func Trainers(m *Model) int { return some(m).trainers }

// StartRun counts a run of a trainer of the model.
func StartRun(m *Model) { some(m).runs++ }

// EndRun is the opposite of StartRun.
func EndRun(m *Model) { some(m).runs-- }

// Runs returns the number of runs of the model's trainers that go on.
func Runs(m *Model) int { return some(m).runs }

// Changed notes that parameters have changed.
func Changed(m *Model) { some(m).changes.Add(1) }

// Changes is how often parameters have changed. It needs no turn.
func Changes(m *Model) uint64 { return some(m).changes.Load() }

// Shape is how often the blocks have become others.
func Shape(m *Model) uint64 { return some(m).shape }

// Pull makes parameters on the host, those of the given names or all, what they are where somebody
// has them.
func Pull(m *Model, params ...string) error {
	if to := mirror(m); to != nil {
		return to.Pull(params...)
	}
	return nil
}

// mirror is where the parameters are, nil if on the host alone.
func mirror(m *Model) Mirror {
	if m == nil || m.holder == nil {
		return nil
	}
	return m.holder.Mirror()
}
