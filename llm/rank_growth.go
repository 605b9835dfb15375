package llm

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
	"github.com/kasmina-go/kasmina/internal/parallel"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/block"
	"github.com/kasmina-go/kasmina/llm/internal/directions"
	"github.com/kasmina-go/kasmina/optim"
)

// RankGrowthConfig configures a [RankGrowth].
type RankGrowthConfig struct {
	// Old is text of the kind that the model must not forget, in batches of TrainConfig.Batch sequences. If
	// it is nil, directions are chosen by their gain on the new text alone.
	Old *data.Evaluation
	// Parameters is the largest number of parameters of the adapters. 0 means as many as the adapters of the
	// trainer's model have.
	Parameters int
	// Times is the number of times that ranks grow: before the first step, and then at equal intervals
	// during the first half of the steps. 0 means 3.
	Times int
	// Batches is the number of batches of each text on which gradients are measured each time. 0 means
	// 8.
	Batches int
}

// A RankGrowth is a [Part] that grows and prunes the ranks of adapters while a model learns. It requires
// a model with adapters that have LoRA.Growing set, and ignores the initial values of the adapters.
//
// Each time, it measures gradients on the new text, and on the old text if there is one. From the gradients of
// random probes it finds, for each weight w, the directions a of its input along which a new rank b·a would
// lower the loss on the new text the most, compared with the rise of the loss on the old text. These are the
// directions with the largest values of
//
//	‖g·a‖² / (aᵀ·(c + ε)·a)
//
// g is the gradient of w on the new text. c is the mean of hᵀ·h over batches of the old text, where h is the
// gradient of w for the outputs that g changes. The denominator approximates the rise of the loss on the old
// text when w changes along a. Without an old text, the directions are the singular vectors of g.
//
// The directions with the largest values per parameter, over all weights, become the new ranks. They
// start with b = 0, so growth does not change the function of the model. Existing ranks keep their values
// and moments.
//
// Before growing, it prunes ranks that are not useful. The effect of a rank on a text is the mean square of the
// derivative of the loss with respect to a factor on b·a. A rank is pruned if its effect on the new text is small
// compared with other ranks, or smaller than its effect on the old text.
//
// After a [Retention] has rolled the model back, ranks are no longer grown or pruned.
type RankGrowth struct {
	config  RankGrowthConfig
	targets []string // the layers that may have adapters
	budget  int      // parameters
	done    int      // number of times the ranks have grown
}

const (
	probeRank    = 16   // directions found for each weight at a time
	probeDamping = 0.03 // ε, relative to the mean of the diagonal of c
	pruneBelow   = 0.05 // ranks with a smaller effect on the new text, relative to the mean of all ranks, are pruned
)

var (
	_ RunStarter   = (*RankGrowth)(nil)
	_ StepPreparer = (*RankGrowth)(nil)
)

// NewRankGrowth returns a part that grows the ranks of adapters. [Trainer.Use] adds it to a trainer, before any
// [Retention].
func NewRankGrowth(c RankGrowthConfig) (*RankGrowth, error) {
	if c.Times == 0 {
		c.Times = 3
	}
	if c.Batches == 0 {
		c.Batches = 8
	}

	switch {
	case c.Times < 1 || c.Times > 1<<10:
		return nil, fmt.Errorf("llm: NewRankGrowth: RankGrowthConfig.Times is %d, want 1 to %d", c.Times, 1<<10)
	case c.Batches < 1 || c.Batches > 1<<10:
		return nil, fmt.Errorf("llm: NewRankGrowth: RankGrowthConfig.Batches is %d, want 1 to %d", c.Batches, 1<<10)
	case c.Parameters < 0:
		return nil, fmt.Errorf("llm: NewRankGrowth: RankGrowthConfig.Parameters is %d, want at least 0", c.Parameters)
	}
	return &RankGrowth{config: c}, nil
}

// Name implements [Part].
func (*RankGrowth) Name() string { return "rank-growth" }

