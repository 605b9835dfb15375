package forgetting

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
)

// shares lists fractions of LoRA's largest gain on the new text. summarize compares forgetting at each
// fraction.
var shares = []float64{0.5, 0.7, 0.9}

// A frontier holds the best points of a method of tuning: for each loss on the new text, the smallest rise
// of the loss on the old text. Losses on the new text decrease along the frontier, and rises increase.
type frontier []point

// newFrontier returns the frontier of the points. Their Old field holds the rise rather than the loss.
func newFrontier(all []point) (f frontier) {
	slices.SortFunc(all, func(a, b point) int { return cmp.Or(cmp.Compare(a.Old, b.Old), cmp.Compare(a.New, b.New)) })
	for _, p := range all {
		if len(f) == 0 || p.New < f[len(f)-1].New {
			f = append(f, p)
		}
	}
	return f
}

// at returns the rise at a loss on the new text, interpolated linearly, or NaN if the frontier does not
// reach the loss.
func (f frontier) at(loss float64) float64 {
	i := slices.IndexFunc(f, func(p point) bool { return p.New <= loss })
	switch {
	case i < 0:
		return math.NaN()
	case i == 0:
		return f[0].Old
	}
	a, b := f[i-1], f[i]
	return a.Old + (b.Old-a.Old)*(a.New-loss)/(a.New-b.New)
}

// A summary describes a method of tuning across all seeds.
type summary struct {
	Arm    string  `json:"arm"`
	Params int     `json:"params"`
	Best   float64 `json:"best_new_loss"` // mean over the seeds of the best loss on the new text
	Rise   float64 `json:"rise_there"`    // mean rise on the old text at the best loss

	// Ratios compares the rise with LoRA's frontier over all ranks at each of the shares. It holds the
	// mean, smallest and largest ratio over the seeds, or nulls if some seed does not reach the loss.
	Ratios [][3]*float64 `json:"ratios"`
}

// curvesOf returns the frontiers by method of tuning and seed. The name "" represents LoRA at all ranks.
func curvesOf(records []record) map[string]map[uint64]frontier {
	points := map[string]map[uint64][]point{}
	add := func(name string, r record) {
		if points[name] == nil {
			points[name] = map[uint64][]point{}
		}
		list := append(points[name][r.Seed], point{New: r.Base.New})
		for _, p := range r.Points {
			list = append(list, point{p.Step, p.New, p.Old - r.Base.Old})
		}
		points[name][r.Seed] = list
	}
	for _, r := range records {
		add(r.Arm, r)
		if slices.ContainsFunc(arms(), func(a arm) bool { return a.name == r.Arm && a.plain() }) {
			add("", r)
		}
	}

	curves := map[string]map[uint64]frontier{}
	for name, bySeed := range points {
		curves[name] = map[uint64]frontier{}
		for seed, list := range bySeed {
			curves[name][seed] = newFrontier(list)
		}
	}
	return curves
}

// summarize compares the methods of tuning.
func summarize(records []record) (all []summary) {
	curves := curvesOf(records)
	for _, a := range arms() {
		bySeed := curves[a.name]
		if bySeed == nil {
			continue
		}

		s := summary{Arm: a.name, Ratios: make([][3]*float64, len(shares))}
		for _, r := range records {
			if r.Arm == a.name {
				s.Params = max(s.Params, r.Params)
			}
		}
		ratios := make([][]float64, len(shares))
		for _, seed := range slices.Sorted(maps.Keys(bySeed)) {
			f := bySeed[seed]
			last := f[len(f)-1]
			s.Best += last.New / float64(len(bySeed))
			s.Rise += last.Old / float64(len(bySeed))
			lora := curves[""][seed]
			if len(lora) < 2 {
				continue
			}
			for i, share := range shares {
				loss := lora[0].New - share*(lora[0].New-lora[len(lora)-1].New)
				ratios[i] = append(ratios[i], f.at(loss)/lora.at(loss))
			}
		}
		for i, list := range ratios {
			if len(list) < len(bySeed) || slices.ContainsFunc(list, math.IsNaN) {
				continue
			}
			mean := 0.0
			for _, r := range list {
				mean += r / float64(len(list))
			}
			least, most := slices.Min(list), slices.Max(list)
			s.Ratios[i] = [3]*float64{&mean, &least, &most}
		}
		all = append(all, s)
	}
	return all
}

// report prints the table, draws the picture, and prints the JSON object.
func report(picture string, records []record, w io.Writer) error {
	all := summarize(records)
	fmt.Fprintf(w, "| method | parameters | best new loss | rise of the old loss there | forgetting relative to LoRA "+
		"at 50%% of its gain | 70%% | 90%% |\n|---|---:|---:|---:|---:|---:|---:|\n")
	for _, s := range all {
		fmt.Fprintf(w, "| %s | %d | %.3f | %.3f |", s.Arm, s.Params, s.Best, s.Rise)
		for _, r := range s.Ratios {
			if r[0] == nil {
				fmt.Fprint(w, " not reached |")
			} else {
				fmt.Fprintf(w, " %.2f (%.2f to %.2f) |", *r[0], *r[1], *r[2])
			}
		}
		fmt.Fprintln(w)
	}

	if err := draw(picture, records); err != nil {
		return err
	}
	fmt.Fprintf(w, "picture   %s\n", picture)

	line, err := json.Marshal(map[string]any{"runs": len(records), "picture": picture, "arms": all})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", line)
	return err
}
