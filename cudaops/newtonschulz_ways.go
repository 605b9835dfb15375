package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/plan"
)

// The ways to compute the Newton-Schulz iteration among the choices: with products alone, with products of half of what
// is symmetric, and with several steps between products with X (see [kernels.NewtonSchulz]).
const (
	newtonSchulzOp = "NewtonSchulz"
	byProducts     = "products"
	bySymmetry     = "symmetric"
	byGram         = "gram"
)

// gramSteps is how many steps go together.
const gramSteps = 3

// iteration is Newton-Schulz of matrices of one shape that lie one behind the other, in one of the ways. Of 16-bit types it takes
// float16, since no number is large.
type iteration struct {
	m *Machine
	kernels.NewtonSchulz
	elem   elem
	way    string
	choice int // of the tuner
	apply  *planned
}

// newIteration has the tuner choose a way.
func (m *Machine) newIteration(shape tensor.Shape, batch, steps int) (*iteration, error) {
	it := &iteration{m: m, elem: float16s, NewtonSchulz: kernels.NewtonSchulz{Rows: shape[0], Columns: shape[1], Batch: batch, Steps: steps}}
	if m.activations() == float32s {
		it.elem = float32s
	}
	it.Type = it.elem.dtype()
	j, err := it.job(it.ways())
	if err != nil {
		return nil, err
	}
	way, err := m.tuner.choose(j)
	if err != nil {
		return nil, err
	}
	it.choice = m.tuner.last()
	return it, it.take(j.ways[way])
}

// ways are those that the GPU and the shape allow, that of the rule of thumb first; if there is tuning, that with cuBLASLt's
// products, which otherwise would only be compared with.
func (it *iteration) ways() []string {
	for _, s := range it.Shapes() {
		if !it.m.k.TakesSymmetric(s, it.Type) {
			return []string{byProducts}
		}
	}
	together := kernels.NewtonSchulzTogether(it.Rows, it.Columns)
	switch {
	case it.m.tuner.on() || together == 0:
		return []string{byProducts, bySymmetry, byGram}
	case together == 1:
		return []string{bySymmetry, byGram, byProducts}
	}
	return []string{byGram, bySymmetry, byProducts}
}

// take plans the products of a way.
func (it *iteration) take(way string) error {
	it.way, it.Together = way, 1
	if way == byGram {
		it.Together = gramSteps
	}
	if way == byProducts {
		return nil
	}
	var err error
	q, x := it.array(it.side(), it.side()), it.array(it.Rows, it.Columns)
	it.apply, err = it.m.blas.plan(schulz{tall: it.tall()}.apply(x, q, x, nil, 0, false).repeated(it.Batch).spec(), nothing)
	return err
}

func (it *iteration) side() int  { return min(it.Rows, it.Columns) }
func (it *iteration) tall() bool { return it.Rows > it.Columns }

// flops is the operations of the iteration as it is written.
func (it *iteration) flops() float64 {
	side, long := float64(it.side()), float64(max(it.Rows, it.Columns))
	return float64(it.Batch*it.Steps) * 2 * side * side * (2*long + side)
}

// room is the elements that a square of each matrix takes, up to where the next begin.
func (it *iteration) room() int {
	return plan.Align(it.Batch*it.side()*it.side(), alignment/it.elem.size())
}

// squares is the elements of all squares.
func (it *iteration) squares() int {
	if it.way == byProducts {
		return 2 * it.room()
	}
	return len(it.Squares) * it.room()
}

// array is a matrix, with the others behind it, in memory that is aligned.
func (it *iteration) array(rows, columns int) *array {
	return &array{block: &block{}, elem: it.elem, shape: tensor.Shape{rows, columns}}
}

// bind returns what turns x into the iteration's result, and where that is: x or y. The memory of the arrays need not be known yet.
func (it *iteration) bind(x, y, squares *array) (run func() error, result *array, err error) {
	if it.way == byProducts {
		return it.bindProducts(x, y, squares)
	}
	ends := [2]*array{x, y}
	room := it.room() * it.elem.size()
	symmetric := func(a kernels.Symmetric) error { return it.m.k.Symmetric(it.m.stream, a) }
	apply := func(y, q, x gpu.Ptr) error {
		if it.tall() {
			q, x = x, q
		}
		it.m.tuner.use(it.apply.choice)
		return it.apply.run(gpu.MatmulArgs{Alpha: 1, A: q, B: x, C: y, D: y, Workspace: it.m.blas.workspace,
			WorkspaceSize: workspaceBytes}, it.m.stream)
	}
	return func() error {
		it.m.tuner.use(it.choice)
		a := it.NewtonSchulz
		for i, end := range ends {
			a.X[i] = end.ptr()
		}
		for i := range a.Squares {
			a.Squares[i] = squares.ptr().Offset(i * room)
		}
		return a.Run(symmetric, apply)
	}, ends[it.Segments()%2], nil
}

