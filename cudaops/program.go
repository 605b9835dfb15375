package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/plan"
	"github.com/kasmina-go/kasmina/op"
)

// elem is what an array is stored as.
type elem uint8

const (
	float32s elem = iota
	float16s
	bfloat16s
	float8s // E4M3
	int64s
)

func (e elem) size() int { return [...]int{4, 2, 2, 1, 8}[e] }

func (e elem) String() string {
	return [...]string{"float32", "float16", "bfloat16", "float8e4m3", "int64"}[e]
}

// dtype is the driver's name of a float type.
func (e elem) dtype() gpu.DType {
	return [...]gpu.DType{gpu.Float32, gpu.Float16, gpu.BFloat16, gpu.Float8E4M3}[e]
}

// alignment of everything in the arena: what cudaMalloc gives, and what cuBLASLt's fastest algorithms ask for.
const alignment = 256

// block is a piece of device memory: in the arena for the steps of a run that need it, or resident, with an allocation of
// its own, for as long as the machine lives.
type block struct {
	plan.Interval
	resident bool
	base     gpu.Ptr // set before the first run
}

// array is the value of a node, or a part of one: elements in row-major order.
type array struct {
	*block     // nil for a packed result, and for a value that is formed within another one only
	at     int // bytes into the block
	elem   elem
	shape  tensor.Shape
	stride int // elements from one row of a matrix to the next; 0 for rows without gaps
	// parts are the tensors of a packed result, in order. Their types may differ, so it has no elements of its own.
	parts []*array
}

func (a *array) len() int { return size(a.shape) }

// on reports whether a, or a part of it, is in a block.
func (a *array) on(b *block) bool {
	return a != nil && (a.block == b || slices.ContainsFunc(a.parts, func(p *array) bool { return p.on(b) }))
}

// extent is the bytes of its elements.
func (a *array) extent() int { return a.len() * a.elem.size() }

func (a *array) ptr() gpu.Ptr { return a.base.Offset(a.at) }

// view is n elements of a in another shape, from the given element on.
func (a *array) view(element int, shape ...int) *array {
	return &array{block: a.block, at: a.at + element*a.elem.size(), elem: a.elem, shape: shape}
}

// columns is some columns of the matrix a, from the given one on.
func (a *array) columns(first, n int) *array {
	return &array{block: a.block, at: a.at + first*a.elem.size(), elem: a.elem, shape: tensor.Shape{a.shape[0], n}, stride: a.shape[1]}
}

func size(s tensor.Shape) int {
	n := 1
	for _, d := range s {
		n *= d
	}
	return n
}

// task enqueues the work of a node, or of a piece of it.
type task struct {
	node  *gorgonia.Node
	op    string // what it is called where that is not the node's op
	place string // the layer of the model, as parameters' names tell
	host  bool   // it waits for the device and computes on the host, so it cannot be captured
	run   func() error

	bytes  float64 // of the arrays that it reads or writes
	flops  float64 // of matrix products
	float8 bool    // of which these are

	layer   *kasminaLayer // whose pass it is
	inPlace bool          // what it writes replaces what it reads
	spare   func() error  // copies that for bare, which must not replace it; nil where there is no need
	bare    func() error  // the pass without telemetry; nil for a replay, which has none
}

// program is a graph as a list of tasks over blocks of memory.
type program struct {
	tasks  []task
	blocks []*block
	values map[*gorgonia.Node]*array
	inputs []*input
	tables []table
	sums   map[*gorgonia.Node]*array // of the gradients of parameters, with WithAccumulation
	arena  int                       // bytes
	spent  bool                      // some memory saves time, and could be done without
	last   map[*block]int            // the last task that needs a block, whether or not its values are kept

	weights []*quantizedWeight

	zeroed *array // what zeros gives; nil where nothing asks

	scale   *array // kernels.LossScale, whose first number is the loss scale; nil where there is none
	scaling *scaling
}

// input is a node whose value the host provides.
type input struct {
	node     *gorgonia.Node
	array    *array
	constant bool // sent once: a constant or a parameter
	bound    bool // its memory is the program's own, which fills it
	sharers  int  // other machines that use its memory
	staging  []byte
	copies   []shadow  // of a parameter, in other types
	ids      []idRange // what the ops that use it ask of it
}

// shadow is a parameter in another type, and the work that makes it from the parameter.
type shadow struct {
	*array
	renew func() error
}

// idRange is what an op asks of an input that holds ids or, in sequences of seq tokens, where their documents start.
type idRange struct {
	op, argument string
	vocab        int
	negative     bool // a negative id means that the row does not count; one must not be negative
	seq          int  // 0 for ids
}

