package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// slack is the tolerated slowdown of an op or a step.
const slack = 0.03

// earlier holds the results of an earlier run on this machine.
type earlier struct {
	path  string
	card  string
	lines []result
}

// readEarlier reads the results of one machine. Results of several machines are an error.
func readEarlier(path string) (*earlier, error) {
	lines, err := readResults(path)
	if err != nil {
		return nil, err
	}

	e := &earlier{path: path, lines: lines}
	for _, r := range lines {
		if r.Bench != whereabouts || r.Peer != project {
			continue
		}
		if e.card != "" && r.Card != e.card {
			return nil, fmt.Errorf(
				"-against %s: it has runs on %s and on %s, want those of one machine",
				path, e.card, r.Card)
		}
		e.card = r.Card
	}

	if e.card == "" {
		return nil, fmt.Errorf("-against %s: no line names the machine: want the complete output of this "+
			"program, including its first line (%q: %q)", path, "bench",
			whereabouts)
	}

	return e, nil
}

// fits returns an error if the first line of this run names another machine than the earlier run.
func (e *earlier) fits(run result) error {
	if e == nil || e.card == run.Card {
		return nil
	}
	return fmt.Errorf("-against %s: measured on %s, but this is %s, and times of different machines "+
		"cannot be compared: measure the earlier version here", e.path, e.card,
		run.Card)
}

// A measurement is the time of an op or a step in both runs, in microseconds.
type measurement struct {
	name        string
	before, now float64
}

func (m measurement) slower() float64 { return m.now/m.before - 1 }

// compare writes a table of everything that became slower by more than slack. A row in it is an error.
func (e *earlier) compare(w io.Writer, now []result) error {
	before, after := fastest(e.lines), fastest(now)
	var both, slower []measurement
	for name, us := range after {
		if was, ok := before[name]; ok {
			both = append(both, measurement{name, was, us})
		}
	}

	if len(both) == 0 {
		return fmt.Errorf("-against %s: the file shares no measurement with this run: measure the same "+
			"-groups and -models", e.path)
	}

	for _, m := range both {
		if m.slower() > slack {
			slower = append(slower, m)
		}
	}

	fmt.Fprintf(w, "\n%d compared with %s, %d slower by more than %.0f%%, %d not in both\n",
		len(both), e.path, len(slower),
		100*slack, len(before)+len(after)-2*len(both))
	if len(slower) == 0 {
		return nil
	}

	slices.SortFunc(slower, func(a, b measurement) int {
		return cmp.Or(cmp.Compare(b.slower(), a.slower()), cmp.Compare(a.name, b.name))
	})
	fmt.Fprint(w, "\n| what | before | now | slower by |\n| --- | --- | --- | --- |\n")
	var names []string
	for _, m := range slower {
		fmt.Fprintf(w, "| %s | %.1f µs | %.1f µs | %.1f%% |\n", m.name, m.before,
			m.now, 100*m.slower())
		names = append(names, m.name)
	}

	return errors.New("slower than before: " + strings.Join(names, ", "))
}

// fastest returns the shortest time of each of this project's measurements, by name.
func fastest(all []result) map[string]float64 {
	times := map[string]float64{}
	for _, r := range all {
		if r.Us <= 0 || r.Peer != project && !strings.HasPrefix(r.Peer, project+"_") {
			continue
		}
		name := r.Bench + strings.TrimPrefix(r.Peer, project)
		if t, ok := times[name]; !ok || r.Us < t {
			times[name] = r.Us
		}
	}

	return times
}
