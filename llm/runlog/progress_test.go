package runlog

import (
	"errors"
	"io"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/internal/eventtest"
	"github.com/kasmina-go/kasmina/state"
)

// TestProgressInAFile checks that progress written to a file consists of whole lines.
func TestProgressInAFile(t *testing.T) {
	var out strings.Builder
	eventtest.Send(t, Progress(&out), eventtest.Run(20, 40)...)
	want := `training 1,234,567 parameters and 64 seeds from step 20 to step 40
[==========>         ] 21/40  loss 0.2381  0:29 left  667 tok/s
[============>       ] 25/40  loss 0.2000  val 0.7000  0:23 left  667 tok/s
[===============>    ] 30/40  loss 0.1667  val 0.6667  0:15 left  667 tok/s
[=================>  ] 35/40  loss 0.1429  val 0.6429  0:08 left  667 tok/s
[====================] 40/40  loss 0.1250  val 0.6250  0:00 left  667 tok/s
`

	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

// TestProgressOnATerminal interprets carriage returns as a terminal does, because lines overwrite each
// other, and compares the resulting screen.
func TestProgressOnATerminal(t *testing.T) {
	var out strings.Builder
	p := &progress{w: &out, terminal: true}
	events := eventtest.Run(0, 10)
	last := events[len(events)-1]
	sampled := last
	sampled.Kind, sampled.Text = llm.Sampled, "fun\x1b[2Jc\xff"
	failed := last
	failed.Err = errors.New("loss is NaN")
	for _, e := range append(events[:len(events)-1], sampled, failed) {
		p.event(e)
	}

	screen := []string{""}
	column := 0
	for _, c := range out.String() {
		switch c {
		case '\n':
			screen, column = append(screen, ""), 0
		case '\r':
			column = 0
		default:
			line := []rune(screen[len(screen)-1])
			line = append(line[:column], append([]rune{c}, line[min(column+1, len(line)):]...)...)
			screen[len(screen)-1] = string(line)
			column++
		}
	}

	for i := range screen {
		screen[i] = strings.TrimRight(screen[i], " ")
	}

	want := []string{
		"training 1,234,567 parameters and 64 seeds to step 10",
		"sample",
		"fun\ufffd[2Jc\ufffd",
		"[====================] 10/10  loss 0.5000  val 1.0000  0:00 left  667 tok/s",
		"stopped after step 10: loss is NaN",
		"",
	}

	if got := strings.Join(screen, "\n"); got != strings.Join(want, "\n") {
		t.Errorf("the terminal shows\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}

	if redraws := strings.Count(out.String(), "\r["); redraws < 10 {
		t.Errorf("the bar is drawn %d times in 10 steps of 1.5 s", redraws)
	}
}

// TestProgressIsNotTooOften checks that fast steps do not flood the terminal.
func TestProgressIsNotTooOften(t *testing.T) {
	for _, terminal := range []bool{true, false} {
		var out strings.Builder
		p := &progress{w: &out, terminal: terminal}
		e := llm.Event{Kind: llm.StepEnd, Steps: 10000}
		for e.Step < 10000 { // one second
			e.Step++
			e.Elapsed += 100 * time.Microsecond
			p.event(e)
		}
		bars, limit := strings.Count(out.String(), "["), 11
		if !terminal {
			limit = 1
		}
		if bars < 1 || bars > limit {
			t.Errorf("terminal %t: %d bars in a second, want at most %d", terminal, bars, limit)
		}
	}
}

func TestProgressFitsALine(t *testing.T) {
	for _, e := range []llm.Event{
		{Step: 5, Steps: 10, Loss: 1, Elapsed: time.Second},
		{Step: 120000, Steps: 1200000, Loss: 12.5, RunTokens: 1e9, Elapsed: 9 * time.Hour,
			ValBPB: 13.5},
		{Step: 1, Steps: math.MaxInt, Loss: math.MaxFloat64, Elapsed: 1, RunTokens: math.MaxInt64,
			ValBPB: 1e300},
		{Step: 12, Steps: 3, Loss: math.NaN(), Elapsed: time.Second, ValBPB: math.Inf(1)},
	} {
		if bar := new(progress).bar(e); len(bar) > 79 {
			t.Errorf("%d characters: %s", len(bar), bar)
		}
		for columns := range 90 {
			p := &progress{columns: func() int { return columns }}
			if bar := p.bar(e); columns > 0 && len(bar) > columns-1 {
				t.Errorf("%d characters on a terminal of %d: %s", len(bar), columns, bar)
			}
		}
	}
}

// TestProgressOnANarrowTerminal checks that the bar is always narrower than the terminal, even after the
// terminal has shrunk, and that the losses are the last figures to be omitted.
func TestProgressOnANarrowTerminal(t *testing.T) {
	var out strings.Builder
	columns := 70
	p := &progress{w: &out, terminal: true, columns: func() int { return columns }}
	for i, e := range eventtest.Run(0, 10) {
		if i > 6 {
			columns = 40
		}
		from := out.Len()
		p.event(e)
		for line := range strings.FieldsFuncSeq(out.String()[from:], func(r rune) bool {
			return r == '\r' || r == '\n'
		}) {
			if !strings.HasPrefix(line, "training") && len(line) >= columns {
				t.Errorf("%d characters on a terminal of %d: %q", len(line), columns, line)
			}
		}
	}

	require.Contains(t, out.String(), "10/10  loss 0.5000  val 1.0000")
}

// TestProgressOfAFrozenModel checks that trainable parameters are distinguished from the total.
func TestProgressOfAFrozenModel(t *testing.T) {
	var out strings.Builder
	eventtest.Send(t, Progress(&out),
		llm.Event{Kind: llm.RunStart, Steps: 9, Params: 0, AllParams: 126588},
		llm.Event{Kind: llm.Reshaped, Text: "grown", Params: 24552, AllParams: 151140},
		llm.Event{Kind: llm.RunStart, Step: 3, Steps: 9, Params: 24552, AllParams: 151140})
	require.Equal(t, `training only blueprints, in a frozen model of 126,588 parameters to step 9
growth    grown
training 24,552 of 151,140 parameters (16%)
training 24,552 of 151,140 parameters (16%) from step 3 to step 9
`, out.String())
}

// TestProgressFollowsGrowth checks that speed and remaining time are measured from the last growth. The
// steps take one second before the growth and three seconds after it.
func TestProgressFollowsGrowth(t *testing.T) {
	p := &progress{w: io.Discard}
	e := llm.Event{Kind: llm.RunStart, Steps: 20}
	p.event(e)
	step := func(took time.Duration) {
		e.Kind, e.Step, e.RunTokens, e.Elapsed = llm.StepEnd, e.Step+1, e.RunTokens+300,
			e.Elapsed+took
		p.event(e)
	}
	for range 10 {
		step(time.Second)
	}

	require.Contains(t, p.bar(e), " 0:10 left  300 tok/s")
	e.Kind, e.Err = llm.Reshaped, errors.New("no room")
	p.event(e)
	require.Contains(t, p.bar(e), " 0:10 left  300 tok/s")
	e.Err = nil
	p.event(e)
	require.NotContains(t, p.bar(e), "left")
	step(3 * time.Second)
	require.Contains(t, p.bar(e), " 0:27 left  100 tok/s")
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestProgressReportsAFailedWrite(t *testing.T) {
	if err := Progress(fullDisk{})(llm.Event{Kind: llm.RunStart}); err == nil ||
		!strings.Contains(err.Error(), "no space left") {
		t.Errorf("got %v", err)
	}
}

func TestIsTerminal(t *testing.T) {
	f, err := os.Create(t.TempDir() + "/x")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	if isTerminal(f) || isTerminal(&strings.Builder{}) {
		t.Error("a file passes for a terminal")
	}

	// The null device is a character device, like a terminal.
	device, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()

	if !isTerminal(struct{ *os.File }{device}) {
		t.Error("a writer to a terminal does not pass for one")
	}
}

func TestNumbersForPeople(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{rate(0), "0"}, {rate(999.4), "999"}, {rate(12345), "12.3k"}, {rate(1.2e6), "1.20M"},
		{clock(0), "0:00"},
		{clock(59*time.Second + 600*time.Millisecond), "1:00"}, {clock(-time.Second), "0:00"},
		{clock(26*time.Hour + 61*time.Second), "26:01:01"},
		{thousands(0), "0"}, {thousands(999), "999"}, {thousands(1000), "1,000"},
		{thousands(1234567), "1,234,567"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

// TestProgressSeeds checks that the bar counts the growing seeds by stage. It omits the counts if no
// seed is growing or the line is too short for every stage.
func TestProgressSeeds(t *testing.T) {
	var out strings.Builder
	report := func(stages ...state.Stage) llm.Event {
		r := state.Report{}
		for i, s := range stages {
			r.Seeds = append(r.Seeds, state.SeedReport{Seed: i, Stage: s})
		}
		return llm.Event{Kind: llm.EpochEnd, Step: 1, Steps: 9, Reports: []state.Report{r, r}}
	}

	eval := llm.Event{Kind: llm.EvalEnd, Step: 1, Steps: 9, Loss: 1.5, ValLoss: 2, Elapsed: time.Second,
		RunTokens: 1000}
	eventtest.Send(t, Progress(&out), report(state.Dormant, state.Dormant), eval,
		report(state.Training, state.Grafting, state.Dormant, state.Culled), eval,
		report(state.Germinated, state.Training, state.Grafting,
			state.Stabilization, state.Evaluating,
			state.FineTuning, state.Fossilized), eval)
	lines := strings.Split(out.String(), "\n")
	require.Contains(t, lines[1], "2 train 2 graft")
	require.NotContains(t, lines[0]+lines[2], "train")
	for _, l := range lines {
		require.LessOrEqual(t, len(l), 79, l)
	}
}
