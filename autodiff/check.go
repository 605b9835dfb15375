package autodiff

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/opbase"
)

// CheckOption configures [CheckGradients].
type CheckOption func(*checker) error

// WithStep sets the first step of the differences, as a multiple of max(|x|, 1) for an element x.
// Steps shrink from there as needed, and grow if rounding errors dominate the differences. The
// default is 0.01.
func WithStep(h float64) CheckOption {
	return func(c *checker) error {
		if !(h > 0) || math.IsInf(h, 0) {
			return fmt.Errorf("WithStep: got %v, want a finite number above 0", h)
		}
		c.step = h
		return nil
	}
}

// WithTolerance sets the relative error that the caller will accept. Numeric derivatives are
// refined to a hundredth of tol. The default is 1e-6.
func WithTolerance(tol float64) CheckOption {
	return func(c *checker) error {
		if !(tol > 0 && tol < 1) {
			return fmt.Errorf("WithTolerance: got %v, want a number between 0 and 1", tol)
		}
		c.tolerance = tol
		return nil
	}
}

// WithSamples sets the number of elements to check per input. Inputs with at most n elements are
// checked in full, as are all inputs if n is 0. The default is 200.
func WithSamples(n int) CheckOption {
	return func(c *checker) error {
		if n < 0 {
			return fmt.Errorf("WithSamples: got %d, want at least 0", n)
		}
		c.samples = n
		return nil
	}
}

// WithSeed sets the seed for choosing the checked elements of large inputs, and the random
// direction. The default is 1.
func WithSeed(seed uint64) CheckOption {
	return func(c *checker) error {
		c.seed = seed
		return nil
	}
}

// CheckGradients compares the gradients of cost, as gorgonia.Grad derives them, with central
// differences, and reports both for each input in wrt, element by element.
//
// cost must be a float64 scalar node and wrt float64 input nodes on which it depends; all inputs of
// the cost must have values. Neither the graph nor its values change: gradients are derived in a
// copy of the graph, as if none had been taken before.
//
// The copy shares the ops. An op with internal state, such as running averages, therefore retains the
// effects of these runs. An op with a Replay method is run once and then replayed. Random inputs are
// drawn once and held. A cost that changes between runs for other reasons is an error.
//
// The relative error of an analytic derivative a and a numeric one n is
//
//	|a − n| / max(|a|, |n|, floor),   floor = max(1e-3·max|a| over the input, 1e-5·|cost|)
//
// The floor keeps derivatives near zero from being judged by the cost's rounding errors: an element
// below a thousandth of its input's largest derivative is compared with that thousandth, and no
// element is held to a finer scale than differences can resolve. Correct ops show errors below 1e-6,
// and usually below 1e-8.
//
// Inputs of up to 200 elements are checked in full. For larger inputs, 200 elements are sampled (see
// [WithSamples] and [WithSeed]), and the derivative along one random direction, to which every
// element contributes, is checked as well.
//
// Differences are extrapolated to step zero by Richardson's method, with steps that change until the
// results agree. Wide steps, which may lie on a plateau, count only if narrow ones do not contradict
// them. At a kink, such as relu at exactly 0, no derivative exists, so differences yield the mean of
// both sides and the report shows an error although nothing is wrong. Choose values away from kinks.
func CheckGradients(cost *gorgonia.Node, wrt gorgonia.Nodes,
	opts ...CheckOption) (CheckReport, error) {
	c := &checker{step: 1e-2, tolerance: 1e-6, samples: 200, seed: 1}
	for _, opt := range opts {
		if err := opt(c); err != nil {
			return CheckReport{}, fmt.Errorf("autodiff.CheckGradients: %w", err)
		}
	}

	report, err := c.check(cost, wrt)
	if err != nil {
		return CheckReport{}, fmt.Errorf("autodiff.CheckGradients: %w", err)
	}
	return report, nil
}

// checker holds the options and the state of a check.
type checker struct {
	step, tolerance float64
	samples         int
	seed            uint64

	values  map[*gorgonia.Node]gorgonia.Value // of all inputs of the cost, private to the checker
	forward *copied
	vm      gorgonia.VM
	out     gorgonia.Value // where runs of forward store the cost
	runs    int
}

