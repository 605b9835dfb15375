package profile

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"time"

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

// ceilingWays is how many of cuBLASLt's variants to compute a product are tried.
const ceilingVariants = 12

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

// card is a card that is measured.
type card struct {
	*Machine
	memory run.Memory
	bytes  int     // that a copy copies
	from   gpu.Ptr // so many bytes, as many behind them, and cuBLASLt's workspace
}

// measureCeilings sets the profile's ceilings: the best of some copies, and of the variants to compute
// a product. What is too large for the memory that is left is measured smaller, and not at all
// below a sixteenth.
func (m *Machine) measureCeilings(r *optime.Profile) (err error) {
	c := &card{Machine: m, memory: run.Memory{Ctx: m.Ctx}, bytes: cmp.Or(m.Copy, ceilingBytes)}
	defer func() { err = errors.Join(err, m.Ctx.SyncStream(m.Stream), c.memory.Close()) }()
	for least := c.bytes / 16; ; c.bytes /= 2 {
		if c.from, err = c.memory.Alloc(2*c.bytes+run.WorkspaceBytes, "copies"); err == nil {
			break
		}
		if !errors.Is(err, gpu.OutOfMemory) || c.bytes <= least {
			m.Warn("the card's ceilings are not measured: " + err.Error())
			return nil
		}
	}

	r.Type = m.Operands.String()
	if r.Product, err = c.products(m.Operands); err != nil {
		return err
	}

	if m.Float8 {
		if r.ProductFloat8, err = c.products(gpu.Float8E4M3); err != nil {
			return err
		}
	}

	took, err := c.best(1, func(int) error {
		return m.Ctx.CopyOnDevice(c.from.Offset(c.bytes), c.from, c.bytes, m.Stream)
	})
	r.Copy = 2 * float64(c.bytes) / took.Seconds()
	return err
}

// products is the operations a second of the largest product of square matrices of a type that is
// measured, 0 if there is none.
func (c *card) products(e gpu.DType) (best float64, err error) {
	if err := run.Fill(c.Ctx, c.Stream, c.from, c.bytes, e, 1, 1); err != nil {
		return 0, err
	}

	widest, side := c.Operands, ceilingSide // of all that takes room
	if widest == gpu.Float32 {
		side /= 2
	}

	for ; 2*side*side*widest.Size() > c.bytes; side /= 2 {
	}
	for s := min(firstSide, side); s <= side; s *= 2 {
		took, err := c.product(s, e)
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

// product is what the fastest variant takes to multiply two square matrices, which lie one behind the
// other; 0 if there is none.
func (c *card) product(side int, e gpu.DType) (took time.Duration, err error) {
	blas, err := c.Ctx.Blas()
	if err != nil {
		return 0, nil
	}

	size := side * side * e.Size()
	d := c.from.Offset(c.bytes)
	spec := gpu.MatmulSpec{M: side, N: side, K: side, TransB: true, A: e, B: e, D: c.Operands}
	args := gpu.MatmulArgs{Alpha: 1, A: c.from, B: c.from.Offset(size), C: d, D: d,
		Workspace: d.Offset(c.bytes), WorkspaceSize: run.WorkspaceBytes}
	if e == gpu.Float8E4M3 {
		args.ScaleA = c.from.Offset(2 * size) // where the larger type would have operands
		args.ScaleB = args.ScaleA
		ones := gpu.Bytes(slices.Repeat([]float32{1}, side))
		if err := c.Ctx.CopyToDevice(args.ScaleA, ones, c.Stream); err != nil {
			return 0, err
		}
	}

	plan, err := blas.Plan(spec, run.WorkspaceBytes, ceilingVariants)
	if err != nil {
		return 0, nil
	}

	return c.best(len(plan.Algos()), func(variant int) error { return plan.Run(variant, args, c.Stream) })
}

// best is the shortest of three times of each variant of some work, after a first run of it.
func (c *card) best(variants int, work func(variant int) error) (time.Duration, error) {
	best := time.Duration(math.MaxInt64)
	for variant := range variants {
		took, err := run.Times(c.Ctx, c.Stream, 4, func(int) error { return nil },
			func(int) error { return work(variant) })
		if err != nil {
			return 0, err
		}
		best = min(best, slices.Min(took[1:]))
	}
	return best, nil
}
