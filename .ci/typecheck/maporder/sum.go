package maporder

import (
	"go/ast"
	"go/constant"
	"go/token"
	"go/types"
	"maps"
	"slices"
	"strings"
)

const sumAdvice = "which rounds differently from run to run: range over " +
	"slices.Sorted(maps.Keys(...)) or over a slice instead"

// checkSums reports variables that r computes from their values in the previous iteration.
func (s *scope) checkSums(r *region) {
	ast.Inspect(r.body, func(n ast.Node) bool {
		for _, sum := range s.sums(n) {
			if s.shared(sum, r, true) {
				s.report(n, r, "%s is accumulated in the order of a map, %s", types.ExprString(sum),
					sumAdvice)
			}
		}
		if call, ok := n.(*ast.CallExpr); ok {
			for _, e := range s.effects(call) {
				if s.outlives(e, r, false) {
					s.report(n, r, "%s accumulates %s in the order of a map, %s",
						types.ExprString(call.Fun), nameOf(e), sumAdvice)
				}
			}
		}
		return true
	})
}

func nameOf(o origin) string {
	if o.root == nil {
		return "a variable"
	}
	return o.root.Name()
}

// sums returns the floating-point variables that a statement computes from their own values, except for
// minima, maxima and counts.
func (s *scope) sums(n ast.Node) (all []ast.Expr) {
	a, ok := n.(*ast.AssignStmt)
	if !ok {
		return nil
	}

	switch a.Tok {
	case token.ADD_ASSIGN, token.SUB_ASSIGN:
		if floating(s.typeOf(a.Lhs[0])) && !s.whole(a.Rhs[0]) {
			all = append(all, a.Lhs[0])
		}
	case token.MUL_ASSIGN, token.QUO_ASSIGN:
		if floating(s.typeOf(a.Lhs[0])) {
			all = append(all, a.Lhs[0])
		}
	case token.ASSIGN:
		for i, to := range a.Lhs {
			from := a.Rhs[min(i, len(a.Rhs)-1)]
			switch {
			case floating(s.typeOf(to)):
				if s.mentions(from, to, nil) {
					all = append(all, to)
				}
			case s.folds(from, to):
				all = append(all, to)
			}
		}
	}

	return all
}

// whole reports whether an expression is an integer constant. Sums of integer constants are exact.
func (s *scope) whole(e ast.Expr) bool {
	v := s.Info.Types[e].Value
	return v != nil && constant.ToInt(v).Kind() == constant.Int
}

// folds reports whether from is a function call that computes a new value of to from its old value, and to is a slice
// of floating-point numbers or a pointer to one.
func (s *scope) folds(from, to ast.Expr) bool {
	call, ok := ast.Unparen(from).(*ast.CallExpr)
	if !ok || s.conversion(call) || s.builtin(call, "append") || s.calls(call, "slices") ||
		s.calls(call, "maps") {
		return false
	}

	var elem types.Type
	switch t := s.typeOf(to); t := t.Underlying().(type) {
	case *types.Slice:
		elem = t.Elem()
	case *types.Pointer:
		elem = t.Elem()
	}

	return floating(elem) && s.mentions(from, to, nil)
}

// mentions reports whether the value of e depends on the value of x. If e is a minimum or maximum, x may be one of its
// operands, because the result does not depend on their order. through lists the variables that have been followed
// already.
func (s *scope) mentions(e, x ast.Expr, through []*types.Var) bool {
	e = ast.Unparen(e)
	if call, ok := e.(*ast.CallExpr); ok && (s.builtin(call, "min", "max") ||
		s.calls(call, "math", "Min", "Max")) {
		return slices.ContainsFunc(call.Args, func(arg ast.Expr) bool {
			return !s.same(arg, x) && s.mentions(arg, x, through)
		})
	}

	if s.same(e, x) && len(through) == 0 {
		return false // x = x
	}

	found := false
	ast.Inspect(e, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			return false
		case *ast.SelectorExpr:
			if s.overlap(n, x) {
				found = true
			}
			// Another field of the same variable does not matter.
			return !found && s.base(n) != s.base(x)
		case *ast.IndexExpr:
			found = found || s.overlap(n, x)
		case *ast.Ident:
			v := s.variable(n)
			if v == nil {
				return false
			}
			if s.overlap(n, x) {
				found = true
			} else if !slices.Contains(through, v) && v != s.base(x) {
				found = found || slices.ContainsFunc(s.defs[v], func(d def) bool {
					return d.value != nil && d.results == 0 && s.loopStart(x) < d.value.Pos() &&
						d.value.Pos() < x.Pos() &&
						s.mentions(d.value, x, append(slices.Clone(through), v))
				})
			}
		}
		return !found
	})

	return found
}

