package maporder

import (
	"go/ast"
	"go/token"
	"go/types"
	"slices"
)

// An origin is the variable through which a value is reached or stored, and the indices on the path to
// it. The variable is nil if the path is unknown.
type origin struct {
	root    *types.Var
	indices []ast.Expr
}

// at returns the origin of an element of o's value.
func (o origin) at(index ast.Expr) origin {
	if index == nil {
		return o
	}
	return origin{o.root, append(slices.Clone(o.indices), index)}
}

// origins returns the variables that may contain e, the target of an assignment.
func (s *scope) origins(e ast.Expr) []origin { return s.follow(e, nil) }

// follow implements origins. through lists the variables that have been followed already, at which it stops.
func (s *scope) follow(e ast.Expr, through []*types.Var) []origin {
	switch e := ast.Unparen(e).(type) {
	case *ast.Ident:
		if v := s.variable(e); v != nil {
			return []origin{{root: v}}
		}
	case *ast.SelectorExpr:
		if v, ok := s.Info.Uses[e.Sel].(*types.Var); ok && !v.IsField() {
			return []origin{{root: v}} // a variable of another package
		}
		return s.within(e.X, through)
	case *ast.StarExpr:
		return s.within(e.X, through)
	case *ast.SliceExpr:
		return s.within(e.X, through)
	case *ast.IndexExpr:
		all := s.within(e.X, through)
		for i := range all {
			all[i] = all[i].at(e.Index)
		}
		return all
	}

	return []origin{{}}
}

// within returns the origins of a part of e. If e is a pointer, slice, map or interface, the part belongs
// to the value that e refers to. If e creates that value, there are no origins.
func (s *scope) within(e ast.Expr, through []*types.Var) []origin {
	if !refers(s.typeOf(e)) {
		return s.follow(e, through)
	}

	switch e := ast.Unparen(e).(type) {
	case *ast.Ident:
		v := s.variable(e)
		if v == nil {
			return nil
		}
		if slices.Contains(through, v) {
			return nil
		}
		if len(s.defs[v]) == 0 {
			return []origin{{root: v}}
		}
		through = append(slices.Clone(through), v)
		var all []origin
		for _, d := range s.defs[v] {
			from := s.given(d, v, through)
			if len(from) == 0 { // a new value, which only v refers to
				from = []origin{{root: v}}
			}
			all = append(all, from...)
		}
		return all
	case *ast.UnaryExpr:
		if _, ok := ast.Unparen(e.X).(*ast.CompositeLit); ok {
			return nil
		}
		if e.Op == token.AND {
			return s.follow(e.X, through)
		}
	case *ast.CompositeLit, *ast.FuncLit, *ast.BasicLit, *ast.BinaryExpr:
		return nil // a new value
	case *ast.TypeAssertExpr:
		return s.within(e.X, through)
	case *ast.CallExpr:
		switch {
		case s.conversion(e):
			return s.within(e.Args[0], through)
		case s.builtin(e, "append"), s.calls(e, "slices", "Grow", "Clip"):
			return s.within(e.Args[0], through)
		case s.builtin(e), s.builtin(e, "make", "new"), s.calls(e, "slices"), s.calls(e, "maps"):
			return nil // a new value
		}
		return []origin{{}}
	}

	return s.follow(e, through)
}

// given returns the origins of the value that the definition d assigns to v.
func (s *scope) given(d def, v *types.Var, through []*types.Var) []origin {
	switch {
	case d.loop == nil && d.results > 1:
		if call, ok := ast.Unparen(d.value).(*ast.CallExpr); ok && call != nil {
			return []origin{{}}
		}
		return s.within(d.value, through) // v, ok := m[k]

	case d.loop == nil:
		return s.within(d.value, through)

	case !d.element || isA[*types.Signature](s.typeOf(d.loop.X)):
		return []origin{{root: v}}
	}

	all := s.within(d.loop.X, through)
	for i := range all {
		all[i] = all[i].at(d.loop.Key)
	}

	return all
}

// refers reports whether a value of type t may refer to a variable that can also be reached without the value.
func refers(t types.Type) bool {
	if t == nil {
		return true
	}
	switch t := t.Underlying().(type) {
	case *types.Basic:
		return t.Kind() == types.UnsafePointer
	case *types.Struct, *types.Array:
		return false
	}
	return true
}

