package jinja

import "slices"

// A parser turns tokens into nodes. Its methods correspond to the methods of Jinja2's parser.
type parser struct {
	tokens []token
	at     int
	line   *int // line of the latest tag, for error messages
	tags   int  // open tags
	depth  int  // nested expressions

	// inLoop reports whether break and continue are allowed.
	inLoop bool
}

func (p *parser) current() token { return p.tokens[p.at] }

func (p *parser) look() token { return p.tokens[min(p.at+1, len(p.tokens)-1)] }

func (p *parser) next() token {
	t := p.tokens[p.at]
	if p.at < len(p.tokens)-1 {
		p.at++
	}
	*p.line = p.current().line
	return t
}

func (p *parser) isOperator(op string) bool {
	t := p.current()
	return t.kind == tokenOperator && t.text == op
}

func (p *parser) isName(name string) bool {
	t := p.current()
	return t.kind == tokenName && t.text == name
}

func (p *parser) skipOperator(op string) bool {
	if p.isOperator(op) {
		p.next()
		return true
	}
	return false
}

func (p *parser) skipName(name string) bool {
	if p.isName(name) {
		p.next()
		return true
	}
	return false
}

func (p *parser) expectOperator(op string) {
	if !p.skipOperator(op) {
		fail("expected %q, got %v", op, p.current())
	}
}

func (p *parser) expect(kind tokenKind, what string) token {
	if p.current().kind != kind {
		fail("expected %s, got %v", what, p.current())
	}
	return p.next()
}

// parseBody parses statements up to one of the end tags, which becomes the current token. Without
// end tags it parses up to the end of the template.
func (p *parser) parseBody(ends []string) []node {
	var body []node
	for {
		t := p.current()
		switch t.kind {
		case tokenEOF:
			if ends != nil {
				fail("unexpected end of template, expected %v", ends)
			}
			return body
		case tokenData:
			p.next()
			body = append(body, &data{t.text})
		case tokenVariableBegin:
			p.next()
			body = append(body, &output{p.parseTuple(true, nil), t.line})
			p.expect(tokenVariableEnd, `"}}"`)
		case tokenBlockBegin:
			p.next()
			if c := p.current(); c.kind == tokenName && slices.Contains(ends, c.text) {
				return body
			}
			body = append(body, p.parseStatement()...)
			p.expect(tokenBlockEnd, `"%}"`)
		default:
			fail("unexpected %v", t)
		}
	}
}

// parseStatements parses the body of a tag. With drop, it also consumes the name of the end tag.
func (p *parser) parseStatements(drop bool, ends ...string) []node {
	p.skipOperator(":")
	p.expect(tokenBlockEnd, `"%}"`)
	body := p.parseBody(ends)
	if drop {
		p.next()
	}
	return body
}

// parseFunctionBody parses a body that Jinja2 compiles to a function, where a surrounding loop can
// be neither left nor continued.
func (p *parser) parseFunctionBody(end string) []node {
	outer := p.inLoop
	p.inLoop = false
	body := p.parseStatements(true, end)
	p.inLoop = outer
	return body
}

func (p *parser) parseStatement() []node {
	if p.tags++; p.tags > maxTags {
		fail("tags are nested deeper than %d", maxTags)
	}
	defer func() { p.tags-- }()

	t := p.current()
	if t.kind != tokenName {
		fail("expected the name of a tag, got %v", t)
	}

	switch t.text {
	case "for":
		return []node{p.parseFor()}
	case "if":
		return []node{p.parseIf()}
	case "set":
		return []node{p.parseSet()}
	case "macro":
		return []node{p.parseMacro()}
	case "call":
		return []node{p.parseCallBlock()}
	case "filter":
		p.next()
		f := p.parseFilters(nil, true).(*filter)
		return []node{&filterBlock{filter: f, body: p.parseStatements(true, "endfilter"), line: t.line}}
	case "with":
		return []node{p.parseWith()}
	case "print":
		return p.parsePrint()
	case "generation":
		p.next()
		body := p.parseFunctionBody("endgeneration")
		return []node{&callBlock{macro: &macroBody{body: body}, line: t.line}}
	case "break", "continue":
		p.next()
		if !p.inLoop {
			fail("%s outside of a loop", t.text)
		}
		kind := controlBreak
		if t.text == "continue" {
			kind = controlContinue
		}
		return []node{&loopControl{kind, t.line}}
	case "block", "extends", "include", "import", "from", "autoescape":
		fail("the tag %q is not supported", t.text)
	}

	fail("unknown tag %q", t.text)
	return nil
}

