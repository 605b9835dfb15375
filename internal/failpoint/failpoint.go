// Package failpoint names the points in the code where tests stop a process or make an operation fail.
//
// Outside of tests no hook is set, and reaching a point costs one atomic load.
package failpoint

import "sync/atomic"

var hook atomic.Pointer[func(point, path string)]

// Reach calls the hook that a test has set, if any, with a point's name. The path is the file or
// directory being worked on, or empty.
func Reach(point, path string) {
	if f := hook.Load(); f != nil {
		(*f)(point, path)
	}
}

// Set installs the function that Reach calls, and nil removes it. The function may be called from
// several goroutines at once.
func Set(f func(point, path string)) {
	if f == nil {
		hook.Store(nil)
		return
	}
	hook.Store(&f)
}
