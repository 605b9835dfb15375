package fake

import (
	"math"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

type dnn struct{ c *Context }

// Dnn returns a cuDNN that computes in float64, if the configuration has one.
func (c *Context) Dnn() (driver.Dnn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.driver.config.Dnn == nil {
		return nil, &driver.NotFoundError{Library: "the fake cuDNN", Help: "The configuration leaves it out."}
	}
	return dnn{c}, nil
}

func (dnn) Version() int    { return 91901 }
func (dnn) Library() string { return "fake" }

type attention struct {
	c    *Context
	spec driver.AttentionSpec
	runs int
}

func (d dnn) PlanAttention(a driver.AttentionSpec) (driver.AttentionPlan, error) {
	c := d.c
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cudnnBackendFinalize"
	if err := c.begin(call); err != nil {
		return nil, err
	}
	if err := a.Check(); err != nil {
		return nil, err
	}
	if a.HeadDim%8 != 0 {
		return nil, driver.NewDnnError(call, driver.DnnNotSupported, "the fake knows head dimensions that are multiples of 8")
	}
	c.plans++
	return &attention{c: c, spec: a}, nil
}

func (p *attention) Spec() driver.AttentionSpec { return p.spec }

// Workspace is about what cuDNN's is: one half-precision number for every query and key.
func (p *attention) Workspace() int {
	if !p.spec.Backward {
		return 256
	}
	return 256 + 2*p.spec.Batch*p.spec.Heads*p.spec.Seq*p.spec.Seq
}

func (p *attention) Close() error {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	p.c.plans--
	return nil
}

func (p *attention) Run(a driver.AttentionArgs, s driver.Stream) error {
	c := p.c
	c.mu.Lock()
	defer c.mu.Unlock()
	const call = "cudnnBackendExecute"
	if err := c.begin(call); err != nil {
		return err
	}
	if err := p.spec.CheckArgs(p.Workspace(), a); err != nil {
		return err
	}
	way := *c.driver.config.Dnn
	if way.Fails {
		return driver.NewDnnError(call, driver.DnnNotSupported, "a way that fails")
	}
	p.runs++
	off := 0.0
	if way.Wrong {
		off = 1
	}
	if way.Wavers {
		off = 1e-2 * float64(p.runs%2)
	}
	return c.issue(Op{Call: call, Stream: s, Dst: a.Y}, driver.Stats{Launches: 1}, func() error {
		return c.run(func(l *Launch) {
			clear(Slice[byte](l, a.Workspace, p.Workspace()))
			p.compute(l, a, off)
			l.Took = way.Took
		}, call, driver.LaunchConfig{}, nil)
	})
}

// attended is the operands of a run, and sums of gradients that several queries add to.
type attended struct {
	driver.AttentionSpec
	q, k, v, y, lse, g, dq, dk, dv matrix
	dkSums, dvSums                 []float64
}

// compute is the definition of AttentionSpec, with something added to the first number of a result.
func (p *attention) compute(l *Launch, x driver.AttentionArgs, off float64) {
	a, rows := p.spec, p.spec.Batch*p.spec.Seq
	queries, keys := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	of := func(at driver.Ptr, stride, width int) matrix { return view(l, at, a.Type, stride, rows, width) }
	o := attended{AttentionSpec: a, q: of(x.Q, a.Q, queries), k: of(x.K, a.K, keys), v: of(x.V, a.V, keys), y: of(x.Y, a.Y, queries),
		lse: view(l, x.LSE, driver.Float32, a.Seq, a.Batch*a.Heads, a.Seq)}
	to, run := o.y, o.forward
	if a.Backward {
		o.g, o.dq, o.dk, o.dv = of(x.G, a.G, queries), of(x.DQ, a.DQ, queries), of(x.DK, a.DK, keys), of(x.DV, a.DV, keys)
		o.dkSums, o.dvSums = make([]float64, rows*keys), make([]float64, rows*keys)
		to, run = o.dq, o.backward
	}
	for head := range a.Batch * a.Heads {
		for i := range a.Seq {
			run(head, i)
		}
	}
	for i := range o.dkSums {
		o.dk.set(i/keys, i%keys, o.dkSums[i])
		o.dv.set(i/keys, i%keys, o.dvSums[i])
	}
	to.set(0, 0, to.of(false, 0, 0)+off)
}

// scores are those of query i of a head, counted over all sequences, for the rows of keys from first on. Its numbers begin at
// row and column, those of its keys at the column key.
func (o *attended) scores(head, i int) (scores []float64, first, row, column, key int) {
	b, h := head/o.Heads, head%o.Heads
	first, row, column, key = b*o.Seq, b*o.Seq+i, h*o.HeadDim, h/(o.Heads/o.KVHeads)*o.HeadDim
	scores = make([]float64, o.Seq)
	if o.Causal {
		scores = scores[:i+1]
	}
	for j := range scores {
		scores[j] = o.Scale * o.dot(o.q, row, column, o.k, first+j, key)
	}
	return scores, first, row, column, key
}

func (o *attended) dot(m matrix, row, column int, n matrix, other, otherColumn int) (sum float64) {
	for e := range o.HeadDim {
		sum += m.of(false, row, column+e) * n.of(false, other, otherColumn+e)
	}
	return sum
}

func (o *attended) forward(head, i int) {
	scores, first, row, column, key := o.scores(head, i)
	total := 0.0
	for _, s := range scores {
		total += math.Exp(s)
	}
	for e := range o.HeadDim {
		y := 0.0
		for j, s := range scores {
			y += math.Exp(s) / total * o.v.of(false, first+j, key+e)
		}
		o.y.set(row, column+e, y)
	}
	o.lse.set(head, i, math.Log(total))
}

func (o *attended) backward(head, i int) {
	scores, first, row, column, key := o.scores(head, i)
	lse, sum := o.lse.of(false, head, i), o.dot(o.g, row, column, o.y, row, column)
	dq := make([]float64, o.HeadDim)
	for j, s := range scores {
		p := math.Exp(s - lse)
		ds := o.Scale * p * (o.dot(o.g, row, column, o.v, first+j, key) - sum)
		for e := range dq {
			dq[e] += ds * o.k.of(false, first+j, key+e)
			at := (first+j)*o.KVHeads*o.HeadDim + key + e
			o.dkSums[at] += ds * o.q.of(false, row, column+e)
			o.dvSums[at] += p * o.g.of(false, row, column+e)
		}
	}
	for e, v := range dq {
		o.dq.set(row, column+e, v)
	}
}