func (p *parser) parseFor() node {
	n := &forLoop{line: p.next().line}
	n.target = p.parseTarget(true, false, []string{"in"})
	if !p.skipName("in") {
		fail("expected in, got %v", p.current())
	}

	n.iterable = p.parseTuple(false, []string{"recursive"})
	if p.skipName("if") {
		n.condition = p.parseExpression(true)
	}

	if p.isName("recursive") {
		fail("recursive loops are not supported")
	}

	outer := p.inLoop
	p.inLoop = true
	n.body = p.parseStatements(false, "endfor", "else")
	p.inLoop = outer
	if p.next().text == "else" {
		n.otherwise = p.parseStatements(true, "endfor")
	}

	return n
}

func (p *parser) parseIf() node {
	n := &ifStatement{line: p.next().line}
	for {
		branch := ifBranch{condition: p.parseTuple(false, nil)}
		branch.body = p.parseStatements(false, "elif", "else", "endif")
		n.branches = append(n.branches, branch)
		switch p.next().text {
		case "elif":
			continue
		case "else":
			n.otherwise = p.parseStatements(true, "endif")
		}
		return n
	}
}

func (p *parser) parseSet() node {
	line := p.next().line
	target := p.parseTarget(true, true, nil)
	if p.skipOperator("=") {
		n := &set{target: target, value: p.parseTuple(true, nil), line: line}
		n.refs = namespaceRefs(n.target)
		return n
	}

	n := &setBlock{target: target, line: line}
	if f := p.parseFilters(nil, false); f != nil {
		n.filter = f.(*filter)
	}

	n.body = p.parseStatements(true, "endset")
	return n
}

// namespaceRefs returns the namespace attributes that an assignment assigns to.
func namespaceRefs(target node) []*nsRef {
	switch n := target.(type) {
	case *nsRef:
		return []*nsRef{n}
	case *tupleLiteral:
		var all []*nsRef
		for _, i := range n.items {
			all = append(all, namespaceRefs(i)...)
		}
		return all
	}

	return nil
}

func (p *parser) parseMacro() node {
	line := p.next().line
	n := p.parseNameTarget()
	m := &macroBody{name: n.name}
	p.parseSignature(m)
	m.body = p.parseFunctionBody("endmacro")
	return &macroStatement{name: n, macro: m, line: line}
}

func (p *parser) parseSignature(m *macroBody) {
	p.expectOperator("(")
	for !p.isOperator(")") {
		if len(m.params) > 0 {
			p.expectOperator(",")
		}
		param := p.parseNameTarget()
		param.mode = modeParam
		if slices.ContainsFunc(m.params, func(n *name) bool { return n.name == param.name }) {
			fail("the parameter %s occurs twice", param.name)
		}
		if p.skipOperator("=") {
			m.defaults = append(m.defaults, p.parseExpression(true))
		} else if len(m.defaults) > 0 {
			fail("a parameter without a default follows one with a default")
		}
		m.params = append(m.params, param)
	}

	p.next()
}

func (p *parser) parseCallBlock() node {
	n := &callBlock{line: p.next().line, macro: &macroBody{}}
	if p.isOperator("(") {
		p.parseSignature(n.macro)
	}

	c, ok := p.parseExpression(true).(*call)
	if !ok {
		fail("expected a call")
	}

	n.call = c
	n.macro.body = p.parseFunctionBody("endcall")
	return n
}

func (p *parser) parseWith() node {
	n := &with{line: p.next().line}
	for p.current().kind != tokenBlockEnd {
		if len(n.targets) > 0 {
			p.expectOperator(",")
		}
		target := p.parseTarget(true, false, nil)
		setMode(target, modeParam)
		n.targets = append(n.targets, target)
		p.expectOperator("=")
		n.values = append(n.values, p.parseExpression(true))
	}

	n.body = p.parseStatements(true, "endwith")
	return n
}