// StartRun implements [RunStarter].
func (r *RankGrowth) StartRun(u Turn) error {
	if err := r.check(u); err != nil {
		return err
	}
	if r.done == 0 && u.Last().Step == 0 {
		return r.grow(u)
	}
	return nil
}

// check returns an error if the ranks of the trainer's model cannot grow.
func (r *RankGrowth) check(u Turn) error {
	a := u.Model().Config.Adapter
	switch {
	case !a.Growing:
		return errors.New("the ranks of the model's adapters cannot grow: set LoRA.Growing")
	case a.Magnitude:
		return errors.New("the ranks of adapters with magnitudes cannot grow: leave out LoRA.Magnitude")
	case slices.Contains(a.Targets, EmbeddingLayer):
		return fmt.Errorf("the rank of an adapter of the embedding cannot grow: leave out the target %s", EmbeddingLayer)
	case u.t.Config.Preference != nil:
		return errors.New("ranks cannot grow with preference pairs")
	case u.t.team.ranks() != nil:
		return errors.New("ranks cannot grow with several processes: train with one")
	}

	if old := r.config.Old; old != nil {
		if err := u.t.canEvaluate(old); err != nil {
			return fmt.Errorf("RankGrowthConfig.Old: %w", err)
		}
		for b := range old.Batches() {
			if got, want := len(b.Inputs), u.t.Config.Batch*u.t.Model.Config.Seq; got != want {
				return fmt.Errorf("RankGrowthConfig.Old has batches of %d tokens, want %d: TrainConfig.Batch by "+
					"Config.Seq", got, want)
			}
			break
		}
	}

	if r.targets == nil {
		r.targets = slices.Clone(a.Targets)
		if r.budget = r.config.Parameters; r.budget == 0 {
			for _, p := range u.Model().Config.adapterSpecs() {
				r.budget += p.Shape[0] * p.Shape[1]
			}
		}
	}
	return nil
}

// PrepareStep implements [StepPreparer].
func (r *RankGrowth) PrepareStep(u Turn) error {
	if r.done >= r.config.Times || u.Last().Step < u.t.Config.Steps*r.done/(2*r.config.Times) {
		return nil
	}

	for _, p := range u.t.parts {
		if kept, ok := p.(*Retention); ok && kept.figures.Rollbacks > 0 {
			r.done = r.config.Times
			return nil
		}
	}
	return r.grow(u)
}

// A rankTarget is a layer with an adapter that may grow.
type rankTarget struct {
	name    string
	out, in int
	scale   float64
	a, b    []float32 // the ranks that remain: [rank, in] and [out, rank]
	rank    int
	kept    []int // indices of the remaining ranks before pruning

	y          []float32   // [out, probes]: the gradient of the new text, times random directions
	m          []float32   // [probes, in]: the main outputs of the gradient of the new text
	z          [][]float32 // the same for each batch of the old text
	effect     []float64   // mean square derivative of the loss on the new text with respect to each rank
	cost       []float64   // the same for the old text
	directions [][]float32 // candidates for new ranks
	values     []float64   // gain for its cost of each candidate, in decreasing order
	added      int         // candidates that become ranks
}

func (t *rankTarget) probes() int { return min(probeRank, t.in, t.out) }

// grow prunes and grows the ranks.
func (r *RankGrowth) grow(u Turn) error {
	start := time.Now()
	now, err := u.t.driver.now()
	if err != nil {
		return err
	}

	// targetsOf omits ranks that have never learned, so growth replaces them like pruned ranks.
	all := r.targetsOf(now)
	if err := r.listen(u, now, all); err != nil {
		return fmt.Errorf("measuring the gradients of the adapters: %w", err)
	}
	pruned := prune(all)
	parallel.Each(len(all), func(i int) { all[i].findDirections() })
	grown := r.choose(all)
	if grown+pruned == 0 {
		r.done++
		return nil
	}

	next, err := r.next(now, all)
	if err != nil {
		return err
	}
	now.From, now.Here = nil, nil // the whole model is on the host
	if err := u.t.growth.canReshape(next.layout); err != nil {
		return err
	}
	if err := u.t.driver.change(now, next, u.t.driver.lossScale()); err != nil {
		return err
	}
	r.done++

	ranks := 0
	for _, t := range all {
		ranks += t.rank + t.added
	}
	u.t.growth.queueReshaped(fmt.Sprintf("%d ranks pruned and %d grown: %d ranks in %d of %d layers", pruned, grown,
		ranks, len(next.Adapter.Targets), len(all)), time.Since(start), nil)
	return nil
}

