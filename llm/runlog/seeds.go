package runlog

import (
	"slices"
	"strconv"
	"strings"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// A SeedRecord describes a seed in an "epoch" record. See [JSON] for the meaning of the fields.
type SeedRecord struct {
	Seed       int             `json:"seed"`
	Stage      string          `json:"stage"`
	Alpha      jsonfloat.Float `json:"alpha"`
	Health     *HealthRecord   `json:"health"`
	Drift      jsonfloat.Float `json:"drift,omitempty"`
	GradNorm   jsonfloat.Float `json:"grad_norm,omitempty"`
	NonFinite  int             `json:"non_finite,omitempty"`
	Kind       string          `json:"kind,omitempty"`
	Slot       int             `json:"slot,omitempty"`
	Size       int             `json:"size,omitempty"`
	Epochs     int             `json:"epochs_in_stage,omitempty"`
	CanAdvance bool            `json:"can_advance,omitempty"`
	Trial      *TrialRecord    `json:"trial,omitempty"`
	Events     []EventRecord   `json:"events,omitempty"`
}

// A HealthRecord is a [state.Health] in an "epoch" record. Infinities are read back as NaN.
type HealthRecord struct {
	Variance  jsonfloat.Float `json:"variance"`
	Mean      jsonfloat.Float `json:"mean"`
	Min       jsonfloat.Float `json:"min"`
	Max       jsonfloat.Float `json:"max"`
	DeadRatio jsonfloat.Float `json:"dead_ratio"`
	SNR       jsonfloat.Float `json:"snr"`
}

// A TrialRecord is the result of comparing the model with and without a seed.
type TrialRecord struct {
	Delta       jsonfloat.Float `json:"delta"`
	Improvement jsonfloat.Float `json:"improvement"`
	Stability   jsonfloat.Float `json:"stability"`
}

// An EventRecord is a [state.Event] of a seed in an "epoch" record.
type EventRecord struct {
	Kind   string          `json:"kind"`
	Epoch  int             `json:"epoch"`
	From   string          `json:"from"`
	To     string          `json:"to"`
	Value  jsonfloat.Float `json:"value"`
	Reason string          `json:"reason,omitempty"`
}

// lineSeeds limits the seeds per record, so that a record stays well below the limits of Read.
const lineSeeds = 256

// epochRecords returns the records of an EpochEnd event: for each layer, one record per lineSeeds
// seeds.
func epochRecords(e llm.Event) []Record {
	type address struct{ layer, seed int }
	events := map[address][]EventRecord{}
	for _, x := range e.SeedEvents {
		at := address{x.Layer, x.Seed}
		events[at] = append(events[at], eventRecord(x))
	}

	var records []Record
	for layer, report := range e.Reports {
		for seeds := range slices.Chunk(report.Seeds, lineSeeds) {
			r := newRecord(e)
			r.Epoch, r.Layer = &report.Epoch, &layer
			for i := range seeds {
				s := seedRecord(&seeds[i])
				s.Events = events[address{layer, s.Seed}]
				r.States = append(r.States, s)
			}
			records = append(records, r)
		}
	}

	return records
}

// seedRecord returns the record of a seed without its events. A dormant seed has no blueprint, so
// the fields that describe one stay empty.
func seedRecord(s *state.SeedReport) SeedRecord {
	r := SeedRecord{Seed: s.Seed, Stage: s.Stage.String(), Alpha: figure(s.Alpha),
		Health: healthRecord(s.Health), Drift: figure(s.Drift), GradNorm: figure(s.Gradient.Norm),
		NonFinite: s.NonFiniteX + s.NonFiniteG}
	if s.Stage == state.Dormant {
		return r
	}

	r.Kind, r.Slot, r.Size = s.Kind.String(), s.Slot, s.Size
	r.Epochs, r.CanAdvance = s.EpochsInStage, s.CanAdvance
	if s.Delta != 0 || s.Improvement != 0 || s.Stability != 0 {
		r.Trial = &TrialRecord{figure(s.Delta), figure(s.Improvement), figure(s.Stability)}
	}

	return r
}

// maxPlaces limits the seed locations that a record lists.
const maxPlaces = 4096

// lattices returns the lattices for a record. Once maxPlaces locations have been listed, the
// remaining lattices are recorded without theirs.
func lattices(all []llm.Lattice) []llm.Lattice {
	all, left := slices.Clone(all), maxPlaces
	for i := range all {
		if left -= len(all[i].Places); left < 0 {
			all[i].Places = nil
		}
	}
	return all
}

// healthRecord returns the record of h, or nil if nothing has been measured.
func healthRecord(h state.Health) *HealthRecord {
	if h == (state.Health{}) {
		return nil
	}
	return &HealthRecord{Variance: figure(h.Variance), Mean: figure(h.Mean), Min: figure(h.Min),
		Max: figure(h.Max), DeadRatio: figure(h.DeadRatio), SNR: figure(h.SNR)}
}

// maxReason limits the bytes of an event's reason, which may be a whole stack trace.
const maxReason = 200

func eventRecord(e state.Event) EventRecord {
	reason, _, _ := strings.Cut(e.Reason, "\n")
	if len(reason) > maxReason {
		reason = strings.ToValidUTF8(reason[:maxReason], "")
	}
	return EventRecord{Kind: e.Kind.String(), Epoch: e.Epoch, From: e.From.String(),
		To: e.To.String(), Value: figure(e.Value), Reason: reason}
}

// figure rounds x to four significant digits, which is as precise as most measurements are and
// keeps records short.
func figure(x float64) jsonfloat.Float {
	rounded, err := strconv.ParseFloat(strconv.FormatFloat(x, 'g', 4, 64), 64)
	if err != nil { // rounding up exceeded the largest float64
		return jsonfloat.Float(x)
	}
	return jsonfloat.Float(rounded)
}