func (p *parser) parsePrint() []node {
	line := p.next().line
	var all []node
	for p.current().kind != tokenBlockEnd {
		if all != nil {
			p.expectOperator(",")
		}
		all = append(all, &output{p.parseExpression(true), line})
	}
	return all
}

func (p *parser) parseNameTarget() *name {
	t := p.expect(tokenName, "a name")
	n := &name{name: t.text, mode: modeStore, line: t.line}
	checkAssignable(n)
	return n
}

// parseTarget parses the target of an assignment.
func (p *parser) parseTarget(tuple, namespace bool, ends []string) node {
	var target node
	if tuple {
		target = p.parseItems(func() node { return p.parsePrimary(namespace) }, ends, false)
	} else {
		target = p.parsePrimary(namespace)
	}
	setMode(target, modeStore)
	checkAssignable(target)
	return target
}

// setMode sets the mode of all names of a target.
func setMode(n node, mode nameMode) {
	switch n := n.(type) {
	case *name:
		n.mode = mode
	case *tupleLiteral:
		for _, i := range n.items {
			setMode(i, mode)
		}
	}
}

func checkAssignable(n node) {
	switch n := n.(type) {
	case *name:
		if slices.Contains([]string{"true", "false", "none", "True", "False", "None"}, n.name) {
			fail("cannot assign to %s", n.name)
		}
	case *nsRef:
	case *tupleLiteral:
		for _, i := range n.items {
			checkAssignable(i)
		}
	default:
		fail("cannot assign to a literal")
	}
}

func (p *parser) parseTuple(conditional bool, ends []string) node {
	return p.parseItems(func() node { return p.parseExpression(conditional) }, ends, false)
}

// parseItems parses one expression, or several separated by commas, which form a tuple.
func (p *parser) parseItems(parse func() node, ends []string, brackets bool) node {
	var items []node
	isTuple := false
	for {
		if len(items) > 0 {
			p.expectOperator(",")
		}
		t := p.current()
		if t.kind == tokenVariableEnd || t.kind == tokenBlockEnd || p.isOperator(")") ||
			t.kind == tokenName && slices.Contains(ends, t.text) {
			break
		}
		items = append(items, parse())
		if !p.isOperator(",") {
			break
		}
		isTuple = true
	}

	if !isTuple {
		if len(items) > 0 {
			return items[0]
		}
		if !brackets {
			fail("expected an expression, got %v", p.current())
		}
	}

	return &tupleLiteral{items}
}

// enter counts a nested expression. The caller calls the result at the end of the expression.
func (p *parser) enter() (leave func()) {
	if p.depth++; p.depth > maxNesting {
		fail("an expression is nested too deep")
	}
	return func() { p.depth-- }
}

func (p *parser) parseExpression(withConditional bool) node {
	defer p.enter()()
	if !withConditional {
		return p.parseOr()
	}

	n := p.parseOr()
	for count := 0; p.skipName("if"); count++ {
		checkOperators(count)
		condition := p.parseOr()
		var no node
		if p.skipName("else") {
			no = p.parseExpression(true)
		}
		n = &conditional{condition, n, no}
	}

	return n
}

// checkOperators fails if an expression has too many operators in a row.
func checkOperators(n int) {
	if n > maxOperators {
		fail("an expression has more than %d operators in a row", maxOperators)
	}
}

// parseBinary parses operands separated by operators of the same precedence.
func (p *parser) parseBinary(operand func() node, is func(token) bool) node {
	left := operand()
	for count := 0; is(p.current()); count++ {
		checkOperators(count)
		t := p.next()
		left = &binary{t.text, left, operand(), t.line}
	}
	return left
}

func isOneOf(kind tokenKind, texts ...string) func(token) bool {
	return func(t token) bool { return t.kind == kind && slices.Contains(texts, t.text) }
}

func (p *parser) parseOr() node {
	return p.parseBinary(p.parseAnd, isOneOf(tokenName, "or"))
}

func (p *parser) parseAnd() node {
	return p.parseBinary(p.parseNot, isOneOf(tokenName, "and"))
}

func (p *parser) parseNot() node {
	if p.isName("not") {
		defer p.enter()()
		line := p.next().line
		return &unary{"not", p.parseNot(), line}
	}
	return p.parseCompare()
}

