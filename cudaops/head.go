package cudaops

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
)

// logitBytes is the most of the logits that the fused output layer holds at a time, and twice that of a model of up to
// narrowFeatures. Large enough for a full GPU, small beside the activations of a model with such a vocabulary. With twice as much
// a step takes 1 % less time at 768 and 1024 features, and as much at 2048 (H200).
const (
	logitBytes     = 540 << 20
	narrowFeatures = 1024
)

// headChunk is how many of the rows the output layer takes at a time. The gradient of its input, of d columns, is a product
// with few blocks, each of which goes over the whole vocabulary: what counts is how many turns they take on the GPU's
// multiprocessors in all. Fewer chunks also add less often to the weights' gradient.
func headChunk(rows, vocab, d, size, multiprocessors int) int {
	const tile, width = 128, 256 // of a block of cuBLASLt's
	up := func(n, to int) int { return (n + to - 1) / to }
	most := logitBytes
	if d <= narrowFeatures {
		most *= 2
	}
	fewest := up(rows, max(tile, most/(vocab*size)/tile*tile))
	best, least := 0, math.MaxInt
	for n := fewest; n <= 2*fewest; n++ {
		chunk := min(rows, up(up(rows, n), tile)*tile)
		if turns := n * up(up(chunk, tile)*up(d, width), multiprocessors); turns < least {
			best, least = chunk, turns
		}
	}
	return best
}

// lowerLinearCrossEntropy computes the loss, and where the graph wants gradients, these too, for a loss gradient of 1, or the
// loss scale in its place: the logits then need to be formed only once.
func lowerLinearCrossEntropy(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	x, w := c.lowerPair(n, in[0], in[1])
	targets, m := in[2], c.m
	rows, v, d := x.shape[0], w.shape[0], x.shape[1]
	c.bound(targets, idRange{op: "LinearCrossEntropy", argument: "targets", vocab: v, negative: true})
	loss, losses, saved := c.aux(), c.aux(rows), classified{scale: c.aux(1)}
	if c.hasGradient(n) {
		saved.dx, saved.dw = c.like(x), c.aux(w.shape...)
	}
	c.saved[n.Op()] = saved
	c.do(n, func() error { return m.k.CrossEntropyScale(m.stream, saved.scale.ptr(), intsOf(targets), rows) }, targets, saved.scale)
	chunk := headChunk(rows, v, d, x.elem.size(), m.device.info.SMs)
	logits := c.newArray(x.elem, chunk, v)
	for lo := 0; lo < rows; lo += chunk {
		here := min(chunk, rows-lo)
		h := headRows{node: n, x: x.view(lo*d, here, d), w: w, logits: logits.view(0, here, v), losses: losses, targets: targets, lo: lo,
			classified: saved}
		if err := c.headRows(h); err != nil {
			return nil, err
		}
	}
	c.do(n, func() error { return m.k.CrossEntropyMean(m.stream, loss.ptr(), losses.ptr(), saved.scale.ptr(), rows) }, loss, losses, saved.scale)
	return loss, nil
}

// headRows is a chunk of the output layer's rows, from row lo on: x and logits are its own, losses and targets those of all rows.
type headRows struct {
	node                          *gorgonia.Node
	x, w, logits, losses, targets *array
	lo                            int
	classified
}

func (h *headRows) rows() int { return h.x.shape[0] }

// shape is the product's: rows, vocabulary, features.
func (h *headRows) shape() kernels.LinearCrossEntropyShape {
	return kernels.LinearCrossEntropyShape{Rows: h.rows(), V: h.w.shape[0], D: h.x.shape[1]}
}

func (h *headRows) targetsHere() kernels.Ints {
	return kernels.Ints{Ptr: h.targets.ptr().Offset(8 * h.lo), Wide: true}
}

func (h *headRows) lossesHere() gpu.Ptr { return h.losses.ptr().Offset(4 * h.lo) }

// dxHere is the gradient of x.
func (h *headRows) dxHere() *array { return h.dx.view(h.lo*h.x.shape[1], h.x.shape...) }

// dwProduct adds to the gradient of w.
func (h *headRows) dwProduct(x *array) product {
	p := product{d: h.dw, a: h.logits, b: x, transA: true}
	if h.lo > 0 {
		p.beta = 1
	}
	return p
}

// headRows adds the losses of a chunk, and their gradients where they are wanted.
func (c *compiler) headRows(h headRows) error {
	if h.dx != nil {
		if choice, err := c.chooseHead(h); choice != nil || err != nil {
			return first(err, func() error { return c.headFused(h, *choice) })
		}
	}
	m := c.m
	if err := c.matmul(h.node, product{d: h.logits, a: h.x, b: h.w, transB: true}); err != nil {
		return err
	}
	call := func() error {
		a := kernels.CrossEntropy{Logits: h.logits.ptr(), Losses: h.lossesHere(), Rows: h.rows(), V: h.w.shape[0],
			Type: h.logits.elem.dtype(), Targets: h.targetsHere()}
		if h.dx != nil {
			a.Scale, a.Grad = h.scale.ptr(), c.lossScale()
		}
		return m.k.CrossEntropy(m.stream, a)
	}
	touched := []*array{h.logits, h.losses, h.targets, h.scale}
	if h.dx == nil {
		c.do(h.node, call, touched...)
		return nil
	}
	c.do(h.node, call, append(touched, h.logits)...) // whose place the gradient takes
	if err := c.matmul(h.node, product{d: h.dxHere(), a: h.logits, b: h.w}); err != nil {
		return err
	}
	return c.matmul(h.node, h.dwProduct(h.x))
}

