package state

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/state/internal/columns"
)

// Schema is the version of the seed state's layout that this package writes. persist.go lists what
// each version changed.
const Schema = 4

// seedState holds all seeds as one array per field.
//
// 16-bit figures are stored as their bits. Figures of normal quality are bfloat16. Although float16
// would suffice for activations near 1, the variance of a gradient underflows in it at the sizes of
// real models.
type seedState struct {
	stage         []uint8
	slot          []uint16 // slot; 0 means none; at sites other than chunks, the blueprint's size
	kind          []uint8
	strategy      []uint8 // index into Lattice.strategies
	alpha         []float32
	epochsInStage []uint16
	lastUpdate    []uint32  // epoch of the last change of stage or α
	performance   []float32 // reported as Float16, but judged by small differences
	stability     []uint16  // Float16

	// Health of the input chunk in the last pass that measured it.
	variance  []float32
	mean      []uint16 // bfloat16
	lowest    []uint16 // bfloat16
	highest   []uint16 // bfloat16
	deadRatio []float32
	snr       []uint16 // bfloat16

	// Gradient of the output chunk in the last pass that measured it.
	gradNorm     []float32
	gradVariance []uint16 // bfloat16
	gradMax      []uint16 // bfloat16

	// Moments of the input chunk: step* of the last pass, run* merged over passes and weighted by
	// the number of elements, and epoch* a copy of run* from the end of the last epoch. They have
	// double precision, because clamps and drift depend on small differences between them.
	stepMean, stepVariance, stepCount []float64
	runMean, runVariance, runCount    []float64
	epochMean, epochVariance          []float64
	drift                             []float32

	// Moments of the per-row norm of the chunk's gradient, merged over passes and weighted by the
	// number of rows.
	normMean, normVariance, normCount []float64

	nonFiniteX, nonFiniteG []uint32 // number of NaN and Inf seen
	nonFiniteReported      []uint32 // number of both together that events have reported
	clips                  []uint64 // clipped rows of the gradient

	embargoUntil       []uint32 // end of the embargo
	memory0, memory1   []float32
	finished           []uint8   // 1 once the strategy has finished
	trainingError      []float32 // NaN: never reported
	entryTrainingError []float32 // first value reported in this stage; NaN: none yet
	slotSum            []uint32  // checksum of the blueprint's last reported parameters; 0: none yet
	learning           []uint8   // liveness of the last reported parameters
	scored             []uint32  // epoch of the latest score; 0: none
	// entryLoss is the first loss of the host reported in this stage; NaN: none yet.
	entryLoss []float32
	// entryPerformance is the performance without the seed, or else the first one reported in this
	// stage; NaN: none yet.
	entryPerformance []float32
	// basePerformance is the performance without the seed, or else the first one reported since
	// germination; NaN: none yet.
	basePerformance          []float32
	stageErrors, stageTrials []uint32 // counts within this stage

	// sinceScore, used while an epoch ends, is the number of epochs between the previous score and
	// the new one, or 0 without a new one.
	sinceScore []uint32

	// past holds the last transitions as packed by Transition.Pack, latest first; 0: none.
	past   [][]uint32
	schema []uint8
	crc    []uint32 // CRC-32 over the seed's number and all fields above
}

// columns returns the fields that the checksum covers, in the order of its input.
func (s *seedState) columns() (all []columns.Column) {
	for _, f := range []struct {
		name  string
		array any
	}{
		{"stage", &s.stage}, {"slot", &s.slot}, {"kind", &s.kind}, {"strategy", &s.strategy},
		{"alpha", &s.alpha},
		{"epochs_in_stage", &s.epochsInStage}, {"last_update", &s.lastUpdate},
		{"performance", &s.performance}, {"stability", &s.stability},
		{"variance", &s.variance}, {"mean", &s.mean}, {"min", &s.lowest}, {"max", &s.highest},
		{"dead_ratio", &s.deadRatio}, {"snr", &s.snr},
		{"grad_norm", &s.gradNorm}, {"grad_variance", &s.gradVariance}, {"grad_max", &s.gradMax},
		{"step_mean", &s.stepMean}, {"step_variance", &s.stepVariance},
		{"step_count", &s.stepCount},
		{"run_mean", &s.runMean}, {"run_variance", &s.runVariance}, {"run_count", &s.runCount},
		{"epoch_mean", &s.epochMean}, {"epoch_variance", &s.epochVariance}, {"drift", &s.drift},
		{"norm_mean", &s.normMean}, {"norm_variance", &s.normVariance},
		{"norm_count", &s.normCount},
		{"nonfinite_x", &s.nonFiniteX}, {"nonfinite_g", &s.nonFiniteG},
		{"nonfinite_told", &s.nonFiniteReported},
		{"clips", &s.clips}, {"embargo_until", &s.embargoUntil}, {"memory_0", &s.memory0},
		{"memory_1", &s.memory1}, {"finished", &s.finished},
		{"training_error", &s.trainingError}, {"entry_training_error", &s.entryTrainingError},
		{"slot_sum", &s.slotSum}, {"learning", &s.learning}, {"scored", &s.scored},
		{"entry_loss", &s.entryLoss},
		{"entry_performance", &s.entryPerformance}, {"base_performance", &s.basePerformance},
		{"stage_errors", &s.stageErrors}, {"stage_trials", &s.stageTrials}, {"schema", &s.schema},
	} {
		all = append(all, columns.Column{Name: f.name, Array: f.array})
	}

	for k := range s.past {
		all = append(all, columns.Column{Name: fmt.Sprintf("past_%d", k), Array: &s.past[k]})
	}
	return all
}

// newSeedState returns n dormant seeds without figures or checksums that remember the given number
// of transitions.
func newSeedState(n, transitions int) *seedState {
	s := &seedState{crc: make([]uint32, n), past: make([][]uint32, transitions),
		sinceScore: make([]uint32, n)}
	for _, c := range s.columns() {
		c.Make(n)
	}
	for i := range n {
		s.initialize(i)
	}
	return s
}

// seedBytes returns the number of bytes that newSeedState allocates.
func seedBytes(n, transitions int) uint64 {
	s := newSeedState(0, transitions)
	row := 4 + 4 // crc and sinceScore
	for _, c := range s.columns() {
		row += c.Width()
	}
	return uint64(n) * uint64(row)
}

// initialize sets the fields of a new seed that are not 0.
func (s *seedState) initialize(i int) {
	s.schema[i] = Schema
	for _, f := range [][]float32{s.trainingError, s.entryTrainingError, s.entryLoss,
		s.entryPerformance, s.basePerformance} {
		f[i] = float32(math.NaN())
	}
}

// reset turns a seed into a new one.
func (s *seedState) reset(i int) {
	zeros := make([]byte, 8)
	for _, c := range s.columns() {
		c.Scatter(zeros, 8, i, i+1)
	}
	s.initialize(i)
}

// checksums returns the checksums of seeds in the layout of a schema.
func checksums(stored []columns.Column, schema int) *columns.Checksums {
	return columns.NewChecksums(stored, schema >= 3)
}

func toFloat16(v float64) uint16      { return uint16(half.NewFloat16(v)) }
func fromFloat16(bits uint16) float64 { return half.Float16(bits).Float64() }

func toBFloat16(v float64) uint16      { return uint16(half.NewBFloat16(float32(v))) }
func fromBFloat16(bits uint16) float64 { return float64(half.BFloat16(bits).Float32()) }
