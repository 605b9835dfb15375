package jinja

import "strings"

// control describes how a list of statements ended.
type control int

const (
	controlNone control = iota
	controlBreak
	controlContinue
)

func (in *interpreter) run(body []node) control {
	for _, n := range body {
		in.step()
		if c := in.execute(n); c != controlNone {
			return c
		}
	}
	return controlNone
}

func (in *interpreter) execute(n node) control {
	switch n := n.(type) {
	case *data:
		in.write(n.text)
	case *output:
		in.line = n.line
		in.write(in.str(in.eval(n.expr)))
	case *ifStatement:
		in.line = n.line
		for _, b := range n.branches {
			if isTrue(in.eval(b.condition)) {
				return in.run(b.body)
			}
		}
		return in.run(n.otherwise)
	case *forLoop:
		return in.executeFor(n)
	case *set:
		in.line = n.line
		in.executeSet(n)
	case *setBlock:
		in.enter(n.loads)
		var c control
		text := in.capture(func() { c = in.run(n.body) })
		if c != controlNone {
			return c
		}
		in.line = n.line
		in.assign(n.target, in.filterBlock(n.filter, text))
		in.leave(n.loads)
	case *filterBlock:
		in.enter(n.loads)
		var c control
		text := in.capture(func() { c = in.run(n.body) })
		if c != controlNone {
			return c
		}
		in.line = n.line
		in.writeFiltered(in.filterBlock(n.filter, text))
		in.leave(n.loads)
	case *with:
		in.line = n.line
		in.enter(n.loads)
		for i, target := range n.targets {
			in.assign(target, in.eval(n.values[i]))
		}
		c := in.run(n.body)
		if c == controlNone {
			in.leave(n.loads)
		}
		return c
	case *macroStatement:
		in.scope.variables[n.name.ident] = &macro{n.macro, in.scope}
	case *callBlock:
		in.executeCallBlock(n)
	case *loopControl:
		return n.kind
	}

	return controlNone
}

// write adds text to the output, or to the block that is being captured.
func (in *interpreter) write(s string) {
	if in.out.Len()+len(s) > in.outLimit {
		fail("the text has more than %d bytes", in.outLimit)
	}
	in.out.WriteString(s)
}

// writeFiltered writes the result of a filter block or call block, which must be a string, since
// Jinja2 joins it with the other output.
func (in *interpreter) writeFiltered(v value) {
	s, ok := text(v)
	if !ok {
		fail("the result of a block is %s, want a string", describe(v))
	}
	in.write(s)
}

// capture returns the text that a function writes.
func (in *interpreter) capture(run func()) string {
	outer, limit := in.out, in.outLimit
	in.out, in.outLimit = &strings.Builder{}, in.valueLimit
	run()
	s := in.out.String()
	in.out, in.outLimit = outer, limit
	in.grow(len(s))
	return s
}

// filterBlock applies filters to the text of a block.
func (in *interpreter) filterBlock(f *filter, text string) value {
	if f == nil {
		return text
	}
	var object value = text
	if inner, ok := f.object.(*filter); ok {
		object = in.filterBlock(inner, text)
	}
	return in.applyFilter(f, object)
}

func (in *interpreter) executeSet(n *set) {
	for _, ref := range n.refs {
		if _, ok := in.scope.lookup(ref.ident).(*namespace); !ok {
			fail("%s is not a namespace, so it cannot have attributes", ref.name)
		}
	}
	in.assign(n.target, in.eval(n.value))
}

// assign stores a value in a target.
func (in *interpreter) assign(target node, v value) {
	switch t := target.(type) {
	case *name:
		in.scope.variables[t.ident] = v
	case *nsRef:
		ns, ok := in.scope.lookup(t.ident).(*namespace)
		if !ok {
			fail("%s is not a namespace, so it cannot have attributes", t.name)
		}
		checkNamespaceName(t.attr)
		ns.attrs.set(t.attr, v)
	case *tupleLiteral:
		values := in.elements(v)
		if len(values) != len(t.items) {
			fail("%d values for %d variables", len(values), len(t.items))
		}
		for i, target := range t.items {
			in.assign(target, values[i])
		}
	}
}

