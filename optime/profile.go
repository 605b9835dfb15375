package optime

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Profile describes how the time of one step on a GPU was spent.
type Profile struct {
	Device string
	// Period is the time from the start of one step to the start of the next, as the median of Steps
	// unprofiled steps.
	Period time.Duration
	Steps  int
	// Graphs is how long the captured work of such a step occupied the GPU. During the rest of the
	// period, the GPU copied or waited.
	Graphs time.Duration
	// Marked is the time of the captured work with a time stamp after every kernel, and Mark the
	// cost of a time stamp, which is subtracted from Spans.
	Marked, Mark time.Duration
	// Copy and Product are the card's peak performance, measured together with the profile: Copy is
	// the number of bytes per second, read plus written, of a copy within its memory, and Product
	// the number of operations per second of large matrix products of type Type. ProductFloat8 is
	// the same for float8 with a factor per row, if the step has such products. Unmeasured values
	// are 0.
	Copy, Product, ProductFloat8 float64
	Type                         string

	Spans []Span     // on the GPU, in order
	Host  []HostSpan // calls in the program, in the step without time stamps
}

// Span is the time during which a kernel, or other work, occupied the GPU. The kernels of a task (a
// node of the graph, or a part of one) are adjacent and share the task's figures.
type Span struct {
	Kernel string // name of the function, or the computation of cuBLASLt, "copy" or "memset"
	Op     string // such as RMSNormGrad
	Layer  string // such as model.layers.3; "" if the graph does not determine it
	Task   int    // number of the task
	// Start is the time since the start of the step. Times are measured in the step with time
	// stamps, and exclude the cost of the time stamps. The spans are then placed where the captured
	// graphs ran in a step without time stamps, with equal gaps between them. If their times add up
	// to more than a graph took, they are scaled down. This happens with tiny kernels, because a
	// time stamp also delays the next kernel.
	Start, Time time.Duration
	// Bytes is the minimum number of bytes that the task moves, and FLOPs the number of operations
	// of its products. Share compares the task with the ceiling. It is the minimum time for the
	// bytes or for the operations at the card's peak, whichever is longer, divided by the task's
	// time. The share can exceed 1 if operands are in the cache, and is 0 without a ceiling.
	Bytes, FLOPs, Share float64
	Float8              bool     // FLOPs counts float8 products
	Variants            []string // variants chosen from several
	// Loose marks work that is not captured, such as the copy of a batch. Its time includes
	// enqueueing by the program, and does not count as busy.
	Loose bool
}

// HostSpan is a call in the program.
type HostSpan struct {
	Name        string
	Start, Time time.Duration
}

// Kernels returns the total time of all captured spans.
func (p *Profile) Kernels() (sum time.Duration) {
	for _, s := range p.Spans {
		if !s.Loose {
			sum += s.Time
		}
	}
	return sum
}

// Busy returns the fraction of the period during which the GPU was busy. kernels counts the time in
// captured kernels only, and graphs the whole time of the captured work, including the gaps between
// kernels.
func (p *Profile) Busy() (kernels, graphs float64) {
	return rate(p.Kernels().Seconds(), p.Period), rate(p.Graphs.Seconds(), p.Period)
}

// ceiling returns the minimum time of a span's task on the card, or 0 if unknown.
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

// SetShares sets the spans' shares of the ceiling.
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

// nextTask splits off the spans of the first task.
func nextTask(spans []Span) (task, rest []Span) {
	n := slices.IndexFunc(spans, func(s Span) bool { return s.Task != spans[0].Task })
	if n < 0 {
		n = len(spans)
	}
	return spans[:n], spans[n:]
}

// timeOf returns the total time of spans.
func timeOf(spans []Span) (sum time.Duration) {
	for _, s := range spans {
		sum += s.Time
	}
	return sum
}

// Ops returns the times by op, longest first.
func (p *Profile) Ops() []OpTime {
	var ops []OpTime
	for rest := p.Spans; len(rest) > 0; {
		var task []Span
		task, rest = nextTask(rest)
		s := task[0]
		ops = append(ops, OpTime{Op: s.Op, Tasks: 1, Time: timeOf(task), Bytes: s.Bytes,
			FLOPs: s.FLOPs, Variants: s.Variants})
	}
	return Gather(ops)
}

// tableKernels is the number of kernels in the table.
const tableKernels = 20

// Table formats the profile for display, listing the step, its ops and its longest kernels.
func (p *Profile) Table() string {
	var s strings.Builder
	kernels, graphs := p.Busy()
	fmt.Fprintf(&s, "step      %v from start to start on %s, the median of %d\n",
		p.Period.Round(time.Microsecond), p.Device,
		p.Steps)
	fmt.Fprintf(&s,
		"busy      %.1f%% in kernels, %.1f%% in captured work, including gaps between kernels\n",
		100*kernels, 100*graphs)
	fmt.Fprintf(&s,
		"marks     %v for each of %d, excluded from the times; the captured work takes %v with marks, %v without\n",
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

// opTable writes the table of ops.
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

// kernelTable writes the table of kernels.
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

// traceEvent is an event of Chrome's trace format with times in microseconds (Duca and Sinclair,
// "Trace Event Format", 2016).
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
// chrome://tracing display: the GPU's kernels with their ops and layers, and the program's calls.
func (p *Profile) WriteTrace(w io.Writer) error {
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

// micros returns d in microseconds.
func micros(d time.Duration) float64 { return float64(d) / 1e3 }

// events returns the events of the trace.
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

// args returns the details of a span for a trace.
func (s Span) args() map[string]any {
	args := map[string]any{"op": s.Op, "layer": s.Layer, "bytes": s.Bytes, "flops": s.FLOPs,
		"share_of_ceiling": s.Share,
		"float8":           s.Float8, "captured": !s.Loose}
	if len(s.Variants) > 0 {
		args["variants"] = s.Variants
	}
	return args
}
