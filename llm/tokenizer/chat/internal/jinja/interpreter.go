package jinja

import (
	"math"
	"strings"
	"time"
	"unicode/utf8"
)

// An interpreter renders a template once.
type interpreter struct {
	variables map[string]value
	scope     *scope
	out       *strings.Builder
	outLimit  int // bytes of the output, or of the block that is being captured
	line      int
	macros    int // nested macro calls

	now      time.Time
	timeout  time.Duration
	deadline time.Time
	steps    int
	checkAt  int // number of steps at which the time is checked next

	valueLimit  int // bytes of a value
	memory      int // bytes allocated so far
	memoryLimit int
}

// A scope holds the variables of one function of the Python code that Jinja2 generates: the template
// itself or the call of a macro. An inner function sees the variables of the outer one as they are
// at the time.
type scope struct {
	variables map[string]value
	outer     *scope
}

func (s *scope) lookup(ident string) value {
	for ; s != nil; s = s.outer {
		if v, ok := s.variables[ident]; ok {
			return v
		}
	}
	return missing
}

func newInterpreter(variables Variables, o Options) *interpreter {
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	in := &interpreter{
		variables: map[string]value{}, scope: &scope{variables: map[string]value{}},
		now: o.Now, timeout: o.Timeout, deadline: time.Now().Add(o.Timeout),
	}
	in.out, in.outLimit = &strings.Builder{}, maxOutput

	for name, v := range globals {
		in.variables[name] = v
	}
	size := 0
	for name, v := range variables {
		in.variables[name] = v.v
		size += inputSize(v.v)
	}
	in.valueLimit = maxValue + 4*size
	in.memoryLimit = maxMemory + 64*size
	return in
}

// inputSize returns the approximate number of bytes of a variable.
func inputSize(v value) int {
	switch v := v.(type) {
	case string:
		return len(v)
	case *list:
		n := 0
		for _, i := range v.items {
			n += 16 + inputSize(i)
		}
		return n
	case *dict:
		n := 0
		for i, k := range v.keys {
			n += 32 + inputSize(k) + inputSize(v.values[i])
		}
		return n
	}
	return 8
}

// step counts a step of the rendering and fails if time is up.
func (in *interpreter) step() { in.work(1) }

// work counts steps. A step is the work of evaluating a small expression.
func (in *interpreter) work(steps int) {
	if in.steps += steps; in.steps < in.checkAt {
		return
	}
	in.checkAt = in.steps + 1024
	if time.Now().After(in.deadline) {
		fail("the template takes longer than %v", in.timeout)
	}
}

// read counts the work of reading or writing so many bytes.
func (in *interpreter) read(n int) { in.work(1 + n/64) }

// grow counts allocated memory.
func (in *interpreter) grow(n int) {
	in.read(n)
	if in.memory += n; in.memory > in.memoryLimit {
		fail("the template takes more than %d bytes of memory", in.memoryLimit)
	}
}

// check fails if a value would have too many bytes.
func (in *interpreter) check(n int) {
	if n > in.valueLimit {
		fail("a value has more than %d bytes", in.valueLimit)
	}
}

// newString counts a string that has just been made.
func (in *interpreter) newString(s string) string {
	in.check(len(s))
	in.grow(len(s))
	return s
}

// repeat repeats a string.
func (in *interpreter) repeat(s string, n int) string {
	if n <= 0 || s == "" {
		return ""
	}
	if n > math.MaxInt32/len(s) {
		n = math.MaxInt32 / len(s)
	}
	in.check(n * len(s))
	return in.newString(strings.Repeat(s, n))
}

// enter gives the variables of a scope their first values.
func (in *interpreter) enter(loads []load) {
	for _, l := range loads {
		switch l.action {
		case loadResolve:
			if v, ok := in.variables[l.from]; ok {
				in.scope.variables[l.ident] = v
			} else {
				in.scope.variables[l.ident] = undefinedVariable(l.from)
			}
		case loadAlias:
			in.scope.variables[l.ident] = in.scope.lookup(l.from)
		case loadUndefined:
			in.scope.variables[l.ident] = missing
		}
	}
}

// leave clears the variables of a scope.
func (in *interpreter) leave(loads []load) {
	for _, l := range loads {
		in.scope.variables[l.ident] = missing
	}
}

func undefinedVariable(name string) value {
	return &undefined{"the variable " + name + " is undefined"}
}

// control says how a list of statements ended.
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

	// As in Jinja2, a loop whose iterations all end by continue or break counts as empty.
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

// filterLoop returns a generator of the elements for which the condition of a loop holds. It has a
// scope of its own.
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

// A macro is a macro or the caller of a call block, with the scope in which it is defined.
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

// slice is the expression object[start:stop:step].
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
