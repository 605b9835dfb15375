package jinja

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A spec describes how the % operator or str.format formats a value.
type spec struct {
	fill      rune
	align     byte // '<', '>', '^', '=' or 0
	sign      byte // '+', ' ' or 0
	alternate bool
	zero      bool
	comma     bool
	width     int
	precision int // -1 if absent
	verb      byte
}

// percent implements the % operator of strings.
func (in *interpreter) percent(format string, right value) value {
	// A tuple holds several operands. Python allows a list or dictionary to remain unused.
	operands := []value{right}
	t, isTuple := right.(*tuple)
	if isTuple {
		operands = t.items
	}

	mayRemain := false
	switch right.(type) {
	case *dict, *list, *numberRange, *undefined:
		mayRemain = true
	case *view:
		fail("%% with the view of a dictionary is not supported")
	}

	used := 0
	next := func() value {
		if used == len(operands) {
			fail("not enough arguments for the format string %q", format)
		}
		used++
		return operands[used-1]
	}

	b := &builder{in: in}
	for i := 0; i < len(format); {
		percent := strings.IndexByte(format[i:], '%')
		if percent < 0 {
			b.add(format[i:])
			break
		}
		b.add(format[i : i+percent])
		i += percent + 1

		char := func() byte {
			if i == len(format) {
				fail("incomplete format %q", format)
			}
			i++
			return format[i-1]
		}
		c := char()
		var operand value = missing
		if c == '(' {
			end := strings.IndexByte(format[i:], ')')
			d, ok := right.(*dict)
			if end < 0 || !ok || strings.Contains(format[i:i+max(end, 0)], "(") {
				fail("the format %q requires a dictionary", format)
			}
			v, ok := d.get(format[i : i+end])
			if !ok {
				fail("the format %q uses a missing key", format)
			}
			operand = v
			used = len(operands)
			i += end + 1
			c = char()
		}

		s := spec{fill: ' ', precision: -1}
		for ; strings.IndexByte("-+ #0", c) >= 0; c = char() {
			switch c {
			case '-':
				s.align = '<'
			case '+':
				s.sign = '+'
			case ' ':
				if s.sign == 0 {
					s.sign = ' '
				}
			case '#':
				s.alternate = true
			case '0':
				s.zero = true
			}
		}
		number := func() int {
			n := 0
			for ; c >= '0' && c <= '9'; c = char() {
				n = min(n*10+int(c-'0'), maxOutput)
			}
			return n
		}
		if c == '*' {
			fail("* in the format %q is not supported", format)
		}
		s.width = number()
		if c == '.' {
			c = char()
			s.precision = number()
		}
		for strings.IndexByte("hlL", c) >= 0 {
			c = char()
		}
		s.verb = c
		if c == '%' {
			if s.width > 0 || operand != value(missing) {
				fail("the format %q is not supported", format)
			}
			b.add("%")
			continue
		}
		if operand == value(missing) {
			operand = next()
		}
		b.add(in.percentOne(s, operand))
	}

	if used < len(operands) && !mayRemain {
		fail("not all arguments were converted by the format string %q", format)
	}

	in.grow(b.Len())
	return b.String()
}

// percentOne formats one value for the % operator.
func (in *interpreter) percentOne(s spec, v value) string {
	if s.align == 0 {
		s.align = '>'
		if s.zero && strings.IndexByte("diufFeEgGxXo", s.verb) >= 0 {
			s.fill, s.align = '0', '='
		}
	}

	switch s.verb {
	case 's', 'r':
		out := in.str(v)
		if s.verb == 'r' {
			out = in.repr(v)
		}
		return in.pad(s, "", cut(out, s.precision))
	case 'c':
		if t, ok := text(v); ok {
			if utf8.RuneCountInString(t) != 1 {
				fail("%%c requires one character")
			}
			return in.pad(s, "", t)
		}
		i := toInt(v)
		if i < 0 || !utf8.ValidRune(rune(i)) {
			fail("%%c of %d is not supported", i)
		}
		return in.pad(s, "", string(rune(i)))
	case 'd', 'i', 'u':
		if !isNumber(v) {
			fail("%%%c requires a number, not %s", s.verb, describe(v))
		}
		if f, ok := v.(float64); ok {
			v = truncate(f)
		}
		return in.padNumber(s, in.digits(s, toBig(v), 10))
	case 'x', 'X', 'o':
		if !isInteger(v) {
			fail("%%%c requires an integer, not %s", s.verb, describe(v))
		}
		return in.padNumber(s, in.digits(s, toBig(v), map[byte]int{'x': 16, 'X': 16, 'o': 8}[s.verb]))
	case 'f', 'F', 'e', 'E', 'g', 'G':
		if !isNumber(v) {
			fail("%%%c requires a number, not %s", s.verb, describe(v))
		}
		return in.padNumber(s, formatFloat(s, toFloat(v)))
	}

	fail("the format %%%c is not supported", s.verb)
	return ""
}

