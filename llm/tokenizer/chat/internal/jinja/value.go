package jinja

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A value is a Python value: nil for None, bool, int64, *big.Int for integers outside int64, float64,
// string, or one of the types below.
type value any

type (
	// markup is a string returned by the filters safe and escape.
	markup string

	list  struct{ items []value }
	tuple struct {
		items []value

		// group is set for the pairs returned by groupby, whose items are named.
		group bool
	}

	// A dict keeps the order of its keys. Indexes maps the hash of a key to its position.
	dict struct {
		keys, values []value
		indexes      map[any]int
	}

	// A view is the result of the methods keys, values and items.
	view struct {
		of   *dict
		kind string
	}

	// undefined is the value of a missing variable or attribute. Using it is an error.
	undefined struct{ message string }

	namespace struct{ attrs *dict }

	numberRange struct{ start, stop, step, n int64 }

	// An iterator is a generator, which can be iterated once.
	iterator struct{ next func() (value, bool) }

	function struct {
		name string
		call func(in *interpreter, a *callArguments) value
	}

	dictType      struct{}
	namespaceType struct{}
	cycler        struct {
		items []value
		at    int
	}
	joiner struct {
		separator value
		used      bool
	}

	// A templateReference is the variable self, through which Jinja2 gives access to blocks. This
	// package has no blocks.
	templateReference struct{}

	missingType struct{}
)

// missing is the absent value of a variable or argument.
var missing = missingType{}

// typeName returns Python's name of a value's type, for error messages.
func typeName(v value) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		return "bool"
	case int64, *big.Int:
		return "int"
	case float64:
		return "float"
	case string:
		return "str"
	case markup:
		return "Markup"
	case *list:
		return "list"
	case *tuple:
		return "tuple"
	case *dict:
		return "dict"
	case *view:
		return "dict_" + v.kind
	case *undefined:
		return "Undefined"
	case *namespace:
		return "Namespace"
	case *numberRange:
		return "range"
	case *iterator:
		return "generator"
	case *macro:
		return "Macro"
	case *loopContext:
		return "LoopContext"
	case templateReference:
		return "TemplateReference"
	}

	return "function"
}

func newDict() *dict { return &dict{indexes: map[any]int{}} }

func (d *dict) set(key, v value) {
	h := hash(key)
	if i, ok := d.indexes[h]; ok {
		d.values[i] = v
		return
	}
	d.indexes[h] = len(d.keys)
	d.keys = append(d.keys, key)
	d.values = append(d.values, v)
}

func (d *dict) get(key value) (value, bool) {
	i, ok := d.indexes[hash(key)]
	if !ok {
		return nil, false
	}
	return d.values[i], true
}

func (d *dict) clone() *dict {
	c := newDict()
	for i, k := range d.keys {
		c.set(k, d.values[i])
	}
	return c
}

// Hashes of keys that are not directly comparable.
type (
	noneHash      struct{}
	undefinedHash struct{}
	bigHash       string
	tupleHash     string
)

// isHashable reports whether a value can be the key of a dictionary.
func isHashable(v value) bool {
	budget := maxValue / 16
	_, ok := hashWithin(v, &budget)
	return ok
}

// hash returns a comparable Go value that is the same for equal values.
func hash(v value) any {
	budget := maxValue / 16
	h, ok := hashWithin(v, &budget)
	if !ok {
		fail("unhashable type: %s", typeName(v))
	}
	return h
}

// hashWithin returns the hash of a value, and whether it is hashable. budget limits the number of
// elements.
func hashWithin(v value, budget *int) (any, bool) {
	if *budget--; *budget < 0 {
		fail("a key has more than %d elements", maxValue/16)
	}

	switch v := v.(type) {
	case nil:
		return noneHash{}, true
	case bool:
		return boolInt(v), true
	case float64:
		if v == math.Trunc(v) && math.Abs(v) < 1<<63 {
			return int64(v), true
		}
		if v == math.Trunc(v) {
			i, _ := big.NewFloat(v).Int(nil)
			return bigHash(i.String()), true
		}
		return v, true
	case *big.Int:
		return bigHash(v.String()), true
	case markup:
		return string(v), true
	case *undefined:
		return undefinedHash{}, true
	case *tuple:
		return hashTuple(v, budget)
	case *view:
		return v, v.kind == "values"
	case *list, *dict:
		return nil, false
	}

	return v, true
}

