package llm

import (
	"fmt"
	"math"
	"time"
)

// Budget limits a run. At most one of its fields may be set.
type Budget struct {
	// Time limits the time spent in steps, controllers and growth, but not in callbacks such as
	// evaluations. A run on a time budget depends on the speed of the machine, but a [Record] makes
	// it reproducible.
	Time   time.Duration `json:"time,omitempty"`
	Tokens int64         `json:"tokens,omitempty"`
	FLOPs  float64       `json:"flops,omitempty"` // as counted by Config.FLOPs
}

// unlimitedSteps is the number of steps of a run limited only by its budget.
const unlimitedSteps = math.MaxInt32

// Check returns an error if a field is negative or not finite, or if more than one field is set.
func (b Budget) Check() error {
	set := 0
	for _, above := range []bool{b.Time > 0, b.Tokens > 0, b.FLOPs > 0} {
		if above {
			set++
		}
	}

	if set > 1 || b.Time < 0 || b.Tokens < 0 || !(b.FLOPs >= 0) || math.IsInf(b.FLOPs, 0) {
		return fmt.Errorf("llm: TrainConfig.Budget is %+v, want at most one field above 0 and the "+
			"others 0", b)
	}

	return nil
}

// String returns the limit, or an empty string for the zero Budget.
func (b Budget) String() string {
	switch {
	case b.Time > 0:
		return b.Time.String()
	case b.Tokens > 0:
		return fmt.Sprintf("%d tokens", b.Tokens)
	case b.FLOPs > 0:
		return fmt.Sprintf("%g FLOPs", b.FLOPs)
	}
	return ""
}

// Plus returns the sum of two spent amounts.
func (b Budget) Plus(c Budget) Budget {
	return Budget{b.Time + c.Time, b.Tokens + c.Tokens, b.FLOPs + c.FLOPs}
}

// budgetShares is the resolution of a run's spent share, coarse enough to keep records short.
const budgetShares = 1024

// ShareOf returns the spent share of b, from 0 to 1, rounded down to a multiple of 1/1024. It
// returns 0 for the zero Budget.
func (b Budget) ShareOf(spent Budget) float64 {
	var s float64
	switch {
	case b.Time > 0:
		s = float64(spent.Time) / float64(b.Time)
	case b.Tokens > 0:
		s = float64(spent.Tokens) / float64(b.Tokens)
	case b.FLOPs > 0:
		s = spent.FLOPs / b.FLOPs
	}
	return min(1, math.Floor(budgetShares*s)/budgetShares)
}
