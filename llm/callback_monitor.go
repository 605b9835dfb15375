package llm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/llm/internal/scrub"
	"github.com/kasmina-go/kasmina/optime"
)

// Monitor emits a Profiled event with the time of each op of the trainer's engine, after every
// multiple of the given number of steps (0 for never) and after the last step. At the end of the run
// it prints the times as a table. It does nothing if the engine is not a [Profiler] or has not timed
// anything. The CPU and GPU engines require the WithMonitor option of cpuops and cudaops,
// respectively.
func Monitor(t *Trainer, w io.Writer, every int) Callback {
	if w == nil {
		return refusing("Monitor: the writer is nil")
	}

	return func(e Event) error {
		p, ok := t.currentEngine().(Profiler)
		if !ok || !due(e, every) && e.Kind != RunEnd {
			return nil
		}
		ops, err := t.opTimes(p)
		if err != nil || len(ops) == 0 {
			return err
		}
		if e.Kind == RunEnd {
			_, err := io.WriteString(w, optime.Table(ops))
			return err
		}
		return t.emit(Profiled, func(e *Event) { e.Ops = ops })
	}
}

// Ceilings measures the peak performance of the engine's device after the first step of a run, and emits
// [Measured]. With several ranks, all devices are assumed to be alike. Ceilings does nothing if the
// engine is not a [Measurer].
func Ceilings(t *Trainer) Callback {
	return func(e Event) error {
		m, ok := t.currentEngine().(Measurer)
		if !ok || e.Kind != StepEnd || e.RunTokens != int64(e.StepTokens) {
			return nil
		}
		var c optime.Ceiling
		if err := t.inTurn(func() (err error) {
			c, err = m.Ceiling()
			return err
		}); err != nil {
			return fmt.Errorf("llm: Ceilings: %w", err)
		}
		n := float64(t.rankCount())
		c.Product, c.Copy = c.Product*n, c.Copy*n
		t.note(func(e *Event) { e.Ceiling = c })
		return t.emit(Measured, nil)
	}
}

// ProfileStep profiles one step of the run, after the given number of steps (at least 1), which load
// kernels and warm up the GPU. It writes the trace (see [Profile.WriteTrace]) to the file at path,
// creating missing directories, and prints a summary to w. The trainer's engine must be a [Tracer].
// If the run ends too early, ProfileStep writes no trace and reports this on w.
func ProfileStep(t *Trainer, w io.Writer, path string, after int) Callback {
	switch {
	case w == nil:
		return refusing("ProfileStep: the writer is nil")
	case after < 1:
		return refusing("ProfileStep: after %d steps, want at least 1", after)
	}

	tracer, ok := t.currentEngine().(Tracer)
	if !ok {
		return refusing("ProfileStep: the trainer's engine cannot profile steps; the engine of " +
			"package llm/gpu can")
	}

	if err := atomicfile.Writable(path); err != nil { // fail now rather than after the steps
		return refusing("ProfileStep: the trace cannot be written: %w", err)
	}

	steps, done := 0, false
	return func(e Event) error {
		switch {
		case done:
			return nil
		case e.Kind == RunEnd:
			done = true
			_, err := fmt.Fprintf(w, "profile   the run ended too early: no trace was written to %s\n",
				path)
			return err
		case e.Kind != StepEnd:
			return nil
		}
		if steps++; steps <= after {
			if steps < after {
				return nil
			}
			return t.inTurn(tracer.StartProfile)
		}
		var p *optime.Profile
		err := t.inTurn(func() (err error) {
			p, err = tracer.Profile()
			return err
		})
		if err != nil || p == nil {
			return err
		}
		done = true
		return writeProfile(p, w, path)
	}
}

// writeProfile writes the trace to a file and the summary table to w.
func writeProfile(p *optime.Profile, w io.Writer, path string) error {
	if err := atomicfile.WriteMkdir(path, func(f *os.File) error {
		return p.WriteTrace(f)
	}); err != nil {
		return fmt.Errorf("llm: ProfileStep: %w", err)
	}
	_, err := fmt.Fprintf(w, "profile   in %s\n%s", path, p.Table())
	return err
}

// Scrub verifies the checksums of all seeds when a run starts, and then once per period during the
// run. It reports corruption by writing a line to w for each layer, or part of a large layer, and by
// emitting Corrupted. Each finding is reported only once, after the next step.
//
// Scrub changes nothing. A corrupt seed fails the run with state.ErrCorrupt at the end of the epoch,
// unless the lattices were created with [state.WithQuarantine].
func Scrub(t *Trainer, w io.Writer, period time.Duration) Callback {
	switch {
	case w == nil:
		return refusing("Scrub: the writer is nil, want one such as os.Stderr")
	case period <= 0:
		return refusing("Scrub: the period is %v, want one above 0", period)
	}

	s := &scrub.Scrubber{Network: t.Model.Kasmina, Period: period}
	return func(e Event) error {
		switch e.Kind {
		case RunStart:
			s.Start()
		case StepEnd, Interrupted, Failed:
			return reportCorrupt(s, w, func(err error) error {
				return t.emit(Corrupted, func(e *Event) { e.Err = err })
			})
		case RunEnd:
			s.Stop()
			return reportCorrupt(s, w, func(error) error { return nil }) // logs are closed at this point
		}
		return nil
	}
}

// reportCorrupt writes the scrubber's new findings to w and calls to for each.
func reportCorrupt(s *scrub.Scrubber, w io.Writer, to func(error) error) error {
	var errs error
	for _, found := range s.Fresh() {
		_, err := fmt.Fprintf(w, "corrupt   %v\n", found)
		errs = errors.Join(errs, err, to(found))
	}
	return errs
}
