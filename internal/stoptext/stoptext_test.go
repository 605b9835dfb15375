package stoptext

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCutter checks that texts end before a stop text, however they are divided.
func TestCutter(t *testing.T) {
	for _, k := range []struct {
		text, want, stop string
		stops            []string
	}{
		{"one two three", "one two three", "", nil},
		{"one two three", "one", " two", []string{" two"}},
		{"one two three", "one ", "two", []string{"three", "two"}},
		{"aaab", "a", "aab", []string{"aab"}},
		{"ababac", "ab", "abac", []string{"abac"}},
		{"one ", "one ", "", []string{" two"}},
		{"ab", "a", "b", []string{"abc", "b"}},
		{"x世y", "x", "世", []string{"世"}},
		{"", "", "", []string{"a"}},
	} {
		for size := 1; size <= len(k.text)+1; size++ {
			c := Cutter{Stops: k.stops}
			var got, stop string
			found := false
			for rest := k.text; rest != "" && !found; {
				part := rest[:min(size, len(rest))]
				rest = rest[len(part):]
				var released string
				released, stop, found = c.Add(part)
				got += released
			}
			require.Equal(t, k.stop != "", found, "%q in parts of %d bytes", k.text, size)
			require.Equal(t, k.want, got+c.Rest(), "%q in parts of %d bytes", k.text, size)
			require.Equal(t, k.stop, stop, "%q in parts of %d bytes", k.text, size)
		}
	}

	// If two stop texts start at the same place, the longer one is reported.
	c := Cutter{Stops: []string{"b", "bc"}}
	released, stop, found := c.Add("abcd")
	require.Equal(t, []any{"a", "bc", true}, []any{released, stop, found})
}

// TestOverlap checks the part of a text that can be the start of a mark.
func TestOverlap(t *testing.T) {
	require.Equal(t, 4, Overlap("a <too", "<tool>"))
	require.Equal(t, 1, Overlap("<<", "<<a"[1:]))
	require.Equal(t, 0, Overlap("<tool>", "<tool>"))
	require.Equal(t, 0, Overlap("", "<"))
}
