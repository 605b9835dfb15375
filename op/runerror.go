package op

import "errors"

// RunError makes the errors that ops wrap visible to errors.Is and errors.As, for example
// [ErrNonFinite], [ErrBlueprint] or [ErrNoTargets]. Errors from Gorgonia's own machines need it
// because their type provides a method Err instead of Unwrap. The text of the error does not change.
// RunError returns every other error unchanged, including nil.
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

// runError combines outer, an error without Unwrap, with the error inside it.
type runError struct{ outer, inner error }

func (e *runError) Error() string { return e.outer.Error() }

func (e *runError) Unwrap() []error { return []error{e.outer, e.inner} }
