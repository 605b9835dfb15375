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

// family is the parameters that one kernel of the package optim updates, and how the device does it.
type family struct {
	implementation
	kernel string

	tensors []optimizer.Tensor // of this rank
	params  []*Param           // whose they are
	table   *optimizer.Table   // of the tensors

	// iterations are the matrix products between a matrix kernel's two launches.
	iterations *program.Program
}

// implementation is how the device applies a kernel.
type implementation struct {
	// prepare completes the tensors before they are laid out in the table. It may be nil.
	prepare func(x *Optimizer, f *family) error

	// calls returns the calls of an update.
	calls func(x *Optimizer, f *family) []*program.Call

	// workspace returns how many float32 numbers the calls need behind the sums of squares. It may
	// be nil.
	workspace func(f *family) int
}

// byElement implements kernels that compute each element by itself.
var byElement = implementation{calls: func(x *Optimizer, f *family) []*program.Call {
	return []*program.Call{named(program.Prepared(optimizer.Elementwise{Kernel: f.kernel, Control: x.control,
		Table: f.table}))}
}}

// byMatrix implements kernels that update whole matrices: they orthogonalize each matrix's direction by
// as many Newton-Schulz iterations as its rule says.
var byMatrix = implementation{
	prepare:   orthogonalize,
	calls:     matrixCalls,
	workspace: func(f *family) int { return f.table.Chunks },
}

// sort makes the families of the parameters' kernels, in the order of their names so that every
// rank has the same.
func (x *Optimizer) sort() error {
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

// familyOf returns the family of a parameter, or nil if there is none yet.
func (x *Optimizer) familyOf(p *Param) *family {
	i := slices.IndexFunc(x.families, func(f *family) bool {
		return f.kernel == p.Rule.Kernel.String()
	})
	if i < 0 {
		return nil
	}
	return x.families[i]
}

// workspace returns how many float32 numbers the families need behind the sums of squares. They use
// them one after the other.
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

	// The first and the last call of the iterations stand for the two launches.
	calls = append(calls, f.iterations.Calls[1:len(f.iterations.Calls)-1]...)
	return append(calls, named(program.Prepared(optimizer.Apply{Kernel: f.kernel,
		Control: x.control, Table: f.table})))
}

// togetherLeast is the elements of squares up to which matrices of one shape go through the
// iteration together. Those of one that is larger fill the GPU.
const togetherLeast = 1 << 24

// group is matrices that go through the iteration together.
type group struct {
	tensors   []*optimizer.Tensor
	iteration schulz.Iteration
	size      int // of a matrix
}

// orthogonalize gives the family's matrices places for their directions, and adds the iterations that
// turn these into updates. Small matrices of one shape share an iteration.
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
		// The next begins where vectors may. Ranks own other matrices on other numbers of GPUs, and
		// a product of several may be computed in another way than that of one.
		if k.rows*k.columns%program.VectorBytes == 0 && x.share == nil {
			together = max(1, togetherLeast/(side*side))
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

// placeIterations gives the iterations memory, between the call that writes their matrices and the
// one that reads their results. The first and the last call stand for these two.
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
