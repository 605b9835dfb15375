package grammar

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net/url"
	"slices"
	"strings"
)

// Limits for the schemas of hostile requests.
const (
	mostNodes  = 100_000
	mostDepth  = 200
	mostRepeat = 1_000_000
	mostLength = 100_000
)

// annotations lists the keywords that restrict no values by themselves. Keywords that start with "x-" are annotations,
// too.
var annotations = set("title", "description", "default", "examples", "example", "deprecated", "readOnly",
	"writeOnly", "$comment", "$schema", "$id", "$defs", "definitions", "contentEncoding", "contentMediaType",
	"discriminator")

// assertions are the keywords that restrict values of a type.
var assertions = map[string]map[string]bool{
	"string":  set("minLength", "maxLength", "pattern", "format"),
	"number":  set("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
	"object":  set("properties", "required", "additionalProperties"),
	"array":   set("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
	"boolean": nil,
	"null":    nil,
}

// other are the remaining supported keywords.
var other = set("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf")

// types lists the types of JSON values, in the order in which a schema without a type permits them.
var types = []string{"object", "array", "string", "number", "boolean", "null"}

// set returns the set of the words.
func set(words ...string) map[string]bool {
	s := map[string]bool{}
	for _, w := range words {
		s[w] = true
	}
	return s
}

// An object is a JSON object that keeps the order of its members.
type object struct {
	keys    []string
	members map[string]any
}

// with returns a copy with another value for a member.
func (o *object) with(key string, value any) *object {
	c := &object{slices.Clone(o.keys), maps.Clone(o.members)}
	if _, ok := c.members[key]; !ok {
		c.keys = append(c.keys, key)
	}
	c.members[key] = value
	return c
}

// without returns a copy that lacks the given members.
func (o *object) without(keys ...string) *object {
	c := &object{members: maps.Clone(o.members)}
	for _, k := range o.keys {
		if slices.Contains(keys, k) {
			delete(c.members, k)
		} else {
			c.keys = append(c.keys, k)
		}
	}
	return c
}

func (o *object) has(key string) bool { _, ok := o.members[key]; return ok }

// bare reports whether the object has no keywords except annotations.
func (o *object) bare() bool {
	return !slices.ContainsFunc(o.keys, func(k string) bool { return !isAnnotation(k) })
}

func isAnnotation(key string) bool { return annotations[key] || strings.HasPrefix(key, "x-") }

// MarshalJSON keeps the order of the members.
func (o *object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, k := range o.keys {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(canonical(k) + ":" + canonical(o.members[k]))
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// canonical returns a value as JSON without white space.
func canonical(v any) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(err) // the value has been decoded from JSON
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// decode decodes JSON with *object for objects and json.Number for numbers.
func decode(raw []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	v, err := decodeValue(d, 0)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("there is more than one JSON value")
	}
	return v, nil
}

func decodeValue(d *json.Decoder, depth int) (any, error) {
	t, err := d.Token()
	if err != nil {
		return nil, err
	}

	if depth > 10*mostDepth {
		return nil, errors.New("it is nested too deeply")
	}

	switch t {
	case json.Delim('{'):
		o := &object{members: map[string]any{}}
		for d.More() {
			key, err := d.Token()
			if err != nil {
				return nil, err
			}
			v, err := decodeValue(d, depth+1)
			if err != nil {
				return nil, err
			}
			if !o.has(key.(string)) {
				o.keys = append(o.keys, key.(string))
			}
			o.members[key.(string)] = v
		}
		_, err := d.Token()
		return o, err
	case json.Delim('['):
		all := []any{}
		for d.More() {
			v, err := decodeValue(d, depth+1)
			if err != nil {
				return nil, err
			}
			all = append(all, v)
		}
		_, err := d.Token()
		return all, err
	}

	return t, nil
}

// A compiler translates a schema to nodes.
type compiler struct {
	document any
	refs     map[string]*node
	nodes    int
	depth    int
	steps    int // used so far to compile regular expressions

	// Common nodes, created when they are first needed.
	anything, blank, integers, numbers *node
}

// failure returns an error with its location in the schema.
func failure(where, format string, args ...any) error {
	if where == "" {
		where = "the root"
	}
	return fmt.Errorf("at %.200s: %s", where, fmt.Sprintf(format, args...))
}

// schema returns the node for a schema.
func (c *compiler) schema(v any, where string) (*node, error) {
	c.nodes++
	c.depth++
	defer func() { c.depth-- }()
	switch {
	case c.nodes > mostNodes:
		return nil, failure(where, "the schema is too large: it has more than %d alternatives", mostNodes)
	case c.depth > mostDepth:
		return nil, failure(where, "the schema is nested too deeply, or refers to itself in allOf")
	}

	switch v := v.(type) {
	case bool:
		if v {
			return c.any(), nil
		}
		return newChoice(), nil
	case *object:
		return c.keywords(v, where)
	}

	return nil, failure(where, "it is %.60s, want an object or a boolean", canonical(v))
}

// keywords returns the node for a schema that is an object.
func (c *compiler) keywords(o *object, where string) (*node, error) {
	if err := c.check(o, where); err != nil {
		return nil, err
	}

	if ref, ok := o.members["$ref"]; ok && o.without("$ref").bare() {
		return c.ref(ref, where)
	}

	if o.has("$ref") || o.has("allOf") {
		v, err := c.expand(o, where)
		if err != nil {
			return nil, err
		}
		return c.schema(v, where)
	}

	for _, key := range []string{"anyOf", "oneOf"} {
		if !o.has(key) {
			continue
		}
		branches, err := list(o, key, where)
		if err != nil {
			return nil, err
		}
		if key == "oneOf" {
			if err := c.exclusive(branches, where+"/oneOf"); err != nil {
				return nil, err
			}
		}

		rest, all := o.without(key), newChoice()
		for i, b := range branches {
			at := fmt.Sprintf("%s/%s/%d", where, key, i)
			if !rest.bare() {
				if b, err = c.merge(rest, b, at); err != nil {
					return nil, err
				}
			}
			n, err := c.schema(b, at)
			if err != nil {
				return nil, err
			}
			all.parts = append(all.parts, n)
		}
		return all, nil
	}

	if o.has("const") || o.has("enum") {
		return c.enumeration(o, where)
	}

	allowed, err := c.typesOf(o, where)
	if err != nil {
		return nil, err
	}

	if o.bare() {
		return c.any(), nil
	}

	all := newChoice()
	for _, t := range allowed {
		n, err := c.typed(o, t, where)
		if err != nil {
			return nil, err
		}
		all.parts = append(all.parts, n)
	}

	return all, nil
}

// check returns an error for keywords that are not supported.
func (c *compiler) check(o *object, where string) error {
	for _, k := range o.keys {
		if isAnnotation(k) || other[k] {
			if k == "$id" && where != "" {
				return failure(where, "$id is only supported at the root")
			}
			continue
		}
		known := false
		for _, keywords := range assertions {
			known = known || keywords[k]
		}
		// With these values, the keywords have no effect.
		switch v := o.members[k]; {
		case k == "uniqueItems" && v == false, k == "nullable" && v == false:
			known = true
		}
		if !known {
			return failure(where, "the keyword %.60q is not supported", k)
		}
	}

	return nil
}

// list returns a keyword's array of schemas.
func list(o *object, key, where string) ([]any, error) {
	all, ok := o.members[key].([]any)
	if !ok || len(all) == 0 {
		return nil, failure(where, "%s is %.60s, want an array with at least one schema", key,
			canonical(o.members[key]))
	}
	return all, nil
}

// ref returns the node for a reference.
func (c *compiler) ref(ref any, where string) (*node, error) {
	target, at, err := c.resolve(ref, where)
	if err != nil {
		return nil, err
	}

	if n := c.refs[at]; n != nil {
		return n, nil
	}

	n := newChoice()
	c.refs[at] = n
	part, err := c.schema(target, at)
	if err != nil {
		return nil, err
	}

	n.parts = []*node{part}
	return n, nil
}

// resolve returns the schema that a reference names, and its location.
func (c *compiler) resolve(ref any, where string) (target any, at string, err error) {
	name, ok := ref.(string)
	path, local := strings.CutPrefix(name, "#")
	if !ok || !local || path != "" && path[0] != '/' {
		return nil, "", failure(where, `$ref is %.60s, want one within the schema, such as "#/$defs/name"`,
			canonical(ref))
	}

	target = c.document
	if path == "" {
		return target, "", nil
	}

	for _, part := range strings.Split(path[1:], "/") {
		part = unescapePointer(part)
		switch v := target.(type) {
		case *object:
			target, ok = v.members[part]
		case []any:
			var i int
			_, err := fmt.Sscanf(part, "%d", &i)
			if ok = err == nil && i >= 0 && i < len(v); ok {
				target = v[i]
			}
		default:
			ok = false
		}
		if !ok {
			return nil, "", failure(where, "there is nothing at the $ref %.100q", name)
		}
	}

	return target, path, nil
}

// unescapePointer decodes a part of a JSON pointer in a URI.
func unescapePointer(part string) string {
	if decoded, err := url.PathUnescape(part); err == nil {
		part = decoded
	}
	return strings.NewReplacer("~1", "/", "~0", "~").Replace(part)
}

// expand returns a schema without $ref and allOf.
func (c *compiler) expand(v any, where string) (any, error) {
	c.depth++
	defer func() { c.depth-- }()
	if c.depth > mostDepth {
		return nil, failure(where, "the schema refers to itself in $ref or allOf")
	}

	o, ok := v.(*object)
	if !ok {
		return v, nil
	}

	if err := c.check(o, where); err != nil {
		return nil, err
	}

	var parts []any
	if o.has("$ref") {
		target, _, err := c.resolve(o.members["$ref"], where)
		if err != nil {
			return nil, err
		}
		parts = append(parts, target)
	}

	if o.has("allOf") {
		all, err := list(o, "allOf", where)
		if err != nil {
			return nil, err
		}
		parts = append(parts, all...)
	}

	v = o.without("$ref", "allOf")
	for _, p := range parts {
		var err error
		if v, err = c.merge(v, p, where); err != nil {
			return nil, err
		}
	}

	return v, nil
}

// typesOf returns the types of values that a schema permits. If it only restricts values of some types,
// it permits only these: generated values need not make use of everything that a schema permits.
func (c *compiler) typesOf(o *object, where string) ([]string, error) {
	if !o.has("type") {
		var some []string
		for _, t := range types {
			if slices.ContainsFunc(o.keys, func(k string) bool { return assertions[t][k] }) {
				some = append(some, t)
			}
		}
		if some == nil {
			return types, nil
		}
		return some, nil
	}

	var names []any
	switch v := o.members["type"].(type) {
	case string:
		names = []any{v}
	case []any:
		names = v
	}

	var all []string
	for _, n := range names {
		name, _ := n.(string)
		if _, ok := assertions[name]; !ok && name != "integer" {
			return nil, failure(where, "there is no type %.60s", canonical(n))
		}
		all = append(all, name)
	}

	if len(all) == 0 {
		return nil, failure(where, "type is %.60s, want a name or an array of names", canonical(o.members["type"]))
	}

	return all, nil
}

// typed returns the node for the values of a type.
func (c *compiler) typed(o *object, t, where string) (*node, error) {
	switch t {
	case "object":
		return c.object(o, where)
	case "array":
		return c.array(o, where)
	case "string":
		return c.text(o, where)
	case "number", "integer":
		return c.number(o, t, where)
	case "boolean":
		return newChoice(newLexeme(literal("true")), newLexeme(literal("false"))), nil
	}

	return newLexeme(literal("null")), nil
}

// enumeration returns the node for the values of const or enum that the other keywords permit.
func (c *compiler) enumeration(o *object, where string) (*node, error) {
	var values []any
	if o.has("enum") {
		all, ok := o.members["enum"].([]any)
		if !ok || len(all) == 0 {
			return nil, failure(where, "enum is %.60s, want an array with at least one value",
				canonical(o.members["enum"]))
		}
		values = all
	}

	if o.has("const") {
		if values != nil && !slices.ContainsFunc(values, func(v any) bool { return equal(v, o.members["const"]) }) {
			return newChoice(), nil
		}
		values = []any{o.members["const"]}
	}

	// The other keywords get their own nodes, because pruning needs all nodes of a grammar.
	rest := o.without("enum", "const")
	var filter *automaton
	if !rest.bare() {
		d := &compiler{document: c.document, refs: map[string]*node{}, nodes: c.nodes, depth: c.depth}
		n, err := d.schema(rest, where)
		if err != nil {
			return nil, err
		}
		c.nodes = d.nodes
		if !prune(n) {
			return newChoice(), nil
		}
		filter = newAutomaton(n)
	}

	all := newChoice()
	for _, v := range values {
		text := canonical(v)
		if filter == nil || filter.matches(text) {
			all.parts = append(all.parts, newLexeme(literal(text)))
		}
	}

	return all, nil
}

// matches reports whether a whole text is in the grammar.
func (a *automaton) matches(text string) bool {
	s := a.first
	for i := range len(text) {
		s = a.step(s, text[i])
	}
	return s.ends
}

// equal reports whether two values are equal.
func equal(a, b any) bool {
	x, ok1 := a.(json.Number)
	y, ok2 := b.(json.Number)
	if ok1 && ok2 {
		p, ok1 := new(big.Rat).SetString(x.String())
		q, ok2 := new(big.Rat).SetString(y.String())
		return ok1 && ok2 && p.Cmp(q) == 0
	}
	return canonical(a) == canonical(b)
}

// count returns the value of a keyword such as minLength, which is a number of characters, elements or members, or usual
// if the keyword is absent.
func count(o *object, key string, usual, most int, where string) (int, error) {
	v, ok := o.members[key]
	if !ok {
		return usual, nil
	}

	r := rational(v)
	if r == nil || !r.IsInt() || r.Sign() < 0 {
		return 0, failure(where, "%s is %.60s, want an integer of at least 0", key, canonical(v))
	}

	if r.Cmp(big.NewRat(int64(most), 1)) > 0 {
		return 0, failure(where, "%s is %.60s, and this server supports up to %d", key, canonical(v), most)
	}

	return int(r.Num().Int64()), nil
}

// rational returns the value of a JSON number. It returns nil if v is not a number, or if its exponent is so large that
// the result would need much memory.
func rational(v any) *big.Rat {
	n, ok := v.(json.Number)
	if !ok {
		return nil
	}

	if _, e, ok := strings.Cut(strings.ToLower(n.String()), "e"); ok && len(strings.TrimLeft(e, "+-0")) > 3 {
		return nil
	}

	r, ok := new(big.Rat).SetString(n.String())
	if !ok {
		return nil
	}

	return r
}

// text returns the node for strings.
func (c *compiler) text(o *object, where string) (*node, error) {
	least, err := count(o, "minLength", 0, mostLength, where)
	if err != nil {
		return nil, err
	}

	most, err := count(o, "maxLength", -1, mostLength, where)
	if err != nil {
		return nil, err
	}

	l := length{least, most}
	expression, isText := o.members["pattern"].(string)
	switch {
	case o.has("pattern") && !isText:
		return nil, failure(where, "pattern is %.60s, want a string", canonical(o.members["pattern"]))
	case o.has("pattern") && o.has("format"):
		return nil, failure(where, "pattern and format together are not supported")
	case o.has("format"):
		name, _ := o.members["format"].(string)
		var ok bool
		if expression, ok = formats[name]; !ok {
			return nil, failure(where, "the format %.60s is not supported, want one of %s",
				canonical(o.members["format"]), strings.Join(slices.Sorted(maps.Keys(formats)), ", "))
		}
	case !o.has("pattern"):
		return newText(l, true), nil
	}

	p, err := newPattern(expression, l)
	if err == nil {
		if c.steps += p.steps; c.steps > mostSteps {
			err = errors.New("the regular expressions of the schema are too large together")
		}
	}
	if err != nil {
		return nil, failure(where, "%v", err)
	}

	return newText(p, true), nil
}

// number returns the node for numbers.
func (c *compiler) number(o *object, t, where string) (*node, error) {
	bounds := map[string]*big.Rat{}
	for _, key := range []string{"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"} {
		v, ok := o.members[key]
		if !ok {
			continue
		}
		if bounds[key] = rational(v); bounds[key] == nil {
			return nil, failure(where, "%s is %.60s, want a number", key, canonical(v))
		}
	}

	scale := fractionDigits
	if t == "integer" {
		scale = 0
	}

	if m := bounds["multipleOf"]; m != nil {
		digits := 0
		for digits <= fractionDigits && m.Cmp(new(big.Rat).SetFrac(big.NewInt(1), power(digits))) != 0 {
			digits++
		}
		if digits > fractionDigits {
			return nil, failure(where, "multipleOf is %s, and this server supports 1, 0.1, 0.01 and so on",
				canonical(o.members["multipleOf"]))
		}
		scale = min(scale, digits)
	}

	if len(bounds) == 0 {
		if t == "integer" {
			return memo(&c.integers, integerPattern), nil
		}
		return memo(&c.numbers, numberPattern), nil
	}

	low, high := bounds["minimum"], bounds["maximum"]
	exclusiveLow, exclusiveHigh := false, false
	if x := bounds["exclusiveMinimum"]; x != nil && (low == nil || x.Cmp(low) >= 0) {
		low, exclusiveLow = x, true
	}

	if x := bounds["exclusiveMaximum"]; x != nil && (high == nil || x.Cmp(high) <= 0) {
		high, exclusiveHigh = x, true
	}

	return newLexeme(newNumber(scale, low, high, exclusiveLow, exclusiveHigh)), nil
}

// space returns the node for optional white space between the tokens of JSON. Its length is limited, so that a model
// cannot generate white space forever.
func (c *compiler) space() *node { return memo(&c.blank, "( |\n{1,2}[ \t]{0,20})?") }

// memo returns *n. If that is nil, it first sets *n to a node for the texts that a regular expression matches.
func memo(n **node, expression string) *node {
	if *n == nil {
		p, err := newPattern("^("+expression+")$", length{0, -1})
		if err != nil {
			panic(err) // the expression is one of ours
		}
		*n = newText(p, false)
	}
	return *n
}

// mark returns the node for a fixed text, such as a bracket.
func mark(text string) *node { return newLexeme(literal(text)) }

// enclosed returns the node for a JSON array or object with the given marks and body.
func (c *compiler) enclosed(before string, body *node, after string) *node {
	return newSequence(mark(before), c.space(), body, c.space(), mark(after))
}

// comma returns the node for a comma followed by an element.
func (c *compiler) comma(element *node) *node { return newSequence(mark(","), c.space(), element) }

// repeated returns the node for least to most elements separated by commas.
func (c *compiler) repeated(element *node, least, most int) *node {
	if most == 0 {
		if least > 0 {
			return newChoice()
		}
		return newSequence()
	}

	rest := newSequence(element, newRepetition(c.comma(element), max(0, least-1), max(-1, most-1)))
	if least == 0 {
		return newChoice(rest, newSequence())
	}

	return rest
}

// any returns the node for any JSON value.
func (c *compiler) any() *node {
	if c.anything != nil {
		return c.anything
	}

	c.anything = newChoice()
	number := memo(&c.numbers, numberPattern)
	texts := newText(length{0, -1}, true)
	c.anything.parts = []*node{
		c.members(),
		c.enclosed("[", c.repeated(c.anything, 0, -1), "]"),
		texts, number, mark("true"), mark("false"), mark("null"),
	}
	return c.anything
}

// members returns the node for any object.
func (c *compiler) members() *node {
	key := newText(length{0, -1}, true)
	return c.enclosed("{", c.repeated(newSequence(key, mark(":"), c.space(), c.any()), 0, -1), "}")
}

// array returns the node for arrays.
func (c *compiler) array(o *object, where string) (*node, error) {
	least, err := count(o, "minItems", 0, mostRepeat, where)
	if err != nil {
		return nil, err
	}

	most, err := count(o, "maxItems", -1, mostRepeat, where)
	if err != nil {
		return nil, err
	}

	// Before 2020, the keywords prefixItems and items were items and additionalItems.
	items, hasItems := o.members["items"]
	itemsKey := "items"
	var prefix []any
	switch first, isList := items.([]any); {
	case isList && o.has("prefixItems"):
		return nil, failure(where, "items is an array although there is prefixItems")
	case isList:
		prefix = first
		itemsKey = "additionalItems"
		items, hasItems = o.members[itemsKey]
	case o.has("prefixItems"):
		if prefix, err = list(o, "prefixItems", where); err != nil {
			return nil, err
		}
	}

	switch {
	case !hasItems && prefix != nil && least <= len(prefix) && (most < 0 || most > len(prefix)):
		most = len(prefix)
	case !hasItems:
		items = true
	}

	if most >= 0 && least > most {
		return newChoice(), nil
	}

	further := newChoice()
	if most < 0 || most > len(prefix) {
		if further, err = c.schema(items, where+"/"+itemsKey); err != nil {
			return nil, err
		}
	}

	if len(prefix) == 0 {
		return c.enclosed("[", c.repeated(further, least, most), "]"), nil
	}

	// Build the nodes from the last element to the first. Once there are enough elements, the array may end before each
	// of the following ones.
	body := newSequence()
	if most < 0 || most > len(prefix) {
		body = newRepetition(c.comma(further), max(0, least-len(prefix)), max(-1, most-len(prefix)))
	}

	for i, p := range slices.Backward(prefix) {
		if most >= 0 && i >= most {
			continue
		}
		element, err := c.schema(p, fmt.Sprintf("%s/%d", where, i))
		if err != nil {
			return nil, err
		}
		if i > 0 {
			element = c.comma(element)
		}
		body = newSequence(element, body)
		if i >= least {
			body = newChoice(body, newSequence())
		}
	}

	return c.enclosed("[", body, "]"), nil
}

// A property is a property of an object.
type property struct {
	name     string
	value    any
	required bool
}

// properties returns the properties of an object in their written order.
func properties(o *object, where string) (all []property, err error) {
	required := map[string]bool{}
	var order []string
	if v, ok := o.members["required"]; ok {
		names, isList := v.([]any)
		for _, n := range names {
			name, isName := n.(string)
			isList = isList && isName
			if !required[name] {
				order = append(order, name)
			}
			required[name] = true
		}
		if !isList {
			return nil, failure(where, "required is %.60s, want an array of names", canonical(v))
		}
	}

	declared := &object{}
	if v, ok := o.members["properties"]; ok {
		if declared, ok = v.(*object); !ok {
			return nil, failure(where, "properties is %.60s, want an object", canonical(v))
		}
	}

	for _, name := range declared.keys {
		all = append(all, property{name, declared.members[name], required[name]})
	}

	further, ok := o.members["additionalProperties"]
	if !ok {
		further = true
	}

	for _, name := range order {
		if !declared.has(name) {
			all = append(all, property{name, further, true})
		}
	}

	return all, nil
}

// object returns the node for objects. The properties have the order of the schema, followed by
// additional ones if the schema has additionalProperties, or if it names no properties at all.
func (c *compiler) object(o *object, where string) (*node, error) {
	all, err := properties(o, where)
	if err != nil {
		return nil, err
	}

	if len(all) == 0 && !o.has("additionalProperties") && !o.has("properties") {
		return c.members(), nil
	}

	// further is the node for one more property.
	var further *node
	if v, ok := o.members["additionalProperties"]; ok && v != false {
		value, err := c.schema(v, where+"/additionalProperties")
		if err != nil {
			return nil, err
		}
		var names []string
		for _, p := range all {
			names = append(names, p.name)
		}
		further = newSequence(newText(newOthers(names), true), mark(":"), c.space(), value)
	}

	// Build the nodes from the last property to the first, in two variants: without a preceding comma, if no property
	// before it is present, and with a comma.
	first, later := newSequence(), newSequence()
	if further != nil {
		first, later = c.repeated(further, 0, -1), newRepetition(c.comma(further), 0, -1)
	}

	for _, p := range slices.Backward(all) {
		value, err := c.schema(p.value, where+"/properties/"+p.name)
		if err != nil {
			return nil, err
		}
		pair := newSequence(mark(canonical(p.name)+":"), c.space(), value)
		withFirst, withLater := newSequence(pair, later), newSequence(c.comma(pair), later)
		if p.required {
			first, later = withFirst, withLater
		} else {
			first, later = newChoice(withFirst, first), newChoice(withLater, later)
		}
	}

	return c.enclosed("{", first, "}"), nil
}
