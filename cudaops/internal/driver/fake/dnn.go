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
	if !c.driver.config.Dnn {
		return nil, &driver.NotFoundError{Library: "the fake cuDNN", Help: "The configuration leaves it out."}
	}
	return dnn{c}, nil
}

func (dnn) Version() int    { return 91901 }
func (dnn) Library() string { return "fake" }

type attention struct {
	c    *Context
	spec driver.AttentionSpec
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

// Workspace is what cuDNN's is.
func (p *attention) Workspace() int { return 256 }

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
	return c.issue(Op{Call: call, Stream: s, Dst: a.Y}, driver.Stats{Launches: 1}, func() error {
		return c.run(func(l *Launch) {
			clear(Slice[byte](l, a.Workspace, p.Workspace()))
			p.compute(l, a)
		}, call, driver.LaunchConfig{}, nil)
	})
}

// compute is the definition of AttentionSpec.
func (p *attention) compute(l *Launch, x driver.AttentionArgs) {
	a, rows := p.spec, p.spec.Batch*p.spec.Seq
	of := func(at driver.Ptr, stride, heads int) matrix {
		return view(l, at, a.Type, stride, rows, heads*a.HeadDim)
	}
	q, k, v, y := of(x.Q, a.Q, a.Heads), of(x.K, a.K, a.KVHeads), of(x.V, a.V, a.KVHeads), of(x.Y, a.Y, a.Heads)
	lse := view(l, x.LSE, driver.Float32, a.Seq, a.Batch*a.Heads, a.Seq)
	scores := make([]float64, a.Seq)
	for head := range a.Batch * a.Heads {
		first, column := head/a.Heads*a.Seq, head%a.Heads*a.HeadDim
		key := head % a.Heads / (a.Heads / a.KVHeads) * a.HeadDim // the column of the head's keys
		for i := range a.Seq {
			seen, total := scores, 0.0
			if a.Causal {
				seen = scores[:i+1]
			}
			for j := range seen {
				dot := 0.0
				for e := range a.HeadDim {
					dot += q.of(false, first+i, column+e) * k.of(false, first+j, key+e)
				}
				seen[j] = math.Exp(a.Scale * dot)
				total += seen[j]
			}
			for e := range a.HeadDim {
				sum := 0.0
				for j, s := range seen {
					sum += s / total * v.of(false, first+j, key+e)
				}
				y.set(first+i, column+e, sum)
			}
			lse.set(head, i, math.Log(total))
		}
	}
}
