package maporder

import (
	"cmp"
	"go/ast"
	"go/types"
	"slices"
)

// A region is code that runs once for each element of a map, in the order of the map.
type region struct {
	node ast.Node       // a RangeStmt, ForStmt or FuncLit
	body *ast.BlockStmt // of node
	keys []types.Object // variables that have a different value in each iteration
}

// holds reports whether a variable is declared in the region, and so belongs to one iteration.
func (r *region) holds(v types.Object) bool {
	return r.node.Pos() <= v.Pos() && v.Pos() < r.node.End()
}

// around returns the regions that contain n, from the innermost to the outermost.
func (s *scope) around(n ast.Node) (all []*region) {
	for child, up := n, s.parents[n]; up != nil; child, up = up, s.parents[up] {
		for _, r := range s.regions {
			if r.body == child && r.node == up {
				all = append(all, r)
			}
		}
	}
	return all
}

// findRegions finds the loops in the order of a map and the slices that they fill. A loop over such a
// slice has the order of the map, too, so the search repeats until it finds nothing new.
func (s *scope) findRegions() {
	s.regions, s.filled = nil, nil
	for regions, filled := -1, -1; len(s.regions) > regions || len(s.filled) > filled; {
		regions, filled = len(s.regions), len(s.filled)
		ast.Inspect(s.decl, func(n ast.Node) bool {
			r := s.region(n)
			known := func(old *region) bool { return old.node == r.node }
			if r != nil && !slices.ContainsFunc(s.regions, known) {
				s.regions = append(s.regions, r)
			}
			return true
		})
		s.findFilled()
	}

	slices.SortFunc(s.regions, func(a, b *region) int {
		return cmp.Compare(a.node.Pos(), b.node.Pos())
	})
}

// region returns the region formed by a node, or nil.
func (s *scope) region(n ast.Node) *region {
	switch n := n.(type) {
	case *ast.RangeStmt:
		return s.rangeRegion(n)

	case *ast.ForStmt: // for it := v.MapRange(); it.Next(); {
		if n.Cond != nil && s.calls(n.Cond, "reflect", "MapIter.Next") {
			return &region{node: n, body: n.Body}
		}

	case *ast.CallExpr:
		for i, arg := range n.Args {
			if lit := s.literal(arg); lit != nil && s.inMapOrder(n.Fun, i) {
				r := &region{node: lit, body: lit.Body}
				if s.calls(n, "sync", "Map.Range") {
					r.keys = s.params(lit.Type)[:1]
				}
				return r
			}
		}
	}

	return nil
}

// rangeRegion returns the region formed by a range statement, or nil.
func (s *scope) rangeRegion(n *ast.RangeStmt) *region {
	r := &region{node: n, body: n.Body}
	isFunc := isA[*types.Signature](s.typeOf(n.X))
	if !s.ofMap(n.X) && !s.fromMap(n.X, n) && !(isFunc && s.inMapOrder(n.X, 0)) {
		return nil
	}
	if key, ok := n.Key.(*ast.Ident); ok && s.variable(key) != nil && (!isFunc || s.keyed(n.X)) {
		r.keys = []types.Object{s.variable(key)}
	}
	return r
}

// keyed reports whether the first value that an iterator yields differs each time.
func (s *scope) keyed(e ast.Expr) bool {
	switch e := ast.Unparen(e).(type) {
	case *ast.CallExpr:
		return is(s.callee(e), "maps", "Keys", "All") || is(s.callee(e), "slices", "All")
	case *ast.Ident:
		if v := s.variable(e); v != nil {
			return len(s.defs[v]) == 1 && s.defs[v][0].value != nil && s.keyed(s.defs[v][0].value)
		}
	}
	return s.names(e, "sync", "Map.Range")
}

// ofMap reports whether an expression is a map.
func (s *scope) ofMap(e ast.Expr) bool { return isA[*types.Map](s.typeOf(e)) }

// isA reports whether the underlying type of t is a T. For a type parameter, this must hold for every
// type in its constraint.
func isA[T types.Type](t types.Type) bool {
	return t != nil && each(t, func(t types.Type) bool {
		_, ok := t.Underlying().(T)
		return ok
	})
}

