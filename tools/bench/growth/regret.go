package growth

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// A regret compares the runs of control.Forecast on a budget with the arm that would have been the best choice.
type regret struct {
	controller, best row
	seeds            []uint64 // random seeds of both arms
	loss             float64  // mean of the controller's losses minus those of the best arm, seed by seed
	spread           float64  // largest standard deviation of an arm on the budget; 0 if all have a single random seed
}

// regrets returns the regret on each budget that has a run of control.Forecast and a run of another arm with the same
// random seed.
//
// If several arms use control.Forecast, regrets chooses the arm with the most random seeds and, among these, the one with
// the lowest loss.
func regrets(rows []row) (all []regret) {
	for _, g := range grouped(rows) {
		controller := -1
		for i, r := range g { // sorted by loss
			if r.Arm.forecast && len(r.runs) > 0 && (controller < 0 || len(r.runs) > len(g[controller].runs)) {
				controller = i
			}
		}
		if controller < 0 {
			continue
		}

		r, found := regret{controller: g[controller]}, false
		for _, other := range g {
			if other.Arm.forecast {
				continue
			}
			if seeds, loss := r.controller.above(other); len(seeds) > 0 && (!found || loss > r.loss) {
				r.best, r.seeds, r.loss, found = other, seeds, loss, true
			}
		}
		if !found {
			continue
		}

		for _, other := range g {
			r.spread = max(r.spread, other.Deviation)
		}
		all = append(all, r)
	}

	return all
}

// above returns the mean difference between the losses of r and other over their common random seeds.
func (r row) above(other row) (seeds []uint64, loss float64) {
	for _, seed := range slices.Sorted(maps.Keys(r.runs)) {
		if run, ok := other.runs[seed]; ok {
			seeds = append(seeds, seed)
			loss += r.runs[seed].Loss - run.Loss
		}
	}

	if len(seeds) > 0 {
		loss /= float64(len(seeds))
	}
	return seeds, loss
}

// writeRegrets writes regrets as a Markdown table.
func writeRegrets(b *strings.Builder, all []regret) {
	if len(all) == 0 {
		return
	}

	b.WriteString("\nRegret: the loss of the controller minus that of the best other arm\n\n" +
		"| tokens per parameter | equal | controller | best other arm | random seeds of both | regret | spread |\n" +
		"| --- | --- | --- | --- | --- | --- | --- |\n")
	for _, r := range all {
		spread := "unknown"
		if r.spread > 0 {
			spread = fmt.Sprintf("%.4f", r.spread)
		}
		fmt.Fprintf(b, "| %g | %s | `%v` | `%v` | %s | %+.4f | %s |\n", r.controller.Budget, r.controller.Equal,
			r.controller.Arm, r.best.Arm, formatList(r.seeds), r.loss, spread)
	}
}
