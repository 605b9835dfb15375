// Package layout has the kernels that copy elements from one layout to another: transpositions,
// slices, concatenations and repetitions.
package layout

import (
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Copy copies elements of Size bytes (2, 4, 8 or 16) from one layout to another: for every index
// within Dims,
//
//	Y[Σ_k index_k·YStrides_k] = X[Σ_k index_k·XStrides_k].
//
// Strides count elements. This covers transposition and permutation, slices, writing a part of a
// concatenation and, with an x stride of 0, repetition. After merging contiguous dimensions there
// may be at most six.
type Copy struct {
	Y, X                     gpu.Ptr
	Dims, YStrides, XStrides []int
	Size                     int
}

// copyDims must match kDims in layout.cu.
const copyDims = 6

// layout is one dimension of a copy: its size, and its strides in y and x.
type layout struct{ n, y, x int }

// Launch enqueues one kernel, several kernels for more than 2³¹ elements, or a plain copy if both
// sides are contiguous.
func (a Copy) Launch(q *kernel.Queue) {
	var dims []layout
	for i, n := range a.Dims {
		dims = append(dims, layout{n, a.YStrides[i], a.XStrides[i]})
	}
	if !slices.Contains(a.Dims, 0) {
		a.run(q, merged(dims))
	}
}

func (a Copy) run(q *kernel.Queue, dims []layout) {
	total, last := 1, dims[len(dims)-1]
	for _, d := range dims {
		total *= d.n
	}

	tiles, order := transposition(dims, a.Size)
	switch {
	case q.Err != nil:
	case len(dims) > copyDims:
		q.Err = fmt.Errorf("kernels.Copy: dimensions %v with strides %v and %v are %d after "+
			"merging, want at most %d", a.Dims, a.YStrides, a.XStrides, len(dims), copyDims)
	case len(dims) == 1 && last.y == 1 && last.x == 1:
		q.Err = q.Ctx.CopyOnDevice(a.Y, a.X, total*a.Size, q.Stream)
	case order != nil && a.Size <= 8:
		c := gpu.LaunchConfig{Grid: tiles, Block: gpu.Dim{X: 32, Y: 8}}
		q.Run("layout", fmt.Sprintf("copy_transposed_%d", a.Size), c, a.Y, a.X, fields(order))
	case total > math.MaxInt32: // more than kernels can count: split the outermost dimension
		half := slices.Clone(dims)
		half[0].n /= 2
		a.run(q, merged(half))
		a.Y = a.Y.Offset(half[0].n * half[0].y * a.Size)
		a.X = a.X.Offset(half[0].n * half[0].x * a.Size)
		half[0].n = dims[0].n - half[0].n
		a.run(q, merged(half))
	default:
		size := a.widen(dims)
		total /= size / a.Size
		q.Run("layout", fmt.Sprintf("copy_strided_%d", size),
			kernel.Cover(total, 4*256, 256), a.Y, a.X, fields(dims), total)
	}
}

// merged drops dimensions of size 1 and merges adjacent dimensions that are contiguous on both
// sides.
func merged(all []layout) (dims []layout) {
	for _, d := range all {
		if d.n == 1 {
			continue
		}
		if last := len(dims) - 1; last >= 0 && dims[last].y == d.n*d.y && dims[last].x == d.n*d.x {
			d.n *= dims[last].n
			dims[last] = d
			continue
		}
		dims = append(dims, d)
	}

	if len(dims) == 0 {
		dims = []layout{{1, 1, 1}}
	}

	return dims
}

// widen combines elements of the innermost dimension to wider elements, as far as sizes, strides
// and addresses allow, and returns the size of an element.
func (a Copy) widen(dims []layout) int {
	last := &dims[len(dims)-1]
	size := a.Size
	if last.y != 1 || last.x != 1 {
		return size
	}

	for size < 16 && last.n%2 == 0 && (int(a.Y)|int(a.X))%(2*size) == 0 {
		for _, d := range dims[:len(dims)-1] {
			if d.y%2 != 0 || d.x%2 != 0 {
				return size
			}
		}
		for i := range dims[:len(dims)-1] {
			dims[i].y /= 2
			dims[i].x /= 2
		}
		last.n /= 2
		size *= 2
	}

	return size
}

// transposition finds the innermost dimensions of both sides. If they differ, it returns the grid
// of tiles, and the dimensions with the innermost dimensions of x and y, in this order, moved to
// the end. Otherwise order is nil.
func transposition(dims []layout, size int) (tiles gpu.Dim, order []layout) {
	iy := slices.IndexFunc(dims, func(d layout) bool { return d.y == 1 })
	ix := slices.IndexFunc(dims, func(d layout) bool { return d.x == 1 })
	if iy < 0 || ix < 0 || iy == ix || dims[iy].n < 8 || dims[ix].n < 8 {
		return tiles, nil
	}

	outer := 1
	for i, d := range dims {
		if i != iy && i != ix {
			order = append(order, d)
			outer *= d.n
		}
	}

	tile := 64 // must match kTile in layout.cu
	if size == 2 {
		tile = 128
	}

	tiles = gpu.Dim{X: kernel.CeilDiv(dims[iy].n, tile), Y: kernel.CeilDiv(dims[ix].n, tile),
		Z: outer}
	if tiles.Y > 65535 || tiles.Z > 65535 {
		return tiles, nil
	}

	return tiles, append(order, dims[ix], dims[iy])
}

// fields returns the fields of a Layout of layout.cu, with additional dimensions of size 1 at the
// front.
func fields(dims []layout) (sizes kernel.Struct) {
	var ys, xs kernel.Struct
	for _, d := range append(slices.Repeat([]layout{{1, 0, 0}}, copyDims-len(dims)), dims...) {
		sizes, ys, xs = append(sizes, int64(d.n)), append(ys, int64(d.y)), append(xs, int64(d.x))
	}
	return append(append(sizes, ys...), xs...)
}