// shared reports whether several iterations of r assign to e. That is the case unless e belongs to one iteration or is
// selected by the iteration's key. If this cannot be determined, shared returns unsure.
func (s *scope) shared(e ast.Expr, r *region, unsure bool) bool {
	return slices.ContainsFunc(s.origins(e), func(o origin) bool { return s.outlives(o, r, unsure) })
}

// outlives implements shared for one origin.
func (s *scope) outlives(o origin, r *region, unsure bool) bool {
	switch {
	case o.root == nil:
		return unsure
	case r.holds(o.root):
		return false
	}
	return !slices.ContainsFunc(o.indices, func(i ast.Expr) bool { return s.unique(i, r, nil) })
}

// unique reports whether an expression is certain to have a different value in each iteration, because it is computed
// from the key.
func (s *scope) unique(e ast.Expr, r *region, through []types.Object) bool {
	switch e := ast.Unparen(e).(type) {
	case *ast.Ident:
		v := s.variable(e)
		switch {
		case v == nil || slices.Contains(through, types.Object(v)):
			return false
		case slices.Contains(r.keys, types.Object(v)):
			return true
		}
		d := s.defs[v] // a copy of the key
		return r.holds(v) && len(d) == 1 && d[0].value != nil && d[0].results == 0 &&
			s.unique(d[0].value, r, append(through, v))

	case *ast.BinaryExpr: // the key with a constant prefix, suffix or offset
		if e.Op != token.ADD && e.Op != token.SUB || floating(s.typeOf(e)) {
			return false
		}
		return s.unique(e.X, r, through) && s.fixed(e.Y, r) ||
			s.unique(e.Y, r, through) && s.fixed(e.X, r)

	case *ast.CompositeLit:
		return slices.ContainsFunc(e.Elts, func(x ast.Expr) bool {
			if kv, ok := x.(*ast.KeyValueExpr); ok {
				x = kv.Value
			}
			return s.unique(x, r, through)
		})

	case *ast.TypeAssertExpr: // a key of sync.Map
		return s.unique(e.X, r, through)

	case *ast.CallExpr:
		if !s.conversion(e) || !s.unique(e.Args[0], r, through) {
			return false
		}
		from, to := s.typeOf(e.Args[0]).Underlying(), s.typeOf(e).Underlying()
		f, isBasic := from.(*types.Basic)
		t, toBasic := to.(*types.Basic)
		wider := isBasic && toBasic && f.Info()&t.Info()&types.IsInteger != 0 &&
			sizes.Sizeof(t) >= sizes.Sizeof(f)
		return wider || types.Identical(from, to)
	}

	return false
}

var sizes = types.SizesFor("gc", "amd64")

// fixed reports whether an expression has the same value in all iterations of r.
func (s *scope) fixed(e ast.Expr, r *region) bool {
	fixed := true
	ast.Inspect(e, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			fixed = fixed && (s.conversion(n) || s.builtin(n, "len"))
		case *ast.Ident:
			if v := s.variable(n); v != nil && !v.IsField() {
				fixed = fixed && !r.holds(v) && !s.changes(v, r)
			}
		}
		return fixed
	})

	return fixed
}

// changes reports whether a statement in r assigns to v.
func (s *scope) changes(v *types.Var, r *region) (changes bool) {
	is := func(e ast.Expr) bool {
		id, ok := ast.Unparen(e).(*ast.Ident)
		return ok && s.variable(id) == v
	}
	ast.Inspect(r.body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.IncDecStmt:
			changes = changes || is(n.X)
		case *ast.AssignStmt:
			changes = changes || slices.ContainsFunc(n.Lhs, is)
		}
		return !changes
	})

	return changes
}

// floating reports whether a type is a floating-point or complex type, or has fields or elements of such
// types.
func floating(t types.Type) bool {
	if t == nil {
		return false
	}

	if p, ok := types.Unalias(t).(*types.TypeParam); ok {
		return slices.ContainsFunc(termsOf(p.Constraint()), floating)
	}

	switch t := t.Underlying().(type) {
	case *types.Basic:
		return t.Info()&(types.IsFloat|types.IsComplex) != 0
	case *types.Array:
		return floating(t.Elem())
	case *types.Struct:
		for f := range t.Fields() {
			if floating(f.Type()) {
				return true
			}
		}
	}

	return false
}
