package choose

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/run"
)

const (
	// tuneRounds is how often each variant that is not hopeless is timed.
	tuneRounds = 7
	// tuneGain is what another variant must save to take the place of the first: less than that is
	// noise.
	tuneGain = 0.01
	// tuneHopeless is the multiple of the best time beyond which a variant is timed no more than at
	// first, tuneFirst times: a host that is held up once makes no variant look hopeless.
	tuneHopeless, tuneFirst = 1.5, 3
	// loadNear is the multiple of the best time within which variants are timed under load too, the
	// loadMost fastest of them.
	loadNear, loadMost = 1.05, 3
	// loadLeast is the time from which on a job is worth that.
	loadLeast = 30 * time.Microsecond
	// loadLong is the time from which on a job is worth two looks, at loadLongMost variants within
	// loadLongNear: it is one of a large model, whose training outlasts a longer start.
	loadLong                   = 400 * time.Microsecond
	loadLongNear, loadLongMost = 1.08, 6
	// loadHeat is how long a GPU runs before that. Then each variant runs for loadSettle, and loadSpan is
	// timed. What a variant draws shows in the clock only by and by: of a change two thirds are there
	// after 35 ms, on an H100.
	loadHeat, loadSettle, loadSpan = 50 * time.Millisecond, 50 * time.Millisecond,
		25 * time.Millisecond
)

// tolerance is by how much the results of two variants may differ, as ‖x − y‖/‖y‖: both round, and add
// in orders of their own.
func tolerance(t gpu.DType) float64 {
	if t == gpu.Float32 {
		return 1e-3
	}
	return 2e-2
}

// timer times the variants of a job on memory of its own.
type timer struct {
	*Chooser
	program.Group
	memory     run.Memory
	pieces     map[*program.Buffer]*piece
	order      []*program.Buffer // of pieces
	results    []*piece
	flush      gpu.Ptr // what the cache is overwritten with
	flushBytes int
	cold       []time.Duration // of each variant
	took       []time.Duration // by which variants are compared
}

// piece is memory that stands for a buffer, from the byte at which the lowest of its operands
// begins.
type piece struct {
	from, to  int // bytes into the buffer
	at        gpu.Ptr
	kind      gpu.DType
	random    bool // it is read before it is written
	deviation float64
	data      []float32
}

func (p *piece) bytes() int { return p.to - p.from }

// newTimer allocates a job's operands, and fills those that are read with random numbers: zeros
// cost less power, and so less time. To be closed also on an error.
func newTimer(t *Chooser, j program.Group) (*timer, error) {
	n := len(j.Alternatives)
	x := &timer{Chooser: t, Group: j, memory: run.Memory{Ctx: t.x.Ctx},
		flushBytes: max(1, 2*t.Device.L2),
		cold:       make([]time.Duration, n), took: make([]time.Duration, n),
		pieces: map[*program.Buffer]*piece{}}
	for _, a := range j.Alternatives {
		x.gather(a.Calls)
	}

	for _, r := range j.Results {
		if p := x.pieces[r.Buffer]; !slices.Contains(x.results, p) {
			x.results = append(x.results, p)
		}
	}

	var err error
	x.flush, err = x.memory.Alloc(x.flushBytes, "timing")
	for i, b := range x.order {
		p := x.pieces[b]
		if err == nil {
			p.at, err = x.memory.Alloc(max(1, p.bytes()), "timing")
		}
		if err == nil {
			err = x.fill(p, uint64(i))
		}
	}

	return x, err
}

// gather finds the operands of calls, which are made one after the other.
func (x *timer) gather(calls []*program.Call) {
	written := map[*program.Buffer]bool{}
	for _, c := range calls {
		for _, a := range c.Args {
			if !a.Bound() || a.Role == program.Untimed {
				continue
			}
			p := x.pieces[a.Buffer]
			from := a.At / program.Alignment * program.Alignment
			if p == nil {
				p = &piece{from: from, kind: a.Type, data: a.Data, deviation: 1}
				x.pieces[a.Buffer], x.order = p, append(x.order, a.Buffer)
			}
			p.from, p.to = min(p.from, from), max(p.to, a.At+a.Span())
			if a.Deviation > 0 {
				p.deviation = a.Deviation
			}
			if (a.Role == program.Read || a.Role == program.Update) && !written[a.Buffer] {
				p.random = true
			}
		}
		for _, a := range c.Args {
			written[a.Buffer] = written[a.Buffer] || a.Role != program.Read
		}
	}
}

// address is where an operand's stand-in lies, null where there is none.
func (x *timer) address(a *program.Array) gpu.Ptr {
	p := x.pieces[a.Buffer]
	if p == nil {
		return 0
	}
	return p.at.Offset(a.At - p.from)
}

