package jinja

import (
	"slices"
	"strings"
)

// callArguments holds the arguments of a call.
type callArguments struct {
	positional []value
	keywords   []keywordValue
}

type keywordValue struct {
	name  string
	value value
}

// bind assigns the arguments to parameters. The first required parameters must have arguments; the
// remaining ones may be missing.
func (a *callArguments) bind(function string, required int, parameters ...string) []value {
	bound := make([]value, len(parameters))
	for i := range bound {
		bound[i] = missing
	}

	if len(a.positional) > len(parameters) {
		fail("%s takes at most %d arguments, got %d", function, len(parameters), len(a.positional))
	}

	copy(bound, a.positional)
	for _, k := range a.keywords {
		i := slices.Index(parameters, k.name)
		if i < 0 {
			fail("%s has no argument %s", function, k.name)
		}
		if bound[i] != value(missing) {
			fail("%s got the argument %s twice", function, k.name)
		}
		bound[i] = k.value
	}

	for i := range required {
		if bound[i] == value(missing) {
			fail("%s requires the argument %s", function, parameters[i])
		}
	}

	return bound
}

// bindPositional is like bind, for functions that take no keyword arguments.
func (a *callArguments) bindPositional(function string, required, limit int) []value {
	if len(a.keywords) > 0 {
		fail("%s takes no keyword arguments", function)
	}
	names := make([]string, limit)
	for i := range names {
		names[i] = "number " + string(rune('1'+i))
	}
	return a.bind(function, required, names...)
}

// call calls a value.
func (in *interpreter) call(callee value, a *callArguments) value {
	switch c := callee.(type) {
	case *function:
		return c.call(in, a)
	case *macro:
		return in.callMacro(c, a)
	case dictType:
		return in.makeDict(a)
	case namespaceType:
		d := in.makeDict(a).(*dict)
		for _, k := range d.keys {
			checkNamespaceName(k)
		}
		return &namespace{d}
	case *joiner:
		a.bindPositional("joiner", 0, 0)
		if !c.used {
			c.used = true
			return ""
		}
		return c.separator
	case *loopContext:
		fail("the loop is not recursive and cannot be called")
	case *undefined:
		fail("%s", c.message)
	}

	fail("%s is not callable", describe(callee))
	return nil
}

func isCallable(v value) bool {
	switch v.(type) {
	case *function, *macro, dictType, namespaceType, *joiner, *loopContext, *undefined:
		return true
	}
	return false
}

func checkNamespaceName(name value) {
	if s, ok := text(name); ok && strings.HasPrefix(s, "_") {
		fail("a namespace cannot have the attribute %q", s)
	}
}

// makeDict creates a dictionary like Python's dict.
func (in *interpreter) makeDict(a *callArguments) value {
	d := newDict()
	if len(a.positional) > 1 {
		fail("dict takes at most one positional argument, got %d", len(a.positional))
	}

	if len(a.positional) == 1 {
		switch v := a.positional[0].(type) {
		case *dict:
			d = v.clone()
		case *namespace:
			fail("a namespace cannot be converted to a dictionary")
		default:
			for _, e := range in.elements(v) {
				pair := in.elements(e)
				if len(pair) != 2 {
					fail("dict: an element has %d items, want 2", len(pair))
				}
				d.set(pair[0], pair[1])
			}
		}
	}

	for _, k := range a.keywords {
		d.set(k.name, k.value)
	}

	in.grow(32 * len(d.keys))
	return d
}
