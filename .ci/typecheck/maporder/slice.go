package maporder

import (
	"go/ast"
	"go/token"
	"go/types"
	"slices"
)

// A filling is a slice or an iterator with elements in the order of a map.
type filling struct {
	of     ast.Expr
	by     ast.Node // the filling statement
	r      *region
	after  token.Pos // first position where the code may use the slice
	sorted token.Pos // position of the sorting call, or NoPos
}

// findFilled finds the slices filled by the known regions, and the slices that take their order from
// known slices.
func (s *scope) findFilled() {
	ast.Inspect(s.decl, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			for i, to := range n.Lhs {
				if len(n.Lhs) == len(n.Rhs) {
					s.fill(n, to, n.Rhs[i])
				}
			}
		case *ast.ValueSpec:
			for i, to := range n.Names {
				if len(n.Values) == len(n.Names) {
					s.fill(n, to, n.Values[i])
				}
			}
		}
		return true
	})

	ast.Inspect(s.decl, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			for _, arg := range s.sortedBy(call) {
				for _, f := range s.filled {
					if f.sorted == token.NoPos && f.after <= call.Pos() && s.sameSlice(arg, f.of) {
						f.sorted = call.Pos()
					}
				}
			}
		}
		return true
	})
}

// fill records that statement n fills a slice by assigning from to to.
func (s *scope) fill(n ast.Node, to, from ast.Expr) {
	if s.base(to) == nil || errorsOnly(s.typeOf(to)) {
		return
	}

	add := func(of ast.Expr, r *region, after token.Pos) {
		if !slices.ContainsFunc(s.filled, func(f *filling) bool { return f.by == n && f.of == of }) {
			s.filled = append(s.filled, &filling{of: of, by: n, r: r, after: after})
		}
	}
	regions := s.around(n)
	slices.Reverse(regions) // the outermost first
	for _, r := range regions {
		switch {
		case s.appends(from, to) && s.shared(to, r, false):
			add(to, r, r.node.End())
			return
		case s.counted(to, r):
			add(ast.Unparen(to).(*ast.IndexExpr).X, r, r.node.End())
			return
		}
	}

	if t := s.typeOf(to); (isA[*types.Slice](t) || isA[*types.Signature](t)) &&
		!s.isEmpty(from) && s.fromMap(from, n) {
		add(to, &region{node: from}, n.End())
	}
}

// errorsOnly reports whether a type is a slice of errors. Their order is only visible in a message.
func errorsOnly(t types.Type) bool {
	slice, ok := t.Underlying().(*types.Slice)
	return ok && types.Identical(slice.Elem(), types.Universe.Lookup("error").Type())
}

// appends reports whether an expression is the slice to with further elements.
func (s *scope) appends(from, to ast.Expr) bool {
	call, ok := ast.Unparen(from).(*ast.CallExpr)
	return ok &&
		(s.builtin(call, "append") || s.calls(call, "slices", "AppendSeq", "Insert", "Concat")) &&
		len(call.Args) > 1 && s.base(call.Args[0]) != nil && s.base(call.Args[0]) == s.base(to)
}

// counted reports whether to is an element of a slice that outlives an iteration of r, at an index that r
// counts.
func (s *scope) counted(to ast.Expr, r *region) bool {
	e, ok := ast.Unparen(to).(*ast.IndexExpr)
	if !ok || !isA[*types.Slice](s.typeOf(e.X)) || !s.shared(to, r, false) {
		return false
	}

	counted := false
	ast.Inspect(e.Index, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok {
			v := s.variable(id)
			counted = counted || v != nil && !r.holds(v) && s.changes(v, r)
		}
		return true
	})

	return counted
}

// isEmpty reports whether an expression is x[:0].
func (s *scope) isEmpty(e ast.Expr) bool {
	slice, ok := ast.Unparen(e).(*ast.SliceExpr)
	if !ok || slice.High == nil {
		return false
	}
	v := s.Info.Types[slice.High].Value
	return v != nil && v.ExactString() == "0"
}

// sortedBy returns the arguments that a call sorts.
func (s *scope) sortedBy(call *ast.CallExpr) (all []ast.Expr) {
	fn := s.callee(call)
	switch known := s.known(fn); {
	case is(fn, "slices", "Sort", "SortFunc", "SortStableFunc"), is(fn, "sort", "Slice", "SliceStable",
		"Sort", "Stable", "Strings", "Ints", "Float64s"):
		all = append(all, s.unwrapped(call.Args[0]))
	case known != nil:
		for i, arg := range call.Args {
			if known.sorts[i] {
				all = append(all, s.unwrapped(arg))
			}
		}
	}

	return all
}

// unwrapped returns the operand of conversions and slice expressions.
func (s *scope) unwrapped(e ast.Expr) ast.Expr {
	switch x := ast.Unparen(e).(type) {
	case *ast.CallExpr:
		if s.conversion(x) || s.calls(x, "sort") { // sort.Reverse, sort.StringSlice
			return s.unwrapped(x.Args[0])
		}
	case *ast.SliceExpr:
		return s.unwrapped(x.X)
	case *ast.UnaryExpr:
		return s.unwrapped(x.X)
	}

	return ast.Unparen(e)
}