// hashTuple returns a text that contains the hashes of all items.
func hashTuple(t *tuple, budget *int) (any, bool) {
	var key strings.Builder
	for _, i := range t.items {
		h, ok := hashWithin(i, budget)
		if !ok {
			return nil, false
		}
		switch h := h.(type) {
		case int64:
			key.WriteString("i" + strconv.FormatInt(h, 10))
		case string:
			key.WriteString("s" + strconv.Quote(h))
		case float64:
			key.WriteString("f" + strconv.FormatFloat(h, 'g', -1, 64))
		case noneHash:
			key.WriteString("n")
		case undefinedHash:
			key.WriteString("u")
		case bigHash:
			key.WriteString("b" + string(h))
		case tupleHash:
			key.WriteString("t" + strconv.Itoa(len(h)) + ":" + string(h))
		default:
			fail("a tuple with a %s as a key is not supported", typeName(i))
		}
		key.WriteByte(',')
	}

	return tupleHash(key.String()), true
}

func boolInt(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// text returns the text of a string, and whether the value is one.
func text(v value) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case markup:
		return string(v), true
	}
	return "", false
}

// isTrue returns the truth value of a value.
func isTrue(v value) bool {
	switch v := v.(type) {
	case nil, *undefined:
		return false
	case bool:
		return v
	case int64:
		return v != 0
	case float64:
		return v != 0
	case string:
		return v != ""
	case markup:
		return v != ""
	}

	if n, ok := length(v); ok {
		return n > 0
	}

	return true
}

// length returns the number of elements of a value, and whether it has a length.
func length(v value) (int, bool) {
	switch v := v.(type) {
	case string:
		return utf8.RuneCountInString(v), true
	case markup:
		return utf8.RuneCountInString(string(v)), true
	case *list:
		return len(v.items), true
	case *tuple:
		return len(v.items), true
	case *dict:
		return len(v.keys), true
	case *view:
		return len(v.of.keys), true
	case *numberRange:
		return int(v.n), true
	case *undefined:
		return 0, true
	case *loopContext:
		return v.length(), true
	}

	return 0, false
}

// sliceIterator returns an iterator over the elements of a slice.
func sliceIterator(items []value) *iterator {
	i := 0
	return &iterator{func() (value, bool) {
		if i == len(items) {
			return nil, false
		}
		i++
		return items[i-1], true
	}}
}

// isIterable reports whether a value can be iterated.
func isIterable(v value) bool {
	switch v.(type) {
	case string, markup, *list, *tuple, *dict, *view, *numberRange, *undefined, *iterator, *loopContext:
		return true
	}
	return false
}

// iterate returns an iterator over the elements of a value.
func (in *interpreter) iterate(v value) *iterator {
	switch v := v.(type) {
	case string:
		return in.iterateString(v)
	case markup:
		return in.iterateString(string(v))
	case *list:
		return sliceIterator(v.items)
	case *tuple:
		return sliceIterator(v.items)
	case *dict:
		return sliceIterator(v.keys)
	case *view:
		return sliceIterator(v.items())
	case *numberRange:
		i := int64(0)
		return &iterator{func() (value, bool) {
			if i == v.n {
				return nil, false
			}
			i++
			return v.start + (i-1)*v.step, true
		}}
	case *undefined:
		return sliceIterator(nil)
	case *iterator:
		return v
	case *loopContext:
		fail("iterating over the variable loop is not supported")
	}

	fail("%s is not iterable", describe(v))
	return nil
}

func (in *interpreter) iterateString(s string) *iterator {
	return &iterator{func() (value, bool) {
		if s == "" {
			return nil, false
		}
		in.step()
		_, n := utf8.DecodeRuneInString(s)
		c := s[:n]
		s = s[n:]
		return c, true
	}}
}

func (v *view) items() []value {
	switch v.kind {
	case "keys":
		return v.of.keys
	case "values":
		return v.of.values
	}

	pairs := make([]value, len(v.of.keys))
	for i, k := range v.of.keys {
		pairs[i] = &tuple{items: []value{k, v.of.values[i]}}
	}

	return pairs
}

