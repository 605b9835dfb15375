package op

import "errors"

// RunError returns an error of a run as one in which errors.Is and errors.As find what the ops have
// wrapped. That is [ErrNonFinite], [ErrBlueprint] or [ErrNoTargets], for example. The errors of
// Gorgonia's own machines need it: their type has a method Err where these look for Unwrap. The
// text stays as it is; so does every other error, nil included.
func RunError(err error) error {
	var context interface{ Err() error }
	if !errors.As(err, &context) {
		return err
	}
	inner := context.Err()
	if inner == nil {
		return err
	}
	return &runError{err, inner}
}

// runError is outer, which does not unwrap, beside what it is about.
type runError struct{ outer, inner error }

func (e *runError) Error() string { return e.outer.Error() }

func (e *runError) Unwrap() []error { return []error{e.outer, e.inner} }
