package update

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/optimizer"
	"github.com/kasmina-go/kasmina/cudaops/internal/lower"
	"github.com/kasmina-go/kasmina/cudaops/internal/place"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// togetherLeast is the elements of squares up to which matrices of one shape go through the iteration
// together: those of one that is larger fill the GPU.
const togetherLeast = 1 << 24

// group is matrices that go through the iteration together.
type group struct {
	tensors   []*optimizer.Tensor
	iteration lower.Iteration
	size      int // of a matrix
}

// orthogonalise gives Muon's matrices places for their directions, and adds the iterations that turn
// these into updates: one for matrices of one shape, where they are small.
func (x *Optimizer) orthogonalise(tensors []optimizer.Tensor, params []*Param) error {
	type kind struct{ rows, columns, iterations int }
	alike := map[kind][]*optimizer.Tensor{}
	var kinds []kind
	for i, p := range params {
		shape := p.Input.Array.Shape
		k := kind{shape[0], shape[1], p.Rule.Iterations}
		if alike[k] == nil {
			kinds = append(kinds, k)
		}
		alike[k] = append(alike[k], &tensors[i])
	}
	x.iterations = &program.Program{}
	var groups []group
	for _, k := range kinds {
		side, together := min(k.rows, k.columns), 1
		if k.rows*k.columns%lower.VectorBytes == 0 { // the next begins where vectors may
			together = max(1, togetherLeast/(side*side))
		}
		for some := range slices.Chunk(alike[k], together) {
			it, err := lower.NewIteration(x.iterations, x.m.Lower, k.rows, k.columns, len(some), k.iterations)
			if err != nil {
				return err
			}
			groups = append(groups, group{some, it, k.rows * k.columns})
		}
	}
	return x.placeIterations(groups)
}

// placeIterations gives the iterations memory, between the call that writes their matrices and the one
// that reads their results, for which the first and the last call stand.
func (x *Optimizer) placeIterations(groups []group) error {
	p := x.iterations
	before, after := newCall(nil), newCall(nil)
	p.Add(before)
	for _, g := range groups {
		before.Args = append(before.Args, program.Writes("", g.iteration.Start))
		after.Args = append(after.Args, program.Reads("", g.iteration.Result))
		p.Calls = append(p.Calls, g.iteration.Calls...)
	}
	p.Add(after)
	if err := x.m.Chooser.Program(p); err != nil {
		return err
	}
	place.Arena(p, nil)
	if err := x.memory.Place(p, "Muon's directions"); err != nil {
		return err
	}
	for _, g := range groups {
		from, to := g.iteration.Start, g.iteration.Result
		for i, t := range g.tensors {
			at := i * g.size * from.Type.Size()
			t.Direction, t.Result, t.DirectionType = from.Ptr().Offset(at), to.Ptr().Offset(at), from.Type
		}
	}
	return nil
}

// NonFinite returns the parameters whose gradients have an element that is NaN, infinite or so large that
// its square is.
func (x *Optimizer) NonFinite() (map[*gorgonia.Node]bool, error) {
	if !x.m.State.Looked() {
		calls, _ := x.squareCalls()
		if err := x.m.Calls(calls); err != nil {
			return nil, err
		}
	}
	bad, at := map[*gorgonia.Node]bool{}, x.squares
	for _, t := range x.tables() {
		squares := make([]float32, t.Chunks)
		if err := x.m.Ctx.CopyToHost(gpu.Bytes(squares), at, x.m.Stream); err != nil {
			return nil, err
		}
		at = at.Offset(4 * t.Chunks)
		of := slices.DeleteFunc(slices.Clone(x.Params), func(p *Param) bool { return p.Rule.Muon != (t == x.muon) })
		for chunk, v := range squares {
			if v-v != 0 {
				bad[of[t.TensorOf(chunk)].Input.Node] = true
			}
		}
	}
	return bad, nil
}
