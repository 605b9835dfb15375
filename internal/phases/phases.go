// Package phases tells where the time of one piece of work went.
package phases

import (
	"fmt"
	"strings"
	"time"
)

// Clock measures phases that follow each other. It is for one goroutine.
type Clock struct {
	began, last time.Time
	names       []string
	spent       []time.Duration
}

// Start returns a clock whose first phase begins now.
func Start() *Clock {
	now := time.Now()
	return &Clock{began: now, last: now}
}

// End ends a phase, and begins the next one. Phases of one name are added up. A nil clock is none.
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

// String is all phases in order, in milliseconds, and their sum.
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

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
