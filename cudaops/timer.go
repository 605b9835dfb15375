package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/plan"
)

const (
	// tuneRounds is how often each way that is not hopeless is timed.
	tuneRounds = 7
	// tuneGain is what another way must save to take the place of the first: less than that is noise.
	tuneGain = 0.01
	// tuneHopeless is the multiple of the best time beyond which a way is timed only once.
	tuneHopeless = 1.5
	// tuneFloor is the share of the memory's nominal bandwidth at which there is nothing left to gain.
	tuneFloor = 0.95
)

// argument is memory that a job works on.
type argument struct {
	bytes     int
	elem      elem
	role      role
	data      []byte  // given
	deviation float64 // the standard deviation of random numbers; 0 counts as 1
}

// role is what an argument is for.
type role uint8

const (
	reads   role = iota // random numbers
	writes              // numbers that are compared
	given               // data, once
	zeroed              // before every run
	scratch             // anything
)

// tolerance is by how much the results of two ways may differ, as ‖x − y‖/‖y‖: both round, and add in orders of their own.
func (e elem) tolerance() float64 {
	if e == float32s {
		return 1e-3
	}
	return 2e-2
}

// timer times the ways of a job on memory of its own.
type timer struct {
	*tuner
	j          job
	owned      gpu.Ptr
	memory     []gpu.Ptr // of each argument
	flush      gpu.Ptr   // what the cache is overwritten with
	flushBytes int
	events     []gpu.Event
	cold, warm []time.Duration
}

// newTimer allocates a job's arguments, and fills those that are read with random numbers: zeros cost less power, and so less
// time. To be closed also on an error.
func newTimer(t *tuner, j job) (*timer, error) {
	ctx, s := t.m.device.ctx, t.m.stream
	x := &timer{tuner: t, j: j, flushBytes: plan.Align(2*t.m.device.info.L2, alignment), cold: make([]time.Duration, len(j.ways)),
		warm: make([]time.Duration, len(j.ways))}
	total := x.flushBytes
	for _, o := range j.arguments {
		total += plan.Align(o.bytes, alignment)
	}
	var err error
	if x.owned, err = t.m.alloc(max(1, total), "timing"); err != nil {
		return x, err
	}
	x.flush = x.owned
	at := x.owned.Offset(x.flushBytes)
	for i, o := range j.arguments {
		x.memory = append(x.memory, at)
		switch o.role {
		case reads:
			err = x.fill(at, o, uint64(i))
		case given:
			err = ctx.CopyToDevice(at, o.data, s)
		}
		if err != nil {
			return x, err
		}
		at = at.Offset(plan.Align(o.bytes, alignment))
	}
	return x, nil
}

func (x *timer) close() error {
	var errs []error
	for _, e := range x.events {
		errs = append(errs, x.m.device.ctx.DestroyEvent(e))
	}
	if x.owned != 0 {
		errs = append(errs, x.m.free(x.owned))
	}
	return errors.Join(errs...)
}

// fill puts random numbers into an argument: some, again and again.
func (x *timer) fill(p gpu.Ptr, o argument, seed uint64) error {
	const some = 1 << 16
	r := rand.New(rand.NewPCG(1, seed))
	numbers := make([]float32, some)
	deviation := cmp.Or(o.deviation, 1)
	for i := range numbers {
		numbers[i] = float32(deviation * r.NormFloat64())
	}
	raw := make([]byte, some*o.elem.size())
	encodeFloats(raw, o.elem, numbers)
	ctx, s := x.m.device.ctx, x.m.stream
	done := min(o.bytes, len(raw))
	err := ctx.CopyToDevice(p, raw[:done], s)
	for ; err == nil && done < o.bytes; done += min(done, o.bytes-done) {
		err = ctx.CopyOnDevice(p.Offset(done), p, min(done, o.bytes-done), s)
	}
	return err
}

// fastest returns the way of some that computes the job in the least time. Ways that fail, or whose result is not that of the
// plain one, do not count; it is -1 if none is left.
func (x *timer) fastest(ways []int) (int, error) {
	live, err := x.right(ways)
	if err != nil {
		return 0, err
	}
	if x.j.computes && len(live) > 1 && live[0] != x.j.plain {
		live = slices.DeleteFunc(live, func(i int) bool { return i == x.j.plain }) // which is there to be compared with
	}
	if len(live) == 0 {
		return -1, nil
	}
	if err := x.time(live, 1); err != nil { // which tells the hopeless ones
		return 0, err
	}
	best := x.took(slices.MinFunc(live, func(i, j int) int { return cmp.Compare(x.took(i), x.took(j)) }))
	live = slices.DeleteFunc(live, func(i int) bool { return float64(x.took(i)) > tuneHopeless*float64(best) })
	if len(live) > 1 && best > x.floor() {
		if err := x.time(live, tuneRounds); err != nil {
			return 0, err
		}
	}
	return slices.MinFunc(live, func(i, j int) int { return cmp.Compare(x.key(i, ways[0]), x.key(j, ways[0])) }), nil
}

// key is what a way is chosen by: its time, where the first has a little advance.
func (x *timer) key(way, first int) float64 {
	if way == first {
		return (1 - tuneGain) * float64(x.took(way))
	}
	return float64(x.took(way))
}

