package cpuops

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// WeightType is an element type of the matrices in [Weights].
type WeightType uint8

// The types of weights.
const (
	// Float32 holds a weight in 4 bytes, without rounding. Products of a few rows are about as fast as with ordinary
	// values.
	Float32 WeightType = WeightType(gemm.Float32)
	// BFloat16 holds a weight in 2 bytes, rounded to nearest even.
	BFloat16 WeightType = WeightType(gemm.BFloat16)
	// Q8 is llama.cpp's q8_0. It holds 32 adjacent weights of a row in 34 bytes, as multiples of their largest
	// magnitude divided by 127.
	Q8 WeightType = WeightType(gemm.Q8)
	// Float8 holds a weight as an E4M3 byte, with a float32 scale for each row. Float8 and NF4 suit frozen
	// weights during training. With few rows, products are slow.
	Float8 WeightType = WeightType(gemm.Float8)
	// NF4 holds a weight in 4 bits: bitsandbytes' NormalFloat, with a scale for every 64 adjacent weights. The scales
	// take 8 bits each ("double quantization"), so a weight takes 4.13 bits in total.
	NF4 WeightType = WeightType(gemm.NF4)
)

// weightTypes lists all types.
var weightTypes = []WeightType{Float32, BFloat16, Q8, Float8, NF4}

// String returns the type's name: f32, bf16, q8_0, f8 or nf4.
func (t WeightType) String() string { return gemm.CompactType(t).String() }

// Bits returns the number of bits of a weight, including its share of the scales in a large matrix.
func (t WeightType) Bits() float64 {
	switch t {
	case BFloat16:
		return 16
	case Q8:
		return 8.5
	case Float8:
		return 8
	case NF4:
		return 4 + 8./64 + 32./(64*256)
	}
	return 32
}

// UnmarshalText sets t to the type with the given name.
func (t *WeightType) UnmarshalText(name []byte) error {
	for _, x := range weightTypes {
		if strings.EqualFold(string(name), x.String()) {
			*t = x
			return nil
		}
	}
	return fmt.Errorf("the type of weights is %.20q, want f32, bf16, q8_0, f8 or nf4", name)
}

// Weights holds matrices of a model in a compact form, for machines that only read them (see
// [WithWeights]). The products of such machines widen the weights to float32, and everything else is in
// float32 too. With few rows, a product takes as long as reading the weights, so compact weights make it
// faster.
//
// Unless the type is Float8 or NF4, each element of a product is summed in an order that does not depend on
// the number of rows. The zero value has no matrices.
type Weights struct {
	slab     cpu.Slab
	matrices map[string]*gemm.Compact
}

// Bytes returns the memory that the matrices take.
func (w *Weights) Bytes() (n int) {
	counted := map[*gemm.Compact]bool{}
	for _, m := range w.matrices {
		if !counted[m] {
			n, counted[m] = n+m.Bytes(), true
		}
	}
	return n
}

// Names returns the names of the matrices in alphabetical order.
func (w *Weights) Names() []string {
	if w == nil {
		return nil
	}
	return slices.Sorted(maps.Keys(w.matrices))
}

// Matrix returns the type and the shape of a matrix. ok is false if there is no matrix with this name.
func (w *Weights) Matrix(name string) (t WeightType, rows, width int, ok bool) {
	m := w.Compact(name)
	if m == nil {
		return 0, 0, 0, false
	}
	return WeightType(m.Type), m.Out, m.In, true
}

// Has reports whether there is a matrix with the given name.
func (w *Weights) Has(name string) bool { return w.Compact(name) != nil }

// Rows writes rows [from, to) of a matrix to y, as float32.
func (w *Weights) Rows(name string, y []float32, from, to int) error {
	m := w.Compact(name)
	if m == nil || from < 0 || to > m.Out || from > to || len(y) < (to-from)*m.In {
		return fmt.Errorf("cpuops.Weights.Rows: there are no rows %d to %d of a matrix %.100q, or y has no room "+
			"for them", from, to, name)
	}
	m.Rows(y, from, to)
	return nil
}

// Compact returns a matrix, or nil if there is none with this name.
func (w *Weights) Compact(name string) *gemm.Compact {
	if w == nil {
		return nil
	}
	return w.matrices[name]
}

// Add adds a matrix of the given type for the parameter with the given name. It calls read once, which must pass all
// elements, row by row and in parts of any size, to put. It returns an error if an element is not finite or
// exceeds the range of the type.
func (w *Weights) Add(t WeightType, name string, rows, width int,
	read func(put func(part []float32) error) error) error {
	switch {
	case !slices.Contains(weightTypes, t):
		return fmt.Errorf("cpuops.Weights.Add: the type is %d, want Float32, BFloat16, Q8, Float8 or NF4", t)
	case rows < 1 || width < 1:
		return errors.New("cpuops.Weights.Add: the matrix is empty")
	}

	m := gemm.NewCompact(gemm.CompactType(t), rows, width, &w.slab)
	f := filling{m: m, pending: make([]float32, 0, width*fillRows(width))}
	err := read(f.put)
	if err == nil {
		err = f.finish()
	}
	if err != nil {
		return fmt.Errorf("cpuops.Weights.Add: %s: %w", name, err)
	}

	if w.matrices == nil {
		w.matrices = map[string]*gemm.Compact{}
	}
	w.matrices[name] = m
	return nil
}

