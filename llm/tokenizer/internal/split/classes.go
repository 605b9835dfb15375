package split

import (
	"strings"
	"sync"
	"unicode/utf8"
)

//go:generate python3 classes.py

// A class is a group of characters that all patterns treat alike. The classes do not overlap: \s
// corresponds to space and newline, and \p{L} to upper, lower and letter.
type class uint8

const (
	symbol  class = iota // everything else, and bytes that are not valid UTF-8
	upper                // \p{Lu}, \p{Lt}
	lower                // \p{Ll}
	letter               // \p{Lm}, \p{Lo}
	mark                 // \p{M}
	number               // \p{N}
	space                // \s except newline
	newline              // \r, \n
)

const (
	wordBit    = 0x8
	numericBit = 0x10
	classBits  = 0x7
)

// The classes match Oniguruma, which Rust's tokenizers uses for patterns. Package unicode follows a
// different version of Unicode in each version of Go, so texts might be divided differently.
const pageSize = 128

// A classTable holds the classes of all characters in pages. Equal pages are shared.
type classTable struct {
	ascii [utf8.RuneSelf]class
	pages [(utf8.MaxRune + 1) / pageSize]*[pageSize]uint8
}

var classes = sync.OnceValue(func() *classTable {
	t := &classTable{}
	shared := map[[pageSize]uint8]*[pageSize]uint8{}
	run := 0
	for p := range t.pages {
		var page [pageSize]uint8
		for i := range page {
			r := rune(p*pageSize + i)
			for run+1 < len(runs) && rune(runs[run+1]>>7) <= r {
				run++
			}
			page[i] = uint8(runs[run]>>5&3)*wordBit | uint8(classOf(r, categories[runs[run]&0x1f]))
		}
		if shared[page] == nil {
			shared[page] = &page
		}
		t.pages[p] = shared[page]
	}
	for c := range t.ascii {
		t.ascii[c] = class(t.pages[0][c] & classBits)
	}
	return t
})

// classOf returns the class of a character with a general category.
func classOf(r rune, category string) class {
	switch {
	case r == '\r' || r == '\n':
		return newline
	case r == '\t' || r == '\v' || r == '\f' || r == 0x85 || category[0] == 'Z':
		return space
	case category == "Lu" || category == "Lt":
		return upper
	case category == "Ll":
		return lower
	case category[0] == 'L':
		return letter
	case category[0] == 'M':
		return mark
	case category[0] == 'N':
		return number
	}

	return symbol
}

func (t *classTable) bits(r rune) uint8 { return t.pages[r/pageSize][r%pageSize] }

// Category returns the ranges of the characters in a general category, such as "Lu", or in all categories
// that start with a letter, such as "L". The ranges are ascending. Category returns false for an unknown
// name.
func Category(name string) (ranges [][2]rune, ok bool) {
	if name == "" || name[0] == 'C' {
		return nil, false
	}

	for i, run := range runs {
		if !strings.HasPrefix(categories[run&0x1f], name) {
			continue
		}
		from, to := rune(run>>7), rune(utf8.MaxRune)
		if i+1 < len(runs) {
			to = rune(runs[i+1]>>7) - 1
		}
		if last := len(ranges) - 1; last >= 0 && ranges[last][1] == from-1 {
			ranges[last][1] = to
		} else {
			ranges = append(ranges, [2]rune{from, to})
		}
	}

	return ranges, ranges != nil
}

// at returns the class and the length of the first character of a text, which must not be empty.
func (t *classTable) at(text []byte) (class, int) {
	if c := text[0]; c < utf8.RuneSelf {
		return t.ascii[c], 1
	}
	r, n := utf8.DecodeRune(text)
	if r == utf8.RuneError && n == 1 {
		return symbol, 1
	}
	return class(t.bits(r) & classBits), n
}

// IsSpace reports whether a character is white space.
func IsSpace(r rune) bool {
	c := class(classes().bits(r) & classBits)
	return c == space || c == newline
}

// IsWord reports whether a character matches \w in Rust's regex.
func IsWord(r rune) bool { return classes().bits(r)&wordBit != 0 }

// IsNumeric reports whether a character is numeric according to Rust's standard library, which
// follows a newer version of Unicode than \p{N}.
func IsNumeric(r rune) bool { return classes().bits(r)&numericBit != 0 }