// bindProducts binds the way with cuBLASLt's products.
func (it *iteration) bindProducts(x, y, squares *array) (run func() error, result *array, err error) {
	side := it.side()
	s := schulz{tall: it.tall(), gram: squares.view(0, side, side), poly: squares.view(it.room(), side, side)}
	x, y = x.view(0, it.Rows, it.Columns), y.view(0, it.Rows, it.Columns)
	var runs []func() error
	for range it.Steps {
		for _, p := range s.step(y, x) {
			run, err := it.m.blas.product(p.repeated(it.Batch), nil)
			if err != nil {
				return nil, nil, err
			}
			runs = append(runs, run)
		}
		x, y = y, x
	}
	return func() error {
		it.m.tuner.use(it.choice)
		for _, run := range runs {
			if err := run(); err != nil {
				return err
			}
		}
		return nil
	}, x, nil
}

// job is the iteration as the tuner sees it: of random numbers, normalised together.
func (it *iteration) job(ways []string) (job, error) {
	blas, err := it.m.device.ctx.Blas()
	if err != nil {
		return job{}, err
	}
	n := it.Batch * it.Rows * it.Columns
	j := job{op: newtonSchulzOp, shape: fmt.Sprintf("%d of %dx%d %v, %d steps", it.Batch, it.Rows, it.Columns, it.Type, it.Steps),
		build: fmt.Sprintf("%s, cuBLASLt %d", it.m.k.Build(append(productUnits, "gemm_symmetric")...), blas.Version()), ways: ways,
		plain: slices.Index(ways, byProducts), computes: true, tiny: it.flops() < it.m.config.tuneLeast,
		arguments: []argument{numbers(reads, n, it.Type), numbers(writes, n, it.Type), {role: scratch, bytes: n * it.elem.size()},
			{role: scratch, bytes: len(it.Squares) * it.room() * it.elem.size()},
			{role: scratch, bytes: kernels.NormalizeWorkspace}}}
	j.run = func(way int, memory []gpu.Ptr) error {
		one := *it
		if err := one.take(ways[way]); err != nil {
			return err
		}
		at := func(p gpu.Ptr, shape ...int) *array {
			return &array{block: &block{base: p}, elem: it.elem, shape: shape}
		}
		x, y := at(memory[1], it.Rows, it.Columns), at(memory[2], it.Rows, it.Columns)
		if one.Segments()%2 == 1 { // the result is to be in the same place
			x, y = y, x
		}
		run, _, err := one.bind(x, y, at(memory[3], one.squares()))
		if err != nil {
			return err
		}
		return first(it.m.k.Normalize(it.m.stream, kernels.Normalize{Y: x.ptr(), X: memory[0], Workspace: memory[4], N: n, YType: it.Type,
			XType: it.Type}), run)
	}
	return j, nil
}

// togetherLeast is the elements of squares up to which matrices of one shape go through the iteration together: those of one that is
// larger fill the GPU.
const togetherLeast = 1 << 24

// orthogonalise gives Muon's matrices places for their directions, and adds the iterations that turn these into updates: one for
// matrices of one shape, where they are small. All iterations work in the same memory for squares.
func (m *Machine) orthogonalise(x *optimizer, tensors []kernels.OptimTensor, states []*paramState) error {
	type kind struct{ rows, columns, iterations int }
	alike := map[kind][]*kernels.OptimTensor{}
	var kinds []kind
	for i, p := range states {
		shape := p.input.array.shape
		k := kind{shape[0], shape[1], p.rule.Iterations}
		if alike[k] == nil {
			kinds = append(kinds, k)
		}
		alike[k] = append(alike[k], &tensors[i])
	}
	for _, k := range kinds {
		side, together := min(k.rows, k.columns), 1
		if k.rows*k.columns%vectorBytes == 0 { // the next begins where vectors may
			together = max(1, togetherLeast/(side*side))
		}
		for group := range slices.Chunk(alike[k], together) {
			if err := m.orthogonaliseGroup(x, group, tensor.Shape{k.rows, k.columns}, k.iterations); err != nil {
				return err
			}
		}
	}
	if s := x.muonSquares; s != nil {
		base, err := x.alloc(m, s.extent(), "Muon's squares")
		s.base = base
		return err
	}
	return nil
}

func (m *Machine) orthogonaliseGroup(x *optimizer, group []*kernels.OptimTensor, shape tensor.Shape, iterations int) error {
	it, err := m.newIteration(shape, len(group), iterations)
	if err != nil {
		return err
	}
	var ends [2]*array
	for i := range ends {
		if ends[i], err = x.newArray(m, it.elem, "Muon's directions", len(group), shape[0], shape[1]); err != nil {
			return err
		}
	}
	if x.muonSquares == nil {
		x.muonSquares = &array{block: &block{resident: true}, elem: it.elem, shape: tensor.Shape{1}}
	}
	x.muonSquares.shape[0] = max(x.muonSquares.shape[0], it.squares())
	run, result, err := it.bind(ends[0], ends[1], x.muonSquares)
	if err != nil {
		return err
	}
	x.newtonSchulz = append(x.newtonSchulz, run)
	for i, t := range group {
		at := i * size(shape) * it.elem.size()
		t.Direction, t.Result, t.DirectionType = ends[0].ptr().Offset(at), result.ptr().Offset(at), it.elem.dtype()
	}
	return nil
}
