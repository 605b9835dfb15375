package chat

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nikolalohinski/gonja/v2/builtins"
	"github.com/nikolalohinski/gonja/v2/exec"
)

// stringMethods are those of Python's strings that templates call. The engine's own split and
// replace differ from Python's.
func stringMethods() *exec.MethodSet[string] {
	methods := map[string]exec.Method[string]{
		"split":      split,
		"replace":    replace,
		"strip":      strip(strings.Trim, strings.TrimSpace),
		"lstrip":     strip(strings.TrimLeft, trimLeft),
		"rstrip":     strip(strings.TrimRight, trimRight),
		"startswith": affix(strings.HasPrefix),
		"endswith":   affix(strings.HasSuffix),
		"upper":      whole(strings.ToUpper),
		"lower":      whole(strings.ToLower),
	}
	for _, name := range []string{"capitalize", "title", "join", "isdigit", "isalpha", "isalnum",
		"isspace", "isupper", "islower", "removeprefix", "removesuffix", "splitlines"} {
		if m, ok := builtins.Methods.Str.Get(name); ok {
			methods[name] = m
		}
	}
	return exec.NewMethodSet(methods)
}

// The names of the methods that templates may call. Those that fill up with spaces are not among
// them.
const (
	stringMethodNames = "split replace strip lstrip rstrip startswith endswith upper lower " +
		"capitalize title join isdigit isalpha isalnum isspace isupper islower removeprefix removesuffix " +
		"splitlines"
	dictMethodNames = "keys values items get pop setdefault update copy clear"
	listMethodNames = "append reverse copy"
)

type method = func(self string, _ *exec.Value, args *exec.VarArgs) (any, error)

// texts returns the arguments of a method, which are strings, from least to most of them.
func texts(args *exec.VarArgs, least, most int) ([]string, error) {
	if n := len(args.Args); n < least || n > most || len(args.KwArgs) > 0 {
		return nil, fmt.Errorf("it has %d arguments, want %d to %d by position", n, least, most)
	}
	var all []string
	for _, a := range args.Args {
		if !a.IsString() {
			return nil, fmt.Errorf("an argument is %s, want a string", a.String())
		}
		all = append(all, a.String())
	}
	return all, nil
}

func whole(f func(string) string) method {
	return func(self string, _ *exec.Value, args *exec.VarArgs) (any, error) {
		if _, err := texts(args, 0, 0); err != nil {
			return nil, err
		}
		return f(self), nil
	}
}

func affix(has func(s, affix string) bool) method {
	return func(self string, _ *exec.Value, args *exec.VarArgs) (any, error) {
		these, err := texts(args, 1, 1)
		if err != nil {
			return nil, err
		}
		return has(self, these[0]), nil
	}
}

func strip(some func(s, cutset string) string, spaces func(string) string) method {
	return func(self string, _ *exec.Value, args *exec.VarArgs) (any, error) {
		these, err := texts(args, 0, 1)
		switch {
		case err != nil:
			return nil, err
		case len(these) == 0:
			return spaces(self), nil
		}
		return some(self, these[0]), nil
	}
}

func trimLeft(s string) string {
	trimmed := strings.TrimSpace(s + "x") // whose end is no space
	return trimmed[:len(trimmed)-1]
}

func trimRight(s string) string { return strings.TrimSpace("x" + s)[1:] }

func replace(self string, _ *exec.Value, args *exec.VarArgs) (any, error) {
	these, err := texts(args, 2, 2)
	if err != nil {
		return nil, err
	}
	return strings.ReplaceAll(self, these[0], these[1]), nil
}

// split cuts at a separator, or at white space, up to so many times.
func split(self string, _ *exec.Value, args *exec.VarArgs) (any, error) {
	most := -1
	if len(args.Args) == 2 {
		if !args.Args[1].IsInteger() {
			return nil, errors.New("the second argument is no integer")
		}
		most = args.Args[1].Integer()
	} else if len(args.Args) == 0 && len(args.KwArgs) == 0 {
		return listOf(strings.Fields(self)), nil
	}
	these, err := texts(&exec.VarArgs{Args: args.Args[:min(1, len(args.Args))],
		KwArgs: args.KwArgs}, 1,
		1)
	if err != nil {
		return nil, err
	}
	if these[0] == "" {
		return nil, errors.New("the separator is empty")
	}
	if most >= 0 {
		most++
	}
	return listOf(strings.SplitN(self, these[0], most)), nil
}

// A list is one that templates index. The engine's own do not find the first from behind.
type list []any

// GetItem returns the item at an index, counted from behind if it is negative.
func (l list) GetItem(key any) (*exec.Value, bool) {
	i, ok := key.(int)
	if ok && i < 0 {
		i += len(l)
	}
	if !ok || i < 0 || i >= len(l) {
		return exec.AsValue(nil), false
	}
	return exec.AsValue(l[i]), true
}

func listOf(texts []string) list {
	l := make(list, len(texts))
	for i, t := range texts {
		l[i] = t
	}
	return l
}