// fill puts into a piece what is to be read there. That is what its buffer holds, zeros where
// integers are, and else some random numbers, again and again.
func (x *timer) fill(p *piece, seed uint64) error {
	ctx, s := x.x.Ctx, x.x.Stream
	switch {
	case p.data != nil:
		return ctx.CopyToDevice(p.at, gpu.Bytes(p.data)[p.from:p.to], s)
	case !p.random:
		return nil
	case p.kind == gpu.Int64:
		return ctx.Memset8(p.at, 0, p.bytes(), s)
	}
	return run.Fill(ctx, s, p.at, p.bytes(), p.kind, p.deviation, seed)
}

// fastest returns the variant of some that computes the job in the least time. Variants that fail, or whose
// result is not that of the plain one, do not count; it is -1 if none is left.
func (x *timer) fastest(variants []int) (int, error) {
	live, err := x.right(variants)
	if err != nil {
		return 0, err
	}

	if len(live) > 1 && live[0] != x.Plain {
		// which is there to be compared with
		live = slices.DeleteFunc(live, func(i int) bool { return i == x.Plain })
	}

	if len(live) == 0 {
		return -1, nil
	}

	if err := x.time(live, tuneFirst); err != nil {
		return 0, err
	}

	live = x.within(live, tuneHopeless)
	if len(live) > 1 {
		if err := x.time(live, tuneRounds); err != nil {
			return 0, err
		}
		if live, err = x.underLoad(live); err != nil {
			return 0, err
		}
	}

	return slices.MinFunc(live, func(i, j int) int {
		return cmp.Compare(x.key(i, variants[0]), x.key(j, variants[0]))
	}), nil
}

// within returns those of some variants, the fastest first, that take at most so many times as long as
// that.
func (x *timer) within(variants []int, times float64) []int {
	near := slices.Clone(variants)
	slices.SortStableFunc(near, func(i, j int) int { return cmp.Compare(x.took[i], x.took[j]) })
	most := times * float64(x.took[near[0]])
	return slices.DeleteFunc(near, func(i int) bool { return float64(x.took[i]) > most })
}

// contenders returns the variants that are worth timing under load, and whether the job is long.
func (x *timer) contenders(live []int) (near []int, long bool) {
	near, most := x.within(live, loadNear), loadMost
	if long = x.took[near[0]] >= loadLong; long {
		near, most = x.within(live, loadLongNear), loadLongMost
	}
	return near[:min(len(near), most)], long
}

// underLoad returns the variants that come near the best, timed as in a long computation, where that
// may tell them apart. A card's arithmetic is bound by the power that it may draw. The variant that is
// the fastest for a moment may draw more than others. But at that limit the clock of a card is never
// quite the same. So long jobs are timed there and back, and a variant counts by the mean of both. A
// shorter job is timed once, and a variant counts by the geometric mean of what it takes so and at the
// full clock.
func (x *timer) underLoad(live []int) ([]int, error) {
	near, long := x.contenders(live)
	if len(near) < 2 || x.took[near[0]] < loadLeast {
		return live, nil
	}

	turns := near
	if long {
		back := slices.Clone(near)
		slices.Reverse(back)
		turns = slices.Concat(near, back)
	}

	runs := func(variant int, d time.Duration) int { return int(d/x.cold[variant]) + 1 }
	repeat := func(variant int, d time.Duration) error {
		for range runs(variant, d) {
			if err := x.run(variant); err != nil {
				return err
			}
		}
		return nil
	}

	took, err := run.Times(x.x.Ctx, x.x.Stream, len(turns), func(i int) error {
		settle := loadSettle
		if i == 0 {
			settle += loadHeat
		}
		return repeat(turns[i], settle)
	}, func(i int) error { return repeat(turns[i], loadSpan) })
	if err != nil {
		return nil, err
	}

	for i, variant := range near {
		if long {
			both := took[i] + took[len(turns)-1-i]
			x.took[variant] = both / time.Duration(2*runs(variant, loadSpan))
			continue
		}
		loaded := float64(took[i]) / float64(runs(variant, loadSpan))
		x.took[variant] = time.Duration(math.Sqrt(float64(x.cold[variant]) * loaded))
	}

	return near, nil
}

// key is what a variant is chosen by: its time, where the first has a little advance.
func (x *timer) key(variant, first int) float64 {
	if variant == first {
		return (1 - tuneGain) * float64(x.took[variant])
	}
	return float64(x.took[variant])
}

