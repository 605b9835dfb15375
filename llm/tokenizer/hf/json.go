package hf

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/kasmina-go/kasmina/internal/jsonescape"
)

// A value is a JSON value as written in the file, without surrounding space. The package encoding/json
// would build maps for a file of 33 MB, ignore duplicate keys, and match keys regardless of case.
type value []byte

// maxDepth limits the nesting of values. Files of known models nest eight levels deep.
const maxDepth = 64

// parseJSON checks that a text consists of exactly one JSON value.
func parseJSON(text []byte) (value, error) {
	if !utf8.Valid(text) {
		return nil, errors.New("it is not UTF-8")
	}

	from := skipSpace(text, 0)
	to, err := skipValue(text, from, 0)
	if err != nil {
		return nil, err
	}

	if end := skipSpace(text, to); end < len(text) {
		return nil, fmt.Errorf("byte %d is %q after the value, want the end", end, text[end])
	}

	return value(text[from:to]), nil
}

func skipSpace(text []byte, at int) int {
	for at < len(text) {
		switch text[at] {
		case ' ', '\t', '\n', '\r':
			at++
		default:
			return at
		}
	}
	return at
}

// skipValue returns the end of the value at a position.
func skipValue(text []byte, at, depth int) (int, error) {
	if depth > maxDepth {
		return 0, fmt.Errorf("byte %d is nested deeper than %d levels", at, maxDepth)
	}

	if at == len(text) {
		return 0, errors.New("it ends inside of a value")
	}

	switch c := text[at]; {
	case c == '"':
		return skipString(text, at)
	case c == '{':
		return skipItems(text, at, '}', func(at int) (int, error) {
			return skipMember(text, at, depth)
		})
	case c == '[':
		return skipItems(text, at, ']', func(at int) (int, error) {
			return skipValue(text, at, depth+1)
		})
	case c == '-' || '0' <= c && c <= '9':
		return skipNumber(text, at)
	}

	for _, literal := range []string{"null", "true", "false"} {
		if len(text)-at >= len(literal) && string(text[at:at+len(literal)]) == literal {
			return at + len(literal), nil
		}
	}

	return 0, fmt.Errorf("byte %d is %q, want a value", at, text[at])
}

// skipItems skips the comma-separated items between brackets.
func skipItems(text []byte, at int, closing byte, item func(at int) (int, error)) (int, error) {
	at = skipSpace(text, at+1)
	if at < len(text) && text[at] == closing {
		return at + 1, nil
	}

	for {
		var err error
		if at, err = item(at); err != nil {
			return 0, err
		}
		switch at = skipSpace(text, at); {
		case at == len(text):
			return 0, errors.New("it ends inside of a value")
		case text[at] == closing:
			return at + 1, nil
		case text[at] != ',':
			return 0, fmt.Errorf("byte %d is %q, want ',' or %q", at, text[at], closing)
		}
		at = skipSpace(text, at+1)
	}
}

func skipMember(text []byte, at, depth int) (int, error) {
	if at == len(text) || text[at] != '"' {
		return 0, fmt.Errorf("byte %d does not start a key", at)
	}

	at, err := skipString(text, at)
	if err != nil {
		return 0, err
	}

	if at = skipSpace(text, at); at == len(text) || text[at] != ':' {
		return 0, fmt.Errorf("byte %d is not the ':' after a key", at)
	}

	return skipValue(text, skipSpace(text, at+1), depth+1)
}

func skipString(text []byte, at int) (int, error) {
	for i := at + 1; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			return i + 1, nil
		case c == '\\':
			i++ // escapes are checked when the string is read
		case c < ' ':
			return 0, fmt.Errorf("byte %d is the control character %#x inside of a string", i, c)
		}
	}

	return 0, fmt.Errorf("the string at byte %d does not end", at)
}

func skipNumber(text []byte, at int) (int, error) {
	end := at
	for end < len(text) && isNumberByte(text[end]) {
		end++
	}
	if _, err := strconv.ParseFloat(string(text[at:min(end, at+400)]), 64); err != nil {
		return 0, fmt.Errorf("byte %d does not start a number: %.40q", at, text[at:end])
	}
	return end, nil
}

func isNumberByte(c byte) bool {
	return '0' <= c && c <= '9' || c == '-' || c == '+' || c == '.' || c == 'e' || c == 'E'
}

// kind returns the kind of a value for errors.
func (v value) kind() string {
	switch v[0] {
	case '"':
		return "a string"
	case '{':
		return "an object"
	case '[':
		return "an array"
	case 'n':
		return "null"
	case 't', 'f':
		return "a boolean"
	}

	return "a number"
}

func (v value) isNull() bool { return v[0] == 'n' }

// short returns the beginning of the value for errors.
func (v value) short() string {
	if len(v) > 60 {
		return string(v[:60]) + "…"
	}
	return string(v)
}

// elements calls f for each element of an array.
func (v value) elements(f func(i int, element value) error) error {
	if v[0] != '[' {
		return fmt.Errorf("it is %s, want an array", v.kind())
	}

	i := 0
	_, err := skipItems(v, 0, ']', func(at int) (int, error) {
		end, err := skipValue(v, at, 0)
		if err == nil {
			err = f(i, v[at:end])
		}
		i++
		return end, err
	})

	return err
}

