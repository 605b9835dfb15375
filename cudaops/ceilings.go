package cudaops

import (
	"cmp"
	"errors"
	"math"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
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
	var memory driver.Ptr
	for least := bytes / 16; ; bytes /= 2 {
		if memory, err = ctx.Alloc(2 * bytes); err == nil {
			break
		}
		if !errors.Is(err, driver.OutOfMemory) || bytes <= least {
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
	side := ceilingSide
	if e == float32s {
		side /= 2
	}
	for ; 2*side*side*e.size() > bytes; side /= 2 {
	}
	for s := min(firstSide, side); s <= side; s *= 2 {
		took, err := m.productTime(s, memory, memory.Offset(s*s*e.size()), memory.Offset(bytes))
		if err != nil || took == 0 {
			return err
		}
		r.Product = max(r.Product, 2*math.Pow(float64(s), 3)/took.Seconds())
		if took >= ceilingTime {
			break
		}
	}
	return nil
}

// productTime is what the fastest way takes to multiply two square matrices; 0 if there is none.
func (m *Machine) productTime(side int, a, b, d driver.Ptr) (took time.Duration, err error) {
	blas, err := m.device.ctx.Blas()
	if err != nil {
		return 0, nil
	}
	t := m.activations().dtype()
	plan, err := blas.Plan(driver.MatmulSpec{M: side, N: side, K: side, TransB: true, A: t, B: t, D: t}, workspaceBytes, tuneWays)
	if err != nil {
		return 0, nil
	}
	workspace, err := m.device.ctx.Alloc(workspaceBytes)
	if err != nil {
		return 0, plan.Close()
	}
	defer func() {
		err = errors.Join(err, m.device.ctx.SyncStream(m.stream), m.device.ctx.Free(workspace), plan.Close())
	}()
	return m.best(len(plan.Algos()), func(way int) error {
		return plan.Run(way, driver.MatmulArgs{Alpha: 1, A: a, B: b, C: d, D: d, Workspace: workspace,
			WorkspaceSize: workspaceBytes}, m.stream)
	})
}

// best is the shortest of three times of each way of some work, after a first run of it.
func (m *Machine) best(ways int, run func(way int) error) (best time.Duration, err error) {
	ctx := m.device.ctx
	var from, to driver.Event
	for _, e := range []*driver.Event{&from, &to} {
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
