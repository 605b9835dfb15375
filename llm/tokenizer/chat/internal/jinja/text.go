package jinja

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
)

// isSpace reports whether Python considers a character white space.
func isSpace(r rune) bool {
	return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f
}

func trim(s string) string      { return strings.TrimFunc(s, isSpace) }
func trimLeft(s string) string  { return strings.TrimLeftFunc(s, isSpace) }
func trimRight(s string) string { return strings.TrimRightFunc(s, isSpace) }

// isLineBreak reports whether Python's splitlines splits at a character.
func isLineBreak(r rune) bool {
	switch r {
	case '\n', '\r', '\v', '\f', 0x1c, 0x1d, 0x1e, 0x85, 0x2028, 0x2029:
		return true
	}
	return false
}

// splitLines splits a text into lines as Python's splitlines does.
func splitLines(s string, keepEnds bool) []string {
	var lines []string
	for s != "" {
		i := strings.IndexFunc(s, isLineBreak)
		if i < 0 {
			return append(lines, s)
		}
		_, n := utf8.DecodeRuneInString(s[i:])
		if strings.HasPrefix(s[i:], "\r\n") {
			n = 2
		}
		if keepEnds {
			lines = append(lines, s[:i+n])
		} else {
			lines = append(lines, s[:i])
		}
		s = s[i+n:]
	}

	return lines
}

// upper returns a text in upper case, in which one character can become several.
func upper(s string) string {
	if isASCII(s) {
		return strings.ToUpper(s)
	}
	caser := cases.Upper(language.Und)
	var b strings.Builder
	for _, r := range s {
		b.WriteString(caser.String(string(r)))
	}
	return b.String()
}

// lower returns a text in lower case. A capital sigma at the end of a word becomes a final sigma.
func lower(s string) string {
	if isASCII(s) {
		return strings.ToLower(s)
	}
	runes := []rune(s)
	var b strings.Builder
	for i, r := range runes {
		b.WriteString(lowerAt(runes, i, r))
	}
	return b.String()
}

func lowerAt(runes []rune, i int, r rune) string {
	switch r {
	case 0x130:
		return "i\u0307"
	case 'Σ':
		if isFinalSigma(runes, i) {
			return "ς"
		}
	}
	return string(unicode.ToLower(r))
}

// isFinalSigma reports whether the sigma at a position ends a word, which means that a letter of
// the word precedes it and none follows it.
func isFinalSigma(runes []rune, i int) bool {
	before := i - 1
	for before >= 0 && isCaseIgnorable(runes[before]) {
		before--
	}
	after := i + 1
	for after < len(runes) && isCaseIgnorable(runes[after]) {
		after++
	}
	return before >= 0 && isCased(runes[before]) && (after == len(runes) || !isCased(runes[after]))
}

func isCased(r rune) bool {
	return unicode.IsUpper(r) || unicode.IsLower(r) || unicode.IsTitle(r) ||
		unicode.In(r, unicode.Other_Uppercase, unicode.Other_Lowercase)
}

// isCaseIgnorable reports whether a character has Unicode's property Case_Ignorable.
func isCaseIgnorable(r rune) bool {
	return unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) ||
		strings.ContainsRune("'.:\u00b7\u0387\u055f\u05f4\u2018\u2019\u2024\u2027\ufe13\ufe52\ufe55"+
			"\uff07\uff0e\uff1a", r)
}

// title returns one character in title case.
func title(r rune) string {
	if r < utf8.RuneSelf {
		return strings.ToUpper(string(r))
	}
	return cases.Title(language.Und, cases.NoLower).String(string(r))
}

// capitalize returns a text with its first character in title case and the rest in lower case.
func capitalize(s string) string {
	if s == "" {
		return s
	}
	runes := []rune(s)
	var b strings.Builder
	b.WriteString(title(runes[0]))
	for i, r := range runes[1:] {
		b.WriteString(lowerAt(runes, i+1, r))
	}
	return b.String()
}

// titleWords returns a text as Python's str.title does.
func titleWords(s string) string {
	runes := []rune(s)
	var b strings.Builder
	inWord := false
	for i, r := range runes {
		if inWord {
			b.WriteString(lowerAt(runes, i, r))
		} else {
			b.WriteString(title(r))
		}
		inWord = isCased(r)
	}

	return b.String()
}