// members calls f for each member of an object. The key is valid only during the call.
func (v value) members(f func(key []byte, member value) error) error {
	if v[0] != '{' {
		return fmt.Errorf("it is %s, want an object", v.kind())
	}

	var scratch []byte
	_, err := skipItems(v, 0, '}', func(at int) (int, error) {
		colon, _ := skipString(v, at)
		key, err := value(v[at:colon]).appendText(scratch[:0])
		if err != nil {
			return 0, err
		}
		scratch = key
		from := skipSpace(v, skipSpace(v, colon)+1)
		end, err := skipValue(v, from, 0)
		if err == nil {
			err = f(key, v[from:end])
		}
		return end, err
	})

	return err
}

// appendText appends the decoded text of a string.
func (v value) appendText(text []byte) ([]byte, error) {
	if v[0] != '"' {
		return nil, fmt.Errorf("it is %s, want a string", v.kind())
	}

	for at := 1; at < len(v)-1; at++ {
		if v[at] != '\\' {
			text = append(text, v[at])
			continue
		}
		r, n := jsonescape.Decode(v[at:])
		if n == 0 {
			return nil, fmt.Errorf("it has the escape %.12q, which is not valid in JSON", v[at:len(v)-1])
		}
		if utf16.IsSurrogate(r) {
			return nil, fmt.Errorf("it has the escape %q, which is not a character", v[at:at+n])
		}
		text = utf8.AppendRune(text, r)
		at += n - 1
	}

	return text, nil
}

func (v value) text() (string, error) {
	b, err := v.appendText(nil)
	return string(b), err
}

// integer returns a number from 0 to limit.
func (v value) integer(limit int) (int, error) {
	n, err := strconv.Atoi(string(v[:min(len(v), 24)]))
	if err != nil || n < 0 || n > limit {
		return 0, fmt.Errorf("it is %s, want an integer from 0 to %d", v.short(), limit)
	}
	return n, nil
}

func (v value) boolean() (bool, error) {
	if v[0] != 't' && v[0] != 'f' {
		return false, fmt.Errorf("it is %s, want true or false", v.kind())
	}
	return v[0] == 't', nil
}

// An object returns the members of a JSON object one by one. It remembers the first error, which done
// returns. If there is none, done returns an error for unread members.
type object struct {
	where   string // location in the file, such as "model"
	members map[string]value
	err     error
}

// maxMembers exceeds the number of members in any object read by name.
const maxMembers = 64

func newObject(where string, v value) *object {
	o := &object{where: where, members: map[string]value{}}
	err := v.members(func(key []byte, member value) error {
		if _, twice := o.members[string(key)]; twice {
			return fmt.Errorf("%.60q occurs twice", key)
		}
		if len(o.members) == maxMembers {
			return fmt.Errorf("it has more than %d members", maxMembers)
		}
		o.members[string(key)] = member
		return nil
	})
	if err != nil {
		o.fail("", err)
	}

	return o
}

func (o *object) fail(key string, err error) {
	if o.err != nil {
		return
	}

	where := o.where
	if key != "" {
		where = path(where, key)
	}

	if where == "" {
		o.err = err
		return
	}

	o.err = fmt.Errorf("%s: %w", where, err)
}

// path returns the location of a member.
func path(where, key string) string {
	if where == "" {
		return key
	}
	return where + "." + key
}

// take returns a member and marks it as read. It returns false if the member is missing or null.
func (o *object) take(key string) (value, bool) {
	v, ok := o.members[key]
	delete(o.members, key)
	return v, ok && !v.isNull()
}

// must is like take, but a missing member is an error.
func (o *object) must(key string) (value, bool) {
	v, ok := o.take(key)
	if !ok {
		o.fail(key, errors.New("it is missing"))
	}
	return v, ok
}

func (o *object) text(key string) string {
	v, ok := o.must(key)
	if !ok {
		return ""
	}
	s, err := v.text()
	if err != nil {
		o.fail(key, err)
	}
	return s
}

func (o *object) textOr(key, missing string) string {
	if v, ok := o.members[key]; !ok || v.isNull() {
		delete(o.members, key)
		return missing
	}
	return o.text(key)
}

func (o *object) boolOr(key string, missing bool) bool {
	v, ok := o.take(key)
	if !ok {
		return missing
	}
	b, err := v.boolean()
	if err != nil {
		o.fail(key, err)
	}
	return b
}

func (o *object) integer(key string) int {
	v, ok := o.must(key)
	if !ok {
		return 0
	}
	n, err := v.integer(math.MaxInt32)
	if err != nil {
		o.fail(key, err)
	}
	return n
}

// done returns the first error, or an error for an unread member.
func (o *object) done() error {
	if o.err == nil && len(o.members) > 0 {
		keys := make([]string, 0, len(o.members))
		for k := range o.members {
			keys = append(keys, k)
		}
		slices.Sort(keys)
		o.fail(keys[0], fmt.Errorf("it is unknown: %s", o.members[keys[0]].short()))
	}
	return o.err
}

// unsupported returns the error for a component that this package does not implement.
func (o *object) unsupported(kind string) error {
	return fmt.Errorf("%s: type %.60q is not supported", o.where, kind)
}