// targetsOf returns the layers with their current ranks, without ranks that have never learned.
func (r *RankGrowth) targetsOf(m modelState) (all []*rankTarget) {
	shapes := m.layerShapes()
	for _, name := range r.targets {
		t := &rankTarget{name: name, out: shapes[name][0], in: shapes[name][1], scale: m.Adapter.growingScale()}
		all = append(all, t)
		if !m.adapts(name) {
			continue
		}

		a, b := floats32(m.param(name+block.EndingA)), floats32(m.param(name+block.EndingB))
		rank := len(a) / t.in
		var used []int
		for k := range rank {
			for o := range t.out {
				if b[o*rank+k] != 0 {
					used = append(used, k)
					break
				}
			}
		}
		t.a, t.b, t.rank, t.kept = a, b, rank, nil
		t.keep(used)
	}
	return all
}

// floats32 returns the numbers of a tensor as float32.
func floats32(x *tensor.Dense) []float32 {
	if x.Dtype() == tensor.Float32 {
		return x.Float32s()
	}
	all := make([]float32, x.Shape().TotalSize())
	for i, v := range x.Float64s() {
		all[i] = float32(v)
	}
	return all
}

// keep drops all ranks except those with the given indices.
func (t *rankTarget) keep(which []int) {
	a, b := make([]float32, 0, len(which)*t.in), make([]float32, 0, len(which)*t.out)
	for _, k := range which {
		a = append(a, t.a[k*t.in:][:t.in]...)
	}
	for o := range t.out {
		for _, k := range which {
			b = append(b, t.b[o*t.rank+k])
		}
	}

	kept := which
	if t.kept != nil {
		kept = nil
		for _, k := range which {
			kept = append(kept, t.kept[k])
		}
	}
	t.a, t.b, t.rank, t.kept = a, b, len(which), kept
}

// listen measures the gradients of all layers in two passes over the texts.
//
// In the first pass, each layer has additional ranks with random rows in a and zeros in b. The gradients of
// these columns of b are the gradient of the weight times the random directions, which span its main outputs.
// In the second pass, these outputs are columns of b, and the rows of a are zeros. The gradients of the rows
// are the products of the outputs and the gradient of the weight. (Halko, Martinsson and Tropp, "Finding
// Structure with Randomness", 2011.)
func (r *RankGrowth) listen(u Turn, now modelState, all []*rankTarget) error {
	random := func(t *rankTarget) (a, b []float32) {
		h := fnv.New64a()
		h.Write([]byte(t.name))
		source := rand.New(rand.NewPCG(uint64(r.done), h.Sum64()))
		a, b = make([]float32, t.probes()*t.in), make([]float32, t.out*t.probes())
		for i := range a {
			a[i] = float32(source.NormFloat64() / math.Sqrt(float64(t.in)))
		}
		return a, b
	}
	err := r.probe(u, now, all, block.EndingB, random, nil, func(t *rankTarget, g []float32, _ bool) {
		k := t.probes()
		if t.y == nil {
			t.y = make([]float32, t.out*k)
		}
		for o := range t.out {
			for j := range k {
				t.y[o*k+j] += g[o*(t.rank+k)+t.rank+j]
			}
		}
	})
	if err != nil {
		return err
	}

	outputs := func(t *rankTarget) (a, b []float32) {
		directions.Orthonormal(t.y, t.out, t.probes())
		return make([]float32, t.probes()*t.in), t.y
	}
	return r.probe(u, now, all, block.EndingA, outputs, r.config.Old, func(t *rankTarget, g []float32, old bool) {
		if t.effect == nil {
			t.effect, t.cost = make([]float64, t.rank), make([]float64, t.rank)
			t.m = make([]float32, t.probes()*t.in)
		}

		// Scaling b·a is the same as scaling a, so the gradient of a gives the derivative.
		for k := range t.rank {
			derivative := 0.0
			for i, x := range t.a[k*t.in:][:t.in] {
				derivative += float64(x) * float64(g[k*t.in+i])
			}
			if old {
				t.cost[k] += derivative * derivative
			} else {
				t.effect[k] += derivative * derivative
			}
		}

		if g = g[t.rank*t.in:]; old {
			t.z = append(t.z, slices.Clone(g))
		} else {
			addTo(t.m, g)
		}
	})
}

