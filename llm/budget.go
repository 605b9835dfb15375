package llm

import (
	"fmt"
	"math"
	"time"
)

// Budget is what a run may spend. One of its fields is above 0, all others are 0.
type Budget struct {
	// Time is that of the steps, with what controllers and growth take, without callbacks such as
	// evaluations. A run on it depends on the machine; a [Record] repeats it.
	Time   time.Duration `json:"time,omitempty"`
	Tokens int64         `json:"tokens,omitempty"`
	FLOPs  float64       `json:"flops,omitempty"` // as Config.FLOPs counts them
}

// unlimitedSteps is the number of steps of a run that a budget alone ends.
const unlimitedSteps = math.MaxInt32

// Check returns an error unless one field at most is above 0, all others 0.
func (b Budget) Check() error {
	set := 0
	for _, above := range []bool{b.Time > 0, b.Tokens > 0, b.FLOPs > 0} {
		if above {
			set++
		}
	}

	if set > 1 || b.Time < 0 || b.Tokens < 0 || !(b.FLOPs >= 0) || math.IsInf(b.FLOPs, 0) {
		return fmt.Errorf("llm: TrainConfig.Budget is %+v, want one field above 0 at most, the "+
			"others 0", b)
	}

	return nil
}

// String returns what is set.
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

// Plus returns the sum of what two runs have spent.
func (b Budget) Plus(c Budget) Budget {
	return Budget{b.Time + c.Time, b.Tokens + c.Tokens, b.FLOPs + c.FLOPs}
}

// budgetShares is how finely a run tells its share of the budget, so that a record has few of them.
const budgetShares = 1024

// ShareOf returns how much of b has been spent, from 0 to 1, rounded down; of the zero Budget 0.
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