// elements returns the elements of a value as a new slice.
func (in *interpreter) elements(v value) []value {
	var all []value
	next := in.iterate(v).next
	for {
		e, ok := next()
		if !ok {
			in.grow(16 * len(all))
			return all
		}
		in.step()
		all = append(all, e)
		if len(all) > 16*maxItems {
			fail("a list has more than %d elements", 16*maxItems)
		}
	}
}

// describe returns a short description of a value for error messages.
func describe(v value) string {
	switch v := v.(type) {
	case *undefined:
		return "an undefined value (" + v.message + ")"
	case nil:
		return "None"
	}
	return "a value of type " + typeName(v)
}

// equal reports whether two values are equal in Python.
func (in *interpreter) equal(a, b value) bool { return in.equalAt(a, b, 0) }

func (in *interpreter) equalAt(a, b value, depth int) bool {
	in.step()
	checkDepth(depth)

	if isNumber(a) && isNumber(b) {
		return compareNumbers(a, b) == 0
	}

	if s, ok := text(a); ok {
		t, ok := text(b)
		in.read(min(len(s), len(t)))
		return ok && s == t
	}

	switch a := a.(type) {
	case nil:
		return b == nil
	case *undefined:
		_, ok := b.(*undefined)
		return ok
	case *list:
		b, ok := b.(*list)
		return ok && in.equalSlices(a.items, b.items, depth)
	case *tuple:
		b, ok := b.(*tuple)
		return ok && in.equalSlices(a.items, b.items, depth)
	case *dict:
		b, ok := b.(*dict)
		if !ok || len(a.keys) != len(b.keys) {
			return false
		}
		for i, k := range a.keys {
			v, ok := b.get(k)
			if !ok || !in.equalAt(a.values[i], v, depth+1) {
				return false
			}
		}
		return true
	case *numberRange:
		b, ok := b.(*numberRange)
		return ok && a.n == b.n && (a.n == 0 || a.start == b.start && (a.n == 1 || a.step == b.step))
	case *view:
		if a.kind != "values" && typeName(b) != "str" && b != nil {
			fail("comparing the %s of a dictionary is not supported", a.kind)
		}
	case *function:
		if _, ok := b.(*function); ok {
			fail("comparing functions is not supported")
		}
	}

	if v, ok := b.(*view); ok && v.kind != "values" && a != nil && typeName(a) != "str" {
		fail("comparing the %s of a dictionary is not supported", v.kind)
	}

	return a == b
}

func (in *interpreter) equalSlices(a, b []value, depth int) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !in.equalAt(a[i], b[i], depth+1) {
			return false
		}
	}
	return true
}

func checkDepth(depth int) {
	if depth > maxDepth {
		fail("lists are nested deeper than %d", maxDepth)
	}
}

// compare returns the order of two values, or fails if Python does not order them.
func (in *interpreter) compare(op string, a, b value) int { return in.compareAt(op, a, b, 0) }

func (in *interpreter) compareAt(op string, a, b value, depth int) int {
	in.step()
	checkDepth(depth)

	if isNumber(a) && isNumber(b) {
		return compareNumbers(a, b)
	}

	if s, ok := text(a); ok {
		if t, ok := text(b); ok {
			in.read(min(len(s), len(t)))
			return strings.Compare(s, t)
		}
	}

	switch a := a.(type) {
	case *list:
		if b, ok := b.(*list); ok {
			return in.compareSlices(op, a.items, b.items, depth)
		}
	case *tuple:
		if b, ok := b.(*tuple); ok {
			return in.compareSlices(op, a.items, b.items, depth)
		}
	}

	for _, v := range []value{a, b} {
		if u, ok := v.(*undefined); ok {
			fail("%s", u.message)
		}
	}

	fail("%s is not supported between %s and %s", op, typeName(a), typeName(b))
	return 0
}

func (in *interpreter) compareSlices(op string, a, b []value, depth int) int {
	for i := range min(len(a), len(b)) {
		if !in.equalAt(a[i], b[i], depth+1) {
			return in.compareAt(op, a[i], b[i], depth+1)
		}
	}
	return len(a) - len(b)
}

