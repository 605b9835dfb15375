package maporder

import (
	"go/ast"
	"go/types"
)

// checkChoices reports results returned from within r that depend on the iteration.
func (s *scope) checkChoices(r *region) {
	if _, ok := r.node.(*ast.FuncLit); ok {
		return
	}

	ast.Inspect(r.body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			return false
		case *ast.ReturnStmt:
			for _, e := range n.Results {
				if v := s.own(e, r); v != nil {
					s.report(n, r, "%s is returned for whichever key of a map comes first: range "+
						"over slices.Sorted(maps.Keys(...)) instead", types.ExprString(e))
					return false
				}
			}
		}
		return true
	})
}

// own returns a variable declared in r that an expression mentions, or nil.
func (s *scope) own(e ast.Expr, r *region) (found *types.Var) {
	ast.Inspect(e, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && found == nil {
			if v := s.variable(id); v != nil && !v.IsField() && r.holds(v) {
				found = v
			}
		}
		return found == nil
	})
	return found
}
