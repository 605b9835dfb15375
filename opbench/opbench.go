// Package opbench times one op at one shape and compares all its implementations: every variant of
// package cpuops, every variant of package cudaops if there is a GPU, and the same function composed of
// Gorgonia's own ops on Gorgonia's own machine.
//
//	figures, err := opbench.Time("RMSNorm", []int{4096, 1024}, opbench.Float32)
//	fmt.Print(opbench.Table(figures))
package opbench

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/memory"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/opcase"
	"github.com/kasmina-go/kasmina/optime"
)

// Dtype is the element type of an op's arithmetic.
type Dtype string

// The types. A CPU supports float32 and float64, and bfloat16 if products round their operands
// (cpuops.UseBFloat16). A GPU supports all types except float64, with float32 weights
// (cudaops.WithPrecision). Gorgonia's own ops support float32 and float64.
const (
	Float64  Dtype = "float64"
	Float32  Dtype = "float32"
	BFloat16 Dtype = "bfloat16"
	Float16  Dtype = "float16"
	Float8   Dtype = "float8"
)

// size returns the size in bytes of an element of an activation. With float8, activations are bfloat16.
func (d Dtype) size() int {
	return map[Dtype]int{Float64: 8, Float32: 4, BFloat16: 2, Float16: 2, Float8: 2}[d]
}

// Figure holds the measurements of an op for one implementation and variant.
type Figure struct {
	Peer string // cpu, cuda or gorgonia
	// Variant lists the variants chosen for ops with several, such as Attention=hopper-8. On a CPU,
	// if no op has several, it is the instruction set.
	Variant string
	// Forward is the time of a forward pass. Training is the time of a forward pass and the gradients of
	// all float inputs, or 0 if the op has no gradient.
	//
	// On a CPU and for Gorgonia, times are medians of wall-clock time. On a GPU, they are means of
	// the device's time, without the cost of kernel launches. Inputs are in the cache if they fit.
	Forward, Training time.Duration
	// Bytes is the size of the float inputs and the result of a forward pass, and FLOPs the number of
	// multiplications and additions in its products.
	Bytes, FLOPs float64
	// Distance is ‖y − y₁‖/‖y₁‖ for the result y and the result y₁ of the first figure without an
	// Err. It is caused by rounding, or by a mistake.
	Distance float64
	Err      error // why the measurements are missing
}

// Bandwidth returns Bytes/Forward in bytes per second.
func (f Figure) Bandwidth() float64 { return rate(f.Bytes, f.Forward) }

// Rate returns FLOPs/Forward in operations per second.
func (f Figure) Rate() float64 { return rate(f.FLOPs, f.Forward) }

func rate(n float64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return n / d.Seconds()
}

// Option configures Time.
type Option func(*config) error

type config struct {
	device  *cudaops.Device
	machine []cudaops.MachineOption
	span    time.Duration
}

// OnGPU includes a GPU in the comparison. The options apply to the machines on it, which do not tune
// without cudaops.WithTuning.
func OnGPU(d *cudaops.Device, opts ...cudaops.MachineOption) Option {
	return func(c *config) error {
		c.device, c.machine = d, opts
		return nil
	}
}

// WithSpan sets how long each pass is repeated. The default is 200 ms; a pass runs at least five times.
func WithSpan(d time.Duration) Option {
	return func(c *config) error {
		if d < 0 {
			return fmt.Errorf("WithSpan: got %v, want at least 0", d)
		}
		c.span = d
		return nil
	}
}

// Op is an op that can be timed.
type Op struct {
	Name  string
	Shape string // names of the dimensions of a shape, such as "rows, in, out"
	Usual []int  // the op's shape in a small model
}

// Ops returns the ops that can be timed, sorted by name.
func Ops() []Op {
	var all []Op
	for _, o := range opcase.All {
		if o.Bench != nil {
			all = append(all, Op{o.Name, o.Bench.Shape, slices.Clone(o.Bench.Usual)})
		}
	}
	slices.SortFunc(all, func(a, b Op) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Time times an op of [Ops] for a shape, on random numbers of a type. Nothing else should run on the
// computer at the same time.
//
// The first figure is that of the CPU with the variants it chooses by itself, followed by those of
// its other variants, of the GPU and of Gorgonia's ops. If an implementation cannot compute the op,
// its figure contains an Err.
//
// Time returns an error for an unknown op or type, an invalid shape, or an invalid option. The rules
// in KASMINA_VARIANTS apply here as well.
func Time(op string, shape []int, dtype Dtype, opts ...Option) (figures []Figure, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("opbench.Time: %w", err)
		}
	}()

	c := config{span: 200 * time.Millisecond}
	for _, opt := range opts {
		if err := opt(&c); err != nil {
			return nil, err
		}
	}

	b, err := newBench(op, shape, dtype)
	if err != nil {
		return nil, err
	}

	b.config = c
	for _, p := range []peer{onCPU, onGPU, onTape} {
		b.measure(p)
	}

	return b.figures, nil
}

// bench holds an op, a shape and the measurements so far.
type bench struct {
	config
	op      *opcase.Op
	shape   []int
	dtype   Dtype
	figures []Figure
	first   []float64 // result of the first figure
}

