package decode

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// PackedProduct computes Y = X·Wᵀ + C for up to MostRows rows X [Rows, D]. W [Columns, D] consists of the rows of Parts,
// in order, which are matrices in float8 or, if NF4 is set, in NF4 (see quantize.WidenFloat8 and quantize.WidenNF4).
// C may be null, and it may be Y. D is a multiple of 64, X is aligned to 16 bytes, and Type has 16 bits.
//
// If Gate is not GateNone, it computes Y = gate(X·Parts[0]ᵀ) ⊙ X·Parts[1]ᵀ instead, and C is null. Both parts then have
// Columns rows.
//
// If Norm is set, the row X is normalized first. It may be set only if Streams returns true for the product with Norm.
type PackedProduct struct {
	Y, X, C, Table   gpu.Ptr
	Parts            [MostParts]Packed
	Rows, Columns, D int
	Gate             Gate
	NF4              bool
	Norm             Norm
	Type             gpu.DType
	Overlap
}

// Packed is a matrix in float8 or NF4.
type Packed struct {
	Codes, Nested, Scales gpu.Ptr
	Offset                float32
	Rows                  int
}

// MostParts is the largest number of parts. It must match decode_packed.cuh.
const MostParts = 3

// These constants must match decode_packed.cu.
const (
	packedWarps = 8
	packedChunk = 64
)

// Supports reports whether the kernel computes the product.
func (a PackedProduct) Supports() bool {
	return a.Rows >= 1 && a.Rows <= MostRows && (a.Type == gpu.BFloat16 || a.Type == gpu.Float16) &&
		a.D%packedChunk == 0 && kernel.Aligned(a.X)
}

// Launch enqueues one kernel.
func (a PackedProduct) Launch(q *kernel.Queue) {
	if !a.Supports() {
		q.Err = fmt.Errorf("kernels.DecodePacked: %d rows of %d elements of type %v, want 1 to %d rows of a multiple of %d "+
			"elements of 16 bits, aligned to 16 bytes", a.Rows, a.D, a.Type, MostRows, packedChunk)
		return
	}

	if a.Streams(q.Info) {
		a.stream(q)
		return
	}

	if a.Norm.W != 0 {
		q.Err = errors.New("kernels.DecodePacked: this product cannot normalize its row")
		return
	}

	tiles := 1 // of 8 rows
	for 8*tiles < a.Rows {
		tiles *= 2
	}
	name, perBlock := "decode_packed", 16
	if a.Gate != GateNone {
		name, perBlock = name+"_gated", 8
	}
	c := gpu.LaunchConfig{Block: gpu.Dim{X: 32 * packedWarps}, Shared: 16 * 32 * packedWarps * tiles, Overlap: true}
	if a.NF4 {
		name += "_nf4"
		c.Shared += 4 * 256 * 32
	} else {
		name += "_float8"
	}
	name += fmt.Sprint("_", tiles, kernel.Suffix(a.Type))
	c.Grid.X = min(kernel.CeilDiv(a.Columns, perBlock), q.Resident("decode_packed", name, c))

	args := append(kernel.Struct{a.Y, a.X, a.C, a.Table}, a.parts()...)
	q.Run("decode_packed", name, c, append(args, a.Rows, a.Columns, a.D, a.Steady, a.Early, a.Gate == GateGELU))
}

// parts returns the parts as arguments of a kernel.
func (a PackedProduct) parts() (args kernel.Struct) {
	for _, p := range a.Parts {
		args = append(args, kernel.Struct{p.Codes, p.Nested, p.Scales, float64(p.Offset), p.Rows})
	}
	return args
}