// sameSlice reports whether a is the slice b. If b is an element, such as byName[x.name], any
// element will do.
func (s *scope) sameSlice(a, b ast.Expr) bool {
	if index, ok := ast.Unparen(b).(*ast.IndexExpr); ok {
		return slices.ContainsFunc(s.within(a, nil), func(o origin) bool {
			return o.root != nil && o.root == s.base(index)
		})
	}
	return s.same(a, b)
}

// fillingOf returns the filling that e refers to at a point before the filling is sorted, or nil.
func (s *scope) fillingOf(e ast.Expr, at ast.Node) *filling {
	for _, f := range s.filled {
		if f.after <= at.Pos() && (f.sorted == token.NoPos || at.Pos() < f.sorted) && s.same(e, f.of) {
			return f
		}
	}
	return nil
}

// checkSlices reports slices in the order of a map that are used before they are sorted.
func (s *scope) checkSlices() {
	for _, f := range s.filled {
		if f.sorted == token.NoPos && s.escapes(f.of) {
			s.report(f.by, f.r, "%s has the order of a map and is not sorted in this function: sort "+
				"it, or range over slices.Sorted(maps.Keys(...))", types.ExprString(f.of))
		}
	}

	ast.Inspect(s.decl, func(n ast.Node) bool {
		e, ok := n.(ast.Expr)
		if !ok || s.Info.Types[e].IsType() || errorsOnly(s.typeOf(e)) || !s.fromMap(e, e) ||
			s.harmless(e) {
			return true
		}
		r := &region{node: e}
		if f := s.fillingOf(e, e); f != nil {
			r = f.r
		}
		s.report(e, r, "%s has the order of a map: sort it before it is used here",
			types.ExprString(e))
		return false
	})
}

// escapes reports whether a slice can be used without its name, as a field, an element, a named result,
// or a variable outside the function.
func (s *scope) escapes(e ast.Expr) bool {
	id, ok := ast.Unparen(e).(*ast.Ident)
	if !ok {
		return true
	}

	v := s.variable(id)
	if v.Pos() < s.decl.Pos() || s.decl.End() <= v.Pos() {
		return true
	}

	fn, ok := s.decl.(*ast.FuncDecl)
	if !ok {
		return false
	}

	if fn.Type.Results != nil && fn.Type.Results.Pos() <= v.Pos() && v.Pos() < fn.Type.Results.End() {
		bare := false
		ast.Inspect(fn.Body, func(n ast.Node) bool {
			ret, ok := n.(*ast.ReturnStmt)
			bare = bare || ok && len(ret.Results) == 0
			return !bare
		})
		return bare
	}

	return false
}

// orderFree lists functions that sort their arguments, or have results that do not depend on the order of
// the arguments' elements.
var orderFree = map[string][]string{
	"slices": {"Sorted", "SortedFunc", "SortedStableFunc", "Sort", "SortFunc", "SortStableFunc",
		"Contains", "ContainsFunc", "Max", "Min"},
	"maps": {"Collect", "Insert"},
	"sort": {"Slice", "SliceStable", "Sort", "Stable", "Strings", "Ints", "Float64s"},
	"github.com/stretchr/testify/require": {"ElementsMatch", "Len", "Empty", "NotEmpty", "Contains",
		"NotContains", "Subset", "NotSubset", "Nil", "NotNil"},
}

// harmless reports whether the parent of an expression in the order of a map does not depend on the
// order, or is checked elsewhere, such as a loop or a variable with the same order.
func (s *scope) harmless(e ast.Expr) bool {
	child, up := ast.Node(e), s.parents[e]
	for {
		if p, ok := up.(*ast.ParenExpr); ok {
			child, up = p, s.parents[p]
			continue
		}
		break
	}

	switch up := up.(type) {
	case *ast.RangeStmt:
		return up.X == child
	case *ast.AssignStmt:
		return slices.ContainsFunc(up.Lhs, func(x ast.Expr) bool { return x == child }) ||
			slices.ContainsFunc(s.filled, func(f *filling) bool { return f.by == up })
	case *ast.ValueSpec:
		return true
	case *ast.SliceExpr:
		return up.X == child // the slice expression is checked itself
	case *ast.BinaryExpr:
		return up.Op == token.EQL || up.Op == token.NEQ // comparison with nil
	case *ast.ReturnStmt:
		return isA[*types.Signature](s.typeOf(e)) // the callers' loops are checked
	case *ast.IndexExpr:
		return slices.ContainsFunc(s.around(up), func(r *region) bool {
			loop, ok := r.node.(*ast.RangeStmt)
			return ok && s.same(loop.X, e)
		})
	case *ast.CallExpr:
		if up.Fun == child || s.builtin(up, "len", "cap", "clear") || s.fromMap(up, up) {
			return true
		}
		fn := s.callee(up)
		for pkg, names := range orderFree {
			if is(fn, pkg, names...) {
				return true
			}
		}
		return slices.ContainsFunc(s.sortedBy(up), func(arg ast.Expr) bool {
			return arg == s.unwrapped(e)
		})
	case *ast.SelectorExpr:
		return true
	}

	return false
}
