package optime

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Profile is where the time of one step on a GPU went.
type Profile struct {
	Device string
	// Period is the time from the beginning of one step to that of the next, the median of Steps
	// steps that ran as always.
	Period time.Duration
	Steps  int
	// Graphs is how long such a step's captured work was on the GPU: the rest of the period the GPU
	// copied or waited.
	Graphs time.Duration
	// Marked is the time of such work with a time stamp after every kernel, and Mark what a stamp
	// takes, which Spans are without.
	Marked, Mark time.Duration
	// Copy and Product are the card's ceilings, measured just now. Copy is the bytes a second, read
	// and written ones together, of a copy in its memory. Product is the operations a second of
	// large products of matrices of type Type. Where the step has products of float8 with a factor
	// for each row, there is a figure of those too. 0 if they could not be measured.
	Copy, Product, ProductFloat8 float64
	Type                         string

	Spans []Span     // on the GPU, in order
	Host  []HostSpan // in the program, of the step that was not marked
}

// Span is a kernel's run, or that of something else that keeps the GPU busy. The kernels of a task
// (a node of the graph, or a piece of one) stand next to each other, and share its figures.
type Span struct {
	Kernel string // the function's name, or what cuBLASLt computes, or copy or memset
	Op     string // as in RMSNormGrad
	Layer  string // as in model.layers.3; "" where the graph does not tell
	Task   int    // its number
	// Start is when it began, counted from the beginning of the step. Times are those of the marked
	// step without the marks, put where the step's captured pieces were in a step without marks,
	// with even gaps. Where they add up to more than the piece took, they are scaled down to that.
	// They can with tiny kernels, since a mark also keeps the next from starting.
	Start, Time time.Duration
	// Of the task: the bytes that have to move at least, the operations of its products, and its
	// share of the ceiling. The share is the time that bytes or operations take at the card's
	// ceiling, whichever is longer, by the task's time. A task whose operands are in the cache can
	// exceed 1. 0 where there is no ceiling.
	Bytes, FLOPs, Share float64
	Float8              bool     // FLOPs is of products of float8
	Ways                []string // that were chosen among several
	// Loose is work that is not captured, such as the copy of a batch. Its time includes what the
	// program takes to enqueue it, and does not count as busy.
	Loose bool
}

// HostSpan is a call of the program.
type HostSpan struct {
	Name        string
	Start, Time time.Duration
}

// Kernels is the time of all captured spans together.
func (p *Profile) Kernels() (sum time.Duration) {
	for _, s := range p.Spans {
		if !s.Loose {
			sum += s.Time
		}
	}
	return sum
}

// Busy is the share of the period in which the GPU was busy. kernels counts the sum of all captured
// kernels' times, graphs the time of the captured work, which includes the gaps between kernels.
func (p *Profile) Busy() (kernels, graphs float64) {
	return rate(p.Kernels().Seconds(), p.Period), rate(p.Graphs.Seconds(), p.Period)
}

// ceiling is the least time of a span's task on the card, 0 where that is not known.
func (p *Profile) ceiling(s Span) time.Duration {
	least, product := 0.0, p.Product
	if s.Float8 {
		product = p.ProductFloat8
	}
	if p.Copy > 0 {
		least = s.Bytes / p.Copy
	}
	if product > 0 {
		least = max(least, s.FLOPs/product)
	}
	return time.Duration(least * float64(time.Second))
}

// SetShares fills in the spans' shares of the ceiling.
func (p *Profile) SetShares() {
	for tasks := p.Spans; len(tasks) > 0; {
		var task []Span
		task, tasks = nextTask(tasks)
		share := rate(p.ceiling(task[0]).Seconds(), timeOf(task))
		for i := range task {
			task[i].Share = share
		}
	}
}

// nextTask cuts the first task off.
func nextTask(spans []Span) (task, rest []Span) {
	n := slices.IndexFunc(spans, func(s Span) bool { return s.Task != spans[0].Task })
	if n < 0 {
		n = len(spans)
	}
	return spans[:n], spans[n:]
}

func timeOf(spans []Span) (sum time.Duration) {
	for _, s := range spans {
		sum += s.Time
	}
	return sum
}

