package cpuops

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/plan"
	"github.com/kasmina-go/kasmina/internal/variantrule"
)

// alignment is the alignment in an arena: a cache line, so that two goroutines never write to the same
// line.
const alignment = 64

// value is the result of a node, or an input. Its elements are in row-major order.
type value struct {
	node  *gorgonia.Node
	dt    tensor.Dtype
	shape tensor.Shape
	flat  any // []float32, []float64 or []int; nil until memory is allocated

	// For an input:
	isInput bool
	bound   gorgonia.Value // the node's value when flat was set
	shares  bool           // flat is the memory of bound

	// For a view of another value's memory, which starts at element at:
	from *value
	at   int

	// For a value with separate memory in the arena:
	room *plan.Interval

	// lastRead is the last step that reads any part of the value. It is −1 if there are no readers,
	// and MaxInt for a kept value.
	lastRead  int
	lastWhole int // the last step that reads the whole value

	loose gorgonia.Value // the value itself if its type does not use planned memory
	shown gorgonia.Value // the value bound to the node of a kept value
}

// step computes one node.
type step struct {
	node  *gorgonia.Node
	layer string // name of the layer, derived from parameter names
	in    []*value
	out   *value
	args  opbase.Args // memory of in
	run   func(s *step) error
	stop  *cpu.Stop // requests an early return of the current run; nil if it cannot be canceled

	inPlace bool // the result may overwrite an operand

	variant  string // the chosen variant, if there are several
	variants []string
	fused    bool // computes LinearAdd

	// Later products of the same x with compact weights, which this step computes too.
	also []product
}

// auxRoom is memory that an op keeps for its gradient.
type auxRoom struct {
	aux  *opbase.Aux
	dt   tensor.Dtype
	n    int
	room *plan.Interval
	flat any
}

// program is a graph as a list of steps over planned memory.
type program struct {
	steps  []step
	values map[*gorgonia.Node]*value
	inputs []*value
	views  []*value
	owners []*value // values with an interval in the arena
	kept   []*value
	sums   map[*gorgonia.Node]*gradientSum // by parameter
	aux    []auxRoom

	arena, auxArena []byte
	arenaAt, auxAt  *byte // addresses of the arenas when values were last placed
	bytes, auxBytes int
}

// compiler turns a graph into a program.
type compiler struct {
	*program
	keep   map[*gorgonia.Node]bool
	layers graph.Layers
	matrix func(*gorgonia.Node) (*gemm.Compact, error) // returns an input's compact matrix, or nil
	rules  variantrule.Rules
	warned map[string]bool // messages about rules
}

func compile(g *gorgonia.ExprGraph, config config) (*program, error) {
	c := &compiler{keep: map[*gorgonia.Node]bool{}, rules: config.rules, matrix: config.matrix, warned: map[string]bool{},
		program: &program{values: map[*gorgonia.Node]*value{},
			sums: map[*gorgonia.Node]*gradientSum{}}}
	results, grads := config.Results(g)
	for _, n := range results {
		c.keep[n] = true
	}

	sorted, err := graph.Order(append(results, grads...)...)
	if err != nil {
		return nil, err
	}

	if len(sorted) == 0 {
		return nil, errors.New("the graph computes nothing")
	}

	c.layers.IsParam = config.Params.Contains
	c.layers.Add(sorted)
	gradients := config.Gradients()
	for _, n := range sorted {
		if err := c.add(n); err != nil {
			return nil, fmt.Errorf("%s: %w", graph.Describe(n), err)
		}
		for _, p := range gradients[n] {
			if err := c.gather(p, c.values[n]); err != nil {
				return nil, err
			}
		}
	}

	c.fuse()
	c.together()
	c.plan()
	return c.program, nil
}

// add creates the value of a node, and a step unless the value is an input or a view.
func (c *compiler) add(n *gorgonia.Node) error {
	if err := graph.HasValue(n); err != nil {
		return err
	}

	if opbase.Size(n.Shape()) == 0 {
		return errors.New("it has no elements")
	}

	v := &value{node: n, dt: n.Dtype(), shape: n.Shape(), lastRead: -1, lastWhole: -1}
	c.values[n] = v
	children := graph.Children(n)
	if graph.IsInput(n) {
		v.isInput = true
		w, err := c.matrix(n)
		switch {
		case err != nil:
			return err
		case w != nil:
			v.flat = w
		default:
			c.inputs = append(c.inputs, v)
		}
		return nil
	}

	in := make([]*value, len(children))
	for i, child := range children {
		in[i] = c.values[child]
	}

	if err := checkCompact(n, in); err != nil {
		return err
	}

	if from, at, ok := viewOf(n, in); ok {
		v.from, v.at = from, at
		c.views = append(c.views, v)
	} else {
		s := step{node: n, layer: c.layers.Of(n), in: in, out: v, args: make(opbase.Args, len(in))}
		c.choose(&s)
		c.reserve(v)
		c.push(s)
	}

	if c.keep[n] {
		c.read([]*value{v}, math.MaxInt)
		c.kept = append(c.kept, v)
	}

	return nil
}

