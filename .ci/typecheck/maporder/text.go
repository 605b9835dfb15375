package maporder

import (
	"go/ast"
	"go/token"
	"go/types"
	"slices"
	"strings"
)

const textAdvice = "in the order of a map: range over slices.Sorted(maps.Keys(...)) instead"

// checkTexts reports what r adds to a string, or writes to a writer, that outlives an iteration.
func (s *scope) checkTexts(r *region) {
	ast.Inspect(r.body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			for i, to := range n.Lhs {
				from := n.Rhs[min(i, len(n.Rhs)-1)]
				adds := n.Tok == token.ADD_ASSIGN || n.Tok == token.ASSIGN && s.joins(from, to)
				if t := s.typeOf(to); adds && isString(t) && s.shared(to, r, false) {
					s.report(n, r, "%s is extended %s", types.ExprString(to), textAdvice)
				}
			}
		case *ast.CallExpr:
			if to := s.writes(n); to != nil && s.shared(to, r, false) {
				s.report(n, r, "%s writes %s", types.ExprString(n.Fun), textAdvice)
			} else if s.calls(n, "fmt", "Print", "Printf", "Println") {
				s.report(n, r, "%s writes %s", types.ExprString(n.Fun), textAdvice)
			}
		}
		return true
	})
}

func isString(t types.Type) bool {
	b, ok := t.Underlying().(*types.Basic)
	return ok && b.Info()&types.IsString != 0
}

// joins reports whether a string is added to itself.
func (s *scope) joins(from, to ast.Expr) bool {
	sum, ok := ast.Unparen(from).(*ast.BinaryExpr)
	return ok && sum.Op == token.ADD && (s.same(sum.X, to) || s.same(sum.Y, to) ||
		s.joins(sum.X, to) || s.joins(sum.Y, to))
}

// writes returns the writer or encoder that a call writes to, or nil.
func (s *scope) writes(call *ast.CallExpr) ast.Expr {
	fn := s.callee(call)
	switch {
	case fn == nil || fn.Pkg() == nil:
		return nil
	case is(fn, "fmt", "Fprint", "Fprintf", "Fprintln"), is(fn, "io", "WriteString"),
		is(fn, "encoding/binary", "Write"):
		return s.target(call.Args[0])
	case fn.Signature().Recv() == nil:
		return nil
	case slices.Contains([]string{"Write", "WriteString", "WriteByte", "WriteRune"}, fn.Name()),
		fn.Name() == "Encode" && strings.HasPrefix(fn.Pkg().Path(), "encoding/"):
		if sel, ok := ast.Unparen(call.Fun).(*ast.SelectorExpr); ok {
			return s.target(sel.X)
		}
	}

	return nil
}

// target returns the variable of a writer, or nil if it has none.
func (s *scope) target(e ast.Expr) ast.Expr {
	if u, ok := ast.Unparen(e).(*ast.UnaryExpr); ok && u.Op == token.AND {
		e = u.X
	}
	if s.base(e) == nil {
		return nil
	}
	return e
}

// checkDraws reports generators of random numbers that r uses in each iteration.
func (s *scope) checkDraws(r *region) {
	ast.Inspect(r.body, func(n ast.Node) bool {
		id, ok := n.(*ast.Ident)
		if !ok {
			return true
		}
		v := s.variable(id)
		if v != nil && !v.IsField() && isGenerator(v.Type()) && s.shared(id, r, false) {
			s.report(n, r, "%s draws random numbers %s, or seed a generator for each key", id.Name,
				textAdvice)
		}
		return true
	})
}

// isGenerator reports whether a type is a generator of random numbers of the standard library.
func isGenerator(t types.Type) bool {
	if p, ok := types.Unalias(t).(*types.Pointer); ok {
		t = p.Elem()
	}
	named, ok := types.Unalias(t).(*types.Named)
	if !ok || named.Obj().Pkg() == nil {
		return false
	}
	path := named.Obj().Pkg().Path()
	return path == "math/rand" || path == "math/rand/v2"
}