// each reports whether ok holds for a type or, if it is a type parameter, for every type in its
// constraint.
func each(t types.Type, ok func(types.Type) bool) bool {
	p, isParam := types.Unalias(t).(*types.TypeParam)
	if !isParam {
		return ok(t)
	}
	terms := termsOf(p.Constraint())
	return len(terms) > 0 && !slices.ContainsFunc(terms, func(t types.Type) bool { return !ok(t) })
}

// termsOf returns the types that a constraint lists.
func termsOf(t types.Type) (all []types.Type) {
	switch t := types.Unalias(t).(type) {
	case *types.Union:
		for term := range t.Terms() {
			all = append(all, termsOf(term.Type())...)
		}
	case *types.TypeParam:
		return termsOf(t.Constraint())
	default:
		i, ok := t.Underlying().(*types.Interface)
		if !ok {
			return []types.Type{t}
		}
		for embedded := range i.EmbeddedTypes() {
			all = append(all, termsOf(embedded)...)
		}
	}

	return all
}

// fromMap reports whether e, which is not a map itself, is an iterator or a slice in the order of a map
// when it is used at the node at.
func (s *scope) fromMap(e ast.Expr, at ast.Node) bool { return s.ordered(e, at, nil) }

// ordered implements fromMap. It stops at the variables already passed, in through.
func (s *scope) ordered(e ast.Expr, at ast.Node, through []*types.Var) bool {
	switch e := ast.Unparen(e).(type) {
	case *ast.Ident:
		if s.fillingOf(e, at) != nil {
			return true
		}
		v := s.variable(e)
		if v == nil || !isA[*types.Signature](v.Type()) || slices.Contains(through, v) {
			return false
		}
		through = append(slices.Clone(through), v)
		return slices.ContainsFunc(s.defs[v], func(d def) bool {
			return d.value != nil && s.ordered(d.value, at, through)
		})

	case *ast.SelectorExpr, *ast.IndexExpr:
		return s.fillingOf(e, at) != nil

	case *ast.SliceExpr:
		return s.ordered(e.X, at, through)

	case *ast.CallExpr:
		switch fn := s.callee(e); {
		case is(fn, "maps", "Keys", "Values", "All"), is(fn, "reflect", "Value.MapKeys"):
			return true
		case is(fn, "slices", "Collect", "Values", "All", "Clone", "Clip", "Grow", "Reverse", "Compact"):
			return s.ordered(e.Args[0], at, through)
		case is(fn, "slices", "AppendSeq", "Concat", "Insert"), s.builtin(e, "append"):
			return slices.ContainsFunc(e.Args, func(a ast.Expr) bool { return s.ordered(a, at, through) })
		case fn != nil:
			known := s.known(fn)
			return known != nil && known.yields
		}
	}

	return false
}

// inMapOrder reports whether a function calls its argument i once for each element of a map.
func (s *scope) inMapOrder(fun ast.Expr, i int) bool {
	fn := s.callee(&ast.CallExpr{Fun: fun})
	if is(fn, "sync", "Map.Range") {
		return i == 0
	}
	known := s.known(fn)
	return known != nil && known.callsInOrder[i]
}

// names reports whether an expression names a function of a package.
func (s *scope) names(e ast.Expr, pkg, name string) bool {
	return is(s.callee(&ast.CallExpr{Fun: e}), pkg, name)
}

// literal returns the function literal that an expression denotes, directly or through a variable, or
// nil.
func (s *scope) literal(e ast.Expr) *ast.FuncLit {
	switch e := ast.Unparen(e).(type) {
	case *ast.FuncLit:
		return e
	case *ast.Ident:
		if v := s.variable(e); v != nil {
			for _, d := range s.defs[v] {
				if lit, ok := d.value.(*ast.FuncLit); ok {
					return lit
				}
			}
		}
	}

	return nil
}

// params returns the parameters of a function. Parameters without names are nil.
func (s *scope) params(t *ast.FuncType) (all []types.Object) {
	for _, field := range t.Params.List {
		for _, name := range field.Names {
			all = append(all, s.Info.Defs[name])
		}
		if len(field.Names) == 0 {
			all = append(all, nil)
		}
	}
	return all
}