// reserve plans memory in the arena for v, starting with the next step.
func (c *compiler) reserve(v *value) {
	if bytes := elementSize(v.dt) * opbase.Size(v.shape); bytes > 0 {
		v.room = &plan.Interval{First: len(c.steps), Bytes: bytes}
	}
}

// push appends a step.
func (c *compiler) push(s step) {
	c.read(s.in, len(c.steps))
	c.steps = append(c.steps, s)
}

// read records that step i reads values.
func (c *compiler) read(in []*value, i int) {
	for _, v := range in {
		whole := true
		for ; v != nil; v = v.from {
			v.lastRead = max(v.lastRead, i)
			if whole {
				v.lastWhole = max(v.lastWhole, i)
			}
			whole = whole && v.from != nil && opbase.Size(v.shape) == opbase.Size(v.from.shape)
		}
	}
}

// gather adds a step that adds a parameter's gradient to a sum that is kept between runs.
func (c *compiler) gather(p *gorgonia.Node, g *value) error {
	if len(g.shape) == 0 {
		return fmt.Errorf("WithParams: %s is a scalar", graph.Describe(p))
	}

	sum, err := newGradientSum(g)
	if err != nil {
		return err
	}

	c.sums[p] = sum
	c.push(step{node: p.Deriv(), in: []*value{g}, args: make(opbase.Args, 1),
		run: func(s *step) error {
			sum.add(s.args[0])
			return nil
		}})
	return nil
}

// root returns the value that owns v's memory, and the index of v's first element within it.
func (v *value) root() (root *value, at int) {
	for v.from != nil {
		at += v.at
		v = v.from
	}
	return v, at
}

// plan lets results overwrite operands that are no longer needed, and lays out the arena.
func (c *compiler) plan() {
	for i := range c.steps {
		if s := &c.steps[i]; s.inPlace {
			c.overwrite(i, s)
		}
	}

	for _, v := range c.values {
		if root, _ := v.root(); root.room != nil {
			root.room.Last = max(root.room.Last, min(v.lastRead, len(c.steps)))
		}
	}

	var rooms []*plan.Interval
	place := func(v *value) {
		if v == nil || v.room == nil {
			return
		}
		v.room.Last = max(v.room.Last, v.room.First)
		rooms = append(rooms, v.room)
		c.owners = append(c.owners, v)
	}
	for _, s := range c.steps {
		place(s.out)
		for _, p := range s.also {
			place(p.out)
		}
	}

	c.bytes = plan.Pack(rooms, alignment)
}

// overwrite makes the result of step i a view of one of its operands, if no later step reads that
// operand.
func (c *compiler) overwrite(i int, s *step) {
	for _, v := range s.in {
		root, _ := v.root()
		if root.room == nil || v.lastRead != i || v.dt != s.out.dt ||
			opbase.Size(v.shape) != opbase.Size(s.out.shape) {
			continue
		}
		free := true // no later step reads the operand as part of a larger value
		for up := v.from; up != nil; up = up.from {
			free = free && up.lastWhole <= i
		}
		if !free {
			continue
		}
		s.out.from, s.out.room = v, nil
		c.views = append(c.views, s.out)
		return
	}
}

// allocate provides memory for a run, unless the program still has the memory of the last run. It reports
// whether the addresses of values have changed.
func (p *program) allocate() (moved bool) {
	if p.arena == nil {
		p.arena = takeArena(p.bytes)
	}

	if at := unsafe.SliceData(p.arena); at != p.arenaAt {
		p.arenaAt, moved = at, true
		for _, v := range p.owners {
			v.flat, v.shown = slice(p.arena, v.room.Offset, v.dt, opbase.Size(v.shape)), nil
		}
	}

	if p.auxArena == nil && p.auxBytes > 0 {
		p.auxArena = takeArena(p.auxBytes)
	}

	if at := unsafe.SliceData(p.auxArena); at != p.auxAt {
		p.auxAt = at
		p.placeAux()
	}

	return moved
}

