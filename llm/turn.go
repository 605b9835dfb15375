package llm

import (
	"errors"
	"sync"
)

// A model is changed by one goroutine at a time, whose turn it is: a step with all that it changes
// is one turn, and so is each save, score, sample's token, blueprint and command. A run has no turn
// while callbacks and listeners are called, so that these may do all of that too, and other
// goroutines with them.
//
// The turn comes before the locks of the lattices, and before a Trainer's own.

var (
	errZeroModel = errors.New("the model is nil or its zero value: NewModel and LoadModel " +
		"make one")
	errZeroTrainer = errors.New("the trainer is nil or its zero value: NewTrainer makes one")
)

// made returns an error for a model that nobody has made.
func (m *Model) made() error {
	if m == nil || m.Kasmina == nil || len(m.Params) == 0 {
		return errZeroModel
	}
	return nil
}

// made returns an error for a trainer that nobody has made.
func (t *Trainer) made() error {
	if t == nil || t.engine == nil || t.Model.made() != nil {
		return errZeroTrainer
	}
	return nil
}

// take waits for a turn, for what changes no seeds.
func (m *Model) take() (done func()) {
	m.turn.Lock()
	return m.turn.Unlock
}

// takeToChange waits for a turn in which seeds change. Listeners hear of it when it is over.
func (m *Model) takeToChange() (done func()) {
	tell := m.Kasmina.HoldEvents()
	m.turn.Lock()
	return sync.OnceFunc(func() {
		m.turn.Unlock()
		tell()
	})
}

// apply carries out commands that have been submitted.
func (m *Model) apply() {
	defer m.takeToChange()()
	m.Kasmina.Apply()
}

// Lock and Unlock are called by state.Network.Do.
func (s slots) Lock()   { s.m.turn.Lock() }
func (s slots) Unlock() { s.m.turn.Unlock() }

// inTurn calls f when it is the trainer's turn with its model, unless the trainer cannot be used.
func (t *Trainer) inTurn(f func() error) error {
	if err := t.made(); err != nil {
		return err
	}
	defer t.Model.take()()
	if err := t.usable(); err != nil {
		return err
	}
	return f()
}
