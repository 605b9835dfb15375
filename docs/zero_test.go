package docs_test

import (
	"fmt"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// exempt is what may panic, or wait, for arguments that are zero values, and why.
var exempt = map[string]string{
	"board.Board.ServeHTTP": "http.Handler gets no nil",
	"launch.Teller.Name":    "an os.File that is nil",
	"state.Lattice.Scrub":   "goes on until its context ends",
}

// TestZeroArguments calls every exported function of every public package, and every method of a
// zero value of every type. Arguments are zero values, then pointers to some and ones, and then
// what is negative. Nothing panics, and nothing hangs: what cannot be done is an error, or nothing.
func TestZeroArguments(t *testing.T) {
	p, err := load()
	require.NoError(t, err)
	c := caller{names: map[string]string{"context": "context", "io": "io"}}
	for name, paths := range p.paths {
		for _, path := range paths {
			if !strings.HasPrefix(path, module+"/") || strings.HasPrefix(path, module+"/docs") ||
				strings.Contains(path, "/examples/") || strings.Contains(path, "/tools/") {
				continue
			}
			pkg, err := p.check.Import(path)
			require.NoError(t, err)
			c.pkg(name, pkg)
		}
	}
	require.Greater(t, c.count, 2000)
	dir := t.TempDir()
	source, program := filepath.Join(dir, "main.go"), filepath.Join(dir, "zero.exe")
	require.NoError(t, os.WriteFile(source, []byte(c.program()), 0o666))
	build := exec.Command("go", "build", "-ldflags=-w", "-o", program, source)
	build.Dir = root
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	run := exec.Command(program)
	run.Dir = dir // which some may write to
	out, err = run.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), fmt.Sprint("done: ", c.count), "it ended before")
}

// caller writes a program that makes calls.
type caller struct {
	names map[string]string // of imports, by path
	calls strings.Builder
	count int
}

// pkg adds the calls of a package.
func (c *caller) pkg(name string, pkg *types.Package) {
	for _, n := range pkg.Scope().Names() {
		o := pkg.Scope().Lookup(n)
		if f, ok := o.(*types.Func); ok && o.Exported() {
			c.function(name+"."+n, c.qualified(pkg)+"."+n, f)
		}
		named, ok := o.Type().(*types.Named)
		if _, isType := o.(*types.TypeName); !isType || !ok || !o.Exported() ||
			named.Obj() != o || named.TypeParams().Len() > 0 || types.IsInterface(named) {
			continue
		}
		methods := types.NewMethodSet(types.NewPointer(named))
		for i := range methods.Len() {
			// gorgonia.Op's WriteHash gets no nil
			if f := methods.At(i).Obj().(*types.Func); f.Exported() && f.Name() != "WriteHash" {
				c.function(name+"."+n+"."+f.Name(),
					"new("+c.qualified(pkg)+"."+n+")."+f.Name(), f)
			}
		}
	}
}

func (c *caller) qualified(pkg *types.Package) string {
	if c.names[pkg.Path()] == "" {
		c.names[pkg.Path()] = fmt.Sprint("p", len(c.names))
	}
	return c.names[pkg.Path()]
}

// The variants of arguments.
const (
	zeros = iota
	ones
	negatives
)

// function adds the calls of a function whose parameters have types that a program can name.
func (c *caller) function(name, expression string, f *types.Func) {
	s := f.Signature()
	if exempt[name] != "" || s.TypeParams().Len() > 0 {
		return
	}
	for variant := range negatives + 1 {
		var args []string
		for p := range s.Params().Variables() {
			if !nameable(p.Type()) {
				return
			}
			args = append(args, c.argument(p.Type(), variant))
		}
		if s.Variadic() {
			args[len(args)-1] += "..."
		}
		fmt.Fprintf(&c.calls, "\t{%q, func() { %s(%s) }},\n", fmt.Sprint(name, " ", variant),
			expression, strings.Join(args, ", "))
		c.count++
		if len(args) == 0 {
			return
		}
	}
}

var unexported = regexp.MustCompile(`[/\w]\.[a-z_]\w*($|\W)`)

// nameable reports whether a program can name a type.
func nameable(t types.Type) bool {
	s := types.TypeString(t, nil)
	return !strings.Contains(s, "/internal/") && !unexported.MatchString(noDots.Replace(s))
}

// noDots takes the dots from what stands before a package's name.
var noDots = strings.NewReplacer("github.com/", "", "gorgonia.org/", "")

// argument is an expression.
func (c *caller) argument(t types.Type, variant int) string {
	s := types.TypeString(t, c.qualified)
	if s == "context.Context" {
		return "context.Background()"
	}
	zero := "zero[" + s + "]()"
	if variant == zeros {
		return zero
	}
	switch u := t.Underlying().(type) {
	case *types.Pointer:
		return "new(" + types.TypeString(u.Elem(), c.qualified) + ")"
	case *types.Slice:
		return "make(" + s + ", 1)"
	case *types.Basic:
		switch info := u.Info(); {
		case info&types.IsNumeric != 0 && variant == ones:
			return s + "(1)"
		case info&types.IsNumeric != 0 && info&(types.IsUnsigned|types.IsComplex) == 0:
			return s + "(-1)"
		case info&types.IsString != 0 && variant == ones:
			return s + `("x")`
		}
	case *types.Interface:
		if s == "io.Writer" {
			return "io.Discard"
		}
	}
	return zero
}

// program is the source.
func (c *caller) program() string {
	var imports []string
	for path, name := range c.names {
		imports = append(imports, fmt.Sprintf("\t%s %q\n", name, path))
	}
	slices.Sort(imports)
	return "package main\n\nimport (\n\tfmt \"fmt\"\n\tos \"os\"\n\ttime \"time\"\n" +
		strings.Join(imports, "") + ")\n" + `
func zero[T any]() (z T) { return }

var _, _ = context.Background, io.Discard

var calls = []struct {
	name string
	call func()
}{
` + c.calls.String() + `}

func main() {
	bad := 0
	for _, c := range calls {
		panicked := make(chan any, 1)
		go func() {
			defer func() { panicked <- recover() }()
			c.call()
		}()
		select {
		case e := <-panicked:
			if e != nil {
				bad++
				fmt.Println(c.name, "panics:", e)
			}
		case <-time.After(time.Minute):
			bad++
			fmt.Println(c.name, "hangs")
		}
	}
	fmt.Println("done:", len(calls))
	if bad > 0 {
		os.Exit(1)
	}
}
`
}
