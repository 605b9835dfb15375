package growth

import (
	"fmt"
	"strings"
)

// A regret compares the runs of control.Forecast on a budget with the arm that would have been the best choice.
type regret struct {
	controller, best row
	seeds            []uint64 // random seeds of both arms
	loss             float64  // mean of the controller's losses minus those of the best arm, seed by seed
	spread           float64  // largest standard deviation of an arm on the budget; 0 if all have a single random seed
}

// regrets returns the regrets on each budget that has a run of control.Forecast and a run of another arm with the same
// random seed. A patient [control.Forecast] counts as another controller, with a regret of its own.
//
// The best other arm is chosen by [bestArm] among the runs with the controller's random seeds. Arms with fewer of these
// seeds cannot be compared with it by their means. If such an arm ended lower than the best arm with the seeds that both
// have, its regret is listed as well.
//
// If several arms use the same controller, for example with different learning rates, bestArm chooses among them as well.
func regrets(rows []row) (all []regret) {
	for _, g := range grouped(rows) {
		spread := 0.0
		for _, r := range g {
			spread = max(spread, r.Deviation)
		}

		for _, patient := range []bool{false, true} {
			controller, seeds := bestArm(g, nil, func(r row) bool { return r.Arm.forecast && r.Arm.patient == patient })
			if controller < 0 {
				continue
			}

			another := func(r row) bool { return !r.Arm.forecast }
			best, common := bestArm(g, seeds, another)
			if best < 0 {
				continue
			}

			add := func(other row, seeds []uint64) {
				all = append(all, regret{controller: g[controller], best: other, seeds: seeds,
					loss: g[controller].mean(seeds) - other.mean(seeds), spread: spread})
			}

			add(g[best], common)
			for _, r := range g {
				own := r.among(common)
				if another(r) && 0 < len(own) && len(own) < len(common) && r.mean(own) < g[best].mean(own) {
					add(r, own)
				}
			}
		}
	}

	return all
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
