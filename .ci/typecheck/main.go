// Command typecheck checks the types of packages and of their tests, for any platform and with any build
// tags. It compiles nothing, so it takes seconds where a build for another platform takes minutes. It
// needs neither a C compiler nor headers, because it accepts every name of the package C. Every function
// without a body must be defined in the assembly of its package.
//
// It also reports results that depend on the iteration order of a map; see package maporder.
//
//	GOOS=windows GOARCH=amd64 typecheck ./...
//	CGO_ENABLED=1 typecheck -tags=cu,cuda ./...
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/kasmina-go/kasmina/.ci/typecheck/maporder"
)

func main() {
	if err := check(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "typecheck:", err)
		os.Exit(1)
	}
}

// listed is a package as go list prints it. Every package follows the packages that it imports.
type listed struct {
	Dir, ImportPath           string
	GoFiles, CgoFiles, SFiles []string
	ImportMap                 map[string]string
	DepOnly                   bool // only imported by the requested packages
}

// check checks the packages selected by args, the options and patterns of go list.
func check(args []string) error {
	list := exec.Command("go", append([]string{"list", "-deps", "-test", "-json"}, args...)...)
	list.Stderr = os.Stderr
	out, err := list.StdoutPipe()
	if err != nil {
		return err
	}

	if err := list.Start(); err != nil {
		return err
	}

	var errs []error
	var checked []*maporder.Package
	known, fset := map[string]*types.Package{"unsafe": types.Unsafe}, token.NewFileSet()
	for d := json.NewDecoder(out); d.More(); {
		var p listed
		if err := d.Decode(&p); err != nil {
			return err
		}
		if p.ImportPath == "unsafe" {
			continue
		}
		files, err := p.parse(fset)
		if err != nil {
			return err
		}
		c := types.Config{Importer: importer{known, p.ImportMap}, FakeImportC: true,
			Sizes: types.SizesFor("gc", build.Default.GOARCH), IgnoreFuncBodies: p.DepOnly,
			Error: func(err error) {
				if !p.DepOnly {
					errs = append(errs, err)
				}
			}}
		var info *types.Info
		if !p.DepOnly {
			info = &types.Info{Types: map[ast.Expr]types.TypeAndValue{},
				Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
		}
		known[p.ImportPath], _ = c.Check(p.ImportPath, fset, files, info)
		if !p.DepOnly {
			errs = append(errs, p.assembled(fset, files))
			checked = append(checked, &maporder.Package{Files: files, Info: info})
		}
	}

	if err := errors.Join(append(errs, list.Wait())...); err != nil {
		return err
	}

	return maporder.Check(fset, checked)
}

func (p listed) parse(fset *token.FileSet) (files []*ast.File, err error) {
	for _, name := range append(p.GoFiles, p.CgoFiles...) {
		if !filepath.IsAbs(name) { // the main function of a test has an absolute path
			name = filepath.Join(p.Dir, name)
		}
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}

	return files, nil
}

// assembled returns an error for each function without a body that the package's assembly does not
// define.
func (p listed) assembled(fset *token.FileSet, files []*ast.File) error {
	var errs []error
	var assembly []byte
	for _, name := range p.SFiles {
		b, err := os.ReadFile(filepath.Join(p.Dir, name))
		errs = append(errs, err)
		assembly = append(assembly, b...)
	}

	for _, f := range files {
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if ok && fn.Body == nil &&
				!bytes.Contains(assembly, []byte("TEXT ·"+fn.Name.Name+"(SB)")) {
				errs = append(errs, fmt.Errorf("%s: no assembly has %s",
					fset.Position(fn.Pos()), fn.Name.Name))
			}
		}
	}

	return errors.Join(errs...)
}

// importer imports packages that have been checked already.
type importer struct {
	known map[string]*types.Package
	names map[string]string // import paths as written in the source, where they differ from package paths
}

func (i importer) Import(path string) (*types.Package, error) {
	if name, ok := i.names[path]; ok {
		path = name
	}
	if p := i.known[path]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%s has not been listed", path)
}
