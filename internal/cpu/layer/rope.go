package layer

import (
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// RoPE rotates the pairs (i, i+h) of every head, where h = headDim/2: (a, b) becomes (a·cos −
// b·sin, b·cos + a·sin). The cosine and sine of the angle are at [position·h + i] of the tables. x
// and y are rows×(heads·headDim), and row r has position r mod seq. With inverse, the rotation is
// reversed, which is also the gradient.
func RoPE[T cpu.Float](y, x, cos, sin []T, seq, heads, headDim int, inverse bool) {
	d := heads * headDim
	sign := T(1)
	if inverse {
		sign = -1
	}
	cpu.Spread(len(x)/d, cpu.Grain(4*d), rope[T]{y, x, cos, sin, sign, seq, d, headDim})
}

type rope[T cpu.Float] struct {
	y, x, cos, sin  []T
	sign            T
	seq, d, headDim int
}

func (t *rope[T]) Span(lo, hi int) {
	h := t.headDim / 2
	for r := lo; r < hi; r++ {
		c, s := t.cos[r%t.seq*h:][:h], t.sin[r%t.seq*h:][:h]
		for o := r * t.d; o < (r+1)*t.d; o += t.headDim {
			vec.Rotate(t.y[o:][:h], t.y[o+h:][:h], t.x[o:][:h], t.x[o+h:][:h], c, s, t.sign)
		}
	}
}
