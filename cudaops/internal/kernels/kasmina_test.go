package kernels

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/state"
)

// kasminaCase is a layer with random state: its stages and kinds in turn, so that 44 seeds have all combinations.
type kasminaCase struct {
	rows, seeds, chunk, slots int
	width                     int // of slots that are wider than chunks, else 0
	dtype                     driver.DType
	stability                 KasminaStability
	reduction                 KasminaReduction
	clip, telemetry           bool
	skew, blocks, from        int     // from: what number gives the first seed its stage and kind
	mean, deviation           float64 // of x and g
}

func (c kasminaCase) String() string {
	return fmt.Sprintf("%dx%dx%d slots=%dx%d %v stability=%d reduction=%d clip=%v telemetry=%v skew=%d", c.rows, c.seeds, c.chunk,
		c.slots, max(c.width, c.chunk), c.dtype, c.stability, c.reduction, c.clip, c.telemetry, c.skew)
}

// kasminaRun is a layer on the GPU and its reference.
type kasminaRun struct {
	*rig
	kasminaCase
	layer            KasminaLayer
	states           []KasminaSeed
	x, g, y, dx      *buffer
	dw, ds           *buffer
	health, gradient *buffer
	counts           *buffer // bad of x, bad of g, clipped
	bins             *buffer
	forwardSpace     *buffer
	backwardSpace    *buffer
	wide             [2]KasminaWide // of the passes
	xr, gr           []float64
	weights, scales  []float64
	wantY, wantDX    []float64
	wantDW, wantDS   []float64
	wantHealth       []cpu.ChunkFigures
	wantGradient     []cpu.ChunkFigures
	reference        *cpu.Kasmina[float64]
	forwardFamily    KasminaFamily
	backwardFamily   KasminaFamily
	wantBins         [][cpu.Exponents]uint32
}

const (
	kasminaStages = 11
	slotOfNone    = 0
)

// kinds is how many of them fit into the slots.
func (c kasminaCase) kinds() int {
	if c.width < 2*c.chunk {
		return kasminaKinds
	}
	return int(blueprints.ChunkMLP) + 1
}

func (g *rig) kasminaSeeds(c kasminaCase) []KasminaSeed {
	seeds := make([]KasminaSeed, c.seeds)
	for i := range seeds {
		number := i + c.from
		stage := state.Stage(number % kasminaStages)
		alpha := float32(g.rand.Float64())
		switch i % 7 {
		case 5:
			alpha = 0
		case 6:
			alpha = 1
		}
		if stage == state.Training || stage == state.FineTuning || stage == state.Fossilized {
			alpha = 1
		}
		low, high := c.mean-c.deviation*(0.5+g.rand.Float64()), c.mean+c.deviation*(0.5+g.rand.Float64())
		seeds[i] = KasminaSeed{
			Kind: uint8(number / kasminaStages % c.kinds()), Slot: uint16(g.rand.IntN(c.slots)), Alpha: alpha,
			Blend: stage.Blends(), Learn: stage.Learns(), Low: float32(low), High: float32(high),
			Limit: float32(math.Sqrt(float64(c.chunk)) * math.Hypot(c.mean, c.deviation) * (0.7 + g.rand.Float64()/2)),
		}
	}
	return seeds
}

