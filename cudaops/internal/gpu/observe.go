package gpu

import (
	"fmt"
	"sync"
)

// Work is a piece of work on a stream, as an [Observer] sees it.
type Work struct {
	Name  string  // of the kernel, or what is done: a product of cuBLASLt, a copy, a memset
	FLOPs float64 // of a product: multiplications and additions
}

// Observer is told of each piece of work just before and just after it is enqueued. An error fails
// the call.
type Observer interface {
	Before(w Work) error
	After(w Work) error
}

// Observed is a context of which somebody may watch the kernels, products, attention of cuDNN,
// copies and memsets that its streams are given. Launches of graphs are not told: what is in them
// was when it was captured.
type Observed struct {
	Context
	observers sync.Map // an Observer by its Stream
}

// Observe sets who is told of a stream's work from now on; nil for nobody.
func (c *Observed) Observe(s Stream, o Observer) {
	if o == nil {
		c.observers.Delete(s)
		return
	}
	c.observers.Store(s, o)
}

// watch enqueues work before the observer's eyes.
func (c *Observed) watch(name string, s Stream, flops float64, enqueue func() error) error {
	o, watched := c.observers.Load(s)
	if !watched {
		return enqueue()
	}
	w := Work{name, flops}
	if err := o.(Observer).Before(w); err != nil {
		return err
	}
	if err := enqueue(); err != nil {
		return err
	}
	return o.(Observer).After(w)
}

// Launch is the context's.
func (c *Observed) Launch(f *Function, l LaunchConfig, s Stream, a *Args) error {
	return c.watch(f.Name, s, 0, func() error { return c.Context.Launch(f, l, s, a) })
}

// CopyToDevice is the context's.
func (c *Observed) CopyToDevice(dst Ptr, src []byte, s Stream) error {
	return c.watch("copy to the device", s, 0, func() error {
		return c.Context.CopyToDevice(dst, src, s)
	})
}

// CopyToHost is the context's.
func (c *Observed) CopyToHost(dst []byte, src Ptr, s Stream) error {
	return c.watch("copy to the host", s, 0, func() error {
		return c.Context.CopyToHost(dst, src, s)
	})
}

// CopyOnDevice is the context's.
func (c *Observed) CopyOnDevice(dst, src Ptr, bytes int, s Stream) error {
	return c.watch("copy on the device", s, 0, func() error {
		return c.Context.CopyOnDevice(dst, src, bytes, s)
	})
}

// Memset8 is the context's.
func (c *Observed) Memset8(dst Ptr, v byte, n int, s Stream) error {
	return c.watch("memset", s, 0, func() error { return c.Context.Memset8(dst, v, n, s) })
}

// Memset32 is the context's.
func (c *Observed) Memset32(dst Ptr, v uint32, n int, s Stream) error {
	return c.watch("memset", s, 0, func() error { return c.Context.Memset32(dst, v, n, s) })
}

// Blas is the context's.
func (c *Observed) Blas() (Blas, error) {
	b, err := c.Context.Blas()
	if err != nil {
		return nil, err
	}
	return observedBlas{b, c}, nil
}

type observedBlas struct {
	Blas
	c *Observed
}

func (b observedBlas) Plan(m MatmulSpec, workspace, want int) (MatmulPlan, error) {
	p, err := b.Blas.Plan(m, workspace, want)
	if err != nil {
		return nil, err
	}
	return &observedPlan{p, b.c, p.Spec()}, nil
}

type observedPlan struct {
	MatmulPlan
	c    *Observed
	spec MatmulSpec
}

func (p *observedPlan) Run(algo int, a MatmulArgs, s Stream) error {
	if _, watched := p.c.observers.Load(s); !watched { // and nobody reads the name
		return p.MatmulPlan.Run(algo, a, s)
	}
	m := p.spec
	name := fmt.Sprintf("cublasLt %dx%dx%d %s%s %v", m.M, m.N, m.K, letter(m.TransA),
		letter(m.TransB), m.D)
	if m.Batch > 1 {
		name += fmt.Sprintf(" x%d", m.Batch)
	}
	return p.c.watch(name, s, m.FLOPs(), func() error { return p.MatmulPlan.Run(algo, a, s) })
}

// letter is how BLAS writes whether an operand is transposed.
func letter(transposed bool) string {
	if transposed {
		return "t"
	}
	return "n"
}
