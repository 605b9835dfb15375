// Package maporder finds results that depend on the iteration order of a map.
//
// This order differs from run to run. If floating-point numbers are added in this order, the last bits
// of the sum differ each time, and ranks that compute it disagree. In loops over a map, and in other
// code with the order of a map, Check reports
//
//   - a floating-point or complex variable that is computed from its own value, for example by addition
//     or multiplication, directly or in a called function. Minima, maxima and the addition of an integer
//     constant are allowed, because their results do not depend on the order;
//   - a slice that is appended to, or filled at a counted index, and that the same function uses before
//     sorting it. The function may take the length of the slice, search it, or range over it; such a
//     loop then has the order of the map, too. Slices of errors are exempt;
//   - text that is added to a string or written to a writer;
//   - numbers drawn from a random number generator;
//   - a result that is returned from within the loop and depends on the iteration, such as one of
//     several errors.
//
// A variable that belongs to one iteration may be changed freely. So may an element that is selected by
// the key of the map, as in total[key] += x, because every iteration has its own element.
//
// The following have the order of a map: range statements over a map, maps.Keys, maps.Values,
// maps.All, sync.Map.Range, reflect.Value.MapKeys and MapRange, slices.Collect of these iterators, and
// every function of the checked packages that calls a parameter in such an order.
//
// # Limits
//
// Check follows names, not memory. It does not notice that the values of two keys point to the same
// variable, and it treats two fields of one variable as two variables. It follows calls of statically
// known functions and methods, and of function literals in variables. It does not follow calls of
// interface methods or of functions in fields. A call of a sorting function counts if it follows the
// loop in the text, and Check does not examine whether the sort resolves all ties.
//
// Check does not find a choice among equals by the last of several iterations (if x > best { best, name
// = x, key }), nor sums in the order of
// completion of goroutines.
package maporder

import (
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"slices"
)

// A Package is a type-checked package. Info must contain Types, Defs and Uses.
type Package struct {
	Files []*ast.File
	Info  *types.Info
}

// Check returns an error that lists everything in pkgs that depends on the order of a map, or nil. All
// files must have been parsed with fset. A file that is part of several packages, such as a package and
// its test variant, is examined once.
func Check(fset *token.FileSet, pkgs []*Package) error {
	c := &checker{fset: fset, byName: map[token.Position]*function{},
		reported: map[token.Position]bool{}}
	var all []*scope
	seen := map[string]bool{}
	for _, p := range pkgs {
		for _, f := range p.Files {
			name := fset.Position(f.Package).Filename
			if seen[name] {
				continue
			}
			seen[name] = true
			for _, d := range f.Decls {
				s := newScope(c, p, d)
				all = append(all, s)
				if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil {
					f := &function{scope: s, decl: fn}
					c.funcs = append(c.funcs, f)
					c.byName[fset.Position(fn.Name.Pos())] = f
				}
			}
		}
	}

	// The effects of a function depend on the functions that it calls, so repeat until nothing changes.
	for changed := true; changed; {
		changed = false
		for _, f := range c.funcs {
			changed = f.summarize() || changed
		}
	}

	for _, s := range all {
		s.check()
	}

	slices.SortFunc(c.reports, func(a, b report) int {
		return cmp.Or(cmp.Compare(a.at.Filename, b.at.Filename), a.at.Line-b.at.Line,
			a.at.Column-b.at.Column)
	})
	var errs []error
	for _, r := range c.reports {
		errs = append(errs, fmt.Errorf("%s: %s", r.at, r.text))
	}

	return errors.Join(errs...)
}

// A checker holds the functions and the reports of all packages.
type checker struct {
	fset     *token.FileSet
	funcs    []*function
	byName   map[token.Position]*function // by the position of the name
	reports  []report
	reported map[token.Position]bool
}

type report struct {
	at   token.Position
	text string
}

// known returns the declaration of a function, or nil if no checked package declares it.
func (c *checker) known(f *types.Func) *function {
	if f == nil {
		return nil
	}
	return c.byName[c.fset.Position(f.Origin().Pos())]
}

// report adds a report about code that depends on the iteration order of r, once for each position.
func (c *checker) report(n ast.Node, r *region, format string, args ...any) {
	at := c.fset.Position(n.Pos())
	if c.reported[at] {
		return
	}
	c.reported[at] = true
	text := fmt.Sprintf(format, args...)
	if line := c.fset.Position(r.node.Pos()).Line; line != at.Line {
		text += fmt.Sprintf(" (the order is that of line %d)", line)
	}
	c.reports = append(c.reports, report{at, text})
}

// A scope is a top-level declaration with an index of its variables.
type scope struct {
	*checker
	*Package
	decl    ast.Node
	parents map[ast.Node]ast.Node
	defs    map[types.Object][]def
	regions []*region // in source order
	filled  []*filling
}

