package jinja

import (
	"strings"
	"unicode/utf8"
)

// eval returns the value of an expression.
func (in *interpreter) eval(n node) value {
	in.step()
	switch n := n.(type) {
	case *constant:
		return n.v
	case *name:
		if v := in.scope.lookup(n.ident); v != value(missing) {
			return v
		}
		return undefinedVariable(n.name)
	case *attribute:
		object := in.eval(n.object)
		in.line = n.line
		return in.getAttribute(object, n.name)
	case *item:
		object := in.eval(n.object)
		if s, ok := n.index.(*slice); ok {
			return in.slice(object, s, n.line)
		}
		index := in.eval(n.index)
		in.line = n.line
		return in.getItem(object, index)
	case *call:
		callee := in.eval(n.callee)
		args := in.evalArguments(n.args)
		in.line = n.line
		return in.call(callee, args)
	case *filter:
		object := in.eval(n.object)
		return in.applyFilter(n, object)
	case *test:
		object := in.eval(n.object)
		args := in.evalArguments(n.args)
		in.line = n.line
		return in.applyTest(n.name, object, args)
	case *tupleLiteral:
		return &tuple{items: in.evalAll(n.items)}
	case *listLiteral:
		return &list{in.evalAll(n.items)}
	case *dictLiteral:
		d := newDict()
		for i := range n.keys {
			k := in.eval(n.keys[i])
			d.set(k, in.eval(n.values[i]))
		}
		in.grow(32 * len(n.keys))
		return d
	case *concat:
		b := &builder{in: in}
		values := in.evalAll(n.parts)
		for _, v := range values {
			b.add(in.str(v))
		}
		in.grow(b.Len())
		return b.String()
	case *conditional:
		switch {
		case isTrue(in.eval(n.condition)):
			return in.eval(n.yes)
		case n.no != nil:
			return in.eval(n.no)
		}
		return &undefined{"the inline if without else was false"}
	case *unary:
		return in.unary(n)
	case *binary:
		return in.binary(n)
	case *comparison:
		return in.comparison(n)
	}

	fail("unexpected expression")
	return nil
}

func (in *interpreter) evalAll(nodes []node) []value {
	values := make([]value, len(nodes))
	for i, n := range nodes {
		values[i] = in.eval(n)
	}
	in.grow(16 * len(nodes))
	return values
}

func (in *interpreter) evalArguments(a arguments) *callArguments {
	c := &callArguments{positional: in.evalAll(a.positional)}
	if a.list != nil && len(a.keywords) > 0 {
		// Python evaluates *list before the keyword arguments.
		c.positional = append(c.positional, in.elements(in.eval(a.list))...)
	}

	for _, k := range a.keywords {
		c.keywords = append(c.keywords, keywordValue{k.name, in.eval(k.value)})
	}

	if a.list != nil && len(a.keywords) == 0 {
		c.positional = append(c.positional, in.elements(in.eval(a.list))...)
	}

	if a.dict != nil {
		d, ok := in.eval(a.dict).(*dict)
		if !ok {
			fail("the argument after ** must be a dictionary")
		}
		for i, k := range d.keys {
			name, ok := text(k)
			if !ok {
				fail("the keys of the argument after ** must be strings")
			}
			for _, have := range c.keywords {
				if have.name == name {
					fail("the argument %s occurs twice", name)
				}
			}
			c.keywords = append(c.keywords, keywordValue{name, d.values[i]})
		}
	}

	return c
}

func (in *interpreter) unary(n *unary) value {
	v := in.eval(n.operand)
	in.line = n.line
	if n.op == "not" {
		return !isTrue(v)
	}

	if u, ok := v.(*undefined); ok {
		fail("%s", u.message)
	}

	if !isNumber(v) {
		fail("unary %s is not supported for %s", n.op, describe(v))
	}

	if f, ok := v.(float64); ok {
		if n.op == "-" {
			return -f
		}
		return f
	}

	if n.op == "-" {
		return arithmetic("-", int64(0), v)
	}

	return normalize(toBig(v))
}

func (in *interpreter) binary(n *binary) value {
	left := in.eval(n.left)
	switch n.op {
	case "and":
		if !isTrue(left) {
			return left
		}
		return in.eval(n.right)
	case "or":
		if isTrue(left) {
			return left
		}
		return in.eval(n.right)
	}

	right := in.eval(n.right)
	in.line = n.line
	return in.operate(n.op, left, right)
}

// operate applies an arithmetic operator.
func (in *interpreter) operate(op string, left, right value) value {
	if isNumber(left) && isNumber(right) {
		return arithmetic(op, left, right)
	}

	if op == "%" {
		if s, ok := text(left); ok {
			if _, ok := left.(markup); ok {
				fail("%% of a value marked safe is not supported")
			}
			return in.percent(s, right)
		}
	}

	for _, v := range []value{left, right} {
		if u, ok := v.(*undefined); ok {
			fail("%s", u.message)
		}
	}

	switch op {
	case "+":
		if v, ok := in.add(left, right); ok {
			return v
		}
	case "*":
		if isInteger(left) {
			left, right = right, left
		}
		if isInteger(right) {
			if v, ok := in.multiply(left, toInt(right)); ok {
				return v
			}
		}
	case "-":
		_, a := left.(*view)
		_, b := right.(*view)
		if a || b {
			fail("- with the view of a dictionary is not supported")
		}
	}

	fail("%s is not supported between %s and %s", op, describe(left), describe(right))
	return nil
}

