package jinja

import (
	"math"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"
)

type filterFunc func(in *interpreter, v value, a *callArguments) value

// filters holds the supported filters.
var filters map[string]filterFunc

// otherFilters holds Jinja2's unsupported filters.
var otherFilters = []string{"filesizeformat", "pprint", "random", "striptags", "urlencode", "urlize",
	"wordwrap", "xmlattr"}

func isFilter(name string) bool {
	_, ok := filters[name]
	return ok || slices.Contains(otherFilters, name)
}

func (in *interpreter) applyFilter(n *filter, object value) value {
	args := in.evalArguments(n.args)
	in.line = n.line
	return in.callFilter(n.name, object, args)
}

func (in *interpreter) callFilter(name string, object value, a *callArguments) value {
	f, ok := filters[name]
	switch {
	case ok:
		return f(in, object, a)
	case isFilter(name):
		fail("the filter %q is not supported", name)
	}
	fail("no filter named %q", name)
	return nil
}

// soft returns the text of a value, and whether it is marked safe.
func (in *interpreter) soft(v value) (s string, safe bool) {
	_, safe = v.(markup)
	return in.str(v), safe
}

// textFilter returns a filter that changes a text.
func textFilter(name string, parameters []string,
	f func(in *interpreter, s string, args []value) string) filterFunc {
	return func(in *interpreter, v value, a *callArguments) value {
		args := a.bind(name, 0, parameters...)
		s, safe := in.soft(v)
		out := in.newString(f(in, s, args))
		if safe {
			return markup(out)
		}
		return out
	}
}

func escape(s string) string {
	return strings.NewReplacer("&", "&amp;", ">", "&gt;", "<", "&lt;", "'", "&#39;", `"`, "&#34;").Replace(s)
}

func escapeFilter(in *interpreter, v value, a *callArguments) value {
	a.bindPositional("escape", 0, 0)
	if m, ok := v.(markup); ok {
		return m
	}
	return markup(in.newString(escape(in.str(v))))
}

func defaultFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("default", 0, "default_value", "boolean")
	_, isUndefined := v.(*undefined)
	if isUndefined || isTrue(orDefault(args[1], false)) && !isTrue(v) {
		return orDefault(args[0], "")
	}
	return v
}

func lengthFilter(in *interpreter, v value, a *callArguments) value {
	a.bindPositional("length", 0, 0)
	n, ok := length(v)
	if !ok {
		fail("%s has no length", describe(v))
	}
	return int64(n)
}