func (p *parser) parseCompare() node {
	n := &comparison{first: p.parseSum(), line: p.current().line}
	isComparison := isOneOf(tokenOperator, "==", "!=", "<", "<=", ">", ">=")
	for {
		checkOperators(len(n.ops))
		var op string
		switch {
		case isComparison(p.current()):
			op = p.next().text
		case p.skipName("in"):
			op = "in"
		case p.isName("not") && p.look().kind == tokenName && p.look().text == "in":
			p.next()
			p.next()
			op = "not in"
		case len(n.ops) == 0:
			return n.first
		default:
			return n
		}
		n.ops = append(n.ops, op)
		n.rest = append(n.rest, p.parseSum())
	}
}

func (p *parser) parseSum() node {
	return p.parseBinary(p.parseConcat, isOneOf(tokenOperator, "+", "-"))
}

func (p *parser) parseConcat() node {
	parts := []node{p.parseProduct()}
	for p.skipOperator("~") {
		parts = append(parts, p.parseProduct())
	}
	if len(parts) == 1 {
		return parts[0]
	}
	return &concat{parts}
}

func (p *parser) parseProduct() node {
	return p.parseBinary(p.parsePower, isOneOf(tokenOperator, "*", "/", "//", "%"))
}

func (p *parser) parsePower() node {
	return p.parseBinary(func() node { return p.parseUnary(true) }, isOneOf(tokenOperator, "**"))
}

func (p *parser) parseUnary(withFilter bool) node {
	var n node
	t := p.current()
	if t.kind == tokenOperator && (t.text == "-" || t.text == "+") {
		leave := p.enter()
		p.next()
		n = &unary{t.text, p.parseUnary(false), t.line}
		leave()
	} else {
		n = p.parsePrimary(false)
	}

	n = p.parsePostfix(n)
	if withFilter {
		n = p.parseFilterExpression(n)
	}

	return n
}

func (p *parser) parsePrimary(namespace bool) node {
	t := p.current()
	switch {
	case t.kind == tokenName:
		p.next()
		switch t.text {
		case "true", "True":
			return &constant{true}
		case "false", "False":
			return &constant{false}
		case "none", "None":
			return &constant{nil}
		}
		if namespace && p.skipOperator(".") {
			attr := p.expect(tokenName, "a name")
			return &nsRef{name: t.text, attr: attr.text, line: t.line}
		}
		return &name{name: t.text, line: t.line}
	case t.kind == tokenString:
		text := ""
		for p.current().kind == tokenString {
			text += p.next().text
		}
		return &constant{text}
	case t.kind == tokenInteger || t.kind == tokenFloat:
		p.next()
		return &constant{t.number}
	case p.skipOperator("("):
		n := p.parseItems(func() node { return p.parseExpression(true) }, nil, true)
		p.expectOperator(")")
		return n
	case p.skipOperator("["):
		n := &listLiteral{}
		for !p.isOperator("]") {
			if len(n.items) > 0 {
				p.expectOperator(",")
			}
			if p.isOperator("]") {
				break
			}
			n.items = append(n.items, p.parseExpression(true))
		}
		p.next()
		return n
	case p.skipOperator("{"):
		n := &dictLiteral{}
		for !p.isOperator("}") {
			if len(n.keys) > 0 {
				p.expectOperator(",")
			}
			if p.isOperator("}") {
				break
			}
			n.keys = append(n.keys, p.parseExpression(true))
			p.expectOperator(":")
			n.values = append(n.values, p.parseExpression(true))
		}
		p.next()
		return n
	}

	fail("unexpected %v", t)
	return nil
}

func (p *parser) parsePostfix(n node) node {
	for count := 0; ; count++ {
		checkOperators(count)
		switch {
		case p.isOperator("."):
			n = p.parseAttribute(n)
		case p.isOperator("["):
			n = p.parseItem(n)
		case p.isOperator("("):
			n = p.parseCall(n)
		default:
			return n
		}
	}
}

func (p *parser) parseFilterExpression(n node) node {
	for count := 0; ; count++ {
		checkOperators(count)
		switch {
		case p.isOperator("|"):
			n = p.parseFilters(n, false)
		case p.isName("is"):
			n = p.parseTest(n)
		case p.isOperator("("):
			n = p.parseCall(n)
		default:
			return n
		}
	}
}

