package hf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// An object is a JSON object whose members are taken one at a time. Members that are never taken or
// occur twice are reported as errors at the end.
type object struct {
	at      string // prefix of member names in errors
	members map[string]json.RawMessage
	taken   map[string]bool
	err     error // the first error
}

func parseObject(text []byte) (*object, error) {
	if err := checkJSON(text); err != nil {
		return nil, err
	}
	return newObject("", text)
}

func newObject(at string, text []byte) (*object, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(text, &members); err != nil || members == nil {
		return nil, fmt.Errorf("%swant a JSON object, have %.40q", at, bytes.TrimSpace(text))
	}
	return newMembers(at, members), nil
}

// newMembers returns an object for members that are already decoded.
func newMembers(at string, members map[string]json.RawMessage) *object {
	return &object{at: at, members: members, taken: map[string]bool{}}
}

// checkJSON returns an error unless text is a single JSON value without deep nesting or duplicate keys.
func checkJSON(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	type level struct {
		keys map[string]bool // keys of an object seen so far
		key  bool            // the next token of an object is a key
	}
	var levels []level
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) && len(levels) == 0 && d.InputOffset() > 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("invalid JSON at byte %d: %w", d.InputOffset(), err)
		}
		if n := len(levels); n > 0 && levels[n-1].key {
			if key, ok := token.(string); ok {
				if levels[n-1].keys[key] {
					return fmt.Errorf("the member %q occurs twice", key)
				}
				levels[n-1].keys[key], levels[n-1].key = true, false
				continue
			}
		}
		switch token {
		case json.Delim('{'):
			levels = append(levels, level{map[string]bool{}, true})
			if len(levels) > 32 {
				return errors.New("it is nested deeper than 32 levels")
			}
			continue
		case json.Delim('['):
			levels = append(levels, level{})
			if len(levels) > 32 {
				return errors.New("it is nested deeper than 32 levels")
			}
			continue
		case json.Delim('}'), json.Delim(']'):
			levels = levels[:len(levels)-1]
		}
		if n := len(levels); n > 0 && levels[n-1].keys != nil {
			levels[n-1].key = true
		}
	}
}

func (o *object) fail(name, format string, args ...any) {
	if o.err == nil {
		o.err = fmt.Errorf("%s%s: %w", o.at, name, fmt.Errorf(format, args...))
	}
}

// done returns the first error, or an error that names a member that was never taken.
func (o *object) done() error {
	if o.err != nil {
		return o.err
	}
	for _, name := range slices.Sorted(maps.Keys(o.members)) {
		if !o.taken[name] {
			return fmt.Errorf("%s%s is %.60s: this field is not supported, and ignoring it "+
				"might change the model", o.at, name, o.members[name])
		}
	}
	return nil
}

// harmless takes members that don't affect the results of a model.
func (o *object) harmless(names ...string) {
	for _, name := range names {
		o.taken[name] = true
	}
}

// has reports whether a member is present and not null.
func (o *object) has(name string) bool {
	v, ok := o.members[name]
	return ok && string(v) != "null"
}

// take decodes a member into v if it is present and not null. Otherwise it returns false and does not
// change v.
func (o *object) take(name string, v any, want string) bool {
	o.taken[name] = true
	if !o.has(name) {
		return false
	}
	if err := json.Unmarshal(o.members[name], v); err != nil {
		o.fail(name, "it is %.60s, want %s", o.members[name], want)
		return false
	}
	return true
}

// number returns an integer between least and most, or missing if the member is absent.
func (o *object) number(name string, missing, least, most int) int {
	var n json.Number
	if !o.take(name, &n, "a whole number") {
		return missing
	}
	v, err := n.Int64()
	if err != nil || v < int64(least) || v > int64(most) {
		o.fail(name, "it is %.40s, want a whole number from %d to %d", n, least, most)
		return missing
	}
	return int(v)
}

// must is like number but fails if the member is absent.
func (o *object) must(name string, least, most int) int {
	if !o.has(name) {
		o.fail(name, "it is missing and has no default")
	}
	return o.number(name, least, least, most)
}

func (o *object) float(name string, missing float64) float64 {
	o.take(name, &missing, "a number")
	return missing
}

func (o *object) bool(name string, missing bool) bool {
	o.take(name, &missing, "true or false")
	return missing
}

func (o *object) string(name, missing string) string {
	o.take(name, &missing, "a string")
	return missing
}

// only takes a member that is supported with a single value.
func (o *object) only(name, value, why string) {
	o.taken[name] = true
	if v, ok := o.members[name]; ok && string(v) != "null" && !sameJSON(v, value) {
		o.fail(name, "it is %.60s, and %s", v, why)
	}
}

// sameJSON compares numbers by value and everything else as text.
func sameJSON(v json.RawMessage, want string) bool {
	var a, b float64
	if json.Unmarshal(v, &a) == nil && json.Unmarshal([]byte(want), &b) == nil {
		return a == b
	}
	return strings.TrimSpace(string(v)) == want
}

// ids returns the token ids of a member that is a number or a list of numbers.
func (o *object) ids(name string) []int {
	o.taken[name] = true
	if !o.has(name) {
		return nil
	}

	var list []int
	if json.Unmarshal(o.members[name], &list) == nil {
		return list
	}

	var one int
	if o.take(name, &one, "a token id or a list of them") {
		return []int{one}
	}

	return nil
}