func (in *interpreter) executeFor(n *forLoop) control {
	in.line = n.line
	if n.loopIdent != "" {
		in.scope.variables[n.loopIdent] = missing
	}

	iterable := in.eval(n.iterable)
	if n.condition != nil {
		iterable = in.filterLoop(n, in.iterate(iterable))
	}

	loop := &loopContext{in: in, of: iterable, iterator: in.iterate(iterable), index0: -1}

	// As in Jinja2, a loop counts as empty if all of its iterations end with continue or break.
	ended := false
	for {
		v, ok := loop.next()
		if !ok {
			break
		}
		in.step()
		in.assign(n.target, v)
		if n.loopIdent != "" {
			in.scope.variables[n.loopIdent] = loop
		}
		in.enter(n.bodyLoads)
		c := in.run(n.body)
		if c == controlBreak {
			break
		}
		if c == controlNone {
			ended = true
		}
	}

	in.leave(n.bodyLoads)

	if n.otherwise != nil && !ended {
		in.enter(n.elseLoads)
		if c := in.run(n.otherwise); c != controlNone {
			return c
		}
		in.leave(n.elseLoads)
	}

	return controlNone
}

// filterLoop returns a generator of the elements that satisfy the condition of a loop. The condition is
// evaluated in a separate scope.
func (in *interpreter) filterLoop(n *forLoop, elements *iterator) *iterator {
	inner := &scope{map[string]value{}, in.scope}
	entered := false
	return &iterator{func() (value, bool) {
		outer := in.scope
		in.scope = inner
		defer func() { in.scope = outer }()

		if !entered {
			entered = true
			in.enter(n.testLoads)
		}
		for {
			v, ok := elements.next()
			if !ok {
				return nil, false
			}
			in.step()
			in.assign(n.target, v)
			if isTrue(in.eval(n.condition)) {
				return in.targetValue(n.target), true
			}
		}
	}}
}

// targetValue returns the value of the variables of a target.
func (in *interpreter) targetValue(target node) value {
	if t, ok := target.(*tupleLiteral); ok {
		result := &tuple{}
		for _, i := range t.items {
			result.items = append(result.items, in.targetValue(i))
		}
		return result
	}
	return in.scope.lookup(target.(*name).ident)
}

// A loopContext is the variable loop.
type loopContext struct {
	in       *interpreter
	of       value
	iterator *iterator
	index0   int
	size     int
	sized    bool

	current, previous value
	after             value
	peeked            bool
	changedTo         *tuple
}

func (l *loopContext) next() (value, bool) {
	var v value
	if l.peeked {
		v, l.peeked = l.after, false
	} else {
		var ok bool
		if v, ok = l.iterator.next(); !ok {
			return nil, false
		}
	}

	l.index0++
	l.previous, l.current = l.current, v
	return v, true
}

// peek reads the next element ahead and reports whether there is one.
func (l *loopContext) peek() bool {
	if !l.peeked {
		l.after, l.peeked = l.iterator.next()
	}
	return l.peeked
}

// length returns the number of elements. It reads all elements of a generator ahead.
func (l *loopContext) length() int {
	if l.sized {
		return l.size
	}

	l.sized = true
	if n, ok := length(l.of); ok {
		l.size = n
		return n
	}

	rest := l.in.elements(l.iterator)
	l.iterator = sliceIterator(rest)
	l.size = len(rest) + l.index0 + 1
	if l.peeked {
		l.size++
	}

	return l.size
}

