package kernels

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// dnnPlans is what attention by cuDNN keeps: plans, which take up to seconds to make, and workspaces of forward passes.
type dnnPlans struct {
	mu    sync.Mutex
	plans map[driver.AttentionSpec]driver.AttentionPlan
	work  map[driver.Stream]driver.Ptr // of dnnForwardBytes
}

// dnnForwardBytes is the most workspace that a forward pass gets. cuDNN 9.19 and 9.26 want 256 bytes.
const dnnForwardBytes = 1 << 16

// dnnBytes is a bound of the workspace of cuDNN's backward pass: a sum of every query, 16 bits for every query and key, and
// where query heads share keys and values, the gradients of these of each.
func (a AttentionShape) dnnBytes() int {
	seq := ceilDiv(a.Seq, 128) * 128
	each := 2*seq + 4
	if a.Heads != a.KVHeads {
		each += 4 * max(a.HeadDim, 64)
	}
	return a.Batch*a.Heads*seq*each + 4096
}

// DnnVersion is cuDNN's version, as in 91900, and 0 where there is none that can be used.
func (k *Kernels) DnnVersion() int {
	d, err := k.ctx.Dnn()
	if err != nil {
		return 0
	}
	return d.Version()
}

// PlanDnnAttention makes cuDNN's plan for attention, and returns why it cannot. The rows are those of [Kernels.Attention] or
// of [Kernels.AttentionBackward], in their order; where they are does not matter.
func (k *Kernels) PlanDnnAttention(a AttentionShape, t driver.DType, rows ...Rows) error {
	s := a.dnnSpec(t)
	strides := []*int{&s.Y, &s.Q, &s.K, &s.V}
	if s.Backward = len(rows) > len(strides); s.Backward {
		strides = []*int{&s.DQ, &s.DK, &s.DV, &s.G, &s.Q, &s.K, &s.V, &s.Y}
	}
	if len(rows) != len(strides) {
		return fmt.Errorf("kernels.PlanDnnAttention: %d matrices, want 4 forward or 8 backward", len(rows))
	}
	for i, r := range rows {
		*strides[i] = r.Stride
	}
	_, err := k.dnn.plan(k.ctx, s)
	return err
}

// dnnSpec is the shape as cuDNN is told of it.
func (a AttentionShape) dnnSpec(t driver.DType) driver.AttentionSpec {
	if a.Scale == 0 {
		a.Scale = 1 / math.Sqrt(float64(a.HeadDim))
	}
	return driver.AttentionSpec{Batch: a.Batch, Seq: a.Seq, Heads: a.Heads, KVHeads: a.KVHeads, HeadDim: a.HeadDim, Causal: a.Causal,
		Scale: a.Scale, Type: t}
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
	if p.plans == nil {
		p.plans = map[driver.AttentionSpec]driver.AttentionPlan{}
	}
	p.plans[spec] = plan
	return plan, nil
}

// workspace is that of the forward passes on a stream, which run one after the other.
func (p *dnnPlans) workspace(ctx driver.Context, s driver.Stream) (driver.Ptr, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if work := p.work[s]; work != 0 {
		return work, nil
	}
	work, err := ctx.Alloc(dnnForwardBytes)
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
	return errors.Join(errs...)
}

// launchDnn has cuDNN compute a pass.
func (c *attentionCall) launchDnn(k *Kernels, s driver.Stream, backward bool) error {
	if c.Documents != 0 {
		return errors.New("kernels: cuDNN's attention does not know of documents")
	}
	p, spec := c.params, c.dnnSpec(c.dtype)
	spec.Q, spec.K, spec.V, spec.Y = int(p.qStride), int(p.kStride), int(p.vStride), int(p.yStride)
	if spec.Backward = backward; backward {
		spec.G, spec.DQ, spec.DK, spec.DV = int(p.gStride), int(p.dqStride), int(p.dkStride), int(p.dvStride)
	}
	plan, err := k.dnn.plan(k.ctx, spec)
	if err != nil {
		return err
	}
	a := driver.AttentionArgs{Q: p.q, K: p.k, V: p.v, Y: p.y, LSE: p.lse, G: p.g, DQ: p.dq, DK: p.dk, DV: p.dv,
		Workspace: p.stats, WorkspaceSize: cmp.Or(c.StatsBytes, c.dnnBytes())}
	if !backward {
		a.WorkspaceSize = dnnForwardBytes
		if a.Workspace, err = k.dnn.workspace(k.ctx, s); err != nil {
			return err
		}
	}
	if need := plan.Workspace(); need > a.WorkspaceSize {
		return fmt.Errorf("kernels: cuDNN's attention wants a workspace of %s, there are %s", driver.Size(uint64(need)),
			driver.Size(uint64(a.WorkspaceSize)))
	}
	return plan.Run(a, s)
}
