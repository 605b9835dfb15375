package kasmina

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpukasmina "github.com/kasmina-go/kasmina/internal/cpu/kasmina"
	cpufigures "github.com/kasmina-go/kasmina/internal/cpu/kasmina/figures"
	"github.com/kasmina-go/kasmina/internal/seed"
	"github.com/kasmina-go/kasmina/state"
)

// kasminaCase is a layer with random state. Seeds cycle through the stages and kinds, so that 44
// consecutive seeds cover all combinations.
type kasminaCase struct {
	rows, seeds, chunk, slots int
	width                     int // of slots wider than chunks, or 0
	dtype                     gpu.DType
	stability                 seed.Stability
	reduction                 seed.Reduction
	clip, telemetry           bool
	skew, from                int     // from: number that determines the first seed's stage and kind
	mean, deviation           float64 // of x and g
}

func (c kasminaCase) String() string {
	return fmt.Sprintf("%dx%dx%d slots=%dx%d %v stability=%d reduction=%d clip=%v telemetry=%v "+
		"skew=%d", c.rows, c.seeds, c.chunk,
		c.slots, max(c.width, c.chunk), c.dtype, c.stability, c.reduction,
		c.clip, c.telemetry, c.skew)
}

// kasminaRun is a layer on the GPU and its reference results.
type kasminaRun struct {
	*kerneltest.Rig
	kasminaCase
	layer            Layer
	states           []seed.Seed
	x, g, y, dx      *kerneltest.Buffer
	dw, ds           *kerneltest.Buffer
	health, gradient *kerneltest.Buffer
	counts           *kerneltest.Buffer // NaN and Inf in x, the same in g, clipped rows
	bins             *kerneltest.Buffer
	forwardSpace     *kerneltest.Buffer
	backwardSpace    *kerneltest.Buffer
	xr, gr           []float64
	weights, scales  []float64
	wantY, wantDX    []float64
	wantDW, wantDS   []float64
	wantHealth       []cpufigures.Chunk
	wantGradient     []cpufigures.Chunk
	reference        *cpukasmina.Layer[float64]
	wantBins         [][cpufigures.Exponents]uint32
}

const (
	kasminaStages = 11
	noSlot        = 0
)

// kinds returns the number of kinds that fit in the slots.
func (c kasminaCase) kinds() int {
	if c.width < 2*c.chunk {
		return kinds
	}
	return int(blueprints.ChunkMLP) + 1
}

func kasminaSeeds(g *kerneltest.Rig, c kasminaCase) []seed.Seed {
	seeds := make([]seed.Seed, c.seeds)
	for i := range seeds {
		number := i + c.from
		stage := state.Stage(number % kasminaStages)
		alpha := float32(g.Rand.Float64())
		switch i % 7 {
		case 5:
			alpha = 0
		case 6:
			alpha = 1
		}
		if stage == state.Training || stage == state.FineTuning || stage == state.Fossilized {
			alpha = 1
		}
		low, high := c.mean-c.deviation*(0.5+g.Rand.Float64()),
			c.mean+c.deviation*(0.5+g.Rand.Float64())
		seeds[i] = seed.Seed{
			Kind: blueprints.Kind(number / kasminaStages % c.kinds()),
			Slot: uint16(g.Rand.IntN(c.slots)), Alpha: alpha,
			Blend: stage.Blends(), Learn: stage.Learns(), Low: float64(float32(low)),
			High: float64(float32(high)),
			Limit: math.Sqrt(float64(c.chunk)) * math.Hypot(c.mean,
				c.deviation) * (0.7 + g.Rand.Float64()/2),
		}
	}

	return seeds
}

