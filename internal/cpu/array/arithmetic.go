package array

import (
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// Op is an elementwise operation.
type Op uint8

// Operations.
const (
	Add Op = iota
	Sub
	Mul
	Div
)

// Arithmetic sets y = a op b elementwise. An operand with a single element is combined with every
// element of the other operand. y may be a or b.
func Arithmetic[T cpu.Float](op Op, y, a, b []T) {
	cpu.Spread(len(y), cpu.VectorGrain, arithmeticArgs[T]{op, y, a, b})
}

// arithmeticArgs are the arguments of Arithmetic.
type arithmeticArgs[T cpu.Float] struct {
	op      Op
	y, a, b []T
}

func (s *arithmeticArgs[T]) Span(lo, hi int) {
	y, a, b := s.y[lo:hi], s.a, s.b
	if len(a) == len(s.y) {
		a = a[lo:hi]
	}

	if len(b) == len(s.y) {
		b = b[lo:hi]
	}

	switch {
	case len(a) == 1 && len(y) > 1:
		scalarLeft(s.op, y, a[0], b)
	case len(b) == 1 && len(y) > 1:
		scalarRight(s.op, y, a, b[0])
	default:
		elementwise(s.op, y, a, b)
	}
}

// elementwise computes y = a op b.
func elementwise[T cpu.Float](op Op, y, a, b []T) {
	a, b = a[:len(y)], b[:len(y)]
	switch op {
	case Add:
		vec.Add(y, a, b)
	case Sub:
		for i := range y {
			y[i] = a[i] - b[i]
		}
	case Mul:
		for i := range y {
			y[i] = a[i] * b[i]
		}
	case Div:
		for i := range y {
			y[i] = a[i] / b[i]
		}
	}
}

// scalarLeft computes y = a op b for a number a.
func scalarLeft[T cpu.Float](op Op, y []T, a T, b []T) {
	b = b[:len(y)]
	switch op {
	case Add:
		for i := range y {
			y[i] = a + b[i]
		}
	case Sub:
		for i := range y {
			y[i] = a - b[i]
		}
	case Mul:
		for i := range y {
			y[i] = a * b[i]
		}
	case Div:
		for i := range y {
			y[i] = a / b[i]
		}
	}
}

// scalarRight computes y = a op b for a number b.
func scalarRight[T cpu.Float](op Op, y, a []T, b T) {
	a = a[:len(y)]
	switch op {
	case Add:
		for i := range y {
			y[i] = a[i] + b
		}
	case Sub:
		for i := range y {
			y[i] = a[i] - b
		}
	case Mul:
		for i := range y {
			y[i] = a[i] * b
		}
	case Div:
		for i := range y {
			y[i] = a[i] / b
		}
	}
}

// Accumulate adds x to y elementwise.
func Accumulate[T cpu.Float](y, x []T) { Arithmetic(Add, y, y, x) }
