// Package opbench times one op at one shape beside its peers. These are every variant in which package
// cpuops can compute it and, if there is a GPU, every variant of package cudaops. The same function
// made of Gorgonia's own ops, on Gorgonia's own machine, is one too.
//
//	figures, err := opbench.Time("RMSNorm", []int{4096, 1024}, opbench.Float32)
//	fmt.Print(opbench.Table(figures))
package opbench

import (
	"errors"
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
)

// Dtype is what an op computes with.
type Dtype string

// The types. A CPU has float32 and float64, and where products round their operands
// (cpuops.UseBFloat16) bfloat16; a GPU has all but float64, with weights of float32
// (cudaops.WithPrecision). Gorgonia's own ops have float32 and float64.
const (
	Float64  Dtype = "float64"
	Float32  Dtype = "float32"
	BFloat16 Dtype = "bfloat16"
	Float16  Dtype = "float16"
	Float8   Dtype = "float8"
)

// size is the bytes of an element of an activation, which float8 has beside what products read.
func (d Dtype) size() int {
	return map[Dtype]int{Float64: 8, Float32: 4, BFloat16: 2, Float16: 2, Float8: 2}[d]
}

// Figure is what an op takes, computed by one peer in one variant.
type Figure struct {
	Peer string // cpu, cuda or gorgonia
	// as in Attention=hopper-8, of ops that have several variants; of a CPU's others the vector
	// instructions
	Variant string
	// Forward is a forward pass, Training that and the gradients of all inputs of floats, 0 for an
	// op without. On a CPU and of Gorgonia it is the median by the clock on the wall. On a GPU it
	// is the mean of the device's time, without launches. What passes work on is in the cache if it
	// fits.
	Forward, Training time.Duration
	// Bytes is the inputs of floats and the result of a forward pass, FLOPs the multiplications and
	// additions of its products.
	Bytes, FLOPs float64
	// Distance is ‖y − y₁‖/‖y₁‖ of the result y and that of the first figure with one: what
	// rounding does, or a mistake.
	Distance float64
	Err      error // why there is nothing else
}

// Bandwidth is Bytes by Forward, in bytes a second.
func (f Figure) Bandwidth() float64 { return rate(f.Bytes, f.Forward) }

// Rate is FLOPs by Forward, in operations a second.
func (f Figure) Rate() float64 { return rate(f.FLOPs, f.Forward) }

func rate(n float64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return n / d.Seconds()
}

// Option is an option of Time.
type Option func(*config) error

type config struct {
	device  *cudaops.Device
	machine []cudaops.MachineOption
	span    time.Duration
}

// OnGPU has a GPU take part. Options are for the machines there, which tune nothing unless
// cudaops.WithTuning is among them.
func OnGPU(d *cudaops.Device, opts ...cudaops.MachineOption) Option {
	return func(c *config) error {
		if d == nil {
			return errors.New("OnGPU: the device is nil")
		}
		c.device, c.machine = d, opts
		return nil
	}
}

// WithSpan sets for how long each pass is repeated, 200 ms without it; five times at least.
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
	Shape string // what the numbers of a shape are, as in "rows, in, out"
	Usual []int  // the shape of the op in a small model
}

// Ops returns the ops, in order of names.
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

// Time times an op of [Ops] at a shape on random numbers of a type, while nothing else should run.
// The first figure is that of the CPU as it computes without rules, or of the GPU for types that a
// CPU has not. The others follow. A peer that cannot compute the op has a figure with an Err. An
// error is an op, shape or type that there is not, or an option that does not fit. The rules of
// KASMINA_VARIANTS hold here too.
func Time(op string, shape []int, dtype Dtype, opts ...Option) (figures []Figure, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("opbench.Time: %w", err)
		}
	}()

	c := config{span: 200 * time.Millisecond}
	for _, opt := range opts {
		if opt == nil {
			return nil, errors.New("an option is nil")
		}
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

// bench is an op at a shape, and what has been measured of it.
type bench struct {
	config
	op      *opcase.Op
	shape   []int
	dtype   Dtype
	figures []Figure
	first   []float64 // the result of the first figure
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

// fits returns an error where so many numbers are more than the computer's memory holds.
func fits(what string, elements float64) error {
	if elements > math.MaxInt64/8 {
		return fmt.Errorf("%s %.2g numbers", what, elements)
	}
	return memory.Check(what, 8*uint64(elements))
}

// floats is the type that the graph has: a GPU rounds what it computes with.
func (b *bench) floats() tensor.Dtype {
	if b.dtype == Float64 {
		return tensor.Float64
	}
	return tensor.Float32
}

// measure adds a peer's figures: in the variant that it chooses itself, and in every other.
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
				f, _ := b.figure(p, []string{literally(c.Op) + "=" + literally(variant)})
				b.figures = append(b.figures, f)
			}
			seen[variant] = true
		}
	}
}

// literally is a pattern that stands for a name alone.
func literally(name string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(name)
}

// figure measures a peer under rules, and returns the choices that it has. A figure without a peer
// means that there is none.
func (b *bench) figure(p peer, rules []string) (f Figure, choices []cudaops.Choice) {
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
		took, made, y, err := b.timed(f.Peer, g, rules)
		if err != nil {
			f.Err = err
			return f, nil
		}
		if choices, f.Variant = made, variantOf(made); training { // which has the backward pass's too
			f.Training = took
			continue
		}
		f.Forward, f.Distance = took, b.distance(y)
		f.Bytes, f.FLOPs = g.bytes(b.dtype), b.op.Bench.FLOPs(b.shape)
	}

	return f, choices
}

// wayOf names the choices among several variants, or the one variant where there is no choice.
func variantOf(choices []cudaops.Choice) string {
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

// distance compares a result with the first one, which it becomes if there is none.
func (b *bench) distance(v gorgonia.Value) float64 {
	y := numbers(v)
	if b.first == nil {
		b.first = y
	}

	var apart, norm float64
	for i, want := range b.first {
		if i >= len(y) {
			return math.NaN()
		}
		apart += (y[i] - want) * (y[i] - want)
		norm += want * want
	}

	if apart == 0 {
		return 0
	}

	return math.Sqrt(apart / norm)
}

// numbers is the elements of a value.
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

// Table is the figures for people: a line each.
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
