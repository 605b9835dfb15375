package llm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/optime"
	"github.com/kasmina-go/kasmina/llm/internal/scrub"
)

// Monitor tells the callbacks what the ops of the trainer's engine take, as a Profiled event. It
// does so every so many steps (0 for never) and after the last one. At the end of the run it prints
// them as a table. It does nothing for an engine that is no [Profiler] or has timed nothing.
// Engines on CPU and GPU want the option WithMonitor of cpuops and cudaops.
func Monitor(t *Trainer, w io.Writer, every int) Callback {
	if t.made() != nil || w == nil {
		return refusing("Monitor: the trainer or the writer is nil")
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

// Ceilings measures, behind the first step of a run, what the engine's device reaches at best, and
// tells the callbacks of it: see [Measured]. Of several ranks the devices count as alike. It does
// nothing for an engine that is no [Measurer].
func Ceilings(t *Trainer) Callback {
	if t.made() != nil {
		return refusing("Ceilings: %w", t.made())
	}

	return func(e Event) error {
		m, ok := t.currentEngine().(Measurer)
		if !ok || e.Kind != StepEnd || e.RunTokens != int64(e.StepTokens) {
			return nil
		}
		var c Ceiling
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

// ProfileStep profiles a step of the run. It begins when that many steps have been made (at least
// 1), which load kernels and warm the GPU up. It writes the trace (see [Profile.WriteTrace]) to the
// file at path, whose folders it makes, and prints a summary. The trainer's engine must be a
// [Tracer]. Of a run that ends before, it writes nothing and says so.
func ProfileStep(t *Trainer, w io.Writer, path string, after int) Callback {
	switch {
	case t.made() != nil || w == nil:
		return refusing("ProfileStep: the trainer or the writer is nil")
	case after < 1:
		return refusing("ProfileStep: after %d steps, want at least 1", after)
	}

	tracer, ok := t.currentEngine().(Tracer)
	if !ok {
		return refusing("ProfileStep: the trainer's engine does not profile steps; that of package " +
			"llm/gpu does")
	}

	if err := atomicfile.Writable(path); err != nil { // now, not when the steps have been made
		return refusing("ProfileStep: the trace cannot be written: %w", err)
	}

	steps, done := 0, false
	return func(e Event) error {
		switch {
		case done:
			return nil
		case e.Kind == RunEnd:
			done = true
			_, err := fmt.Fprintf(w, "profile   the run ended too early: there is none in %s\n",
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
		var p *Profile
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

// writeProfile writes the trace to a file, and the table.
func writeProfile(p *Profile, w io.Writer, path string) error {
	if err := atomicfile.WriteMkdir(path, func(f *os.File) error {
		return p.WriteTrace(f)
	}); err != nil {
		return fmt.Errorf("llm: ProfileStep: %w", err)
	}
	_, err := fmt.Fprintf(w, "profile   in %s\n%s", path, p.Table())
	return err
}

// Scrub verifies the checksums of all seeds when a run begins, and then once every period while it
// goes on. What it finds it writes to w, a line for each layer or part of a large one, and tells
// the callbacks of (Corrupted). Both happen behind the next step and once. It changes nothing: a
// corrupt seed ends the run with state.ErrCorrupt when the epoch does, unless the lattices are made
// with [state.WithQuarantine].
func Scrub(t *Trainer, w io.Writer, period time.Duration) Callback {
	switch {
	case t.made() != nil:
		return refusing("Scrub: %w", t.made())
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
			return tellCorrupt(s, w, func(err error) error {
				return t.emit(Corrupted, func(e *Event) { e.Err = err })
			})
		case RunEnd:
			s.Stop()
			return tellCorrupt(s, w, func(error) error { return nil }) // a log is closed by now
		}
		return nil
	}
}

// tellCorrupt writes what a scrubber has found since, and calls to with it.
func tellCorrupt(s *scrub.Scrubber, w io.Writer, to func(error) error) error {
	var errs error
	for _, found := range s.Fresh() {
		_, err := fmt.Fprintf(w, "corrupt   %v\n", found)
		errs = errors.Join(errs, err, to(found))
	}
	return errs
}
