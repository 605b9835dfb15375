package parquetjson

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/format"
)

// A kind is the form of a node in JSON.
type kind int

const (
	scalar kind = iota
	object
	list
	dictionary // an object with any names
)

// A node is a column, or a part of one. Columns are encoded as in Dremel: every value has a definition level, the
// number of optional and repeated nodes on its path that are present, and a repetition level, the number of repeated
// nodes on its path up to the one that the value repeats.
type node struct {
	name   string // the last part of path
	path   string // for error messages
	column *parquet.Column
	kind   kind

	defined int // the definition level from which on the node is not null

	// Of a list or dictionary: the definition level from which on it is not empty, and the repetition level of its
	// elements.
	filled, repeated int

	// The fields of an object, the element of a list, or the key and the value of a dictionary.
	children []*node

	first *node // the first scalar of the node, or nil if it has none
	leaf  *leaf // of a scalar, while a row group is read
}

// newNode returns the node of a column.
func newNode(c *parquet.Column, path string) *node {
	if c.Repeated() {
		// A repeated column outside of a list is a list of values that are not null.
		n := &node{name: c.Name(), path: path, column: c, kind: list, defined: c.MaxDefinitionLevel() - 1,
			filled: c.MaxDefinitionLevel(), repeated: c.MaxRepetitionLevel(), children: []*node{newElement(c, path)}}
		n.first = n.children[0].first
		return n
	}
	return newElement(c, path)
}

// newElement returns the node of a column, or of an element of a repeated column.
func newElement(c *parquet.Column, path string) *node {
	n := &node{name: c.Name(), path: path, column: c, defined: c.MaxDefinitionLevel()}
	if c.Leaf() {
		n.first = n
		return n
	}

	n.kind = object
	var fields []*parquet.Column
	switch r, ok := onlyRepeated(c); logicalType(c).(type) {
	case *format.ListType:
		if ok {
			n.kind, n.children = list, []*node{newListElement(c, r, path)}
		}
	case *format.MapType:
		if ok && len(r.Columns()) == 2 && r.Columns()[0].Leaf() {
			n.kind, fields = dictionary, r.Columns()
		}
	}

	if n.kind == object {
		fields = c.Columns()
	} else {
		r := c.Columns()[0]
		n.filled, n.repeated = r.MaxDefinitionLevel(), r.MaxRepetitionLevel()
	}
	for _, field := range fields {
		// Without values, the file does not say where a field is null.
		if child := newNode(field, path+"."+field.Name()); child.first != nil {
			n.children = append(n.children, child)
		}
	}

	if n.kind == dictionary && len(n.children) < 2 || len(n.children) == 0 {
		return n
	}
	n.first = n.children[0].first
	return n
}

// newListElement returns the node of the elements of a list. Lists have three levels: the list, a repeated group without
// a meaning, and the element. Old programs write two levels.
func newListElement(c, repeated *parquet.Column, path string) *node {
	if repeated.Leaf() || len(repeated.Columns()) != 1 || repeated.Name() == "array" ||
		repeated.Name() == c.Name()+"_tuple" {
		return newElement(repeated, path)
	}
	return newNode(repeated.Columns()[0], path)
}

// logicalType returns the logical type of a column, or nil.
func logicalType(c *parquet.Column) format.LogicalTypeValue {
	if t := c.Type().LogicalType(); t != nil {
		return t.Value
	}
	return nil
}

// onlyRepeated returns the only field of a column, if it is repeated.
func onlyRepeated(c *parquet.Column) (*parquet.Column, bool) {
	if all := c.Columns(); len(all) == 1 && all[0].Repeated() {
		return all[0], true
	}
	return nil, false
}

// eachLeaf calls f for all scalars of the node.
func (n *node) eachLeaf(f func(*node)) {
	if n.kind == scalar {
		f(n)
	}
	for _, child := range n.children {
		child.eachLeaf(f)
	}
}

// skip skips the value of each scalar that stands for a node that is null or empty.
func (n *node) skip() (err error) {
	n.eachLeaf(func(l *node) {
		if _, e := l.leaf.peek(); e != nil {
			err = e
		}
		l.leaf.at++
	})
	return err
}

// append appends the node's next value in the current row. After a [RowError], the values of the row have been used as
// if there were no error.
func (n *node) append(text []byte) (_ []byte, null bool, err error) {
	next, err := n.first.leaf.peek()
	if err != nil {
		return text, false, err
	}
	if next.DefinitionLevel() < n.defined {
		return append(text, "null"...), true, n.skip()
	}

	switch n.kind {
	case object:
		text, err = n.appendObject(text)
	case list, dictionary:
		text, err = n.appendElements(text, next)
	default:
		n.leaf.at++
		null = next.IsNull()
		text, err = n.appendScalar(text, next)
	}
	return text, null, err
}

// appendObject appends an object without the fields that are null.
func (n *node) appendObject(text []byte) (_ []byte, err error) {
	text = append(text, '{')
	start := len(text)
	var unfit error
	for _, child := range n.children {
		before := len(text)
		if before > start {
			text = append(text, ',')
		}
		text = append(appendString(text, child.name), ':')

		var null bool
		if text, null, err = child.append(text); err != nil {
			if unfit = err; !isRowError(err) {
				return text, err
			}
		}
		if null {
			text = text[:before]
		}
	}
	return append(text, '}'), unfit
}

