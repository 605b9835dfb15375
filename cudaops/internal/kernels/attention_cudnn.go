package kernels

import (
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// dnnPlans is what attention by cuDNN keeps: plans, which take up to seconds to make, and workspaces.
type dnnPlans struct {
	mu    sync.Mutex
	plans map[driver.AttentionSpec]driver.AttentionPlan
	work  map[driver.Stream]driver.Ptr // of dnnBytes
}

// dnnBytes is the most workspace that cuDNN gets. Versions 9.19 and 9.26 want 256 bytes.
const dnnBytes = 1 << 16

// DnnVersion is cuDNN's version, as in 91900, and 0 where there is none that can be used.
func (k *Kernels) DnnVersion() int {
	d, err := k.ctx.Dnn()
	if err != nil {
		return 0
	}
	return d.Version()
}

// PlanDnnAttention makes cuDNN's plan for [Kernels.Attention] of such matrices, wherever they are, and returns why it cannot.
func (k *Kernels) PlanDnnAttention(a AttentionShape, t driver.DType, y, q, key, value Rows) error {
	_, err := k.dnn.plan(k.ctx, a.dnnSpec(t, y.Stride, q.Stride, key.Stride, value.Stride))
	return err
}

// dnnSpec is the shape, and the matrices' strides, as cuDNN is told of them.
func (a AttentionShape) dnnSpec(t driver.DType, y, q, k, v int) driver.AttentionSpec {
	if a.Scale == 0 {
		a.Scale = 1 / math.Sqrt(float64(a.HeadDim))
	}
	return driver.AttentionSpec{Batch: a.Batch, Seq: a.Seq, Heads: a.Heads, KVHeads: a.KVHeads, HeadDim: a.HeadDim, Causal: a.Causal,
		Scale: a.Scale, Type: t, Y: y, Q: q, K: k, V: v}
}

// plan returns the plan for attention, made when it is asked for the first time.
func (p *dnnPlans) plan(ctx driver.Context, spec driver.AttentionSpec) (driver.AttentionPlan, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if plan := p.plans[spec]; plan != nil {
		return plan, nil
	}
	d, err := ctx.Dnn()
	if err != nil {
		return nil, err
	}
	plan, err := d.PlanAttention(spec)
	if err != nil {
		return nil, err
	}
	if need := plan.Workspace(); need > dnnBytes {
		return nil, errors.Join(fmt.Errorf("kernels: cuDNN's attention needs %d bytes of workspace, more than %d", need, dnnBytes),
			plan.Close())
	}
	if p.plans == nil {
		p.plans = map[driver.AttentionSpec]driver.AttentionPlan{}
	}
	p.plans[spec] = plan
	return plan, nil
}

// workspace is that of all runs on a stream, which come one after the other.
func (p *dnnPlans) workspace(ctx driver.Context, s driver.Stream) (driver.Ptr, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if work := p.work[s]; work != 0 {
		return work, nil
	}
	work, err := ctx.Alloc(dnnBytes)
	if err != nil {
		return 0, err
	}
	if p.work == nil {
		p.work = map[driver.Stream]driver.Ptr{}
	}
	p.work[s] = work
	return work, nil
}

func (p *dnnPlans) close(ctx driver.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, plan := range p.plans {
		errs = append(errs, plan.Close())
	}
	for _, work := range p.work {
		errs = append(errs, ctx.Free(work))
	}
	clear(p.plans)
	clear(p.work)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("kernels: letting go of cuDNN: %w", err)
	}
	return nil
}

// launchDnn has cuDNN compute the forward pass.
func (c *attentionCall) launchDnn(k *Kernels, s driver.Stream) error {
	if c.Documents != 0 {
		return errors.New("kernels.Attention: cuDNN's attention does not know of documents")
	}
	p := c.params
	plan, err := k.dnn.plan(k.ctx, c.dnnSpec(c.dtype, int(p.yStride), int(p.qStride), int(p.kStride), int(p.vStride)))
	if err != nil {
		return err
	}
	work, err := k.dnn.workspace(k.ctx, s)
	if err != nil {
		return err
	}
	return plan.Run(driver.AttentionArgs{Q: p.q, K: p.k, V: p.v, Y: p.y, LSE: p.lse, Workspace: work, WorkspaceSize: dnnBytes}, s)
}
