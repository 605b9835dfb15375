// Package stoptext ends a text before the first of several stop texts, while the text arrives in parts.
package stoptext

import "strings"

// A Cutter ends a text before the first of its stop texts. It holds text back that may be the start of one.
type Cutter struct {
	Stops []string // not empty
	held  string
}

// Add returns the text that is certainly before any stop text. If the text contains one, found is true
// and the rest of the text is dropped.
func (c *Cutter) Add(text string) (released, stop string, found bool) {
	text = c.held + text
	at := len(text)
	for _, s := range c.Stops {
		if i := strings.Index(text, s); i >= 0 && (i < at || i == at && len(s) > len(stop)) {
			at, stop, found = i, s, true
		}
	}
	if found {
		c.held = ""
		return text[:at], stop, true
	}

	for _, s := range c.Stops {
		at = min(at, len(text)-Overlap(text, s))
	}
	c.held = text[at:]
	return text[:at], "", false
}

// Rest returns the text that is held back, for the end of a text without a stop text.
func (c *Cutter) Rest() string { return c.held }

// Overlap returns the length of the longest proper prefix of s that is a suffix of the text.
func Overlap(text, s string) int {
	for n := min(len(text), len(s)-1); n > 0; n-- {
		if strings.HasSuffix(text, s[:n]) {
			return n
		}
	}
	return 0
}
