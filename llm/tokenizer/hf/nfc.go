package hf

import (
	"slices"
	"sync"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

//go:generate python3 nfc.py

// nfc implements Unicode's normalization form C: it decomposes characters, sorts the marks, and composes
// the characters again. It uses the tables of package norm, but not its algorithm. The algorithm would
// give other results than Hugging Face's tokenizers for runs of more than 30 marks, for some characters
// beyond U+FFFF, and for newer marks.
type nfc struct{}

func (nfc) growth() int { return 3 }

func (nfc) normalize(text []byte) []byte {
	at := plain(text)
	if at == len(text) {
		return text
	}

	out := append(make([]byte, 0, len(text)+len(text)/8), text[:at]...)
	var c composer
	for at < len(text) {
		// Handle a character together with the marks that may be composed with it.
		for first := true; at < len(text); first = false {
			r, n := utf8.DecodeRune(text[at:])
			if !first && isPlain(r, n) {
				break
			}
			if r == utf8.RuneError && n == 1 {
				out = append(c.flush(out), text[at])
			} else {
				out = c.add(out, r)
			}
			at += n
		}
		out = c.flush(out)
		n := plain(text[at:])
		out = append(out, text[at:at+n]...)
		at += n
	}

	return out
}

// isPlain reports whether a character of n bytes is unchanged in form C and never composed with a
// previous character.
func isPlain(r rune, n int) bool {
	if r < 0x300 || r == utf8.RuneError && n == 1 {
		return true
	}
	var buffer [utf8.UTFMax]byte
	p := norm.NFC.Properties(buffer[:utf8.EncodeRune(buffer[:], r)])
	return p.CCC() == 0 && p.BoundaryBefore() && len(p.Decomposition()) == 0
}

// plain returns the length of the plain part at the start of a text. If the text continues, the last
// character of the part is excluded, because a following mark may be composed with it.
func plain(text []byte) int {
	last := 0
	for at := 0; at < len(text); {
		n := 1
		if text[at] >= utf8.RuneSelf {
			var r rune
			if r, n = utf8.DecodeRune(text[at:]); !isPlain(r, n) {
				return last
			}
		}
		last = at
		at += n
	}

	return len(text)
}

// A composer holds a character and the marks after it until the next character.
type composer struct {
	starter []rune // decomposed: at most one starter, then marks
	classes []uint8
}

// add appends a character. If it does not belong to the held characters, add composes them first.
func (c *composer) add(out []byte, r rune) []byte {
	if s, ok := decomposeHangul(r); ok {
		for _, r := range s {
			out = c.addDecomposed(out, r, 0)
		}
		return out
	}

	var buffer [utf8.UTFMax]byte
	char := buffer[:utf8.EncodeRune(buffer[:], r)]
	decomposition := norm.NFD.Properties(char).Decomposition()
	if decomposition == nil {
		decomposition = char
	}

	for len(decomposition) > 0 {
		p := norm.NFD.Properties(decomposition)
		r, n := utf8.DecodeRune(decomposition)
		class := p.CCC()
		if class != 0 && isUnmoved(r) {
			class = 0
		}
		out = c.addDecomposed(out, r, class)
		decomposition = decomposition[n:]
	}

	return out
}

// isUnmoved reports whether Rust's tokenizers does not treat a mark as a mark.
func isUnmoved(r rune) bool {
	_, found := slices.BinarySearchFunc(unmoved[:], r, func(between [2]rune, r rune) int {
		switch {
		case between[1] < r:
			return -1
		case between[0] > r:
			return 1
		}
		return 0
	})
	return found
}

// addDecomposed appends a decomposed character with a canonical combining class.
func (c *composer) addDecomposed(out []byte, r rune, class uint8) []byte {
	if class == 0 && len(c.starter) > 0 {
		c.compose()
		last := len(c.starter) - 1
		// Compose two starters if there is nothing between them.
		if both, ok := compose(c.starter[0], r); last == 0 && c.classes[0] == 0 && ok {
			c.starter[0] = both
			return out
		}
		out = c.write(out)
	}

	c.starter = append(c.starter, r)
	c.classes = append(c.classes, class)
	return out
}

// compose sorts the marks and composes them with the starter where possible.
func (c *composer) compose() {
	c.order()
	if c.classes[0] != 0 {
		return
	}

	kept := 1
	blocked := uint8(0) // the class of the previous mark, which separates the next one from the starter
	for i := 1; i < len(c.starter); i++ {
		both, ok := compose(c.starter[0], c.starter[i])
		if ok && blocked < c.classes[i] {
			c.starter[0] = both
			continue
		}
		blocked = c.classes[i]
		c.starter[kept], c.classes[kept] = c.starter[i], c.classes[i]
		kept++
	}

	c.starter, c.classes = c.starter[:kept], c.classes[:kept]
}

// order sorts the marks by class. The order of equal classes does not change.
func (c *composer) order() {
	from := 0
	if c.classes[0] == 0 {
		from = 1
	}

	if slices.IsSorted(c.classes[from:]) {
		return
	}

	type mark struct {
		r     rune
		class uint8
	}
	marks := make([]mark, len(c.starter)-from)
	for i := range marks {
		marks[i] = mark{c.starter[from+i], c.classes[from+i]}
	}

	slices.SortStableFunc(marks, func(a, b mark) int { return int(a.class) - int(b.class) })
	for i, m := range marks {
		c.starter[from+i], c.classes[from+i] = m.r, m.class
	}
}

func (c *composer) flush(out []byte) []byte {
	if len(c.starter) == 0 {
		return out
	}
	c.compose()
	return c.write(out)
}

func (c *composer) write(out []byte) []byte {
	for _, r := range c.starter {
		out = utf8.AppendRune(out, r)
	}
	c.starter, c.classes = c.starter[:0], c.classes[:0]
	return out
}

const (
	hangulBase, hangulEnd      = 0xac00, 0xd7a4
	jamoLBase, jamoLEnd        = 0x1100, 0x1113
	jamoVBase, jamoVEnd        = 0x1161, 0x1176
	jamoTBase, jamoTEnd        = 0x11a7, 0x11c3
	jamoVCount, jamoTCount     = 21, 28
	jamoVTCount                = jamoVCount * jamoTCount
	firstComposed, endComposed = 0xc0, 0x30000

	// Rust's tokenizers does not compose DIVES AKURU VOWEL SIGN O of Unicode 13.
	unknownO = 0x11938
)

func decomposeHangul(r rune) ([]rune, bool) {
	if r < hangulBase || r >= hangulEnd {
		return nil, false
	}
	s := r - hangulBase
	parts := []rune{jamoLBase + s/jamoVTCount, jamoVBase + s%jamoVTCount/jamoTCount}
	if t := s % jamoTCount; t > 0 {
		parts = append(parts, jamoTBase+t)
	}
	return parts, true
}

// composed maps pairs of characters to their composition.
var composed = sync.OnceValue(func() map[[2]rune]rune {
	pairs := map[[2]rune]rune{}
	for r := rune(firstComposed); r < endComposed; r++ {
		if r >= hangulBase && r < hangulEnd || r >= 0xd800 && r < 0xe000 || r == unknownO {
			continue
		}
		text := string(r)
		decomposition := norm.NFD.PropertiesString(text).Decomposition()
		// Form C decomposes these characters, so they are never the result of a composition.
		if utf8.RuneCount(decomposition) < 2 || norm.NFC.String(text) != text {
			continue
		}
		_, n := utf8.DecodeLastRune(decomposition)
		last, _ := utf8.DecodeLastRune(decomposition)
		front := string(decomposition[:len(decomposition)-n])
		if first, n := utf8.DecodeRuneInString(norm.NFC.String(front)); n > 0 {
			pairs[[2]rune{first, last}] = r
		}
	}
	return pairs
})

// compose returns the composition of two characters.
func compose(a, b rune) (rune, bool) {
	switch {
	case a >= jamoLBase && a < jamoLEnd && b >= jamoVBase && b < jamoVEnd:
		return hangulBase + ((a-jamoLBase)*jamoVCount+b-jamoVBase)*jamoTCount, true
	case a >= hangulBase && a < hangulEnd && (a-hangulBase)%jamoTCount == 0 &&
		b > jamoTBase && b < jamoTEnd:
		return a + b - jamoTBase, true
	}
	r, ok := composed()[[2]rune{a, b}]
	return r, ok
}
