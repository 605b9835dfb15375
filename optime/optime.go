// Package optime describes how machines spend their time: how long ops take, which of their variants were
// chosen, the profile of a step, and the peak performance of a device. Machines and engines return these
// types, and logs, tables and the board show them.
package optime

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// OpTime is the time that the nodes of one op take in a run.
type OpTime struct {
	Op    string        `json:"op"`    // name of the op, such as RMSNormGrad
	Tasks int           `json:"tasks"` // number of launches, including matrix products
	Time  time.Duration `json:"ns"`
	// Bytes is the minimum amount of data moved, counting everything the tasks read or write once.
	// FLOPs is the number of multiplications and additions of matrix products and attention.
	Bytes float64 `json:"bytes,omitempty"`
	FLOPs float64 `json:"flops,omitempty"`
	// Variants lists the variants chosen from several. Tuned, which only a monitor sets, is the time
	// that the tuned tasks took during tuning.
	Variants []string      `json:"variants,omitempty"`
	Tuned    time.Duration `json:"tuned_ns,omitempty"`
}

// Bandwidth returns Bytes/Time in bytes per second.
func (t OpTime) Bandwidth() float64 { return rate(t.Bytes, t.Time) }

// Rate returns FLOPs/Time in operations per second.
func (t OpTime) Rate() float64 { return rate(t.FLOPs, t.Time) }

// rate returns n per second, or 0 if d is not positive.
func rate(n float64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return n / d.Seconds()
}

// Gather adds up the times of each op and returns the sums, longest first.
func Gather(times []OpTime) (sums []OpTime) {
	at := map[string]int{}
	for _, t := range times {
		i, known := at[t.Op]
		if !known {
			i = len(sums)
			at[t.Op], sums = i, append(sums, OpTime{Op: t.Op})
		}
		s := &sums[i]
		s.Tasks += t.Tasks
		s.Time += t.Time
		s.Bytes += t.Bytes
		s.FLOPs += t.FLOPs
		s.Tuned += t.Tuned
		for _, w := range t.Variants {
			if !slices.Contains(s.Variants, w) {
				s.Variants = append(s.Variants, w)
			}
		}
	}

	slices.SortFunc(sums, func(a, b OpTime) int {
		return cmp.Or(cmp.Compare(b.Time, a.Time), cmp.Compare(a.Op, b.Op))
	})
	return sums
}

// Table formats the times for display, one line per op, with each op's share of the total.
func Table(times []OpTime) string {
	var whole time.Duration
	for _, t := range times {
		whole += t.Time
	}

	var s strings.Builder
	fmt.Fprintf(&s, "%-28s %5s %10s %6s %8s %8s  %s\n", "op", "tasks", "us", "%",
		"GB/s", "TFLOP/s", "variants")
	for _, t := range times {
		fmt.Fprintf(&s, "%-28.28s %5d %10.1f %6.1f %8.0f %8.1f  %s\n", t.Op, t.Tasks,
			t.Time.Seconds()*1e6, 100*rate(t.Time.Seconds(), whole),
			t.Bandwidth()/1e9, t.Rate()/1e12, strings.Join(t.Variants, ", "))
	}

	return s.String()
}
