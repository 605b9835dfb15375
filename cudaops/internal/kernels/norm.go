package kernels

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// RMSNorm normalises the rows of X [Rows, D]: Rstd = 1/sqrt(mean(X²) + Eps) and Y = X·Rstd ⊙ W. Where Residual is not null,
// it does so to Sum = X + Residual, which it writes; Sum may be the memory of either. Rstd [Rows] and W [D] are float32, the
// others of the same type; Rstd may be null.
type RMSNorm struct {
	Y, Rstd, Sum, X, Residual, W driver.Ptr
	Rows, D                      int
	Eps                          float64
	Type                         driver.DType
	Way                          Way
}

// normPacks are the packs of 16 bytes a lane that the kernels for a warp a row are made for.
var normPacks = []int{2, 4, 8, 16}

// packs returns those of them that hold a row, 0 if none do.
func (a RMSNorm) packs() int {
	if !packed(a.Type, a.D, a.Y, a.Sum, a.X, a.Residual, a.W) {
		return 0
	}
	for _, packs := range normPacks {
		if a.D <= packs*32*vector(a.Type) && (packs < 16 || a.Residual == 0) {
			return packs
		}
	}
	return 0
}

// RMSNormWays lists the ways that take the arguments, the one that should be fastest first: a warp a row with so many warps a
// block, blocks that walk down the rows, so many a multiprocessor, and a block a row.
func (k *Kernels) RMSNormWays(a RMSNorm) ([]Way, error) {
	suf, err := suffix("RMSNorm", a.Type)
	if err != nil {
		return nil, err
	}
	var ways []Way
	if packs := a.packs(); packs > 0 {
		usual := min(4, max(1, 8/packs)) // a block's place is free for the next one only when all its warps are done
		ways = append(ways, Way{"warp", usual})
		for _, warps := range []int{1, 2, 4} {
			if warps != usual {
				ways = append(ways, Way{"warp", warps})
			}
		}
	}
	arrays := 1
	if a.Residual != 0 {
		arrays = 2
	}
	if packed(a.Type, a.D, a.Y, a.Sum, a.X, a.Residual, a.W) {
		rows, err := k.walkWays("rmsnorm_rows"+suf, a.Rows, a.D, arrays, 0, a.Type)
		if err != nil {
			return nil, err
		}
		ways = append(ways, rows...)
	}
	return append(ways, Way{Family: "any"}), nil
}

// RMSNorm launches one kernel.
func (k *Kernels) RMSNorm(s driver.Stream, a RMSNorm) error {
	suf, err := suffix("RMSNorm", a.Type)
	if err != nil {
		return err
	}
	if empty, err := checkInts("RMSNorm", a.Rows, a.D); empty || err != nil {
		return err
	}
	if a.Residual != 0 && a.Sum == 0 {
		return errors.New("kernels.RMSNorm: a Residual is given, but no Sum to write")
	}
	ways, err := k.RMSNormWays(a)
	if err != nil {
		return err
	}
	w, err := a.Way.of("RMSNorm", ways)
	if err != nil {
		return err
	}
	l := args().Ptr(a.Y).Ptr(a.Rstd).Ptr(a.Sum).Ptr(a.X).Ptr(a.Residual).Ptr(a.W)
	rows, d, eps := int64(a.Rows), a.D, float32(a.Eps)
	switch w.Family {
	case "warp":
		c := line(ceilDiv(a.Rows, w.Size), 32*w.Size)
		return k.launch(s, "norm", fmt.Sprintf("rmsnorm_warp%d%s", a.packs(), suf), c, l.Int64(rows).Int32(d).Float32(eps))
	case "rows":
		arrays := 1
		if a.Residual != 0 {
			arrays = 2
		}
		c, _, err := k.walk("rmsnorm_rows"+suf, a.Rows, d, arrays, 0, a.Type, w.Size)
		if err != nil {
			return err
		}
		return k.launch(s, "norm", "rmsnorm_rows"+suf, c, l.Int64(rows).Int32(d).Float32(eps))
	}
	return k.launch(s, "norm", "rmsnorm_any"+suf, line(a.Rows, rowThreads(d)), l.Int32(d).Float32(eps))
}

// walkWays lists the ways to launch a kernel of norm.cu that walks down the rows: with as many blocks a multiprocessor as
// there is room for, and with fewer.
func (k *Kernels) walkWays(name string, rows, d, arrays, floats int, t driver.DType) ([]Way, error) {
	var ways []Way
	grid := 0
	for _, blocks := range []int{normBlocks, 2, 1} {
		c, fits, err := k.walk(name, rows, d, arrays, floats, t, blocks)
		if err != nil || !fits {
			return nil, err
		}
		if c.Grid.X != grid { // else it is the same launch
			ways = append(ways, Way{"rows", blocks})
			grid = c.Grid.X
		}
	}
	return ways, nil
}

// walk is the launch of a kernel of norm.cu that walks down the rows, with at most so many blocks a multiprocessor, if the GPU
// has room for so many arrays of rows of d elements, or floats floats for each element.
func (k *Kernels) walk(name string, rows, d, arrays, floats int, t driver.DType, most int) (c driver.LaunchConfig, fits bool, err error) {
	const stages = 4
	across := ceilDiv(d, 32*vector(t)) * 32
	down := max(1, 512/across)
	c = driver.LaunchConfig{Block: driver.Dim{X: across, Y: down}, Shared: max(stages*arrays*16*across, 4*floats*d) * down}
	if across > 1024 || c.Shared > k.ctx.Device().SharedPerBlock-1024 { // beside what the kernels themselves declare
		return c, false, nil
	}
	blocks, err := k.resident("norm", name, across*down, c.Shared)
	c.Grid.X = min(blocks, most*k.sms, ceilDiv(rows, down))
	return c, true, err
}