// appendElements appends a list or a dictionary. first is its first value.
func (n *node) appendElements(text []byte, first parquet.Value) (_ []byte, err error) {
	opening, closing := byte('['), byte(']')
	if n.kind == dictionary {
		opening, closing = '{', '}'
	}
	text = append(text, opening)
	if first.DefinitionLevel() < n.filled {
		return append(text, closing), n.skip()
	}

	var unfit error
	lead := n.first.leaf
	for {
		for i, child := range n.children {
			key := len(text)
			if text, _, err = child.append(text); err != nil {
				if unfit = err; !isRowError(err) {
					return text, err
				}
			}
			if n.kind == dictionary && i == 0 {
				if text[key] != '"' { // JSON has only strings as names
					text = appendString(text[:key], string(text[key:]))
				}
				text = append(text, ':')
			}
		}

		if lead.at == len(lead.row) || lead.row[lead.at].RepetitionLevel() < n.repeated {
			return append(text, closing), unfit
		}
		text = append(text, ',')
	}
}

func isRowError(err error) bool { _, ok := err.(*RowError); return ok }

// appendScalar appends a value of a column without fields.
func (n *node) appendScalar(text []byte, v parquet.Value) ([]byte, error) {
	unfit := func(format string, args ...any) ([]byte, error) {
		return append(text, "null"...), &RowError{n.path, fmt.Sprintf(format, args...)}
	}

	if v.IsNull() {
		return append(text, "null"...), nil
	}

	switch t := logicalType(n.column).(type) {
	case nil, *format.StringType, *format.EnumType:
		switch v.Kind() {
		case parquet.Boolean:
			return strconv.AppendBool(text, v.Boolean()), nil
		case parquet.Int32:
			return strconv.AppendInt(text, int64(v.Int32()), 10), nil
		case parquet.Int64:
			return strconv.AppendInt(text, v.Int64(), 10), nil
		case parquet.Float, parquet.Double:
			x, bits := v.Double(), 64
			if v.Kind() == parquet.Float {
				x, bits = float64(v.Float()), 32
			}
			if math.IsNaN(x) || math.IsInf(x, 0) {
				return unfit("has the number %v, which JSON does not have", x)
			}
			return appendFloat(text, x, bits), nil
		case parquet.ByteArray:
			if !utf8.Valid(v.ByteArray()) {
				return unfit("has bytes that are not UTF-8")
			}
			return appendString(text, string(v.ByteArray())), nil
		}
	case *format.JsonType:
		if !utf8.Valid(v.ByteArray()) || !json.Valid(v.ByteArray()) {
			return unfit("has the type JSON, but the value %.40q is not JSON", v.ByteArray())
		}
		return append(text, v.ByteArray()...), nil
	case *format.IntType:
		switch {
		case v.Kind() == parquet.Int32 && t.IsSigned:
			return strconv.AppendInt(text, int64(v.Int32()), 10), nil
		case v.Kind() == parquet.Int32:
			return strconv.AppendUint(text, uint64(v.Uint32()), 10), nil
		case v.Kind() == parquet.Int64 && t.IsSigned:
			return strconv.AppendInt(text, v.Int64(), 10), nil
		case v.Kind() == parquet.Int64:
			return strconv.AppendUint(text, v.Uint64(), 10), nil
		}
	case *format.DateType:
		if v.Kind() == parquet.Int32 {
			return appendString(text, time.Unix(int64(v.Int32())*24*60*60, 0).UTC().Format(time.DateOnly)), nil
		}
	case *format.TimestampType:
		if unit := t.Unit.Value; v.Kind() == parquet.Int64 && unit != nil {
			layout := "2006-01-02T15:04:05.999999999"
			if t.IsAdjustedToUTC {
				layout += "Z"
			}
			return appendString(text, timeOf(v.Int64(), unit.Duration()).Format(layout)), nil
		}
	}

	return unfit("has the type %v, which has no form in JSON", n.column.Type())
}

// appendString appends a string. JSON escapes some characters for HTML, which does not change its meaning.
func appendString(text []byte, s string) []byte {
	quoted, _ := json.Marshal(s) // of a string, this cannot fail
	return append(text, quoted...)
}

// appendFloat appends a number in a form that is read as a floating-point number, so that 1.0 stays distinct from 1.
func appendFloat(text []byte, x float64, bits int) []byte {
	start := len(text)
	text = strconv.AppendFloat(text, x, 'g', -1, bits)
	for _, c := range text[start:] {
		if c == '.' || c == 'e' {
			return text
		}
	}
	return append(text, ".0"...)
}

// timeOf returns the time a number of units after 1970.
func timeOf(x int64, unit time.Duration) time.Time {
	perSecond := int64(time.Second / unit)
	return time.Unix(x/perSecond, x%perSecond*int64(unit)).UTC()
}