func init() {
	filters = map[string]filterFunc{
		"abs": func(in *interpreter, v value, a *callArguments) value {
			a.bindPositional("abs", 0, 0)
			switch f, isFloat := v.(float64); {
			case isFloat:
				return math.Abs(f)
			case isInteger(v) && toBig(v).Sign() < 0:
				return arithmetic("-", int64(0), v)
			case isInteger(v):
				return normalize(toBig(v))
			}
			fail("abs requires a number, not %s", describe(v))
			return nil
		},
		"attr": func(in *interpreter, v value, a *callArguments) value {
			name := wantText("attr", a.bind("attr", 1, "name")[0])
			if u, ok := v.(*undefined); ok {
				fail("%s", u.message)
			}
			if attribute, ok := in.attribute(v, name); ok {
				return attribute
			}
			return missingAttribute(v, name)
		},
		"batch":    batchFilter,
		"slice":    sliceFilter,
		"count":    lengthFilter,
		"length":   lengthFilter,
		"d":        defaultFilter,
		"default":  defaultFilter,
		"dictsort": dictSortFilter,
		"e":        escapeFilter,
		"escape":   escapeFilter,
		"forceescape": func(in *interpreter, v value, a *callArguments) value {
			a.bindPositional("forceescape", 0, 0)
			return markup(in.newString(escape(in.str(v))))
		},
		"safe": func(in *interpreter, v value, a *callArguments) value {
			a.bindPositional("safe", 0, 0)
			return markup(in.str(v))
		},
		"string": func(in *interpreter, v value, a *callArguments) value {
			a.bindPositional("string", 0, 0)
			if _, ok := v.(markup); ok {
				return v
			}
			return in.str(v)
		},
		"first": func(in *interpreter, v value, a *callArguments) value {
			a.bindPositional("first", 0, 0)
			if e, ok := in.iterate(v).next(); ok {
				return e
			}
			return &undefined{"no first item, the sequence was empty"}
		},
		"last":    lastFilter,
		"reverse": reverseFilter,
		"list": func(in *interpreter, v value, a *callArguments) value {
			a.bindPositional("list", 0, 0)
			return &list{in.elements(v)}
		},
		"items": func(in *interpreter, v value, a *callArguments) value {
			a.bindPositional("items", 0, 0)
			switch v := v.(type) {
			case *undefined:
				return sliceIterator(nil)
			case *dict:
				return sliceIterator((&view{v, "items"}).items())
			}
			fail("items requires a dictionary, not %s", describe(v))
			return nil
		},
		"join": func(in *interpreter, v value, a *callArguments) value {
			args := a.bind("join", 0, "d", "attribute")
			if attribute := orDefault(args[1], nil); attribute != nil {
				v = in.mapped(v, in.attributeGetter(attribute, nil))
			}
			return in.join(in.str(orDefault(args[0], "")), v, in.str)
		},
		"float": func(in *interpreter, v value, a *callArguments) value {
			args := a.bind("float", 0, "default")
			if isNumber(v) {
				return toFloat(v)
			}
			if s, ok := text(v); ok {
				if f, ok := parseFloat(s); ok {
					return f
				}
			} else if u, ok := v.(*undefined); ok {
				fail("%s", u.message)
			}
			return orDefault(args[0], 0.0)
		},
		"int": intFilter,
		"format": func(in *interpreter, v value, a *callArguments) value {
			s, safe := in.soft(v)
			if safe {
				fail("format of a value marked safe is not supported")
			}
			switch {
			case len(a.positional) > 0 && len(a.keywords) > 0:
				fail("format takes positional or keyword arguments, not both")
			case len(a.keywords) > 0:
				d := newDict()
				for _, k := range a.keywords {
					d.set(k.name, k.value)
				}
				return in.percent(s, d)
			}
			return in.percent(s, &tuple{items: a.positional})
		},
		"groupby": groupByFilter,
		"indent":  indentFilter,
		"map": func(in *interpreter, v value, a *callArguments) value {
			return in.lazy(v, func() func(value) (value, bool) {
				f := in.mapper(a)
				return func(e value) (value, bool) { return f(e), true }
			})
		},
		"select":     selectFilter(false, true),
		"reject":     selectFilter(false, false),
		"selectattr": selectFilter(true, true),
		"rejectattr": selectFilter(true, false),
		"max":        extremeFilter("max", func(order int) bool { return order > 0 }),
		"min":        extremeFilter("min", func(order int) bool { return order < 0 }),
		"replace":    replaceFilter,
		"round":      roundFilter,
		"sort":       sortFilter,
		"sum":        sumFilter,
		"tojson":     toJSON,
		"truncate":   truncateFilter,
		"unique":     uniqueFilter,
		"upper": textFilter("upper", nil, func(_ *interpreter, s string, _ []value) string {
			return upper(s)
		}),
		"lower": textFilter("lower", nil, func(_ *interpreter, s string, _ []value) string {
			return lower(s)
		}),
		"capitalize": textFilter("capitalize", nil, func(_ *interpreter, s string, _ []value) string {
			return capitalize(s)
		}),
		"title": textFilter("title", nil, func(_ *interpreter, s string, _ []value) string {
			return titleFilter(s)
		}),
		"trim": textFilter("trim", []string{"chars"}, func(in *interpreter, s string, args []value) string {
			chars := orDefault(args[0], nil)
			if chars == nil {
				return trim(s)
			}
			set := wantText("trim", chars)
			return strings.TrimFunc(s, func(r rune) bool { return strings.ContainsRune(set, r) })
		}),
		"center": textFilter("center", []string{"width"},
			func(in *interpreter, s string, args []value) string {
				return in.justify(s, '^', ' ', toInt(orDefault(args[0], int64(80))))
			}),
		"wordcount": func(in *interpreter, v value, a *callArguments) value {
			a.bindPositional("wordcount", 0, 0)
			isWord := func(r rune) bool { return r == '_' || isAlphanumeric(r) }
			return int64(len(strings.FieldsFunc(in.str(v), func(r rune) bool { return !isWord(r) })))
		},
	}
}

