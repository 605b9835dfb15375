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
	// timingRounds is the number of times that each competitive variant is timed.
	timingRounds = 7
	// minGain is the fraction of time that a variant must save to replace the first. Smaller differences
	// are noise.
	minGain = 0.01
	// eliminateAbove is the multiple of the best time beyond which a variant is eliminated after
	// eliminationRounds timings. Several timings are needed because a single delay of the host could
	// make any variant look slow.
	eliminateAbove, eliminationRounds = 1.5, 3
	// The loadMost fastest variants, if within loadNear times the best time, are also timed under load.
	loadNear, loadMost = 1.05, 3
	// minLoadTime is the shortest time of a group worth timing under load.
	minLoadTime = 30 * time.Microsecond
	// Groups that take at least loadLong are timed under load twice, for up to loadLongMost variants
	// within loadLongNear times the best time. Groups this long occur in large models, where the training
	// time justifies a longer start.
	loadLong                   = 400 * time.Microsecond
	loadLongNear, loadLongMost = 1.08, 6
	// Before timing under load, the GPU warms up for loadWarmUp. Then each variant runs for loadSettle
	// before loadSpan is timed. The clock rate responds slowly to a variant's power draw: on an H100, two
	// thirds of a change is visible after 35 ms.
	loadWarmUp, loadSettle, loadSpan = 50 * time.Millisecond, 50 * time.Millisecond,
		25 * time.Millisecond
)

// tolerance is the maximum difference ‖x − y‖/‖y‖ between the results of two variants, which round
// differently and sum in different orders.
func tolerance(t gpu.DType) float64 {
	if t == gpu.Float32 {
		return 1e-3
	}
	return 2e-2
}

// timer times the variants of a group, using its own memory.
type timer struct {
	*Chooser
	program.Group
	memory     run.Memory
	pieces     map[*program.Buffer]*piece
	order      []*program.Buffer // keys of pieces, in the order they were added
	results    []*piece
	flush      gpu.Ptr // memory that is overwritten to flush the cache
	flushBytes int
	cold       []time.Duration // median times of the variants with a cold cache
	times      []time.Duration // times used to compare variants
}

// piece is memory that replaces a buffer while timing. It covers the range of the buffer from its lowest
// operand to its highest.
type piece struct {
	from, to  int // range of the buffer in bytes
	at        gpu.Ptr
	kind      gpu.DType
	random    bool // read before it is written
	deviation float64
	data      []float32
}

func (p *piece) bytes() int { return p.to - p.from }