// probe computes gradients over batches of the new text and of an old text, which may be nil, in a model with
// additional ranks. It passes the gradient of each layer's matrix a or b to take.
func (r *RankGrowth) probe(u Turn, now modelState, all []*rankTarget, ending string,
	more func(*rankTarget) (a, b []float32), old *data.Evaluation,
	take func(t *rankTarget, gradient []float32, old bool)) (err error) {
	c := u.t.Config
	c.Accumulate, c.listen = 1, nil

	m := &Model{Config: now.Config, Base: u.t.Model.Base, KasminaOptions: u.t.Model.KasminaOptions, Kasmina: u.t.Model.Kasmina,
		byName: map[string]int{}}
	m.Config.Adapter = now.Adapter.withRanks(r.targets, func(name string) int {
		t := all[slices.Index(r.targets, name)]
		return t.rank + t.probes()
	})
	m.Config.Adapter.Dropout = 0

	values := map[string]*tensor.Dense{}
	for _, t := range all {
		a, b := more(t)
		values[t.name+block.EndingA] = denseOf(now.dtype(), t.rank+t.probes(), t.in, slices.Concat(t.a, a))
		values[t.name+block.EndingB] = denseOf(now.dtype(), t.out, t.rank+t.probes(),
			joinColumns(t.b, b, t.out, t.rank, t.probes()))
		c.listen = append(c.listen, t.name+ending)
	}
	for p := range m.Config.Specs() {
		v := values[p.Name]
		if v == nil {
			v = now.param(p.Name)
		}
		m.byName[p.Name] = len(m.Params)
		m.Params = append(m.Params, Param{p.Name, v})
	}

	build := c.Engine
	if build == nil {
		build = CPUEngine()
	}
	e, err := build(m, u.t.Optimizer, c)
	if err != nil {
		return err
	}
	from := u.t.Loader.State()
	defer func() {
		err = u.t.undo(err, func() error { return u.t.Loader.SetState(from) })
		err = errors.Join(err, e.Close())
	}()

	l, ok := e.(Listener)
	if !ok {
		return fmt.Errorf("the engine %s does not report gradients", e.Name())
	}
	listen := func(b data.Batch, isOld bool) error {
		if _, err := l.Gradients(b); err != nil {
			return err
		}
		for _, t := range all {
			g, err := l.Gradient(t.name + ending)
			if err != nil {
				return err
			}
			switch g := g.(type) {
			case []float32:
				take(t, g, isOld)
			case []float64:
				take(t, addTo(nil, g), isOld)
			}
		}
		return l.Drop()
	}

	for range r.config.Batches {
		b, err := u.t.Loader.Next()
		if err != nil {
			return err
		}
		if err := listen(b, false); err != nil {
			return err
		}
	}

	heard := 0
	if old != nil {
		for b := range old.Batches() {
			if heard == r.config.Batches {
				break
			}
			if err := listen(b, true); err != nil {
				return err
			}
			heard++
		}
	}
	return nil
}

// denseOf returns a matrix of a type.
func denseOf(dt tensor.Dtype, rows, columns int, x []float32) *tensor.Dense {
	i := -1
	return newParamValue(dt, []int{rows, columns}, func() float64 {
		i++
		return float64(x[i])
	})
}

