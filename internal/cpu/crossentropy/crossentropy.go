// Package crossentropy computes the mean cross-entropy of logits, or of a linear layer without
// storing all logits at once, the log-probability of each target, and the gradients.
package crossentropy

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/cpu/vec"
)

// Forward returns the mean negative log-likelihood m + log l − logits[r, targets[r]] over the rows
// with a target of at least 0, where m is the row's largest logit and l = Σ exp(logits[r] − m).
// logits is len(targets)×v. At least one row must have a target.
//
// It sets normalizers, len(targets)×2, to m and l of each such row. They are stored separately
// because m + log l is not exact. Near 10⁶, float32 rounds it by up to 0.03, which would change the
// probabilities of the backward pass by 3%.
func Forward[T cpu.Float](normalizers, logits []T, targets []int, v int) float64 {
	b := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(b)
	losses := b.Floats(len(targets))
	cpu.Spread(len(targets), cpu.Grain(20*v), rowLosses[T]{losses, normalizers, logits, targets, v})
	return vec.Sum(losses) / float64(Targets(targets))
}

// Targets returns the number of targets that are at least 0.
func Targets(targets []int) int {
	n := 0
	for _, t := range targets {
		if t >= 0 {
			n++
		}
	}
	return n
}

// rowLosses computes the loss of each row, or 0 for a row without target, and its normalizers.
type rowLosses[T cpu.Float] struct {
	losses              []float64
	normalizers, logits []T
	targets             []int
	v                   int
}

func (s *rowLosses[T]) Span(lo, hi int) {
	b := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(b)
	row := b.Elements(s.v)
	for r := lo; r < hi; r++ {
		s.losses[r] = 0
		if s.targets[r] < 0 {
			continue
		}
		x := s.logits[r*s.v:][:s.v]
		m := vec.Max(x)
		l := vec.ExpSub(row, x, m)
		s.normalizers[2*r], s.normalizers[2*r+1] = m, l
		s.losses[r] = float64(m-x[s.targets[r]]) + math.Log(float64(l))
	}
}

// Backward computes dlogits[r] = g·(softmax(logits[r]) − onehot(targets[r])) with the normalizers
// of Forward, and 0 for rows without target. dlogits may be logits.
func Backward[T cpu.Float](dlogits, logits, normalizers []T, targets []int, v int, g T) {
	cpu.Spread(len(targets), cpu.Grain(20*v),
		rowGradients[T]{dlogits, logits, normalizers, targets, v, g, nil})
}

// rowGradients are the arguments of Backward.
type rowGradients[T cpu.Float] struct {
	dlogits, logits, normalizers []T
	targets                      []int
	v                            int
	g                            T
	factors                      []T // of the rows, in addition to g; nil for 1
}

func (s *rowGradients[T]) Span(lo, hi int) {
	for r := lo; r < hi; r++ {
		d := s.dlogits[r*s.v:][:s.v]
		if s.targets[r] < 0 {
			clear(d)
			continue
		}
		g := s.g
		if s.factors != nil {
			g *= s.factors[r]
		}

		m, l := s.normalizers[2*r], s.normalizers[2*r+1]
		vec.ExpSub(d, s.logits[r*s.v:][:s.v], m)
		d[s.targets[r]] -= l
		vec.Scale(d, g/l)
	}
}

// chunkRows returns the number of rows of v logits in a chunk of LinearForward: about four
// megabytes of float32.
func chunkRows(v int) int { return max(16, 1<<20/v) }

// LinearForward returns [Forward] of the logits x·wᵀ, where x is len(targets)×d and w is v×d, and
// sets normalizers. Logits exist for one chunk of rows at a time.
func LinearForward[T cpu.Float](normalizers, x, w []T, targets []int, d, v int) float64 {
	return meanLoss(normalizers, targets, v, linearLogits(x, w, d, v))
}

// CompactForward is [LinearForward] for weights in a compact type.
func CompactForward(normalizers, x []float32, w *gemm.Compact, targets []int) float64 {
	return meanLoss(normalizers, targets, w.Out, compactLogits(x, w))
}

// compactLogits is linearLogits for weights in a compact type.
func compactLogits(x []float32, w *gemm.Compact) func(logits []float32, lo, hi int) {
	return func(logits []float32, lo, hi int) { w.Linear(nil, logits, x[lo*w.In:hi*w.In], hi-lo) }
}

// LogProbs sets each element of y to the log-probability of a row's target under softmax(x·wᵀ), or to 0
// for a row without target, and sets normalizers as LinearForward does.
func LogProbs[T cpu.Float](y, normalizers, x, w []T, targets []int, d, v int) {
	logProbs(y, normalizers, targets, v, linearLogits(x, w, d, v))
}

// CompactLogProbs is [LogProbs] for weights in a compact type.
func CompactLogProbs(y, normalizers, x []float32, w *gemm.Compact, targets []int) {
	logProbs(y, normalizers, targets, w.Out, compactLogits(x, w))
}

