package llm

import (
	"fmt"
	"sync"
)

// paramMirror is a second copy of a model's parameters, such as on a GPU, which is authoritative while
// the model is trained.
type paramMirror interface {
	// Pull copies the named parameters, or all if no name is given, to the host.
	Pull(params ...string) error
	// Push copies the named parameters, or all if no name is given, from the host.
	Push(params ...string) error
	// Forget clears the optimizer state of all ranges or, if it returns an error, of none.
	Forget(ranges ...ParamRange) error
}

// paramHolder is the trainer that holds a model's parameters.
type paramHolder interface {
	Mirror() paramMirror // the parameters' other copy; nil if they are only on the host
	Spoiled() error      // why the model cannot be saved; nil if it can
	// Spoil records that the parameters no longer belong to a complete step, because a failed change could
	// not be undone.
	Spoil(cause error)
	// FailAlone records that accessing the parameters has failed on this rank, although it may have
	// succeeded on others.
	FailAlone(cause error)
}

// abandoned takes the place of a closed trainer that has left parameters that cannot be saved.
type abandoned struct{ cause error }

func (abandoned) Mirror() paramMirror { return nil }
func (a abandoned) Spoiled() error    { return a.cause }
func (abandoned) Spoil(error)         {}
func (abandoned) FailAlone(error)     {}

// checkMade returns an error for an uninitialized model. It may be called without the lock, because the
// lattices of a model are never replaced.
func checkMade(m *Model) error {
	if m == nil || m.Kasmina == nil {
		return errZeroModel
	}
	return nil
}

// Model.turn is the lock under which a model is changed. A step holds it until everything that the
// step changes is consistent, and so does each save, score, sampled token, blueprint and command. A
// run releases it while calling callbacks and listeners, so that they and other goroutines can do the
// same.
//
// The lock is acquired before the locks of the lattices and before a trainer's own.

// take locks the model for an operation that changes no seeds.
func take(m *Model) (done func()) {
	m.turn.Lock()
	return m.turn.Unlock
}

// Current waits for the step in progress to end, copies the parameters to the host from wherever the
// model is trained, and keeps the model locked: until done is called, no step starts, and no other
// goroutine changes the model.
//
// It returns an error if the model is not initialized, or if its trainer failed and left parameters
// that do not belong to a complete step.
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

// settleParams copies the parameters to the host and checks that they belong to a complete step. The
// model must be locked.
func settleParams(m *Model) error {
	if err := pull(m); err != nil {
		return err
	}
	if cause := spoiledBy(m); cause != nil {
		return fmt.Errorf("its trainer has failed, and its parameters are not those of a complete step: %w", cause)
	}
	return nil
}

// takeToChange locks the model for an operation that changes seeds. Listeners receive the events once
// done is called.
func takeToChange(m *Model) (done func()) {
	release := m.Kasmina.HoldEvents()
	m.turn.Lock()
	return sync.OnceFunc(func() {
		m.turn.Unlock()
		release()
	})
}

// The functions below must be called with the model locked.

// hold makes h the holder of the parameters; nil means that they are only on the host.
func hold(m *Model, h paramHolder) { m.holder = h }

// holderOf returns the holder of the parameters.
func holderOf(m *Model) paramHolder { return m.holder }

// spoiledBy returns the failure after which the parameters must not be saved, or nil.
func spoiledBy(m *Model) error {
	if m.holder == nil {
		return nil
	}
	return m.holder.Spoiled()
}

// join registers a trainer of the model and opens the lattices for commands.
func join(m *Model) {
	m.trainers++
	m.Kasmina.Open()
}

// leave undoes join. When the last trainer is gone, waiting commands are rejected.
func leave(m *Model) {
	if m.trainers--; m.trainers == 0 {
		m.Kasmina.Close()
	}
}

// trainersOf returns the number of open trainers of the model.
func trainersOf(m *Model) int { return m.trainers }

// startRun counts a run of one of the model's trainers.
func startRun(m *Model) { m.runs++ }

// endRun undoes startRun.
func endRun(m *Model) { m.runs-- }

// runsOf returns the number of runs in progress.
func runsOf(m *Model) int { return m.runs }

// changed records that parameters have changed.
func changed(m *Model) { m.changes.Add(1) }

// changesOf returns the number of parameter changes. It may be called without the lock.
func changesOf(m *Model) uint64 { return m.changes.Load() }

// shapeOf returns the number of times that the blocks have changed.
func shapeOf(m *Model) uint64 { return m.shape }

// pull copies the named parameters, or all if no name is given, to the host if a trainer holds a newer
// copy.
func pull(m *Model, params ...string) error {
	if to := mirrorOf(m); to != nil {
		return to.Pull(params...)
	}
	return nil
}

// mirrorOf returns the other copy of the parameters, or nil if they are only on the host.
func mirrorOf(m *Model) paramMirror {
	if m == nil || m.holder == nil {
		return nil
	}
	return m.holder.Mirror()
}
