package llm

import (
	"errors"
	"fmt"
	"sync"
)

// paramMirror is where the parameters of a model are while somebody trains it, such as on a GPU.
type paramMirror interface {
	// Pull makes parameters on the host, those of the given names or all, what they are there.
	Pull(params ...string) error
	// Push makes parameters there, those of the given names or all, what they are on the host.
	Push(params ...string) error
	// Forget makes zero what the optimiser remembers of values of a parameter.
	Forget(param string, from, to int) error
}

// paramHolder is who has the parameters of a model: a trainer.
type paramHolder interface {
	Mirror() paramMirror // where they are; nil if on the host alone
	Spoiled() error      // why no save is possible; nil if one is
}

// errNoContext is the error of a context that is nil.
var errNoContext = errors.New("the context is nil, want one such as context.Background()")

// checkMade returns an error for a model that nobody has made. It needs no turn, since a model never gets
// other lattices.
func checkMade(m *Model) error {
	if m == nil || m.Kasmina == nil {
		return errZeroModel
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
func orZero(m *Model) *Model {
	if m == nil {
		return new(Model)
	}
	return m
}

// take waits for a turn, for what changes no seeds.
func take(m *Model) (done func()) {
	m = orZero(m)
	m.turn.Lock()
	return m.turn.Unlock
}

// Current waits until no step is in progress, and then makes the parameters on the host those that
// the model has, wherever it is trained. Until done is called, no step begins, and no other goroutine
// changes the model.
//
// It returns an error if the model is not initialized, or if its trainer has failed and left
// parameters that belong to no complete step.
func (m *Model) Current() (done func(), err error) {
	if err := checkMade(m); err != nil {
		return nil, err
	}
	done = take(m)
	if err := settleParams(m); err != nil {
		done()
		return nil, err
	}
	return done, nil
}

// settleParams is what Current does in its turn.
func settleParams(m *Model) error {
	if err := pull(m); err != nil {
		return err
	}
	if m.holder != nil && m.holder.Spoiled() != nil {
		return fmt.Errorf("its trainer has failed, and its parameters are not those of a complete step: %w", m.holder.Spoiled())
	}
	return nil
}

// takeToChange waits for a turn in which seeds change. Listeners hear of it when it is over.
func takeToChange(m *Model) (done func()) {
	m = orZero(m)
	tell := m.Kasmina.HoldEvents()
	m.turn.Lock()
	return sync.OnceFunc(func() {
		m.turn.Unlock()
		tell()
	})
}

// The following are called in the model's turn.

// hold makes h the one who has the parameters; nil if they are on the host alone.
func hold(m *Model, h paramHolder) { orZero(m).holder = h }

// holderOf is who has the parameters.
func holderOf(m *Model) paramHolder { return orZero(m).holder }

// join counts a trainer of the model, to which the lattices' commands are open from now on.
func join(m *Model) {
	m = orZero(m)
	m.trainers++
	m.Kasmina.Open()
}

// leave is the opposite of Join. With the last trainer gone, commands that wait are refused.
func leave(m *Model) {
	m = orZero(m)
	if m.trainers--; m.trainers == 0 {
		m.Kasmina.Close()
	}
}

// trainersOf is how many trainers of the model are open.
func trainersOf(m *Model) int { return orZero(m).trainers }

// startRun counts a run of a trainer of the model.
func startRun(m *Model) { orZero(m).runs++ }

// endRun is the opposite of StartRun.
func endRun(m *Model) { orZero(m).runs-- }

// runsOf returns the number of runs of the model's trainers that go on.
func runsOf(m *Model) int { return orZero(m).runs }

// changed notes that parameters have changed.
func changed(m *Model) { orZero(m).changes.Add(1) }

// changesOf is how often parameters have changed. It needs no turn.
func changesOf(m *Model) uint64 { return orZero(m).changes.Load() }

// shapeOf is how often the blocks have become others.
func shapeOf(m *Model) uint64 { return orZero(m).shape }

// pull makes parameters on the host, those of the given names or all, what they are where somebody
// has them.
func pull(m *Model, params ...string) error {
	if to := mirrorOf(m); to != nil {
		return to.Pull(params...)
	}
	return nil
}

// mirrorOf is where the parameters are, nil if on the host alone.
func mirrorOf(m *Model) paramMirror {
	if m == nil || m.holder == nil {
		return nil
	}
	return m.holder.Mirror()
}