// check implements CheckGradients.
func (c *checker) check(cost *gorgonia.Node, wrt gorgonia.Nodes) (CheckReport, error) {
	if err := checkNodes(cost, wrt); err != nil {
		return CheckReport{}, err
	}

	backward, err := copyGraph(cost, false)
	if err != nil {
		return CheckReport{}, err
	}

	for _, n := range wrt {
		if !slices.Contains(backward.inputs, n) {
			return CheckReport{}, fmt.Errorf("the cost does not depend on wrt input %s", label(n))
		}
	}

	if err := c.takeValues(backward.inputs); err != nil {
		return CheckReport{}, err
	}

	grads, err := c.analytic(backward, wrt)
	if err != nil {
		return CheckReport{}, err
	}

	base, err := c.compileForward(cost)
	if err != nil {
		return CheckReport{}, err
	}

	defer c.vm.Close()
	report := CheckReport{Cost: base}
	for i, n := range wrt {
		in, err := c.compare(n, grads[i], base, rand.New(rand.NewPCG(c.seed, uint64(i))))
		if err != nil {
			return CheckReport{}, err
		}
		report.Inputs = append(report.Inputs, in)
	}

	report.Evaluations = c.runs
	return report, nil
}

// checkNodes returns an error unless cost and wrt are suitable nodes.
func checkNodes(cost *gorgonia.Node, wrt gorgonia.Nodes) error {
	switch {
	case cost == nil || cost.Graph() == nil:
		return fmt.Errorf("cost is nil or in no graph, want a node")
	case !cost.IsScalar():
		return fmt.Errorf(
			"cost %s has shape %v, want a scalar: reduce it, with gorgonia.Sum for example",
			label(cost), cost.Shape())
	case cost.Dtype() != tensor.Float64:
		return fmt.Errorf("cost %s is %v, want float64: differences in float32 are too coarse to "+
			"judge a gradient", label(cost), cost.Dtype())
	case len(wrt) == 0:
		return fmt.Errorf("wrt is empty, want at least one input node")
	}

	for i, n := range wrt {
		switch {
		case n == nil:
			return fmt.Errorf("wrt[%d] is nil, want an input node", i)
		case n.Op() != nil:
			return fmt.Errorf("wrt[%d] is %s, the result of an op, want an input node", i, label(n))
		case n.Graph() != cost.Graph():
			return fmt.Errorf("wrt input %s and the cost are in different graphs", label(n))
		case n.Dtype() != tensor.Float64:
			return fmt.Errorf("wrt input %s is %v, want float64", label(n), n.Dtype())
		case slices.Index(wrt, n) != i:
			return fmt.Errorf("wrt input %s is listed twice", label(n))
		}
	}

	return nil
}

// takeValues copies the values of all inputs and draws values for random sources.
func (c *checker) takeValues(inputs gorgonia.Nodes) error {
	c.values = make(map[*gorgonia.Node]gorgonia.Value, len(inputs))
	for _, n := range inputs {
		v := n.Value()
		if isRandomSource(n) {
			var err error
			if v, err = n.Op().Do(); err != nil {
				return fmt.Errorf("random input %s: %w", label(n), err)
			}
		}
		if v == nil {
			return fmt.Errorf("input %s has no value: bind one with gorgonia.Let", label(n))
		}

		v, err := rowMajorCopy(v)
		if err != nil {
			return fmt.Errorf("input %s: %w", label(n), err)
		}
		c.values[n] = v
	}

	return nil
}

// bindAll binds fresh copies of the values to g's inputs, because ops may modify their inputs.
func (c *checker) bindAll(g *copied) error {
	for _, n := range g.inputs {
		v, err := gorgonia.CloneValue(c.values[n])
		if err != nil {
			return err
		}
		if err := g.bind(n, v); err != nil {
			return fmt.Errorf("input %s: %w", label(n), err)
		}
	}
	return nil
}

