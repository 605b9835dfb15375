package runlog

import (
	"slices"
	"strconv"
	"strings"

	"github.com/kasmina-go/kasmina/internal/jsonfloat"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/arch"
	"github.com/kasmina-go/kasmina/state"
)

// A SeedRecord is a seed in an "epoch" line; [JSON] says what the fields mean.
type SeedRecord struct {
	Seed   int             `json:"seed"`
	Stage  string          `json:"stage"`
	Alpha  jsonfloat.Float `json:"alpha"`
	Health *HealthRecord   `json:"health"`
	Events []EventRecord   `json:"events,omitempty"`
}

// A HealthRecord is a [state.Health] in an "epoch" line. A number that was NaN or infinite is NaN.
type HealthRecord struct {
	Variance  jsonfloat.Float `json:"variance"`
	Mean      jsonfloat.Float `json:"mean"`
	Min       jsonfloat.Float `json:"min"`
	Max       jsonfloat.Float `json:"max"`
	DeadRatio jsonfloat.Float `json:"dead_ratio"`
	SNR       jsonfloat.Float `json:"snr"`
}

// An EventRecord is a [state.Event] of a seed in an "epoch" line.
type EventRecord struct {
	Kind   string          `json:"kind"`
	Epoch  int             `json:"epoch"`
	From   string          `json:"from"`
	To     string          `json:"to"`
	Value  jsonfloat.Float `json:"value"`
	Reason string          `json:"reason,omitempty"`
}

// lineSeeds is how many seeds a line has at most, so that it stays far below what Read takes.
const lineSeeds = 256

// epochRecords are the lines of an EpochEnd: one for each layer, or for each lineSeeds of its
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
			for _, s := range seeds {
				r.States = append(r.States, SeedRecord{Seed: s.Seed, Stage: s.Stage.String(),
					Alpha: figure(s.Alpha), Health: healthRecord(s.Health),
					Events: events[address{layer, s.Seed}]})
			}
			records = append(records, r)
		}
	}
	return records
}

// maxPlaces is how many places of seeds a line has at most.
const maxPlaces = 4096

// lattices are those that a line has: without places where there are many.
func lattices(all []arch.Lattice) []arch.Lattice {
	all, left := slices.Clone(all), maxPlaces
	for i := range all {
		if left -= len(all[i].Places); left < 0 {
			all[i].Places = nil
		}
	}
	return all
}

// healthRecord returns nil if nothing has been measured.
func healthRecord(h state.Health) *HealthRecord {
	if h == (state.Health{}) {
		return nil
	}
	return &HealthRecord{Variance: figure(h.Variance), Mean: figure(h.Mean), Min: figure(h.Min),
		Max: figure(h.Max), DeadRatio: figure(h.DeadRatio), SNR: figure(h.SNR)}
}

// maxReason bounds what an event says of its reason, which may be a user's whole stack.
const maxReason = 200

func eventRecord(e state.Event) EventRecord {
	reason, _, _ := strings.Cut(e.Reason, "\n")
	return EventRecord{Kind: e.Kind.String(), Epoch: e.Epoch, From: e.From.String(),
		To: e.To.String(), Value: figure(e.Value), Reason: reason[:min(len(reason), maxReason)]}
}

// figure rounds x to four digits: the most that is known of most figures, and a third of a line.
func figure(x float64) jsonfloat.Float {
	rounded, err := strconv.ParseFloat(strconv.FormatFloat(x, 'g', 4, 64), 64)
	if err != nil { // what is rounded is too large for a float64
		return jsonfloat.Float(x)
	}
	return jsonfloat.Float(rounded)
}
