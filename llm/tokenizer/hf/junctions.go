package hf

import (
	"unicode/utf8"
)

// junctions are the pairs of characters between which some merge joins two tokens. Everywhere else
// a text can be cut before it is merged, and the tokens stay the same. That makes words of a text
// that no pre-tokenizer cuts: in Llama 2 and Gemma no merge joins a letter and the space behind it.
type junctions struct {
	ascii [utf8.RuneSelf][utf8.RuneSelf]bool
	other map[[2]rune]bool
}

// add enters the pair of characters where two tokens are joined.
func (j *junctions) add(left, right string) {
	a, _ := utf8.DecodeLastRuneInString(left)
	b, _ := utf8.DecodeRuneInString(right)
	if a < utf8.RuneSelf && b < utf8.RuneSelf {
		j.ascii[a][b] = true
		return
	}
	if j.other == nil {
		j.other = map[[2]rune]bool{}
	}
	j.other[[2]rune{a, b}] = true
}

func (j *junctions) join(a, b rune) bool {
	if a < utf8.RuneSelf && b < utf8.RuneSelf {
		return j.ascii[a][b]
	}
	return j.other[[2]rune{a, b}]
}
