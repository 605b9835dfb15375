package jinja

import (
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"unicode/utf8"
)

type tokenKind int

const (
	tokenEOF tokenKind = iota
	tokenData
	tokenVariableBegin
	tokenVariableEnd
	tokenBlockBegin
	tokenBlockEnd
	tokenName
	tokenString
	tokenInteger
	tokenFloat
	tokenOperator
)

// A token is a lexical element of a template. Text holds the operator, name, data or unescaped
// string.
type token struct {
	kind   tokenKind
	text   string
	number value
	line   int
}

func (t token) String() string {
	switch t.kind {
	case tokenEOF:
		return "end of template"
	case tokenVariableEnd:
		return "end of print statement"
	case tokenBlockEnd:
		return "end of statement block"
	}
	return fmt.Sprintf("%q", t.text)
}

// A lexer splits a template into tokens with trim_blocks and lstrip_blocks on.
type lexer struct {
	source string
	at     int
	line   int
	tokens []token

	// lineStart reports whether the previous match ended with a newline, or nothing has matched yet.
	lineStart bool
}

// lex returns the tokens of a template, ending with tokenEOF.
func lex(source string) []token {
	if !utf8.ValidString(source) {
		fail("the template is not valid UTF-8")
	}

	source = strings.ReplaceAll(source, "\r\n", "\n")
	source = strings.ReplaceAll(source, "\r", "\n")
	source = strings.TrimSuffix(source, "\n")

	l := &lexer{source: source, line: 1, lineStart: true}
	for l.at < len(l.source) {
		l.lexData()
	}

	l.emit(tokenEOF, "")
	return l.tokens
}

func (l *lexer) emit(kind tokenKind, text string) {
	l.tokens = append(l.tokens, token{kind: kind, text: text, line: l.line})
}

func (l *lexer) fail(format string, args ...any) {
	panic(&Error{Line: l.line, Message: fmt.Sprintf(format, args...)})
}

// advance moves past n bytes.
func (l *lexer) advance(n int) {
	matched := l.source[l.at : l.at+n]
	l.line += strings.Count(matched, "\n")
	l.lineStart = strings.HasSuffix(matched, "\n")
	l.at += n
}

func (l *lexer) rest() string { return l.source[l.at:] }

// lexData reads the text up to the next tag, and that tag.
func (l *lexer) lexData() {
	rest := l.rest()
	begin := 0
	for {
		i := strings.IndexByte(rest[begin:], '{')
		if i < 0 || begin+i+1 >= len(rest) {
			l.emit(tokenData, rest)
			l.advance(len(rest))
			return
		}
		begin += i
		if strings.IndexByte("{%#", rest[begin+1]) >= 0 {
			break
		}
		begin++
	}

	kind := rest[begin+1]
	end := begin + 2
	sign := signAt(rest, end)
	end += len(sign)
	raw := false
	if kind == '%' {
		if n := matchRaw(rest[begin:], "raw", false); n > 0 {
			raw, end = true, begin+n
		}
	}

	if text := l.stripData(rest[:begin], sign, kind != '{'); text != "" {
		l.emit(tokenData, text)
	}

	l.advance(end)

	switch {
	case raw:
		l.lexRaw()
	case kind == '#':
		l.lexComment()
	case kind == '{':
		l.emit(tokenVariableBegin, "{{")
		l.lexTag(tokenVariableEnd)
	default:
		l.emit(tokenBlockBegin, "{%")
		l.lexTag(tokenBlockEnd)
	}
}

// signAt returns the whitespace control sign at an index, or "".
func signAt(s string, at int) string {
	if at < len(s) && (s[at] == '-' || s[at] == '+') {
		return s[at : at+1]
	}
	return ""
}

// stripData returns the text before a tag without the whitespace that the tag strips.
func (l *lexer) stripData(text, sign string, lstrip bool) string {
	switch {
	case sign == "-":
		return trimRight(text)
	case sign == "+" || !lstrip:
		return text
	}

	start := strings.LastIndexByte(text, '\n') + 1
	if (start > 0 || l.lineStart) && trimLeft(text[start:]) == "" {
		return text[:start]
	}

	return text
}

// matchRaw returns the length of a raw or endraw tag at the beginning of s, or 0.
func matchRaw(s, name string, trim bool) int {
	at := 2 + len(signAt(s, 2))
	skip := func() { at = len(s) - len(trimLeft(s[at:])) }
	skip()
	if !strings.HasPrefix(s[at:], name) {
		return 0
	}
	at += len(name)
	skip()
	return matchEnd(s, at, "%}", trim, trim)
}