// newKasmina uploads a random layer. spoil, if not nil, puts special values into x and g.
func (g *rig) newKasmina(c kasminaCase, spoil func(i int, v float64) float64) *kasminaRun {
	g.Helper()
	r := &kasminaRun{rig: g, kasminaCase: c, states: g.kasminaSeeds(c)}
	n := c.rows * c.seeds * c.chunk
	tensor := func() (*buffer, []float64) {
		v := make([]float64, n)
		for i := range v {
			if v[i] = c.mean + c.deviation*g.rand.NormFloat64(); spoil != nil {
				v[i] = spoil(i, v[i])
			}
		}
		return g.upload(v, c.dtype, c.skew)
	}
	r.x, r.xr = tensor()
	r.g, r.gr = tensor()
	width := max(c.width, c.chunk)
	w, weights := g.normal(c.slots*width, f32, 0)
	s, scales := g.normal(c.slots, f32, 0)
	r.weights, r.scales = weights, scales
	st := KasminaState{Seeds: c.seeds, Slots: c.slots}
	raw := make([]byte, st.Bytes())
	g.must(st.Encode(raw, func(i int) KasminaSeed {
		s := r.states[i]
		if s.Mixes() {
			s.Slot = slotOfNone
		}
		return s
	}))
	b := g.alloc(len(raw)/4, f32, 0)
	g.must(g.ctx.CopyToDevice(b.Ptr, raw, g.stream))
	st.Ptr = b.Ptr
	r.layer = KasminaLayer{X: r.x.Ptr, Weights: w.Ptr, Scales: s.Ptr, State: st, Rows: c.rows, Chunk: c.chunk, Eps: 1e-8,
		Stability: c.stability, Type: c.dtype, Blocks: c.blocks}
	r.y, r.dx = g.alloc(n, c.dtype, c.skew), g.alloc(n, c.dtype, c.skew)
	r.dw, r.ds = g.alloc(c.slots*width, f32, 0), g.alloc(c.slots, f32, 0)
	r.health, r.gradient = g.alloc(KasminaForwardFigures*c.seeds, f32, 0), g.alloc(KasminaBackwardFigures*c.seeds, f32, 0)
	r.counts = g.alloc(3*c.seeds, f32, 0)
	r.bins = g.alloc(KasminaBins*c.seeds, f32, 0)
	g.must(g.ctx.Memset32(r.counts.Ptr, 0, 3*c.seeds, g.stream))
	r.forwardSpace = g.alloc(g.KasminaForwardWorkspace(r.layer)/4, f32, 0)
	r.backwardSpace = g.alloc(g.KasminaBackwardWorkspace(r.layer, c.clip)/4, f32, 0)
	if c.width > 0 {
		r.widen()
	}
	return r
}

func (r *kasminaRun) count(i int) driver.Ptr { return r.counts.Offset(4 * i * r.seeds) }

// in is the layer in a family.
func (r *kasminaRun) in(f KasminaFamily) KasminaLayer {
	l := r.layer
	l.Family = f
	return l
}

func (r *kasminaRun) launchForward() {
	r.Helper()
	f := KasminaForward{KasminaLayer: r.in(r.forwardFamily), Y: r.y.Ptr, Telemetry: r.telemetry, Reduction: r.reduction,
		Figures: r.health.Ptr, Bad: r.count(0), Workspace: r.forwardSpace.Ptr}
	if r.telemetry {
		f.Histogram = r.bins.Ptr
	}
	if r.width > 0 {
		r.must(r.KasminaWideForward(r.stream, f, r.wide[0]))
		return
	}
	r.must(r.KasminaForward(r.stream, f))
}

func (r *kasminaRun) launchBackward() {
	r.Helper()
	b := r.backwardPass()
	if r.width > 0 {
		r.must(r.KasminaWideBackward(r.stream, b, r.wide[1]))
		return
	}
	r.must(r.KasminaBackward(r.stream, b))
}

func (r *kasminaRun) backwardPass() KasminaBackward {
	return KasminaBackward{KasminaLayer: r.in(r.backwardFamily), DX: r.dx.Ptr, DWeights: r.dw.Ptr,
		DScales: r.ds.Ptr, G: r.g.Ptr, Clip: r.clip, Telemetry: r.telemetry, Reduction: r.reduction, Figures: r.gradient.Ptr,
		Bad: r.count(1), Clipped: r.count(2), Workspace: r.backwardSpace.Ptr}
}

