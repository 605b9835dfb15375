package merge

// A Cache stores the tokens of pieces, because most text consists of a few frequent pieces. It is not
// safe for concurrent use.
type Cache struct {
	spans map[string]span
	slab  []int32 // tokens of all pieces
}

type span struct{ lo, hi int32 }

const (
	maxCached       = 1 << 16 // pieces; a few megabytes
	maxCachedTokens = 1 << 20
	maxCachedPiece  = 256 // bytes; longer pieces rarely occur again
)

// Find returns the tokens of a piece, valid until the next Add, or false.
func (c *Cache) Find(piece []byte) ([]int32, bool) {
	at, ok := c.spans[string(piece)]
	return c.slab[at.lo:at.hi], ok
}

// Add stores the tokens of a new piece. If the cache is full, Add clears it first.
func (c *Cache) Add(piece []byte, tokens []int32) {
	if len(piece) > maxCachedPiece {
		return
	}

	if c.spans == nil {
		c.spans = map[string]span{}
	}

	if len(c.spans) == maxCached || len(c.slab) > maxCachedTokens {
		clear(c.spans)
		c.slab = c.slab[:0]
	}

	lo := int32(len(c.slab))
	c.slab = append(c.slab, tokens...)
	c.spans[string(piece)] = span{lo, int32(len(c.slab))}
}