// matchEnd returns the index after the end of a tag or comment, if the end is at the given index, or
// 0. With trim, a plain end includes one newline. With plus, the end may include a plus sign.
func matchEnd(s string, at int, end string, trim, plus bool) int {
	rest := s[at:]
	switch {
	case plus && strings.HasPrefix(rest, "+"+end):
		return at + 1 + len(end)
	case strings.HasPrefix(rest, "-"+end):
		return len(s) - len(trimLeft(rest[1+len(end):]))
	case strings.HasPrefix(rest, end):
		at += len(end)
		if trim && strings.HasPrefix(s[at:], "\n") {
			at++
		}
		return at
	}

	return 0
}

// lexComment skips a comment. A comment that starts at the very end of the template is allowed.
func (l *lexer) lexComment() {
	rest := l.rest()
	if rest == "" {
		return
	}

	i := strings.Index(rest, "#}")
	if i < 0 {
		l.fail("missing end of comment tag")
	}

	if i > 0 && (rest[i-1] == '-' || rest[i-1] == '+') {
		i--
	}

	l.advance(matchEnd(rest, i, "#}", true, true))
}

// lexRaw reads the text up to endraw.
func (l *lexer) lexRaw() {
	rest := l.rest()
	if rest == "" {
		return
	}

	for at := 0; ; {
		i := strings.Index(rest[at:], "{%")
		if i < 0 {
			l.fail("missing end of raw directive")
		}
		at += i
		if n := matchRaw(rest[at:], "endraw", true); n > 0 {
			if text := l.stripData(rest[:at], signAt(rest, at+2), true); text != "" {
				l.emit(tokenData, text)
			}
			l.advance(at + n)
			return
		}
		at += 2
	}
}

var operators = []string{"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]",
	"(", ")", "{", "}", ">", "<", "=", ".", ":", "|", ",", ";"}

// lexTag reads the tokens of a tag up to its end.
func (l *lexer) lexTag(end tokenKind) {
	brackets := []byte{}
	closing := "%}"
	if end == tokenVariableEnd {
		closing = "}}"
	}

	for l.at < len(l.source) {
		rest := l.rest()
		if len(brackets) == 0 {
			block := end == tokenBlockEnd
			if n := matchEnd(rest, 0, closing, block, block); n > 0 {
				l.emit(end, closing)
				l.advance(n)
				return
			}
		}

		if n := len(rest) - len(trimLeft(rest)); n > 0 {
			l.advance(n)
			continue
		}
		if n := matchFloat(l.source, l.at); n > 0 {
			text := strings.ReplaceAll(rest[:n], "_", "")
			f, err := strconv.ParseFloat(text, 64)
			if err != nil {
				l.fail("the number %s is out of range", text)
			}
			l.tokens = append(l.tokens, token{tokenFloat, rest[:n], f, l.line})
			l.advance(n)
			continue
		}
		if n := matchInteger(rest); n > 0 {
			i, ok := new(big.Int).SetString(strings.ReplaceAll(rest[:n], "_", ""), 0)
			if !ok || n > maxDigits {
				l.fail("the number %.40s is not supported", rest[:n])
			}
			l.tokens = append(l.tokens, token{tokenInteger, rest[:n], normalize(i), l.line})
			l.advance(n)
			continue
		}
		if n := matchName(rest); n > 0 {
			l.emit(tokenName, rest[:n])
			l.advance(n)
			continue
		}
		if n := matchString(rest); n > 0 {
			l.emit(tokenString, l.unescape(rest[1:n-1]))
			l.advance(n)
			continue
		}
		l.lexOperator(&brackets)
	}
}

// lexOperator reads an operator and checks that brackets match.
func (l *lexer) lexOperator(brackets *[]byte) {
	rest := l.rest()
	for _, o := range operators {
		if !strings.HasPrefix(rest, o) {
			continue
		}
		switch o {
		case "{", "(", "[":
			*brackets = append(*brackets, map[string]byte{"{": '}', "(": ')', "[": ']'}[o])
			if len(*brackets) > maxBrackets {
				l.fail("brackets are nested deeper than %d", maxBrackets)
			}
		case "}", ")", "]":
			if len(*brackets) == 0 {
				l.fail("unexpected %q", o)
			}
			last := len(*brackets) - 1
			if (*brackets)[last] != o[0] {
				l.fail("unexpected %q, expected %q", o, (*brackets)[last:])
			}
			*brackets = (*brackets)[:last]
		}
		l.emit(tokenOperator, o)
		l.advance(len(o))
		return
	}

	r, _ := utf8.DecodeRuneInString(rest)
	if r >= utf8.RuneSelf {
		l.fail("the character %q outside of strings is not supported", r)
	}

	l.fail("unexpected character %q", r)
}

// digits returns the length of the decimal digits at an index, including single underscores between
// them.
func digits(s string, at int) int {
	n := 0
	for at+n < len(s) {
		c := s[at+n]
		if c >= '0' && c <= '9' || c == '_' && n > 0 && s[at+n-1] != '_' &&
			at+n+1 < len(s) && s[at+n+1] >= '0' && s[at+n+1] <= '9' {
			n++
			continue
		}
		break
	}

	return n
}

