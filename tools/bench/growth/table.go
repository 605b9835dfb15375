package growth

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
)

// A row sums up the runs of an arm on a budget.
type row struct {
	Equal  string  `json:"equal"`
	Budget float64 `json:"tokens_per_parameter"`
	Arm    arm     `json:"arm"`
	Static bool    `json:"static"`
	Best   bool    `json:"best_static"`

	Seeds     []uint64 `json:"random_seeds"`
	Loss      float64  `json:"loss"`      // mean over the random seeds
	Deviation float64  `json:"deviation"` // standard deviation over the random seeds
	Failed    int      `json:"failed,omitempty"`

	// Gain is the difference between the loss of the best static arm and this loss, averaged over
	// the random seeds of both.
	Gain *float64 `json:"gain,omitempty"`
	// Reached is the mean share of the budget after which the runs reached the final loss of the
	// best static arm. It is nil if a run never did.
	Reached *float64 `json:"share_to_static_loss,omitempty"`

	Tokens  float64 `json:"tokens"`
	Seconds float64 `json:"seconds"`

	runs map[uint64]record
}

// rows sums up the records of a study: budget by budget, the lowest loss first.
func (s *study) rows() (all []row) {
	byArm := map[string]*row{}
	for _, name := range slices.Sorted(maps.Keys(s.records)) {
		r := s.records[name]
		key := fmt.Sprintf("%s %g %v", r.Equal, r.Budget, r.Arm)
		if byArm[key] == nil {
			byArm[key] = &row{Equal: r.Equal, Budget: r.Budget, Arm: r.Arm, Static: !r.Arm.grows(),
				runs: map[uint64]record{}}
		}
		byArm[key].add(r)
	}

	for _, r := range byArm {
		r.Loss, r.Deviation = meanAndDeviation(r.runs, func(r record) float64 { return r.Loss })
		r.Tokens, _ = meanAndDeviation(r.runs, func(r record) float64 { return float64(r.Tokens) })
		r.Seconds, _ = meanAndDeviation(r.runs, func(r record) float64 { return r.Seconds })
		r.Seeds = slices.Sorted(maps.Keys(r.runs))
		all = append(all, *r)
	}

	slices.SortFunc(all, func(a, b row) int {
		return cmp.Or(cmp.Compare(a.Equal, b.Equal), cmp.Compare(a.Budget, b.Budget),
			cmp.Compare(min(1, a.Failed)*(1-min(1, len(a.runs))), min(1, b.Failed)*(1-min(1, len(b.runs)))),
			cmp.Compare(a.Loss, b.Loss), cmp.Compare(a.Arm.String(), b.Arm.String()))
	})
	for _, g := range grouped(all) {
		compareWithStatic(g)
	}

	return all
}

// add adds a run to a row. A failed run is only counted.
func (r *row) add(run record) {
	if run.Failed != "" {
		r.Failed++
		return
	}
	r.runs[run.Seed] = run
}

// grouped splits sorted rows by budget.
func grouped(all []row) (groups [][]row) {
	for len(all) > 0 {
		n := 1
		for n < len(all) && all[n].Equal == all[0].Equal && all[n].Budget == all[0].Budget {
			n++
		}
		groups, all = append(groups, all[:n]), all[n:]
	}
	return groups
}

// bestArm returns the index of the wanted row with the lowest mean loss, or -1 if no wanted row has a run. It also returns
// the random seeds of the runs over which it takes the means.
//
// So that means can be compared, all of them are over the same seeds: the largest set of seeds for which some wanted row has
// runs. If given is not nil, only these seeds count. Rows that lack one of the chosen seeds are ignored.
func bestArm(rows []row, given []uint64, wanted func(row) bool) (best int, seeds []uint64) {
	best = -1
	for _, r := range rows {
		own := slices.Sorted(maps.Keys(r.runs))
		if given != nil {
			own = r.among(given)
		}
		more := len(own) > len(seeds) || len(own) == len(seeds) && slices.Compare(own, seeds) < 0
		if wanted(r) && more {
			seeds = own
		}
	}

	if len(seeds) == 0 {
		return -1, nil
	}

	for i, r := range rows {
		if wanted(r) && r.has(seeds) && (best < 0 || r.mean(seeds) < rows[best].mean(seeds)) {
			best = i
		}
	}

	return best, seeds
}

// among returns the given random seeds for which the row has runs.
func (r row) among(seeds []uint64) (own []uint64) {
	for _, seed := range seeds {
		if _, ok := r.runs[seed]; ok {
			own = append(own, seed)
		}
	}
	return own
}

