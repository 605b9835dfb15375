package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// What a kernel does with the result of a product, or one kernel with both: the latter saves a pass over memory, the former has
// the fastest product. The tuner decides.

// matmulRun enqueues a product of two matrices, of float8 with the factors of each.
type matmulRun func(d, a, b gpu.Ptr, scales ...gpu.Ptr) error

// productWays is a product and what is done with its result, which are computed separately, by two kernels, or in one
// kernel that has some ways. Either takes memory for the arguments. For productThen these begin with the arrays, which are then all that
// either works on; of others the arrays are those that the copy engine moves.
type productWays struct {
	product
	op, shape string
	units     []string // where the kernels are
	fused     []kernels.Way
	arrays    []*array
	arguments []argument
	separate  func(matmulRun, []gpu.Ptr) error
	run       func(kernels.Way, []gpu.Ptr) error
}

// addresses are those of the arrays.
func (w productWays) addresses() []gpu.Ptr {
	at := make([]gpu.Ptr, len(w.arrays))
	for i, a := range w.arrays {
		at[i] = a.ptr()
	}
	return at
}

// productThen adds a product and what is done with its result: in one kernel, or the product and then what after adds.
func (c *compiler) productThen(n *gorgonia.Node, w productWays, after func()) error {
	choice, err := c.chooseFused(w)
	if err != nil {
		return err
	}
	if choice == nil {
		if err := c.matmul(n, w.product); err != nil {
			return err
		}
		after()
		return nil
	}
	m := c.m
	c.do(n, func() error {
		m.tuner.use(choice.index)
		return w.run(choice.way, w.addresses())
	}, w.arrays...)
	c.computes(w.flops())
	c.tasks[len(c.tasks)-1].float8 = w.scaleA != nil
	return nil
}

// fusedChoice is the way of the one kernel, and the tuner's choice of that.
type fusedChoice struct {
	way   kernels.Way
	index int
}

// chooseFused returns what the tuner chooses, nil for separately. Without tuning, and where that is not worth it, a rule must
// ask for the one kernel.
func (c *compiler) chooseFused(w productWays) (*fusedChoice, error) {
	m := c.m
	if len(w.fused) == 0 || slices.ContainsFunc(w.arrays, func(a *array) bool { return a.at%vectorBytes != 0 }) {
		return nil, nil
	}
	blas, err := m.device.ctx.Blas()
	if err != nil {
		return nil, err
	}
	ways := append([]string{"separate"}, names(w.fused)...)
	plan, err := m.blas.plan(w.spec(), nothing)
	if err != nil {
		return nil, err
	}
	if _, forced := m.tuner.allowed(w.op, ways); !forced && m.tuner.on() && !m.blas.worthTiming(plan.Spec()) {
		return nil, nil
	}
	multiply := func(d, a, b gpu.Ptr, scales ...gpu.Ptr) error {
		args := gpu.MatmulArgs{Alpha: 1, A: a, B: b, C: d, D: d, Workspace: m.blas.workspace, WorkspaceSize: workspaceBytes}
		if len(scales) > 0 {
			args.ScaleA, args.ScaleB = scales[0], scales[1]
		}
		return plan.run(args, m.stream)
	}
	j := job{op: w.op, shape: w.shape, ways: ways, build: fmt.Sprintf("%s, cuBLASLt %d", m.k.Build(append(w.units, productUnits...)...), blas.Version()),
		arguments: w.arguments, computes: true}
	j.run = func(way int, memory []gpu.Ptr) error {
		if way == 0 {
			return w.separate(multiply, memory)
		}
		return w.run(w.fused[way-1], memory)
	}
	way, err := m.tuner.choose(j)
	if way == 0 || err != nil {
		return nil, err
	}
	return &fusedChoice{w.fused[way-1], m.tuner.last()}, nil
}