// table is a constant that no node stands for.
type table struct {
	*array
	data []float32
}

// converted is an array in another type.
type converted struct {
	*block
	at, len int
	elem
}

// compiler turns a graph into a program.
type compiler struct {
	*program
	m     *Machine
	roomy bool                // memory may be spent to save time
	used  map[*block]int      // the first task that needs a resident block
	saved map[gorgonia.Op]any // what the lowering of a forward op leaves for that of its backward op
	kept  map[*gorgonia.Node]bool
	users map[*gorgonia.Node]gorgonia.Nodes // those that are lowered

	inputOf   map[*block]*input
	copies    map[converted]*array
	quantized map[quantizedKey]quantized
	sources   map[*block][]*input // what parameters and constants, and copies and stacks of them, are made of
	stacks    map[stacked]*array
	rotations map[rotation]*rotationTables
	documents map[packing]*array
	gradients map[gorgonia.Op]int     // backward ops that the graph has of a forward op
	updating  map[*gorgonia.Node]bool // gradients of parameters that nobody asks for but an update
	layers    map[*gorgonia.Node]place

	normEnds     ends[kernels.RMSNormParts]
	figureEnds   ends[kernels.KasminaRecords]
	gradientEnds ends[kernels.KasminaParts] // of Kasmina layers, and figures of gradients
	pending      []pending                  // all ends
}

// compile lowers every node of the graph that the kept nodes depend on, and plans the memory. If roomy, the program takes more
// memory than it needs where that saves time, and says so (spent).
func compile(m *Machine, kept gorgonia.Nodes, roomy bool) (*program, error) {
	c := &compiler{m: m, roomy: roomy, used: map[*block]int{}, program: &program{values: map[*gorgonia.Node]*array{}, last: map[*block]int{}}, saved: map[gorgonia.Op]any{},
		kept: map[*gorgonia.Node]bool{}, users: map[*gorgonia.Node]gorgonia.Nodes{}, inputOf: map[*block]*input{},
		copies: map[converted]*array{}, quantized: map[quantizedKey]quantized{}, sources: map[*block][]*input{},
		stacks: map[stacked]*array{}, rotations: map[rotation]*rotationTables{},
		documents: map[packing]*array{}, gradients: map[gorgonia.Op]int{}, layers: map[*gorgonia.Node]place{}}
	c.newEnds()
	for _, n := range kept {
		c.kept[n] = true
	}
	c.updating = m.updating()
	if m.config.float8 {
		if err := m.checkFloat8(); err != nil {
			return nil, err
		}
	}
	if m.config.scaled {
		var err error
		if c.scaling, err = gradientOf(m); err != nil {
			return nil, err
		}
		if c.scaling != nil {
			c.scale = c.newResident(float32s, kernels.LossScaleBytes/4)
		}
	}
	if err := c.lowerAll(kept); err != nil {
		return nil, err
	}
	if m.config.gather {
		c.gather()
	}
	c.settleAll()
	for n := range c.kept {
		c.touch(c.values[n], len(c.tasks))
	}
	c.plan()
	return c.program, nil
}

// lowerAll lowers the nodes that the given ones of one graph depend on, and these, but for those that have a value already.
func (c *compiler) lowerAll(results gorgonia.Nodes) error {
	if len(results) == 0 {
		return nil
	}
	sorted, err := gorgonia.Sort(results[0].Graph().ExactSubgraphRoots(results...))
	if err != nil {
		return fmt.Errorf("sorting the graph: %w", err)
	}
	for _, n := range sorted {
		if o, ok := n.Op().(*op.LinearCrossEntropyGradOp); ok {
			c.gradients[o.Forward]++
		}
		for _, child := range opbase.Children(n) {
			c.users[child] = append(c.users[child], n)
		}
	}
	c.placeAll(sorted)
	for _, n := range slices.Backward(sorted) { // Gorgonia sorts from results to inputs
		if c.values[n] != nil {
			continue
		}
		fused, err := c.fuse(n)
		if err == nil && !fused {
			err = c.lower(n)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", describe(n), err)
		}
	}
	return nil
}

// gather adds the gradient of each parameter to a sum that outlives runs.
func (c *compiler) gather() {
	c.sums = map[*gorgonia.Node]*array{}
	for _, p := range c.m.config.params {
		g := c.values[p.Deriv()]
		if g == nil {
			continue
		}
		sum, m := c.newResident(float32s, g.shape...), c.m
		c.sums[p] = sum
		c.do(p.Deriv(), func() error {
			return m.k.Axpby(m.stream, sum.ptr(), gpu.Float32, 1, g.ptr(), g.elem.dtype(), 1, g.len())
		}, g, sum)
	}
}

