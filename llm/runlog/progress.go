package runlog

import (
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// Progress returns a callback that shows a progress bar, the samples, and notable events.
//
// The bar contains the step, the training loss and the latest held-out loss (both in nats per token), the
// remaining time, the speed, and the number of growing seeds by stage. If the line is too short for
// everything, the last figures are omitted.
//
// On a terminal, the bar is redrawn in place at most ten times per second. To any other writer, such
// as a file, a line is written after each evaluation and otherwise every ten seconds.
func Progress(w io.Writer) llm.Callback {
	p := &progress{w: w, terminal: isTerminal(w), columns: columnsOf(w)}
	return func(e llm.Event) error {
		p.event(e)
		if p.err != nil {
			return fmt.Errorf("runlog: Progress: %w", p.err)
		}
		return nil
	}
}

const (
	redrawEvery = 100 * time.Millisecond
	lineEvery   = 10 * time.Second
	lineWidth   = 79
)

type progress struct {
	w        io.Writer
	terminal bool
	columns  func() int    // width of the terminal; nil if it is unknown
	start    int           // first step of this process
	since    llm.Event     // start of the current pace, which is the start of the run or the last growth
	step     int           // step of the last bar
	drawn    time.Duration // Elapsed of the last bar
	seeds    string        // growing seeds by stage, "" if there are none
	width    int           // characters of the bar on the terminal's current line
	err      error         // first write error
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(interface{ Stat() (os.FileInfo, error) }) // an *os.File or a wrapper of one
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// columnsOf returns a function that returns the width of w's terminal, or nil if w isn't a terminal.
func columnsOf(w io.Writer) func() int {
	f, ok := w.(interface{ Fd() uintptr })
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}

	return func() int {
		columns, _, err := term.GetSize(int(f.Fd()))
		if err != nil {
			return 0
		}
		return columns
	}
}

func (p *progress) event(e llm.Event) {
	switch e.Kind {
	case llm.RunStart:
		p.start, p.step, p.drawn, p.width, p.seeds = e.Step, -1, 0, 0, ""
		p.since = e
		from := ""
		if e.Step > 0 {
			from = fmt.Sprintf(" from step %d", e.Step)
		}
		to := fmt.Sprintf("to step %d", e.Steps)
		if e.Budget != (llm.Budget{}) {
			to = fmt.Sprintf("for %v", e.Budget)
		}
		seeds := ""
		switch {
		case e.Seeds == 1:
			seeds = " and 1 seed"
		case e.Seeds > 1:
			seeds = fmt.Sprintf(" and %s seeds", thousands(e.Seeds))
		}
		p.line(fmt.Sprintf("training %s%s%s %s", parameters(e), seeds, from, to))
	case llm.Reshaped:
		p.line(reshaped(e))
		if e.Err == nil {
			p.since = e
			if 0 < e.Params && e.Params < e.AllParams {
				p.line("training " + parameters(e))
			}
		}
	case llm.Noted:
		p.line(printable(e.Text))
	case llm.EpochEnd:
		p.seeds = growing(e.Reports)
	case llm.StepEnd:
		every := lineEvery
		if p.terminal {
			every = redrawEvery
		}
		if e.Elapsed-p.drawn >= every || e.Step == p.start+1 {
			p.draw(e)
		}
	case llm.EvalEnd:
		p.draw(e)
	case llm.Sampled:
		p.line("sample\n" + printable(e.Text))
	case llm.RunEnd:
		if p.terminal {
			p.draw(e)
			p.write("\n")
			p.width = 0
		} else if p.step != e.Step {
			p.draw(e)
		}
		if e.Err != nil {
			p.line(fmt.Sprintf("stopped after step %d: %v", e.Step, e.Err))
		}
	}
}

// draw writes the bar.
func (p *progress) draw(e llm.Event) {
	p.step, p.drawn = e.Step, e.Elapsed
	if p.terminal {
		p.write("\r" + p.padded(p.bar(e)))
	} else {
		p.write(p.bar(e) + "\n")
	}
}

// line writes lines in place of the bar. The next draw writes the bar below them.
func (p *progress) line(s string) {
	if p.terminal && p.width > 0 {
		p.write("\r" + p.padded("") + "\r")
		p.width = 0
	}
	p.write(s + "\n")
}

// padded appends spaces to s so that it covers the bar on the current line. Unlike escape codes, this
// works on every terminal. It adds none beyond the width of the terminal, which may have shrunk.
func (p *progress) padded(s string) string {
	n := utf8.RuneCountInString(s)
	s += strings.Repeat(" ", max(0, min(p.width, p.room())-n))
	p.width = n
	return s
}

// room returns the maximum length of the bar. Terminals wrap a line that fills their width, and a
// two-line bar cannot be redrawn in place.
func (p *progress) room() int {
	if p.columns != nil {
		if n := p.columns(); n > 0 {
			return min(lineWidth, n-1)
		}
	}
	return lineWidth
}

func (p *progress) write(s string) {
	if p.err == nil {
		_, p.err = io.WriteString(p.w, s)
	}
}

// bar returns a line such as "[====> ] 120/400  loss 2.3450  val 2.4012  0:42 left  12.3k tok/s".
//
// Remaining time and speed are based on the average since the start of the run or the last growth,
// which changes the duration of a step. The average includes evaluations, so the remaining time
// allows for those still to come.
func (p *progress) bar(e llm.Event) string {
	parts := []string{fmt.Sprintf("%d/%d", e.Step, e.Steps)}
	if e.Budget != (llm.Budget{}) {
		parts[0] = fmt.Sprintf("%.1f%% %d", 100*e.Share, e.Step)
	}

	if e.Step > p.start {
		parts = append(parts, fmt.Sprintf("loss %.4f", e.Loss))
	}

	if e.ValLoss > 0 && !math.IsInf(e.ValLoss, 1) {
		parts = append(parts, fmt.Sprintf("val %.4f", e.ValLoss))
	}

	if f := e.Retention; !f.IsZero() {
		parts = append(parts, fmt.Sprintf("old %+.4f", f.Rise()))
	}

	if f := e.Preferences; f.Pairs > 0 {
		parts = append(parts, fmt.Sprintf("margin %.3f", f.Margin()))
	}

	steps, took := e.Step-p.since.Step, float64(e.Elapsed-p.since.Elapsed)
	if steps > 0 && took > 0 {
		left := time.Duration(float64(e.Steps-e.Step) * took / float64(steps))
		if e.Budget != (llm.Budget{}) {
			left = time.Duration((1 - e.Share) * took / max(e.Share-p.since.Share, 1e-3))
		}
		tokens := float64(e.RunTokens - p.since.RunTokens)
		parts = append(parts, clock(left)+" left", rate(tokens/(took/1e9))+" tok/s")
	}

	if p.seeds != "" {
		parts = append(parts, p.seeds)
	}

	room := p.room()
	for len(parts) > 1 && len(strings.Join(parts, "  ")) > room-len("[>] ") {
		parts = parts[:len(parts)-1]
	}

	return drawBar(strings.Join(parts, "  "), room, shareOf(e))
}

// drawBar returns a bar of the given share with the figures after it, in at most room characters.
func drawBar(figures string, room int, share float64) string {
	width := min(20, room-len("[] ")-len(figures))
	if width < 1 {
		return figures[:max(0, min(len(figures), room))]
	}
	done := max(0, min(width, int(float64(width)*share)))
	bar := strings.Repeat("=", done)
	if done < width {
		bar += ">" + strings.Repeat(" ", width-done-1)
	}
	return "[" + bar + "] " + figures
}

// parameters describes the number of trainable parameters. For a frozen model it adds the total number
// of parameters and the trainable fraction.
func parameters(e llm.Event) string {
	switch {
	case e.Params == 0 && e.AllParams > 0:
		return fmt.Sprintf("only blueprints, in a frozen model of %s parameters", thousands(e.AllParams))
	case e.Params < e.AllParams:
		return fmt.Sprintf("%s of %s parameters (%.2g%%)", thousands(e.Params), thousands(e.AllParams),
			100*float64(e.Params)/float64(e.AllParams))
	}
	return thousands(e.Params) + " parameters"
}

// stageMarks abbreviates the stages in the bar, in the order of a seed's life.
var stageMarks = []struct {
	stage state.Stage
	mark  string
}{{state.Germinated, "germ"}, {state.Training, "train"}, {state.Grafting, "graft"},
	{state.Stabilization, "stab"},
	{state.Evaluating, "eval"}, {state.FineTuning, "tune"}, {state.Fossilized, "fossil"}}

// growing counts the seeds with a blueprint by stage, as in "2 train 1 graft".
func growing(reports []state.Report) string {
	counts := map[state.Stage]int{}
	for _, r := range reports {
		for i := range r.Seeds {
			counts[r.Seeds[i].Stage]++
		}
	}

	var parts []string
	for _, m := range stageMarks {
		if n := counts[m.stage]; n > 0 {
			parts = append(parts, fmt.Sprint(n, " ", m.mark))
		}
	}

	return strings.Join(parts, " ")
}

// shareOf returns the completed fraction of a run.
func shareOf(e llm.Event) float64 {
	if e.Budget != (llm.Budget{}) {
		return e.Share
	}
	return float64(e.Step) / float64(max(e.Steps, 1))
}

// reshaped describes how the model has grown, or why it could not.
func reshaped(e llm.Event) string {
	if e.Err != nil {
		return fmt.Sprintf("growth    %s: %v", e.Text, e.Err)
	}
	return "growth    " + e.Text
}

// rate formats a number with three or four digits, as in 950, 12.3k or 1.20M.
func rate(x float64) string {
	switch {
	case x < 1e3:
		return fmt.Sprintf("%.0f", x)
	case x < 1e6:
		return fmt.Sprintf("%.1fk", x/1e3)
	default:
		return fmt.Sprintf("%.2fM", x/1e6)
	}
}

// clock formats a duration as m:ss or h:mm:ss.
func clock(d time.Duration) string {
	s := int64(max(d, 0).Round(time.Second) / time.Second)
	if s < 3600 {
		return fmt.Sprintf("%d:%02d", s/60, s%60)
	}
	return fmt.Sprintf("%d:%02d:%02d", s/3600, s/60%60, s%60)
}

// thousands formats n with commas between groups of three digits.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// printable replaces control characters, which a terminal would obey: an untrained model can
// generate any bytes.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return utf8.RuneError
	}, s)
}
