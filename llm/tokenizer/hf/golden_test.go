package hf

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

//go:generate python3 testdata/golden.py

// golden holds the results of Rust's tokenizers for texts, as testdata/golden.py recorded them.
type golden struct {
	Texts      []string
	Tokenizers map[string]struct {
		File  json.RawMessage
		Cases []goldenCase
	}
}

type goldenCase struct {
	IDs            []int
	Ordinary       []int // ids if special tokens count as text, unless equal to IDs
	Before, Behind []int
	Decoded        *string // text of all ids, unless equal to the input
	Skipped        *string // text without special tokens, unless equal to Decoded
}

func readGolden(t testing.TB) (g golden) {
	raw, err := os.ReadFile("testdata/golden.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(raw, &g))
	require.NotEmpty(t, g.Tokenizers)
	return g
}

func (g golden) load(t testing.TB, name string) *Tokenizer {
	tok, err := Parse(g.Tokenizers[name].File, nil)
	require.NoError(t, err, name)
	return tok
}

func TestGolden(t *testing.T) {
	g := readGolden(t)
	for name, rust := range g.Tokenizers {
		t.Run(name, func(t *testing.T) {
			tok := g.load(t, name)
			require.Len(t, rust.Cases, len(g.Texts))
			for i, c := range rust.Cases {
				text := g.Texts[i]
				require.Equal(t, c.IDs, tok.Encode([]byte(text)), "%q", text)
				whole := slices.Concat(c.Before, c.IDs, c.Behind)
				require.Equal(t, whole, slices.Concat(nil, tok.EncodeWhole([]byte(text))), "%q",
					text)
				if c.Ordinary == nil {
					c.Ordinary = c.IDs
				}
				require.Equal(t, c.Ordinary, tok.EncodeOrdinary([]byte(text)), "%q", text)
				compareDecoded(t, tok, whole, text, c)
			}
		})
	}
}

func compareDecoded(t *testing.T, tok *Tokenizer, ids []int, text string, c goldenCase) {
	if c.Decoded == nil {
		c.Decoded = &text
	}

	if c.Skipped == nil {
		c.Skipped = c.Decoded
	}

	skipped, err := tok.Decode(ids)
	require.NoError(t, err)
	require.Equal(t, withoutErrors(*c.Skipped), withoutErrors(string(skipped)), "%q", text)
	decoded, err := tok.DecodeWhole(ids)
	require.NoError(t, err)
	require.Equal(t, withoutErrors(*c.Decoded), withoutErrors(string(decoded)), "%q", text)
	for _, skip := range []bool{false, true} {
		want := c.Decoded
		if skip {
			want = c.Skipped
		}
		d := tok.NewDecoder(skip)
		var parts strings.Builder
		for _, id := range ids {
			part, err := d.Next(id)
			require.NoError(t, err)
			if utf8.Valid(decoded) {
				require.True(t, utf8.Valid(part), "%q", part)
			}
			parts.Write(part)
		}
		parts.Write(d.Flush())
		require.Equal(t, withoutErrors(*want), withoutErrors(parts.String()), "%q", text)
	}
}

// withoutErrors drops invalid UTF-8, because Rust's tokenizers replaces one or several invalid bytes by
// U+FFFD.
func withoutErrors(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, ""), "�", "")
}