// Ops gathers the spans by their ops, the longest first.
func (p *Profile) Ops() []OpTime {
	var ops []OpTime
	for rest := p.Spans; len(rest) > 0; {
		var task []Span
		task, rest = nextTask(rest)
		s := task[0]
		ops = append(ops, OpTime{Op: s.Op, Tasks: 1, Time: timeOf(task), Bytes: s.Bytes,
			FLOPs: s.FLOPs, Ways: s.Ways})
	}
	return Gather(ops)
}

// tableKernels is how many kernels the table lists.
const tableKernels = 20

// Table is the profile for people: the step, its ops and its longest kernels.
func (p *Profile) Table() string {
	var s strings.Builder
	kernels, graphs := p.Busy()
	fmt.Fprintf(&s, "step      %v from start to start on %s, the median of %d\n",
		p.Period.Round(time.Microsecond), p.Device,
		p.Steps)
	fmt.Fprintf(&s,
		"busy      %.1f %% by the kernels' times, %.1f %% by the captured work's, in which gaps between kernels count\n",
		100*kernels, 100*graphs)
	fmt.Fprintf(&s,
		"marks     %v for each of %d, which is not in the times; the captured work takes %v with them, %v without\n",
		p.Mark, len(p.Spans), p.Marked.Round(time.Microsecond), p.Graphs.Round(time.Microsecond))
	fmt.Fprintf(&s, "ceilings  %.0f GB/s copied and %.0f TFLOP/s multiplied in %s", p.Copy/1e9,
		p.Product/1e12, p.Type)
	if p.ProductFloat8 > 0 {
		fmt.Fprintf(&s, ", %.0f in float8", p.ProductFloat8/1e12)
	}
	s.WriteString(", measured now\n\n")
	p.opTable(&s)
	p.kernelTable(&s)
	return s.String()
}

func (p *Profile) opTable(w io.Writer) {
	whole := timeOf(p.Spans)
	fmt.Fprintf(w, "%-24s %5s %10s %6s %8s %8s %8s\n", "op", "tasks", "us", "%",
		"GB/s", "TFLOP/s", "ceiling")
	for _, o := range p.Ops() {
		least := time.Duration(0)
		for rest := p.Spans; len(rest) > 0; {
			var task []Span
			if task, rest = nextTask(rest); task[0].Op == o.Op {
				least += p.ceiling(task[0])
			}
		}
		fmt.Fprintf(w, "%-24.24s %5d %10.1f %6.1f %8.0f %8.1f %7.0f%%\n", o.Op,
			o.Tasks, o.Time.Seconds()*1e6,
			100*rate(o.Time.Seconds(), whole), o.Bandwidth()/1e9, o.Rate()/1e12,
			100*rate(least.Seconds(), o.Time))
	}
}

func (p *Profile) kernelTable(w io.Writer) {
	whole := timeOf(p.Spans)
	var kernels []OpTime
	for _, s := range p.Spans {
		kernels = append(kernels, OpTime{Op: s.Kernel, Tasks: 1, Time: s.Time})
	}
	kernels = Gather(kernels)
	fmt.Fprintf(w, "\n%-56s %5s %10s %6s\n", "kernel", "runs", "us", "%")
	for _, k := range kernels[:min(tableKernels, len(kernels))] {
		fmt.Fprintf(w, "%-56.56s %5d %10.1f %6.1f\n", k.Op, k.Tasks, k.Time.Seconds()*1e6,
			100*rate(k.Time.Seconds(), whole))
	}
	if more := len(kernels) - tableKernels; more > 0 {
		fmt.Fprintf(w, "and %d more\n", more)
	}
}

// traceEvent is an event of Chrome's trace format, with times in microseconds.
// (Duca and Sinclair, "Trace Event Format", 2016.)
type traceEvent struct {
	Name     string         `json:"name"`
	Category string         `json:"cat,omitempty"`
	Phase    string         `json:"ph"`
	Start    float64        `json:"ts"`
	Duration float64        `json:"dur"`
	Process  int            `json:"pid"`
	Thread   int            `json:"tid"`
	Args     map[string]any `json:"args,omitempty"`
}

