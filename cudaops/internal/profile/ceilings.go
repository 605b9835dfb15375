package profile

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/choose"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// ceilingBytes is the memory of the copy that measures the card's bandwidth, and ceilingSide the
// most that the matrices measure whose product measures its speed. Sides double from firstSide
// until a product takes ceilingTime, of which what it takes to start one is little. A slow card, or
// one under a tool that makes kernels slow, is not kept for longer.
const (
	ceilingBytes           = 512 << 20
	firstSide, ceilingSide = 256, 8192
	ceilingTime            = time.Millisecond
)

// ceilingWays is how many of cuBLASLt's ways to compute a product are tried.
const ceilingWays = 12

// Ceilings measures the card.
func (m *Machine) Ceilings() (optime.Ceiling, error) {
	var p optime.Profile
	err := m.measureCeilings(&p)
	c := optime.Ceiling{Product: p.Product, Copy: p.Copy, Type: p.Type}
	if p.ProductFloat8 > 0 {
		c.Product, c.Type = p.ProductFloat8, gpu.Float8E4M3.String()
	}
	return c, err
}

// measureCeilings sets the profile's ceilings: the best of some copies, and of the ways to compute
// a product. What is too large for the memory that is left is measured smaller, and not at all
// below a sixteenth.
func (m *Machine) measureCeilings(r *optime.Profile) (err error) {
	bytes := cmp.Or(m.Copy, ceilingBytes)
	ctx := m.Ctx
	var memory gpu.Ptr
	for least := bytes / 16; ; bytes /= 2 {
		if memory, err = ctx.Alloc(2 * bytes); err == nil {
			break
		}
		if !errors.Is(err, gpu.OutOfMemory) || bytes <= least {
			m.Warn("the card's ceilings are not measured: " + err.Error())
			return nil
		}
	}
	defer func() { err = errors.Join(err, ctx.SyncStream(m.Stream), ctx.Free(memory)) }()
	e := m.Operands
	if err := choose.Fill(ctx, m.Stream, memory, bytes, e, 1, 1); err != nil {
		return err
	}
	best, err := m.best(1, func(int) error {
		return ctx.CopyOnDevice(memory.Offset(bytes), memory, bytes, m.Stream)
	})
	if err != nil {
		return err
	}
	r.Copy = 2 * float64(bytes) / best.Seconds()
	r.Type = e.String()
	if r.Product, err = m.products(e, memory, bytes); err != nil {
		return err
	}
	if !m.Float8 {
		return nil
	}
	if err := choose.Fill(ctx, m.Stream, memory, bytes, gpu.Float8E4M3, 1, 1); err != nil {
		return err
	}
	r.ProductFloat8, err = m.products(gpu.Float8E4M3, memory, bytes)
	return err
}

// products is the operations a second of the largest product of square matrices of a type that is
// measured, 0 if there is none. The operands are in the first bytes of memory, the result in as
// many behind them.
func (m *Machine) products(e gpu.DType, memory gpu.Ptr, bytes int) (best float64, err error) {
	widest, side := m.Operands, ceilingSide // of all that takes room
	if widest == gpu.Float32 {
		side /= 2
	}
	for ; 2*side*side*widest.Size() > bytes; side /= 2 {
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

// productTime is what the fastest way takes to multiply two square matrices, which lie one behind
// the other; 0 if there is none.
func (m *Machine) productTime(side int, e gpu.DType, operands, d gpu.Ptr) (took time.Duration,
	err error) {
	ctx := m.Ctx
	blas, err := ctx.Blas()
	if err != nil {
		return 0, nil
	}
	size := side * side * e.Size()
	spec := gpu.MatmulSpec{M: side, N: side, K: side, TransB: true, A: e, B: e, D: m.Operands}
	args := gpu.MatmulArgs{Alpha: 1, A: operands, B: operands.Offset(size), C: d, D: d,
		WorkspaceSize: run.WorkspaceBytes}
	if e == gpu.Float8E4M3 {
		spec.Scaling, spec.FastAccumulation = gpu.ScaledRows, true
		args.ScaleA = operands.Offset(2 * size) // where the larger type would have operands
		args.ScaleB = args.ScaleA
		ones := gpu.Bytes(slices.Repeat([]float32{1}, side))
		if err := ctx.CopyToDevice(args.ScaleA, ones, m.Stream); err != nil {
			return 0, err
		}
	}
	plan, err := blas.Plan(spec, run.WorkspaceBytes, ceilingWays)
	if err != nil {
		return 0, nil
	}
	if args.Workspace, err = ctx.Alloc(run.WorkspaceBytes); err != nil {
		return 0, plan.Close()
	}
	defer func() {
		err = errors.Join(err, ctx.SyncStream(m.Stream), ctx.Free(args.Workspace), plan.Close())
	}()
	return m.best(len(plan.Algos()), func(way int) error { return plan.Run(way, args, m.Stream) })
}

// best is the shortest of three times of each way of some work, after a first run of it.
func (m *Machine) best(ways int, work func(way int) error) (best time.Duration, err error) {
	ctx := m.Ctx
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
			if err := run.InTurn(
				func() error {
					return ctx.Record(from, m.Stream)
				}, func() error { return work(way) },
				func() error {
					return ctx.Record(to, m.Stream)
				}, func() error { return ctx.SyncStream(m.Stream) },
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