// newTimer allocates the operands of a group and fills those read by its calls with random numbers. Zeros
// would take less power and therefore less time. The caller must close the timer's memory even if
// newTimer returns an error.
func newTimer(t *Chooser, j program.Group) (*timer, error) {
	n := len(j.Alternatives)
	x := &timer{Chooser: t, Group: j, memory: run.Memory{Ctx: t.x.Ctx},
		flushBytes: max(1, 2*t.Device.L2),
		cold:       make([]time.Duration, n), times: make([]time.Duration, n),
		pieces: map[*program.Buffer]*piece{}}
	for _, a := range j.Alternatives {
		x.gatherOperands(a.Calls)
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

// gatherOperands finds the operands of calls, given in the order of execution.
func (x *timer) gatherOperands(calls []*program.Call) {
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

// address returns the address of the memory that replaces an operand, or null if the operand was not
// gathered.
func (x *timer) address(a *program.Array) gpu.Ptr {
	p := x.pieces[a.Buffer]
	if p == nil {
		return 0
	}
	return p.at.Offset(a.At - p.from)
}

// fill initializes a piece: with the buffer's own data if it has any, with zeros for integers, and
// otherwise with repeated random numbers.
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

// fastest returns the index of the fastest of the given variants, or -1 if none qualifies. A variant is
// disqualified if it fails or its result differs from the plain variant's result. The plain variant itself
// is not timed if a variant that qualifies precedes it. The error reports a fault that destroys the
// context, or a failure to time the variants.
func (x *timer) fastest(variants []int) (int, error) {
	live, err := x.correct(variants)
	if err != nil {
		return 0, err
	}

	if len(live) > 1 && live[0] != x.Plain {
		// the plain variant serves only as the reference
		live = slices.DeleteFunc(live, func(i int) bool { return i == x.Plain })
	}

	if len(live) == 0 {
		return -1, nil
	}

	if err := x.time(live, eliminationRounds); err != nil {
		return 0, err
	}

	live = x.within(live, eliminateAbove)
	if len(live) > 1 {
		if err := x.time(live, timingRounds); err != nil {
			return 0, err
		}
		if live, err = x.underLoad(live); err != nil {
			return 0, err
		}
	}

	return slices.MinFunc(live, func(i, j int) int {
		return cmp.Compare(x.rankingTime(i, variants[0]), x.rankingTime(j, variants[0]))
	}), nil
}

// within returns the variants that take at most times as long as the fastest variant, ordered by time.
func (x *timer) within(variants []int, times float64) []int {
	near := slices.Clone(variants)
	slices.SortStableFunc(near, func(i, j int) int { return cmp.Compare(x.times[i], x.times[j]) })
	most := times * float64(x.times[near[0]])
	return slices.DeleteFunc(near, func(i int) bool { return float64(x.times[i]) > most })
}

// contenders returns the variants to time under load, and reports whether the group is long.
func (x *timer) contenders(live []int) (near []int, long bool) {
	near, most := x.within(live, loadNear), loadMost
	if long = x.times[near[0]] >= loadLong; long {
		near, most = x.within(live, loadLongNear), loadLongMost
	}
	return near[:min(len(near), most)], long
}

// underLoad times the leading variants as part of a long computation, and returns them.
//
// Under sustained load, a card's arithmetic is limited by power, so the fastest variant in a short burst
// may be slower if it draws more power. At the power limit the clock rate fluctuates. Long groups are
// therefore timed in forward and then in reverse order, and compared by the mean.
//
// Shorter groups are timed once under load, and compared by the geometric mean of this time and the time
// at full clock rate.
func (x *timer) underLoad(live []int) ([]int, error) {
	near, long := x.contenders(live)
	if len(near) < 2 || x.times[near[0]] < minLoadTime {
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
			settle += loadWarmUp
		}
		return repeat(turns[i], settle)
	}, func(i int) error { return repeat(turns[i], loadSpan) })
	if err != nil {
		return nil, err
	}

	for i, variant := range near {
		if long {
			both := took[i] + took[len(turns)-1-i]
			x.times[variant] = both / time.Duration(2*runs(variant, loadSpan))
			continue
		}
		loaded := float64(took[i]) / float64(runs(variant, loadSpan))
		x.times[variant] = time.Duration(math.Sqrt(float64(x.cold[variant]) * loaded))
	}

	return near, nil
}

// rankingTime returns the time used to rank a variant. The first variant gets a small bonus.
func (x *timer) rankingTime(variant, first int) float64 {
	if variant == first {
		return (1 - minGain) * float64(x.times[variant])
	}
	return float64(x.times[variant])
}

// correct returns the variants that work and produce the same result as the plain variant. If the plain
// variant fails or computes a non-finite number, the first working variant serves as the reference
// instead.
//
// Running the variants also loads their kernels. A fault that destroys the context is returned as an
// error.
func (x *timer) correct(variants []int) ([]int, error) {
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

// run enqueues the group's work in the given variant.
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

// time measures the variants in alternation, with a cold cache, and sets their median times.
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
		x.times[variant] = x.cold[variant]
	}

	return nil
}

// result runs a variant and returns the first and last elements of each result.
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
			results = append(results, decodeWritten(raw, p.kind))
		}
	}

	return results, nil
}

// decodeWritten decodes a result. A NaN computed by a variant is returned as infinity, so that NaN
// denotes memory in gaps between rows, which still holds the fill value set by result.
func decodeWritten(raw []byte, kind gpu.DType) []float32 {
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

// compare returns an error if a result differs too much from the reference.
func (x *timer) compare(got, want [][]float32, plain int) error {
	for i := range got {
		if d := distance(got[i], want[i]); !(d <= tolerance(x.results[i/2].kind)) {
			return fmt.Errorf("its result differs by %.2g from that of %s", d,
				x.Alternatives[plain].Name)
		}
	}
	return nil
}

// finite reports whether all elements of a result are finite, so that other results can be compared with
// it.
func finite(result [][]float32) bool {
	return !slices.ContainsFunc(result, func(x []float32) bool { return distance(x, x) != 0 })
}

// distance returns ‖x − y‖/‖y‖ over all elements that were written. Gaps between rows, marked by NaN
// in both results, are ignored. The distance is NaN if an element is NaN in only one result, or if
// nothing was written.
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