// right returns those of some ways that work, and whose result is that of the plain way or, where that fails itself, of the
// first that works. The run also loads the kernels. A fault that loses the context is an error.
func (x *timer) right(ways []int) ([]int, error) {
	plain := x.j.plain
	var want [][]float32
	good := map[int]bool{}
	for k, i := range append([]int{plain}, ways...) {
		if k > 0 && i == x.j.plain {
			continue
		}
		got, err := x.result(i)
		var e *gpu.Error
		if errors.As(err, &e) && e.Sticky() {
			return nil, err
		}
		if err == nil && want == nil {
			plain, want = i, got
		}
		if err == nil {
			err = x.compare(got, want, plain)
		}
		if err != nil {
			x.drop(x.j, i, err)
			continue
		}
		good[i] = true
	}
	return slices.DeleteFunc(slices.Clone(ways), func(i int) bool { return !good[i] }), nil
}

// took is the time by which ways are compared.
func (x *timer) took(way int) time.Duration {
	if x.j.warm {
		return x.warm[way]
	}
	return x.cold[way]
}

// floor is the least time in which arguments that are not in the cache can move, so that to look on is in vain.
func (x *timer) floor() time.Duration {
	d := x.m.device.info
	perSecond := 2 * 1e3 * float64(d.MemoryClock) * float64(d.MemoryBusBits) / 8
	if x.j.warm || x.j.computes || perSecond == 0 {
		return 0
	}
	bytes := 0
	for _, o := range x.j.arguments {
		if o.role == reads || o.role == writes {
			bytes += o.bytes
		}
	}
	return time.Duration(float64(bytes) / (tuneFloor * perSecond) * 1e9)
}

// run enqueues the job in some way.
func (x *timer) run(way int) error {
	for i, o := range x.j.arguments {
		if o.role == zeroed {
			if err := x.m.device.ctx.Memset8(x.memory[i], 0, o.bytes, x.m.stream); err != nil {
				return err
			}
		}
	}
	return x.j.run(way, x.memory)
}

// time sets the median times of some ways. In each of the rounds a way runs with a cold cache and then again with a warm one.
// All runs are enqueued together and the ways take turns, so that each meets the clock rates of a GPU at work.
func (x *timer) time(ways []int, rounds int) error {
	ctx, s := x.m.device.ctx, x.m.stream
	x.store.Timed(rounds * len(ways))
	for len(x.events) < 3*rounds*len(ways) {
		e, err := ctx.NewEvent(true)
		if err != nil {
			return err
		}
		x.events = append(x.events, e)
	}
	marks := x.events
	mark := func() error {
		e := marks[0]
		marks = marks[1:]
		return ctx.Record(e, s)
	}
	for range rounds {
		for _, way := range ways {
			flush, run := func() error { return ctx.Memset8(x.flush, 0, x.flushBytes, s) }, func() error { return x.run(way) }
			if err := inTurn(flush, mark, run, mark, run, mark); err != nil {
				return err
			}
		}
	}
	if err := ctx.SyncStream(s); err != nil {
		return err
	}
	for i, way := range ways {
		for k, median := range []*time.Duration{&x.cold[way], &x.warm[way]} {
			var all []time.Duration
			for round := range rounds {
				at := 3*(round*len(ways)+i) + k
				d, err := ctx.Elapsed(x.events[at], x.events[at+1])
				if err != nil {
					return err
				}
				all = append(all, d)
			}
			slices.Sort(all)
			*median = all[len(all)/2]
		}
	}
	return nil
}

// result is the first and the last numbers of each array that a way writes.
func (x *timer) result(way int) ([][]float32, error) {
	ctx, s := x.m.device.ctx, x.m.stream
	for i, o := range x.j.arguments {
		if o.role == writes {
			if err := ctx.Memset8(x.memory[i], 0xff, o.bytes, s); err != nil { // NaN
				return nil, err
			}
		}
	}
	if err := x.run(way); err != nil {
		return nil, err
	}
	var results [][]float32
	for i, o := range x.j.arguments {
		if o.role != writes {
			continue
		}
		raw := make([]byte, min(o.bytes, 1<<17))
		for _, at := range []int{0, o.bytes - len(raw)} {
			if err := ctx.CopyToHost(raw, x.memory[i].Offset(at), s); err != nil {
				return nil, err
			}
			if err := ctx.SyncStream(s); err != nil {
				return nil, err
			}
			numbers := make([]float32, len(raw)/o.elem.size())
			decodeFloats(numbers, o.elem, raw)
			results = append(results, numbers)
		}
	}
	return results, nil
}

// compare says what is wrong with a result, of which the other is that of the plain way.
func (x *timer) compare(got, want [][]float32, plain int) error {
	part := 0
	for _, o := range x.j.arguments {
		if o.role != writes {
			continue
		}
		for range 2 {
			if d := apartBy(got[part], want[part]); !(d <= o.elem.tolerance()) {
				return fmt.Errorf("its result differs by %.2g from that of %s", d, x.j.ways[plain])
			}
			part++
		}
	}
	return nil
}

// apartBy is ‖x − y‖/‖y‖ over what is written: between rows there may be gaps, where both are NaN as before. It is NaN where
// one is, or all are.
func apartBy(x, y []float32) float64 {
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
