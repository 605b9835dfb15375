// Package memory determines the size of the computer's memory.
package memory

import "fmt"

// Check returns an error if bytes exceeds the computer's memory including swap space, where its size
// is known (on Linux). Without such a check, Go or the system would kill a program that allocates too
// much. what begins the message, as in "1000 seeds take".
func Check(what string, bytes uint64) error {
	if has := ofComputer(); has > 0 && bytes > has {
		return fmt.Errorf("%s %.1f GiB, but this computer has %.1f GiB of memory",
			what, gib(bytes), gib(has))
	}
	return nil
}

// gib converts bytes to GiB.
func gib(bytes uint64) float64 { return float64(bytes) / (1 << 30) }