// matchFloat returns the length of a float literal at an index, or 0.
func matchFloat(s string, at int) int {
	if at > 0 && s[at-1] == '.' {
		return 0
	}

	n := digits(s, at)
	if n == 0 {
		return 0
	}

	fraction := false
	if at+n < len(s) && s[at+n] == '.' {
		if d := digits(s, at+n+1); d > 0 {
			n += 1 + d
			fraction = true
		}
	}

	if at+n < len(s) && (s[at+n] == 'e' || s[at+n] == 'E') {
		m := n + 1 + len(signAt(s, at+n+1))
		if d := digits(s, at+m); d > 0 {
			return m + d
		}
	}

	if fraction {
		return n
	}

	return 0
}

// matchInteger returns the length of an integer literal at the beginning of s, or 0.
func matchInteger(s string) int {
	if len(s) > 2 && s[0] == '0' {
		valid := map[byte]string{'b': "01", 'o': "01234567", 'x': "0123456789abcdef"}[s[1]|0x20]
		n := 2
		for valid != "" && n < len(s) {
			isDigit := func(c byte) bool { return strings.IndexByte(valid, c|0x20) >= 0 && c >= '0' }
			if !isDigit(s[n]) && !(s[n] == '_' && n+1 < len(s) && isDigit(s[n+1])) {
				break
			}
			n++
		}
		if n > 2 {
			return n
		}
	}

	if s[0] == '0' { // a decimal zero, possibly with several digits
		n := 1
		for n < len(s) && (s[n] == '0' || s[n] == '_' && n+1 < len(s) && s[n+1] == '0') {
			n++
		}
		return n
	}

	return digits(s, 0)
}

// matchName returns the length of an ASCII name at the beginning of s, or 0.
func matchName(s string) int {
	n := 0
	for n < len(s) && (s[n] == '_' || s[n] >= 'a' && s[n] <= 'z' || s[n] >= 'A' && s[n] <= 'Z' ||
		n > 0 && s[n] >= '0' && s[n] <= '9') {
		n++
	}
	return n
}

// matchString returns the length of a string literal with its quotes, or 0.
func matchString(s string) int {
	if s[0] != '\'' && s[0] != '"' {
		return 0
	}

	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case s[0]:
			return i + 1
		}
	}

	return 0
}

// unescape decodes the escape sequences of a string literal.
//
// Jinja2 first turns every character outside ASCII into an escape sequence. After a backslash, that
// sequence is no longer one: "\é" becomes the four characters after an escaped backslash.
func (l *lexer) unescape(s string) string {
	if strings.IndexByte(s, '\\') < 0 {
		return s
	}

	var out strings.Builder
	for i := 0; i < len(s); {
		if s[i] != '\\' {
			out.WriteByte(s[i])
			i++
			continue
		}
		i++
		r, size := utf8.DecodeRuneInString(s[i:])
		if r >= utf8.RuneSelf {
			out.WriteString(backslashReplace(r))
			i += size
			continue
		}
		c := s[i]
		i++
		switch c {
		case '\n':
		case '\\', '\'', '"':
			out.WriteByte(c)
		case 'a', 'b', 'f', 'n', 'r', 't', 'v':
			out.WriteByte("\a\b\f\n\r\t\v"[strings.IndexByte("abfnrtv", c)])
		case '0', '1', '2', '3', '4', '5', '6', '7':
			n := int(c - '0')
			for k := 0; k < 2 && i < len(s) && s[i] >= '0' && s[i] <= '7'; k++ {
				n = n*8 + int(s[i]-'0')
				i++
			}
			out.WriteRune(rune(n))
		case 'x', 'u', 'U':
			size := map[byte]int{'x': 2, 'u': 4, 'U': 8}[c]
			if i+size > len(s) {
				l.fail("truncated \\%c escape in a string", c)
			}
			n, err := strconv.ParseUint(s[i:i+size], 16, 32)
			if err != nil || strings.ContainsAny(s[i:i+size], "_+-") {
				l.fail("invalid \\%c escape in a string", c)
			}
			if !utf8.ValidRune(rune(n)) {
				l.fail("the escape \\%c%s in a string is not supported", c, s[i:i+size])
			}
			out.WriteRune(rune(n))
			i += size
		case 'N':
			l.fail("the escape \\N in a string is not supported")
		default:
			out.WriteByte('\\')
			out.WriteByte(c)
		}
	}

	return out.String()
}

// backslashReplace returns the escape sequence of a character, as Python's backslashreplace does.
func backslashReplace(r rune) string {
	switch {
	case r <= 0xff:
		return fmt.Sprintf(`\x%02x`, r)
	case r <= 0xffff:
		return fmt.Sprintf(`\u%04x`, r)
	}
	return fmt.Sprintf(`\U%08x`, r)
}
