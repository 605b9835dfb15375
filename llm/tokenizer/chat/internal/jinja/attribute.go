package jinja

import (
	"math"
	"math/big"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// missingAttribute returns the undefined value of a missing attribute or item.
func missingAttribute(object value, key value) value {
	if s, ok := text(key); ok {
		return &undefined{describe(object) + " has no attribute " + quote(s)}
	}
	return &undefined{describe(object) + " has no such element"}
}

// getAttribute evaluates the expression object.name, which is the object's attribute or, if there is
// none, its item.
func (in *interpreter) getAttribute(object value, name string) value {
	v, found := in.attribute(object, name)
	if found {
		return v
	}
	if d, ok := object.(*dict); ok {
		if v, ok := d.get(name); ok {
			return v
		}
	}
	return missingAttribute(object, name)
}

// getItem evaluates the expression object[key]: the object's item or, without such an item, its
// attribute.
func (in *interpreter) getItem(object, key value) value {
	if v, ok := in.item(object, key); ok {
		return v
	}
	if name, ok := text(key); ok {
		if v, found := in.attribute(object, name); found {
			return v
		}
	}
	return missingAttribute(object, key)
}

// item returns an item of a container, and whether it exists.
func (in *interpreter) item(object, key value) (value, bool) {
	if u, ok := object.(*undefined); ok {
		fail("%s", u.message)
	}

	if d, ok := object.(*dict); ok {
		if !isHashable(key) {
			return nil, false
		}
		return d.get(key)
	}

	if !isInteger(key) {
		return nil, false
	}

	i := toInt(key)
	index := func(n int) (int, bool) {
		if i < 0 {
			i += n
		}
		return i, i >= 0 && i < n
	}

	switch o := object.(type) {
	case string, markup:
		s, _ := text(o)
		if c, ok := in.runeAt(s, i); ok {
			if _, ok := o.(markup); ok {
				return markup(c), true
			}
			return c, true
		}
	case *list:
		if i, ok := index(len(o.items)); ok {
			return o.items[i], true
		}
	case *tuple:
		if i, ok := index(len(o.items)); ok {
			return o.items[i], true
		}
	case *numberRange:
		if i, ok := index(int(o.n)); ok {
			return o.start + int64(i)*o.step, true
		}
	}

	return nil, false
}

// runeAt returns the character of a string at an index, which counts from the end if it is negative.
func (in *interpreter) runeAt(s string, i int) (string, bool) {
	in.read(len(s))
	if isASCII(s) {
		if i < 0 {
			i += len(s)
		}
		if i < 0 || i >= len(s) {
			return "", false
		}
		return s[i : i+1], true
	}

	in.grow(len(s))
	runes := []rune(s)
	if i < 0 {
		i += len(runes)
	}

	if i < 0 || i >= len(runes) {
		return "", false
	}

	return string(runes[i]), true
}

// The attributes of Python's types. Attributes that change an object or start with an underscore are
// unsafe, so the sandbox makes them undefined.
var (
	listAttributes  = []string{"copy", "count", "index"}
	listMutators    = []string{"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}
	tupleAttributes = []string{"count", "index"}
	dictMutators    = []string{"clear", "pop", "popitem", "setdefault", "update"}
	intAttributes   = []string{"as_integer_ratio", "bit_count", "bit_length", "conjugate", "denominator",
		"from_bytes", "imag", "is_integer", "numerator", "real", "to_bytes"}
	floatAttributes = []string{"as_integer_ratio", "conjugate", "fromhex", "hex", "imag", "is_integer",
		"real"}
	otherStringMethods = []string{"casefold", "encode", "expandtabs", "format_map", "isidentifier",
		"maketrans", "translate"}
	markupAttributes    = []string{"escape", "striptags", "unescape"}
	generatorAttributes = []string{"close", "gi_code", "gi_frame", "gi_running", "gi_suspended",
		"gi_yieldfrom", "send", "throw"}
)

// unsafe is the value of an attribute forbidden by the sandbox.
func unsafe(object value, name string) value {
	return &undefined{"the attribute " + quote(name) + " of " + describe(object) + " is unsafe"}
}

// method returns a method of an object.
func method(name string, call func(in *interpreter, a *callArguments) value) value {
	return &function{name, call}
}

// unsupported returns a method that exists in Python but fails here when called.
func unsupported(object value, name string) value {
	return method(name, func(*interpreter, *callArguments) value {
		fail("the method %s of %s is not supported", name, describe(object))
		return nil
	})
}

// attribute returns an object's Python attribute, and whether it exists.
func (in *interpreter) attribute(object value, name string) (value, bool) {
	if strings.HasPrefix(name, "__") && strings.HasSuffix(name, "__") {
		fail("the attribute %s is not supported", name)
	}

	switch o := object.(type) {
	case *undefined:
		fail("%s", o.message)
	case string:
		if m, ok := stringMethods[name]; ok {
			return method(name, func(in *interpreter, a *callArguments) value {
				in.read(len(o))
				return m(in, o, a)
			}), true
		}
		if slices.Contains(otherStringMethods, name) {
			return unsupported(o, name), true
		}
	case markup:
		_, known := stringMethods[name]
		if known || slices.Contains(otherStringMethods, name) || slices.Contains(markupAttributes, name) {
			return unsupported(o, name), true
		}
	case bool, int64, *big.Int:
		switch {
		case name == "real" || name == "numerator":
			return normalize(toBig(o)), true
		case name == "imag":
			return int64(0), true
		case name == "denominator":
			return int64(1), true
		case slices.Contains(intAttributes, name):
			return unsupported(o, name), true
		}
	case float64:
		switch {
		case name == "real":
			return o, true
		case name == "imag":
			return 0.0, true
		case slices.Contains(floatAttributes, name):
			return unsupported(o, name), true
		}
	case *list:
		if slices.Contains(listMutators, name) {
			return unsafe(o, name), true
		}
		if slices.Contains(listAttributes, name) {
			return sequenceMethod(o, o.items, name), true
		}
	case *tuple:
		if o.group && (name == "grouper" || name == "list") {
			return o.items[map[string]int{"grouper": 0, "list": 1}[name]], true
		}
		if slices.Contains(tupleAttributes, name) {
			return sequenceMethod(o, o.items, name), true
		}
	case *dict:
		if slices.Contains(dictMutators, name) {
			return unsafe(o, name), true
		}
		return dictAttribute(o, name)
	case *view:
		if name == "mapping" || name == "isdisjoint" && o.kind != "values" {
			return unsupported(o, name), true
		}
	case *namespace:
		return o.attrs.get(name)
	case *numberRange:
		switch name {
		case "start":
			return o.start, true
		case "stop":
			return o.stop, true
		case "step":
			return o.step, true
		case "count", "index":
			return unsupported(o, name), true
		}
	case *iterator:
		if slices.Contains(generatorAttributes, name) {
			fail("the attribute %s of a generator is not supported", name)
		}
	case *macro:
		return macroAttribute(o, name)
	case *loopContext:
		return o.attribute(name)
	case dictType:
		if name == "fromkeys" {
			return unsupported(o, name), true
		}
	case namespaceType:
		fail("the attribute %s of the namespace type is not supported", name)
	case *cycler:
		return o.attribute(name)
	case *joiner:
		switch name {
		case "sep":
			return o.separator, true
		case "used":
			return o.used, true
		}
	}

	return nil, false
}

func dictAttribute(d *dict, name string) (value, bool) {
	switch name {
	case "keys", "values", "items":
		return method(name, func(in *interpreter, a *callArguments) value {
			a.bindPositional(name, 0, 0)
			return &view{d, name}
		}), true
	case "get":
		return method(name, func(in *interpreter, a *callArguments) value {
			args := a.bindPositional("get", 1, 2)
			if v, ok := d.get(args[0]); ok {
				return v
			}
			return orDefault(args[1], nil)
		}), true
	case "copy":
		return method(name, func(in *interpreter, a *callArguments) value {
			a.bindPositional("copy", 0, 0)
			return d.clone()
		}), true
	case "fromkeys":
		return unsupported(d, name), true
	}

	return nil, false
}

// sequenceMethod returns a method of a list or tuple.
func sequenceMethod(object value, items []value, name string) value {
	return method(name, func(in *interpreter, a *callArguments) value {
		switch name {
		case "copy":
			a.bindPositional(name, 0, 0)
			in.grow(16 * len(items))
			return &list{slices.Clone(items)}
		case "count":
			args := a.bindPositional(name, 1, 1)
			n := int64(0)
			for _, v := range items {
				if in.equal(v, args[0]) {
					n++
				}
			}
			return n
		}
		args := a.bindPositional(name, 1, 3)
		start, stop := clampRange(len(items), args[1], args[2])
		for i := start; i < stop; i++ {
			if in.equal(items[i], args[0]) {
				return int64(i)
			}
		}
		fail("index: the value is not in the %s", typeName(object))
		return nil
	})
}

// clampRange returns the bounds of a section of a sequence, for methods with start and stop
// arguments.
func clampRange(n int, start, stop value) (from, to int) {
	clamp := func(v value, otherwise int) int {
		if v == missing || v == nil {
			return otherwise
		}
		i := toInt(v)
		if i < 0 {
			i = max(i+n, 0)
		}
		return i
	}

	return clamp(start, 0), min(clamp(stop, n), n)
}

func macroAttribute(m *macro, name string) (value, bool) {
	switch name {
	case "name":
		if m.body.name == "" {
			return nil, true
		}
		return m.body.name, true
	case "arguments":
		t := &tuple{}
		for _, p := range m.body.params {
			t.items = append(t.items, p.name)
		}
		return t, true
	case "catch_kwargs":
		return m.body.kwargsIdent != "", true
	case "catch_varargs":
		return m.body.varargsIdent != "", true
	case "caller", "explicit_caller":
		return unsupported(m, name), true
	}

	return nil, false
}

func (c *cycler) attribute(name string) (value, bool) {
	switch name {
	case "current":
		return c.items[c.at], true
	case "items":
		return &tuple{items: c.items}, true
	case "pos":
		return int64(c.at), true
	case "next":
		return method(name, func(in *interpreter, a *callArguments) value {
			a.bindPositional(name, 0, 0)
			v := c.items[c.at]
			c.at = (c.at + 1) % len(c.items)
			return v
		}), true
	case "reset":
		return method(name, func(in *interpreter, a *callArguments) value {
			a.bindPositional(name, 0, 0)
			c.at = 0
			return nil
		}), true
	}

	return nil, false
}

type stringMethod func(in *interpreter, s string, a *callArguments) value

// stringMethods are the methods of strings.
var stringMethods map[string]stringMethod

func init() {
	stringMethods = map[string]stringMethod{
		"upper":      transform("upper", upper),
		"lower":      transform("lower", lower),
		"capitalize": transform("capitalize", capitalize),
		"title":      transform("title", titleWords),
		"swapcase":   transform("swapcase", swapCase),

		"isalnum":   predicate("isalnum", func(s string) bool { return all(s, isAlphanumeric) }),
		"isalpha":   predicate("isalpha", func(s string) bool { return all(s, unicode.IsLetter) }),
		"isascii":   predicate("isascii", isASCII),
		"isdecimal": predicate("isdecimal", func(s string) bool { return all(s, unicode.IsDigit) }),
		"isdigit":   predicate("isdigit", func(s string) bool { return all(s, isDigit) }),
		"isnumeric": predicate("isnumeric", isNumeric),
		"islower":   predicate("islower", func(s string) bool { return hasCase(s, isLower, isUpper) }),
		"isupper":   predicate("isupper", func(s string) bool { return hasCase(s, isUpper, isLower) }),
		"istitle":   predicate("istitle", isTitle),
		"isspace":   predicate("isspace", func(s string) bool { return all(s, isSpace) }),
		"isprintable": predicate("isprintable", func(s string) bool {
			return s == "" || all(s, unicode.IsPrint)
		}),

		"strip":  strip("strip", strings.TrimFunc),
		"lstrip": strip("lstrip", strings.TrimLeftFunc),
		"rstrip": strip("rstrip", strings.TrimRightFunc),

		"startswith":   affix("startswith", strings.HasPrefix),
		"endswith":     affix("endswith", strings.HasSuffix),
		"removeprefix": cutAffix("removeprefix", strings.TrimPrefix),
		"removesuffix": cutAffix("removesuffix", strings.TrimSuffix),

		"find":   find("find", strings.Index, false),
		"rfind":  find("rfind", strings.LastIndex, false),
		"index":  find("index", strings.Index, true),
		"rindex": find("rindex", strings.LastIndex, true),
		"count":  countMethod,

		"split":      splitMethod("split", split, splitFields),
		"rsplit":     splitMethod("rsplit", splitFromRight, splitFieldsFromRight),
		"splitlines": splitLinesMethod,
		"partition":  partition("partition", strings.Index, false),
		"rpartition": partition("rpartition", strings.LastIndex, true),

		"replace": replaceMethod,
		"join": func(in *interpreter, s string, a *callArguments) value {
			return in.join(s, a.bindPositional("join", 1, 1)[0], func(v value) string {
				t, ok := text(v)
				if !ok {
					fail("join: an element is %s, want strings", describe(v))
				}
				return t
			})
		},
		"ljust":  justify("ljust", '<'),
		"rjust":  justify("rjust", '>'),
		"center": justify("center", '^'),
		"zfill": func(in *interpreter, s string, a *callArguments) value {
			width := toInt(a.bindPositional("zfill", 1, 1)[0])
			sign := signAt(s, 0)
			return in.newString(in.pad(spec{fill: '0', align: '=', width: width}, sign, s[len(sign):]))
		},
		"format": formatMethod,
	}
}

func isNumeric(s string) bool {
	return all(s, func(r rune) bool {
		if r > 0x3000 && unicode.Is(unicode.Lo, r) {
			fail("isnumeric of %q is not supported", s)
		}
		return unicode.IsNumber(r)
	})
}

func transform(name string, f func(string) string) stringMethod {
	return func(in *interpreter, s string, a *callArguments) value {
		a.bindPositional(name, 0, 0)
		return in.newString(f(s))
	}
}

func predicate(name string, f func(string) bool) stringMethod {
	return func(in *interpreter, s string, a *callArguments) value {
		a.bindPositional(name, 0, 0)
		return f(s)
	}
}

// wantText returns the text of an argument, which must be a string.
func wantText(function string, v value) string {
	s, ok := text(v)
	if !ok {
		fail("%s: want a string, got %s", function, describe(v))
	}
	return s
}

func strip(name string, cut func(string, func(rune) bool) string) stringMethod {
	return func(in *interpreter, s string, a *callArguments) value {
		chars := orDefault(a.bindPositional(name, 0, 1)[0], nil)
		if chars == nil {
			return cut(s, isSpace)
		}
		set := wantText(name, chars)
		return cut(s, func(r rune) bool { return strings.ContainsRune(set, r) })
	}
}

// section returns the part of a string selected by the arguments start and stop, and the index of its
// first character. It returns false if the start lies after the end.
func (in *interpreter) section(s string, start, stop value) (part string, from int, ok bool) {
	if (start == missing || start == nil) && (stop == missing || stop == nil) {
		return s, 0, true
	}
	n := utf8.RuneCountInString(s)
	from, to := clampRange(n, start, stop)
	if from > n || from > to {
		return "", from, false
	}
	in.grow(4 * n)
	return string([]rune(s)[from:to]), from, true
}

func affix(name string, has func(s, affix string) bool) stringMethod {
	return func(in *interpreter, s string, a *callArguments) value {
		args := a.bindPositional(name, 1, 3)
		part, _, ok := in.section(s, args[1], args[2])
		if t, isTuple := args[0].(*tuple); isTuple {
			for _, v := range t.items {
				if has(part, wantText(name, v)) && ok {
					return true
				}
			}
			return false
		}
		return has(part, wantText(name, args[0])) && ok
	}
}

func cutAffix(name string, cut func(s, affix string) string) stringMethod {
	return func(in *interpreter, s string, a *callArguments) value {
		return cut(s, wantText(name, a.bindPositional(name, 1, 1)[0]))
	}
}

func find(name string, index func(s, part string) int, must bool) stringMethod {
	return func(in *interpreter, s string, a *callArguments) value {
		args := a.bindPositional(name, 1, 3)
		wanted := wantText(name, args[0])
		part, from, ok := in.section(s, args[1], args[2])
		i := -1
		if ok {
			i = index(part, wanted)
		}
		if i >= 0 {
			return int64(from + utf8.RuneCountInString(part[:i]))
		}
		if must {
			fail("%s: the substring is not in the string", name)
		}
		return int64(-1)
	}
}

func countMethod(in *interpreter, s string, a *callArguments) value {
	args := a.bindPositional("count", 1, 3)
	wanted := wantText("count", args[0])
	part, _, ok := in.section(s, args[1], args[2])
	if !ok {
		return int64(0)
	}
	return int64(strings.Count(part, wanted))
}

func (in *interpreter) newStrings(parts []string) *list {
	l := &list{make([]value, len(parts))}
	for i, p := range parts {
		l.items[i] = p
	}
	in.grow(32 * len(parts))
	return l
}

func splitMethod(name string, bySeparator func(s, separator string, limit int) []string,
	bySpace func(s string, limit int) []string) stringMethod {
	return func(in *interpreter, s string, a *callArguments) value {
		args := a.bind(name, 0, "sep", "maxsplit")
		limit := toInt(orDefault(args[1], int64(-1)))
		separator := orDefault(args[0], nil)
		if separator == nil {
			return in.newStrings(bySpace(s, limit))
		}
		sep := wantText(name, separator)
		if sep == "" {
			fail("%s: the separator is empty", name)
		}
		return in.newStrings(bySeparator(s, sep, limit))
	}
}

func splitLinesMethod(in *interpreter, s string, a *callArguments) value {
	keep := a.bind("splitlines", 0, "keepends")[0]
	return in.newStrings(splitLines(s, isTrue(orDefault(keep, false))))
}

func partition(name string, index func(s, part string) int, right bool) stringMethod {
	return func(in *interpreter, s string, a *callArguments) value {
		sep := wantText(name, a.bindPositional(name, 1, 1)[0])
		if sep == "" {
			fail("%s: the separator is empty", name)
		}
		i := index(s, sep)
		switch {
		case i >= 0:
			return &tuple{items: []value{s[:i], sep, s[i+len(sep):]}}
		case right:
			return &tuple{items: []value{"", "", s}}
		}
		return &tuple{items: []value{s, "", ""}}
	}
}

func replaceMethod(in *interpreter, s string, a *callArguments) value {
	args := a.bindPositional("replace", 2, 3)
	return in.replace(s, wantText("replace", args[0]), wantText("replace", args[1]),
		toInt(orDefault(args[2], int64(-1))))
}

// replace replaces at most limit occurrences in a string, or all if limit is negative.
func (in *interpreter) replace(s, from, to string, limit int) string {
	n := strings.Count(s, from)
	if limit >= 0 {
		n = min(n, limit)
	}
	// The size computed below must not overflow.
	if len(to) > 0 && n > (math.MaxInt32+len(from))/len(to) {
		n = math.MaxInt32 / len(to)
	}
	in.check(len(s) + n*(len(to)-len(from)))
	return in.newString(strings.Replace(s, from, to, limit))
}

func justify(name string, align byte) stringMethod {
	return func(in *interpreter, s string, a *callArguments) value {
		args := a.bindPositional(name, 1, 2)
		fill := wantText(name, orDefault(args[1], " "))
		if utf8.RuneCountInString(fill) != 1 {
			fail("%s: the fill character must be one character", name)
		}
		r, _ := utf8.DecodeRuneInString(fill)
		return in.newString(in.justify(s, align, r, toInt(args[0])))
	}
}

// justify pads a string. Python's center puts the odd character to the left if the width is odd.
func (in *interpreter) justify(s string, align byte, fill rune, width int) string {
	missing := width - utf8.RuneCountInString(s)
	if missing <= 0 {
		return s
	}
	if align != '^' {
		return in.pad(spec{fill: fill, align: align, width: width}, "", s)
	}
	in.check(width)
	left := missing/2 + missing&width&1
	return strings.Repeat(string(fill), left) + s + strings.Repeat(string(fill), missing-left)
}

// join joins the texts of the elements of a value.
func (in *interpreter) join(separator string, v value, text func(value) string) string {
	b := &builder{in: in}
	next := in.iterate(v).next
	for first := true; ; first = false {
		e, ok := next()
		if !ok {
			in.grow(b.Len())
			return b.String()
		}
		if !first {
			b.add(separator)
		}
		b.add(text(e))
	}
}