// right returns those of some variants that work, and whose result is that of the plain variant. Where that
// fails itself, or computes NaN, the first that works takes its place. The run also loads the
// kernels. A fault that loses the context is an error.
func (x *timer) right(variants []int) ([]int, error) {
	plain := x.Plain
	var want [][]float32
	good := map[int]bool{}
	for k, i := range append([]int{plain}, variants...) {
		if k > 0 && i == x.Plain {
			continue
		}
		got, err := x.result(i)
		var e *gpu.Error
		if errors.As(err, &e) && e.Sticky() {
			return nil, err
		}
		if err == nil && !finite(got) {
			err = errors.New("its result holds NaN or infinity")
		}
		if err == nil && want == nil {
			plain, want = i, got
		}
		if err == nil {
			err = x.compare(got, want, plain)
		}
		if err != nil {
			x.Warn(fmt.Sprintf("%s %s is not computed in the variant %s: %v", x.Op, x.Shape,
				x.Alternatives[i].Name, err))
			continue
		}
		good[i] = true
	}

	return slices.DeleteFunc(slices.Clone(variants), func(i int) bool { return !good[i] }), nil
}

// run enqueues the job in some variant.
func (x *timer) run(variant int) error {
	a := x.Alternatives[variant]
	for _, c := range a.Calls {
		if a.Variant != nil {
			c.SetVariant(*a.Variant)
		}
		if err := x.x.Launch(c.Bind(x.address)); err != nil {
			return err
		}
	}
	return nil
}

// time sets the median times of some variants, which take turns, with a cold cache.
func (x *timer) time(variants []int, rounds int) error {
	took, err := run.Times(x.x.Ctx, x.x.Stream, rounds*len(variants), func(int) error {
		return x.x.Ctx.Memset8(x.flush, 0, x.flushBytes, x.x.Stream)
	}, func(i int) error { return x.run(variants[i%len(variants)]) })
	if err != nil {
		return err
	}

	for i, variant := range variants {
		var all []time.Duration
		for ; i < len(took); i += len(variants) {
			all = append(all, took[i])
		}
		x.cold[variant] = run.Median(all)
		x.took[variant] = x.cold[variant]
	}

	return nil
}

// result is the first and the last numbers of each result of a variant.
func (x *timer) result(variant int) ([][]float32, error) {
	ctx, s := x.x.Ctx, x.x.Stream
	for _, p := range x.results {
		if err := ctx.Memset8(p.at, 0xff, p.bytes(), s); err != nil { // NaN
			return nil, err
		}
	}

	if err := x.run(variant); err != nil {
		return nil, err
	}

	var results [][]float32
	for _, p := range x.results {
		raw := make([]byte, min(p.bytes(), 1<<17)/p.kind.Size()*p.kind.Size())
		for _, at := range []int{0, p.bytes() - len(raw)} {
			if err := ctx.CopyToHost(raw, p.at.Offset(at), s); err != nil {
				return nil, err
			}
			results = append(results, written(raw, p.kind))
		}
	}

	return results, nil
}

// written returns the numbers of a result. A NaN that a variant has computed is infinity here. So a NaN
// is what result has put there, between rows.
func written(raw []byte, kind gpu.DType) []float32 {
	numbers, size := make([]float32, len(raw)/kind.Size()), kind.Size()
	gpu.Decode(numbers, kind, raw)
	touched := func(b byte) bool { return b != 0xff }
	for i, x := range numbers {
		if x != x && slices.ContainsFunc(raw[i*size:(i+1)*size], touched) {
			numbers[i] = float32(math.Inf(1))
		}
	}
	return numbers
}

// compare says what is wrong with a result, of which the other is that of the plain variant.
func (x *timer) compare(got, want [][]float32, plain int) error {
	for i := range got {
		if d := distance(got[i], want[i]); !(d <= tolerance(x.results[i/2].kind)) {
			return fmt.Errorf("its result differs by %.2g from that of %s", d,
				x.Alternatives[plain].Name)
		}
	}
	return nil
}

// finite reports whether a result has a distance to itself, so that others can be compared with it.
func finite(result [][]float32) bool {
	return !slices.ContainsFunc(result, func(x []float32) bool { return distance(x, x) != 0 })
}

// distance is ‖x − y‖/‖y‖ over what is written: between rows there may be gaps, where both are NaN
// as before. It is NaN where one is, or all are.
func distance(x, y []float32) float64 {
	var diff, norm float64
	written := false
	for i := range x {
		if x[i] != x[i] && y[i] != y[i] {
			continue
		}
		written = true
		d := float64(x[i]) - float64(y[i])
		diff += d * d
		norm += float64(y[i]) * float64(y[i])
	}

	switch {
	case !written:
		return math.NaN()
	case diff == 0:
		return 0
	}

	return math.Sqrt(diff / norm)
}
