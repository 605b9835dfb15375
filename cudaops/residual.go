package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// residual is what is to be done with a product: a matrix is added, and a norm of the sum may be lowered with it. A nil one is nothing.
type residual struct {
	add    *array
	norm   *gorgonia.Node // nil if there is none
	weight *array         // of the norm
}

// matrix returns what is added, nil for nothing.
func (r *residual) matrix() *array {
	if r == nil {
		return nil
	}
	return r.add
}

// residual returns the addition of a matrix to a product, of which the sum node is the result, with a norm of that. Of float8 norms round
// their results to it, which is a kernel's own.
func (c *compiler) residual(sum *gorgonia.Node, add *array) *residual {
	r := &residual{add: add}
	if c.m.config.float8 {
		return r
	}
	for _, u := range c.users[sum] {
		if isOp[*op.RMSNormOp](u) && c.values[u] == nil && opbase.Children(u)[0] == sum {
			if r.weight = c.there(opbase.Children(u)[1]); r.weight != nil {
				r.norm = u
				break
			}
		}
	}
	return r
}

// fuseResidual lowers a node whose last product can add a matrix, the sum of its result and that, and perhaps a norm of the sum.
func (c *compiler) fuseResidual(n *gorgonia.Node, lower func(*compiler, *gorgonia.Node, []*array, *residual) (*array, error)) (bool, error) {
	var sum *gorgonia.Node
	for _, u := range c.users[n] {
		if isOp[*op.SiLUMLPGradOp](u) && slices.Index(opbase.Children(u), n) == 4 {
			continue // which has the result as an input only to come after it
		}
		if sum != nil && u != sum {
			return false, nil
		}
		sum = u
	}
	add := c.activation(other(sum, n))
	if add == nil || c.kept[n] {
		return false, nil
	}
	y, err := lower(c, n, c.operands(n), c.residual(sum, add))
	if err != nil {
		return false, err
	}
	c.values[n], c.values[sum] = folded(n), y
	return true, nil
}

// matmulThen adds a product and what is to be done with that, if there is something.
func (c *compiler) matmulThen(n *gorgonia.Node, p product, then *residual) error {
	p = p.plus(then.matrix())
	if then == nil || then.norm == nil {
		return c.matmul(n, p)
	}
	return c.productNorm(n, p, then.norm, then.weight)
}

// productNorm adds a product with a matrix added to it and, if one kernel is to compute both, a norm of the sum. Else the norm is lowered
// when its turn comes.
func (c *compiler) productNorm(n *gorgonia.Node, p product, norm *gorgonia.Node, weight *array) error {
	rows, columns, d, t, m := p.d.shape[0], p.d.shape[1], p.depth(), p.d.elem.dtype(), c.m
	o, g := norm.Op().(*op.RMSNormOp), c.as(norm, weight, float32s)
	y, rstd := c.like(p.d), c.aux(rows)
	workspace := kernels.ProductNormWorkspace(rows, columns)
	w := productWays{product: p, op: "ProductNorm", shape: fmt.Sprintf("%dx%dx%d %v", rows, columns, d, t),
		units: []string{"gemm_hopper_norm", "norm"}, fused: m.k.ProductNormWays(rows, columns, d, t),
		arrays: []*array{p.d, y, rstd, p.a, p.b, p.c, g},
		arguments: []argument{numbers(writes, p.d.len(), t), numbers(writes, y.len(), t), numbers(writes, rows, driver.Float32),
			numbers(reads, p.a.len(), t), numbers(reads, p.b.len(), t), numbers(reads, p.c.len(), t), numbers(reads, columns, driver.Float32)}}
	if len(w.fused) > 0 {
		w.arrays = append(w.arrays, c.tilesOf(workspace))
		w.arguments = append(w.arguments, argument{role: given, bytes: workspace, data: make([]byte, workspace)})
	}
	w.run = func(way kernels.Way, a []driver.Ptr) error {
		return m.k.ProductNorm(m.stream, kernels.ProductNorm{Sum: a[0], Y: a[1], Rstd: a[2], X: a[3], W: a[4], C: a[5], G: a[6], Rows: rows,
			Columns: columns, D: d, Eps: o.Eps, Type: t, Workspace: a[7], Way: way})
	}
	w.separate = func(product matmulRun, a []driver.Ptr) error {
		b := kernels.RMSNorm{Y: a[1], Rstd: a[2], X: a[0], W: a[6], Rows: rows, D: columns, Eps: o.Eps, Type: t}
		ways, err := m.k.RMSNormWays(b)
		if err != nil {
			return err
		}
		if len(ways) > 0 { // as a rule of thumb has it: nothing else is timed meanwhile
			b.Way = ways[0]
		}
		return first(product(a[0], a[3], a[4], a[5]), func() error { return m.k.RMSNorm(m.stream, b) })
	}
	fused := true
	if err := c.productThen(n, w, func() { fused = false }); err != nil || !fused {
		return err
	}
	c.values[norm], c.saved[o] = y, rstd
	return nil
}

// tilesOf returns the workspace of products that end in norms, zeros at first, as all of the machine follow one another; the largest
// decides its size.
func (c *compiler) tilesOf(bytes int) *array {
	n := (bytes + 3) / 4
	if c.tiles == nil {
		c.tiles = c.newResident(float32s, n)
	}
	c.tiles.shape[0] = max(c.tiles.shape[0], n)
	c.tiles.Bytes = c.tiles.extent()
	return c.tiles
}
