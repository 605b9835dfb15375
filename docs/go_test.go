package docs_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/kasmina-go/kasmina"

// packages holds the packages that Go blocks can import.
type packages struct {
	export map[string]string // files of compiled packages, by import path
	// import paths by package name: this module's before Gorgonia's and Go's
	paths map[string][]string
	check types.Importer
	fset  *token.FileSet
}

// load compiles the packages of the module and lists them with all their dependencies.
var load = sync.OnceValues(func() (*packages, error) {
	command := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Name,Export",
		"./...", "std")
	command.Dir = root
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, stderr.Bytes())
	}

	p := &packages{map[string]string{}, map[string][]string{}, nil, token.NewFileSet()}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var listed struct{ ImportPath, Name, Export string }
		if err := d.Decode(&listed); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		p.export[listed.ImportPath] = listed.Export
		internal := strings.Contains("/"+listed.ImportPath+"/", "/internal/")
		if listed.Name != "main" && !internal {
			p.paths[listed.Name] = append(p.paths[listed.Name], listed.ImportPath)
		}
	}

	for _, all := range p.paths {
		slices.SortStableFunc(all, func(a, b string) int { return rankOf(b) - rankOf(a) })
	}

	p.check = importer.ForCompiler(p.fset, "gc", func(path string) (io.ReadCloser, error) {
		file := p.export[path]
		if file == "" {
			return nil, fmt.Errorf("%s was not compiled", path)
		}
		return os.Open(file)
	})

	return p, nil
})

// rankOf orders packages with the same name: this module's first, then Gorgonia's, then Go's with the
// shortest path.
func rankOf(importPath string) int {
	switch {
	case strings.HasPrefix(importPath, module):
		return 1000 - len(importPath)/10
	case strings.HasPrefix(importPath, "gorgonia.org/"):
		return 800
	case !strings.Contains(importPath, "."):
		return 700 - len(importPath)
	}
	return 1
}

// typeCheck checks a file. Unused variables are allowed, because a block may declare one at its end.
func (p *packages) typeCheck(name, source string) error {
	file, err := parser.ParseFile(p.fset, name, source, parser.SkipObjectResolution)
	if err != nil {
		return err
	}

	var all []error
	config := types.Config{Importer: p.check, Error: func(err error) {
		if soft := (types.Error{}); !errors.As(err, &soft) || !soft.Soft {
			all = append(all, err)
		}
	}}
	_, _ = config.Check("main", p.fset, []*ast.File{file}, nil)
	return errors.Join(all...)
}

var selectorPattern = regexp.MustCompile(`\b([a-z][a-z0-9]*)\.([A-Z]\w*)`)

// imports returns import declarations for the packages that the code uses. If several packages have the
// same name, it chooses the first that contains the selected identifier.
func (p *packages) imports(code string) string {
	var all strings.Builder
	seen := map[string]bool{}
	for _, m := range selectorPattern.FindAllStringSubmatch(code, -1) {
		some := p.paths[m[1]]
		if len(some) == 0 || seen[m[1]] {
			continue
		}
		importPath := some[0]
		for _, other := range slices.Backward(some) {
			if len(some) > 1 && p.exists(other, m[2], "") == nil {
				importPath = other
			}
		}
		fmt.Fprintf(&all, "import %s %q\n", m[1], importPath)
		seen[m[1]] = true
	}

	return all.String()
}

// fragments joins blocks of statements. Each block is a scope nested in the scope of the previous block.
// Functions and types are declared at the top level.
func (p *packages) fragments(blocks []block) string {
	var body, decls strings.Builder
	depth := 0
	for _, b := range blocks {
		_, err := parser.ParseFile(token.NewFileSet(), "", "package p\n"+b.code, 0)
		if err == nil {
			fmt.Fprintf(&decls, "//line %s:%d\n%s", b.document, max(1, b.line), b.code)
			continue
		}
		body.WriteString("{\n")
		depth++
		for _, given := range strings.Split(b.notes["given"], ";") {
			if given != "" {
				fmt.Fprintf(&body, "var %s\n", given)
			}
		}
		fmt.Fprintf(&body, "//line %s:%d\n%s", b.document, max(1, b.line), b.code)
	}

	code := fmt.Sprintf("func _() error {\n%s%s\nreturn nil\n}\n%s", body.String(),
		strings.Repeat("}\n", depth), decls.String())
	return "package main\n" + p.imports(code) + code
}

