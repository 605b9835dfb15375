package state

import (
	"fmt"
	"reflect"
)

// What the versions of the schema changed:
//
//	2  added "finished"
//	3  keeps performance in single precision instead of as a Float16, and training_error, entry_loss, entry_performance and
//	   base_performance in single instead of double precision; dropped delta and improvement, which follow from them; and
//	   added the last transitions
//	4  keeps normal figures as bfloat16 instead of Float16, which had neither small nor large ones; added "entry_training_error",
//	   "slot_sum", "learning" and "scored"

// emptySeeds returns new seeds to migrate the stored arrays to. Before memory is taken, enough must be stored to deserve it.
func (h *header) emptySeeds(stored []column) (*seedState, error) {
	if h.Schema < 3 {
		h.Config.Transitions = defaultTransitions
	}
	want := rowWidth((&seedState{past: make([][]uint32, h.Config.Transitions)}).columns())
	if have := rowWidth(stored); 2*have < want {
		return nil, fmt.Errorf("%w: header: the fields take %d bytes a seed, want %d", ErrCorrupt, have, want)
	}
	return newSeedState(h.Seeds, h.Config.Transitions), nil
}

// migrate moves the stored arrays into s. Data of this schema must have exactly the fields of s. In data of an older one,
// fields that it did not have keep the value of a new seed, and fields that are no more are dropped.
func (h *header) migrate(s *seedState, stored []column) error {
	byName := map[string]column{}
	for _, c := range stored {
		byName[c.name] = c
	}
	old, moved := h.Schema < Schema, 0
	for _, c := range s.columns() {
		from, ok := byName[c.name]
		if c.name == "schema" && old {
			continue
		}
		switch {
		case ok && from.typ() == c.typ():
			reflect.ValueOf(c.array).Elem().Set(reflect.ValueOf(from.array).Elem())
			moved++
		case ok && h.Schema < 3 && c.narrow(from):
		case ok || !old:
			return fmt.Errorf("%w: field %q is missing or not %s", ErrCorrupt, c.name, c.typ())
		}
	}
	if h.Schema < 4 {
		for _, figures := range [][]uint16{s.mean, s.lowest, s.highest, s.snr, s.gradVariance, s.gradMax} {
			for i, bits := range figures {
				figures[i] = brain(Float16(bits).Float64())
			}
		}
	}
	if !old && moved != len(stored) {
		return fmt.Errorf("%w: %d fields are stored, want %d", ErrCorrupt, len(stored), moved)
	}
	return nil
}

// narrow fills a column that has become float32 from what it was before: float64, or Float16. It reports whether that was so.
func (c column) narrow(from column) bool {
	to, ok := c.array.(*[]float32)
	if !ok {
		return false
	}
	switch a := from.array.(type) {
	case *[]float64:
		for i, v := range *a {
			(*to)[i] = float32(v)
		}
	case *[]uint16:
		for i, v := range *a {
			(*to)[i] = float32(Float16(v).Float64())
		}
	default:
		return false
	}
	return true
}