// contains reports whether a container contains a value.
func (in *interpreter) contains(container, v value) bool {
	switch c := container.(type) {
	case string, markup:
		s, _ := text(c)
		part, ok := text(v)
		if !ok {
			fail("in a string requires a string on the left, not %s", describe(v))
		}
		in.read(len(s))
		return strings.Contains(s, part)
	case *dict:
		_, ok := c.get(v)
		return ok
	case *view:
		if c.kind == "keys" {
			_, ok := c.of.get(v)
			return ok
		}
	case *namespace:
		fail("a value of type Namespace is not iterable")
	}

	next := in.iterate(container).next
	for {
		e, ok := next()
		if !ok {
			return false
		}
		if in.equal(e, v) {
			return true
		}
	}
}

// A builder builds a text with limits on its length and depth.
type builder struct {
	strings.Builder
	in *interpreter
}

func (b *builder) add(s string) {
	b.WriteString(s)
	b.in.step()
	b.in.check(b.Len())
}

// str returns the text of a value as Python's str does.
func (in *interpreter) str(v value) string {
	switch v := v.(type) {
	case string:
		return v
	case markup:
		return string(v)
	case *undefined:
		return ""
	}
	return in.repr(v)
}

// repr returns the text of a value as Python's repr does.
func (in *interpreter) repr(v value) string {
	b := &builder{in: in}
	in.writeRepr(b, v, 0)
	in.grow(b.Len())
	return b.String()
}

func (in *interpreter) writeRepr(b *builder, v value, depth int) {
	checkDepth(depth)
	switch v := v.(type) {
	case nil:
		b.add("None")
	case bool:
		if v {
			b.add("True")
		} else {
			b.add("False")
		}
	case int64, *big.Int:
		b.add(integerText(v))
	case float64:
		b.add(floatText(v))
	case string:
		b.add(quote(v))
	case markup:
		b.add("Markup(" + quote(string(v)) + ")")
	case *list:
		in.writeItems(b, "[", v.items, "]", depth)
	case *tuple:
		if len(v.items) == 1 {
			b.add("(")
			in.writeRepr(b, v.items[0], depth+1)
			b.add(",)")
			return
		}
		in.writeItems(b, "(", v.items, ")", depth)
	case *dict:
		b.add("{")
		for i, k := range v.keys {
			if i > 0 {
				b.add(", ")
			}
			in.writeRepr(b, k, depth+1)
			b.add(": ")
			in.writeRepr(b, v.values[i], depth+1)
		}
		b.add("}")
	case *view:
		in.writeItems(b, "dict_"+v.kind+"([", v.items(), "])", depth)
	case *undefined:
		b.add("Undefined")
	case *namespace:
		b.add("<Namespace ")
		in.writeRepr(b, v.attrs, depth+1)
		b.add(">")
	case *numberRange:
		b.add("range(" + integerText(v.start) + ", " + integerText(v.stop))
		if v.step != 1 {
			b.add(", " + integerText(v.step))
		}
		b.add(")")
	case *macro:
		if v.body.name == "" {
			b.add("<Macro anonymous>")
		} else {
			b.add("<Macro " + quote(v.body.name) + ">")
		}
	case *loopContext:
		b.add("<LoopContext " + strconv.Itoa(v.index0+1) + "/" + strconv.Itoa(v.length()) + ">")
	case templateReference:
		b.add("<TemplateReference None>")
	default:
		fail("printing a %s is not supported, since its text in Python is an address in memory",
			typeName(v))
	}
}

func (in *interpreter) writeItems(b *builder, begin string, items []value, end string, depth int) {
	b.add(begin)
	for i, v := range items {
		if i > 0 {
			b.add(", ")
		}
		in.writeRepr(b, v, depth+1)
	}
	b.add(end)
}

// quote returns the literal of a string as Python's repr does.
func quote(s string) string {
	mark := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		mark = '"'
	}

	var b strings.Builder
	b.WriteByte(mark)
	for _, r := range s {
		switch {
		case r == rune(mark) || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\r':
			b.WriteString(`\r`)
		case r == '\t':
			b.WriteString(`\t`)
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			b.WriteString(backslashReplace(r))
		}
	}

	b.WriteByte(mark)
	return b.String()
}