// joinColumns concatenates the rows of two matrices with m and n columns.
func joinColumns(x, y []float32, rows, m, n int) []float32 {
	all := make([]float32, 0, rows*(m+n))
	for i := range rows {
		all = append(append(all, x[i*m:][:m]...), y[i*n:][:n]...)
	}
	return all
}

// prune drops the ranks that are not useful, and returns the number of dropped ranks.
func prune(all []*rankTarget) (pruned int) {
	sum, n := 0.0, 0
	for _, t := range all {
		for _, e := range t.effect {
			sum, n = sum+e, n+1
		}
	}

	for _, t := range all {
		var left []int
		for k, e := range t.effect {
			if e >= pruneBelow*sum/float64(n) && e > t.cost[k] {
				left = append(left, k)
			}
		}
		pruned += t.rank - len(left)
		t.keep(left)
	}
	return pruned
}

// findDirections finds the candidates for new ranks.
//
// With n·c = zᵀ·z, Woodbury's identity gives x = (c + ε)⁻¹·mᵀ from the inverse of a matrix as large as the number
// of rows of z. The values are the eigenvalues of m·x, and the directions are x·u for its eigenvectors u.
func (t *rankTarget) findDirections() {
	k := t.probes()
	t.leaveOut(t.m, k)
	x := slices.Clone(t.m) // [k, in]: rows of mᵀ
	if len(t.z) > 0 {
		x = t.whiten(x, k)
	}

	products := make([]float64, k*k)
	for i := range k {
		for j := range k {
			for f := range t.in {
				products[i*k+j] += float64(t.m[i*t.in+f]) * float64(x[j*t.in+f])
			}
		}
	}
	for i := range k { // rounding makes it slightly asymmetric
		for j := range i {
			mean := (products[i*k+j] + products[j*k+i]) / 2
			products[i*k+j], products[j*k+i] = mean, mean
		}
	}

	values, vectors := directions.Eigen(products, k)
	for c, v := range values {
		if !(v > 0) || math.IsInf(v, 0) {
			break
		}
		d := make([]float64, t.in)
		for i := range k {
			for f := range d {
				d[f] += vectors[i*k+c] * float64(x[i*t.in+f])
			}
		}

		// The rows of a start with the norm that [Adapt] gives them on average.
		length := math.Sqrt(3 * innerProduct(d, d))
		if !(length > 0) || math.IsInf(length, 0) {
			break
		}
		row := make([]float32, t.in)
		for f, v := range d {
			row[f] = float32(v / length)
		}
		t.directions, t.values = append(t.directions, row), append(t.values, v)
	}
}

// leaveOut removes the directions of the existing ranks from the rows of a matrix.
func (t *rankTarget) leaveOut(m []float32, rows int) {
	if t.rank == 0 {
		return
	}
	columns := make([]float32, t.in*t.rank)
	for k := range t.rank {
		for f := range t.in {
			columns[f*t.rank+k] = t.a[k*t.in+f]
		}
	}
	directions.Orthonormal(columns, t.in, t.rank)
	along := make([]float32, rows*t.rank)
	gemm.MulSerial(false, false, rows, t.rank, t.in, 1, m, t.in, columns, t.rank, 0, along, t.rank)
	gemm.MulSerial(false, true, rows, t.in, t.rank, -1, along, t.rank, columns, t.rank, 1, m, t.in)
}

