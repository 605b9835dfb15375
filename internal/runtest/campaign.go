package runtest

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// Flags hold the flags of a test that runs a campaign.
type Flags struct {
	Duration time.Duration // duration of the campaign; 0 for the default of the test
	Seed     uint64        // seed of the first case; 0 for a new one
	Case     string        // the only case: a seed or the JSON of a case
	Cases    int           // number of cases, instead of a duration
	Parallel int           // number of cases at the same time; 0 for the number of processors
	Shrink   time.Duration // time for simplifying a failing case
	All      bool          // continue after a failure
}

// AddFlags registers the flags in the test binary.
func AddFlags() *Flags {
	var f Flags
	flag.DurationVar(&f.Duration, "duration", 0, "how long to generate random runs, instead of the "+
		"test's default time")
	flag.Uint64Var(&f.Seed, "seed", 0, "seed of the first random run (default: a new one, or 1 where CI is set)")
	flag.StringVar(&f.Case, "case", "", "the only random run: its seed, or the JSON of a case")
	flag.IntVar(&f.Cases, "cases", 0, "number of random runs, instead of a duration")
	flag.IntVar(&f.Parallel, "cases-at-once", 0, "number of simultaneous random runs (default: the number of processors)")
	flag.DurationVar(&f.Shrink, "shrink", time.Minute, "how long to simplify a failing run")
	flag.BoolVar(&f.All, "all-failures", false, "continue after a failing run, and list all failures")
	return &f
}

// Plan is the default extent of a campaign. Flags override it.
type Plan struct {
	Usual time.Duration // how long the campaign runs
	Cases int           // how many cases it checks instead; 0 for as many as Usual allows
	Fixed int           // number of cases if CI is set; always the same ones, on any machine
	Long  int           // factor by which [randtest.Long] extends the campaign; 20 if it is 0
	// Change modifies each case, unless it is nil. It returns false to skip the case.
	Change func(*Case) bool
	// Failing counts only cases with a failed operation.
	Failing bool
}

// Campaign checks random cases on a machine and logs how often each property was checked.
func Campaign(t *testing.T, m Device, f Flags, p Plan) {
	t.Helper()
	change := p.Change
	folder := scratch(t)
	if f.Case != "" {
		c, err := caseOf(f.Case, m, change)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%v", c)
		r := Check(c, m, filepath.Join(folder, "case"))
		t.Logf("checked %q; the fault: %s; skipped: %v", r.Checked, r.Outcome, r.Skipped)
		if r.Failure != nil {
			t.Errorf("%v%s", r.Failure, smaller(t, c, m, r.Failure, f, folder))
		}
		return
	}

	if randtest.Long() {
		factor := cmp.Or(p.Long, 20)
		p.Usual, p.Fixed = time.Duration(factor)*p.Usual, factor*p.Fixed
	}

	seed := f.Seed
	duration, cases := cmp.Or(f.Duration, p.Usual), cmp.Or(f.Cases, p.Cases)
	if f.Duration > 0 {
		cases = f.Cases
	}

	switch {
	case seed != 0:
	case os.Getenv("CI") != "":
		// In CI, check the same cases each time, however fast the machine, so that a change is blamed
		// only for failures it causes. Manual runs look for unknown faults.
		seed = 1
		if f.Duration == 0 {
			cases = cmp.Or(cases, p.Fixed)
		}
	default:
		seed = uint64(time.Now().UnixNano()) % 1e12
	}

	t.Logf("random runs from seed %d on: %s -seed %d", seed, command(t), seed)
	began := time.Now()
	var (
		mu     sync.Mutex
		wg     sync.WaitGroup
		next   atomic.Uint64
		counts = newTable()
		found  []finding
	)

	over := func(i uint64) bool {
		mu.Lock()
		defer mu.Unlock()
		if len(found) > 0 && !f.All {
			return true
		}
		if cases > 0 {
			return counts.cases >= cases
		}
		return time.Since(began) > duration
	}

	for range cmp.Or(f.Parallel, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			for {
				i := next.Add(1) - 1
				if over(i) {
					return
				}
				c := Generate(seed+i, m.Limits)
				if change != nil && !change(&c) {
					continue
				}
				own := filepath.Join(folder, fmt.Sprint(i))
				watch := time.AfterFunc(hang, func() {
					panic(fmt.Sprintf("a case hangs: %s -case %d", command(t), c.Seed))
				})
				r := Check(c, m, own)
				watch.Stop()
				_ = os.RemoveAll(own)
				mu.Lock()
				if !p.Failing || r.Outcome != "" || r.Failure != nil {
					counts.add(c, r)
				}
				if r.Failure != nil {
					found = append(found, finding{c, r.Failure, time.Since(began)})
				}
				mu.Unlock()
			}
		})
	}

	wg.Wait()
	if testing.Verbose() {
		t.Logf("%s in %v\n%v", m.Name, time.Since(began).Round(time.Second), counts)
	}

	slices.SortFunc(found, func(a, b finding) int { return cmp.Compare(a.after, b.after) })
	for i, x := range found {
		text := fmt.Sprintf("after %v: %v\nrepeat it with\n\t%s -case %d", x.after.Round(time.Second),
			x.failure, command(t), x.c.Seed)
		if i == 0 || f.All && i < 20 {
			text += smaller(t, x.c, m, x.failure, f, folder)
		}
		t.Error(text)
	}

	if counts.skipped > counts.cases/5+5 {
		t.Errorf("%d of %d cases were impossible: %v", counts.skipped, counts.cases,
			counts.why)
	}
}