// logProbs is LogProbs for the logits that a function computes.
func logProbs[T cpu.Float](y, normalizers []T, targets []int, v int, compute func(logits []T, lo, hi int)) {
	b := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(b)
	losses := b.Floats(len(targets))
	chunkedLosses(losses, normalizers, targets, v, compute)
	for r, loss := range losses {
		y[r] = T(-loss)
	}
}

// linearLogits returns a function that computes rows [lo, hi) of x·wᵀ.
func linearLogits[T cpu.Float](x, w []T, d, v int) func(logits []T, lo, hi int) {
	return func(logits []T, lo, hi int) { gemm.Linear(logits, x[lo*d:hi*d], w, hi-lo, d, v) }
}

// meanLoss is [Forward] of the logits that a function computes for rows [lo, hi).
func meanLoss[T cpu.Float](normalizers []T, targets []int, v int, compute func(logits []T, lo, hi int)) float64 {
	b := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(b)
	losses := b.Floats(len(targets))
	chunkedLosses(losses, normalizers, targets, v, compute)
	return vec.Sum(losses) / float64(Targets(targets))
}

// chunkedLosses computes the loss of each row of logits, or 0 for a row without target, and the normalizers.
func chunkedLosses[T cpu.Float](losses []float64, normalizers []T, targets []int, v int,
	compute func(logits []T, lo, hi int)) {
	rows, chunk := len(targets), min(len(targets), chunkRows(v))
	b := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(b)
	logits := b.Elements(chunk * v)
	for lo := 0; lo < rows; lo += chunk {
		hi := min(lo+chunk, rows)
		compute(logits, lo, hi)
		cpu.Spread(hi-lo, cpu.Grain(20*v), rowLosses[T]{losses[lo:hi],
			normalizers[2*lo : 2*hi], logits, targets[lo:hi], v})
	}
}

// LinearBackward computes dx and, unless it is empty, dw for the gradient g of the mean loss. It
// recomputes the logits from x and w, one chunk of rows at a time.
func LinearBackward[T cpu.Float](dx, dw, x, w, normalizers []T, targets []int, d, v int, g T) {
	linearBackward(dx, dw, x, w, normalizers, targets, d, v, g, nil)
}

// LogProbsBackward computes dx and, unless it is empty, dw for the gradients g of the log-probabilities
// that LogProbs computes.
func LogProbsBackward[T cpu.Float](dx, dw, x, w, normalizers []T, targets []int, d, v int, g []T) {
	linearBackward(dx, dw, x, w, normalizers, targets, d, v, -1, g)
}

// CompactBackward computes dx as LinearBackward does, for weights in a compact type.
func CompactBackward(dx, x []float32, w *gemm.Compact, normalizers []float32, targets []int, g float32) {
	compactBackward(dx, x, w, normalizers, targets, g, nil)
}

// CompactLogProbsBackward computes dx as LogProbsBackward does, for weights in a compact type.
func CompactLogProbsBackward(dx, x []float32, w *gemm.Compact, normalizers []float32, targets []int,
	g []float32) {
	compactBackward(dx, x, w, normalizers, targets, -1, g)
}

func compactBackward(dx, x []float32, w *gemm.Compact, normalizers []float32, targets []int, g float32,
	factors []float32) {
	d := w.In
	chunkedGradients(normalizers, targets, w.Out, g, factors, compactLogits(x, w),
		func(dlogits []float32, lo, hi int) { w.InputGrad(nil, dx[lo*d:hi*d], dlogits, hi-lo) })
}

// linearBackward computes dx and dw for the gradient g of each row's loss, times the row's factor.
func linearBackward[T cpu.Float](dx, dw, x, w, normalizers []T, targets []int, d, v int, g T,
	factors []T) {
	beta := T(0)
	use := func(dlogits []T, lo, hi int) {
		gemm.Mul(false, false, hi-lo, d, v, 1, dlogits, v, w, d, 0, dx[lo*d:hi*d], d)
		if len(dw) > 0 {
			gemm.Mul(true, false, v, d, hi-lo, 1, dlogits, v, x[lo*d:hi*d], d, beta, dw, d)
		}
		beta = 1
	}
	chunkedGradients(normalizers, targets, v, g, factors, linearLogits(x, w, d, v), use)
}

// chunkedGradients computes the gradients of the logits of one chunk of rows [lo, hi) at a time, and passes
// them to use.
func chunkedGradients[T cpu.Float](normalizers []T, targets []int, v int, g T, factors []T,
	compute, use func(logits []T, lo, hi int)) {
	rows, chunk := len(targets), min(len(targets), chunkRows(v))
	b := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(b)
	logits := b.Elements(chunk * v)
	for lo := 0; lo < rows; lo += chunk {
		hi := min(lo+chunk, rows)
		compute(logits, lo, hi)
		own := factors
		if own != nil {
			own = own[lo:hi]
		}
		cpu.Spread(hi-lo, cpu.Grain(20*v), rowGradients[T]{logits, logits, normalizers[2*lo : 2*hi],
			targets[lo:hi], v, g, own})
		use(logits, lo, hi)
	}
}