func describe(n *gorgonia.Node) string {
	if n.Op() == nil {
		return fmt.Sprintf("input %s %v", n.Name(), n.Shape())
	}
	return fmt.Sprintf("node %d, %v %v", n.ID(), n.Op(), n.Shape())
}

// newArray returns an array in the arena, for the tasks that are given it.
func (c *compiler) newArray(e elem, shape ...int) *array {
	return c.allocate(&block{Interval: plan.Interval{First: -1}}, e, shape)
}

// newResident returns an array that lives as long as the machine.
func (c *program) newResident(e elem, shape ...int) *array {
	return c.allocate(&block{resident: true}, e, shape)
}

func (c *program) allocate(b *block, e elem, shape []int) *array {
	a := &array{block: b, elem: e, shape: slices.Clone(shape)}
	b.Bytes = max(1, a.len()*e.size())
	c.blocks = append(c.blocks, b)
	return a
}

// zeros returns so many bytes that are zero when a run begins, for a task alone, which may leave anything there.
func (c *compiler) zeros(bytes int) *array {
	if c.zeroed == nil {
		c.zeroed = &array{block: &block{resident: true}, elem: float8s, shape: tensor.Shape{0}}
		c.blocks = append(c.blocks, c.zeroed.block)
	}
	z := &array{block: c.zeroed.block, at: c.zeroed.Bytes, elem: float8s, shape: tensor.Shape{bytes}}
	c.zeroed.Bytes += plan.Align(bytes, alignment)
	c.zeroed.shape[0] = c.zeroed.Bytes
	return z
}

// zero sets to zero what tasks expect to be so: in what is captured, since that alone can do without other work for it.
func (m *Machine) zero() error {
	z := m.program.zeroed
	if z == nil || !m.capturing {
		return nil
	}
	return m.device.ctx.Memset8(z.ptr(), 0, z.extent(), m.stream)
}

// do adds a task that reads and writes the given arrays. The first is written: if it comes again, it is read too.
func (c *compiler) do(n *gorgonia.Node, run func() error, touched ...*array) {
	c.settle(touched)
	t := task{node: n, place: c.layers[n].layer, run: run}
	for i, a := range touched {
		if a != nil && a.block != nil && (i == 0 || !slices.Contains(touched[1:i], a)) {
			t.bytes += float64(a.extent())
		}
	}
	c.tasks = append(c.tasks, t)
	for _, a := range touched {
		c.touch(a, len(c.tasks)-1)
	}
}

// named gives the last task another name than that of its node's op.
func (c *compiler) named(op string) { c.tasks[len(c.tasks)-1].op = op }

// computes notes the operations of the last task.
func (c *compiler) computes(flops float64) { c.tasks[len(c.tasks)-1].flops = flops }

// touch makes an array's memory last over the given step.
func (c *compiler) touch(a *array, step int) {
	if a == nil {
		return
	}
	for _, p := range a.parts {
		c.touch(p, step)
	}
	if a.block == nil {
		return
	}
	if step < len(c.tasks) {
		c.last[a.block] = max(c.last[a.block], step)
	}
	if a.resident {
		if _, known := c.used[a.block]; !known {
			c.used[a.block] = step
		}
		return
	}
	if a.First < 0 {
		a.First = step
	}
	a.Last = max(a.Last, step)
}

// constant returns a resident array that holds data.
func (c *compiler) constant(data []float32) *array {
	a := c.newResident(float32s, len(data))
	c.program.tables = append(c.program.tables, table{a, data})
	return a
}

// bound makes the integers of an input be checked when they are sent.
func (c *compiler) bound(a *array, r idRange) {
	if in := c.inputOf[a.block]; in != nil {
		in.ids = append(in.ids, r)
	}
}

// hasGradient reports whether the graph holds the backward op of n's op.
func (c *compiler) hasGradient(n *gorgonia.Node) bool { return c.gradients[n.Op()] > 0 }

// plan packs the arena and notes the offsets in the blocks' bases, which become addresses once it is allocated.
func (c *compiler) plan() {
	var all []*plan.Interval
	for _, b := range c.blocks {
		if !b.resident && b.First >= 0 {
			all = append(all, &b.Interval)
		}
	}
	c.arena = plan.Pack(all, alignment)
}

// resident returns the bytes of resident memory.
func (p *program) resident() int {
	n := 0
	for _, b := range p.blocks {
		if b.resident {
			n += plan.Align(b.Bytes, alignment)
		}
	}
	return n
}