// lazy returns a generator of the results of f for the elements of a value, without those that f
// rejects by returning false. start returns f. Like a Python generator, lazy calls it only when the
// first element is needed.
func (in *interpreter) lazy(v value, start func() func(value) (value, bool)) value {
	var elements *iterator
	var f func(value) (value, bool)
	return &iterator{func() (value, bool) {
		if elements == nil {
			elements = sliceIterator(nil)
			if isTrue(v) {
				f = start()
				elements = in.iterate(v)
			}
		}
		for {
			e, ok := elements.next()
			if !ok {
				return nil, false
			}
			in.step()
			if result, keep := f(e); keep {
				return result, true
			}
		}
	}}
}

// mapped returns a generator of the results of a function.
func (in *interpreter) mapped(v value, f func(value) value) value {
	elements := in.iterate(v)
	return &iterator{func() (value, bool) {
		e, ok := elements.next()
		if !ok {
			return nil, false
		}
		in.step()
		return f(e), true
	}}
}

// attributeParts splits a path such as "a.0.b" into its parts.
func attributeParts(attribute value) []value {
	switch a := attribute.(type) {
	case nil:
		return nil
	case string:
		var parts []value
		for _, p := range strings.Split(a, ".") {
			if !all(p, isDigit) {
				parts = append(parts, p)
				continue
			}
			n, err := strconv.ParseInt(p, 10, 32)
			if err != nil {
				fail("the attribute %q is not supported", a)
			}
			parts = append(parts, n)
		}
		return parts
	case int64:
		return []value{a}
	}

	fail("an attribute must be a string or an integer, not %s", describe(attribute))
	return nil
}

// attributeGetter returns a function that looks up an attribute, with a default that replaces
// undefined values unless it is nil.
func (in *interpreter) attributeGetter(attribute, otherwise value) func(value) value {
	parts := attributeParts(attribute)
	return func(v value) value {
		for _, p := range parts {
			v = in.getItem(v, p)
			if _, ok := v.(*undefined); ok && otherwise != nil {
				v = otherwise
			}
		}
		return v
	}
}

// ignoreCase returns a string in lower case, and other values as they are.
func ignoreCase(v value) value {
	if s, ok := text(v); ok {
		return lower(s)
	}
	return v
}

// keyGetter returns the function that computes an element's comparison key for a filter.
func (in *interpreter) keyGetter(attribute, caseSensitive value) func(value) value {
	get := in.attributeGetter(orDefault(attribute, nil), nil)
	if isTrue(orDefault(caseSensitive, false)) {
		return get
	}
	return func(v value) value { return ignoreCase(get(v)) }
}

// mapper returns the function that the filter map applies.
func (in *interpreter) mapper(a *callArguments) func(value) value {
	if len(a.positional) == 0 && slices.ContainsFunc(a.keywords, func(k keywordValue) bool {
		return k.name == "attribute"
	}) {
		args := a.bind("map", 0, "attribute", "default")
		return in.attributeGetter(args[0], orDefault(args[1], nil))
	}

	if len(a.positional) == 0 {
		fail("map requires the name of a filter")
	}

	name := wantText("map", a.positional[0])
	rest := &callArguments{a.positional[1:], a.keywords}
	return func(v value) value { return in.callFilter(name, v, rest) }
}

