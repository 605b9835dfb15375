package grammar

// A table numbers different values in the order in which they are added, such as the states of an automaton. Its zero
// value is empty.
type table[T comparable] struct {
	values []T
	ids    map[T]int
}

// id returns the number of a value, and adds the value if necessary.
func (t *table[T]) id(value T) int {
	id, ok := t.ids[value]
	if ok {
		return id
	}
	if t.ids == nil {
		t.ids = map[T]int{}
	}
	id = len(t.values)
	t.values, t.ids[value] = append(t.values, value), id
	return id
}
