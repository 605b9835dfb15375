// Package phases measures how the duration of a task is divided among its phases.
package phases

import (
	"fmt"
	"strings"
	"time"
)

// Clock measures successive phases. It must not be used concurrently.
type Clock struct {
	began, last time.Time
	names       []string
	spent       []time.Duration
}

// Start returns a clock with its first phase starting now.
func Start() *Clock {
	now := time.Now()
	return &Clock{began: now, last: now}
}

// End ends a phase and starts the next one. Phases with the same name are added up. A nil Clock
// measures nothing.
func (c *Clock) End(name string) {
	if c == nil {
		return
	}

	now := time.Now()
	took := now.Sub(c.last)
	c.last = now
	for i, n := range c.names {
		if n == name {
			c.spent[i] += took
			return
		}
	}

	c.names, c.spent = append(c.names, name), append(c.spent, took)
}

// String returns all phases in order and their total, in milliseconds.
func (c *Clock) String() string {
	if c == nil {
		return ""
	}
	var all []string
	for i, n := range c.names {
		all = append(all, fmt.Sprintf("%s %.1f", n, milliseconds(c.spent[i])))
	}
	return fmt.Sprintf("%.1f ms: %s", milliseconds(c.last.Sub(c.began)), strings.Join(all, ", "))
}

// milliseconds returns d in milliseconds.
func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
