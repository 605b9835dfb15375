package state

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/internal/half"
	"github.com/kasmina-go/kasmina/state/internal/columns"
)

// Schema is the version of the seed state's layout that this package writes; migrate.go says what
// became of earlier ones.
const Schema = 4

// seedState holds all seeds, one array per field. Figures of 16 bits are stored as their bits.
// Those of the normal tier are bfloat16. KASMINA's float16 would do for activations near 1, but the
// variance of a gradient underflows in it at the sizes of real models.
type seedState struct {
	stage         []uint8
	slot          []uint16 // 0: none; elsewhere than on a chunk the blueprint's size
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

	// Moments of the input chunk, in full precision because clamps and drift depend on differences
	// of them. They are of the last pass; merged over passes, with their weight in elements; and
	// the merged ones as the last epoch ended.
	stepMean, stepVariance, stepCount []float64
	runMean, runVariance, runCount    []float64
	epochMean, epochVariance          []float64
	drift                             []float32

	// Moments of the norm of the chunk's gradient over rows, merged over passes, with their weight
	// in rows.
	normMean, normVariance, normCount []float64

	nonFiniteX, nonFiniteG []uint32 // NaN and Inf seen so far
	nonFiniteTold          []uint32 // how many of both events have told of
	clips                  []uint64 // rows whose gradient was clipped

	embargoUntil       []uint32 // epoch from which an ended seed may be recycled
	memory0, memory1   []float32
	finished           []uint8   // 1 once the strategy has taken α to where it ends
	trainingError      []float32 // NaN: not reported
	entryTrainingError []float32 // when first reported in this stage; NaN: not yet
	slotSum            []uint32  // of the blueprint's parameters as last reported; 0: not yet
	learning           []uint8   // what the last report says of them: see liveness
	scored             []uint32  // the epoch whose end had the latest score; 0: none
	// the host's loss when first reported in this stage; NaN: not yet
	entryLoss []float32
	// performance when first reported in this stage, or without the seed; NaN: not yet
	entryPerformance []float32
	// performance when first reported after germination, or without the seed; NaN: not yet
	basePerformance          []float32
	stageErrors, stageTrials []uint32 // reported in this stage

	// while an epoch ends: epochs from the score before to the new one; 0: there is no new one
	sinceScore []uint32

	// the last transitions as packed by Transition.pack, the latest first; 0: none
	past   [][]uint32
	schema []uint8
	crc    []uint32 // over the seed's number and all fields above
}

// columns lists the fields that the checksum covers, in its order.
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
		{"nonfinite_told", &s.nonFiniteTold},
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

// newSeedState returns n dormant seeds of which nothing has been measured, without checksums, that
// remember the given number of transitions.
func newSeedState(n, transitions int) *seedState {
	s := &seedState{crc: make([]uint32, n), past: make([][]uint32, transitions),
		sinceScore: make([]uint32, n)}
	for _, c := range s.columns() {
		c.Make(n)
	}
	for i := range n {
		s.begin(i)
	}
	return s
}

// seedBytes returns what newSeedState takes.
func seedBytes(n, transitions int) uint64 {
	s := newSeedState(0, transitions)
	row := 4 + 4 // crc and sinceScore
	for _, c := range s.columns() {
		row += c.Width()
	}
	return uint64(n) * uint64(row)
}

// begin sets what a new seed has other than zeros.
func (s *seedState) begin(i int) {
	s.schema[i] = Schema
	for _, f := range [][]float32{s.trainingError, s.entryTrainingError, s.entryLoss,
		s.entryPerformance, s.basePerformance} {
		f[i] = float32(math.NaN())
	}
}

// reset makes a seed a new one.
func (s *seedState) reset(i int) {
	zeros := make([]byte, 8)
	for _, c := range s.columns() {
		c.Scatter(zeros, 8, i, i+1)
	}
	s.begin(i)
}

// checksums are those of the seeds, over data of a schema.
func checksums(stored []columns.Column, schema int) *columns.Checksums {
	return columns.NewChecksums(stored, schema >= 3)
}

func toFloat16(v float64) uint16      { return uint16(half.NewFloat16(v)) }
func fromFloat16(bits uint16) float64 { return half.Float16(bits).Float64() }

func toBFloat16(v float64) uint16      { return uint16(half.NewBFloat16(float32(v))) }
func fromBFloat16(bits uint16) float64 { return float64(half.BFloat16(bits).Float32()) }