// TestGoBlocks compiles every Go block: whole programs as files, and statements within a function.
func TestGoBlocks(t *testing.T) {
	p, err := load()
	require.NoError(t, err)
	for _, doc := range documents(t) {
		var statements []block
		for _, b := range doc.blocks {
			switch {
			case b.language == "json":
				require.True(t, json.Valid([]byte(b.code)), "%v is no JSON", b)
			case b.language != "go":
			case strings.HasPrefix(b.code, "package ") || strings.Contains(b.code, "\npackage "):
				require.NoError(t, p.typeCheck(b.String(), b.code), "%v", b)
			default:
				statements = append(statements, b)
			}
		}
		require.NoError(t, p.typeCheck(doc.path, p.fragments(statements)), doc.path)
	}
}

// TestFaultyGoBlocks checks that faulty blocks are detected, and that a block can use variables of the
// blocks above it.
func TestFaultyGoBlocks(t *testing.T) {
	p, err := load()
	require.NoError(t, err)
	check := func(blocks ...block) error { return p.typeCheck("d.md", p.fragments(blocks)) }
	given := block{document: "d.md", line: 1, code: "y, err := op.Linear(x, w)\n",
		notes: map[string]string{"given": "x, w *gorgonia.Node"}}
	require.NoError(t, check(given))
	require.NoError(t,
		check(given, block{code: "y, err := op.Linear(y, w)\nfmt.Println(y.Shape())\n"}))
	require.Error(t, check(block{code: given.code}), "nothing declares x")
	require.Error(t, check(given, block{code: "y.Nothing()\n"}))
	require.Error(t, check(block{code: "op.Nothing()\n"}))
	require.Error(t, check(block{code: "x := \n"}))
}

var namePattern = regexp.MustCompile(
	`^([a-z][a-z0-9]*(?:/[a-z0-9]+)*)\.([A-Z]\w*)(?:\.([A-Z]\w*))?(?:\(.*\))?$`)

// TestNames checks that identifiers of this module mentioned in sentences exist, such as `op.Kasmina` and
// `llm.Config.SlotWidth`.
func TestNames(t *testing.T) {
	p, err := load()
	require.NoError(t, err)
	for _, doc := range documents(t) {
		for _, s := range doc.spans {
			m := namePattern.FindStringSubmatch(s.code)
			if m == nil {
				continue
			}
			all := p.paths[path.Base(m[1])]
			if len(m[1]) == 1 || len(all) > 0 && !strings.HasPrefix(all[0], module) {
				continue // a variable, or a package of Gorgonia or Go
			}
			err := fmt.Errorf("there is no package %s", m[1])
			for _, importPath := range all {
				if err == nil || !strings.HasSuffix("/"+importPath, "/"+m[1]) {
					continue
				}
				err = p.exists(importPath, m[2], m[3])
			}
			if err != nil {
				t.Errorf("%s:%d: `%s`: %v", doc.path, s.line, s.code, err)
			}
		}
	}
}

// exists returns an error unless a package declares the name, and the name has the field or method if one
// is given.
func (p *packages) exists(importPath, name, member string) error {
	pkg, err := p.check.Import(importPath)
	if err != nil {
		return err
	}

	object := pkg.Scope().Lookup(name)
	if object == nil {
		return fmt.Errorf("%s has no %s", importPath, name)
	}

	if member == "" {
		return nil
	}

	if found, _, _ := types.LookupFieldOrMethod(object.Type(), true, pkg, member); found == nil {
		return fmt.Errorf("%s.%s has no %s", importPath, name, member)
	}

	return nil
}
