package jinja

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// FromGo converts a Go value, which must be nil, a bool, an int, an int64, a float64, a string, a
// json.RawMessage, or a slice of these. Maps are not accepted, since their keys are unordered.
func FromGo(v any) (Value, error) {
	switch v := v.(type) {
	case nil, bool, int64:
		return Value{v}, nil
	case int:
		return Value{int64(v)}, nil
	case float64:
		if v-v != 0 {
			return Value{}, fmt.Errorf("the number %v is not supported", v)
		}
		return Value{v}, nil
	case string:
		if !utf8.ValidString(v) {
			return Value{}, fmt.Errorf("the text %.40q is not valid UTF-8", v)
		}
		return Value{v}, nil
	case json.RawMessage:
		return FromJSON(v)
	case []any:
		l := &list{}
		for _, e := range v {
			e, err := FromGo(e)
			if err != nil {
				return Value{}, err
			}
			l.items = append(l.items, e.v)
		}
		return Value{l}, nil
	}

	return Value{}, fmt.Errorf("a value of type %T is not supported: want a string, a bool, an int, a "+
		"float64, nil, a slice of these, or a json.RawMessage", v)
}

// A Field is a dictionary key with its value.
type Field struct {
	Key   string
	Value Value
}

// Dict returns a dictionary with its keys in the given order.
func Dict(fields ...Field) Value {
	d := newDict()
	for _, f := range fields {
		d.set(f.Key, f.Value.v)
	}
	return Value{d}
}

// List returns a list.
func List(values ...Value) Value {
	l := &list{}
	for _, v := range values {
		l.items = append(l.items, v.v)
	}
	return Value{l}
}

// Fields returns the keys and values of a dictionary, and whether the value is one.
func (v Value) Fields() ([]Field, bool) {
	d, ok := v.v.(*dict)
	if !ok {
		return nil, false
	}
	fields := make([]Field, len(d.keys))
	for i, k := range d.keys {
		s, _ := text(k)
		fields[i] = Field{s, Value{d.values[i]}}
	}
	return fields, true
}

// Items returns the elements of a list, and whether the value is one.
func (v Value) Items() ([]Value, bool) {
	l, ok := v.v.(*list)
	if !ok {
		return nil, false
	}
	items := make([]Value, len(l.items))
	for i, e := range l.items {
		items[i] = Value{e}
	}
	return items, true
}

// IsNone reports whether v is Python's None.
func (v Value) IsNone() bool { return v.v == nil }

// FromJSON decodes JSON text like Python's json.loads, preserving the order of keys.
func FromJSON(raw []byte) (Value, error) {
	if !utf8.Valid(raw) {
		return Value{}, errors.New("the JSON text is not valid UTF-8")
	}

	if hasHalfPair(raw) {
		return Value{}, errors.New("a string with the escape of half a surrogate pair is not supported")
	}

	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	v, err := decodeJSON(d, 0)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return Value{}, err
	}

	if _, err := d.Token(); err != io.EOF {
		return Value{}, errors.New("the JSON text has data after its value")
	}

	return Value{v}, nil
}

// hasHalfPair reports whether a string contains an escaped unpaired surrogate, which encoding/json
// replaces with U+FFFD.
func hasHalfPair(raw []byte) bool {
	escape := func(i int) rune {
		if i+6 > len(raw) || raw[i] != '\\' || raw[i+1] != 'u' {
			return -1
		}
		n, err := strconv.ParseUint(string(raw[i+2:i+6]), 16, 32)
		if err != nil {
			return -1
		}
		return rune(n)
	}

	for i := 0; i < len(raw); i++ {
		if raw[i] != '\\' {
			continue
		}
		if r := escape(i); utf16.IsSurrogate(r) {
			if utf16.DecodeRune(r, escape(i+6)) == utf8.RuneError {
				return true
			}
			i += 6
		}
		i++
	}

	return false
}

func decodeJSON(d *json.Decoder, depth int) (value, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("lists are nested deeper than %d", maxDepth)
	}

	t, err := d.Token()
	if err != nil {
		return nil, err
	}

	switch t := t.(type) {
	case json.Delim:
		if t == '[' {
			l := &list{}
			for d.More() {
				v, err := decodeJSON(d, depth+1)
				if err != nil {
					return nil, err
				}
				l.items = append(l.items, v)
			}
			_, err := d.Token()
			return l, err
		}
		m := newDict()
		for d.More() {
			k, err := decodeJSON(d, depth+1)
			if err != nil {
				return nil, err
			}
			v, err := decodeJSON(d, depth+1)
			if err != nil {
				return nil, err
			}
			m.set(k, v)
		}
		_, err := d.Token()
		return m, err
	case json.Number:
		return decodeNumber(t.String())
	case string:
		return t, nil
	}

	return t, nil
}

func decodeNumber(s string) (value, error) {
	if i, ok := new(big.Int).SetString(s, 10); ok {
		if len(s) > maxDigits {
			return nil, fmt.Errorf("a number has %d digits, want at most %d", len(s), maxDigits)
		}
		if i.IsInt64() {
			return i.Int64(), nil
		}
		return i, nil
	}

	f, err := json.Number(s).Float64()
	if err != nil {
		return nil, fmt.Errorf("the number %.40s is out of range", s)
	}

	return f, nil
}
