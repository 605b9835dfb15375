// Package jsonescape decodes the escapes in JSON strings, for parsers that read texts which encoding/json
// would read differently or too slowly.
package jsonescape

import (
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Decode decodes the escape at the start of a text, and returns its character and its length in bytes. The
// length is 0 if the text does not start with a valid escape.
//
// Two \u escapes that form a surrogate pair are one escape of 12 bytes. A surrogate without its counterpart
// is returned as it is. It is not a character; [utf8.AppendRune] turns it into U+FFFD, as encoding/json does.
func Decode[Text ~string | ~[]byte](text Text) (r rune, length int) {
	if len(text) < 2 || text[0] != '\\' {
		return 0, 0
	}

	if i := strings.IndexByte(`"\/bfnrt`, text[1]); i >= 0 {
		return rune("\"\\/\b\f\n\r\t"[i]), 2
	}

	r, ok := unit(text)
	if !ok {
		return 0, 0
	}

	if utf16.IsSurrogate(r) {
		if second, ok := unit(text[6:]); ok {
			if pair := utf16.DecodeRune(r, second); pair != utf8.RuneError {
				return pair, 12
			}
		}
	}

	return r, 6
}

// unit decodes \uXXXX at the start of a text.
func unit[Text ~string | ~[]byte](text Text) (rune, bool) {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return 0, false
	}
	v, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	return rune(v), err == nil
}