// A def is one of the values assigned to a variable.
type def struct {
	value   ast.Expr       // nil if the value comes from a loop
	loop    *ast.RangeStmt // the loop that assigns the value
	element bool           // value is the second value of the loop instead of the first
	results int            // if not 0, value is a call with this many results
}

func newScope(c *checker, p *Package, decl ast.Node) *scope {
	s := &scope{checker: c, Package: p, decl: decl, parents: map[ast.Node]ast.Node{},
		defs: map[types.Object][]def{}}
	var stack []ast.Node
	ast.Inspect(decl, func(n ast.Node) bool {
		if n == nil {
			stack = stack[:len(stack)-1]
			return true
		}
		if len(stack) > 0 {
			s.parents[n] = stack[len(stack)-1]
		}
		stack = append(stack, n)
		s.define(n)
		return true
	})

	return s
}

// define records the values that a statement assigns to variables.
func (s *scope) define(n ast.Node) {
	add := func(to ast.Expr, d def) {
		if id, ok := to.(*ast.Ident); ok {
			if v := s.variable(id); v != nil {
				s.defs[v] = append(s.defs[v], d)
			}
		}
	}

	switch n := n.(type) {
	case *ast.AssignStmt:
		for i, to := range n.Lhs {
			if len(n.Rhs) == len(n.Lhs) {
				add(to, def{value: n.Rhs[i]})
			} else {
				add(to, def{value: n.Rhs[0], results: len(n.Lhs)})
			}
		}
	case *ast.ValueSpec:
		for i, to := range n.Names {
			if len(n.Values) == len(n.Names) {
				add(to, def{value: n.Values[i]})
			} else if len(n.Values) == 1 {
				add(to, def{value: n.Values[0], results: len(n.Names)})
			}
		}
	case *ast.RangeStmt:
		add(n.Key, def{loop: n})
		add(n.Value, def{loop: n, element: true})
	}
}

// variable returns the variable that an identifier denotes, or nil.
func (s *scope) variable(id *ast.Ident) *types.Var {
	v, _ := s.Info.ObjectOf(id).(*types.Var)
	return v
}

// callee returns the function or method that a call names, or nil.
func (s *scope) callee(call *ast.CallExpr) *types.Func {
	switch f := ast.Unparen(call.Fun).(type) {
	case *ast.Ident:
		fn, _ := s.Info.Uses[f].(*types.Func)
		return fn
	case *ast.SelectorExpr:
		fn, _ := s.Info.Uses[f.Sel].(*types.Func)
		return fn
	case *ast.IndexExpr: // with type arguments
		return s.callee(&ast.CallExpr{Fun: f.X})
	case *ast.IndexListExpr:
		return s.callee(&ast.CallExpr{Fun: f.X})
	}

	return nil
}

// calls reports whether a call is to one of the named functions of a package, or to any of its functions
// if there are no names. The name of a method includes its type, as in Map.Range.
func (s *scope) calls(e ast.Expr, pkg string, names ...string) bool {
	call, ok := ast.Unparen(e).(*ast.CallExpr)
	return ok && is(s.callee(call), pkg, names...)
}

func is(f *types.Func, pkg string, names ...string) bool {
	if f == nil || f.Pkg() == nil || f.Pkg().Path() != pkg {
		return false
	}
	return len(names) == 0 || slices.Contains(names, fullName(f))
}

// fullName returns the name of a function, after the receiver's type and a dot if it is a method.
func fullName(f *types.Func) string {
	recv := f.Signature().Recv()
	if recv == nil {
		return f.Name()
	}

	t := types.Unalias(recv.Type())
	if p, ok := t.(*types.Pointer); ok {
		t = types.Unalias(p.Elem())
	}

	if named, ok := t.(*types.Named); ok {
		return named.Obj().Name() + "." + f.Name()
	}

	return f.Name()
}

// builtin reports whether a call is to one of the named predeclared functions.
func (s *scope) builtin(e ast.Expr, names ...string) bool {
	call, ok := ast.Unparen(e).(*ast.CallExpr)
	if !ok {
		return false
	}
	id, ok := ast.Unparen(call.Fun).(*ast.Ident)
	if !ok || !slices.Contains(names, id.Name) {
		return false
	}
	_, ok = s.Info.Uses[id].(*types.Builtin)
	return ok
}

// conversion reports whether a call converts its argument to a type.
func (s *scope) conversion(call *ast.CallExpr) bool {
	return len(call.Args) == 1 && s.Info.Types[call.Fun].IsType()
}

// check reports what depends on the order of a map in the scope.
func (s *scope) check() {
	s.findRegions()
	for _, r := range s.regions {
		s.checkSums(r)
		s.checkTexts(r)
		s.checkDraws(r)
		s.checkChoices(r)
	}
	s.checkSlices()
}

// typeOf returns the type of an expression, or types.Typ[types.Invalid].
func (s *scope) typeOf(e ast.Expr) types.Type {
	if t := s.Info.TypeOf(e); t != nil {
		return t
	}
	return types.Typ[types.Invalid]
}
