package merge

// A Cache remembers the tokens of pieces, since most of a text is a few pieces many times over. It
// is for one goroutine.
type Cache struct {
	spans map[string]span
	slab  []int32 // the tokens of all pieces
}

type span struct{ lo, hi int32 }

const (
	maxCached       = 1 << 16 // pieces; some megabytes
	maxCachedTokens = 1 << 20
	maxCachedPiece  = 256 // bytes; longer ones hardly come again
)

// Find returns the tokens of a piece, valid until the next Add, or false.
func (c *Cache) Find(piece []byte) ([]int32, bool) {
	at, ok := c.spans[string(piece)]
	return c.slab[at.lo:at.hi], ok
}

// Add remembers the tokens of a piece that Find did not find. Where there are too many pieces, it
// forgets all others.
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
