package cudaops

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// The gradient g of an attention's result y is mostly that of a linear layer's input, a product g = x·w. Where one kernel forms all
// gradients of the attention, it begins with Σ g·y of every row and head. Either a pass over g and y forms that, or the product does,
// which saves reading g once more. The tuner decides.

// formStatistics has the product that is g also form what the backward pass of the attention begins with, in the workspace stats, and
// reports whether it may, as it does not without such a product, or where that would be slower. Then the product does so in runs in which
// the backward pass is fused.
func (c *compiler) formStatistics(s kernels.AttentionShape, g, y, lse, stats *array, fused func() (bool, error)) (bool, error) {
	p, ok := c.products[g]
	before := func(a *array) bool { return a.block != nil && !a.resident && a.First >= 0 && a.First < p.task }
	// One of float8 has its right operand transposed.
	if !ok || p.transA || p.transB || p.alpha != 0 || p.beta != 0 || p.batch > 1 || y.stride != 0 || !before(y) || !before(lse) {
		return false, nil
	}
	m, t, d := c.m, g.elem.dtype(), p.a.shape[1]
	w := productWays{product: p.product, op: "StatisticsProduct",
		shape: fmt.Sprintf("%dx%d, %d heads of %d, depth %d, %v", s.Batch, s.Seq, s.Heads, s.HeadDim, d, t),
		units: []string{"gemm_hopper_stats", "attention"}, fused: m.k.AttentionGradProductWays(s, d, t),
		arrays: []*array{g, p.a, p.b, y, lse, stats},
		arguments: []argument{numbers(writes, g.len(), t), numbers(reads, p.a.len(), t), numbers(reads, p.b.len(), t), numbers(reads, y.len(), t),
			numbers(reads, lse.len(), driver.Float32), numbers(writes, stats.len(), driver.Float32)}}
	w.run = func(way kernels.Way, a []driver.Ptr) error {
		return m.k.AttentionGradProduct(m.stream, kernels.AttentionGradProduct{G: a[0], X: a[1], W: a[2], Y: a[3], LSE: a[4], Stats: a[5],
			AttentionShape: s, D: d, Type: t, Way: way})
	}
	w.separate = func(product matmulRun, a []driver.Ptr) error {
		rows := func(p driver.Ptr) kernels.Rows { return kernels.Rows{Ptr: p, Stride: g.shape[1]} }
		of := s
		of.Variant = kernels.AttentionHopperFused
		return first(product(a[0], a[1], a[2]), func() error {
			return m.k.AttentionStatistics(m.stream, of, a[5], rows(a[0]), rows(a[3]), a[4], t)
		})
	}
	choice, err := c.chooseFused(w)
	if choice == nil || err != nil {
		return false, err
	}
	delete(c.products, g) // of a sum of attentions' results it is the gradient of each, but serves one
	task := &c.tasks[p.task]
	alone := task.run
	task.run = func() error {
		used := len(m.tuner.used)
		use, err := fused()
		if m.tuner.used = m.tuner.used[:used]; err != nil || !use { // what is chosen there is the attention's to tell
			return first(err, alone)
		}
		m.tuner.use(choice.index)
		return w.run(choice.way, w.addresses())
	}
	for _, a := range []*array{y, lse, stats} {
		c.touch(a, p.task)
	}
	task.bytes += float64(y.extent() + 3*lse.extent()) // the statistics are two of lse's size
	return true, nil
}
