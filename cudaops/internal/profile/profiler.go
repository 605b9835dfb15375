package profile

import (
	"fmt"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/optime"
)

// Profiler profiles steps. It first times some steps as they normally run, using events around their
// captured pieces. Then it runs steps with a mark after every kernel, and uses the last of these:
// during the capture the card is idle, and afterwards the card runs faster for a while.
//
// A nil Profiler does nothing.
type Profiler struct {
	marks
	pieces map[pieceKey]*markedPiece
	steps  []*step // steps started so far; the last ones have marks
	open   bool    // the last step has not ended

	whole []*markedPiece // pieces of the last step at odd indices, and the work between them at even indices
	piece *markedPiece   // currently being enqueued
	task  *optime.Span   // template for the spans of the current work; nil between pieces
	tasks int            // number of tasks so far
	last  gpu.Event      // last mark
}

// A profile times plainSteps steps as they normally run, after one step that is ignored. Then come
// markedSteps steps with marks.
const plainSteps, markedSteps = 7, 4

// Steps is the total number of steps in a profile.
const Steps = 1 + plainSteps + markedSteps

// NewProfiler returns a profiler for the steps that follow.
func NewProfiler(m *Target) *Profiler {
	return &Profiler{marks: m.marks(), pieces: map[pieceKey]*markedPiece{}}
}

// Result returns the profile, including the card's ceilings.
func (p *Profiler) Result() (*optime.Profile, error) {
	r, err := p.result()
	if err = run.Joined(err, p.Close()); err != nil {
		return nil, err
	}
	if err := p.measureCeilings(r); err != nil {
		return nil, err
	}
	r.SetShares()
	return r, nil
}

// pieceKey identifies a piece by the mode of the run, the optimizer, and the position in the step.
type pieceKey struct {
	run       *run.Recording
	optimizer any
	number    int
}

// markedPiece is a piece of a marked step, or the work between two pieces.
type markedPiece struct {
	graph gpu.Graph   // 0 if the piece cannot be captured
	pause []gpu.Event // consecutive marks at the start of a piece, without work between them
	spans []markedSpan
}

// step is a profiled step.
type step struct {
	begin  gpu.Event
	at     time.Time      // host time when begin was enqueued
	pieces [][2]gpu.Event // start and end of each piece, in a step without marks
	calls  []optime.HostSpan
}

// markedSpan is a kernel or copy between two marks.
type markedSpan struct {
	kernel   string
	from, to gpu.Event
	task     *optime.Span
}

// Busy reports whether the profile needs more steps.
func (p *Profiler) Busy() bool { return p != nil && (p.open || len(p.steps) < Steps) }

// Open reports whether a step has started but not finished.
func (p *Profiler) Open() bool { return p != nil && p.open }

// marked reports whether the current step has marks.
func (p *Profiler) marked() bool { return p.open && len(p.steps) > 1+plainSteps }

// Start starts a step unless one is open.
func (p *Profiler) Start() error {
	if !p.Busy() || p.open {
		return nil
	}

	begin := p.markNext()
	if err := p.takeErr(); err != nil {
		return err
	}

	p.open, p.steps = true, append(p.steps, &step{begin: begin, at: time.Now()})
	if p.marked() {
		p.piece = &markedPiece{}
		p.whole = []*markedPiece{p.piece}
		p.Ctx.Observe(p.Stream, p.observe)
	}

	return nil
}

// Finish ends the current step.
func (p *Profiler) Finish() {
	if p == nil || !p.open {
		return
	}
	p.open = false
	p.Ctx.Observe(p.Stream, nil)
}

// Call records the time that the host spends in a call, from now until it calls the returned function.
func (p *Profiler) Call(name string) func() {
	if p == nil || !p.open {
		return func() {}
	}
	s, from := p.steps[len(p.steps)-1], time.Now()
	return func() {
		s.calls = append(s.calls, optime.HostSpan{Name: name, Start: from.Sub(s.at),
			Time: time.Since(from)})
	}
}

// Run enqueues a run of the program as a piece of the step.
func (p *Profiler) Run(w run.Work) error {
	w.Plain = p.enqueueCalls
	return p.enqueuePiece(w)
}

// Update enqueues an update.
func (p *Profiler) Update(enqueue func() error) error { return enqueue() }

// UpdatePart enqueues part of an update as a piece of the step.
func (p *Profiler) UpdatePart(w run.Work) error {
	plain := w.Plain
	w.Plain = func() error {
		p.setTask(optime.Span{Op: update, Bytes: w.Bytes})
		return plain()
	}
	return p.enqueuePiece(w)
}

// enqueuePiece enqueues a piece of the step between two marks. In a marked step it enqueues or
// captures the work kernel by kernel instead.
func (p *Profiler) enqueuePiece(w run.Work) error {
	if !p.marked() {
		from := p.markNext()
		p.try(w.Replay)
		if to := p.markNext(); p.err == nil {
			s := p.steps[len(p.steps)-1]
			s.pieces = append(s.pieces, [2]gpu.Event{from, to})
		}
		return p.takeErr()
	}

	key := pieceKey{p.Current, w.Optimizer, len(p.whole)}
	piece := p.pieces[key]
	if piece == nil || piece.graph == 0 {
		piece = &markedPiece{}
		p.pieces[key] = piece
	}

	enqueue := func() error { return p.enqueue(piece, w.Plain) }
	var err error
	if w.Captured {
		err = p.Repeat(&piece.graph, enqueue)
	} else {
		err = enqueue()
	}
	if err == nil {
		p.piece = &markedPiece{}
		p.whole = append(p.whole, piece, p.piece)
	}

	return err
}

