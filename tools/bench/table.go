package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// printTable writes the results in files as Markdown tables, one for kernels and one for training
// steps. Each name has a row, in order of first appearance. The share relates to the fastest copy or
// product that any program measured. Copies are named copy_..., products gemm_8192_..., and the peak of
// a CPU's multiply-adds fma_peak_....
func printTable(w io.Writer, files []string) error {
	if len(files) == 0 {
		return errors.New(
			"-table needs files of JSON lines, the output of this program and of the programs in peers")
	}

	var all []result
	for _, f := range files {
		lines, err := readResults(f)
		if err != nil {
			return err
		}
		all = append(all, lines...)
	}

	b := bufio.NewWriter(w)
	for _, r := range all {
		if r.Bench == whereabouts {
			if r.Driver != "" {
				r.Driver = "driver " + r.Driver
			}
			if r.Command != "" {
				r.Command = "`" + r.Command + "`"
			}
			fmt.Fprintf(b, "- %s: %s\n", r.Peer,
				strings.Join(present(r.Card, r.Driver, r.Versions, r.Date, r.Command), ", "))
		}
	}

	for _, training := range []bool{false, true} {
		var names []string
		for _, r := range all {
			if r.Bench != whereabouts && r.TokensPS > 0 == training &&
				!slices.Contains(names, r.Bench) {
				names = append(names, r.Bench)
			}
		}
		if len(names) > 0 {
			printRows(b, all, names)
		}
	}

	return b.Flush()
}

// printRows writes a table of the named measurements.
func printRows(w io.Writer, all []result, names []string) {
	fmt.Fprint(w,
		"\n| measurement | this project | baselines | ratio to the best baseline | share of the ceiling |\n",
		"| --- | --- | --- | --- | --- |\n")
	bandwidth, arithmetic := ceilingsOf(all)
	for _, name := range names {
		ours, peers := entries(all, name)
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s |\n", name, orDash(ours.String()),
			describe(peers), ratio(ours, peers),
			share(ours, bandwidth, arithmetic))
	}
}

// readResults reads a file of JSON lines.
func readResults(path string) ([]result, error) {
	f, _, err := regular.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()

	var all []result
	s := bufio.NewScanner(f)
	for n := 1; s.Scan(); n++ {
		if len(strings.TrimSpace(s.Text())) == 0 {
			continue
		}
		var r result
		if err := json.Unmarshal(s.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", path, n, err)
		}
		if r.Bench == "" || r.Peer == "" {
			return nil, fmt.Errorf("%s, line %d: bench or peer is missing: %s", path, n,
				s.Text())
		}
		all = append(all, r)
	}

	return all, s.Err()
}

// entries returns this project's measurement of a name, and the measurements of the peers, the fastest
// first. The last measurement of each program counts.
func entries(all []result, name string) (ours result, peers []result) {
	for _, r := range all {
		if r.Bench != name {
			continue
		}
		if r.Peer == project {
			ours = r
			continue
		}
		peers = slices.DeleteFunc(peers, func(p result) bool { return p.Peer == r.Peer })
		peers = append(peers, r)
	}

	slices.SortStableFunc(peers, func(a, b result) int { return cmp.Compare(a.Us, b.Us) })
	return ours, peers
}

// ceilingsOf returns the bandwidth of a copy in GB/s and the peak of arithmetic in TFLOP/s. Either is 0
// if it was not measured.
func ceilingsOf(all []result) (bandwidth, arithmetic float64) {
	for _, r := range all {
		switch {
		case strings.HasPrefix(r.Bench, "copy_"):
			bandwidth = max(bandwidth, r.GBps)
		case strings.HasPrefix(r.Bench, "gemm_8192_"), strings.HasPrefix(r.Bench, "fma_peak_"):
			arithmetic = max(arithmetic, r.TFLOPs)
		}
	}
	return bandwidth, arithmetic
}

// String returns the rate, the time and the memory of a measurement.
func (r result) String() string {
	var rate string
	switch {
	case r.TokensPS > 0:
		rate = fmt.Sprintf("%.0f tokens/s", r.TokensPS)
	case r.GBps > 0:
		rate = fmt.Sprintf("%.*f GB/s", decimals(r.GBps), r.GBps)
	case r.TFLOPs > 0:
		rate = fmt.Sprintf("%.*f TFLOP/s", decimals(r.TFLOPs), r.TFLOPs)
	}

	var took string
	switch {
	case r.Us >= 1e4:
		took = fmt.Sprintf("%.1f ms", r.Us/1e3)
	case r.Us > 0:
		took = fmt.Sprintf("%.0f µs", r.Us)
	}

	var memory string
	if r.PeakGiB > 0 {
		memory = fmt.Sprintf("%.1f GiB", r.PeakGiB)
	}

	var extra string
	if r.ExtraGiB > 0 {
		extra = fmt.Sprintf("%.2f GiB extra", r.ExtraGiB)
	}

	return strings.Join(present(rate, took, memory, extra), ", ")
}

// decimals returns the number of decimals for a rate, so that it has at least three digits.
func decimals(x float64) int {
	switch {
	case x >= 100:
		return 0
	case x >= 10:
		return 1
	case x >= 1:
		return 2
	}
	return 3
}

func describe(peers []result) string {
	var all []string
	for _, p := range peers {
		all = append(all, p.Peer+": "+p.String())
	}
	return orDash(strings.Join(all, "; "))
}

// ratio returns the speed of this project relative to the best peer.
func ratio(ours result, peers []result) string {
	if ours.Us == 0 || len(peers) == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f", peers[0].Us/ours.Us)
}

func share(r result, bandwidth, arithmetic float64) string {
	switch {
	case r.GBps > 0 && bandwidth > 0:
		return fmt.Sprintf("%.0f%%", 100*r.GBps/bandwidth)
	case r.TFLOPs > 0 && arithmetic > 0:
		return fmt.Sprintf("%.0f%%", 100*r.TFLOPs/arithmetic)
	}
	return "–"
}

// present returns the strings that are not empty.
func present(s ...string) []string {
	return slices.DeleteFunc(s, func(s string) bool { return s == "" })
}

func orDash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}
