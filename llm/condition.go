package llm

import (
	"errors"
	"fmt"
)

// A condition records whether a trainer can work with its model and, if not, why. All code that
// depends on past failures consults it.
type condition struct {
	phase phase
	cause error // of a phase that calls for a Resume
}

// A phase is the state that a trainer is in.
type phase uint8

const (
	ready      phase = iota // model, optimizer and engine agree, as after a complete step
	incomplete              // an update was applied without completing its step, or a failure was not undone
	damaged                 // the parameters belong to no step, or to a twin
	detached                // the engine has not taken over the host's model and moments
	engineless              // no engine could be created for the model
	lost                    // like engineless, and the parameters were only in the previous engine
	closed
)

// A change is an event that may alter a trainer's phase.
type change uint8

const (
	updateMade change = iota
	stepCompleted
	updateFailed
	restoreFailed // something other than the parameters could not be restored
	modelLost     // the parameters could not be restored
	pushFailed
	engineLost
	allLost  // the engine was lost, and with it the only copy of the parameters
	restored // a checkpoint, or another trainer's changes to the model, was taken over
	closing
)

// transitions lists the phases that follow a change. A change that is not listed for a phase has no
// effect.
var transitions = map[change]map[phase]phase{
	updateMade:    {ready: incomplete},
	stepCompleted: {incomplete: ready},
	updateFailed:  {ready: damaged},
	restoreFailed: {ready: incomplete},
	modelLost:     {ready: damaged, incomplete: damaged},
	pushFailed:    {ready: detached, incomplete: detached, damaged: detached},
	engineLost:    {ready: engineless, incomplete: engineless, damaged: engineless, detached: engineless},
	allLost:       {ready: lost, incomplete: lost, damaged: lost, detached: lost, engineless: lost},
	restored:      {incomplete: ready, damaged: ready, detached: ready, engineless: ready, lost: ready},
	closing: {ready: closed, incomplete: closed, damaged: closed, detached: closed,
		engineless: closed, lost: closed},
}

// on records a change and its cause, which is nil unless the change is a failure. A phase keeps its
// first cause, except that an incomplete step takes the latest reason why it cannot be completed.
func (c *condition) on(what change, cause error) {
	next, listed := transitions[what][c.phase]
	switch {
	case !listed && c.phase == incomplete && cause != nil:
		c.cause = cause
	case !listed:
	case next == ready || next == closed:
		*c = condition{phase: next}
	default:
		*c = condition{next, cause}
	}
}

var errClosed = errors.New("the trainer is closed")

// err returns nil if the trainer can work with its model, and otherwise an error that explains why
// not.
func (c condition) err() error {
	switch c.phase {
	case incomplete:
		return fmt.Errorf("the trainer cannot be used before a Resume, since its state is not that of a "+
			"complete step: %w", c.cause)
	case damaged:
		return fmt.Errorf("the trainer cannot be used before a Resume, since the parameters are not "+
			"those of a complete step: %w", c.cause)
	case detached:
		return fmt.Errorf("the engine has not taken the model's parameters, so the trainer cannot "+
			"be used before another Resume: %w", c.cause)
	case engineless:
		return fmt.Errorf("there is no engine for the model, so the trainer cannot be used before "+
			"another Resume, such as from the last checkpoint: %w", c.cause)
	case lost:
		return fmt.Errorf("the parameters are lost, because no engine could take them over, so the trainer "+
			"cannot be used before a Resume from the last checkpoint: %w", c.cause)
	case closed:
		return errClosed
	}

	return nil
}

// damage returns the error after which the parameters must not be saved, or nil if they may be
// saved.
func (c condition) damage() error {
	if c.phase == damaged || c.phase == lost {
		return c.cause
	}
	return nil
}

// mirrored reports whether the engine holds the model's parameters, possibly newer ones than the
// host.
func (c condition) mirrored() bool {
	return c.phase == ready || c.phase == incomplete || c.phase == damaged
}

// undo restores the state from before an operation. cause is the error of the operation, or nil. undo calls all of
// the functions, even if one of them fails, and returns the cause. If the state cannot be restored, the error also
// says so, and the trainer needs a Resume.
func (c *condition) undo(cause error, restore ...func() error) error {
	var failed error
	for _, f := range restore {
		failed = errors.Join(failed, f())
	}
	if failed == nil {
		return cause
	}

	err := errors.Join(cause, fmt.Errorf("the state from before could not be restored: %w", failed))
	c.on(restoreFailed, err)
	return err
}
