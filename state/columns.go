package state

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"sync"
)

// Schema is the version of the seed state's layout that this package writes; migrate.go says what became of earlier ones.
const Schema = 4

// seedState holds all seeds, one array per field. Figures of 16 bits are stored as their bits.
type seedState struct {
	stage         []uint8
	slot          []uint16 // 0: none
	kind          []uint8
	strategy      []uint8 // index into Lattice.strategies
	alpha         []float32
	epochsInStage []uint16
	lastUpdate    []uint32  // epoch of the last change of stage or α
	performance   []float32 // reported as Float16, judged by its small differences
	stability     []uint16  // Float16

	// Health of the input chunk in the last pass that reported it.
	variance  []float32
	mean      []uint16 // bfloat16
	lowest    []uint16 // bfloat16
	highest   []uint16 // bfloat16
	deadRatio []float32
	snr       []uint16 // bfloat16

	// Gradient of the output chunk in the last pass that reported it.
	gradNorm     []float32
	gradVariance []uint16 // bfloat16
	gradMax      []uint16 // bfloat16

	// Moments of the input chunk, in full precision because clamps and drift depend on differences of them: of the last
	// pass; merged over passes, with their weight in elements; and the merged ones as the last epoch ended.
	stepMean, stepVariance, stepCount []float64
	runMean, runVariance, runCount    []float64
	epochMean, epochVariance          []float64
	drift                             []float32

	// Moments of the norm of the chunk's gradient over rows, merged over passes, with their weight in rows.
	normMean, normVariance, normCount []float64

	nonFiniteX, nonFiniteG []uint32 // NaN and Inf seen so far
	nonFiniteTold          []uint32 // how many of both events have told of
	clips                  []uint64 // rows whose gradient was clipped

	embargoUntil             []uint32 // epoch from which an ended seed may be recycled
	memory0, memory1         []float32
	finished                 []uint8   // 1 once the strategy has taken α to where it ends
	trainingError            []float32 // NaN: not reported
	entryTrainingError       []float32 // when first reported in this stage; NaN: not yet
	slotSum                  []uint32  // of the blueprint's parameters as last reported; 0: not yet
	learning                 []uint8   // what the last report says of them: see liveness
	scored                   []uint32  // the epoch whose end had the latest score; 0: none
	entryLoss                []float32 // the host's loss when first reported in this stage; NaN: not yet
	entryPerformance         []float32 // performance when first reported in this stage, or without the seed; NaN: not yet
	basePerformance          []float32 // performance when first reported after germination, or without the seed; NaN: not yet
	stageErrors, stageTrials []uint32  // reported in this stage

	sinceScore []uint32 // while an epoch ends: epochs from the score before to the new one; 0: there is no new one

	past   [][]uint32 // the last transitions as packed by Transition.pack, the latest first; 0: none
	schema []uint8
	crc    []uint32 // over the seed's number and all fields above
}

// column is one field of the seed state: a name, which is its name in files, and a pointer to its array.
type column struct {
	name  string
	array any
}

// columns lists the fields that the checksum covers, in its order.
func (s *seedState) columns() []column {
	columns := []column{
		{"stage", &s.stage}, {"slot", &s.slot}, {"kind", &s.kind}, {"strategy", &s.strategy}, {"alpha", &s.alpha},
		{"epochs_in_stage", &s.epochsInStage}, {"last_update", &s.lastUpdate},
		{"performance", &s.performance}, {"stability", &s.stability},
		{"variance", &s.variance}, {"mean", &s.mean}, {"min", &s.lowest}, {"max", &s.highest},
		{"dead_ratio", &s.deadRatio}, {"snr", &s.snr},
		{"grad_norm", &s.gradNorm}, {"grad_variance", &s.gradVariance}, {"grad_max", &s.gradMax},
		{"step_mean", &s.stepMean}, {"step_variance", &s.stepVariance}, {"step_count", &s.stepCount},
		{"run_mean", &s.runMean}, {"run_variance", &s.runVariance}, {"run_count", &s.runCount},
		{"epoch_mean", &s.epochMean}, {"epoch_variance", &s.epochVariance}, {"drift", &s.drift},
		{"norm_mean", &s.normMean}, {"norm_variance", &s.normVariance}, {"norm_count", &s.normCount},
		{"nonfinite_x", &s.nonFiniteX}, {"nonfinite_g", &s.nonFiniteG}, {"nonfinite_told", &s.nonFiniteTold},
		{"clips", &s.clips}, {"embargo_until", &s.embargoUntil}, {"memory_0", &s.memory0}, {"memory_1", &s.memory1}, {"finished", &s.finished},
		{"training_error", &s.trainingError}, {"entry_training_error", &s.entryTrainingError},
		{"slot_sum", &s.slotSum}, {"learning", &s.learning}, {"scored", &s.scored}, {"entry_loss", &s.entryLoss},
		{"entry_performance", &s.entryPerformance}, {"base_performance", &s.basePerformance},
		{"stage_errors", &s.stageErrors}, {"stage_trials", &s.stageTrials}, {"schema", &s.schema},
	}
	for k := range s.past {
		columns = append(columns, column{fmt.Sprintf("past_%d", k), &s.past[k]})
	}
	return columns
}

// newSeedState returns n dormant seeds of which nothing has been measured, without checksums, that remember the given number
// of transitions.
func newSeedState(n, transitions int) *seedState {
	s := &seedState{crc: make([]uint32, n), past: make([][]uint32, transitions), sinceScore: make([]uint32, n)}
	for _, c := range s.columns() {
		c.make(n)
	}
	for i := range n {
		s.begin(i)
	}
	return s
}