// Processes and threads of a trace.
const (
	tracedGPU, tracedHost = 1, 2

	kernelTrack, opTrack, layerTrack = 1, 2, 3
)

// WriteTrace writes the step in Chrome's trace-event format, which https://ui.perfetto.dev and
// chrome://tracing show. It has the GPU's kernels with the ops and layers that they are of, and the
// program's calls.
func (p *Profile) WriteTrace(w io.Writer) error {
	if w == nil {
		return errors.New("Profile.WriteTrace: the writer is nil")
	}
	kernels, graphs := p.Busy()
	trace := struct {
		Unit   string         `json:"displayTimeUnit"`
		Other  map[string]any `json:"otherData"`
		Events []traceEvent   `json:"traceEvents"`
	}{"ns", map[string]any{
		"device": p.Device, "period_us": micros(p.Period), "steps": p.Steps,
		"graphs_us": micros(p.Graphs), "kernels_us": micros(p.Kernels()), "busy_kernels": kernels,
		"busy_graphs": graphs,
		"marked_us":   micros(p.Marked), "mark_us": micros(p.Mark),
		"ceiling_copy_gbps": p.Copy / 1e9, "ceiling_product_tflops": p.Product / 1e12,
		"ceiling_type":                  p.Type,
		"ceiling_product_float8_tflops": p.ProductFloat8 / 1e12,
	}, p.events()}
	return json.NewEncoder(w).Encode(trace)
}

func micros(d time.Duration) float64 { return float64(d) / 1e3 }

func (p *Profile) events() []traceEvent {
	var events []traceEvent
	name := func(what, name string, process, thread int) {
		events = append(events, traceEvent{Name: what, Phase: "M", Process: process, Thread: thread,
			Args: map[string]any{"name": name}})
	}
	add := func(thread int, s []Span, name string, args map[string]any) {
		last := s[len(s)-1]
		events = append(events, traceEvent{Name: name, Category: "gpu", Phase: "X",
			Start:    micros(s[0].Start),
			Duration: micros(last.Start + last.Time - s[0].Start), Process: tracedGPU,
			Thread: thread, Args: args})
	}
	name("process_name", p.Device, tracedGPU, 0)
	name("thread_name", "kernels", tracedGPU, kernelTrack)
	name("thread_name", "ops", tracedGPU, opTrack)
	name("thread_name", "layers", tracedGPU, layerTrack)
	name("process_name", "program", tracedHost, 0)
	name("thread_name", "calls", tracedHost, 1)
	for i, s := range p.Spans {
		args := s.args()
		args["task"] = s.Task
		if i > 0 {
			before := p.Spans[i-1]
			args["gap_us"] = micros(s.Start - before.Start - before.Time)
		}
		add(kernelTrack, p.Spans[i:i+1], s.Kernel, args)
	}
	for rest := p.Spans; len(rest) > 0; {
		var task []Span
		task, rest = nextTask(rest)
		args := task[0].args()
		args["us"] = micros(timeOf(task))
		add(opTrack, task, task[0].Op, args)
	}
	for rest := p.Spans; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(s Span) bool { return s.Layer != rest[0].Layer })
		if n < 0 {
			n = len(rest)
		}
		if rest[0].Layer != "" {
			add(layerTrack, rest[:n], rest[0].Layer, nil)
		}
		rest = rest[n:]
	}
	for _, h := range p.Host {
		events = append(events, traceEvent{Name: h.Name, Category: "program", Phase: "X",
			Start:    micros(h.Start),
			Duration: micros(h.Time), Process: tracedHost, Thread: 1})
	}
	return events
}

// args is what a trace says of a span beside its time.
func (s Span) args() map[string]any {
	args := map[string]any{"op": s.Op, "layer": s.Layer, "bytes": s.Bytes, "flops": s.FLOPs,
		"share_of_ceiling": s.Share,
		"float8":           s.Float8, "captured": !s.Loose}
	if len(s.Ways) > 0 {
		args["ways"] = s.Ways
	}
	return args
}