// whiten multiplies the rows of x by (c + ε)⁻¹.
func (t *rankTarget) whiten(x []float32, rows int) []float32 {
	z := slices.Concat(t.z...)
	n, batches := len(z)/t.in, float64(len(t.z))
	square := 0.0
	for _, v := range z {
		square += float64(v) * float64(v)
	}
	ridge := probeDamping*square/float64(t.in) + 1e-30 // ε times the number of batches

	gram := make([]float32, n*n)
	gemm.MulSerial(false, true, n, n, t.in, 1, z, t.in, z, t.in, 0, gram, n)
	factor := make([]float64, n*n)
	for i, v := range gram {
		factor[i] = float64(v)
	}
	for i := range n {
		factor[i*n+i] += ridge
	}
	cholesky(factor, n)

	zx := make([]float32, rows*n) // x·zᵀ
	gemm.MulSerial(false, true, rows, n, t.in, 1, x, t.in, z, t.in, 0, zx, n)
	for i := range rows {
		row := zx[i*n:][:n]
		solution := make([]float64, n)
		for j, v := range row {
			solution[j] = float64(v)
		}
		solveCholesky(factor, solution, n)
		for j, v := range solution {
			row[j] = float32(v)
		}
	}

	gemm.MulSerial(false, false, rows, t.in, n, -1, zx, n, z, t.in, 1, x, t.in)
	for i := range x {
		x[i] *= float32(batches / ridge)
	}
	return x
}

func innerProduct(a, b []float64) (sum float64) {
	for i, v := range a {
		sum += v * b[i]
	}
	return sum
}

// cholesky overwrites the lower triangle of a positive definite matrix with its Cholesky factor.
func cholesky(a []float64, n int) {
	for i := range n {
		for j := range i + 1 {
			sum := a[i*n+j] - innerProduct(a[i*n:][:j], a[j*n:][:j])
			if i == j {
				a[i*n+i] = math.Sqrt(max(sum, 1e-30))
			} else {
				a[i*n+j] = sum / a[j*n+j]
			}
		}
	}
}

// solveCholesky solves l·lᵀ·x = b in place.
func solveCholesky(l, b []float64, n int) {
	for i := range n {
		b[i] = (b[i] - innerProduct(l[i*n:][:i], b[:i])) / l[i*n+i]
	}
	for i := n - 1; i >= 0; i-- {
		sum := b[i]
		for j := i + 1; j < n; j++ {
			sum -= l[j*n+i] * b[j]
		}
		b[i] = sum / l[i*n+i]
	}
}

// choose decides how many candidates of each layer become ranks, and returns their number. The share of the
// budget that may be used grows from one time to the next.
func (r *RankGrowth) choose(all []*rankTarget) (grown int) {
	left := r.budget * (r.done + 1) / r.config.Times
	for _, t := range all {
		left -= t.rank * (t.in + t.out)
	}

	for {
		var best *rankTarget
		most := 0.0
		for _, t := range all {
			if t.added == len(t.values) || t.rank+t.added >= min(t.in, t.out) || t.in+t.out > left {
				continue
			}
			if value := t.values[t.added] / float64(t.in+t.out); value > most {
				best, most = t, value
			}
		}
		if best == nil {
			return grown
		}
		best.added++
		grown++
		left -= best.in + best.out
	}
}

// next returns the model with the chosen ranks.
func (r *RankGrowth) next(now modelState, all []*rankTarget) (next modelState, err error) {
	var targets []string
	by := map[string]*rankTarget{}
	for _, t := range all {
		if t.rank+t.added > 0 {
			targets = append(targets, t.name)
			by[t.name] = t
		}
	}
	if len(targets) == 0 {
		return next, fmt.Errorf("a budget of %d parameters is too small for any rank", r.budget)
	}

	next = modelState{layout: now.layout}
	next.Adapter = now.Adapter.withRanks(targets, func(name string) int { return by[name].rank + by[name].added })
	moments := now.moments()
	for p := range next.Specs() {
		layer, isA := strings.CutSuffix(p.Name, block.EndingA)
		if !isA {
			layer = strings.TrimSuffix(p.Name, block.EndingB)
		}
		t := by[layer]
		if t == nil || !IsAdapterParam(p.Name) {
			next.Params = append(next.Params, Param{p.Name, now.param(p.Name)})
			next.Moments = append(next.Moments, moments[p.Name]...)
			continue
		}

		x := slices.Concat(append([][]float32{t.a}, t.directions[:t.added]...)...)
		if !isA {
			x = joinColumns(t.b, make([]float32, t.out*t.added), t.out, t.rank, t.added)
		}
		next.Params = append(next.Params, Param{p.Name, denseOf(now.dtype(), p.Shape[0], p.Shape[1], x)})
		if t.rank == 0 {
			continue // fresh moments
		}
		for _, s := range moments[p.Name] {
			if s, err = t.grownMoment(s, p.Shape, isA); err != nil {
				return next, err
			}
			next.Moments = append(next.Moments, s)
		}
	}
	return next, nil
}