func (in *interpreter) add(left, right value) (value, bool) {
	switch l := left.(type) {
	case string:
		switch r := right.(type) {
		case string:
			in.check(len(l) + len(r))
			return in.newString(l + r), true
		case markup:
			return markup(in.newString(escape(l) + string(r))), true
		}
	case markup:
		switch r := right.(type) {
		case string:
			return markup(in.newString(string(l) + escape(r))), true
		case markup:
			return markup(in.newString(string(l + r))), true
		}
	case *list:
		if r, ok := right.(*list); ok {
			return &list{in.concatenate(l.items, r.items)}, true
		}
	case *tuple:
		if r, ok := right.(*tuple); ok {
			return &tuple{items: in.concatenate(l.items, r.items)}, true
		}
	}

	return nil, false
}

func (in *interpreter) concatenate(a, b []value) []value {
	in.check(16 * (len(a) + len(b)))
	in.grow(16 * (len(a) + len(b)))
	return append(append(make([]value, 0, len(a)+len(b)), a...), b...)
}

func (in *interpreter) multiply(v value, n int) (value, bool) {
	items := func(items []value) []value {
		if n <= 0 || len(items) == 0 {
			return nil
		}
		in.check(16 * len(items) * n)
		in.grow(16 * len(items) * n)
		var all []value
		for range n {
			all = append(all, items...)
		}
		return all
	}

	switch v := v.(type) {
	case string:
		return in.repeat(v, n), true
	case markup:
		return markup(in.repeat(string(v), n)), true
	case *list:
		return &list{items(v.items)}, true
	case *tuple:
		return &tuple{items: items(v.items)}, true
	}

	return nil, false
}

func (in *interpreter) comparison(n *comparison) value {
	left := in.eval(n.first)
	for i, op := range n.ops {
		right := in.eval(n.rest[i])
		in.line = n.line
		if !in.compareOp(op, left, right) {
			return false
		}
		left = right
	}
	return true
}

func (in *interpreter) compareOp(op string, left, right value) bool {
	switch op {
	case "==":
		return in.equal(left, right)
	case "!=":
		return !in.equal(left, right)
	case "in":
		return in.contains(right, left)
	case "not in":
		return !in.contains(right, left)
	}

	order := in.compare(op, left, right)
	switch op {
	case "<":
		return order < 0
	case "<=":
		return order <= 0
	case ">":
		return order > 0
	}

	return order >= 0
}

// slice evaluates the expression object[start:stop:step].
func (in *interpreter) slice(object value, s *slice, line int) value {
	bound := func(n node) value {
		if n == nil {
			return nil
		}
		v := in.eval(n)
		if v != nil && !isInteger(v) {
			fail("the bounds of a slice must be integers, not %s", describe(v))
		}
		return v
	}

	start, stop, step := bound(s.start), bound(s.stop), bound(s.step)
	in.line = line

	by := 1
	if step != nil {
		by = toInt(step)
	}

	if by == 0 {
		fail("the step of a slice is zero")
	}

	indexes := func(n int) (first, count int) {
		low, high := 0, n
		if by < 0 {
			low, high = -1, n-1
		}
		clamp := func(v value, otherwise int) int {
			if v == nil {
				return otherwise
			}
			i := toInt(v)
			if i < 0 {
				i += n
			}
			return max(low, min(i, high))
		}
		var last int
		if by > 0 {
			first, last = clamp(start, 0), clamp(stop, n)
			return first, max(0, (last-first+by-1)/by)
		}
		first, last = clamp(start, n-1), clamp(stop, -1)
		return first, max(0, (first-last-by-1)/-by)
	}

	pick := func(items []value) []value {
		first, count := indexes(len(items))
		in.grow(16 * count)
		picked := make([]value, count)
		for i := range picked {
			picked[i] = items[first+i*by]
		}
		return picked
	}

	switch o := object.(type) {
	case string:
		return in.newString(sliceString(o, indexes, by))
	case markup:
		return markup(in.newString(sliceString(string(o), indexes, by)))
	case *list:
		return &list{pick(o.items)}
	case *tuple:
		return &tuple{items: pick(o.items)}
	case *numberRange:
		fail("a slice of a range is not supported")
	case *undefined:
		fail("%s", o.message)
	}

	fail("%s cannot be sliced", describe(object))
	return nil
}

func sliceString(s string, indexes func(int) (first, count int), by int) string {
	if isASCII(s) {
		first, count := indexes(len(s))
		if by == 1 {
			return s[first : first+count]
		}
	}

	runes := []rune(s)
	first, count := indexes(utf8.RuneCountInString(s))
	var b strings.Builder
	for i := range count {
		b.WriteRune(runes[first+i*by])
	}

	return b.String()
}
