package tokenizer

import "unicode/utf8"

// maxPiece is the most bytes that a piece, and so a token, can have. It bounds the time that a
// piece of hostile text takes; few lines of text have a longer word, rule or indentation.
const maxPiece = 128

// A class is what a rune is for nextPiece.
type class uint8

const (
	symbol  class = iota // also a byte that is not UTF-8
	letter               // of words, identifiers and numbers
	blank                // white space inside a line
	newline              // the end of a line
	pastEnd              // no rune: the end of the text
)

// symbols are the runes beyond ASCII that are not letters: roughly, blocks of punctuation,
// mathematics and pictures. Package unicode would know better, but not the same in every version of
// Go, and a vocabulary must give the same tokens in all.
var symbols = [][2]rune{
	{0x80, 0xbf}, {0xd7, 0xd7}, {0xf7, 0xf7}, // Latin-1
	// from general punctuation to symbols and arrows
	{0x2000, 0x2bff},
	{0x3000, 0x303f}, {0xff01, 0xff0f}, {0xff1a, 0xff20}, // East Asian punctuation
	{0xfff0, 0xffff}, // specials, with what stands for invalid UTF-8
	{0x1f000, 0x1faff},
}

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

// nextPiece returns the length of the first piece of a text that is not empty. It is one of
//
//	white space with a line end in it: the line ends and the indentation of the line that follows
//	blanks, except the last one, which belongs to what it stands before
//	letters, with one blank or symbol before them
//	symbols, with one blank before them and white space after them if that has a line end in it
//
// and at most maxPiece bytes. So words come with what usually introduces them, " the" or
// ".Println", and the layout of source code takes few tokens, such as " {\n\t\t".
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

// A pieceScanner holds the text that a piece can be of.
type pieceScanner struct{ text []byte }

// class returns the class and length of the rune at the given place.
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

// skip returns where the runes of class c end.
func (s pieceScanner) skip(at int, c class) int {
	for {
		k, n := s.class(at)
		if k != c {
			return at
		}
		at += n
	}
}

// space returns where the white space ends, and whether there is a line end in it.
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
