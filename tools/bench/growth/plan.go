package growth

import (
	"math"
	"slices"
)

// A plan lists the jobs of a benchmark. Arms without a learning rate are tuned: a static arm tries
// every rate with the first random seed, and uses the best rate with the other seeds. A grown arm uses
// the best rate of the static arm with the same final depth.
type plan struct {
	budgets []float64
	equal   []string
	seeds   []uint64
	arms    []arm
	rates   []float64
}

// defaultArms returns the arms of the published comparison: static models with all, half or a quarter of
// the blocks, and models that start with a quarter and grow at fixed shares or as a controller decides.
func defaultArms(layers int) (arms []string) {
	quarter, half, all := formatNumber(float64(layers/4)), formatNumber(float64(layers/2)),
		formatNumber(float64(layers))
	arms = []string{"blocks=" + all, "blocks=" + half, "blocks=" + quarter}
	for _, share := range []string{"0.05", "0.1", "0.2", "0.4"} {
		arms = append(arms, "blocks="+quarter+"-"+all+",share="+share)
	}
	return append(arms, "blocks="+quarter+"-"+all+",share=curve", "blocks="+quarter+"-"+half+"-"+all+",share=forecast")
}

// jobs returns the jobs that can run now and have no record yet. A job that needs a tuned learning rate
// is returned once the trials have records.
func (p plan) jobs(records map[string]record) (ready []job) {
	add := func(j job) {
		if _, done := records[j.name()]; !done && !slices.ContainsFunc(ready, func(r job) bool {
			return r.name() == j.name()
		}) {
			ready = append(ready, j)
		}
	}

	for i, seed := range p.seeds {
		for _, equal := range p.equal {
			for _, budget := range p.budgets {
				for _, a := range p.arms {
					j := job{a, budget, equal, seed}
					if a.rate > 0 {
						add(j)
						continue
					}

					trials := p.trials(j)
					best, known := tunedRate(trials, records)
					switch {
					case known && (a.grows() || i > 0):
						j.Arm.rate = best
						add(j)
					case !known:
						for _, t := range trials {
							add(t)
						}
					}
				}
			}
		}
	}

	return ready
}

// trials returns the jobs for tuning the learning rate of j.
func (p plan) trials(j job) (trials []job) {
	if j.Arm.grows() {
		j.Arm = j.Arm.static()
	}
	j.Seed = p.seeds[0]
	for _, rate := range p.rates {
		j.Arm.rate = rate
		trials = append(trials, j)
	}
	return trials
}

// static returns the static arm with the same final depth.
func (a arm) static() arm {
	plain, _ := parseArm("blocks=1")
	a.blocks, a.shares, a.curve, a.forecast, a.patient = []int{a.depth()}, nil, false, false, false
	a.kind, a.rewarm, a.moments, a.boundary = plain.kind, plain.rewarm, plain.moments, plain.boundary
	return a
}

// tunedRate returns the learning rate of the trial with the lowest loss. known is false until all trials
// have records.
func tunedRate(trials []job, records map[string]record) (rate float64, known bool) {
	least := math.Inf(1)
	for _, t := range trials {
		r, done := records[t.name()]
		if !done {
			return 0, false
		}
		if r.Failed == "" && r.Loss < least {
			least, rate = r.Loss, t.Arm.rate
		}
	}

	return rate, rate > 0
}
