package docs_test

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

// programs holds the binaries of the module's commands and their options.
type programs struct {
	folder  string
	options map[string]map[string]bool // by package path relative to the module, without dashes; of kasmina, by subcommand, with dashes
}

var optionPattern = regexp.MustCompile(`(?m)^  -([a-z0-9-]+)`)

// build builds the programs that documents run or whose options their help lists best: the command and the
// benchmarks. It reads the options of all other programs in their sources, because linking takes seconds.
var build = sync.OnceValues(func() (*programs, error) {
	folder, err := os.MkdirTemp("", "documents")
	if err != nil {
		return nil, err
	}

	p := &programs{folder, map[string]map[string]bool{}}
	out, err := command("go", "list", "-f", "{{if eq .Name \"main\"}}{{.ImportPath}}{{end}}",
		"./...")
	if err != nil {
		return p, err
	}

	// Linking debug information would double the time.
	built := []string{"./cmd/kasmina", "./tools/bench"}
	_, err = command("go", append([]string{"build", "-ldflags=-s -w", "-o", folder}, built...)...)
	if err != nil {
		return p, err
	}

	for _, importPath := range strings.Fields(out) {
		program := "." + strings.TrimPrefix(importPath, module)
		if slices.Contains(built, program) {
			help, err := exec.Command(filepath.Join(folder, filepath.Base(program)), "--help").CombinedOutput()
			if options := optionsIn(help); len(options) > 1 || err == nil { // a program without options accepts everything
				p.options[program] = options
			}
			continue
		}
		if p.options[program], err = declaredOptions(filepath.Join(root, program)); err != nil {
			return p, err
		}
	}

	// The options of subcommands are listed separately.
	for program, all := range subcommands {
		binary := filepath.Join(p.folder, filepath.Base(program))
		for _, subcommand := range all {
			help, _ := exec.Command(binary, subcommand, "-help").CombinedOutput()
			p.options[program+" "+subcommand] = optionsIn(help)
		}
	}

	return p, nil
})

// subcommands lists the subcommands of programs other than kasmina.
var subcommands = map[string][]string{"./tools/bench": {"decode", "forgetting", "growth", "serve", "study"}}

var declaration = regexp.MustCompile(`^(Bool|Int|Int64|Uint|Uint64|String|Float64|Duration|Func|BoolFunc|Text)?(Var)?$`)

// declaredOptions returns the options that the files of a folder declare with package flag, without dashes.
func declaredOptions(folder string) (map[string]bool, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	options := map[string]bool{"help": true}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			function, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !declaration.MatchString(function.Sel.Name) {
				return true
			}
			at := 0 // index of the name
			if strings.HasSuffix(function.Sel.Name, "Var") {
				at = 1
			}
			if at < len(call.Args)-1 {
				if text, ok := call.Args[at].(*ast.BasicLit); ok && text.Kind == token.STRING {
					options[strings.Trim(text.Value, "\"`")] = true
				}
			}
			return true
		})
	}

	return options, err
}

// optionsIn returns the options that a program's help lists, without dashes.
func optionsIn(help []byte) map[string]bool {
	options := map[string]bool{"help": true}
	for _, m := range optionPattern.FindAllStringSubmatch(string(help), -1) {
		options[m[1]] = true
	}
	return options
}

func TestMain(m *testing.M) {
	randtest.CollectRarely()
	status := m.Run()
	if needsBuild {
		if p, _ := build(); p != nil {
			os.RemoveAll(p.folder)
		}
	}
	os.Exit(status)
}

// needsBuild is set once a test has built the commands.
var needsBuild bool

func built(t *testing.T) *programs {
	t.Helper()
	needsBuild = true
	p, err := build()
	require.NoError(t, err)
	return p
}

