package profile

import (
	"fmt"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// Profiler times steps. Some it times by events around their pieces, which are what is captured.
// Then some have a mark after every kernel, of which the last one counts. A capture lets the card
// rest, and then it is faster for a while. A nil one does nothing.
type Profiler struct {
	marks
	pieces map[pieceKey]*markedPiece
	steps  []*step // that have begun; the last ones have marks
	open   bool    // the last one has not ended

	whole []*markedPiece // of the last step: the first, third and so on is what is between pieces
	piece *markedPiece   // that is being enqueued
	task  *optime.Span   // what the spans of what is being enqueued have in common, nil for nothing
	tasks int            // so far
	last  gpu.Event      // the last mark
}

// plainSteps is how many steps a profile times as they are, beside one more before these, which is
// not looked at. Of these markedSteps is how many have marks.
const plainSteps, markedSteps = 7, 4

// Steps is how many steps a profile takes.
const Steps = 1 + plainSteps + markedSteps

// NewProfiler returns a profiler of the steps that follow.
func NewProfiler(m *Machine) *Profiler {
	return &Profiler{marks: m.marks(), pieces: map[pieceKey]*markedPiece{}}
}

// Result returns the profile, with the card's ceilings.
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

// pieceKey tells pieces apart: by the kind of run, by the optimiser, and by their number in the
// step.
type pieceKey struct {
	run       *run.Recording
	optimizer any
	number    int
}

// markedPiece is a piece of a marked step, or what is between two.
type markedPiece struct {
	graph gpu.Graph   // 0 where it cannot be captured
	pause []gpu.Event // marks with nothing between them, of a piece
	spans []markedSpan
}

// step is one of those that are profiled.
type step struct {
	begin  gpu.Event
	at     time.Time      // when that was enqueued
	pieces [][2]gpu.Event // of a step without marks
	calls  []optime.HostSpan
}

// markedSpan is a piece of work between two marks.
type markedSpan struct {
	kernel   string
	from, to gpu.Event
	task     *optime.Span
}

// Busy reports whether there are steps to come.
func (p *Profiler) Busy() bool { return p != nil && (p.open || len(p.steps) < Steps) }

// Open reports whether a step has begun and not ended.
func (p *Profiler) Open() bool { return p != nil && p.open }

// marked reports whether the step that is open has marks.
func (p *Profiler) marked() bool { return p.open && len(p.steps) > 1+plainSteps }

// Start begins a step, unless one has begun.
func (p *Profiler) Start() error {
	if !p.Busy() || p.open {
		return nil
	}

	begin := p.put()
	if err := p.failed(); err != nil {
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

// Finish ends a step.
func (p *Profiler) Finish() {
	if p == nil || !p.open {
		return
	}
	p.open = false
	p.Ctx.Observe(p.Stream, nil)
}

// Call notes a call of the program, from now until what it returns is called.
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

// UpdatePart enqueues a part of an update as a piece of the step.
func (p *Profiler) UpdatePart(w run.Work) error {
	plain := w.Plain
	w.Plain = func() error {
		p.doing(optime.Span{Op: update, Bytes: w.Bytes})
		return plain()
	}
	return p.enqueuePiece(w)
}

// enqueuePiece enqueues a piece of the step between two marks. In a step with marks after every kernel
// it enqueues, or captures, the work kernel by kernel.
func (p *Profiler) enqueuePiece(w run.Work) error {
	if !p.marked() {
		from := p.put()
		p.do(w.Replay)
		if to := p.put(); p.err == nil {
			s := p.steps[len(p.steps)-1]
			s.pieces = append(s.pieces, [2]gpu.Event{from, to})
		}
		return p.failed()
	}

	key := pieceKey{p.Now, w.Optimizer, len(p.whole)}
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

// enqueue enqueues a piece, which begins with marks that have nothing between them.
func (p *Profiler) enqueue(piece *markedPiece, marked func() error) error {
	between := p.piece
	p.piece = piece
	for range 9 {
		p.last = p.put()
		piece.pause = append(piece.pause, p.last)
	}
	p.do(marked)
	p.piece, p.task = between, nil
	return p.failed()
}

// observe enqueues a piece of work with a mark behind it.
func (p *Profiler) observe(w gpu.Work, enqueue func() error) error {
	if !p.State.Capturing() {
		p.last = p.put()
	}

	p.do(enqueue)
	e := p.put()
	if err := p.failed(); err != nil {
		return err
	}

	task := p.task
	if task == nil { // between pieces
		p.doing(optime.Span{Op: "Copies"})
		task, p.task = p.task, nil
	} else if task.Op == update { // whose products alone say
		task.FLOPs += w.FLOPs
	}

	p.piece.spans = append(p.piece.spans, markedSpan{w.Name, p.last, e, task})
	p.last = e
	return nil
}

// doing says what is enqueued from now on.
func (p *Profiler) doing(t optime.Span) {
	t.Task = p.tasks
	p.task, p.tasks = &t, p.tasks+1
}

// enqueueCalls enqueues the program call by call, and notes which call comes next.
func (p *Profiler) enqueueCalls() error {
	for _, c := range p.Program.Calls {
		t := optime.Span{Op: c.Op, Layer: c.Layer, Bytes: c.Bytes(),
			FLOPs: c.FLOPs, Float8: c.Float8}
		// whose variants are numbers
		if c.Choice != nil && c.Choice.Of > 1 && c.Choice.Op != "Matmul" {
			t.Variants = []string{c.Choice.Variant}
		}
		p.doing(t)
		if err := p.Executor.Call(c); err != nil {
			return err
		}
	}

	return nil
}

// Close gives back events and graphs.
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

// result is the profile but for the card's ceilings.
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
	return r, p.failed()
}

// layOut puts the spans of the marked step where the usual one had its pieces. Of a piece of tiny
// kernels the times add up to more than it took without marks. These keep one kernel from starting
// while the one before it ends. They are then taken to be shorter in proportion.
func (p *Profiler) layOut(r *optime.Profile, usual *step) {
	var end time.Duration // of the last span
	// an event of the step with marks, and its place
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
