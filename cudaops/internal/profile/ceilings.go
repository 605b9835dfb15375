package profile

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
	"github.com/kasmina-go/kasmina/optime"
)

// Parameters of the measurement. A copy of ceilingBytes measures the card's bandwidth. Products of
// square matrices measure its arithmetic: the sides double from firstSide to at most ceilingSide,
// until a product takes ceilingTime and the time to launch it is negligible. This bounds the
// measurement on slow cards, and under tools that slow down kernels.
const (
	ceilingBytes           = 512 << 20
	firstSide, ceilingSide = 256, 8192
	ceilingTime            = time.Millisecond
)

// ceilingVariants is the maximum number of cuBLASLt variants to try for a product.
const ceilingVariants = 12

// Ceilings measures the card's arithmetic speed and memory bandwidth.
func (m *Target) Ceilings() (optime.Ceiling, error) {
	var p optime.Profile
	err := m.measureCeilings(&p)
	c := optime.Ceiling{Product: p.Product, Copy: p.Copy, Type: p.Type}
	if p.ProductFloat8 > 0 {
		c.Product, c.Type = p.ProductFloat8, gpu.Float8E4M3.String()
	}
	return c, err
}

// card is a card being measured.
type card struct {
	*Target
	memory run.Memory
	bytes  int     // size of the copy in bytes
	from   gpu.Ptr // source of the copy, followed by its destination and cuBLASLt's workspace
}

// measureCeilings sets the profile's ceilings to the best results of several copies and product
// variants. If memory is short, it measures smaller copies and products, down to a sixteenth of the
// usual size. Below that it warns and measures nothing.
func (m *Target) measureCeilings(r *optime.Profile) (err error) {
	c := &card{Target: m, memory: run.Memory{Ctx: m.Ctx}, bytes: cmp.Or(m.Copy, ceilingBytes)}
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

// products returns the highest speed, in operations per second, of products of square matrices of type
// e. It is 0 if the product cannot be computed.
func (c *card) products(e gpu.DType) (best float64, err error) {
	if err := run.Fill(c.Ctx, c.Stream, c.from, c.bytes, e, 1, 1); err != nil {
		return 0, err
	}

	widest, side := c.Operands, ceilingSide // the type that takes the most memory
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

// product returns the time that the fastest variant takes to multiply two square matrices, or 0 if no
// variant is available.
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
		args.ScaleA = c.from.Offset(2 * size) // this memory is free because float8 operands are smaller
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

// best returns the shortest time among all variants. Each variant runs once to warm up, and then three
// times.
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
