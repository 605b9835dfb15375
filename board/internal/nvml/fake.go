package nvml

import "unsafe"

// Fake returns a library that reports the given cards, for tests. Queries for values that are 0 fail
// as unsupported.
func Fake(cards ...Card) *Library {
	give := func(h uintptr, f func(Card) bool) result {
		if !f(cards[h-1]) {
			return notSupported
		}
		return 0
	}

	put := func(to *byte, bytes uint32, s string) bool {
		return copy(unsafe.Slice(to, bytes), s+"\x00") > 1
	}
	milli := func(to *uint32, watts float64) bool {
		*to = uint32(1e3 * watts)
		return watts > 0
	}
	l, err := start(&api{initialize: func() result { return 0 },
		shutdown: func() result { return 0 },
		count: func(n *uint32) result {
			*n = uint32(len(cards))
			return 0
		},
		handle: func(i uint32, to *uintptr) result {
			*to = uintptr(i) + 1
			return 0
		},
		name: func(h uintptr, to *byte, n uint32) result {
			return give(h, func(c Card) bool { return put(to, n, c.Name) })
		},
		uuid: func(h uintptr, to *byte, n uint32) result {
			return give(h, func(c Card) bool { return put(to, n, c.UUID) })
		},
		power: func(h uintptr, to *uint32) result {
			return give(h, func(c Card) bool { return milli(to, c.Power) })
		},
		limit: func(h uintptr, to *uint32) result {
			return give(h, func(c Card) bool { return milli(to, c.PowerLimit) })
		},
		memory: func(h uintptr, to *memory) result {
			return give(h, func(c Card) bool {
				*to = memory{c.Total, c.Total - c.Used, c.Used}
				return c.Total > 0
			})
		},
		busy: func(h uintptr, to *utilization) result {
			return give(h, func(c Card) bool {
				to.GPU = uint32(100*c.Busy + 0.5)
				return c.Busy > 0
			})
		}})
	if err != nil {
		panic(err) // cannot happen
	}

	return l
}