// grownMoment returns the optimizer state of a matrix after its layer's ranks have changed. Remaining
// ranks keep their moments. New ranks start with a first moment of 0 and the mean second moment of the
// remaining ranks, so that their first steps are no larger than the steps of the remaining ranks.
func (t *rankTarget) grownMoment(s optim.Tensor, shape []int, isA bool) (optim.Tensor, error) {
	switch x := s.Data.(type) {
	case []int64: // the number of steps
		return s, nil
	case []float32:
		s.Data = growMoment(t, x, strings.HasSuffix(s.Name, "_sq"), isA)
	case []float64:
		s.Data = growMoment(t, x, strings.HasSuffix(s.Name, "_sq"), isA)
	default:
		return s, fmt.Errorf("the optimizer state %s is a %T, which cannot grow: use an optimizer with moments in "+
			"floating point, such as AdamW", s.Name, s.Data)
	}
	if len(s.Shape) == 2 {
		s.Shape = slices.Clone(shape)
	} else {
		s.Shape = []int{shape[0] * shape[1]}
	}
	return s, nil
}

func growMoment[T float32 | float64](t *rankTarget, x []T, squares, isA bool) []T {
	width := t.in
	if !isA {
		width = t.out
	}
	before := len(x) / width
	at := func(k, i int) T {
		if isA {
			return x[k*width+i]
		}
		return x[i*before+k]
	}

	var fill T
	if squares {
		for _, k := range t.kept {
			for i := range width {
				fill += at(k, i) / T(len(t.kept)*width)
			}
		}
	}

	rank := t.rank + t.added
	next := make([]T, rank*width)
	for k := range rank {
		for i := range width {
			v := fill
			if k < t.rank {
				v = at(t.kept[k], i)
			}
			if isA {
				next[k*width+i] = v
			} else {
				next[i*rank+k] = v
			}
		}
	}
	return next
}

// Save implements [Part].
func (r *RankGrowth) Save(w *CheckpointWriter) error {
	w.Value("old", r.oldText())
	w.Value("config", [3]int{r.config.Parameters, r.config.Times, r.config.Batches})
	w.Value("targets", r.targets)
	w.Value("budget", r.budget)
	w.Value("done", r.done)
	return nil
}

func (r *RankGrowth) oldText() string {
	if r.config.Old == nil {
		return ""
	}
	return r.config.Old.Fingerprint()
}

// Load implements [Part].
func (r *RankGrowth) Load(c *CheckpointReader) (install func(), err error) {
	var old string
	var config [3]int
	saved := RankGrowth{config: r.config}
	for _, v := range []struct {
		name string
		into any
	}{{"old", &old}, {"config", &config}, {"targets", &saved.targets}, {"budget", &saved.budget},
		{"done", &saved.done}} {
		if err := c.Value(v.name, v.into); err != nil {
			return nil, err
		}
	}

	if now := [3]int{r.config.Parameters, r.config.Times, r.config.Batches}; now != config {
		c.Differs("RankGrowthConfig has Parameters, Times and Batches of %v, and had %v", now, config)
	}
	if old != r.oldText() {
		c.Differs("the old text is different")
	}
	shapes := c.Config().layerShapes()
	for _, name := range saved.targets {
		if shapes[name] == nil || name == EmbeddingLayer {
			return nil, fmt.Errorf("the ranks of %.100q cannot grow", name)
		}
	}
	if saved.done < 0 || saved.budget < 0 {
		return nil, fmt.Errorf("ranks have grown %d times with a budget of %d parameters", saved.done, saved.budget)
	}
	return func() { *r = saved }, nil
}
