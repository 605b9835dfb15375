package safetensors

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kasmina-go/kasmina/internal/jsonescape"
)

// scanner reads JSON from left to right. It supports objects, arrays of whole numbers, and strings,
// which is all that headers contain.
type scanner struct {
	text string
	at   int
}

var errNotJSON = errors.New("not valid JSON")

// skipSpace skips white space.
func (s *scanner) skipSpace() {
	for s.at < len(s.text) {
		switch s.text[s.at] {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return
		}
	}
}

// accept consumes c if it is next.
func (s *scanner) accept(c byte) bool {
	s.skipSpace()
	if s.at == len(s.text) || s.text[s.at] != c {
		return false
	}
	s.at++
	return true
}

// acceptNull consumes null if it is next.
func (s *scanner) acceptNull() bool {
	s.skipSpace()
	if !strings.HasPrefix(s.text[s.at:], "null") {
		return false
	}
	s.at += len("null")
	return true
}

// expect consumes c, or returns an error if something else is next.
func (s *scanner) expect(c byte) error {
	if s.accept(c) {
		return nil
	}
	return s.found(string(c))
}

// found returns an error that describes the next token and the expected one.
func (s *scanner) found(want string) error {
	if s.at == len(s.text) {
		return fmt.Errorf("%w: the text ends where %s is expected", errNotJSON, want)
	}
	next := s.text[s.at:min(s.at+20, len(s.text))]
	if end := strings.IndexAny(next[1:], ",:{}[] "); end >= 0 {
		next = next[:1+end]
	}
	return fmt.Errorf("%w: found %.20q at byte %d, expected %s", errNotJSON, next, s.at, want)
}

// end returns an error unless the text ends here.
func (s *scanner) end() error {
	if s.skipSpace(); s.at < len(s.text) {
		return s.found("the end")
	}
	return nil
}

// key reads the next key of an object and the following colon. With first set, it reads the opening
// brace first. At the end of the object, more is false.
func (s *scanner) key(first bool) (key string, more bool, err error) {
	if more, err = s.next(first, '{', '}'); err != nil || !more {
		return "", false, err
	}
	if key, err = s.string(); err == nil {
		err = s.expect(':')
	}
	return key, true, err
}

// next reads the separator before an element: open before the first element, a comma between elements,
// or close after the last. more is false after close.
func (s *scanner) next(first bool, open, close byte) (more bool, err error) {
	if first {
		if err := s.expect(open); err != nil {
			return false, err
		}
	}

	if s.accept(close) {
		return false, nil
	}

	if first {
		return true, nil
	}

	return true, s.expect(',')
}

// array reads an array of whole numbers up to limit into numbers, and returns its length.
func (s *scanner) array(numbers []int64, limit uint64) (int, error) {
	for n := 0; ; n++ {
		more, err := s.next(n == 0, '[', ']')
		if err != nil || !more {
			return n, err
		}
		if n == len(numbers) {
			return n, fmt.Errorf("an array of more than %d numbers", len(numbers))
		}
		if numbers[n], err = s.number(limit); err != nil {
			return n, err
		}
	}
}

// number reads a whole number up to limit.
func (s *scanner) number(limit uint64) (int64, error) {
	s.skipSpace()
	start := s.at
	for s.at < len(s.text) && strings.IndexByte("0123456789+-.eE", s.text[s.at]) >= 0 {
		s.at++
	}

	digits := s.text[start:s.at]
	if digits == "" {
		return 0, s.found("a number")
	}

	v, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || v > limit || digits[0] == '0' && digits != "0" {
		return 0, fmt.Errorf("found %.40s, expected a whole number of at most %d", digits, limit)
	}

	return int64(v), nil
}

// string reads a string. The result shares the text's memory unless it contains escapes.
func (s *scanner) string() (string, error) {
	if !s.accept('"') {
		return "", s.found("a string")
	}

	start, escaped := s.at, false
	for ; s.at < len(s.text); s.at++ {
		switch c := s.text[s.at]; {
		case c == '"':
			raw := s.text[start:s.at]
			s.at++
			if escaped {
				return unescape(raw)
			}
			return raw, nil
		case c == '\\':
			escaped = true
			s.at++ // an escaped character does not end the string
		case c < ' ':
			return "", fmt.Errorf("%w: control character %#x in a string", errNotJSON, c)
		}
	}

	s.at = len(s.text)
	return "", s.found(`"`)
}

// unescape decodes the text between the quotes of a JSON string.
func unescape(raw string) (string, error) {
	b := make([]byte, 0, len(raw))
	for len(raw) > 0 {
		if raw[0] != '\\' {
			n := strings.IndexByte(raw, '\\')
			if n < 0 {
				n = len(raw)
			}
			b, raw = append(b, raw[:n]...), raw[n:]
			continue
		}

		r, n := jsonescape.Decode(raw)
		if n == 0 {
			return "", fmt.Errorf("%w: escape %.12q in a string", errNotJSON, raw)
		}
		b, raw = utf8.AppendRune(b, r), raw[n:]
	}

	return string(b), nil
}
