package jinja

import "slices"

// tests holds the names of Jinja2's tests.
var tests = []string{"odd", "even", "divisibleby", "defined", "undefined", "filter", "test", "none",
	"boolean", "false", "true", "integer", "float", "lower", "upper", "string", "mapping", "number",
	"sequence", "iterable", "callable", "sameas", "escaped", "in", "==", "eq", "equalto", "!=", "ne",
	">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le"}

func isTest(name string) bool { return slices.Contains(tests, name) }

// comparisonTests maps tests to operators.
var comparisonTests = map[string]string{"==": "==", "eq": "==", "equalto": "==", "!=": "!=", "ne": "!=",
	">": ">", "gt": ">", "greaterthan": ">", "ge": ">=", ">=": ">=", "<": "<", "lt": "<",
	"lessthan": "<", "<=": "<=", "le": "<="}

func (in *interpreter) applyTest(name string, v value, a *callArguments) value {
	if !isTest(name) {
		fail("no test named %q", name)
	}

	if op, ok := comparisonTests[name]; ok {
		return in.compareOp(op, v, a.bindPositional(name, 1, 1)[0])
	}

	switch name {
	case "divisibleby":
		n := a.bind(name, 1, "num")[0]
		return in.equal(in.operate("%", v, n), int64(0))
	case "sameas":
		return in.same(v, a.bind(name, 1, "other")[0])
	case "in":
		return in.contains(a.bind(name, 1, "seq")[0], v)
	}

	a.bindPositional(name, 0, 0)
	switch name {
	case "odd":
		return in.equal(in.operate("%", v, int64(2)), int64(1))
	case "even":
		return in.equal(in.operate("%", v, int64(2)), int64(0))
	case "lower":
		return hasCase(in.str(v), isLower, isUpper)
	case "upper":
		return hasCase(in.str(v), isUpper, isLower)
	case "filter", "test":
		s, ok := text(v)
		if !ok {
			hash(v) // which fails for a list, as in Python
			return false
		}
		return name == "filter" && isFilter(s) || name == "test" && isTest(s)
	case "none":
		return v == nil
	case "true", "false":
		b, ok := v.(bool)
		return ok && b == (name == "true")
	case "integer":
		_, isBool := v.(bool)
		return isInteger(v) && !isBool
	case "number":
		return isNumber(v)
	case "callable":
		return isCallable(v)
	case "iterable":
		return isIterable(v)
	case "sequence":
		return isSequence(v)
	}

	return hasType(name, v)
}

// hasType applies a test for a single type.
func hasType(name string, v value) bool {
	ok := false
	switch name {
	case "defined":
		_, ok = v.(*undefined)
		ok = !ok
	case "undefined":
		_, ok = v.(*undefined)
	case "boolean":
		_, ok = v.(bool)
	case "float":
		_, ok = v.(float64)
	case "string":
		_, ok = text(v)
	case "mapping":
		_, ok = v.(*dict)
	case "escaped":
		_, ok = v.(markup)
	}

	return ok
}

func isSequence(v value) bool {
	switch v.(type) {
	case string, markup, *list, *tuple, *dict, *numberRange, *undefined:
		return true
	}
	return false
}

// same reports whether two values are the same object. It fails for equal values other than None, true and
// false, because the answer in Python depends on how they were created and on the version of Python.
func (in *interpreter) same(a, b value) bool {
	single := func(v value) bool {
		_, isBool := v.(bool)
		return v == nil || isBool
	}
	if single(a) || single(b) {
		return single(a) && single(b) && a == b
	}

	if typeName(a) != typeName(b) {
		return false
	}

	if !in.equal(a, b) {
		return false
	}

	fail("the test sameas of equal values of type %s is not supported", typeName(a))
	return false
}
