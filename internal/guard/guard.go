// Package guard calls functions of a user's, whose panics must leave nothing half done.
package guard

import (
	"fmt"
	"runtime/debug"
)

// Call returns f's error. When f panics, it is an error that wraps kind, and says where that was,
// why, and in which calls.
func Call(kind error, where string, f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w in %s: %v\n\n%s", kind, where, r, debug.Stack())
		}
	}()
	return f()
}