// hang is much longer than any case takes, even while other programs use the processors.
const hang = 15 * time.Minute

// finding is a case that has failed.
type finding struct {
	c       Case
	failure *Failure
	after   time.Duration
}

// caseOf parses the value of the flag -case.
func caseOf(text string, m Device, change func(*Case) bool) (c Case, err error) {
	if strings.HasPrefix(text, "{") {
		return Parse(text)
	}

	var seed uint64
	if _, err = fmt.Sscan(text, &seed); err != nil {
		return c, fmt.Errorf("-case %q: want a seed, or the JSON of a case", text)
	}

	if c = Generate(seed, m.Limits); change != nil && !change(&c) {
		return c, fmt.Errorf("-case %d: this test excludes it", seed)
	}

	return c, nil
}

// command returns the command that reproduces a test.
func command(t *testing.T) string {
	folder, err := os.Getwd()
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("go test %s -run '^%s$'", packageOf(folder), strings.ReplaceAll(t.Name(), "/",
		"$/^"))
}

// packageOf returns the path of a folder relative to the module.
func packageOf(folder string) string {
	for up := folder; up != filepath.Dir(up); up = filepath.Dir(up) {
		if _, err := os.Stat(filepath.Join(up, "go.mod")); err == nil {
			if name, err := filepath.Rel(up, folder); err == nil {
				return "./" + filepath.ToSlash(name)
			}
		}
	}
	return "."
}

// smaller describes the smallest case that fails in the same way.
func smaller(t *testing.T, c Case, m Device, failure *Failure, f Flags, folder string) string {
	if f.Shrink <= 0 {
		return ""
	}

	last, tries := failure, 0
	least := Shrink(c, func(c Case) bool {
		tries++
		own := filepath.Join(folder, fmt.Sprint("shrink-", tries))
		defer os.RemoveAll(own)
		for range 3 { // unequal runs may be equal by chance
			if r := Check(c, m, own); r.Failure != nil && r.Failure.Property == failure.Property &&
				panics(r.Failure) == panics(failure) {
				last = r.Failure
				return true
			} else if failure.Property != Repeats {
				return false
			}
			os.RemoveAll(own)
		}
		return false
	}, f.Shrink)

	return fmt.Sprintf("\nthe smallest such case (%d tried):\n\t%s -case '%v'\nfails with: %v", tries,
		command(t), least, last)
}

func panics(f *Failure) bool { return strings.HasPrefix(f.Err.Error(), "panic: ") }

// scratch returns a folder for the files of runs. The folder is in memory if the system supports it,
// because the runs write and sync thousands of files.
func scratch(t *testing.T) string {
	const memory = "/dev/shm"
	if s, err := os.Stat(memory); err == nil && s.IsDir() {
		if folder, err := os.MkdirTemp(memory, "runtest"); err == nil {
			t.Cleanup(func() { os.RemoveAll(folder) })
			return folder
		}
	}
	return t.TempDir()
}

// table counts cases by property and by feature.
type table struct {
	cases, skipped int
	why            map[string]int
	properties     map[string]int
	features       map[string]map[string]int
	total          map[string]int
	outcomes       map[string]int
}

func newTable() *table {
	return &table{properties: map[string]int{}, features: map[string]map[string]int{},
		total: map[string]int{}, outcomes: map[string]int{},
		why: map[string]int{}}
}

func (t *table) add(c Case, r Result) {
	t.cases++
	if r.Skipped != nil {
		t.skipped++
		t.why[r.Skipped.Error()]++
		return
	}

	if r.Outcome != "" {
		t.outcomes[r.Outcome]++
	}

	for _, p := range r.Checked {
		t.properties[p]++
	}

	for _, f := range c.Features() {
		t.total[f]++
		if t.features[f] == nil {
			t.features[f] = map[string]int{}
		}
		for _, p := range r.Checked {
			t.features[f][p]++
		}
	}
}

// String returns the counts as a table with a row per feature and a column per property.
func (t *table) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d cases, %d of them impossible\n", t.cases, t.skipped)
	for _, why := range slices.Sorted(maps.Keys(t.why)) {
		fmt.Fprintf(&text, "impossible, %d times: %.200s\n", t.why[why], why)
	}

	for i, p := range Properties {
		fmt.Fprintf(&text, "(%d) %s: checked %d times\n", i+1, p, t.properties[p])
	}

	for _, o := range slices.Sorted(maps.Keys(t.outcomes)) {
		fmt.Fprintf(&text, "after a failure, %s: %d times\n", o, t.outcomes[o])
	}

	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "feature\tcases\t")
	for i := range Properties {
		fmt.Fprintf(w, "(%d)\t", i+1)
	}

	fmt.Fprintln(w)
	for _, f := range slices.Sorted(maps.Keys(t.total)) {
		fmt.Fprintf(w, "%s\t%d\t", f, t.total[f])
		for _, p := range Properties {
			fmt.Fprintf(w, "%d\t", t.features[f][p])
		}
		fmt.Fprintln(w)
	}

	w.Flush()
	return text.String()
}
