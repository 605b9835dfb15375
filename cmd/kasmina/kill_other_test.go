//go:build !unix

package main

// prepareKill does nothing: processes are killed in tests on Unix only.
func prepareKill() {}