// release returns the memory of runs to the pool, so that other programs can use it. It also drops
// all references to that memory, so that the garbage collector can free arenas that the pool
// discards.
func (p *program) release() {
	giveArena(p.arena)
	giveArena(p.auxArena)
	p.arena, p.auxArena, p.arenaAt, p.auxAt = nil, nil, nil, nil
	for _, v := range p.values {
		if _, ok := v.flat.(*gemm.Compact); !ok {
			v.flat = nil
		}
		v.shown, v.bound, v.loose = nil, nil, nil
	}

	for i := range p.steps {
		clear(p.steps[i].args)
	}

	for i := range p.aux {
		p.aux[i].flat = nil
	}

	for _, s := range p.sums {
		s.before = nil
	}
}

// adoptAux plans the memory in which ops keep values for their gradients. Its size is known after the
// first run.
func (p *program) adoptAux() {
	last := map[*opbase.Base]int{} // the last step that reads an op's memory
	var rooms []*plan.Interval
	for i, s := range p.steps {
		base := baseOf(s.node)
		if base == nil || s.out == nil {
			continue
		}
		last[base] = i
		if f := base.Forward(); f != nil {
			last[f] = i
		}
	}

	for i, s := range p.steps {
		base := baseOf(s.node)
		if base == nil || s.out == nil {
			continue
		}
		for _, a := range base.Aux() {
			dt, n := a.Len()
			if n == 0 {
				continue
			}
			room := &plan.Interval{Bytes: n * elementSize(dt), First: i, Last: last[base]}
			rooms = append(rooms, room)
			p.aux = append(p.aux, auxRoom{a, dt, n, room, nil})
		}
	}

	p.auxBytes = plan.Pack(rooms, alignment)
}

func (p *program) placeAux() {
	for i := range p.aux {
		a := &p.aux[i]
		a.flat = slice(p.auxArena, a.room.Offset, a.dt, a.n)
	}
}

// lendAux gives ops their planned memory for a run. The memory is withdrawn between runs, because
// another machine on the same graph would run the ops in a different order, for which this plan would
// be invalid.
func (p *program) lendAux() {
	for i := range p.aux {
		p.aux[i].aux.Lend(p.aux[i].flat)
	}
}

func (p *program) reclaimAux() {
	for i := range p.aux {
		p.aux[i].aux.Lend(nil)
	}
}

func (p *program) memory() int {
	n := p.bytes + p.auxBytes
	for _, s := range p.sums {
		n += s.bytes()
	}
	return n
}

// baseOf returns the base that all ops of this module embed, or nil for any other op.
func baseOf(n *gorgonia.Node) *opbase.Base {
	if o, ok := n.Op().(interface{ Shared() *opbase.Base }); ok {
		return o.Shared()
	}
	return nil
}

func elementSize(dt tensor.Dtype) int {
	switch dt {
	case tensor.Float32:
		return 4
	case tensor.Float64, tensor.Int:
		return 8
	}
	return 0
}

// arenas holds the arenas that programs have released, by size: *sync.Pool of *[]byte.
var arenas sync.Map

func arenaPool(bytes int) *sync.Pool {
	pool, _ := arenas.LoadOrStore(bytes, new(sync.Pool))
	return pool.(*sync.Pool)
}

func takeArena(bytes int) []byte {
	if a, ok := arenaPool(bytes).Get().(*[]byte); ok {
		return *a
	}
	raw := make([]byte, bytes+alignment)
	cpu.HugePages(raw)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(raw)))) & (alignment - 1)
	return raw[skip : skip+bytes : skip+bytes]
}

func giveArena(a []byte) {
	if a != nil {
		arenaPool(len(a)).Put(&a)
	}
}

// slice returns n elements of an arena, starting at byte at.
func slice(arena []byte, at int, dt tensor.Dtype, n int) any {
	if n == 0 {
		at = 0
	}

	p := unsafe.Pointer(unsafe.SliceData(arena[at:]))
	switch dt {
	case tensor.Float32:
		return unsafe.Slice((*float32)(p), n)
	case tensor.Float64:
		return unsafe.Slice((*float64)(p), n)
	default:
		return unsafe.Slice((*int)(p), n)
	}
}

// cut returns n elements of a slice, starting at element at.
func cut(flat any, at, n int) any {
	switch x := flat.(type) {
	case []float32:
		return x[at : at+n : at+n]
	case []float64:
		return x[at : at+n : at+n]
	case []int:
		return x[at : at+n : at+n]
	}
	return nil
}