// command runs a program in the module's root directory.
func command(name string, args ...string) (string, error) {
	c := exec.Command(name, args...)
	c.Dir = root
	out, err := c.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// shellCommands splits a block into commands, and commands into words. It omits comments and
// redirections.
func shellCommands(code string) (all [][]string) {
	code = strings.ReplaceAll(code, "\\\n", " ")
	for line := range strings.Lines(code) {
		if i := strings.Index(line, "# "); i == 0 || i > 0 && line[i-1] == ' ' {
			line = line[:i]
		}
		line = regexp.MustCompile(`\$\(([^)]*)\)`).ReplaceAllString(line, "X; $1;")
		for _, c := range regexp.MustCompile(`&&|\|\||[;|]`).Split(line, -1) {
			words := regexp.MustCompile(`"[^"]*"|'[^']*'|\S+`).FindAllString(c, -1)
			for i, w := range words {
				if words[i] = strings.Trim(w, `"'`); strings.HasPrefix(w, ">") ||
					strings.HasPrefix(w, "<") {
					words = words[:i]
					break
				}
			}
			for len(words) > 0 &&
				regexp.MustCompile(`^[A-Za-z_]+=|^(do|then)$`).MatchString(words[0]) {
				words = words[1:] // settings for a single command
			}
			if len(words) > 0 && words[0] != "#" {
				all = append(all, words)
			}
		}
	}

	return all
}

// plain lists commands that only the shell checks.
var plain = []string{"export", "cd", "mkdir", "cat", "for", "done", "cp", "ls",
	"tail", "grep", "git", "openssl", "kubectl"}

// checkCommand returns an error for a faulty command. It does not run the command.
func (p *programs) checkCommand(words []string) error {
	name, args := words[0], words[1:]
	switch {
	case slices.Contains(plain, name):
		return nil
	case name == "go" && len(args) > 0:
		return p.checkGo(args[0], args[1:])
	case name == "kasmina" && len(args) > 0:
		return p.checkKasmina(args)
	case (name == "python3" || name == "node") && len(args) > 0:
		return checkScript(args[0], args[1:])
	case strings.HasPrefix(name, ".ci/"):
		info, err := os.Stat(filepath.Join(root, name))
		if err == nil && info.Mode()&0o111 == 0 {
			err = fmt.Errorf("%s cannot be executed", name)
		}
		return err
	case name == "ncu": // NVIDIA's profiler
		return nil
	}

	return fmt.Errorf("%q: this test does not know how to check it", name)
}

// checkGo checks a call of the go command.
func (p *programs) checkGo(verb string, args []string) error {
	switch verb {
	case "run":
		return p.checkRun(args)
	case "get":
		if len(args) != 1 || args[0] != module {
			return fmt.Errorf("go get %q, want %s", args, module)
		}
		return nil
	case "test":
		return checkGoTest(args)
	case "list", "build", "generate", "doc":
		for _, a := range args {
			if err := checkPackage(a); err != nil {
				return err
			}
		}
		return nil
	case "mod", "install":
		return nil
	}

	return fmt.Errorf("go %s: this test does not know how to check it", verb)
}

var kasminaOption = regexp.MustCompile(`(?m)^ +(?:(-[a-z]), )?(--[a-z0-9-]+)`)

// checkKasmina returns an error if kasmina lacks a subcommand or one of its options.
func (p *programs) checkKasmina(args []string) error {
	options, known := p.options["kasmina "+args[0]]
	if !known {
		help, err := exec.Command(filepath.Join(p.folder, "kasmina"), args[0], "--help").CombinedOutput()
		if err != nil {
			return fmt.Errorf("kasmina %s: %w\n%s", args[0], err, help)
		}

		options = map[string]bool{}
		for _, m := range kasminaOption.FindAllStringSubmatch(string(help), -1) {
			options[m[1]], options[m[2]] = true, true
		}
		p.options["kasmina "+args[0]] = options
	}

	for _, a := range args[1:] {
		option, _, _ := strings.Cut(a, "=")
		if strings.HasPrefix(a, "-") && !options[option] {
			return fmt.Errorf("kasmina %s has no option %s", args[0], option)
		}
	}

	return nil
}

// checkRun checks that the program exists and accepts the given options.
func (p *programs) checkRun(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("go run of nothing")
	}

	name := strings.Replace(args[0], module, ".", 1)
	if name == "." {
		return nil // the reader's program
	}

	if name == "./cmd/kasmina" && len(args) > 1 {
		return p.checkKasmina(args[1:])
	}

	options, ok := p.options[name]
	if !ok {
		return fmt.Errorf("go run %s: there is no such program, have %q", args[0],
			slices.Sorted(maps.Keys(p.options)))
	}

	if len(args) > 1 && slices.Contains(subcommands[name], args[1]) {
		name, args, options = name+" "+args[1], args[1:], p.options[name+" "+args[1]]
	}

	for _, a := range args[1:] {
		option, _, _ := strings.Cut(strings.TrimLeft(a, "-"), "=")
		if strings.HasPrefix(a, "-") && !options[option] {
			return fmt.Errorf("%s has no option -%s", name, option)
		}
	}

	return nil
}

// testOptions lists the options of go test used in documents, and whether they take a value.
var testOptions = map[string]bool{"run": true, "bench": true, "tags": true, "timeout": true,
	"count": true, "fuzz": true,
	"fuzztime": true, "coverprofile": true, "o": true, "v": false, "short": false, "race": false,
	"c": false, "json": false, "benchmem": false,
	// The tests of llm/gpu and cmd/kasmina declare these.
	"large": false, "kills": true,
	"duration": true, "seed": true, "case": true, "cases": true, "all-failures": false}

