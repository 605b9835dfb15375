package split

import (
	"math/rand/v2"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
	"github.com/stretchr/testify/require"
)

var published = map[string]string{
	"GPT2": GPT2, "Llama3": Llama3, "Qwen": Qwen, "Tekken": Tekken, "GPT4o": GPT4o,
}

// known replaces characters that belong to a different class in package unicode, which regexp2 uses.
func known(text string) string {
	return strings.Map(func(r rune) rune {
		var c class
		switch {
		case r == '\r' || r == '\n':
			c = newline
		case unicode.IsSpace(r):
			c = space
		case unicode.In(r, unicode.Lu, unicode.Lt):
			c = upper
		case unicode.Is(unicode.Ll, r):
			c = lower
		case unicode.In(r, unicode.Lm, unicode.Lo):
			c = letter
		case unicode.Is(unicode.M, r):
			c = mark
		case unicode.Is(unicode.N, r):
			c = number
		}
		if c != class(classes().bits(r)&classBits) {
			return 'x'
		}
		return r
	}, strings.ToValidUTF8(text, "�"))
}

func byScanner(s *Scanner, text string) (pieces []string) {
	for text != "" {
		n := s.Next([]byte(text))
		pieces = append(pieces, text[:n])
		text = text[n:]
	}
	return pieces
}

func byPattern(t *testing.T, re *regexp2.Regexp, text string) (pieces []string) {
	m, err := re.FindStringMatch(text)
	for ; m != nil; m, err = re.FindNextMatch(m) {
		pieces = append(pieces, m.String())
	}
	require.NoError(t, err)
	return pieces
}

// hostile lists texts that exercise the boundaries between the patterns' alternatives.
var hostile = []string{
	"", " ", "  ", "\n", " \n", "\n ", " \r\n x", "a  b", "a \t\n\n  b", "don't DON'T 'S ''s",
	"'ſ 'ſs", "'re'vE'lL'Ll'd'", "' s", "x's'll", "12345 1 23", " 12½Ⅷ٣", "a1b22",
	"(hello) [x]!?\n\n/ //\n/", " ./a/b\r\n/", "camelCase HTTPServer aB ABc ǅa ʰA",
	"e\u0301A\u0301b \u0301 \u0301\u0301x", "中文字。汉 字", "أَهْلًا", "नमस्ते", "สวัสดี",
	"👩‍👩‍👧 🇩🇪", "\u00a0\u2003x\u2028y\u0085", "\u200d\ufeff\x00\x1f", "ß'S İ'T",
	"\t\tif x {\n\t\t\treturn\n\t\t}\n\n", "_a__b $x #y @z", "ªA ªªB 'ªs", "\u00a0a\u00a01\u00a0!",
}

func TestScannersAreTheirPatterns(t *testing.T) {
	for name, pattern := range published {
		t.Run(name, func(t *testing.T) {
			s, ok := NewScanner(pattern)
			require.True(t, ok)
			re := regexp2.MustCompile(pattern, regexp2.None)
			r := rand.New(rand.NewPCG(1, 2))
			for range 20_000 {
				text := known(randomText(r))
				require.Equal(t, byPattern(t, re, text), byScanner(s, text), "%q", text)
			}
			for _, text := range hostile {
				text = known(text)
				require.Equal(t, byPattern(t, re, text), byScanner(s, text), "%q", text)
			}
		})
	}
}

// randomText strings together parts of the hostile texts and characters of any class.
func randomText(r *rand.Rand) string {
	var b strings.Builder
	for range 1 + r.IntN(12) {
		switch part := []rune(hostile[r.IntN(len(hostile))]); {
		case len(part) == 0:
			b.WriteRune(rune(r.IntN(0x3000)))
		case r.IntN(3) == 0:
			b.WriteRune(part[r.IntN(len(part))])
		default:
			lo := r.IntN(len(part))
			b.WriteString(string(part[lo : lo+r.IntN(min(6, len(part)-lo))]))
		}
	}

	return b.String()
}

func FuzzScanner(f *testing.F) {
	for _, text := range hostile {
		f.Add(text)
	}

	type pair struct {
		scanner *Scanner
		re      *regexp2.Regexp
	}
	pairs := map[string]pair{}
	for name, pattern := range published {
		s, _ := NewScanner(pattern)
		pairs[name] = pair{s, regexp2.MustCompile(pattern, regexp2.None)}
	}

	f.Fuzz(func(t *testing.T, text string) {
		text = known(text)
		for name, p := range pairs {
			require.Equal(t, byPattern(t, p.re, text), byScanner(p.scanner, text), "%s: %q", name,
				text)
		}
	})
}

// FuzzScannerBytes checks that pieces are never empty and end within the text, for arbitrary bytes.
func FuzzScannerBytes(f *testing.F) {
	f.Add([]byte("a\xff \xe2\x82 b\xc3"))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, pattern := range published {
			s, _ := NewScanner(pattern)
			for rest := text; len(rest) > 0; {
				n := s.Next(rest)
				require.True(t, 0 < n && n <= len(rest))
				rest = rest[n:]
			}
		}
	})
}

func TestScannerTimeIsLinear(t *testing.T) {
	// A quadratic scanner would take minutes for a text of this length.
	for _, unit := range []string{"a", " ", "\n", " \n", "ªA", "A", "1", "!", "'", "\u0301", "/"} {
		for _, pattern := range published {
			s, _ := NewScanner(pattern)
			text := []byte(strings.Repeat(unit, 1<<21/len(unit)))
			for len(text) > 0 {
				text = text[s.Next(text):]
			}
		}
	}
}

func TestClasses(t *testing.T) {
	require.True(t, IsSpace(' ') && IsSpace('\n') && IsSpace(0x3000) && !IsSpace(0x200b))
	require.True(t, IsWord('_') && IsWord('é') && IsWord(0x200d) && !IsWord('½') && !IsWord('-'))
	require.True(t, IsNumeric('½') && IsNumeric(0x11de0) && !IsNumeric('a'))
	require.False(t, IsSpace(utf8.RuneError) || IsWord(utf8.MaxRune))
}
