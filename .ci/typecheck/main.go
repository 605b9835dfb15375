// Command typecheck checks the types of packages as they are with the build tags cu and cuda, tests
// included. To be compiled they need cgo and CUDA's headers then; here every name of the package C
// is taken for granted.
//
//	go run ./.ci/typecheck ./...
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
)

func main() {
	if err := check(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "typecheck:", err)
		os.Exit(1)
	}
}

// listed is a package as go list prints it: what it imports comes before.
type listed struct {
	Dir, ImportPath   string
	GoFiles, CgoFiles []string
	ImportMap         map[string]string
	DepOnly           bool // it is imported by those that were asked for
}

func check(patterns []string) error {
	list := exec.Command("go", append([]string{"list", "-deps", "-test", "-tags=cu,cuda", "-json"},
		patterns...)...)
	// go list runs no C compiler
	list.Env, list.Stderr = append(os.Environ(), "CGO_ENABLED=1"), os.Stderr
	out, err := list.StdoutPipe()
	if err != nil {
		return err
	}
	if err := list.Start(); err != nil {
		return err
	}
	var errs []error
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
			Sizes: types.SizesFor("gc", "amd64"), IgnoreFuncBodies: p.DepOnly,
			Error: func(err error) {
				if !p.DepOnly {
					errs = append(errs, err)
				}
			}}
		known[p.ImportPath], _ = c.Check(p.ImportPath, fset, files, nil)
	}
	return errors.Join(append(errs, list.Wait())...)
}

func (p listed) parse(fset *token.FileSet) (files []*ast.File, err error) {
	for _, name := range append(p.GoFiles, p.CgoFiles...) {
		if !filepath.IsAbs(name) { // as that of a test's function main is
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

// importer finds what has been checked before.
type importer struct {
	known map[string]*types.Package
	names map[string]string // of imports, where those differ from packages' own
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
