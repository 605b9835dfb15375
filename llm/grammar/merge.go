package grammar

import (
	"fmt"
	"maps"
	"slices"
)

// merge returns a schema for the values that both schemas permit.
func (c *compiler) merge(a, b any, where string) (any, error) {
	a, err := c.expand(a, where)
	if err != nil {
		return nil, err
	}

	if b, err = c.expand(b, where); err != nil {
		return nil, err
	}

	x, ok1 := a.(*object)
	y, ok2 := b.(*object)
	switch {
	case a == true:
		return b, nil
	case b == true:
		return a, nil
	case a == false || b == false:
		return false, nil
	case !ok1 || !ok2:
		return nil, failure(where, "a part of allOf, anyOf or oneOf is neither an object nor a boolean")
	}

	if v, err := c.mergeProperties(x, y, where); err != nil {
		return nil, err
	} else if v != nil {
		x, y = x.with("properties", v), y.without("properties")
	}

	for _, key := range y.keys {
		other := y.members[key]
		own, ok := x.members[key]
		switch {
		case !ok:
			x = x.with(key, other)
			continue
		case isAnnotation(key), equal(own, other):
			continue
		}
		v, err := c.mergeKeyword(key, own, other, where)
		if err != nil {
			return nil, err
		}
		x = x.with(key, v)
	}

	return x, nil
}

// both returns a schema for the values that both schemas permit. They are merged when it is compiled,
// because recursive schemas would never end.
func both(a, b any) any {
	return &object{[]string{"allOf"}, map[string]any{"allOf": []any{a, b}}}
}

// mergeProperties returns the properties of both schemas, or nil if there are none. The properties of one
// that the other does not have must be among its additional properties.
func (c *compiler) mergeProperties(x, y *object, where string) (any, error) {
	p, ok1 := x.members["properties"].(*object)
	q, ok2 := y.members["properties"].(*object)
	if !ok1 && x.has("properties") || !ok2 && y.has("properties") {
		return nil, failure(where, "properties is not an object")
	}

	if !ok1 && !ok2 {
		return nil, nil
	}

	all := &object{members: map[string]any{}}
	add := func(from, others *object, other *object) {
		if from == nil {
			return
		}
		for _, name := range from.keys {
			value := from.members[name]
			further, limited := other.members["additionalProperties"]
			switch {
			case all.has(name):
				continue
			case others != nil && others.has(name):
				if !equal(value, others.members[name]) {
					value = both(value, others.members[name])
				}
			case limited:
				value = both(value, further)
			}
			all = all.with(name, value)
		}
	}

	add(p, q, y)
	add(q, p, x)
	return all, nil
}

// mergeKeyword returns a keyword's value for the values that both permit.
func (c *compiler) mergeKeyword(key string, a, b any, where string) (any, error) {
	x, y := rational(a), rational(b)
	p, isList1 := a.([]any)
	q, isList2 := b.([]any)
	switch key {
	case "minimum", "exclusiveMinimum", "minLength", "minItems":
		if x != nil && y != nil {
			if x.Cmp(y) < 0 {
				return b, nil
			}
			return a, nil
		}
	case "maximum", "exclusiveMaximum", "maxLength", "maxItems":
		if x != nil && y != nil {
			if x.Cmp(y) > 0 {
				return b, nil
			}
			return a, nil
		}
	case "required":
		if isList1 && isList2 {
			return append(slices.Clone(p), q...), nil
		}
	case "enum":
		if isList1 && isList2 {
			common := []any{}
			for _, v := range p {
				if slices.ContainsFunc(q, func(w any) bool { return equal(v, w) }) {
					common = append(common, v)
				}
			}
			if len(common) > 0 {
				return common, nil
			}
		}
		return nil, failure(where, "no value is in both enums")
	case "type":
		return mergeTypes(a, b, where)
	case "additionalProperties":
		return both(a, b), nil
	case "items":
		if !isList1 && !isList2 {
			return both(a, b), nil
		}
	case "anyOf":
		if isList1 && isList2 && len(p)*len(q) < mostNodes {
			all := []any{}
			for _, v := range p {
				for _, w := range q {
					all = append(all, both(v, w))
				}
			}
			return all, nil
		}
	}

	return nil, failure(where, "it is not supported that allOf, anyOf, oneOf or $ref add another %q", key)
}

// mergeTypes returns the types that both permit.
func mergeTypes(a, b any, where string) (any, error) {
	names := func(v any) map[string]bool {
		all := map[string]bool{}
		list, ok := v.([]any)
		if !ok {
			list = []any{v}
		}
		for _, n := range list {
			if name, ok := n.(string); ok {
				all[name] = true
			}
		}
		return all
	}

	x, y := names(a), names(b)
	common := []any{}
	for _, t := range append(slices.Clone(types), "integer") {
		switch {
		case x[t] && y[t],
			t == "integer" && (x["number"] && y[t] || x[t] && y["number"]) && !(x["number"] && y["number"]):
			common = append(common, t)
		}
	}

	if len(common) == 0 {
		return nil, failure(where, "no value has both the types %s and %s", canonical(a), canonical(b))
	}

	return common, nil
}

