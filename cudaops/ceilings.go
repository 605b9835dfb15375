package cudaops

import (
	"cmp"
	"errors"
	"math"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// ceilingBytes is the memory of the copy that measures the card's bandwidth, and ceilingSide the most that the matrices measure
// whose product measures its speed. Sides double from firstSide until a product takes ceilingTime, of which what it takes to
// start one is little: a slow card, or one under a tool that makes kernels slow, is not kept for longer.
const (
	ceilingBytes           = 512 << 20
	firstSide, ceilingSide = 256, 8192
	ceilingTime            = time.Millisecond
)

// measureCeilings sets the profile's ceilings: the best of some copies, and of the ways to compute a product. What is too
// large for the memory that is left is measured smaller, and not at all below a sixteenth.
func (m *Machine) measureCeilings(r *Profile) (err error) {
	bytes := cmp.Or(m.config.ceilingBytes, ceilingBytes)
	ctx := m.device.ctx
	var memory gpu.Ptr
	for least := bytes / 16; ; bytes /= 2 {
		if memory, err = ctx.Alloc(2 * bytes); err == nil {
			break
		}
		if !errors.Is(err, gpu.OutOfMemory) || bytes <= least {
			m.warn("the card's ceilings are not measured: " + err.Error())
			return nil
		}
	}
	defer func() { err = errors.Join(err, ctx.SyncStream(m.stream), ctx.Free(memory)) }()
	e := m.activations()
	x := &timer{tuner: m.tuner}
	if err := x.fill(memory, argument{bytes: bytes, elem: e}, 1); err != nil {
		return err
	}
	best, err := m.best(1, func(int) error { return ctx.CopyOnDevice(memory.Offset(bytes), memory, bytes, m.stream) })
	if err != nil {
		return err
	}
	r.Copy = 2 * float64(bytes) / best.Seconds()
	r.Type = e.String()
	if r.Product, err = m.products(e, memory, bytes); err != nil {
		return err
	}
	if !m.config.float8 {
		return nil
	}
	if err := x.fill(memory, argument{bytes: bytes, elem: float8s}, 1); err != nil {
		return err
	}
	r.ProductFloat8, err = m.products(float8s, memory, bytes)
	return err
}

// products is the operations a second of the largest product of square matrices of a type that is measured, 0 if there is none. The
// operands are in the first bytes of memory, the result in as many behind them.
func (m *Machine) products(e elem, memory gpu.Ptr, bytes int) (best float64, err error) {
	widest, side := m.activations(), ceilingSide // of all that takes room
	if widest == float32s {
		side /= 2
	}
	for ; 2*side*side*widest.size() > bytes; side /= 2 {
	}
	for s := min(firstSide, side); s <= side; s *= 2 {
		took, err := m.productTime(s, e, memory, memory.Offset(bytes))
		if err != nil || took == 0 {
			return best, err
		}
		best = max(best, 2*math.Pow(float64(s), 3)/took.Seconds())
		if took >= ceilingTime {
			break
		}
	}
	return best, nil
}

// productTime is what the fastest way takes to multiply two square matrices, which lie one behind the other; 0 if there is none.
func (m *Machine) productTime(side int, e elem, operands, d gpu.Ptr) (took time.Duration, err error) {
	ctx := m.device.ctx
	blas, err := ctx.Blas()
	if err != nil {
		return 0, nil
	}
	size := side * side * e.size()
	spec := gpu.MatmulSpec{M: side, N: side, K: side, TransB: true, A: e.dtype(), B: e.dtype(), D: m.activations().dtype()}
	args := gpu.MatmulArgs{Alpha: 1, A: operands, B: operands.Offset(size), C: d, D: d, WorkspaceSize: workspaceBytes}
	if e == float8s {
		spec.Scaling, spec.FastAccumulation = gpu.ScaledRows, true
		args.ScaleA = operands.Offset(2 * size) // where the larger type would have operands
		args.ScaleB = args.ScaleA
		if err := ctx.Memset32(args.ScaleA, math.Float32bits(1), side, m.stream); err != nil {
			return 0, err
		}
	}
	plan, err := blas.Plan(spec, workspaceBytes, tuneWays)
	if err != nil {
		return 0, nil
	}
	if args.Workspace, err = ctx.Alloc(workspaceBytes); err != nil {
		return 0, plan.Close()
	}
	defer func() {
		err = errors.Join(err, ctx.SyncStream(m.stream), ctx.Free(args.Workspace), plan.Close())
	}()
	return m.best(len(plan.Algos()), func(way int) error { return plan.Run(way, args, m.stream) })
}

// best is the shortest of three times of each way of some work, after a first run of it.
func (m *Machine) best(ways int, run func(way int) error) (best time.Duration, err error) {
	ctx := m.device.ctx
	var from, to gpu.Event
	for _, e := range []*gpu.Event{&from, &to} {
		if *e, err = ctx.NewEvent(true); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, ctx.DestroyEvent(*e)) }()
	}
	best = math.MaxInt64
	for way := range ways {
		for round := range 4 {
			if err := inTurn(
				func() error { return ctx.Record(from, m.stream) }, func() error { return run(way) },
				func() error { return ctx.Record(to, m.stream) }, func() error { return ctx.SyncStream(m.stream) },
			); err != nil {
				return 0, err
			}
			took, err := ctx.Elapsed(from, to)
			if err != nil {
				return 0, err
			}
			if round > 0 {
				best = min(best, took)
			}
		}
	}
	return best, nil
}
