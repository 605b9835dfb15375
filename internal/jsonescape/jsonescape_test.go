package jsonescape

import (
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// TestDecode compares escapes, with text after them, with encoding/json.
func TestDecode(t *testing.T) {
	for text, length := range map[string]int{
		`\"`: 2, `\\`: 2, `\/`: 2, `\b`: 2, `\f`: 2, `\n`: 2, `\r`: 2, `\t`: 2, `\\u0041`: 2,
		`\u0041`: 6, `\u00e9`: 6, `\u00E9`: 6, `\u0000`: 6, `\uffff`: 6, `\ufffd`: 6, `\u00411`: 6,
		`\ud83d\ude00`: 12, `\uDBFF\uDFFF`: 12, `\ud83d\ude00\ude00`: 12,
		`\ud83d`: 6, `\ude00`: 6, `\ud83dx`: 6, `\ud83d\n`: 6, `\ud83d\u0041`: 6, `\ude00\ud83d`: 6, `\ud83d\ud83d\ude00`: 6,
	} {
		r, n := Decode(text)
		require.Equal(t, length, n, text)
		var want string
		require.NoError(t, json.Unmarshal([]byte(`"`+text[:n]+`"`), &want), text)
		require.Equal(t, want, string(utf8.AppendRune(nil, r)), text)

		fromBytes, n := Decode([]byte(text))
		require.Equal(t, r, fromBytes, text)
		require.Equal(t, length, n, text)
	}

	for _, text := range []string{"", `\`, "a", `u0041`, `\a`, `\x41`, `\u`, `\u004`, `\u004g`, `\u+041`, `\u0_41`, `\U0041`, `\'`} {
		_, n := Decode(text)
		require.Zero(t, n, text)
	}
}
