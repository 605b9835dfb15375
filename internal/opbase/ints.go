package opbase

import "fmt"

// CheckIDs returns an error naming the first element of ids, an op's argument, that is not in the
// vocabulary. With negative set, negative ids are allowed; they mark rows to ignore.
func CheckIDs[T int | int64](argument string, ids []T, vocab int, negative bool) error {
	for i, id := range ids {
		if uint64(id) < uint64(vocab) || id < 0 && negative {
			continue
		}
		or := ""
		if negative {
			or = ", or a negative number to ignore the row"
		}
		return fmt.Errorf("%s[%d] is %d, want an id of the vocabulary, 0 to %d%s", argument, i, id,
			vocab-1, or)
	}

	return nil
}

// CheckStarts returns an error naming the first element of starts that cannot be the start of a
// document in sequences of seq tokens.
func CheckStarts[T int | int64](starts []T, seq int) error {
	var least T
	for row, start := range starts {
		i := T(row % seq)
		if i == 0 {
			least = 0
		}
		if start < least || start > i {
			return fmt.Errorf("starts[%d] is %d, want %d, the start before it, to %d, its own "+
				"position in the sequence", row, start, least, i)
		}
		least = start
	}

	return nil
}