// has reports whether the row has runs with all the given random seeds.
func (r row) has(seeds []uint64) bool { return len(r.among(seeds)) == len(seeds) }

// mean returns the mean loss of the runs with the given random seeds.
func (r row) mean(seeds []uint64) (loss float64) {
	for _, seed := range seeds {
		loss += r.runs[seed].Loss / float64(len(seeds))
	}
	return loss
}

// compareWithStatic compares the rows of a budget with the best static arm, which [bestArm] chooses.
func compareWithStatic(rows []row) {
	best, _ := bestArm(rows, nil, func(r row) bool { return r.Static })
	if best < 0 {
		return
	}

	rows[best].Best = true
	for i := range rows {
		var gain, share float64
		common, reached := 0, 0
		for _, seed := range slices.Sorted(maps.Keys(rows[i].runs)) {
			run := rows[i].runs[seed]
			static, ok := rows[best].runs[seed]
			if !ok {
				continue
			}
			common++
			gain += static.Loss - run.Loss
			if at, ok := run.shareTo(static.Loss); ok {
				reached++
				share += at
			}
		}
		if common == 0 || i == best {
			continue
		}
		gain /= float64(common)
		rows[i].Gain = &gain
		if reached == common {
			share /= float64(common)
			rows[i].Reached = &share
		}
	}
}

// meanAndDeviation returns the mean of a figure over runs, and its standard deviation, which is 0 for
// a single run.
func meanAndDeviation(runs map[uint64]record, figure func(record) float64) (mean, deviation float64) {
	n := float64(len(runs))
	if n == 0 {
		return 0, 0
	}

	seeds := slices.Sorted(maps.Keys(runs)) // adding in the order of a map would change the last bits
	for _, seed := range seeds {
		mean += figure(runs[seed]) / n
	}

	for _, seed := range seeds {
		off := figure(runs[seed]) - mean
		deviation += off * off
	}

	return mean, math.Sqrt(deviation / max(1, n-1))
}

// writeTable writes the rows as Markdown, a table for each budget.
func writeTable(w io.Writer, rows []row) error {
	var b strings.Builder
	for _, g := range grouped(rows) {
		fmt.Fprintf(&b, "\n%g tokens per parameter, equal %s\n\n", g[0].Budget, g[0].Equal)
		b.WriteString("| arm | random seeds | held-out loss, nats per byte | below the best static arm | " +
			"its loss reached at | million tokens | seconds |\n| --- | --- | --- | --- | --- | --- | --- |\n")
		for _, r := range g {
			loss, gain, reached := fmt.Sprintf("%.4f", r.Loss), "", ""
			switch {
			case len(r.runs) == 0:
				loss = "diverged"
			case len(r.runs) > 1:
				loss += fmt.Sprintf(" ± %.4f", r.Deviation)
			}
			if r.Failed > 0 && len(r.runs) > 0 {
				loss += fmt.Sprintf(", and %d diverged", r.Failed)
			}
			switch {
			case r.Best:
				gain = "best static arm"
			case r.Gain != nil:
				gain, reached = fmt.Sprintf("%+.4f", *r.Gain), "never"
				if r.Reached != nil {
					reached = fmt.Sprintf("%.2f", *r.Reached)
				}
			}
			fmt.Fprintf(&b, "| `%v` | %s | %s | %s | %s | %.1f | %.1f |\n", r.Arm, formatList(r.Seeds), loss,
				gain, reached, r.Tokens/1e6, r.Seconds)
		}
	}

	writeRegrets(&b, regrets(rows))
	_, err := io.WriteString(w, b.String())
	return err
}

// report prints the table of the study and, on the last line, the same as JSON. It writes the table
// and a picture into the folder.
func (s *study) report(stdout io.Writer) error {
	rows := s.rows()
	if len(rows) == 0 {
		return errors.New("there are no records of runs in " + s.dir)
	}

	if err := atomicfile.WriteMkdir(s.dir+"/table.md", func(f *os.File) error {
		return writeTable(f, rows)
	}); err != nil {
		return err
	}

	if err := drawGains(s.dir+"/gains.png", rows); err != nil {
		return err
	}

	line, err := json.Marshal(rows)
	if err != nil {
		return err
	}

	if err := writeTable(stdout, rows); err != nil {
		return err
	}

	_, err = fmt.Fprintf(stdout, "\n%s\n", line)
	return err
}
