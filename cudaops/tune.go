package cudaops

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/tune"
	"github.com/kasmina-go/kasmina/internal/plan"
)

// Tuning says how a machine finds the fastest way to compute a matrix product of those that cuBLASLt has. Another way adds
// in another order: only with the same ways do two machines compute the same bits.
type Tuning uint8

// The kinds of tuning. What was timed is stored in the file kasmina/tune.json of the user's cache directory, by card, driver,
// version of cuBLASLt, shape and types.
const (
	TuneOff    = Tuning(tune.Off)    // time nothing, take what cuBLASLt proposes first
	TuneCached = Tuning(tune.Cached) // take what is stored, and time, once, what is not
	TuneFull   = Tuning(tune.Full)   // time anew, and replace what is stored
)

// WithTuning sets the tuning. The default is TuneOff with the precision [Float32] and else TuneCached. The environment
// variable KASMINA_TUNE (off, cached or full) has precedence. Timing takes about a second for a model, at NewMachine and at
// [Machine.SetOptimizer].
func WithTuning(t Tuning) MachineOption {
	return func(c *machineConfig) error {
		if t < TuneOff || t > TuneFull {
			return fmt.Errorf("WithTuning: got %d, want TuneOff, TuneCached or TuneFull", t)
		}
		c.tuning = tune.Mode(t)
		return nil
	}
}

// setTuning resolves what the options and the environment say.
func (m *Machine) setTuning() error {
	c := &m.config
	if c.tuning == tune.Default {
		if c.tuning = tune.Cached; c.act == float32s {
			c.tuning = tune.Off
		}
	}
	var err error
	if c.tuning, err = tune.Override(c.tuning); err != nil || c.tuning == tune.Off {
		return err
	}
	if c.tuneLeast == 0 {
		c.tuneLeast = tuneLeast
	}
	path := c.tunePath
	if path == "" {
		if path, err = tune.DefaultPath(); err != nil {
			m.warn(fmt.Sprintf("the choices of tuning cannot be stored: %v", err))
		}
	}
	m.choices = tune.Open(path, m.warn)
	return nil
}

const (
	// tuneLeast is the multiplications and additions from which on a product is worth timing.
	tuneLeast = 1e9
	// tuneWays is how many ways are timed, of those that cuBLASLt thinks the fastest, and tuneRounds how often.
	tuneWays, tuneRounds = 12, 7
	// tuneGain is what another way must save to take the place of cuBLASLt's first: less than that is noise.
	tuneGain = 0.01
	// tuneApart is by how much two ways may differ, as ‖x − y‖/‖x‖; both round 16-bit results or add long sums.
	tuneApart = 2e-2
)

// planned is a product and the way to compute it.
type planned struct {
	driver.MatmulPlan
	way int
}

// run enqueues the product.
func (p *planned) run(a driver.MatmulArgs, s driver.Stream) error { return p.Run(p.way, a, s) }

// key names everything that the choice of a way depends on.
func (b *matmuls) key(blas driver.Blas, spec driver.MatmulSpec) string {
	d := b.m.device
	return fmt.Sprintf("%s, CUDA %d, cuBLASLt %d, workspace %d, matmul %+v", d.info.Name, d.version, blas.Version(), workspaceBytes, spec)
}

// worthTiming reports whether the machine's tuning is for such a product.
func (b *matmuls) worthTiming(m driver.MatmulSpec) bool {
	return b.m.choices != nil && 2*float64(m.M)*float64(m.N)*float64(m.K)*float64(m.Batch) >= b.m.config.tuneLeast
}

// choose takes the stored way, or notes that the product is to be timed.
func (b *matmuls) choose(p *planned, key string) {
	var id [8]uint64
	if b.m.config.tuning == tune.Cached && b.m.choices.Get(key, &id, b.m.warn) {
		way := slices.IndexFunc(p.Algos(), func(a driver.Algo) bool { return a.ID == id })
		if way >= 0 {
			p.way = way
			return
		}
	}
	b.pending = append(b.pending, pending{p, key})
}

// pending is a product that is to be timed.
type pending struct {
	*planned
	key string
}

