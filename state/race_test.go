//go:build race

package state_test

// raceEnabled relaxes limits on time, which the race detector multiplies.
const raceEnabled = true