// Alias adds name as another name of the matrix named by the argument of, without copying the
// matrix.
func (w *Weights) Alias(name, of string) error {
	m := w.Compact(of)
	if m == nil || w.Has(name) {
		return fmt.Errorf("cpuops.Weights.Alias: there is no matrix %.100q, or there is one with the name %.100q already",
			of, name)
	}
	w.matrices[name] = m
	return nil
}

// fillRows returns the number of rows of a matrix that are converted together.
func fillRows(width int) int { return max(1, 1<<19/(64*width)) * 64 }

// A filling converts a matrix whose elements arrive in parts.
type filling struct {
	m       *gemm.Compact
	row     int
	pending []float32 // elements not yet converted, starting with those of row
}

// put appends elements.
func (f *filling) put(part []float32) error {
	for len(part) > 0 {
		n := min(len(part), cap(f.pending)-len(f.pending))
		f.pending = append(f.pending, part[:n]...)
		part = part[n:]
		if len(f.pending) == cap(f.pending) {
			if err := f.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// flush converts the pending rows.
func (f *filling) flush() error {
	rows := len(f.pending) / f.m.In
	if f.row+rows > f.m.Out {
		return fmt.Errorf("it has more than %d×%d elements", f.m.Out, f.m.In)
	}
	if rows == 0 {
		return nil
	}
	if err := f.m.Set(f.row, f.pending); err != nil {
		return err
	}
	f.row, f.pending = f.row+rows, f.pending[:0]
	return nil
}

// finish converts the last rows and checks the number of elements.
func (f *filling) finish() error {
	if got, want := f.row*f.m.In+len(f.pending), f.m.Out*f.m.In; got != want {
		return fmt.Errorf("it has %d elements, want %d×%d", got, f.m.Out, f.m.In)
	}
	if err := f.flush(); err != nil {
		return err
	}
	f.m.Finish()
	return nil
}

// WithWeights makes each input that has the name of a matrix in w read this matrix instead of a value of the
// node. Linear, AdaptedLinear, SiLUMLP, GELUMLP, Embedding, LinearCrossEntropy, LinearLogProbs and RowNorms
// can read them, and so can the gradients of such ops with a frozen weight, as well as [autodiff.Recompute].
// Several machines can share the weights.
//
// [autodiff.Recompute]: https://pkg.go.dev/github.com/kasmina-go/kasmina/autodiff#Recompute
func WithWeights(w *Weights) Option {
	return func(c *config) error {
		if w == nil {
			return errors.New("WithWeights: the weights are nil")
		}
		c.weights = w
		return nil
	}
}

// FastWeights reports whether the CPU has vector instructions for compact weights. Without these, products
// are slower than in float32.
func FastWeights() bool { return cpu.Level() == cpu.AVX2 || cpu.Level() == cpu.AVX512 }

// CanBeCompact reports whether every node of a graph that reads n can read it from [Weights].
func CanBeCompact(g *gorgonia.ExprGraph, n *gorgonia.Node) bool {
	if n.Dims() != 2 || n.Dtype() != tensor.Float32 {
		return false
	}
	for _, reader := range g.AllNodes() {
		for i, child := range graph.Children(reader) {
			if child == n && !readsCompact(reader, i) {
				return false
			}
		}
	}
	return true
}

// readsCompact reports whether a node can read an operand in compact form.
func readsCompact(n *gorgonia.Node, operand int) bool {
	o, ok := n.Op().(opbase.CompactReader)
	return ok && o.ReadsCompact(operand)
}

// WithMatrices makes inputs read the given matrices instead of their values, as WithWeights does.
func WithMatrices(matrices map[*gorgonia.Node]*gemm.Compact) Option {
	return func(c *config) error {
		c.matrices = matrices
		return nil
	}
}

// matrix returns the matrix for an input, or nil if there is none.
func (c *config) matrix(n *gorgonia.Node) (*gemm.Compact, error) {
	m := c.matrices[n]
	if m == nil {
		m = c.weights.Compact(n.Name())
	}
	if m == nil {
		return nil, nil
	}
	if n.Dtype() != tensor.Float32 || !n.Shape().Eq(tensor.Shape{m.Out, m.In}) {
		return nil, fmt.Errorf("WithWeights: the weights are a float32 of shape (%d, %d), and the input is a "+
			"%v of shape %v", m.Out, m.In, n.Dtype(), n.Shape())
	}
	return m, nil
}

// checkCompact returns an error if a node reads a compact matrix that it cannot read.
func checkCompact(n *gorgonia.Node, in []*value) error {
	for i, v := range in {
		if _, ok := v.flat.(*gemm.Compact); ok && !readsCompact(n, i) {
			return fmt.Errorf("WithWeights: it reads %s, which only Linear, AdaptedLinear, SiLUMLP, GELUMLP, "+
				"Embedding, LinearCrossEntropy, LinearLogProbs and RowNorms can read in compact form",
				graph.Describe(v.node))
		}
	}
	return nil
}