func (p *parser) parseAttribute(object node) node {
	line := p.next().line
	t := p.next()
	switch t.kind {
	case tokenName:
		return &attribute{object, t.text, line}
	case tokenInteger:
		return &item{object, &constant{t.number}, line}
	}
	fail("expected a name or number, got %v", t)
	return nil
}

func (p *parser) parseItem(object node) node {
	line := p.next().line
	var items []node
	for !p.isOperator("]") {
		if len(items) > 0 {
			p.expectOperator(",")
		}
		items = append(items, p.parseSubscript())
	}

	p.next()

	if len(items) == 1 {
		return &item{object, items[0], line}
	}

	for _, i := range items {
		if _, ok := i.(*slice); ok {
			fail("a slice among several subscripts is not supported")
		}
	}

	return &item{object, &tupleLiteral{items}, line}
}

// parseSubscript parses an index or a slice.
func (p *parser) parseSubscript() node {
	s := &slice{}
	if !p.isOperator(":") {
		s.start = p.parseExpression(true)
		if !p.isOperator(":") {
			return s.start
		}
	}

	p.next()

	atEnd := func() bool { return p.isOperator("]") || p.isOperator(",") }
	if !p.isOperator(":") && !atEnd() {
		s.stop = p.parseExpression(true)
	}

	if p.skipOperator(":") && !atEnd() {
		s.step = p.parseExpression(true)
	}

	return s
}

func (p *parser) parseArguments() arguments {
	var a arguments
	ensure := func(ok bool) {
		if !ok {
			fail("invalid syntax for the arguments of a call")
		}
	}

	p.expectOperator("(")
	for first := true; !p.isOperator(")"); first = false {
		if !first {
			p.expectOperator(",")
			if p.isOperator(")") {
				break
			}
		}
		switch t := p.current(); {
		case p.isOperator("*"):
			ensure(a.list == nil && a.dict == nil)
			p.next()
			a.list = p.parseExpression(true)
		case p.isOperator("**"):
			ensure(a.dict == nil)
			p.next()
			a.dict = p.parseExpression(true)
		case t.kind == tokenName && p.look().kind == tokenOperator && p.look().text == "=":
			ensure(a.dict == nil)
			p.next()
			p.next()
			for _, k := range a.keywords {
				if k.name == t.text {
					fail("the argument %s occurs twice", t.text)
				}
			}
			a.keywords = append(a.keywords, keyword{t.text, p.parseExpression(true)})
		default:
			ensure(a.list == nil && a.dict == nil && len(a.keywords) == 0)
			a.positional = append(a.positional, p.parseExpression(true))
		}
	}

	p.next()
	return a
}

func (p *parser) parseCall(callee node) node {
	line := p.current().line
	return &call{callee, p.parseArguments(), line}
}

// parseDottedName parses the name of a filter or test.
func (p *parser) parseDottedName() token {
	t := p.expect(tokenName, "a name")
	for p.skipOperator(".") {
		t.text += "." + p.expect(tokenName, "a name").text
	}
	return t
}

// parseFilters parses filters, each of them applied to the result of the previous one. With inline, no
// bar precedes the first filter. It returns nil if object is nil and no filter follows.
func (p *parser) parseFilters(object node, inline bool) node {
	for count := 0; inline || p.isOperator("|"); count++ {
		checkOperators(count)
		if !inline {
			p.next()
		}
		inline = false
		t := p.parseDottedName()
		f := &filter{object: object, name: t.text, line: t.line}
		if p.isOperator("(") {
			f.args = p.parseArguments()
		}
		object = f
	}

	return object
}

func (p *parser) parseTest(object node) node {
	p.next()
	negated := p.skipName("not")
	t := p.parseDottedName()
	n := &test{object: object, name: t.text, line: t.line}

	c := p.current()
	switch {
	case p.isOperator("("):
		n.args = p.parseArguments()
	case c.kind == tokenString, c.kind == tokenInteger, c.kind == tokenFloat, p.isOperator("["),
		p.isOperator("{"), c.kind == tokenName && c.text != "else" && c.text != "or" && c.text != "and":
		if p.isName("is") {
			fail("tests cannot be chained with is")
		}
		n.args.positional = []node{p.parsePostfix(p.parsePrimary(false))}
	}

	if negated {
		return &unary{"not", n, t.line}
	}

	return n
}
