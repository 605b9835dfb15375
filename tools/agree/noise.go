package main

import (
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strings"
)

// noise prints, for each span of steps, the differences between the mean losses of the programs over
// several runs. It also prints the variation between the runs of each program, as mean ± standard
// deviation. It returns an error if two means differ by more than the larger of their deviations.
func noise(dirs []string, span int, out io.Writer) error {
	switch {
	case len(dirs) < 2:
		return fmt.Errorf("noise: the folders are %q, want at least 2 runs", dirs)
	case span < 1:
		return fmt.Errorf("noise: -span is %d, want at least 1", span)
	}

	names, err := programs(dirs)
	if err != nil {
		return err
	}

	losses := make([][][]float64, len(names)) // [program][run][span]
	for i, name := range names {
		for _, dir := range dirs {
			path := filepath.Join(dir, lossPrefix+name+".json")
			var l []float64
			if err := readJSON(path, &l); err != nil {
				return err
			}

			l = averages(l, span)
			losses[i] = append(losses[i], l)

			// The first run of the first program determines the number of spans.
			if want := len(losses[0][0]); len(l) != want || want == 0 {
				return fmt.Errorf("%s has %d spans of %d steps, but the previous run has %d; want "+
					"the same number, and at least 1", path, len(l), span, want)
			}
		}
	}

	return spread(names, losses, span, out)
}

// programs returns the names of the programs, which must be the same in all folders.
func programs(dirs []string) ([]string, error) {
	var names []string
	for i, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(dir, lossPrefix+"*.json"))
		if err != nil {
			return nil, err
		}
		var here []string
		for _, f := range files {
			here = append(here, strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), lossPrefix),
				".json"))
		}
		slices.Sort(here)
		if i == 0 {
			names = here
		}
		if len(here) < 2 || !slices.Equal(names, here) {
			return nil, fmt.Errorf(
				"%s has the losses of %q and %s of %q, want the same, and at least 2 programs",
				dirs[0], names, dir, here)
		}
	}

	return names, nil
}

// averages returns the mean loss of each complete span of steps.
func averages(l []float64, span int) []float64 {
	var means []float64
	for c := range slices.Chunk(l, span) {
		if len(c) == span {
			m, _ := moments(c)
			means = append(means, m)
		}
	}
	return means
}

// moments returns the mean and the standard deviation of a sample.
func moments(x []float64) (mean, deviation float64) {
	for _, v := range x {
		mean += v / float64(len(x))
	}
	for _, v := range x {
		deviation += (v - mean) * (v - mean) / float64(len(x)-1)
	}
	return mean, math.Sqrt(deviation)
}

// spread prints the table of noise, and returns its error.
func spread(names []string, losses [][][]float64, span int, out io.Writer) error {
	fmt.Fprintf(out, "%5s", "step")
	for _, n := range names {
		fmt.Fprintf(out, " %24s", n)
	}

	fmt.Fprintf(out, " %10s\n", "differ by")
	worst, where := 0.0, 0
	for t := range losses[0][0] {
		lastStep := (t + 1) * span
		fmt.Fprintf(out, "%5d", lastStep)

		least, most, deviation := math.Inf(1), math.Inf(-1), 0.0 // of the means; largest deviation
		for _, runs := range losses {
			var l []float64
			for _, run := range runs {
				l = append(l, run[t])
			}

			m, d := moments(l)
			least, most, deviation = min(least, m), max(most, m), max(deviation, d)
			fmt.Fprintf(out, "      %.5f ± %8.5f", m, d)
		}
		fmt.Fprintf(out, " %10.5f\n", most-least)

		// Without a difference, the ratio is 0/0 if all runs agree.
		if ratio := (most - least) / deviation; most > least && ratio > worst {
			worst, where = ratio, lastStep
		}
	}

	fmt.Fprintf(out,
		"the means differ by at most %.2f deviations, in the span up to step %d\n", worst,
		where)
	if worst > 1 {
		return fmt.Errorf("noise: in the span up to step %d, the means of the programs differ by %.2f standard "+
			"deviations of the runs, more than 1", where, worst)
	}

	return nil
}