// lossScale is where the loss scale is, null if there is none.
func (c *compiler) lossScale() gpu.Ptr {
	if c.scale == nil {
		return 0
	}
	return c.scale.ptr()
}

// headFused is headRows with the exponentials formed in the product of the logits (see [kernels.LinearCrossEntropy]).
func (c *compiler) headFused(h headRows, choice fusedChoice) error {
	m, s := c.m, h.shape()
	scaled, factors, workspace, dx := c.like(h.x), c.aux(s.Rows), c.bytes(m.k.LinearCrossEntropyWorkspace(s)), h.dxHere()
	c.do(h.node, func() error {
		m.tuner.use(choice.index)
		return m.k.LinearCrossEntropy(m.stream, kernels.LinearCrossEntropy{Terms: h.logits.ptr(), Scaled: scaled.ptr(), Factors: factors.ptr(),
			Losses: h.lossesHere(), X: h.x.ptr(), W: h.w.ptr(), Targets: h.targetsHere(), Scale: h.scale.ptr(), Grad: c.lossScale(),
			Workspace: workspace.ptr(), LinearCrossEntropyShape: s, Way: choice.way})
	}, h.logits, scaled, factors, h.losses, h.x, h.w, h.targets, h.scale, workspace)
	c.computes(2 * float64(s.Rows) * float64(s.V) * float64(s.D))
	if err := c.matmul(h.node, product{d: dx, a: h.logits, b: h.w}); err != nil {
		return err
	}
	c.do(h.node, func() error { return m.k.ScaleRows(m.stream, dx.ptr(), factors.ptr(), s.Rows, s.D) }, dx, factors)
	return c.matmul(h.node, h.dwProduct(scaled))
}

// chooseHead returns how one kernel is to form the exponentials, nil if separately. The logits that it is timed with have the
// standard deviation 4.
func (c *compiler) chooseHead(h headRows) (*fusedChoice, error) {
	m, s, t := c.m, h.shape(), h.x.elem.dtype()
	x := numbers(reads, h.x.len(), t)
	x.deviation = 4 / math.Sqrt(float64(s.D))
	w := productWays{product: product{d: h.logits, a: h.x, b: h.w, transB: true}, op: "LinearCrossEntropy",
		shape: fmt.Sprintf("%dx%dx%d %v", s.Rows, s.V, s.D, t), units: []string{"gemm_hopper_loss", "crossentropy"},
		fused: m.k.LinearCrossEntropyWays(s, t), arrays: []*array{h.logits, h.x, h.w},
		arguments: []argument{numbers(writes, s.Rows, gpu.Float32), x, numbers(reads, h.w.len(), t), numbers(reads, 1, gpu.Float32),
			{role: zeroed, bytes: 8 * s.Rows}, {role: scratch, bytes: h.logits.extent()}, {role: scratch, bytes: h.x.extent()},
			{role: scratch, bytes: 4 * s.Rows}, {role: scratch, bytes: m.k.LinearCrossEntropyWorkspace(s)}, {role: scratch, bytes: h.x.extent()}}}
	w.run = func(way kernels.Way, a []gpu.Ptr) error {
		err := m.k.LinearCrossEntropy(m.stream, kernels.LinearCrossEntropy{Losses: a[0], X: a[1], W: a[2], Scale: a[3],
			Targets: kernels.Ints{Ptr: a[4], Wide: true}, Terms: a[5], Scaled: a[6], Factors: a[7], Workspace: a[8],
			LinearCrossEntropyShape: s, Way: way})
		return first(err, func() error { return m.k.ScaleRows(m.stream, a[9], a[7], s.Rows, s.D) })
	}
	w.separate = func(product matmulRun, a []gpu.Ptr) error {
		return first(product(a[5], a[1], a[2]), func() error {
			return m.k.CrossEntropy(m.stream, kernels.CrossEntropy{Losses: a[0], Scale: a[3], Targets: kernels.Ints{Ptr: a[4], Wide: true},
				Logits: a[5], Rows: s.Rows, V: s.V, Type: t})
		})
	}
	return c.chooseFused(w)
}

func lowerLinearCrossEntropyGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	saved := c.saved[n.Op().(*op.LinearCrossEntropyGradOp).Forward].(classified)
	if g := opbase.Children(n)[4]; opbase.IsConstant(g) && isOne(g.Value()) {
		return packed(saved.dx, saved.dw), nil
	}
	upstream := c.as(n, in[4], float32s)
	if c.scale != nil { // which both have
		var err error
		if upstream, err = c.elementwise(n, kernels.Div, upstream, c.scale.view(0), upstream.shape); err != nil {
			return nil, err
		}
	}
	var scaled []*array
	for _, d := range []*array{saved.dx, saved.dw} {
		g := c.as(n, upstream, d.elem)
		y, err := c.elementwise(n, kernels.Mul, d, g, d.shape)
		if err != nil {
			return nil, err
		}
		scaled = append(scaled, y)
	}
	return packed(scaled...), nil
}

func isOne(v gorgonia.Value) bool {
	x, err := opbase.Flat(v)
	one, ok := x.([]float32)
	return err == nil && ok && len(one) == 1 && one[0] == 1
}
