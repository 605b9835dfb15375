package tokenizer

import "unicode/utf8"

// maxPiece is the maximum length in bytes of a piece, and thus of a token. It limits the time that hostile
// texts can take. Longer words, lines of dashes or indentations are rare.
const maxPiece = 128

// A class is the role of a rune for nextPiece.
type class uint8

const (
	symbol  class = iota // also bytes that are not valid UTF-8
	letter               // letters and digits
	blank                // white space within a line
	newline              // the end of a line
	pastEnd              // no rune: the end of the text
)

// symbols lists the non-ASCII runes that are not letters, which are roughly the blocks of
// punctuation, mathematics and pictures. Package unicode is more precise, but differs between
// versions of Go, and a vocabulary must produce the same tokens with every version.
var symbols = [][2]rune{
	{0x80, 0xbf}, {0xd7, 0xd7}, {0xf7, 0xf7}, // Latin-1
	// general punctuation to symbols and arrows
	{0x2000, 0x2bff},
	{0x3000, 0x303f}, {0xff01, 0xff0f}, {0xff1a, 0xff20}, // East Asian punctuation
	{0xfff0, 0xffff}, // specials, including the replacement character
	{0x1f000, 0x1faff},
}

// classOf returns the class of a rune.
func classOf(r rune) class {
	switch {
	case r == '\n' || r == '\r':
		return newline
	case r == ' ' || r == '\t' || r == '\v' || r == '\f':
		return blank
	case 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '_':
		return letter
	case r < utf8.RuneSelf:
		return symbol
	}

	for _, block := range symbols {
		if block[0] <= r && r <= block[1] {
			return symbol
		}
	}

	return letter
}

var asciiClass = func() (table [utf8.RuneSelf]class) {
	for c := range table {
		table[c] = classOf(rune(c))
	}
	return table
}()

// nextPiece returns the length of the first piece of a text, which must not be empty. A piece is at
// most maxPiece bytes long and is one of these:
//
//	white space with a line end: up to and including the indentation of the next line
//	blanks, except for the last one, which belongs to the next piece
//	letters, with one blank or symbol before them
//	symbols, with one blank before them, and the following white space if it has a line end
//
// Words thus include the usual character before them, as in " the" and ".Println", and the layout of
// source code takes few tokens, such as " {\n\t\t".
func nextPiece(text []byte) int {
	s := pieceScanner{text[:min(len(text), maxPiece)]}
	first, n := s.class(0)
	if first == letter {
		return s.skip(n, letter)
	}

	if end, lines := s.space(0); lines {
		return end
	} else if end > n {
		return end - 1
	}

	switch second, _ := s.class(n); {
	case second == letter:
		return s.skip(n, letter)
	case second == symbol || first == symbol:
		n = s.skip(n, symbol)
		if end, lines := s.space(n); lines {
			return end
		}
	}

	return n
}

// A pieceScanner holds the text that a piece may cover.
type pieceScanner struct{ text []byte }

// class returns the class and the length of the rune at a position.
func (s pieceScanner) class(at int) (class, int) {
	if at >= len(s.text) {
		return pastEnd, 0
	}
	if c := s.text[at]; c < utf8.RuneSelf {
		return asciiClass[c], 1
	}
	r, n := utf8.DecodeRune(s.text[at:])
	return classOf(r), n
}

// skip returns the end of a run of runes of class c.
func (s pieceScanner) skip(at int, c class) int {
	for {
		k, n := s.class(at)
		if k != c {
			return at
		}
		at += n
	}
}

// space returns the end of the white space and reports whether it contains a line end.
func (s pieceScanner) space(at int) (end int, lines bool) {
	for {
		k, n := s.class(at)
		if k != blank && k != newline {
			return at, lines
		}
		lines = lines || k == newline
		at += n
	}
}