// cut returns the first precision characters of a text, or the whole text if precision is negative.
func cut(s string, precision int) string {
	if precision < 0 {
		return s
	}
	for i := range s {
		if precision == 0 {
			return s[:i]
		}
		precision--
	}
	return s
}

// digits returns an integer with its sign, its prefix, and at least as many digits as the precision.
func (in *interpreter) digits(s spec, i *big.Int, base int) string {
	if base == 10 {
		integerText(i)
	}

	out := new(big.Int).Abs(i).Text(base)
	if s.precision > len(out) {
		out = in.repeat("0", s.precision-len(out)) + out
	}

	if s.alternate && base != 10 {
		out = map[int]string{2: "0b", 8: "0o", 16: "0x"}[base] + out
	}

	if s.verb == 'X' {
		out = strings.ToUpper(out)
	}

	if i.Sign() < 0 {
		return "-" + out
	}

	return out
}

// formatFloat returns a float with its sign.
func formatFloat(s spec, f float64) string {
	precision := s.precision
	if precision < 0 {
		precision = 6
	}

	if precision > 1000 || s.alternate {
		fail("the format of a float is not supported")
	}

	switch s.verb {
	case 'f', 'F':
		return strconv.FormatFloat(f, 'f', precision, 64)
	case 'e', 'E':
		out := strconv.FormatFloat(f, 'e', precision, 64)
		if s.verb == 'E' {
			return strings.ToUpper(out)
		}
		return out
	}

	precision = max(precision, 1)
	out := strconv.FormatFloat(f, 'e', precision-1, 64)
	exponent, _ := strconv.Atoi(out[strings.IndexByte(out, 'e')+1:])
	mantissa, suffix := out[:strings.IndexByte(out, 'e')], out[strings.IndexByte(out, 'e'):]
	if exponent >= -4 && exponent < precision {
		mantissa, suffix = strconv.FormatFloat(f, 'f', precision-1-exponent, 64), ""
	}

	if strings.Contains(mantissa, ".") {
		mantissa = strings.TrimRight(strings.TrimRight(mantissa, "0"), ".")
	}

	if s.verb == 'G' {
		return strings.ToUpper(mantissa + suffix)
	}

	return mantissa + suffix
}

// padNumber pads a number. A negative number starts with a minus sign.
func (in *interpreter) padNumber(s spec, number string) string {
	sign := ""
	if strings.HasPrefix(number, "-") {
		sign, number = "-", number[1:]
	} else if s.sign != 0 {
		sign = string(s.sign)
	}

	if s.comma {
		whole, rest := number, ""
		if i := strings.IndexAny(number, ".e"); i >= 0 {
			whole, rest = number[:i], number[i:]
		}
		for i := len(whole) - 3; i > 0; i -= 3 {
			whole = whole[:i] + "," + whole[i:]
		}
		number = whole + rest
	}

	if s.align == '=' && s.alternate && len(number) > 1 && number[0] == '0' &&
		strings.IndexByte("xXob", number[1]) >= 0 {
		sign, number = sign+number[:2], number[2:]
	}

	return in.pad(s, sign, number)
}

// pad pads a text to the width. The sign stays in front of padding with '='.
func (in *interpreter) pad(s spec, sign, body string) string {
	missing := s.width - utf8.RuneCountInString(sign) - utf8.RuneCountInString(body)
	if missing <= 0 {
		return sign + body
	}

	in.check(missing)
	fill := func(n int) string { return strings.Repeat(string(s.fill), n) }
	switch s.align {
	case '<':
		return sign + body + fill(missing)
	case '^':
		return fill(missing/2) + sign + body + fill(missing-missing/2)
	case '=':
		return sign + fill(missing) + body
	}

	return fill(missing) + sign + body
}