func (l *loopContext) attribute(name string) (value, bool) {
	switch name {
	case "index0":
		return int64(l.index0), true
	case "index":
		return int64(l.index0 + 1), true
	case "length":
		return int64(l.length()), true
	case "revindex":
		return int64(l.length() - l.index0), true
	case "revindex0":
		return int64(l.length() - l.index0 - 1), true
	case "first":
		return l.index0 == 0, true
	case "last":
		return !l.peek(), true
	case "depth":
		return int64(1), true
	case "depth0":
		return int64(0), true
	case "previtem":
		if l.index0 == 0 {
			return &undefined{"there is no previous item"}, true
		}
		return l.previous, true
	case "nextitem":
		if !l.peek() {
			return &undefined{"there is no next item"}, true
		}
		return l.after, true
	case "cycle":
		return method(name, func(in *interpreter, a *callArguments) value {
			if len(a.positional) == 0 || len(a.keywords) > 0 {
				fail("cycle: want one argument or more")
			}
			return a.positional[l.index0%len(a.positional)]
		}), true
	case "changed":
		return method(name, func(in *interpreter, a *callArguments) value {
			if len(a.keywords) > 0 {
				fail("changed takes no keyword arguments")
			}
			to := &tuple{items: a.positional}
			if l.changedTo != nil && in.equal(l.changedTo, to) {
				return false
			}
			l.changedTo = to
			return true
		}), true
	}

	return nil, false
}

// A macro is a macro or the caller of a call block, with its defining scope.
type macro struct {
	body  *macroBody
	scope *scope
}

func (in *interpreter) executeCallBlock(n *callBlock) {
	caller := &macro{n.macro, in.scope}
	in.line = n.line
	if n.call == nil { // a generation block
		in.write(in.callMacro(caller, &callArguments{}).(string))
		return
	}

	callee := in.eval(n.call.callee)
	args := in.evalArguments(n.call.args)
	for _, k := range args.keywords {
		if k.name == "caller" {
			fail("the argument caller of a call block is not supported")
		}
	}

	args.keywords = append(args.keywords, keywordValue{"caller", caller})
	in.writeFiltered(in.call(callee, args))
}

// callMacro runs a macro and returns its text.
func (in *interpreter) callMacro(m *macro, a *callArguments) value {
	if in.macros++; in.macros > maxMacros {
		fail("more than %d macros call each other", maxMacros)
	}

	b := m.body
	inner := &scope{map[string]value{}, m.scope}
	keywords := append([]keywordValue(nil), a.keywords...)
	pop := func(name string) value {
		for i, k := range keywords {
			if k.name == name {
				keywords = append(keywords[:i], keywords[i+1:]...)
				return k.value
			}
		}
		return missing
	}

	foundCaller := false
	for i, p := range b.params {
		if i < len(a.positional) {
			inner.variables[p.ident] = a.positional[i]
		} else {
			inner.variables[p.ident] = pop(p.name)
		}
		foundCaller = foundCaller || p.name == "caller"
	}

	if b.callerIdent != "" && !foundCaller {
		caller := pop("caller")
		if caller == value(missing) || caller == nil {
			caller = &undefined{"no caller is defined"}
		}
		inner.variables[b.callerIdent] = caller
	}

	if b.kwargsIdent != "" {
		d := newDict()
		for _, k := range keywords {
			d.set(k.name, k.value)
		}
		inner.variables[b.kwargsIdent] = d
	} else if len(keywords) > 0 {
		fail("the macro %s takes no argument named %s", b.name, keywords[0].name)
	}

	rest := a.positional[min(len(b.params), len(a.positional)):]
	if b.varargsIdent != "" {
		inner.variables[b.varargsIdent] = &tuple{items: rest}
	} else if len(rest) > 0 {
		fail("the macro %s takes at most %d arguments", b.name, len(b.params))
	}

	outer, line := in.scope, in.line
	in.scope = inner
	s := in.capture(func() {
		in.enter(b.loads)
		for i, p := range b.params {
			if inner.variables[p.ident] != value(missing) {
				continue
			}
			if d := i - (len(b.params) - len(b.defaults)); d >= 0 {
				inner.variables[p.ident] = in.eval(b.defaults[d])
			} else {
				inner.variables[p.ident] = &undefined{"the parameter " + p.name + " was not provided"}
			}
		}
		in.run(b.body)
	})

	in.scope, in.line = outer, line
	in.macros--
	return s
}
