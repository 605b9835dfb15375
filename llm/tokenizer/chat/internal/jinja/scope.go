package jinja

import (
	"slices"
	"strconv"
)

// Jinja2 decides at compile time which scope a name belongs to. A name that a scope stores anywhere is a
// variable of that scope, which starts as a copy of the variable of the surrounding scope, as undefined,
// or as the variable passed to the template, depending on where the name occurs first. This file
// reproduces that decision. It gives each variable an identifier that combines its name and the nesting
// level of its scope.

// A load describes the initial value of a variable when its scope is entered.
type load struct {
	ident  string
	action loadAction
	from   string // identifier or name of the initial value
}

type loadAction int

const (
	loadParameter loadAction = iota
	loadResolve
	loadAlias
	loadUndefined
)

// symbols holds the names of one scope.
type symbols struct {
	level  int
	parent *symbols
	refs   map[string]string
	loads  []load
	stores map[string]bool
}

func newSymbols(parent *symbols) *symbols {
	s := &symbols{parent: parent, refs: map[string]string{}, stores: map[string]bool{}}
	if parent != nil {
		s.level = parent.level + 1
	}
	return s
}

func (s *symbols) clone() *symbols {
	c := &symbols{level: s.level, parent: s.parent, refs: map[string]string{},
		loads: slices.Clone(s.loads), stores: map[string]bool{}}
	for k, v := range s.refs {
		c.refs[k] = v
	}
	for k := range s.stores {
		c.stores[k] = true
	}
	return c
}

func (s *symbols) define(name string, action loadAction, from string) string {
	ident := strconv.Itoa(s.level) + "_" + name
	s.refs[name] = ident
	s.setLoad(load{ident, action, from})
	return ident
}

func (s *symbols) setLoad(l load) {
	for i := range s.loads {
		if s.loads[i].ident == l.ident {
			s.loads[i] = l
			return
		}
	}
	s.loads = append(s.loads, l)
}

// find returns the identifier of a name, or "".
func (s *symbols) find(name string) string {
	for ; s != nil; s = s.parent {
		if ident, ok := s.refs[name]; ok {
			return ident
		}
	}
	return ""
}

func (s *symbols) store(name string) {
	s.stores[name] = true
	if _, ok := s.refs[name]; ok {
		return
	}
	if outer := s.parent.find(name); outer != "" {
		s.define(name, loadAlias, outer)
		return
	}
	s.define(name, loadUndefined, "")
}

func (s *symbols) declare(name string) string {
	s.stores[name] = true
	return s.define(name, loadParameter, "")
}

func (s *symbols) load(name string) {
	if s.find(name) == "" {
		s.define(name, loadResolve, name)
	}
}

// merge adds the names of the branches of an if statement.
func (s *symbols) merge(branches ...*symbols) {
	var stored []string
	for _, b := range branches {
		for name := range b.stores {
			if !s.stores[name] && !slices.Contains(stored, name) {
				stored = append(stored, name)
			}
		}
	}

	slices.Sort(stored)

	for _, b := range branches {
		for name, ident := range b.refs {
			s.refs[name] = ident
		}
		for _, l := range b.loads {
			s.setLoad(l)
		}
		for name := range b.stores {
			s.stores[name] = true
		}
	}

	for _, name := range stored {
		if outer := s.parent.find(name); outer != "" {
			s.setLoad(load{s.find(name), loadAlias, outer})
		} else {
			s.setLoad(load{s.find(name), loadResolve, name})
		}
	}
}

// visit records the names that a node loads and stores in this scope. It does not descend into nodes
// with their own scope.
func (s *symbols) visit(n node) {
	switch n := n.(type) {
	case *name:
		switch n.mode {
		case modeLoad:
			s.load(n.name)
		case modeStore:
			s.store(n.name)
		default:
			s.declare(n.name)
		}
	case *nsRef:
		s.load(n.name)
	case *ifStatement:
		s.visitIf(n.branches, n.otherwise)
	case *forLoop:
		s.visit(n.iterable)
	case *set:
		s.visit(n.value)
		s.visit(n.target)
	case *setBlock:
		s.visit(n.target)
	case *macroStatement:
		s.store(n.macro.name)
	case *callBlock:
		if n.call != nil {
			s.visit(n.call)
		}
	case *filterBlock:
		s.visit(n.filter)
	case *with:
		s.visitAll(n.values)
	default:
		s.visitAll(children(n))
	}
}

func (s *symbols) visitAll(nodes []node) {
	for _, n := range nodes {
		s.visit(n)
	}
}

// visitIf visits the first branch. Each elif branch is an if statement in a separate branch.
func (s *symbols) visitIf(branches []ifBranch, otherwise []node) {
	s.visit(branches[0].condition)
	body, elif, last := s.clone(), s.clone(), s.clone()
	body.visitAll(branches[0].body)
	for i := range branches[1:] {
		elif.visitIf(branches[1+i:2+i], nil)
	}
	last.visitAll(otherwise)
	s.merge(body, elif, last)
}

// uses returns which of the names the nodes load before they store them, in Jinja2's order.
func uses(nodes []node, names ...string) map[string]bool {
	left, used := map[string]bool{}, map[string]bool{}
	for _, n := range names {
		left[n] = true
	}

	var visit func(nodes []node)
	visit = func(nodes []node) {
		for _, n := range nodes {
			if n, ok := n.(*name); ok {
				if n.mode == modeLoad && left[n.name] {
					used[n.name] = true
				} else if n.mode != modeLoad {
					delete(left, n.name)
				}
				continue
			}
			visit(children(n))
		}
	}

	visit(nodes)
	return used
}