// swapCase returns a text with upper and lower case exchanged.
func swapCase(s string) string {
	runes := []rune(s)
	var b strings.Builder
	for i, r := range runes {
		switch {
		case isUpper(r):
			b.WriteString(lowerAt(runes, i, r))
		case isLower(r):
			b.WriteString(upper(string(r)))
		default:
			b.WriteRune(r)
		}
	}

	return b.String()
}

func isUpper(r rune) bool { return unicode.IsUpper(r) || unicode.Is(unicode.Other_Uppercase, r) }

func isLower(r rune) bool { return unicode.IsLower(r) || unicode.Is(unicode.Other_Lowercase, r) }

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// isAlphanumeric reports whether Python's isalnum holds for a character.
func isAlphanumeric(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) }

// otherDigits are the digits of Unicode outside the category Nd, as pairs of first and last.
var otherDigits = []rune{0xb2, 0xb3, 0xb9, 0xb9, 0x1369, 0x1371, 0x19da, 0x19da, 0x2070, 0x2070,
	0x2074, 0x2079, 0x2080, 0x2089, 0x2460, 0x2468, 0x2474, 0x247c, 0x2488, 0x2490, 0x24ea, 0x24ea,
	0x24f5, 0x24fd, 0x24ff, 0x24ff, 0x2776, 0x277e, 0x2780, 0x2788, 0x278a, 0x2792, 0x10a40, 0x10a43,
	0x10e60, 0x10e68, 0x11052, 0x1105a, 0x1f100, 0x1f10a}

// isDigit reports whether Python's isdigit holds for a character.
func isDigit(r rune) bool {
	if unicode.IsDigit(r) {
		return true
	}
	for i := 0; i < len(otherDigits); i += 2 {
		if r >= otherDigits[i] && r <= otherDigits[i+1] {
			return true
		}
	}
	return false
}

// all reports whether a text is not empty and all its characters satisfy a condition.
func all(s string, is func(rune) bool) bool {
	return s != "" && strings.IndexFunc(s, func(r rune) bool { return !is(r) }) < 0
}

// hasCase reports whether a text has at least one character that satisfies is and none that satisfies
// other.
func hasCase(s string, is, other func(rune) bool) bool {
	found := false
	for _, r := range s {
		if other(r) || unicode.IsTitle(r) {
			return false
		}
		found = found || is(r)
	}
	return found
}

// isTitle reports whether Python's istitle holds for a text.
func isTitle(s string) bool {
	found, inWord := false, false
	for _, r := range s {
		switch {
		case isUpper(r) || unicode.IsTitle(r):
			if inWord {
				return false
			}
			found, inWord = true, true
		case isLower(r):
			if !inWord {
				return false
			}
		default:
			inWord = false
		}
	}

	return found
}

// split splits a text at a separator at most limit times. A negative number means no limit.
func split(s, separator string, limit int) []string {
	if limit < 0 {
		return strings.Split(s, separator)
	}
	return strings.SplitN(s, separator, limit+1)
}

// splitFromRight splits a text at a separator, from its end.
func splitFromRight(s, separator string, limit int) []string {
	if limit < 0 {
		return strings.Split(s, separator)
	}

	var parts []string
	for range limit {
		i := strings.LastIndex(s, separator)
		if i < 0 {
			break
		}
		parts = append(parts, s[i+len(separator):])
		s = s[:i]
	}

	parts = append(parts, s)
	slices.Reverse(parts)
	return parts
}

// splitFields splits a text at white space at most limit times.
func splitFields(s string, limit int) []string {
	parts := []string{}
	for s = trimLeft(s); s != ""; s = trimLeft(s) {
		i := strings.IndexFunc(s, isSpace)
		if limit == 0 || i < 0 {
			if limit == 0 {
				s = trimRight(s)
			}
			return append(parts, s)
		}
		parts = append(parts, s[:i])
		s = s[i:]
		limit--
	}

	return parts
}

// splitFieldsFromRight splits a text at white space, from its end.
func splitFieldsFromRight(s string, limit int) []string {
	parts := []string{}
	for s = trimRight(s); s != ""; s = trimRight(s) {
		i := strings.LastIndexFunc(s, isSpace)
		if limit == 0 || i < 0 {
			if limit == 0 {
				s = trimLeft(s)
			}
			parts = append(parts, s)
			break
		}
		_, n := utf8.DecodeRuneInString(s[i:])
		parts = append(parts, s[i+n:])
		s = s[:i]
		limit--
	}

	slices.Reverse(parts)
	return parts
}