// refer computes what is wanted in float64.
func (r *kasminaRun) refer() {
	k := &cpu.Kasmina[float64]{Rows: r.rows, Seeds: r.seeds, Chunk: r.chunk, Slots: r.slots, Width: max(r.width, r.chunk), Eps: r.layer.Eps,
		Stability: [...]cpu.Stability{cpu.StabilityFast, cpu.StabilityStrict, cpu.StabilityAdaptive}[r.stability],
		Reduce:    [...]cpu.Reduction{cpu.ReduceExact, cpu.ReduceMean, cpu.ReduceMax}[r.reduction],
		Measure:   slices.Repeat([]bool{true}, r.seeds)}
	for i, s := range r.states {
		if s.Slot == slotOfNone || !s.Blend && !s.Learn {
			continue
		}
		r.must(k.Activate(cpu.KasminaSeed[float64]{Seed: i, Slot: int(s.Slot), Kind: blueprints.Kind(s.Kind), Blend: s.Blend, Learn: s.Learn,
			Alpha: float64(s.Alpha), Low: float64(s.Low), High: float64(s.High)}))
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

func (g *rig) readWords(b *buffer) []uint32 {
	g.Helper()
	raw := make([]byte, b.bytes())
	g.must(g.ctx.CopyToHost(raw, b.Ptr, g.stream))
	words := make([]uint32, len(raw)/4)
	for i := range words {
		words[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return words
}

// checkCounts compares the counts after so many runs. A row whose norm is the limit but for rounding may be clipped or not.
func (r *kasminaRun) checkCounts(runs int) {
	r.Helper()
	got := r.readWords(r.counts)
	for s := range r.seeds {
		for i, want := range [...]int{r.wantHealth[s].Bad, r.wantGradient[s].Bad, r.wantGradient[s].Clipped} {
			got := int(got[i*r.seeds+s])
			if got == runs*want || i == 2 && max(got-runs*want, runs*want-got) <= runs*r.borderline(s) {
				continue
			}
			r.Errorf("seed %d: %s is %d, want %d", s, [...]string{"bad of x", "bad of g", "clipped"}[i], got, runs*want)
			return
		}
	}
}

// borderline is how many rows of a seed's gradient have a norm that float32 cannot tell from the limit.
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

// checkFigures compares the figures of every seed: each to tol of the scale that it is known to.
func (r *kasminaRun) checkFigures(tol float64) {
	r.Helper()
	health, gradient, bins := r.read(r.health), r.read(r.gradient), r.readWords(r.bins)
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
		// A row's variance is formed of few elements, whose differences are only as exact as float32.
		check(s, "variance", at(health, 0), h[0], h[0])
		check(s, "mean", at(health, 1), h[1], size)
		check(s, "min", at(health, 2), h[2], size)
		check(s, "max", at(health, 3), h[3], size)
		check(s, "dead ratio", at(health, 4), h[4], 1)
		check(s, "signal-to-noise ratio", at(health, 5), h[5], 10*(1+h[5]))
		check(s, "moments' mean", at(health, KasminaMoments), m.Mean, size)
		check(s, "moments' variance", at(health, KasminaMoments+1), m.Variance(), m.Variance())
		g := r.wantGradient[s].Gradient(r.reference.Reduce)
		norms := r.wantGradient[s].Norms
		check(s, "gradient's norm", at(gradient, 0), g[0], g[0])
		check(s, "gradient's variance", at(gradient, 1), g[1], 4*g[1]) // whose squares double the rounding, and more in clipped rows
		check(s, "largest gradient", at(gradient, 2), g[2], g[2])
		check(s, "norms' mean", at(gradient, KasminaNorms), norms.Mean, norms.Mean)
		// Up to eight norms at once are summed up from the first row's, outlier or not.
		check(s, "norms' variance", at(gradient, KasminaNorms+1), norms.Variance(), 4*norms.Variance()+1e-2*norms.Mean*norms.Mean)
		check(s, "norms' count", at(gradient, KasminaNorms+2), norms.N, 0)
		for i, want := range r.wantBins[s] {
			check(s, fmt.Sprintf("bin %d", i), float64(bins[s*KasminaBins+i]), float64(want), 0)
		}
	}
}

// checkFigureFamilies compares the figures alone, of every family.
func (r *kasminaRun) checkFigureFamilies() {
	r.Helper()
	r.refer()
	for _, f := range r.KasminaFamilies(r.layer, true, true) {
		r.forwardFamily, r.backwardFamily = f, f
		r.launchForward()
		r.launchBackward()
		r.checkFigures(1e-6)
	}
}

// check runs both passes in every family that can.
func (r *kasminaRun) check() {
	r.Helper()
	r.refer()
	forward := r.KasminaFamilies(r.layer, false, r.telemetry, r.y.Ptr)
	backward := r.KasminaFamilies(r.layer, true, r.telemetry, r.g.Ptr, r.dx.Ptr)
	for i := range max(len(forward), len(backward)) {
		r.forwardFamily, r.backwardFamily = forward[i%len(forward)], backward[i%len(backward)]
		r.scope(fmt.Sprintf("%v %v", r.forwardFamily, r.backwardFamily), func(g *rig) {
			one := *r
			one.rig = g
			one.checkFamily()
		})
	}
}

// checkFamily runs both passes twice, with different garbage in the outputs, and compares.
func (r *kasminaRun) checkFamily() {
	r.Helper()
	outputs := []*buffer{r.y, r.dx, r.dw, r.ds}
	if r.telemetry {
		outputs = append(outputs, r.health, r.gradient, r.bins)
	}
	poison := func(with uint8) {
		for _, b := range append([]*buffer{r.forwardSpace, r.backwardSpace}, outputs...) {
			r.must(r.ctx.Memset8(b.Ptr, with, b.bytes(), r.stream))
		}
	}
	r.must(r.ctx.Memset32(r.counts.Ptr, 0, 3*r.seeds, r.stream))
	poison(0xff)
	r.launchForward()
	r.launchBackward()
	r.near("y", r.y, r.wantY, forward(r.dtype))
	r.near("dx", r.dx, r.wantDX, backward(r.dtype))
	tol := 1e-5
	if r.seeds < 10 { // of few sums all may be of terms that cancel
		tol = 1e-3
	}
	r.near("dweights", r.dw, r.wantDW, tol)
	r.near("dscales", r.ds, r.wantDS, tol)
	if r.telemetry {
		r.checkFigures(1e-6)
	}
	first := make([][]byte, len(outputs))
	for i, b := range outputs {
		first[i] = make([]byte, b.bytes())
		r.must(r.ctx.CopyToHost(first[i], b.Ptr, r.stream))
	}
	poison(0xee)
	r.launchForward()
	r.launchBackward()
	for i, b := range outputs {
		again := make([]byte, b.bytes())
		r.must(r.ctx.CopyToHost(again, b.Ptr, r.stream))
		if !slices.Equal(first[i], again) {
			r.Errorf("output %d has other bits in the second run", i)
		}
	}
	r.checkCounts(2)
	r.checkInPlace(2)
}

// checkInPlace computes the backward pass in the memory of g, if that can be done, after so many runs elsewhere: dx gets the same
// bits, and as much is counted. Where threads are dealt out as before, so does all else.
func (r *kasminaRun) checkInPlace(runs int) {
	r.Helper()
	if r.width > 0 || r.skew > 0 || !r.layer.InPlace() {
		return
	}
	raw := func(b *buffer) []byte {
		to := make([]byte, b.bytes())
		r.must(r.ctx.CopyToHost(to, b.Ptr, r.stream))
		return to
	}
	one := *r
	one.g = r.alloc(r.g.n, r.dtype, 0)
	r.must(r.ctx.CopyOnDevice(one.g.Ptr, r.g.Ptr, r.g.bytes(), r.stream))
	one.dx = one.g
	outputs := map[string]*buffer{"dweights": r.dw, "dscales": r.ds}
	if r.telemetry {
		outputs["figures"] = r.gradient
	}
	want := map[string][]byte{}
	for name, b := range outputs {
		want[name] = raw(b)
		r.must(r.ctx.Memset8(b.Ptr, 0xff, b.bytes(), r.stream))
	}
	before := r.readWords(r.counts)
	one.launchBackward()
	for i, n := range r.readWords(r.counts)[r.seeds:] {
		if want := before[r.seeds+i] / uint32(runs) * uint32(runs+1); n != want {
			r.Errorf("seed %d: count %d of g is %d in place, want %d", i%r.seeds, i/r.seeds, n, want)
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
		r.near("dweights in place", r.dw, r.wantDW, tol)
		r.near("dscales in place", r.ds, r.wantDS, tol)
	}
}

// kasminaPacked are layers, as rows, seeds, chunk and slots, in which warps hold several chunks backward: in the last three of 16-bit
// types even where nothing has threads of a chunk be of one warp.
var kasminaPacked = [][4]int{
	{1327, 5, 48, 6}, {2611, 3, 24, 4}, {702, 2, 80, 3}, {2600, 1, 24, 2}, {1101, 4, 64, 5}, {1031, 8, 32, 7}, {1040, 6, 48, 5},
}

// TestKasminaPacked needs no GPU.
func TestKasminaPacked(t *testing.T) {
	k := &Kernels{sms: 132}
	for i, s := range kasminaPacked {
		for _, dt := range storageTypes {
			l := KasminaLayer{Rows: s[0], Chunk: s[2], Type: dt, State: KasminaState{Seeds: s[1], Slots: s[3]}}
			for _, telemetry := range []bool{false, true} {
				use := kasminaUse{backward: true, telemetry: telemetry}
				g := k.kasminaGrid(l, KasminaRing, kasminaBlocks*k.sms, true, use)
				if g.chunks == 0 && (telemetry || dt != f32 && i >= len(kasminaPacked)-3) {
					t.Errorf("%v %v telemetry=%v: warps hold no chunks", s, dt, telemetry)
				}
			}
		}
	}
}

func TestKasmina(t *testing.T) {
	g := newRig(t)
	shapes := [][4]int{ // rows, seeds, chunk, slots
		{67, 44, 4, 45}, {300, 88, 4, 7}, {129, 44, 1, 45}, {64, 44, 2, 9}, {31, 44, 3, 20}, {7, 50, 5, 51}, {33, 44, 16, 45},
		{5, 44, 8, 12}, {3, 44, 1000, 45}, {1, 1, 1, 2}, {900, 2, 37, 3}, {65, 1, 4096, 2}, {2, 3000, 4, 2000},
		{40, 5, 128, 6}, {37, 3, 512, 4}, {513, 2, 32, 3},
		{77, 12, 24, 5}, {61, 5, 40, 6}, {35, 16, 48, 17}, {130, 44, 56, 4}, {19, 2, 384, 3}, // a chunk's threads are no power of two
	}
	if testing.Short() {
		shapes = [][4]int{{67, 44, 4, 45}, {33, 44, 16, 20}, {9, 44, 3, 45}, kasminaPacked[0]}
	} else {
		shapes = append(append(shapes, kasminaPacked...), [4]int{2, 100_000, 1, 65536}, [4]int{1, 100_000, 4, 3})
	}
	for i, s := range shapes {
		for j, dt := range storageTypes {
			for stability := KasminaFast; stability <= KasminaAdaptive; stability++ {
				n := i + j + int(stability)
				c := kasminaCase{rows: s[0], seeds: s[1], chunk: s[2], slots: s[3], dtype: dt, stability: stability,
					reduction: KasminaReduction((n + i) % 3), clip: n%2 == 0, telemetry: n%5 != 4, skew: n % 7 / 6, deviation: 1}
				g.scope(c.String(), func(g *rig) { g.newKasmina(c, nil).check() })
			}
		}
	}
}

// TestKasminaFewSeeds has many rows of few columns, whose sums come from many lanes.
func TestKasminaFewSeeds(t *testing.T) {
	g := newRig(t)
	shapes := [][3]int{ // seeds, chunk, from
		{2, 48, 13}, {4, 24, 25}, {1, 12, 36}, {1, 256, 14}, {3, 4, 24}, {5, 7, 35}, {2, 384, 25},
		{4, 4, 2}, {4, 4, 2}, {4, 4, 13}, {2, 48, 2}, {2, 4, 0}, // warps that need little: no x, no x and clipped, no relu; nothing
	}
	for i, s := range shapes {
		c := kasminaCase{rows: 32768, seeds: s[0], chunk: s[1], from: s[2], slots: 5, dtype: storageTypes[(i+1)%3], stability: KasminaAdaptive,
			clip: i%2 == 0, telemetry: true, deviation: 1}
		if testing.Short() {
			c.rows = 4099
		}
		g.scope(c.String(), func(g *rig) { g.newKasmina(c, nil).check() })
	}
}

// TestKasminaGrid needs no GPU.
func TestKasminaGrid(t *testing.T) {
	k := &Kernels{sms: 132}
	for range few(2000, 500) {
		l := KasminaLayer{Rows: 1 << rand.IntN(16), Chunk: 1 + rand.IntN(70), Type: storageTypes[rand.IntN(3)],
			State: KasminaState{Seeds: 1 + rand.IntN(100), Slots: 1}}
		if rand.IntN(3) > 0 {
			l.Chunk = 4 * (1 + rand.IntN(100))
		}
		use := kasminaUse{backward: rand.IntN(2) == 0, telemetry: rand.IntN(2) == 0, clip: rand.IntN(2) == 0}
		d, n, aligned := l.State.Seeds*l.Chunk, vector(l.Type), rand.IntN(2) == 0
		use.inPlace = use.backward && aligned && l.InPlace() && rand.IntN(2) == 0
		families := []KasminaFamily{KasminaPlain}
		if aligned && d%n == 0 && (l.Chunk == 4 || l.Chunk%n == 0) {
			if families = append(families, KasminaRing); l.tileAcross(false) > 0 {
				families = append(families, KasminaTile)
			}
		}
		for _, f := range families {
			g := k.kasminaGrid(l, f, 1+rand.IntN(kasminaBlocks*k.sms), aligned, use)
			space := k.KasminaForwardWorkspace(l)
			if use.backward {
				space = k.KasminaBackwardWorkspace(l, use.clip)
			}
			if s := g.scratch(l, 0); s.bytes > space {
				t.Fatalf("%+v %+v: %d bytes of workspace, of %d", l, g, s.bytes, space)
			}
			if g.across*g.down > kasminaThreads || g.chunks == 0 && g.across*g.down != kasminaThreads || g.shared() > 48<<10 {
				t.Fatalf("%+v %+v: %d bytes of shared memory", l, g, g.shared())
			}
			if use.inPlace && g.sharing == 0 {
				t.Fatalf("%+v %+v: a chunk's threads are of several warps", l, g)
			}
			g.checkColumns(t, l)
		}
	}
}

// checkColumns has each column of a row, and of each of those that a block has at once, be one thread's, as Lane of kasmina_feed.cuh
// deals them out, a chunk's threads be of one warp where they form its norm, and a warp that holds chunks have those of one seed.
func (g kasminaGrid) checkColumns(t *testing.T, l KasminaLayer) {
	t.Helper()
	d := l.State.Seeds * l.Chunk
	times := make([]int, ceilDiv(d, g.perThread))
	begun := make([]int, g.down) // the warp that the chunk began in
	of := 0                      // the seed of the thread before
	for i := range g.tiles * kasminaThreads {
		tile, thread := i/kasminaThreads, i%kasminaThreads
		x, y := thread%g.across, thread/g.across
		at := tile*g.across + x
		wide := min(g.across, 32)
		column, idle := at/wide*g.used+at%wide, at%wide >= g.used
		if g.chunks > 0 {
			each, warp, chunk := 32/g.sharing, thread/32, thread%32/g.sharing
			seed := (warp&4 | (warp+warp/4)&3) & (g.chunks - 1)
			y, x = warp/g.chunks*each+chunk, seed*g.sharing+thread%32%g.sharing
			column, idle = tile*g.across+x, chunk >= each
		}
		if column *= g.perThread; idle || column >= d {
			continue
		}
		if seed := column / l.Chunk; g.chunks > 0 && thread%32 > 0 && seed != of {
			t.Fatalf("%+v %+v: thread %d of tile %d has seed %d, the warp's first one seed %d", l, g, thread, tile, seed, of)
		} else {
			of = seed
		}
		if column%l.Chunk == 0 {
			begun[y] = thread / 32
		}
		if times[column/g.perThread]++; (g.chunks > 0 || g.use.joined() && g.sharing > 0) && thread/32 != begun[y] {
			t.Fatalf("%+v %+v: thread %d of tile %d has column %d, whose chunk begins in warp %d", l, g, thread, tile, column, begun[y])
		}
	}
	for i, n := range times {
		if n != g.down {
			t.Fatalf("%+v %+v: column %d has %d threads, want %d", l, g, i*g.perThread, n, g.down)
		}
	}
}

// TestKasminaTiles needs no GPU: a tile is whole chunks, and as many threads as can share the merging.
func TestKasminaTiles(t *testing.T) {
	for _, dt := range storageTypes {
		for chunk := 1; chunk <= 2048; chunk++ {
			l := KasminaLayer{Rows: 64 + chunk%2, Chunk: chunk, Type: dt}
			switch across, n := l.tileAcross(chunk%4 < 2), vector(dt); {
			case chunk != 4 && chunk%n != 0: // no family but plain
			case across == 0 && (chunk == 4 || chunk <= 32*n && chunk/n == powerOfTwo(chunk/n)):
				t.Errorf("%v: a chunk of %d columns has no tiles", dt, chunk)
			case across > 0 && (across > 32 || across != powerOfTwo(across) || across*n%chunk != 0):
				t.Errorf("%v: a tile is %d threads for chunks of %d columns", dt, across, chunk)
			}
		}
	}
}

// TestKasminaLateBlocks has more rows than the blocks in flight take in turn.
func TestKasminaLateBlocks(t *testing.T) {
	g := newRig(t)
	for i, s := range [][3]int{{1411, 300, 4}, {1533, 80, 16}, {1330, 50, 3}} {
		for j, c := range []kasminaCase{{telemetry: true, clip: true}, {}}[:few(2, 1)] {
			c.rows, c.seeds, c.chunk, c.slots, c.blocks, c.deviation = s[0], s[1], s[2], 50, 3, 1
			c.dtype, c.stability = storageTypes[(i+j)%3], KasminaAdaptive
			g.scope(c.String(), func(g *rig) {
				r := g.newKasmina(c, nil)
				grid := g.kasminaGrid(r.layer, KasminaPlain, c.blocks, true, kasminaUse{telemetry: c.telemetry})
				if grid.late == 0 {
					t.Errorf("no blocks come late: %+v", grid)
				}
				r.check()
			})
		}
	}
}

// TestKasminaForeignKinds gives every other seed that blends or learns a kind that other kernels evaluate: such seeds are
// measured and clipped, and else left alone.
func TestKasminaForeignKinds(t *testing.T) {
	g := newRig(t)
	for i, chunk := range []int{4, 16, 3, 4096} {
		for stability := KasminaFast; stability <= KasminaAdaptive; stability++ {
			c := kasminaCase{rows: 45, seeds: 44, chunk: chunk, slots: 20, dtype: storageTypes[i%3], stability: stability,
				clip: i%2 == 0, telemetry: true, deviation: 1}
			g.scope(c.String(), func(g *rig) {
				r := g.newKasmina(c, nil)
				words := g.readWords(&buffer{Ptr: r.layer.State.Ptr, n: c.seeds, dtype: f32})
				for s := range r.states {
					if words[s] != 0 && s%2 == 0 {
						words[s] = words[s]&^0xff | uint32(kasminaKinds+g.rand.IntN(256-kasminaKinds))
						r.states[s].Slot = slotOfNone
					}
				}
				g.must(g.ctx.CopyToDevice(r.layer.State.Ptr, driver.Bytes(words), g.stream))
				r.check()
			})
		}
	}
}

// TestKasminaIllConditioned has data that share all but their last digits.
func TestKasminaIllConditioned(t *testing.T) {
	g := newRig(t)
	for reduction := range kasminaReductions {
		for _, chunk := range []int{4, 16, 3} {
			c := kasminaCase{rows: 1111, seeds: 44, chunk: chunk, slots: 45, dtype: f32, stability: KasminaFast, reduction: reduction,
				telemetry: true, mean: 1e4, deviation: 1e-2}
			g.scope(c.String(), func(g *rig) {
				g.newKasmina(c, nil).checkFigureFamilies()
			})
		}
	}
}

// TestKasminaPivots has among the elements that some lanes begin with, which are of the last rows, an outlier that makes up the
// variance; or has them begin with rows that are not finite, before data that share all but their last digits.
func TestKasminaPivots(t *testing.T) {
	g := newRig(t)
	for _, dt := range storageTypes {
		for _, chunk := range []int{4, 16, 3} {
			for place := range 3 {
				c := kasminaCase{rows: 516, seeds: 44, chunk: chunk, slots: 45, dtype: dt, stability: KasminaFast, telemetry: true, deviation: 1}
				columns, first := c.seeds*chunk, c.rows-4 // first is where a lane begins, of batches of two and of four rows
				g.scope(fmt.Sprintf("%v outlier %d", c, place), func(g *rig) {
					g.newKasmina(c, func(i int, v float64) float64 {
						row, column := i/columns-first, i%chunk
						if chunk == 3 && row == place && column == place || chunk > 3 && row == 0 && column == place {
							return 1000 + v
						}
						return v
					}).checkFigureFamilies()
				})
				if c.mean, c.deviation = 1e4, 1e-2; dt != f32 {
					c.mean, c.deviation = 100, 1
				}
				g.scope(fmt.Sprintf("%v not finite %d", c, place), func(g *rig) {
					g.newKasmina(c, func(i int, v float64) float64 {
						if row := i/columns - first; 0 <= row && row <= place {
							return []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[place]
						}
						return v
					}).checkFigureFamilies()
				})
			}
		}
	}
}

// TestKasminaExtremes has NaN, Inf and very large numbers: those are counted and left out of the figures, these evaluated
// scaled down, and what does not blend keeps its bits.
func TestKasminaExtremes(t *testing.T) {
	g := newRig(t)
	for _, dt := range storageTypes {
		for _, s := range [][3]int{{130, 44, 4}, {130, 44, 16}, {130, 44, 5}, {1301, 10, 24}} { // rows, seeds, chunk
			c := kasminaCase{rows: s[0], seeds: s[1], chunk: s[2], slots: 45, dtype: dt, stability: KasminaAdaptive, telemetry: true,
				from: g.rand.IntN(44), deviation: 1}
			large := map[driver.DType]float64{f32: 1e15, bf16: 1e15, f16: 4e3}[dt]
			g.scope(fmt.Sprintf("large %v", c), func(g *rig) {
				g.newKasmina(c, func(i int, v float64) float64 {
					if i%29 == 0 {
						return large * v / 4
					}
					return v
				}).check()
			})
			g.scope(fmt.Sprintf("not finite %v", c), func(g *rig) {
				r := g.newKasmina(c, func(i int, v float64) float64 {
					switch i % 71 {
					case 0:
						return math.NaN()
					case 13:
						return math.Inf(1)
					case 40:
						return math.Inf(-1)
					}
					return v
				})
				r.refer()
				for _, f := range g.KasminaFamilies(r.layer, true, true) {
					r.must(r.ctx.Memset32(r.counts.Ptr, 0, 3*c.seeds, r.stream))
					r.forwardFamily, r.backwardFamily = f, f
					r.launchForward()
					r.launchBackward()
					r.checkFigures(1e-6)
					r.checkCounts(1)
					r.checkNonFinite()
					r.checkInPlace(1)
				}
			})
		}
	}
}

// checkNonFinite: what does not blend keeps its bits, and what should not be finite is not.
func (r *kasminaRun) checkNonFinite() {
	r.Helper()
	y, dx := r.read(r.y), r.read(r.dx)
	for i := range y {
		s := r.states[i/r.chunk%r.seeds]
		if bits := math.Float64bits; s.Slot == slotOfNone || !s.Blend {
			if bits(y[i]) != bits(r.xr[i]) && y[i] == y[i] || bits(dx[i]) != bits(r.gr[i]) && dx[i] == dx[i] {
				r.Fatalf("element %d: y %v of %v, dx %v of %v, where nothing blends", i, y[i], r.xr[i], dx[i], r.gr[i])
			}
		} else if finite(y[i]) && !finite(r.wantY[i]) && s.Kind != uint8(blueprints.ConvFilter) && !finite(r.xr[i]) ||
			finite(r.wantY[i]) && !finite(y[i]) {
			r.Fatalf("element %d: y is %v of %v, want %v (%+v)", i, y[i], r.xr[i], r.wantY[i], s)
		}
	}
}

func finite(v float64) bool { return v-v == 0 }

// TestKasminaState needs no GPU.
func TestKasminaState(t *testing.T) {
	st := KasminaState{Seeds: 5, Slots: 4}
	raw := make([]byte, st.Bytes())
	seeds := []KasminaSeed{
		{Kind: 1, Slot: 3, Learn: true, Alpha: 1}, {Kind: 9, Slot: 0, Blend: true}, {Kind: 2, Slot: 1, Learn: true, Blend: true},
		{Kind: 3, Slot: 3, Learn: true}, {Kind: 9, Slot: 2},
	}
	encode := func() error { return st.Encode(raw, func(i int) KasminaSeed { return seeds[i] }) }
	for range 2 { // into what the first left
		if err := encode(); err != nil {
			t.Fatal(err)
		}
	}
	words := driver.View[uint32](raw)
	if want := []uint32{1 | 2<<8 | 3<<16, 0, 2 | 3<<8 | 1<<16, 3 | 2<<8 | 3<<16, 0}; !slices.Equal(words[:5], want) {
		t.Errorf("words are %x, want %x", words[:5], want)
	}
	if want := []uint32{0, 0, 1, 1, 3, 2, 0, 3}; !slices.Equal(words[25:33], want) {
		t.Errorf("seeds by slot are %v, want %v", words[25:33], want)
	}
	seeds[4].Blend = true
	if err := encode(); !errors.Is(err, ErrKasminaKind) {
		t.Errorf("an unknown kind: %v", err)
	}
	seeds[4] = KasminaSeed{Slot: 4, Blend: true}
	if err := encode(); err == nil || errors.Is(err, ErrKasminaKind) {
		t.Errorf("an unknown slot: %v", err)
	}
}

func TestKasminaRefusals(t *testing.T) {
	g := newRig(t)
	l := KasminaLayer{Rows: 1, Chunk: 4, State: KasminaState{Seeds: 1, Slots: 2}, Type: f32}
	for what, change := range map[string]func(*KasminaForward){
		"type":         func(f *KasminaForward) { f.Type = driver.Float8E4M3 },
		"size":         func(f *KasminaForward) { f.Rows = -1 },
		"columns":      func(f *KasminaForward) { f.Chunk = 1 << 30 },
		"stability":    func(f *KasminaForward) { f.Stability = 3 },
		"reduction":    func(f *KasminaForward) { f.Reduction = 3 },
		"no family":    func(f *KasminaForward) { f.Family = kasminaFamilies },
		"other family": func(f *KasminaForward) { f.Family, f.Chunk = KasminaRing, 3 },
	} {
		f := KasminaForward{KasminaLayer: l}
		change(&f)
		if g.KasminaForward(g.stream, f) == nil {
			t.Errorf("%s: no error", what)
		}
	}
	for what, change := range map[string]func(*KasminaBackward){
		"chunk in place":     func(b *KasminaBackward) { b.Chunk = 3 },
		"long one in place":  func(b *KasminaBackward) { b.Chunk = 33 * vector(f32) },
		"alignment in place": func(b *KasminaBackward) { b.DX, b.G = 4, 4 },
	} {
		b := KasminaBackward{KasminaLayer: l}
		change(&b)
		if g.KasminaBackward(g.stream, b) == nil {
			t.Errorf("%s: no error", what)
		}
	}
	if g.KasminaWideBackward(g.stream, KasminaBackward{KasminaLayer: l}, KasminaWide{Width: 8}) == nil {
		t.Error("wide slots in place: no error")
	}
}
