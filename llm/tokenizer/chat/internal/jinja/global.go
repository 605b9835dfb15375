package jinja

import "math"

// globals holds the variables available to every template.
var globals = map[string]value{
	"dict":            dictType{},
	"namespace":       namespaceType{},
	"range":           &function{"range", makeRange},
	"raise_exception": &function{"raise_exception", raise},
	"strftime_now":    &function{"strftime_now", strftimeNow},
	"lipsum": &function{"lipsum", func(*interpreter, *callArguments) value {
		fail("the function lipsum is not supported")
		return nil
	}},
	"cycler": &function{"cycler", func(in *interpreter, a *callArguments) value {
		if len(a.positional) == 0 || len(a.keywords) > 0 {
			fail("cycler: want one argument or more")
		}
		return &cycler{items: a.positional}
	}},
	"joiner": &function{"joiner", func(in *interpreter, a *callArguments) value {
		return &joiner{separator: orDefault(a.bind("joiner", 0, "sep")[0], ", ")}
	}},
}

func makeRange(in *interpreter, a *callArguments) value {
	args := a.bindPositional("range", 1, 3)
	r := &numberRange{step: 1}
	bound := func(v value) int64 {
		i := toBig(v)
		if !i.IsInt64() || i.Int64() > math.MaxInt32 || i.Int64() < math.MinInt32 {
			fail("range: the number %s is not supported", i)
		}
		return i.Int64()
	}

	if args[1] == value(missing) {
		r.stop = bound(args[0])
	} else {
		r.start, r.stop = bound(args[0]), bound(args[1])
	}

	if args[2] != value(missing) {
		r.step = bound(args[2])
	}

	switch {
	case r.step == 0:
		fail("range: the step is zero")
	case r.step > 0 && r.stop > r.start:
		r.n = (r.stop - r.start + r.step - 1) / r.step
	case r.step < 0 && r.stop < r.start:
		r.n = (r.start - r.stop - r.step - 1) / -r.step
	}

	if r.n > maxItems {
		fail("range: more than %d numbers", maxItems)
	}

	return r
}

// raise implements raise_exception, which templates call to reject a conversation.
func raise(in *interpreter, a *callArguments) value {
	message := a.bind("raise_exception", 1, "message")[0]
	fail("the template refuses the conversation: %s", in.str(message))
	return nil
}

func strftimeNow(in *interpreter, a *callArguments) value {
	format := wantText("strftime_now", a.bind("strftime_now", 1, "format")[0])
	return in.newString(strftime(in.now, format))
}