// enqueue enqueues a piece, preceded by consecutive marks that measure the cost of a mark.
func (p *Profiler) enqueue(piece *markedPiece, marked func() error) error {
	between := p.piece
	p.piece = piece
	for range 9 {
		p.last = p.markNext()
		piece.pause = append(piece.pause, p.last)
	}
	p.try(marked)
	p.piece, p.task = between, nil
	return p.takeErr()
}

// observe enqueues a kernel or copy followed by a mark.
func (p *Profiler) observe(w gpu.Work, enqueue func() error) error {
	if !p.State.Capturing() {
		p.last = p.markNext()
	}

	p.try(enqueue)
	e := p.markNext()
	if err := p.takeErr(); err != nil {
		return err
	}

	task := p.task
	if task == nil { // not part of a piece
		p.setTask(optime.Span{Op: "Copies"})
		task, p.task = p.task, nil
	} else if task.Op == update { // only its matrix products report FLOPs
		task.FLOPs += w.FLOPs
	}

	p.piece.spans = append(p.piece.spans, markedSpan{w.Name, p.last, e, task})
	p.last = e
	return nil
}

// setTask sets the task of the work enqueued from now on.
func (p *Profiler) setTask(t optime.Span) {
	t.Task = p.tasks
	p.task, p.tasks = &t, p.tasks+1
}

// enqueueCalls enqueues the program call by call, setting the task for each.
func (p *Profiler) enqueueCalls() error {
	for _, c := range p.Program.Calls {
		t := optime.Span{Op: c.Op, Layer: c.Layer, Bytes: c.Bytes(),
			FLOPs: c.FLOPs, Float8: c.Float8}
		// The variants of products are only numbers.
		if c.Choice != nil && c.Choice.Of > 1 && c.Choice.Op != "Matmul" {
			t.Variants = []string{c.Choice.Variant}
		}
		p.setTask(t)
		if err := p.Executor.Call(c); err != nil {
			return err
		}
	}

	return nil
}

// Close destroys events and graphs.
func (p *Profiler) Close() error {
	if p == nil {
		return nil
	}

	ctx := p.Ctx
	ctx.Observe(p.Stream, nil)
	errs := []error{ctx.SyncStream(p.Stream)}
	for _, piece := range p.pieces {
		errs = append(errs, ctx.DestroyGraph(piece.graph))
	}

	p.pieces, p.open = nil, false
	return run.Joined(append(errs, p.memory.Close())...)
}

// result returns the profile without the card's ceilings.
func (p *Profiler) result() (*optime.Profile, error) {
	if err := p.Ctx.SyncStream(p.Stream); err != nil {
		return nil, err
	}

	r := &optime.Profile{Device: p.Ctx.Device().Name, Steps: plainSteps}
	var periods []time.Duration
	for i := 1; i <= plainSteps; i++ {
		periods = append(periods, p.between(p.steps[i].begin, p.steps[i+1].begin))
	}

	r.Period = run.Median(periods)
	usual := p.steps[1+slices.Index(periods, r.Period)]
	r.Host = usual.calls
	var pauses []time.Duration
	for _, piece := range p.whole {
		for i := 1; i < len(piece.pause); i++ {
			pauses = append(pauses, p.between(piece.pause[i-1], piece.pause[i]))
		}
	}

	if n := len(p.whole) / 2; len(usual.pieces) != n || n == 0 {
		return nil, fmt.Errorf("the step with marks has %d pieces, others have %d: steps must be "+
			"alike", n, len(usual.pieces))
	}

	r.Mark = run.Median(pauses)
	p.layOut(r, usual)
	return r, p.takeErr()
}

// layOut places the spans of the marked step at the times when an ordinary step executed its pieces.
//
// For a piece of tiny kernels, the span times add up to more than the piece took without marks,
// because marks prevent a kernel from starting before its predecessor ends. The spans are then
// shortened in proportion.
func (p *Profiler) layOut(r *optime.Profile, usual *step) {
	var end time.Duration // end of the last span
	// an event of the marked step, and the time assigned to it
	anchor, anchored := p.steps[len(p.steps)-1].begin, time.Duration(0)
	for i, piece := range p.whole {
		spans, n, captured := piece.spans, len(piece.spans), i%2 == 1
		if n == 0 {
			continue
		}
		took := make([]time.Duration, n)
		var sum, gap time.Duration
		for i, s := range spans {
			took[i] = max(0, p.between(s.from, s.to)-r.Mark)
			sum += took[i]
		}
		if captured {
			from, to := usual.pieces[i/2][0], usual.pieces[i/2][1]
			whole := p.between(from, to)
			end = max(end, p.between(usual.begin, from))
			gap = max(0, whole-sum) / time.Duration(n)
			for i := range took {
				took[i] = time.Duration(float64(took[i]) * min(1,
					float64(whole)/float64(max(1, sum))))
			}
			r.Graphs += whole
			r.Marked += p.between(spans[0].from, spans[n-1].to)
		}
		for i, s := range spans {
			start := end + gap
			if !captured {
				start = max(end, anchored+p.between(anchor, s.from))
			}
			end = start + took[i]
			t := *s.task
			t.Kernel, t.Start, t.Time, t.Loose = s.kernel, start, took[i], !captured
			r.Spans = append(r.Spans, t)
		}
		anchor, anchored = spans[n-1].to, end
	}
}
