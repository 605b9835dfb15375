// Package memory knows how much memory there is.
package memory

import "fmt"

// Check returns an error when something of so many bytes is more than the computer has, swap space
// included, where that is known (on Linux). Otherwise Go ends a program that asks for it, or the
// system does.
func Check(what string, bytes uint64) error {
	if has := ofComputer(); has > 0 && bytes > has {
		return fmt.Errorf("%s %.1f GiB, and this computer has %.1f GiB of memory",
			what, gib(bytes), gib(has))
	}
	return nil
}

func gib(bytes uint64) float64 { return float64(bytes) / (1 << 30) }