// A frame is a scope during the second pass, which gives names their identifiers.
type frame struct {
	symbols *symbols

	// soft reports whether the nodes may never be executed, so that unknown filters are allowed.
	soft bool
	line *int
}

// resolveScopes sets the identifiers of all names. It returns the variables of the template and the
// identifier of the variable self, or "" if the template does not use it.
func resolveScopes(body []node, line *int) (loads []load, selfIdent string) {
	f := frame{symbols: newSymbols(nil), line: line}
	if uses(body, "self")["self"] {
		selfIdent = f.symbols.declare("self")
	}
	f.symbols.visitAll(body)
	f.resolveAll(body)
	return f.symbols.loads, selfIdent
}

func (f frame) inner() frame { return frame{symbols: newSymbols(f.symbols), line: f.line} }

func (f frame) softened() frame { return frame{f.symbols, true, f.line} }

func (f frame) resolveAll(nodes []node) {
	for _, n := range nodes {
		f.resolve(n)
	}
}

func (f frame) ref(name string) string {
	ident := f.symbols.find(name)
	if ident == "" {
		fail("the variable %s cannot be used here", name)
	}
	return ident
}

func (f frame) resolve(n node) {
	switch n := n.(type) {
	case *name:
		*f.line = n.line
		n.ident = f.ref(n.name)
	case *nsRef:
		*f.line = n.line
		n.ident = f.ref(n.name)
	case *filter:
		*f.line = n.line
		f.resolveAll(children(n))
		n.known = isFilter(n.name)
		if !n.known && !f.soft {
			*f.line = n.line
			fail("no filter named %q", n.name)
		}
	case *test:
		*f.line = n.line
		f.resolveAll(children(n))
		n.known = isTest(n.name)
		if !n.known && !f.soft {
			*f.line = n.line
			fail("no test named %q", n.name)
		}
	case *conditional:
		f.softened().resolveAll(children(n))
	case *ifStatement:
		f.softened().resolveAll(children(n))
	case *forLoop:
		f.resolveFor(n)
	case *setBlock:
		inner := f.inner()
		inner.symbols.visitAll(n.body)
		inner.resolveAll(n.body)
		f.resolve(n.target)
		if n.filter != nil {
			inner.resolve(n.filter)
		}
		n.loads = inner.symbols.loads
	case *filterBlock:
		inner := f.inner()
		inner.symbols.visitAll(n.body)
		inner.symbols.visit(n.filter)
		inner.resolveAll(n.body)
		inner.resolve(n.filter)
		n.loads = inner.symbols.loads
	case *with:
		inner := f.inner()
		inner.symbols.visitAll(n.targets)
		inner.symbols.visitAll(n.body)
		for i, target := range n.targets {
			inner.resolve(target)
			f.resolve(n.values[i])
		}
		inner.resolveAll(n.body)
		n.loads = inner.symbols.loads
	case *macroStatement:
		f.resolveMacro(n.macro)
		n.name.ident = f.ref(n.name.name)
	case *callBlock:
		f.resolveMacro(n.macro)
		if n.call != nil {
			f.resolve(n.call)
		}
	default:
		f.resolveAll(children(n))
	}
}

func (f frame) resolveFor(n *forLoop) {
	body, condition, otherwise := f.inner(), f.inner(), f.inner()
	if uses(n.body, "loop")["loop"] {
		n.loopIdent = body.symbols.declare("loop")
	}

	declareTarget(body.symbols, n.target)
	body.symbols.visitAll(n.body)
	otherwise.symbols.visitAll(n.otherwise)

	if n.condition != nil {
		declareTarget(condition.symbols, n.target)
		condition.symbols.visit(n.condition)
		condition.resolve(n.condition)
		n.testLoads = condition.symbols.loads
	}

	if storesLoop([]node{n}) {
		fail("cannot assign to the special variable loop")
	}

	body.resolve(n.target)
	f.resolve(n.iterable)
	body.resolveAll(n.body)
	otherwise.resolveAll(n.otherwise)
	n.bodyLoads, n.elseLoads = body.symbols.loads, otherwise.symbols.loads
}

// declareTarget declares the names of a loop's target as parameters.
func declareTarget(s *symbols, target node) {
	switch n := target.(type) {
	case *name:
		s.declare(n.name)
	case *tupleLiteral:
		for _, i := range n.items {
			declareTarget(s, i)
		}
	}
}

// storesLoop reports whether one of the nodes assigns to the variable loop.
func storesLoop(nodes []node) bool {
	return slices.ContainsFunc(nodes, func(n node) bool {
		if n, ok := n.(*name); ok {
			return n.mode == modeStore && n.name == "loop"
		}
		return storesLoop(children(n))
	})
}

func (f frame) resolveMacro(m *macroBody) {
	inner := f.inner()
	inner.symbols.visitAll(macroChildren(m))
	has := func(wanted string) int {
		return slices.IndexFunc(m.params, func(p *name) bool { return p.name == wanted })
	}

	used := uses(m.body, "caller", "kwargs", "varargs")
	if i := has("caller"); used["caller"] && i >= 0 {
		if i < len(m.params)-len(m.defaults) {
			fail("the parameter caller must have a default")
		}
	} else if used["caller"] {
		m.callerIdent = inner.symbols.declare("caller")
	}

	if used["kwargs"] && has("kwargs") < 0 {
		m.kwargsIdent = inner.symbols.declare("kwargs")
	}

	if used["varargs"] && has("varargs") < 0 {
		m.varargsIdent = inner.symbols.declare("varargs")
	}

	inner.symbols.visitAll(macroChildren(m))
	for _, p := range m.params {
		inner.resolve(p)
	}

	inner.resolveAll(m.defaults)
	inner.resolveAll(m.body)
	m.loads = inner.symbols.loads
}