// analytic returns the gradients that gorgonia.Grad derives, flattened.
func (c *checker) analytic(g *copied, wrt gorgonia.Nodes) ([][]float64, error) {
	twins := make(gorgonia.Nodes, len(wrt))
	for i, n := range wrt {
		twins[i] = g.node[n]
	}

	var nodes gorgonia.Nodes
	err := guard(func() (err error) {
		nodes, err = gorgonia.Grad(g.out, twins...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("deriving the gradient: %w", err)
	}

	// Each node gets one Read only, because Gorgonia merges two reads of the same node.
	read := make(map[*gorgonia.Node]*gorgonia.Value)
	for _, n := range nodes {
		if read[n] == nil {
			read[n] = new(gorgonia.Value)
			gorgonia.Read(n, read[n])
		}
	}

	vm, err := newMachine(g.graph)
	if err != nil {
		return nil, err
	}

	defer vm.Close()
	if err := c.bindAll(g); err != nil {
		return nil, err
	}
	if err := vm.RunAll(); err != nil {
		return nil, fmt.Errorf("running the gradient: %w", err)
	}

	grads := make([][]float64, len(wrt))
	for i, n := range nodes {
		if grads[i], err = floats(*read[n]); err != nil {
			return nil, fmt.Errorf("gradient of %s: %w", label(wrt[i]), err)
		}
		if got, want := len(grads[i]), opbase.Size(wrt[i].Shape()); got != want {
			return nil, fmt.Errorf("gradient of %s has %d elements, the input has %d",
				label(wrt[i]), got, want)
		}
		if got, want := (*read[n]).Shape(), wrt[i].Shape(); !got.Eq(want) {
			return nil, fmt.Errorf("gradient of %s has shape %v, the input has %v",
				label(wrt[i]), got, want)
		}
	}

	return grads, nil
}

// compileForward compiles the graph for the differences and returns the cost at the point itself.
func (c *checker) compileForward(cost *gorgonia.Node) (float64, error) {
	var err error
	if c.forward, err = copyGraph(cost, true); err != nil {
		return 0, err
	}

	gorgonia.Read(c.forward.out, &c.out)
	if c.vm, err = newMachine(c.forward.graph); err != nil {
		return 0, err
	}

	base, err := c.run()
	if err != nil {
		return 0, err
	}

	again, err := c.run()
	switch {
	case err != nil:
		return 0, err
	case math.IsNaN(base) || math.IsInf(base, 0):
		return 0, fmt.Errorf("the cost is %v", base)
	case base != again:
		return 0, fmt.Errorf("the cost is %v in one run and %v in the next with the same values: "+
			"its differences are meaningless", base, again)
	}

	return base, nil
}

// run returns the cost for the values in c.values.
func (c *checker) run() (float64, error) {
	c.runs++
	c.vm.Reset()
	if err := c.bindAll(c.forward); err != nil {
		return 0, err
	}
	if err := c.vm.RunAll(); err != nil {
		return 0, fmt.Errorf("running the cost: %w", err)
	}

	f, err := floats(c.out)
	if err != nil {
		return 0, fmt.Errorf("cost: %w", err)
	}
	return f[0], nil
}

// compare checks the chosen elements of one input.
func (c *checker) compare(n *gorgonia.Node, grad []float64, base float64,
	r *rand.Rand) (InputReport, error) {
	report := InputReport{Name: n.Name(), Shape: n.Shape(), Floor: 1e-5 * math.Abs(base)}
	for _, g := range grad {
		if a := math.Abs(g); a <= math.MaxFloat64 { // excludes infinities and NaN
			report.Floor = math.Max(report.Floor, 1e-3*a)
		}
	}

	values, err := floats(c.values[n])
	if err != nil {
		return report, err
	}

	pristine := slices.Clone(values)
	direction := make([]float64, len(values))
	add := func(e Element, step float64) error {
		f := func(t float64) (float64, error) {
			for i, d := range direction {
				values[i] = pristine[i] + t*d
			}
			return c.run()
		}
		goal := func(d float64) float64 {
			return 0.01 * c.tolerance * math.Max(report.Floor, math.Abs(d))
		}
		e.Numeric, e.Spread, err = derivative(f, step, goal)
		copy(values, pristine)
		e.RelError = relativeError(e.Analytic, e.Numeric, report.Floor)
		report.Elements = append(report.Elements, e)
		return err
	}

	chosen := c.choose(len(values), r)
	for _, i := range chosen {
		direction[i] = 1
		err := add(Element{Index: indexOf(i, report.Shape), Analytic: grad[i]},
			c.step*math.Max(1, math.Abs(pristine[i])))
		if err != nil {
			return report, err
		}
		direction[i] = 0
	}

	if len(chosen) < len(values) {
		return report, add(Element{Direction: true, Analytic: randomDirection(direction, grad, r)},
			c.step)
	}
	return report, nil
}

// choose returns the indices of the elements to check, in order.
func (c *checker) choose(size int, r *rand.Rand) []int {
	if c.samples == 0 || size <= c.samples {
		all := make([]int, size)
		for i := range all {
			all[i] = i
		}
		return all
	}

	taken := make(map[int]bool, c.samples)
	var chosen []int
	for len(chosen) < c.samples {
		if i := r.IntN(size); !taken[i] {
			taken[i] = true
			chosen = append(chosen, i)
		}
	}

	slices.Sort(chosen)
	return chosen
}

// randomDirection fills d with ±1/sqrt(len(d)) and returns grad's derivative along it.
func randomDirection(d, grad []float64, r *rand.Rand) float64 {
	var along float64
	for i := range d {
		d[i] = math.Copysign(1/math.Sqrt(float64(len(d))), r.Float64()-0.5)
		along += d[i] * grad[i]
	}
	return along
}

// indexOf converts a flat row-major index to one per dimension.
func indexOf(flat int, shape tensor.Shape) []int {
	index := make([]int, len(shape))
	for i := len(shape) - 1; i >= 0; i-- {
		index[i] = flat % shape[i]
		flat /= shape[i]
	}
	return index
}