// exclusive returns an error unless no value can match two of the schemas.
func (c *compiler) exclusive(all []any, where string) error {
	for i := range all {
		for j := range i {
			ok, err := c.disjoint(all[j], all[i], where, 0)
			if err != nil {
				return err
			}
			if !ok {
				return failure(where, "values may match both schema %d and schema %d, which oneOf forbids: use "+
					"anyOf, or give them different types or different constants in a required property", j, i)
			}
		}
	}

	return nil
}

// disjoint reports whether it is certain that no value matches both schemas.
func (c *compiler) disjoint(a, b any, where string, depth int) (bool, error) {
	if depth > mostDepth/4 {
		return false, nil
	}

	a, err := c.expand(a, where)
	if err != nil {
		return false, err
	}

	if b, err = c.expand(b, where); err != nil {
		return false, err
	}

	if a == false || b == false {
		return true, nil
	}

	x, ok1 := a.(*object)
	y, ok2 := b.(*object)
	if !ok1 || !ok2 {
		return false, nil
	}

	// Alternatives are disjoint if each is.
	for _, pair := range [][2]*object{{x, y}, {y, x}} {
		for _, key := range []string{"anyOf", "oneOf"} {
			branches, ok := pair[0].members[key].([]any)
			if !ok {
				continue
			}
			every := true
			for _, branch := range branches {
				d, err := c.disjoint(branch, pair[1], where, depth+1)
				if err != nil {
					return false, err
				}
				every = every && d
			}
			if every {
				return true, nil
			}
		}
	}

	types1, err := c.possibleTypes(x, where)
	if err != nil {
		return false, err
	}

	types2, err := c.possibleTypes(y, where)
	if err != nil {
		return false, err
	}

	if !slices.ContainsFunc(types1, func(t string) bool { return slices.Contains(types2, t) }) {
		return true, nil
	}

	values1, values2 := constants(x), constants(y)
	if values1 != nil && values2 != nil {
		return !slices.ContainsFunc(values1, func(v any) bool {
			return slices.ContainsFunc(values2, func(w any) bool { return equal(v, w) })
		}), nil
	}

	if len(types1) != 1 || len(types2) != 1 || types1[0] != "object" {
		return false, nil
	}

	return c.disjointObjects(x, y, where, depth)
}

// disjointObjects reports whether a property distinguishes the objects of two schemas.
func (c *compiler) disjointObjects(x, y *object, where string, depth int) (bool, error) {
	byName := func(o *object) (map[string]property, error) {
		all, err := properties(o, where)
		m := map[string]property{}
		for _, p := range all {
			m[p.name] = p
		}
		return m, err
	}

	p, err := byName(x)
	if err != nil {
		return false, err
	}

	q, err := byName(y)
	if err != nil {
		return false, err
	}

	for _, name := range slices.Sorted(maps.Keys(p)) {
		if other, ok := q[name]; ok && p[name].required && other.required {
			d, err := c.disjoint(p[name].value, other.value, fmt.Sprintf("%s/properties/%s", where, name), depth+1)
			if d || err != nil {
				return d, err
			}
		}
		if _, ok := q[name]; !ok && p[name].required && y.members["additionalProperties"] == false {
			return true, nil
		}
	}

	for name, other := range q {
		if _, ok := p[name]; !ok && other.required && x.members["additionalProperties"] == false {
			return true, nil
		}
	}

	return false, nil
}

// possibleTypes returns all types of the values of a schema, where integers are numbers.
func (c *compiler) possibleTypes(o *object, where string) ([]string, error) {
	if values := constants(o); values != nil {
		var all []string
		for _, v := range values {
			all = append(all, typeOf(v))
		}
		return all, nil
	}

	if !o.has("type") {
		return types, nil
	}

	all, err := c.typesOf(o, where)
	all = slices.Clone(all)
	for i, t := range all {
		if t == "integer" {
			all[i] = "number"
		}
	}

	return all, err
}

// constants returns the values of const or enum, or nil without these keywords.
func constants(o *object) []any {
	if v, ok := o.members["const"]; ok {
		return []any{v}
	}
	values, _ := o.members["enum"].([]any)
	return values
}

// typeOf returns the type of a value.
func typeOf(v any) string {
	switch v.(type) {
	case *object:
		return "object"
	case []any:
		return "array"
	case string:
		return "string"
	case bool:
		return "boolean"
	case nil:
		return "null"
	}

	return "number"
}