// tune times the products that have been planned since the last time. If there is no memory to do so, it warns.
func (b *matmuls) tune() error {
	todo := b.pending
	b.pending = nil
	if len(todo) == 0 {
		return nil
	}
	t, err := newTimer(b, todo)
	if err != nil {
		b.m.warn(fmt.Sprintf("matrix products are not tuned: %v", err))
		return t.close()
	}
	chosen := map[string]any{}
	for _, p := range todo {
		if p.way, err = t.fastest(p.MatmulPlan); err != nil {
			return errors.Join(fmt.Errorf("timing a matrix product: %w", err), t.close())
		}
		chosen[p.key] = p.Algos()[p.way].ID
	}
	if err := b.m.choices.Put(chosen); err != nil {
		b.m.warn(err.Error())
	}
	return t.close()
}

// timer times products on operands of its own.
type timer struct {
	*matmuls
	memory                   driver.Ptr
	first, second, out, cold driver.Ptr
	coldBytes                int
	events                   []driver.Event
}

// newTimer allocates operands for the largest of the products, filled with random numbers: zeros cost less power, and so
// less time. To be closed also on an error.
func newTimer(b *matmuls, todo []pending) (*timer, error) {
	t := &timer{matmuls: b, coldBytes: 2 * b.m.device.info.L2}
	var bytes [3]int
	for _, p := range todo {
		for i, n := range operandBytes(p.Spec()) {
			bytes[i] = max(bytes[i], plan.Align(n, alignment))
		}
	}
	var err error
	if t.memory, err = b.m.alloc(bytes[0]+bytes[1]+bytes[2]+t.coldBytes, "timing"); err != nil {
		return t, err
	}
	t.first = t.memory
	t.second = t.first.Offset(bytes[0])
	t.out = t.second.Offset(bytes[1])
	t.cold = t.out.Offset(bytes[2])
	return t, nil
}

func (t *timer) close() error {
	var errs []error
	for _, e := range t.events {
		errs = append(errs, t.m.device.ctx.DestroyEvent(e))
	}
	if t.memory != 0 {
		errs = append(errs, t.m.free(t.memory))
	}
	return errors.Join(errs...)
}

// operandBytes is the memory of A, B and D.
func operandBytes(m driver.MatmulSpec) [3]int {
	rowsA, rowsB := m.M, m.K
	if m.TransA {
		rowsA = m.K
	}
	if m.TransB {
		rowsB = m.N
	}
	return [3]int{((m.Batch-1)*m.StrideA + rowsA*m.LDA) * m.A.Size(), ((m.Batch-1)*m.StrideB + rowsB*m.LDB) * m.B.Size(),
		((m.Batch-1)*m.StrideD + m.M*m.LDD) * m.D.Size()}
}

// fill puts random numbers of a type into memory: some, again and again.
func (t *timer) fill(p driver.Ptr, bytes int, dt driver.DType) error {
	const some = 1 << 16
	r := rand.New(rand.NewPCG(1, uint64(dt)))
	x := make([]float32, some)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	e := elemOfType(dt)
	raw := make([]byte, some*e.size())
	encodeFloats(raw, e, x)
	ctx, s := t.m.device.ctx, t.m.stream
	done := min(bytes, len(raw))
	err := ctx.CopyToDevice(p, raw[:done], s)
	for ; err == nil && done < bytes; done += min(done, bytes-done) {
		err = ctx.CopyOnDevice(p.Offset(done), p, min(done, bytes-done), s)
	}
	return err
}

// elemOfType is the elem that is stored as dt.
func elemOfType(dt driver.DType) elem {
	for _, e := range []elem{float16s, bfloat16s} {
		if e.dtype() == dt {
			return e
		}
	}
	return float32s
}

