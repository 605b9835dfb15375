//go:build !unix

package main

// prepareKill does nothing, because the tests kill processes on Unix only.
func prepareKill() {}