func newBench(op string, shape []int, dtype Dtype) (*bench, error) {
	i := slices.IndexFunc(opcase.All, func(o *opcase.Op) bool {
		return o.Name == op && o.Bench != nil
	})
	if i < 0 {
		var names []string
		for _, o := range Ops() {
			names = append(names, o.Name)
		}
		return nil, fmt.Errorf("there is no op %q, want one of %s", op, strings.Join(names, ", "))
	}

	if dtype.size() == 0 {
		return nil, fmt.Errorf(
			"there is no type %q, want float64, float32, bfloat16, float16 or float8",
			dtype)
	}

	s := opcase.All[i].Bench
	if want := strings.Split(s.Shape, ", "); len(shape) != len(want) {
		return nil, fmt.Errorf("%s: the shape is %v, want %d numbers: %s", op,
			shape, len(want), s.Shape)
	}

	for _, n := range shape {
		if n < 1 {
			return nil, fmt.Errorf("%s: the shape is %v, want numbers of at least 1: %s", op, shape,
				s.Shape)
		}
	}

	if s.Check != nil {
		if err := s.Check(shape); err != nil {
			return nil, fmt.Errorf("%s: the shape is %v (%s): %w", op, shape, s.Shape, err)
		}
	}

	if err := fits("inputs and result take", s.Elements(shape)); err != nil {
		return nil, fmt.Errorf("%s: the shape is %v (%s): %w", op, shape, s.Shape, err)
	}

	return &bench{op: opcase.All[i], shape: shape, dtype: dtype}, nil
}

// fits returns an error if the given number of elements exceeds the computer's memory.
func fits(what string, elements float64) error {
	if elements > math.MaxInt64/8 {
		return fmt.Errorf("%s %.2g numbers", what, elements)
	}
	return memory.Check(what, 8*uint64(elements))
}

// floats returns the type of the graph. A GPU rounds its operands itself.
func (b *bench) floats() tensor.Dtype {
	if b.dtype == Float64 {
		return tensor.Float64
	}
	return tensor.Float32
}

// measure adds the figures of a peer, which is one of the compared implementations: first with the
// variants it chooses, then with every other variant.
func (b *bench) measure(p peer) {
	usual, choices := b.figure(p, nil)
	if usual.Peer == "" {
		return
	}

	b.figures = append(b.figures, usual)
	for _, c := range choices {
		seen := map[string]bool{c.Variant: true}
		for _, variant := range c.Variants {
			if !seen[variant] {
				f, _ := b.figure(p, []string{exactPattern(c.Op) + "=" + exactPattern(variant)})
				b.figures = append(b.figures, f)
			}
			seen[variant] = true
		}
	}
}

// exactPattern returns a pattern that matches only the given name.
func exactPattern(name string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(name)
}

// figure measures a peer under rules and returns the choices it made. A figure without a Peer means
// that the peer does not participate.
func (b *bench) figure(p peer, rules []string) (f Figure, choices []optime.Choice) {
	f.Peer, f.Err = p(b)
	if f.Peer == "" || f.Err != nil {
		return f, nil
	}

	stock := f.Peer == tapePeer
	for _, training := range []bool{false, true} {
		g, err := b.build(stock, training)
		if err != nil {
			f.Err = err
			return f, nil
		}
		took, chosen, y, err := b.timed(f.Peer, g, rules)
		if err != nil {
			f.Err = err
			return f, nil
		}
		if choices, f.Variant = chosen, variantOf(chosen); training { // the choices now include the backward pass
			f.Training = took
			continue
		}
		f.Forward, f.Distance = took, b.distance(y)
		f.Bytes, f.FLOPs = g.bytes(b.dtype), b.op.Bench.FLOPs(b.shape)
	}

	return f, choices
}

// variantOf lists the choices among several variants, or the single variant if nothing was chosen.
func variantOf(choices []optime.Choice) string {
	var several, single []string
	for _, c := range choices {
		switch text := c.Op + "=" + c.Variant; {
		case c.Of > 1 && !slices.Contains(several, text):
			several = append(several, text)
		case c.Of == 1 && !slices.Contains(single, c.Variant):
			single = append(single, c.Variant)
		}
	}

	if len(several) > 0 {
		return strings.Join(several, ", ")
	}

	return strings.Join(single, ", ")
}

// distance compares a result with the first result. The first call sets the first result.
func (b *bench) distance(v gorgonia.Value) float64 {
	y := numbers(v)
	if b.first == nil {
		b.first = y
	}

	var difference, norm float64
	for i, want := range b.first {
		if i >= len(y) {
			return math.NaN()
		}
		difference += (y[i] - want) * (y[i] - want)
		norm += want * want
	}

	if difference == 0 {
		return 0
	}

	return math.Sqrt(difference / norm)
}

// numbers returns the elements of a value.
func numbers(v gorgonia.Value) []float64 {
	flat, err := opbase.Flat(v)
	if err != nil {
		return nil
	}

	switch x := flat.(type) {
	case []float64:
		return x
	case []float32:
		all := make([]float64, len(x))
		for i, e := range x {
			all[i] = float64(e)
		}
		return all
	}

	return nil
}

// Table formats figures for display, one line each.
func Table(figures []Figure) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%-9s %12s %12s %8s %9s %9s  %s\n", "peer", "forward us", "training us", "GB/s",
		"GFLOP/s", "distance", "variant")
	for _, f := range figures {
		if f.Err != nil {
			fmt.Fprintf(&s, "%-9s %v\n", f.Peer, f.Err)
			continue
		}
		fmt.Fprintf(&s, "%-9s %12.1f %12.1f %8.1f %9.1f %9.1g  %s\n", f.Peer,
			f.Forward.Seconds()*1e6, f.Training.Seconds()*1e6, f.Bandwidth()/1e9,
			f.Rate()/1e9, f.Distance, f.Variant)
	}

	return s.String()
}