// selectFilter returns select, reject, selectattr or rejectattr.
func selectFilter(byAttribute, keep bool) filterFunc {
	return func(in *interpreter, v value, a *callArguments) value {
		return in.lazy(v, func() func(value) (value, bool) {
			args := a.positional
			get := func(v value) value { return v }
			if byAttribute {
				if len(args) == 0 {
					fail("selectattr and rejectattr require the name of an attribute")
				}
				get = in.attributeGetter(args[0], nil)
				args = args[1:]
			}
			holds := isTrue
			if len(args) > 0 {
				name := wantText("select", args[0])
				rest := &callArguments{args[1:], a.keywords}
				holds = func(v value) bool { return isTrue(in.applyTest(name, v, rest)) }
			}
			return func(e value) (value, bool) { return e, holds(get(e)) == keep }
		})
	}
}

func batchFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("batch", 1, "linecount", "fill_with")
	size := toInt(args[0])
	var batches []value
	var batch []value
	for _, e := range in.elements(v) {
		if len(batch) == size {
			batches = append(batches, &list{batch})
			batch = nil
		}
		batch = append(batch, e)
	}

	if len(batch) > 0 {
		fill := orDefault(args[1], nil)
		if fill != nil && len(batch) < size {
			in.check(16 * size)
			for len(batch) < size {
				batch = append(batch, fill)
			}
		}
		batches = append(batches, &list{batch})
	}

	return sliceIterator(batches)
}

func sliceFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("slice", 1, "slices", "fill_with")
	n := toInt(args[0])
	if n == 0 {
		fail("division by zero")
	}

	in.check(16 * max(n, 0))
	items := in.elements(v)
	fill := orDefault(args[1], nil)
	var parts []value
	if n < 0 {
		return sliceIterator(nil)
	}

	size, extra := len(items)/n, len(items)%n
	at := 0
	for i := range n {
		end := at + size
		if i < extra {
			end++
		}
		part := slices.Clone(items[at:end])
		if fill != nil && i >= extra {
			part = append(part, fill)
		}
		parts = append(parts, &list{part})
		at = end
	}

	return sliceIterator(parts)
}

func lastFilter(in *interpreter, v value, a *callArguments) value {
	a.bindPositional("last", 0, 0)
	switch v.(type) {
	case string, markup, *list, *tuple, *dict, *view, *numberRange:
		items := in.elements(v)
		if len(items) > 0 {
			return items[len(items)-1]
		}
		return &undefined{"no last item, the sequence was empty"}
	case *undefined:
		return &undefined{"no last item, the sequence was empty"}
	}

	fail("last requires a sequence, not %s", describe(v))
	return nil
}

func reverseFilter(in *interpreter, v value, a *callArguments) value {
	a.bindPositional("reverse", 0, 0)
	if s, ok := text(v); ok {
		runes := []rune(s)
		slices.Reverse(runes)
		s = in.newString(string(runes))
		if _, ok := v.(markup); ok {
			return markup(s)
		}
		return s
	}

	items := in.elements(v)
	slices.Reverse(items)
	switch v.(type) {
	case *list, *tuple, *dict, *view, *numberRange, *undefined:
		return sliceIterator(items)
	case *iterator:
		return &list{items}
	}

	fail("reverse of %s is not supported", describe(v))
	return nil
}

func dictSortFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("dictsort", 0, "case_sensitive", "by", "reverse")
	position, ok := map[value]int{"key": 0, "value": 1}[orDefault(args[1], "key")]
	if !ok {
		fail(`dictsort: by must be "key" or "value"`)
	}

	d, ok := v.(*dict)
	if !ok {
		fail("dictsort requires a dictionary, not %s", describe(v))
	}

	items := (&view{d, "items"}).items()
	caseSensitive := isTrue(orDefault(args[0], false))
	keys := make([]value, len(items))
	for i, pair := range items {
		keys[i] = pair.(*tuple).items[position]
		if !caseSensitive {
			keys[i] = ignoreCase(keys[i])
		}
	}

	return &list{in.sorted(items, keys, isTrue(orDefault(args[2], false)))}
}