// fastest returns the way that computes a product in the least time, with none of its operands in the L2. Ways that fail, or
// whose result is not that of the first, do not count.
func (t *timer) fastest(p driver.MatmulPlan) (int, error) {
	m, bytes := p.Spec(), operandBytes(p.Spec())
	if err := t.fill(t.first, bytes[0], m.A); err != nil {
		return 0, err
	}
	if err := t.fill(t.second, bytes[1], m.B); err != nil {
		return 0, err
	}
	n := len(p.Algos())
	ok := make([]int, 0, n)
	var want []float32
	for i := range n { // the first run also loads the kernel
		got, err := t.result(p, i, bytes[2])
		if errors.As(err, new(driver.BlasStatus)) {
			t.drop(p, i, err.Error())
			continue
		}
		if err != nil {
			return 0, err
		}
		if want == nil {
			want = got
		}
		if d := apartBy(got, want); d > tuneApart || d != d {
			t.drop(p, i, fmt.Sprintf("its result differs by %.2g from that of the first", d))
			continue
		}
		ok = append(ok, i)
	}
	if len(ok) == 0 {
		return 0, fmt.Errorf("all %d ways of cuBLASLt to compute %+v fail", n, m)
	}
	times, err := t.times(p, ok)
	if err != nil {
		return 0, err
	}
	best := slices.MinFunc(ok, func(i, j int) int { return cmp.Compare(times[i], times[j]) })
	if float64(times[best]) > (1-tuneGain)*float64(times[ok[0]]) {
		best = ok[0]
	}
	return best, nil
}

// times returns the median time of each way. All runs are enqueued together and the ways take turns, so that each meets the
// clock rates of a GPU at work.
func (t *timer) times(p driver.MatmulPlan, ways []int) (map[int]time.Duration, error) {
	ctx, s := t.m.device.ctx, t.m.stream
	t.m.choices.Timed(tuneRounds * len(ways))
	for len(t.events) < 2*tuneRounds*len(ways) {
		e, err := ctx.NewEvent(true)
		if err != nil {
			return nil, err
		}
		t.events = append(t.events, e)
	}
	at := 0
	for range tuneRounds {
		for _, way := range ways {
			from, to := t.events[at], t.events[at+1]
			at += 2
			if err := ctx.Memset8(t.cold, 0, t.coldBytes, s); err != nil {
				return nil, err
			}
			if err := ctx.Record(from, s); err != nil {
				return nil, err
			}
			if err := t.run(p, way); err != nil {
				return nil, err
			}
			if err := ctx.Record(to, s); err != nil {
				return nil, err
			}
		}
	}
	if err := ctx.SyncStream(s); err != nil {
		return nil, err
	}
	medians := map[int]time.Duration{}
	for i, way := range ways {
		var all []time.Duration
		for round := range tuneRounds {
			k := 2 * (round*len(ways) + i)
			d, err := ctx.Elapsed(t.events[k], t.events[k+1])
			if err != nil {
				return nil, err
			}
			all = append(all, d)
		}
		slices.Sort(all)
		medians[way] = all[len(all)/2]
	}
	return medians, nil
}

func (t *timer) drop(p driver.MatmulPlan, way int, why string) {
	t.m.warn(fmt.Sprintf("way %d of cuBLASLt to compute %+v is not used: %s", way, p.Spec(), why))
}

func (t *timer) run(p driver.MatmulPlan, way int) error {
	return p.Run(way, driver.MatmulArgs{Alpha: 1, A: t.first, B: t.second, C: t.out, D: t.out, Workspace: t.workspace, WorkspaceSize: workspaceBytes},
		t.m.stream)
}

// result is the first numbers of what one run computes.
func (t *timer) result(p driver.MatmulPlan, way, bytes int) ([]float32, error) {
	ctx, s, e := t.m.device.ctx, t.m.stream, elemOfType(p.Spec().D)
	if err := ctx.Memset8(t.out, 0xff, bytes, s); err != nil { // NaN
		return nil, err
	}
	if err := t.run(p, way); err != nil {
		return nil, err
	}
	raw := make([]byte, min(bytes, 1<<18))
	if err := ctx.CopyToHost(raw, t.out, s); err != nil {
		return nil, err
	}
	if err := ctx.SyncStream(s); err != nil {
		return nil, err
	}
	x := make([]float32, len(raw)/e.size())
	decodeFloats(x, e, raw)
	return x, nil
}

// apartBy is ‖x − y‖/‖y‖, and NaN where any number is.
func apartBy(x, y []float32) float64 {
	var diff, norm float64
	for i := range x {
		d := float64(x[i]) - float64(y[i])
		diff += d * d
		norm += float64(y[i]) * float64(y[i])
	}
	if diff == 0 {
		return 0
	}
	return math.Sqrt(diff / norm)
}
