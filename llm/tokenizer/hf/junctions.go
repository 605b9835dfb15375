package hf

import (
	"unicode/utf8"
)

// junctions holds the pairs of characters between which some merge joins two tokens. Between any
// other characters, a text can be split before merging without changing the tokens. This divides the
// text into words even if no pre-tokenizer does, because in Llama 2 and Gemma no merge joins a letter
// to a following space.
type junctions struct {
	ascii [utf8.RuneSelf][utf8.RuneSelf]bool
	other map[[2]rune]bool
}

// add adds the characters on both sides of a merge.
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