// begin sets what a new seed has other than zeros.
func (s *seedState) begin(i int) {
	s.schema[i] = Schema
	for _, f := range [][]float32{s.trainingError, s.entryTrainingError, s.entryLoss, s.entryPerformance, s.basePerformance} {
		f[i] = float32(math.NaN())
	}
}

// reset makes a seed a new one.
func (s *seedState) reset(i int) {
	zeros := make([]byte, 8)
	for _, c := range s.columns() {
		c.scatter(zeros, 8, i, i+1)
	}
	s.begin(i)
}

func (c column) make(n int) {
	switch a := c.array.(type) {
	case *[]uint8:
		*a = make([]uint8, n)
	case *[]uint16:
		*a = make([]uint16, n)
	case *[]uint32:
		*a = make([]uint32, n)
	case *[]uint64:
		*a = make([]uint64, n)
	case *[]float32:
		*a = make([]float32, n)
	case *[]float64:
		*a = make([]float64, n)
	}
}

// typ names the element type, as files do.
func (c column) typ() string {
	switch c.array.(type) {
	case *[]uint8:
		return "uint8"
	case *[]uint16:
		return "uint16"
	case *[]uint32:
		return "uint32"
	case *[]uint64:
		return "uint64"
	case *[]float32:
		return "float32"
	default:
		return "float64"
	}
}

// widths are the element types' sizes in bytes.
var widths = map[string]int{"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "float32": 4, "float64": 8}

func rowWidth(columns []column) (bytes int) {
	for _, c := range columns {
		bytes += widths[c.typ()]
	}
	return bytes
}

// gather writes elements lo to hi, little endian, one every stride bytes of dst.
func (c column) gather(dst []byte, stride, lo, hi int) {
	switch a := c.array.(type) {
	case *[]uint8:
		for i, v := range (*a)[lo:hi] {
			dst[i*stride] = v
		}
	case *[]uint16:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint16(dst[i*stride:], v)
		}
	case *[]uint32:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint32(dst[i*stride:], v)
		}
	case *[]uint64:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint64(dst[i*stride:], v)
		}
	case *[]float32:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint32(dst[i*stride:], math.Float32bits(v))
		}
	case *[]float64:
		for i, v := range (*a)[lo:hi] {
			binary.LittleEndian.PutUint64(dst[i*stride:], math.Float64bits(v))
		}
	}
}

// scatter is the inverse of gather.
func (c column) scatter(src []byte, stride, lo, hi int) {
	for i := lo; i < hi; i++ {
		b := src[(i-lo)*stride:]
		switch a := c.array.(type) {
		case *[]uint8:
			(*a)[i] = b[0]
		case *[]uint16:
			(*a)[i] = binary.LittleEndian.Uint16(b)
		case *[]uint32:
			(*a)[i] = binary.LittleEndian.Uint32(b)
		case *[]uint64:
			(*a)[i] = binary.LittleEndian.Uint64(b)
		case *[]float32:
			(*a)[i] = math.Float32frombits(binary.LittleEndian.Uint32(b))
		case *[]float64:
			(*a)[i] = math.Float64frombits(binary.LittleEndian.Uint64(b))
		}
	}
}

// sealBlock is how many seeds' fields are gathered at a time for their checksums: enough to make a loop over one field
// worth its start, few enough to stay in the first-level cache.
const sealBlock = 64

// checksummer computes the seeds' checksums. It may be used by several goroutines at once.
type checksummer struct {
	columns []column
	offsets []int // of each column in a seed's row of bytes, which begins with the seed's number
	stride  int
	rows    sync.Pool // *[]byte, of sealBlock rows
}

// newChecksummer returns one for data of the given schema. From schema 3 on, zeros fill rows up to a multiple of 16 bytes, of
// which processors compute a CRC-32 faster than of the rest.
func newChecksummer(columns []column, schema int) *checksummer {
	c := &checksummer{columns: columns, stride: 4}
	for _, col := range columns {
		c.offsets = append(c.offsets, c.stride)
		c.stride += widths[col.typ()]
	}
	if schema >= 3 {
		c.stride = (c.stride + 15) / 16 * 16
	}
	return c
}

// row writes a seed's fields to a row of bytes that begins with the seed's number.
func (c *checksummer) row(row []byte, seed int) {
	binary.LittleEndian.PutUint32(row, uint32(seed))
	for k, col := range c.columns {
		col.gather(row[c.offsets[k]:], c.stride, seed, seed+1)
	}
}

// each calls f with the checksum of every seed in [lo, hi).
func (c *checksummer) each(lo, hi int, f func(seed int, sum uint32)) {
	rows, _ := c.rows.Get().(*[]byte)
	if rows == nil {
		b := make([]byte, sealBlock*c.stride)
		rows = &b
	}
	defer c.rows.Put(rows)
	buf := *rows
	for ; lo < hi; lo += sealBlock {
		end := min(lo+sealBlock, hi)
		for i := lo; i < end; i++ {
			binary.LittleEndian.PutUint32(buf[(i-lo)*c.stride:], uint32(i))
		}
		for k, col := range c.columns {
			col.gather(buf[c.offsets[k]:], c.stride, lo, end)
		}
		for i := lo; i < end; i++ {
			f(i, crc32.ChecksumIEEE(buf[(i-lo)*c.stride:][:c.stride]))
		}
	}
}