// checkGoTest checks that the packages exist, and that -run, -bench and -fuzz match a test.
func checkGoTest(args []string) error {
	var wanted, found []string
	for i := 0; i < len(args); i++ {
		option, value, assigned := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		if !strings.HasPrefix(args[i], "-") {
			if err := checkPackage(args[i]); err != nil {
				return err
			}
			found = append(found, testsOf(args[i])...)
			continue
		}
		takes, ok := testOptions[option]
		if !ok {
			return fmt.Errorf("go test has no option -%s, or this test does not know it", option)
		}
		if takes && !assigned {
			if i++; i == len(args) {
				return fmt.Errorf("go test -%s lacks a value", option)
			}
			value = args[i]
		}
		if option == "run" || option == "bench" || option == "fuzz" {
			wanted = append(wanted, value)
		}
	}

	for _, w := range wanted {
		pattern, err := regexp.Compile(w)
		if err != nil {
			return err
		}
		// x matches no test
		if w != "x" && w != "^$" && !slices.ContainsFunc(found, pattern.MatchString) {
			return fmt.Errorf("go test: nothing is named like %q", w)
		}
	}

	return nil
}

var testPattern = regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz|Example)\w*)\(`)

// testsOf returns the names of the tests in a package, or in all packages below a directory.
func testsOf(pkg string) (names []string) {
	folder := filepath.Join(root, strings.Replace(strings.TrimSuffix(pkg, "/..."), module, ".", 1))
	files, _ := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if strings.HasSuffix(pkg, "/...") {
		files = nil
		_ = filepath.Walk(folder, func(path string, _ os.FileInfo, err error) error {
			if err == nil && strings.HasSuffix(path, "_test.go") {
				files = append(files, path)
			}
			return nil
		})
	}

	for _, f := range files {
		text, _ := os.ReadFile(f)
		for _, m := range testPattern.FindAllSubmatch(text, -1) {
			names = append(names, string(m[1]))
		}
	}

	return names
}

// checkPackage checks that a package of this module exists.
func checkPackage(pattern string) error {
	below, ours := strings.CutPrefix(pattern, module)
	if strings.HasPrefix(pattern, "./") || ours {
		folder := filepath.Join(root, strings.TrimSuffix(strings.TrimPrefix(below, "."), "..."))
		if info, err := os.Stat(folder); err != nil || !info.IsDir() {
			return fmt.Errorf("there is no package %s", pattern)
		}
	}
	return nil
}

// checkScript checks that a Python or JavaScript file exists and mentions the given options.
func checkScript(file string, args []string) error {
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return err
	}

	for _, a := range args {
		option, _, _ := strings.Cut(a, "=")
		if strings.HasPrefix(a, "-") && !strings.Contains(string(text), `"`+option+`"`) {
			return fmt.Errorf("%s has no option %s", file, option)
		}
	}

	return nil
}

// TestCommands checks the commands in blocks and sentences that are not run, and logs them.
func TestCommands(t *testing.T) {
	p := built(t)
	inline := regexp.MustCompile(`^(go (run|test|get|list|generate) |python3 |\.ci/)`)
	for _, doc := range documents(t) {
		for _, b := range doc.blocks {
			if _, run := b.notes["run"]; b.language != "sh" || run {
				continue
			}
			out, err := exec.Command("bash", "-n", "-c", b.code).CombinedOutput()
			require.NoError(t, err, "%v: %s", b, out)
			for _, words := range shellCommands(b.code) {
				t.Logf("%v: parsed, not run: %s", b, strings.Join(words, " "))
				require.NoError(t, p.checkCommand(words), "%v", b)
			}
		}
		for _, s := range doc.spans {
			if !inline.MatchString(s.code) {
				continue
			}
			for _, words := range shellCommands(s.code) {
				t.Logf("%s:%d: parsed, not run: %s", doc.path, s.line, s.code)
				require.NoError(t, p.checkCommand(words), "%s:%d", doc.path, s.line)
			}
		}
	}
}

// TestFaultyCommands checks that faulty commands are detected.
func TestFaultyCommands(t *testing.T) {
	p := built(t)
	for code, good := range map[string]bool{
		"go run ./tools/bench growth -only static > a.txt":           true,
		"KASMINA_VARIANTS='A=b' go run ./tools/bench growth -runs 2": true,
		"go test ./op -run TestGolden -v && go test ./...":           true,
		"x=$(go list -m -f '{{.Dir}}' " + module + ")":               true,
		"go run ./examples/nothing":                                  false,
		"go run ./tools/bench growth -onlys":                         false,
		"go run ./tools/bench study -limit 9m blocks=3":              true,
		"go run ./tools/bench study -begin 0.1":                      false,
		"go run ./tools/bench growth -limit 9m":                      false,
		"go test ./nothing":                                          false,
		"go test ./op -run TestNothingAtAll":                         false,
		"go test ./op -nothing":                                      false,
		"go get example.com/other":                                   false,
		"python3 tools/nothing.py":                                   false,
		"python3 testdata/make_golden.py --nothing":                  false,
		".ci/nothing":                    false,
		"kasmina eval --model x --seq=3": true,
		"kasmina eval -m x":              true,
		"kasmina eval -model x":          false,
		"kasmina eval --models x":        false,
		"kasmina frobnicate":             false,
		"go run ./cmd/kasmina board x":   true,
		"go run ./cmd/kasmina board -q":  false,
		"frobnicate":                     false,
		"ls | go run ./examples/nothing": false,
		"for s in 1 2; do go run ./tools/bench growth -no $s; done": false,
	} {
		var err error
		for _, words := range shellCommands(code) {
			if e := p.checkCommand(words); e != nil {
				err = e
			}
		}
		require.Equal(t, good, err == nil, "%s: %v", code, err)
	}
}

// shim makes the shell run the commands of this module as built for the test. It makes go get and go mod
// tidy work without a network: get adds the module in its current state, and tidy adds its dependencies.
const shim = `set -euo pipefail
kasmina() { "$BIN/kasmina" "$@"; }
go() {
	case "$1 ${2-}" in
	"run ./"*)
		if [ -x "$BIN/$(basename "$2")" ]; then
			"$BIN/$(basename "$2")" "${@:3}"
		else # a program of the document's own
			command go "$@"
		fi
		;;
	"get "*) command go mod edit -require="$2@v0.0.0" -replace="$2=$MODULE" ;;
	"mod tidy")
		command go mod edit -json "$MODULE/go.mod" |
			awk -F'"' '/"Path"/ { p = $4 } /"Version"/ { print "-require=" p "@" $4 }' |
			xargs go mod edit
		cp "$MODULE/go.sum" .
		;;
	*) command go "$@" ;;
	esac
}
`

// run runs a block in a directory and returns the standard output.
func (p *programs) run(code, folder string) (printed string, err error) {
	cache, err := command("go", "env", "GOCACHE")
	if err != nil {
		return "", err
	}

	module, err := filepath.Abs(root)
	if err != nil {
		return "", err
	}

	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "bash", "-c", shim+code)
	c.Dir = folder
	c.Env = append(os.Environ(), "BIN="+p.folder, "MODULE="+module, "GOPROXY=off",
		"GOWORK=off", "XDG_CACHE_HOME="+folder, "GOCACHE="+strings.TrimSpace(cache),
		"GOFLAGS="+os.Getenv("GOFLAGS")+" -ldflags=-w") // debug information would double the time of linking
	var out, stderr strings.Builder
	c.Stdout, c.Stderr = &out, &stderr
	if err := c.Run(); err != nil {
		return "", fmt.Errorf("%w\n%s%s", err, out.String(), stderr.String())
	}

	return out.String(), nil
}

// TestRun runs the blocks that are marked for it, in one directory per document, and compares their output. It
// covers all documents if tests are long, and otherwise one of them.
func TestRun(t *testing.T) {
	if testing.Short() {
		t.Skip("the blocks are run without -short")
	}

	p := built(t)
	runs := map[string]document{}
	for _, doc := range documents(t) {
		if slices.ContainsFunc(doc.blocks, func(b block) bool {
			_, run := b.notes["run"]
			return run
		}) {
			runs[doc.path] = doc
		}
	}

	for _, doc := range randtest.Sample(t, 1, runs) {
		t.Run(doc.path, func(t *testing.T) {
			folder, printed := t.TempDir(), ""
			for _, b := range doc.blocks {
				if name, ok := b.notes["file"]; ok {
					path := filepath.Join(folder, filepath.FromSlash(name))
					require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o777))
					require.NoError(t, os.WriteFile(path, []byte(b.code), 0o666))
				}
				if _, ok := b.notes["output"]; ok {
					require.Equal(t, b.code, printed, "%v: what the block before prints", b)
				}
				if _, ok := b.notes["run"]; ok {
					var err error
					printed, err = p.run(b.code, folder)
					require.NoError(t, err, "%v", b)
					t.Logf("%v: ran", b)
				}
			}
		})
	}
}

// TestRunFailsLikeForReaders checks that commands fail as they would for a reader: for example, a program with
// imports that go mod tidy has not processed.
func TestRunFailsLikeForReaders(t *testing.T) {
	p := built(t)
	folder := t.TempDir()
	program := "package main\n\nimport \"" + module + "/op\"\n\nfunc main() { _ = op.Linear }\n"
	require.NoError(t, os.WriteFile(filepath.Join(folder, "main.go"), []byte(program), 0o666))
	_, err := p.run("go mod init example.com/reader && go get "+module+" && go build -o program .",
		folder)
	require.ErrorContains(t, err, "missing go.sum entry")
	_, err = p.run("go mod tidy && go build -o program .", folder)
	require.NoError(t, err)
}
