// Package bytelevel implements GPT-2's alphabet for byte-level encodings, which write each byte of a
// token as a printable character. Bytes that are not printable in Latin-1 are written as the characters
// from U+0100 on.
package bytelevel

import "unicode/utf8"

var alphabet = func() (a struct {
	runes [256]rune
	bytes [0x144]int16 // -1 for characters outside the alphabet
}) {
	for i := range a.bytes {
		a.bytes[i] = -1
	}
	next := rune(0x100)
	for b := range a.runes {
		r := rune(b)
		if b <= ' ' || 0x7f <= b && b <= 0xa0 || b == 0xad {
			r = next
			next++
		}
		a.runes[b] = r
		a.bytes[r] = int16(b)
	}
	return a
}()

// AppendBytes appends the bytes of a token. It returns false if the token contains a character
// outside the alphabet.
func AppendBytes(bytes []byte, token string) ([]byte, bool) {
	from := len(bytes)
	for _, r := range token {
		if int(r) >= len(alphabet.bytes) || alphabet.bytes[r] < 0 {
			return bytes[:from], false
		}
		bytes = append(bytes, byte(alphabet.bytes[r]))
	}
	return bytes, true
}

// AppendToken appends the characters for bytes.
func AppendToken(token, bytes []byte) []byte {
	for _, b := range bytes {
		token = utf8.AppendRune(token, alphabet.runes[b])
	}
	return token
}
