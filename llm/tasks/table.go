package tasks

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// WriteTable writes results as a table, with four decimals, like lm-eval.
func WriteTable(w io.Writer, results []Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "task\tversion\titems\tfew-shot\tfilter\tmetric\tvalue\t± standard error")
	for _, r := range results {
		writeRows(t, r, "")
	}
	return t.Flush()
}

// writeRows writes the rows of a result and of its groups.
func writeRows(w io.Writer, r Result, indent string) {
	for i, m := range r.Metrics {
		head := fmt.Sprintf("%s%s\t%d\t%d\t%d", indent, r.Task, r.Version, r.Items, r.FewShot)
		if i > 0 {
			head = "\t\t\t"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", head, m.Filter, m.Name, decimals(m.Value), decimals(m.Deviation))
	}
	for _, g := range r.Groups {
		writeRows(w, g, indent+"  ")
	}
}

// decimals returns a number with four decimals.
func decimals(x float64) string {
	if v, ok := number(x).(float64); ok {
		return fmt.Sprintf("%.4f", v)
	}
	return fmt.Sprint(number(x))
}
