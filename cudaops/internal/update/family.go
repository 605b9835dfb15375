package update

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/place"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/schulz"
)

// family is the parameters that one kernel of package optim updates, and the kernel's
// implementation on the device.
type family struct {
	implementation
	kernel string

	tensors []optimizer.Tensor // this rank's parts
	params  []*Param           // the parameters of the tensors
	table   *optimizer.Table   // the tensors on the device

	// iterations are the matrix products between a matrix kernel's two launches.
	iterations *program.Program
}

// implementation describes how the device applies a kernel.
type implementation struct {
	// prepare completes the tensors before they are laid out in the table. It may be nil.
	prepare func(x *Optimizer, f *family) error

	// calls returns the calls of an update.
	calls func(x *Optimizer, f *family) []*program.Call

	// workspace returns the number of float32 values that the calls need after the sums of squares. It
	// may be nil.
	workspace func(f *family) int
}

// byElement implements kernels that compute each element by itself.
var byElement = implementation{calls: func(x *Optimizer, f *family) []*program.Call {
	return []*program.Call{named(program.Prepared(optimizer.Elementwise{Kernel: f.kernel, Control: x.control,
		Table: f.table}))}
}}

// byMatrix implements kernels that update whole matrices. They orthogonalize each matrix's direction
// with the number of Newton-Schulz iterations given by its rule.
var byMatrix = implementation{
	prepare:   orthogonalize,
	calls:     matrixCalls,
	workspace: func(f *family) int { return f.table.Chunks },
}

// createFamilies creates the families of the parameters' kernels. They are in the order of the kernels'
// names, which is the same on all ranks.
func (x *Optimizer) createFamilies() error {
	for _, p := range x.Params {
		k := p.Rule.Kernel
		if x.familyOf(p) != nil {
			continue
		}
		if !optimizer.Implemented(k.String()) {
			return fmt.Errorf("%T updates %s by the kernel %s, which GPUs do not have: train on the "+
				"CPU, or choose another optimizer", x.Rules, p.Input.Node.Name(), k)
		}
		if n := len(k.Moments); n > optimizer.MaxMoments {
			return fmt.Errorf("the kernel %s has %d moments, want at most %d on GPUs", k, n,
				optimizer.MaxMoments)
		}

		f := &family{kernel: k.String(), implementation: byElement}
		if k.Whole {
			f.implementation = byMatrix
		}
		x.families = append(x.families, f)
	}

	slices.SortFunc(x.families, func(a, b *family) int { return cmp.Compare(a.kernel, b.kernel) })
	return nil
}

// familyOf returns the family of a parameter, or nil if it has not been created yet.
func (x *Optimizer) familyOf(p *Param) *family {
	i := slices.IndexFunc(x.families, func(f *family) bool {
		return f.kernel == p.Rule.Kernel.String()
	})
	if i < 0 {
		return nil
	}
	return x.families[i]
}

// workspace returns the number of float32 numbers that the families need after the sums of squares.
// The families use them in turn.
func (x *Optimizer) workspace() (n int) {
	for _, f := range x.families {
		if f.workspace != nil {
			n = max(n, f.workspace(f))
		}
	}
	return n
}

// matrixCalls returns the calls of an update by a kernel for whole matrices: the directions, the
// iterations that orthogonalize them, and the update by their results.
func matrixCalls(x *Optimizer, f *family) []*program.Call {
	nesterov := slices.ContainsFunc(f.params, func(p *Param) bool { return p.Rule.Nesterov })
	calls := []*program.Call{named(program.Prepared(optimizer.Direction{Kernel: f.kernel,
		Control: x.control, Squares: x.squares.Offset(4 * x.sums()), Table: f.table,
		Nesterov: nesterov}))}

	// The first and the last call of the iterations stand for Direction and Apply.
	calls = append(calls, f.iterations.Calls[1:len(f.iterations.Calls)-1]...)
	return append(calls, named(program.Prepared(optimizer.Apply{Kernel: f.kernel,
		Control: x.control, Table: f.table})))
}

// Matrices of one shape share an iteration as long as their squares have at most maxSharedElements
// elements in total. Larger matrices fill the GPU by themselves.
const maxSharedElements = 1 << 24

// group is a set of matrices that share an iteration.
type group struct {
	tensors   []*optimizer.Tensor
	iteration schulz.Iteration
	size      int // elements of a matrix
}

// orthogonalize adds the iterations that turn the directions of the family's matrices into updates,
// and gives the directions memory. Small matrices of one shape share an iteration.
func orthogonalize(x *Optimizer, f *family) error {
	type kind struct{ rows, columns, iterations int }
	alike := map[kind][]*optimizer.Tensor{}
	var kinds []kind
	for i, p := range f.params {
		shape := p.Input.Array.Shape
		k := kind{shape[0], shape[1], p.Rule.Iterations}
		if alike[k] == nil {
			kinds = append(kinds, k)
		}
		alike[k] = append(alike[k], &f.tensors[i])
	}

	f.iterations = &program.Program{}
	b := schulz.Builder{Program: f.iterations, Chooser: x.m.Chooser, Activation: x.m.Activation,
		Name: named}

	var groups []group
	for _, k := range kinds {
		side, together := min(k.rows, k.columns), 1
		// Each matrix must begin at an address that vector accesses can use. Among ranks, which
		// matrices a rank owns depends on the number of ranks. A product of several matrices may
		// be computed differently from a product of one, so they stay separate.
		if k.rows*k.columns%program.VectorBytes == 0 && x.share == nil {
			together = max(1, maxSharedElements/(side*side))
		}
		for some := range slices.Chunk(alike[k], together) {
			it, err := b.Iterate([]int{k.rows, k.columns}, len(some), k.iterations)
			if err != nil {
				return err
			}
			groups = append(groups, group{some, it, k.rows * k.columns})
		}
	}

	return f.placeIterations(x, groups)
}

// placeIterations allocates memory for the iterations. They run after a call that writes their
// matrices and before a call that reads their results. Placeholders for these two calls are the first
// and the last call of the program.
func (f *family) placeIterations(x *Optimizer, groups []group) error {
	p := f.iterations
	before, after := named(program.Prepared(nil)), named(program.Prepared(nil))
	p.Add(before)
	for _, g := range groups {
		before.Args = append(before.Args, program.Writes(program.NoField, g.iteration.Start))
		after.Args = append(after.Args, program.Reads(program.NoField, g.iteration.Result))
		p.Calls = append(p.Calls, g.iteration.Calls...)
	}

	p.Add(after)

	if err := x.m.Chooser.Program(p); err != nil {
		return err
	}

	place.Arena(p, nil)
	if err := x.memory.Place(p, "the directions of "+f.kernel); err != nil {
		return err
	}

	for _, g := range groups {
		from, to := g.iteration.Start, g.iteration.Result
		for i, t := range g.tensors {
			at := i * g.size * from.Type.Size()
			t.Direction, t.Result, t.DirectionType = from.Ptr().Offset(at),
				to.Ptr().Offset(at), from.Type
		}
	}

	return nil
}