// RMSNormBackward is the backward pass for G, the gradient of Y: with n = X·Rstd,
//
//	DX = Rstd·(G ⊙ W − n·mean(G ⊙ W ⊙ n)) + Add,  DW = Σ_rows G ⊙ n.
//
// Add, which may be null, is a gradient that reaches X past the norm; DX may be its memory, or G's. DW [D] is of type DWType.
// Workspace is memory of [Kernels.RMSNormWorkspace] bytes.
type RMSNormBackward struct {
	DX, DW, G, X, W, Rstd, Add driver.Ptr
	Rows, D                    int
	Type, DWType               driver.DType
	Workspace                  driver.Ptr
	Way                        Way
}

// normBlocks is the most blocks a multiprocessor that leave partial sums.
const normBlocks = 4

// RMSNormWorkspace is the bytes of workspace that a backward pass over rows of d elements takes.
func (k *Kernels) RMSNormWorkspace(d int) int { return 4 * d * normBlocks * k.sms }

// RMSNormBackward launches a kernel for DX and partial sums of DW, and one that adds them up.
func (k *Kernels) RMSNormBackward(s driver.Stream, a RMSNormBackward) error {
	suf, err := suffix("RMSNormBackward", a.Type)
	if err != nil {
		return err
	}
	sum, err := suffix("RMSNormBackward", a.DWType)
	if err != nil {
		return err
	}
	if empty, err := checkInts("RMSNormBackward", a.Rows, a.D); err != nil || a.D == 0 {
		return err
	} else if empty {
		return k.Fill(s, a.DW, 0, a.D, a.DWType)
	}
	blocks, err := k.normBackward(s, a, suf)
	if err != nil {
		return err
	}
	c := driver.LaunchConfig{Grid: driver.Dim{X: ceilDiv(a.D, 32)}, Block: driver.Dim{X: 32, Y: 32}}
	return k.launch(s, "norm", "rmsnorm_weight_sum"+sum, c, args().Ptr(a.DW).Ptr(a.Workspace).Int32(blocks).Int32(a.D))
}

// RMSNormBackwardWays lists the ways that take the arguments, the one that should be fastest first: blocks that walk down the
// rows, so many a multiprocessor, and a block a row.
func (k *Kernels) RMSNormBackwardWays(a RMSNormBackward) (ways []Way, err error) {
	suf, err := suffix("RMSNormBackward", a.Type)
	if err != nil {
		return nil, err
	}
	if packed(a.Type, a.D, a.DX, a.G, a.X, a.W, a.Add) {
		if ways, err = k.walkWays("rmsnorm_backward"+suf, a.Rows, a.D, a.arrays(), 1, a.Type); err != nil {
			return nil, err
		}
	}
	return append(ways, Way{Family: "any"}), nil
}

// arrays is how many are read.
func (a RMSNormBackward) arrays() int {
	if a.Add != 0 {
		return 3
	}
	return 2
}

// normBackward computes DX and returns how many rows of partial sums it left.
func (k *Kernels) normBackward(s driver.Stream, a RMSNormBackward, suf string) (int, error) {
	ways, err := k.RMSNormBackwardWays(a)
	if err != nil {
		return 0, err
	}
	w, err := a.Way.of("RMSNormBackward", ways)
	if err != nil {
		return 0, err
	}
	if w.Family == "any" {
		return k.normBackwardAny(s, a, suf)
	}
	c, _, err := k.walk("rmsnorm_backward"+suf, a.Rows, a.D, a.arrays(), 1, a.Type, w.Size)
	if err != nil {
		return 0, err
	}
	l := args().Ptr(a.DX).Ptr(a.Workspace).Ptr(a.G).Ptr(a.X).Ptr(a.W).Ptr(a.Rstd).Ptr(a.Add).Int64(int64(a.Rows)).Int32(a.D)
	return c.Grid.X, k.launch(s, "norm", "rmsnorm_backward"+suf, c, l)
}

// normBackwardAny is normBackward for rows that are not aligned or too long. DX comes last, as it may be G's memory.
func (k *Kernels) normBackwardAny(s driver.Stream, a RMSNormBackward, suf string) (int, error) {
	blocks := min(normBlocks*k.sms, ceilDiv(a.Rows, 16))
	c := driver.LaunchConfig{Grid: driver.Dim{X: ceilDiv(a.D, 256), Y: blocks}, Block: driver.Dim{X: 256}}
	l := args().Ptr(a.Workspace).Ptr(a.G).Ptr(a.X).Ptr(a.Rstd).Int64(int64(a.Rows)).Int32(a.D)
	if err := k.launch(s, "norm", "rmsnorm_weight_any"+suf, c, l); err != nil {
		return 0, err
	}
	l = args().Ptr(a.DX).Ptr(a.G).Ptr(a.X).Ptr(a.W).Ptr(a.Rstd).Ptr(a.Add).Int32(a.D)
	return blocks, k.launch(s, "norm", "rmsnorm_backward_any"+suf, line(a.Rows, rowThreads(a.D)), l)
}