// newKasmina uploads a random layer. spoil, if not nil, replaces values of x and g.
func newKasmina(g *kerneltest.Rig, c kasminaCase,
	spoil func(i int, v float64) float64) *kasminaRun {
	g.Helper()
	r := &kasminaRun{Rig: g, kasminaCase: c, states: kasminaSeeds(g, c)}
	n := c.rows * c.seeds * c.chunk
	tensor := func() (*kerneltest.Buffer, []float64) {
		v := make([]float64, n)
		for i := range v {
			v[i] = c.mean + c.deviation*g.Rand.NormFloat64()
			if c.stability == seed.Strict && c.mean == 0 && g.Rand.IntN(9) == 0 {
				v[i] = 0 // strict mode does not change zeros
			}
			if spoil != nil {
				v[i] = spoil(i, v[i])
			}
		}
		return g.Upload(v, c.dtype, c.skew)
	}

	r.x, r.xr = tensor()
	r.g, r.gr = tensor()
	width := max(c.width, c.chunk)
	w, weights := g.Normal(c.slots*width, kerneltest.F32, 0)
	s, scales := g.Normal(c.slots, kerneltest.F32, 0)
	r.weights, r.scales = weights, scales
	st := State{Seeds: c.seeds, Slots: c.slots, Wide: c.width > c.chunk}
	raw := make([]byte, st.Bytes())
	g.Must(st.Encode(raw, func(i int) seed.Seed { return r.states[i] }))
	b := g.Alloc(len(raw)/4, kerneltest.F32, 0)
	g.Must(g.Ctx.CopyToDevice(b.Ptr, raw, g.Stream))
	st.Ptr = b.Ptr
	r.layer = Layer{X: r.x.Ptr, Weights: w.Ptr, Scales: s.Ptr, State: st, Rows: c.rows,
		Chunk: c.chunk, Width: width, Eps: 1e-8,
		Stability: c.stability, Type: c.dtype}
	r.y, r.dx = g.Alloc(n, c.dtype, c.skew), g.Alloc(n, c.dtype, c.skew)
	r.dw, r.ds = g.Alloc(c.slots*width, kerneltest.F32, 0), g.Alloc(c.slots, kerneltest.F32, 0)
	r.health, r.gradient = g.Alloc(ForwardFigures*c.seeds, kerneltest.F32, 0),
		g.Alloc(BackwardFigures*c.seeds, kerneltest.F32, 0)
	r.counts = g.Alloc(3*c.seeds, kerneltest.F32, 0)
	r.bins = g.Alloc(Bins*c.seeds, kerneltest.F32, 0)
	g.Must(g.Ctx.Memset8(r.counts.Ptr, 0, 4*3*c.seeds, g.Stream))
	r.forwardSpace = g.Alloc(Forward{Layer: r.layer}.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0)
	r.backwardSpace = g.Alloc(Backward{Layer: r.layer, Clip: c.clip}.WorkspaceBytes(g.Info)/4,
		kerneltest.F32, 0)
	return r
}

func (r *kasminaRun) count(i int) gpu.Ptr { return r.counts.Offset(4 * i * r.seeds) }

func (r *kasminaRun) launchForward() {
	r.Helper()
	f := Forward{Layer: r.layer, Y: r.y.Ptr, Telemetry: r.telemetry,
		Reduction: r.reduction,
		Figures:   r.health.Ptr, Bad: r.count(0), Workspace: r.forwardSpace.Ptr}
	if r.telemetry {
		f.Histogram = r.bins.Ptr
	}
	r.Must(r.Launch(r.Stream, f))
}

func (r *kasminaRun) launchBackward() {
	r.Helper()
	b := Backward{Layer: r.layer, DX: r.dx.Ptr, DWeights: r.dw.Ptr,
		DScales: r.ds.Ptr, G: r.g.Ptr, Clip: r.clip, Telemetry: r.telemetry, Reduction: r.reduction,
		Figures: r.gradient.Ptr,
		Bad:     r.count(1), Clipped: r.count(2), Workspace: r.backwardSpace.Ptr}
	r.Must(r.Launch(r.Stream, b))
}

// refer computes the expected results in float64.
func (r *kasminaRun) refer() {
	k := &cpukasmina.Layer[float64]{Rows: r.rows, Seeds: r.seeds, Chunk: r.chunk, Slots: r.slots,
		Width: max(r.width, r.chunk), Eps: r.layer.Eps,
		Stability: r.stability,
		Reduce:    r.reduction,
		Measure:   slices.Repeat([]bool{true}, r.seeds)}
	for i, s := range r.states {
		r.Must(k.Activate(i, s))
	}

	r.reference = k
	n := len(r.xr)
	r.wantY, r.wantDX = make([]float64, n), make([]float64, n)
	r.wantDW, r.wantDS = make([]float64, len(r.weights)), make([]float64, len(r.scales))
	k.Forward(r.wantY, r.xr, r.weights, r.scales)
	r.wantHealth = slices.Clone(k.Figures)
	r.wantBins = k.Exponents(r.xr)
	if r.clip {
		for _, s := range r.states {
			k.Limit = append(k.Limit, float64(s.Limit))
		}
	}

	k.Backward(r.wantDX, r.wantDW, r.wantDS, r.gr, r.xr, r.weights, r.scales)
	r.wantGradient = slices.Clone(k.Figures)
}

