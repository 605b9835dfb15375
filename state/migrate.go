package state

import (
	"fmt"

	"github.com/kasmina-go/kasmina/state/internal/columns"
)

// What the versions of the schema changed:
//
//	2  added "finished"
//	3  keeps performance in single precision instead of as a Float16, and training_error, entry_loss, entry_performance and
//	   base_performance in single instead of double precision; dropped delta and improvement, which follow from them; and
//	   added the last transitions
//	4  keeps normal figures as bfloat16 instead of Float16, which had neither small nor large ones; added "entry_training_error",
//	   "slot_sum", "learning" and "scored"

// emptySeeds returns new seeds to migrate the stored arrays to. Before memory is taken, enough must
// be stored to deserve it.
func (h *header) emptySeeds(stored []columns.Column) (*seedState, error) {
	if h.Schema < 3 {
		h.Config.Transitions = defaultTransitions
	}
	want := columns.RowWidth((&seedState{past: make([][]uint32, h.Config.Transitions)}).columns())
	if have := columns.RowWidth(stored); 2*have < want {
		return nil, fmt.Errorf("%w: header: the fields take %d bytes a seed, want %d",
			ErrCorrupt, have, want)
	}
	return newSeedState(h.Seeds, h.Config.Transitions), nil
}

// migrate moves the stored arrays into s. Data of this schema must have exactly the fields of s. In
// data of an older one, fields that it did not have keep the value of a new seed, and fields that
// are no more are dropped.
func (h *header) migrate(s *seedState, stored []columns.Column) error {
	byName := map[string]columns.Column{}
	for _, c := range stored {
		byName[c.Name] = c
	}
	old, moved := h.Schema < Schema, 0
	for _, c := range s.columns() {
		from, ok := byName[c.Name]
		if c.Name == "schema" && old {
			continue
		}
		switch {
		case ok && from.Type() == c.Type():
			c.Set(from.Data())
			moved++
		case ok && h.Schema < 3 && c.Narrow(from):
		case ok || !old:
			return fmt.Errorf("%w: field %q is missing or not %s", ErrCorrupt, c.Name, c.Type())
		}
	}
	if h.Schema < 4 {
		for _, figures := range [][]uint16{s.mean, s.lowest, s.highest, s.snr,
			s.gradVariance, s.gradMax} {
			for i, bits := range figures {
				figures[i] = toBFloat16(fromFloat16(bits))
			}
		}
	}
	if !old && moved != len(stored) {
		return fmt.Errorf("%w: %d fields are stored, want %d", ErrCorrupt, len(stored), moved)
	}
	return nil
}