// sorted returns items in the order of their keys. Items with equal keys keep their order.
func (in *interpreter) sorted(items, keys []value, reverse bool) []value {
	order := make([]int, len(items))
	for i := range order {
		order[i] = i
	}

	sort.SliceStable(order, func(i, j int) bool {
		a, b := keys[order[i]], keys[order[j]]
		if reverse {
			a, b = b, a
		}
		return in.compare("<", a, b) < 0
	})

	result := make([]value, len(items))
	for i, o := range order {
		result[i] = items[o]
	}

	in.grow(32 * len(items))
	return result
}

func sortFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("sort", 0, "reverse", "case_sensitive", "attribute")
	items := in.elements(v)

	var getters []func(value) value
	attributes := []value{orDefault(args[2], nil)}
	if s, ok := attributes[0].(string); ok {
		attributes = nil
		for _, part := range strings.Split(s, ",") {
			attributes = append(attributes, part)
		}
	}

	for _, attribute := range attributes {
		getters = append(getters, in.keyGetter(attribute, args[1]))
	}

	keys := make([]value, len(items))
	for i, item := range items {
		key := &list{}
		for _, get := range getters {
			key.items = append(key.items, get(item))
		}
		keys[i] = key
	}

	return &list{in.sorted(items, keys, isTrue(orDefault(args[0], false)))}
}

func uniqueFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("unique", 0, "case_sensitive", "attribute")
	get := in.keyGetter(args[1], args[0])
	seen := map[any]bool{}
	elements := in.iterate(v)
	return &iterator{func() (value, bool) {
		for {
			e, ok := elements.next()
			if !ok {
				return nil, false
			}
			in.step()
			if h := hash(get(e)); !seen[h] {
				seen[h] = true
				return e, true
			}
		}
	}}
}

func extremeFilter(name string, better func(order int) bool) filterFunc {
	return func(in *interpreter, v value, a *callArguments) value {
		args := a.bind(name, 0, "case_sensitive", "attribute")
		items := in.elements(v)
		if len(items) == 0 {
			return &undefined{"no aggregated item, the sequence was empty"}
		}
		get := in.keyGetter(args[1], args[0])
		best, bestKey := items[0], get(items[0])
		for _, item := range items[1:] {
			if key := get(item); better(in.compare("<", key, bestKey)) {
				best, bestKey = item, key
			}
		}
		return best
	}
}

func groupByFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("groupby", 1, "attribute", "default", "case_sensitive")
	otherwise := orDefault(args[1], nil)
	output := in.attributeGetter(args[0], otherwise)
	get := output
	if !isTrue(orDefault(args[2], false)) {
		get = func(v value) value { return ignoreCase(output(v)) }
	}

	items := in.elements(v)
	keys := make([]value, len(items))
	for i, item := range items {
		keys[i] = get(item)
	}

	groups := &list{}
	var key value
	for _, item := range in.sorted(items, keys, false) {
		k := get(item)
		if n := len(groups.items); n > 0 && in.equal(k, key) {
			members := groups.items[n-1].(*tuple).items[1].(*list)
			members.items = append(members.items, item)
			continue
		}
		key = k
		groups.items = append(groups.items,
			&tuple{items: []value{output(item), &list{[]value{item}}}, group: true})
	}

	return groups
}

func sumFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("sum", 0, "attribute", "start")
	if attribute := orDefault(args[0], nil); attribute != nil {
		v = in.mapped(v, in.attributeGetter(attribute, nil))
	}

	total := orDefault(args[1], int64(0))
	if _, ok := text(total); ok {
		fail("sum cannot add strings")
	}

	floats := 0
	for _, e := range in.elements(v) {
		if _, ok := e.(float64); ok {
			// Newer versions of Python add floats with less rounding.
			if floats++; floats > 2 {
				fail("the sum of several floats is not supported")
			}
		}
		total = in.operate("+", total, e)
	}

	return total
}

func intFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("int", 0, "default", "base")
	base := toInt(orDefault(args[1], int64(10)))
	switch v := v.(type) {
	case float64:
		return truncate(v)
	case string, markup:
		s, _ := text(v)
		if i, ok := parseInteger(s, base); ok {
			return i
		}
		if f, ok := parseFloat(s); ok {
			return truncate(f)
		}
	case *undefined:
		fail("%s", v.message)
	default:
		if isInteger(v) {
			return normalize(toBig(v))
		}
	}

	return orDefault(args[0], int64(0))
}

func indentFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("indent", 0, "width", "first", "blank")
	s, ok := v.(string)
	if !ok {
		fail("indent of %s is not supported", describe(v))
	}

	var prefix string
	switch width := orDefault(args[0], int64(4)).(type) {
	case string:
		prefix = width
	default:
		prefix = in.repeat(" ", toInt(width))
	}

	b := &builder{in: in}
	if isTrue(orDefault(args[1], false)) {
		b.add(prefix)
	}

	blank := isTrue(orDefault(args[2], false))
	for i, line := range splitLines(s+"\n", false) {
		if i > 0 {
			b.add("\n")
			if line != "" || blank {
				b.add(prefix)
			}
		}
		b.add(line)
	}

	in.grow(b.Len())
	return b.String()
}

func replaceFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("replace", 2, "old", "new", "count")
	count := orDefault(args[2], nil)
	limit := -1
	if count != nil {
		limit = toInt(count)
	}
	return in.replace(in.str(v), in.str(args[0]), in.str(args[1]), limit)
}

func roundFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("round", 0, "precision", "method")
	precision := toInt(orDefault(args[0], int64(0)))
	if u, ok := v.(*undefined); ok {
		fail("%s", u.message)
	}

	switch method := orDefault(args[1], "common"); method {
	case "common":
		return round(v, precision)
	case "ceil", "floor":
		if !isNumber(v) {
			fail("round requires a number, not %s", describe(v))
		}
		unit := arithmetic("**", int64(10), int64(precision))
		scaled := arithmetic("*", v, unit)
		if f, ok := scaled.(float64); ok {
			if method == "ceil" {
				scaled = truncate(math.Ceil(f))
			} else {
				scaled = truncate(math.Floor(f))
			}
		}
		return arithmetic("/", scaled, unit)
	}

	fail("round: the method must be common, ceil or floor")
	return nil
}

// titleFilter returns a text with each word in title case, as Jinja2's filter title does.
func titleFilter(s string) string {
	separates := func(r rune) bool { return isSpace(r) || strings.ContainsRune("-({[<", r) }
	var b strings.Builder
	for s != "" {
		i := strings.IndexFunc(s, func(r rune) bool { return !separates(r) })
		if i < 0 {
			i = len(s)
		}
		b.WriteString(s[:i])
		s = s[i:]
		if s == "" {
			break
		}
		end := strings.IndexFunc(s, separates)
		if end < 0 {
			end = len(s)
		}
		_, n := utf8.DecodeRuneInString(s)
		b.WriteString(upper(s[:n]))
		b.WriteString(lower(s[n:end]))
		s = s[end:]
	}

	return b.String()
}

func truncateFilter(in *interpreter, v value, a *callArguments) value {
	args := a.bind("truncate", 0, "length", "killwords", "end", "leeway")
	s, ok := v.(string)
	if !ok {
		fail("truncate of %s is not supported", describe(v))
	}

	limit := toInt(orDefault(args[0], int64(255)))
	end := wantText("truncate", orDefault(args[2], "..."))
	leeway := orDefault(args[3], nil)
	if leeway == nil {
		leeway = int64(5)
	}

	size := utf8.RuneCountInString(end)
	if limit < size || toInt(leeway) < 0 {
		fail("truncate: the length is less than that of the end, or the leeway is negative")
	}

	if utf8.RuneCountInString(s) <= limit+toInt(leeway) {
		return s
	}

	s = string([]rune(s)[:limit-size])
	if !isTrue(orDefault(args[1], false)) {
		if i := strings.LastIndexByte(s, ' '); i >= 0 {
			s = s[:i]
		}
	}

	return in.newString(s + end)
}