// loopStart returns the start of the innermost loop or function around x. Variables assigned before it
// have the same value in all iterations.
func (s *scope) loopStart(x ast.Node) token.Pos {
	for n := x; n != nil; n = s.parents[n] {
		switch n := n.(type) {
		case *ast.RangeStmt:
			return n.Body.Pos()
		case *ast.ForStmt:
			return n.Body.Pos()
		case *ast.FuncLit, *ast.FuncDecl:
			return n.Pos()
		}
	}

	return token.NoPos
}

// same reports whether two expressions name the same variable by the same text.
func (s *scope) same(a, b ast.Expr) bool {
	return s.base(a) != nil && s.base(a) == s.base(b) &&
		types.ExprString(ast.Unparen(a)) == types.ExprString(ast.Unparen(b))
}

// overlap reports whether two expressions name the same variable, or one is a part of the other.
func (s *scope) overlap(a, b ast.Expr) bool {
	if s.base(a) == nil || s.base(a) != s.base(b) {
		return false
	}
	x, y := types.ExprString(ast.Unparen(a)), types.ExprString(ast.Unparen(b))
	if len(x) > len(y) {
		x, y = y, x
	}
	rest, ok := strings.CutPrefix(y, x)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// base returns the leading variable of an expression, or nil.
func (s *scope) base(e ast.Expr) *types.Var {
	switch e := ast.Unparen(e).(type) {
	case *ast.Ident:
		return s.variable(e)
	case *ast.SelectorExpr:
		if v, ok := s.Info.Uses[e.Sel].(*types.Var); ok && !v.IsField() {
			return v
		}
		return s.base(e.X)
	case *ast.IndexExpr:
		return s.base(e.X)
	case *ast.SliceExpr:
		return s.base(e.X)
	case *ast.StarExpr:
		return s.base(e.X)
	}

	return nil
}

// A function is a declared function with the effects of calling it.
type function struct {
	*scope
	decl *ast.FuncDecl

	adds         map[addition]bool // floating-point variables that it accumulates in
	sorts        map[int]bool      // parameters that it sorts
	callsInOrder map[int]bool      // parameters that it calls once for each element of a map
	yields       bool              // returns an iterator in the order of a map
}

// An addition records that a function accumulates floating-point numbers in a package-level variable or in memory that
// a parameter refers to. Parameters are numbered from 0, and the receiver is −1.
type addition struct {
	global *types.Var // package-level variable, or nil
	param  int        // the parameter, unless global is set
	index  int        // number of the parameter that selects the element, or noIndex
}

const noIndex = -2

// summarize determines the effects of calling f, and reports whether it found new ones.
func (f *function) summarize() bool {
	f.findRegions()
	if f.adds == nil {
		f.adds, f.sorts, f.callsInOrder = map[addition]bool{}, map[int]bool{}, map[int]bool{}
	}

	before, yielded := len(f.adds)+len(f.sorts)+len(f.callsInOrder), f.yields

	ast.Inspect(f.decl.Body, func(n ast.Node) bool {
		for _, sum := range f.sums(n) {
			for _, o := range f.origins(sum) {
				f.add(o, ast.Unparen(sum))
			}
		}
		switch n := n.(type) {
		case *ast.CallExpr:
			for _, o := range f.effects(n) {
				f.add(o, nil)
			}
			for _, arg := range f.sortedBy(n) {
				if i, ok := f.param(f.base(arg)); ok {
					f.sorts[i] = true
				}
			}
			if id, ok := ast.Unparen(n.Fun).(*ast.Ident); ok && len(f.around(n)) > 0 {
				f.iterates(f.variable(id))
			}
			for i, arg := range n.Args {
				if id, ok := ast.Unparen(arg).(*ast.Ident); ok && f.inMapOrder(n.Fun, i) {
					f.iterates(f.variable(id))
				}
			}
		case *ast.ReturnStmt:
			for _, e := range n.Results {
				f.yields = f.yields || isA[*types.Signature](f.typeOf(e)) && f.fromMap(e, n)
			}
		}
		return true
	})

	return len(f.adds)+len(f.sorts)+len(f.callsInOrder) > before || f.yields != yielded
}

// param returns the number of a parameter.
func (f *function) param(v *types.Var) (int, bool) {
	if v == nil {
		return 0, false
	}
	if f.decl.Recv != nil && len(f.decl.Recv.List[0].Names) > 0 &&
		f.Info.Defs[f.decl.Recv.List[0].Names[0]] == types.Object(v) {
		return -1, true
	}
	i := slices.Index(f.params(f.decl.Type), types.Object(v))
	return i, i >= 0
}

// iterates records that f calls v once for each element of a map, in map order. v is a parameter of f or of a function
// literal that f returns.
func (f *function) iterates(v *types.Var) {
	if v == nil || !isA[*types.Signature](v.Type()) {
		return
	}

	if i, ok := f.param(v); ok {
		f.callsInOrder[i] = true
		return
	}

	ast.Inspect(f.decl.Body, func(n ast.Node) bool {
		if lit, ok := n.(*ast.FuncLit); ok && slices.Contains(f.params(lit.Type), types.Object(v)) {
			_, returned := f.parents[lit].(*ast.ReturnStmt)
			f.yields = f.yields || returned
		}
		return true
	})
}

// add records that f accumulates in the variable of an origin. e is the target of the assignment, or nil
// if a called function makes the assignment.
func (f *function) add(o origin, e ast.Expr) {
	if o.root == nil {
		return
	}

	a := addition{index: noIndex}
	if i, ok := f.param(o.root); ok {
		if id, isIdent := e.(*ast.Ident); isIdent && f.variable(id) == o.root {
			return // the parameter itself, which is a copy
		}
		if e != nil && !f.throughReference(e) {
			return
		}
		a.param = i
	} else if v := o.root; v.Pkg() != nil && v.Parent() == v.Pkg().Scope() {
		a.global = v
	} else {
		return
	}

	for _, x := range o.indices {
		if id, ok := ast.Unparen(x).(*ast.Ident); ok {
			if i, ok := f.param(f.variable(id)); ok && len(f.defs[f.variable(id)]) == 0 {
				a.index = i
			}
		}
	}

	f.adds[a] = true
}

// throughReference reports whether an expression goes through a pointer, slice or map, so that an assignment to it is
// visible through other references.
func (s *scope) throughReference(e ast.Expr) bool {
	switch e := ast.Unparen(e).(type) {
	case *ast.SelectorExpr:
		return refers(s.typeOf(e.X)) || s.throughReference(e.X)
	case *ast.IndexExpr:
		return refers(s.typeOf(e.X)) || s.throughReference(e.X)
	case *ast.StarExpr:
		return true
	}
	return false
}

// accumulating lists packages with functions that add to their receiver or first argument.
var accumulating = []string{"math/big", "gonum.org/v1/gonum/floats", "gorgonia.org/vecf32",
	"gorgonia.org/vecf64"}

// effects returns where a call accumulates floating-point numbers.
func (s *scope) effects(call *ast.CallExpr) (all []origin) {
	if lit := s.literal(call.Fun); lit != nil {
		return s.litEffects(lit)
	}

	fn := s.callee(call)
	if fn == nil {
		return nil
	}

	if known := s.known(fn); known != nil {
		for _, a := range slices.SortedFunc(maps.Keys(known.adds), additions) {
			all = append(all, s.effect(call, a)...)
		}
		return all
	}

	if fn.Pkg() == nil || !slices.Contains(accumulating, fn.Pkg().Path()) {
		return nil
	}

	to := addition{param: 0, index: noIndex}
	if fn.Signature().Recv() != nil {
		if !strings.HasPrefix(fullName(fn), "Float.") {
			return nil // integers and fractions are exact
		}
		to.param = -1
	}

	if arg := s.argument(call, to.param); arg != nil && slices.ContainsFunc(call.Args,
		func(x ast.Expr) bool { return to.param == 0 || s.same(x, arg) }) {
		all = s.effect(call, to)
	}

	return all
}

// effect returns the origins that a call accumulates in, according to one addition of its function.
func (s *scope) effect(call *ast.CallExpr, a addition) []origin {
	if a.global != nil {
		return []origin{{root: a.global}}
	}

	arg := s.argument(call, a.param)
	if arg == nil {
		return nil
	}

	var all []origin
	if refers(s.typeOf(arg)) {
		all = s.within(arg, nil)
	} else {
		all = s.follow(arg, nil) // the receiver, which is passed by address
	}

	if a.index != noIndex {
		for i := range all {
			all[i] = all[i].at(s.argument(call, a.index))
		}
	}

	return all
}

// argument returns an argument of a call, its receiver if param is negative, or nil if the call has no
// such argument.
func (s *scope) argument(call *ast.CallExpr, param int) ast.Expr {
	if param < 0 {
		if sel, ok := ast.Unparen(call.Fun).(*ast.SelectorExpr); ok {
			return sel.X
		}
		return nil
	}
	if param >= len(call.Args) {
		return nil
	}
	return call.Args[param]
}

// litEffects returns the variables declared outside a function literal in which it accumulates.
func (s *scope) litEffects(lit *ast.FuncLit) (all []origin) {
	own := &region{node: lit, body: lit.Body}
	ast.Inspect(lit.Body, func(n ast.Node) bool {
		for _, sum := range s.sums(n) {
			for _, o := range s.origins(sum) {
				if s.outlives(o, own, false) {
					all = append(all, o)
				}
			}
		}
		return true
	})

	return all
}

// additions compares additions, so that they can be visited in a fixed order.
func additions(a, b addition) int {
	if c := a.param - b.param; c != 0 {
		return c
	}
	return a.index - b.index
}