func readWords(g *kerneltest.Rig, b *kerneltest.Buffer) []uint32 {
	g.Helper()
	raw := make([]byte, b.Bytes())
	g.Must(g.Ctx.CopyToHost(raw, b.Ptr, g.Stream))
	words := make([]uint32, len(raw)/4)
	for i := range words {
		words[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return words
}

// checkCounts compares the counts after the given number of runs. Rows with a norm at the limit,
// except for rounding, may be clipped or not.
func (r *kasminaRun) checkCounts(runs int) {
	r.Helper()
	got := readWords(r.Rig, r.counts)
	for s := range r.seeds {
		for i, want := range [...]int{r.wantHealth[s].Bad, r.wantGradient[s].Bad,
			r.wantGradient[s].Clipped} {
			got := int(got[i*r.seeds+s])
			if got == runs*want || i == 2 && max(got-runs*want,
				runs*want-got) <= runs*r.borderline(s) {
				continue
			}
			r.Errorf("seed %d: %s is %d, want %d", s, [...]string{"bad of x", "bad of g",
				"clipped"}[i], got, runs*want)
			return
		}
	}
}

// borderline returns the number of rows of a seed's gradient with a norm too close to the limit for
// float32.
func (r *kasminaRun) borderline(seed int) (n int) {
	for row := range r.rows {
		var sum float64
		for _, v := range r.gr[(row*r.seeds+seed)*r.chunk:][:r.chunk] {
			if finite(v) {
				sum += v * v
			}
		}
		if math.Abs(math.Sqrt(sum)/float64(r.states[seed].Limit)-1) < 1e-6 {
			n++
		}
	}

	return n
}

// checkFigures compares the figures of every seed, each relative to the scale of its precision.
func (r *kasminaRun) checkFigures(tol float64) {
	r.Helper()
	health, gradient, bins := r.Read(r.health), r.Read(r.gradient), readWords(r.Rig, r.bins)
	failures := 0
	check := func(s int, name string, got, want, scale float64) {
		if math.Abs(got-want) <= tol*scale || got == want {
			return
		}
		if failures++; failures < 5 {
			r.Errorf("seed %d: %s is %.9g, want %.9g", s, name, got, want)
		}
	}

	for s := range r.seeds {
		h := r.wantHealth[s].Health(r.reference.Reduce, r.layer.Eps)
		m := r.wantHealth[s].Moments
		deviation := math.Sqrt(m.Variance())
		size := math.Abs(m.Mean) + deviation
		at := func(figures []float64, i int) float64 { return figures[i*r.seeds+s] }
		// A row's variance comes from few elements, and their differences are only as accurate as
		// float32.
		check(s, "variance", at(health, 0), h[0], h[0])
		check(s, "mean", at(health, 1), h[1], size)
		check(s, "min", at(health, 2), h[2], size)
		check(s, "max", at(health, 3), h[3], size)
		check(s, "dead ratio", at(health, 4), h[4], 1)
		check(s, "signal-to-noise ratio", at(health, 5), h[5], 10*(1+h[5]))
		check(s, "moments' mean", at(health, Moments), m.Mean, size)
		check(s, "moments' variance", at(health, Moments+1), m.Variance(), m.Variance())
		g := r.wantGradient[s].Gradient(r.reference.Reduce)
		norms := r.wantGradient[s].Norms
		check(s, "gradient's norm", at(gradient, 0), g[0], g[0])
		// squaring doubles the rounding error, and clipped rows have more
		check(s, "gradient's variance", at(gradient, 1), g[1], 4*g[1])
		check(s, "largest gradient", at(gradient, 2), g[2], g[2])
		check(s, "norms' mean", at(gradient, Norms), norms.Mean, norms.Mean)
		// Groups of up to eight norms use the first row's norm as pivot, even if it is an outlier.
		check(s, "norms' variance", at(gradient, Norms+1), norms.Variance(), 4*norms.Variance()+
			1e-2*norms.Mean*norms.Mean)
		check(s, "norms' count", at(gradient, Norms+2), norms.N, 0)
		for i, want := range r.wantBins[s] {
			check(s, fmt.Sprintf("bin %d", i), float64(bins[s*Bins+i]), float64(want), 0)
		}
	}
}

// checkFiguresAlone runs both passes and compares only the figures.
func (r *kasminaRun) checkFiguresAlone() {
	r.Helper()
	r.refer()
	r.launchForward()
	r.launchBackward()
	r.checkFigures(1e-6)
}

// check runs both passes twice, with different garbage in the outputs, and compares all results.
func (r *kasminaRun) check() {
	r.Helper()
	r.refer()
	outputs := []*kerneltest.Buffer{r.y, r.dx, r.dw, r.ds}
	if r.telemetry {
		outputs = append(outputs, r.health, r.gradient, r.bins)
	}

	poison := func(with uint8) {
		for _, b := range append([]*kerneltest.Buffer{r.forwardSpace, r.backwardSpace},
			outputs...) {
			r.Must(r.Ctx.Memset8(b.Ptr, with, b.Bytes(), r.Stream))
		}
	}

	r.Must(r.Ctx.Memset8(r.counts.Ptr, 0, 4*3*r.seeds, r.Stream))
	poison(0xff)
	r.launchForward()
	r.launchBackward()
	r.Near("y", r.y, r.wantY, kerneltest.Forward(r.dtype))
	r.Near("dx", r.dx, r.wantDX, kerneltest.Backward(r.dtype))
	tol := 1e-5
	if r.seeds < 10 { // with few sums, all may have terms that cancel
		tol = 1e-3
	}

	r.Near("dweights", r.dw, r.wantDW, tol)
	r.Near("dscales", r.ds, r.wantDS, tol)
	if r.telemetry {
		r.checkFigures(1e-6)
	}

	first := make([][]byte, len(outputs))
	for i, b := range outputs {
		first[i] = make([]byte, b.Bytes())
		r.Must(r.Ctx.CopyToHost(first[i], b.Ptr, r.Stream))
	}

	poison(0xee)
	r.launchForward()
	r.launchBackward()
	for i, b := range outputs {
		again := make([]byte, b.Bytes())
		r.Must(r.Ctx.CopyToHost(again, b.Ptr, r.Stream))
		if !slices.Equal(first[i], again) {
			r.Errorf("output %d has other bits in the second run", i)
		}
	}

	r.checkCounts(2)
	r.checkInPlace(2)
}

// checkInPlace runs the backward pass again with dx in the memory of g, if the layer allows this,
// after the given number of other runs. dx and the counts must be the same. If threads are divided
// as before, the other results must be bit-identical, too.
func (r *kasminaRun) checkInPlace(runs int) {
	r.Helper()
	if r.width > 0 || r.skew > 0 || !r.layer.InPlace() {
		return
	}

	raw := func(b *kerneltest.Buffer) []byte {
		to := make([]byte, b.Bytes())
		r.Must(r.Ctx.CopyToHost(to, b.Ptr, r.Stream))
		return to
	}
	one := *r
	one.g = r.Alloc(r.g.N, r.dtype, 0)
	r.Must(r.Ctx.CopyOnDevice(one.g.Ptr, r.g.Ptr, r.g.Bytes(), r.Stream))
	one.dx = one.g
	outputs := map[string]*kerneltest.Buffer{"dweights": r.dw, "dscales": r.ds}
	if r.telemetry {
		outputs["figures"] = r.gradient
	}

	want := map[string][]byte{}
	for name, b := range outputs {
		want[name] = raw(b)
		r.Must(r.Ctx.Memset8(b.Ptr, 0xff, b.Bytes(), r.Stream))
	}

	before := readWords(r.Rig, r.counts)
	one.launchBackward()
	for i, n := range readWords(r.Rig, r.counts)[r.seeds:] {
		if want := before[r.seeds+i] / uint32(runs) * uint32(runs+1); n != want {
			r.Errorf("seed %d: count %d of g is %d in place, want %d",
				i%r.seeds, i/r.seeds, n, want)
			break
		}
	}

	if !slices.Equal(raw(one.dx), raw(r.dx)) {
		r.Error("dx has other bits in place")
	}

	for name, b := range outputs {
		if (r.telemetry || r.clip) && !slices.Equal(raw(b), want[name]) {
			r.Errorf("%s has other bits in place", name)
		}
	}

	tol := 1e-5
	if r.seeds < 10 {
		tol = 1e-3
	}

	if !r.telemetry && !r.clip {
		r.Near("dweights in place", r.dw, r.wantDW, tol)
		r.Near("dscales in place", r.ds, r.wantDS, tol)
	}
}
