package chat

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// either is the function that stands for conditional expressions in brackets.
const either = "kasmina_either"

// chooseEither returns its second argument if the first is true, else the third.
func chooseEither(_ *exec.Evaluator, args *exec.VarArgs) *exec.Value {
	if args.Args[0].IsTrue() {
		return args.Args[1]
	}
	return args.Args[2]
}

// withoutConditionals writes (a if c else b) of a template as a call of either, as the engine knows
// conditional expressions outside of brackets alone.
func withoutConditionals(source string) (string, error) {
	var out strings.Builder
	for {
		begin := strings.IndexByte(source, '{')
		if begin < 0 || begin+1 == len(source) {
			break
		}
		out.WriteString(source[:begin])
		source = source[begin:]
		end := 0
		switch source[1] {
		case '#':
			if end = strings.Index(source, "#}"); end < 0 {
				end = len(source)
			}
			out.WriteString(source[:end])
		case '{', '%':
			out.WriteString(source[:2])
			source = source[2:]
			end = endOfTag(source)
			if err := checkTag(source[:end]); err != nil {
				return "", err
			}
			out.WriteString(rewriteGroups(withoutProducts(source[:end])))
		default:
			end = 1
			out.WriteByte('{')
		}
		source = source[end:]
	}
	return out.String() + source, nil
}

// endOfTag returns where the code of a tag ends.
func endOfTag(code string) int {
	depth := 0
	for at := 0; at < len(code); {
		switch code[at] {
		case '\'', '"':
			at = endOfString(code, at)
			continue
		case '{', '(', '[':
			depth++
		case '%':
			if depth == 0 && strings.HasPrefix(code[at:], "%}") {
				return at
			}
		case '}', ')', ']':
			if depth == 0 {
				return at
			}
			depth--
		}
		at++
	}
	return len(code)
}

// endOfString returns where the string that begins at a place ends.
func endOfString(code string, at int) int {
	quote := code[at]
	for at++; at < len(code); at++ {
		switch code[at] {
		case '\\':
			at++
		case quote:
			return at + 1
		}
	}
	return len(code)
}

// rewriteGroups rewrites what stands in the brackets of an expression.
func rewriteGroups(code string) string {
	var out strings.Builder
	for at := 0; at < len(code); {
		c := code[at]
		switch c {
		case '\'', '"':
			end := endOfString(code, at)
			out.WriteString(code[at:end])
			at = end
			continue
		case '(', '[', '{':
			end := at + 1 + endOfTag(code[at+1:])
			out.WriteByte(c)
			out.WriteString(rewriteItems(code[at+1 : end]))
			at = end
			continue
		}
		out.WriteByte(c)
		at++
	}
	return out.String()
}

// rewriteItems rewrites what stands between brackets, separated by commas.
func rewriteItems(code string) string {
	items := cut(code, func(rest string) int {
		return len(rest) - len(strings.TrimPrefix(rest, ","))
	})
	for i, item := range items {
		items[i] = rewriteItem(item)
	}
	return strings.Join(items, ",")
}

func rewriteItem(item string) string {
	name := ""
	if n := strings.IndexByte(item, '='); n > 0 && !strings.HasPrefix(item[n:], "==") &&
		isName(strings.TrimSpace(item[:n])) { // a named argument
		name, item = item[:n+1], item[n+1:]
	}
	parts := cut(item, word("if"))
	if len(parts) != 2 {
		return name + rewriteGroups(item)
	}
	choice := cut(parts[1], word("else"))
	if len(choice) < 2 {
		return name + rewriteGroups(item)
	}
	rest := strings.Join(choice[1:], " else ")
	return name + either + "(" + rewriteGroups(choice[0]) + "," + rewriteGroups(parts[0]) + "," +
		rewriteItem(rest) + ")"
}

// word returns a separator of cut: a word that stands alone.
func word(w string) func(rest string) int {
	return func(rest string) int {
		if strings.HasPrefix(rest, " "+w+" ") || strings.HasPrefix(rest, " "+w+"\n") {
			return len(w) + 1
		}
		return 0
	}
}

// cut cuts code at a separator outside of strings and brackets. The function separator returns its
// length if the rest of the code begins with it. Of the word if, only the first cuts.
func cut(code string, separator func(rest string) int) (parts []string) {
	from := 0
	for at := 0; at < len(code); {
		switch code[at] {
		case '\'', '"':
			at = endOfString(code, at)
			continue
		case '(', '[', '{':
			at = min(len(code), at+2+endOfTag(code[at+1:]))
			continue
		}
		n := separator(code[at:])
		if n > 0 {
			parts = append(parts, code[from:at])
			from = at + n
		}
		at += max(n, 1)
	}
	return append(parts, code[from:])
}

func isName(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz_0123456789") == ""
}

// productPattern is what may be multiplied: a text or a variable by a variable. What stands before
// it binds less.
var productPattern = regexp.MustCompile(
	`(?:^|[=(,~+\[:])\s*("[^"\\]*"|'[^'\\]*'|[a-z_]+)\s*\*\s*([a-z_]+)\s*(?:$|[)\],~+\-])`)

// product is the function that stands for multiplications.
const product = "kasmina_product"

// withoutProducts writes a * b of a tag as a call of product, whose result has a bound.
func withoutProducts(code string) string {
	var out strings.Builder
	from := 0
	for at := 0; at < len(code); at++ {
		m := productPattern.FindStringSubmatchIndex(code[at:])
		if m == nil {
			break
		}
		end := at
		for end < at+m[0] && end < len(code) { // it may begin within a string
			if c := code[end]; c == '\'' || c == '"' {
				end = endOfString(code, end)
			} else {
				end++
			}
		}
		if end == at+m[0] {
			out.WriteString(code[from:at+m[2]] + product + "(" + code[at+m[2]:at+m[3]] + "," +
				code[at+m[4]:at+m[5]] + ")")
			from, end = at+m[5], at+m[5]
		}
		at = end - 1
	}
	return out.String() + code[from:]
}

// product multiplies numbers, or repeats a text.
func (l *limits) product(_ *exec.Evaluator, args *exec.VarArgs) *exec.Value {
	a, b := args.Args[0], args.Args[1]
	switch {
	case a.IsInteger() && b.IsInteger():
		return exec.AsValue(a.Integer() * b.Integer())
	case !a.IsString() || !b.IsInteger():
		return exec.AsValue(errors.New("* wants two integers, or a text and an integer"))
	case len(a.String()) > 0 && b.Integer() > l.most/len(a.String()):
		return exec.AsValue(fmt.Errorf("* makes more than %d bytes", l.most))
	}
	return exec.AsValue(strings.Repeat(a.String(), max(0, b.Integer())))
}
