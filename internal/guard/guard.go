// Package guard calls user-supplied functions and turns their panics into errors.
package guard

import (
	"fmt"
	"runtime/debug"
)

// Call returns f's error. If f panics, the error wraps kind and contains the location, the panic
// value and the stack.
func Call(kind error, where string, f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w in %s: %v\n\n%s", kind, where, r, debug.Stack())
		}
	}()
	return f()
}