// formatMethod implements the string method format.
func formatMethod(in *interpreter, self string, a *callArguments) value {
	b := &builder{in: in}
	automatic := 0
	manual := false
	for i := 0; i < len(self); {
		c := self[i]
		switch {
		case c != '{' && c != '}':
			end := strings.IndexAny(self[i:], "{}")
			if end < 0 {
				end = len(self) - i
			}
			b.add(self[i : i+end])
			i += end
			continue
		case i+1 < len(self) && self[i+1] == c:
			b.add(self[i : i+1])
			i += 2
			continue
		case c == '}':
			fail("format: single } in %q", self)
		}

		end := strings.IndexAny(self[i+1:], "{}")
		if end < 0 || self[i+1+end] == '{' {
			fail("format: the field after %q is not supported", self[:i])
		}
		field := self[i+1 : i+1+end]
		i += end + 2

		field, layout, _ := strings.Cut(field, ":")
		field, conversion, converted := strings.Cut(field, "!")
		if strings.ContainsAny(field, ".[") {
			fail("format: the field {%s} is not supported", field)
		}

		var v value
		if n, err := strconv.Atoi(field); err == nil || field == "" {
			if field == "" {
				n = automatic
				automatic++
			} else {
				manual = true
			}
			if manual && automatic > 0 {
				fail("format: %q mixes numbered and unnumbered fields", self)
			}
			if n < 0 || n >= len(a.positional) {
				fail("format: %q has too few arguments", self)
			}
			v = a.positional[n]
		} else {
			found := false
			for _, k := range a.keywords {
				if k.name == field {
					v, found = k.value, true
				}
			}
			if !found {
				fail("format: the argument %q is missing", field)
			}
		}

		switch {
		case !converted:
		case conversion == "s":
			v = in.str(v)
		case conversion == "r":
			v = in.repr(v)
		default:
			fail("format: the conversion !%s is not supported", conversion)
		}
		b.add(in.formatOne(layout, v))
	}

	in.grow(b.Len())
	return b.String()
}

// formatOne formats a value as Python's format does.
func (in *interpreter) formatOne(layout string, v value) string {
	if layout == "" {
		return in.str(v)
	}

	s := spec{fill: ' ', precision: -1}
	rest := layout
	if r, n := utf8.DecodeRuneInString(rest); n < len(rest) && strings.IndexByte("<>^=", rest[n]) >= 0 {
		s.fill, s.align = r, rest[n]
		rest = rest[n+1:]
	} else if strings.IndexByte("<>^=", rest[0]) >= 0 {
		s.align = rest[0]
		rest = rest[1:]
	}

	if rest != "" && strings.IndexByte("+- ", rest[0]) >= 0 {
		if s.sign = rest[0]; s.sign == '-' {
			s.sign = 0
		}
		rest = rest[1:]
	}

	if strings.HasPrefix(rest, "#") {
		s.alternate = true
		rest = rest[1:]
	}

	_, isText := text(v)
	if strings.HasPrefix(rest, "0") && s.align == 0 && !isText {
		s.fill, s.align = '0', '='
	}

	number := func() int {
		n := 0
		for ; rest != "" && rest[0] >= '0' && rest[0] <= '9'; rest = rest[1:] {
			n = min(n*10+int(rest[0]-'0'), math.MaxInt32)
		}
		return n
	}

	s.width = number()
	if strings.HasPrefix(rest, ",") {
		s.comma = true
		rest = rest[1:]
	}

	if strings.HasPrefix(rest, ".") {
		rest = rest[1:]
		s.precision = number()
	}

	if len(rest) == 1 {
		s.verb = rest[0]
		rest = ""
	}

	if rest != "" || s.comma && s.fill == '0' || s.alternate && s.fill == '0' {
		fail("format: the format %q is not supported", layout)
	}

	if isText && (s.verb == 0 || s.verb == 's') && s.align != '=' && s.sign == 0 && !s.comma {
		if s.align == 0 {
			s.align = '<'
		}
		t, _ := text(v)
		return in.pad(s, "", cut(t, s.precision))
	}

	if s.align == 0 {
		s.align = '>'
	}

	if _, isBool := v.(bool); isNumber(v) && !isBool {
		switch {
		case isInteger(v) && (s.verb == 0 || s.verb == 'd') && s.precision < 0:
			return in.padNumber(s, in.digits(s, toBig(v), 10))
		case isInteger(v) && strings.IndexByte("xXob", max(s.verb, 1)) >= 0 && s.precision < 0 && !s.comma:
			base := map[byte]int{'x': 16, 'X': 16, 'o': 8, 'b': 2}[s.verb]
			return in.padNumber(s, in.digits(s, toBig(v), base))
		case strings.IndexByte("fFeEgG", max(s.verb, 1)) >= 0:
			return in.padNumber(s, formatFloat(s, toFloat(v)))
		case s.verb == '%':
			s.verb = 'f'
			return in.padNumber(s, formatFloat(s, checkFloat(toFloat(v)*100))+"%")
		}
	}

	fail("format: the format %q of %s is not supported", layout, describe(v))
	return ""
}
