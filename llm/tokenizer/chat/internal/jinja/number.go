package jinja

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode"
)

// Integers are int64 where they fit, and *big.Int otherwise.

func isNumber(v value) bool {
	switch v.(type) {
	case bool, int64, *big.Int, float64:
		return true
	}
	return false
}

func isInteger(v value) bool {
	switch v.(type) {
	case bool, int64, *big.Int:
		return true
	}
	return false
}

// toBig returns the value of an integer or boolean.
func toBig(v value) *big.Int {
	switch v := v.(type) {
	case bool:
		return big.NewInt(boolInt(v))
	case int64:
		return big.NewInt(v)
	case *big.Int:
		return v
	}
	fail("want an integer, got %s", describe(v))
	return nil
}

// normalize returns an integer as int64 if it fits. Integers that Python would not print are errors.
func normalize(i *big.Int) value {
	if i.IsInt64() {
		return i.Int64()
	}
	if i.BitLen() > maxDigits*10/3 {
		fail("an integer has more than %d digits", maxDigits)
	}
	return i
}

// toInt returns an integer argument as an int. Large values saturate at the limits of int32.
func toInt(v value) int {
	i := toBig(v)
	switch {
	case i.IsInt64():
		return int(max(math.MinInt32, min(i.Int64(), math.MaxInt32)))
	case i.Sign() < 0:
		return math.MinInt32
	}
	return math.MaxInt32
}

// toFloat returns a number as a float64, rounded to the nearest.
func toFloat(v value) float64 {
	switch v := v.(type) {
	case float64:
		return v
	case int64:
		return float64(v)
	}
	f, _ := new(big.Float).SetInt(toBig(v)).Float64()
	return checkFloat(f)
}

// checkFloat fails for infinities and NaN, which Jinja2 handles differently when it compiles a
// template and when it renders one.
func checkFloat(f float64) float64 {
	if math.IsInf(f, 0) || math.IsNaN(f) {
		fail("infinite numbers and NaN are not supported")
	}
	return f
}

// compareNumbers returns the order of two numbers, compared exactly.
func compareNumbers(a, b value) int {
	if isInteger(a) && isInteger(b) {
		return toBig(a).Cmp(toBig(b))
	}
	return toExact(a).Cmp(toExact(b))
}

// toExact returns a number as a rational number.
func toExact(v value) *big.Rat {
	if f, ok := v.(float64); ok {
		return new(big.Rat).SetFloat64(checkFloat(f))
	}
	return new(big.Rat).SetInt(toBig(v))
}

// arithmetic applies an arithmetic operator to two numbers.
func arithmetic(op string, a, b value) value {
	if isInteger(a) && isInteger(b) && op != "/" {
		return integerArithmetic(op, toBig(a), toBig(b))
	}

	if op == "/" && isInteger(a) && isInteger(b) {
		if toBig(b).Sign() == 0 {
			fail("division by zero")
		}
		f, _ := new(big.Rat).SetFrac(toBig(a), toBig(b)).Float64()
		return checkFloat(f)
	}

	if op == "**" {
		return power(a, b)
	}

	x, y := toFloat(a), toFloat(b)
	switch op {
	case "+":
		return checkFloat(x + y)
	case "-":
		return checkFloat(x - y)
	case "*":
		return checkFloat(x * y)
	}

	if y == 0 {
		fail("division by zero")
	}

	switch op {
	case "/":
		return checkFloat(x / y)
	case "//":
		quotient, _ := floorDivide(x, y)
		return checkFloat(quotient)
	}

	_, remainder := floorDivide(x, y)
	return remainder
}

func integerArithmetic(op string, a, b *big.Int) value {
	r := new(big.Int)
	switch op {
	case "+":
		return normalize(r.Add(a, b))
	case "-":
		return normalize(r.Sub(a, b))
	case "*":
		return normalize(r.Mul(a, b))
	case "//", "%":
		if b.Sign() == 0 {
			fail("division by zero")
		}
		quotient, remainder := r.QuoRem(a, b, new(big.Int))
		if remainder.Sign() != 0 && remainder.Sign() != b.Sign() {
			quotient.Sub(quotient, big.NewInt(1))
			remainder.Add(remainder, b)
		}
		if op == "//" {
			return normalize(quotient)
		}
		return normalize(remainder)
	}

	if b.Sign() < 0 {
		return power(a, b)
	}

	one := a.IsInt64() && a.Int64() >= -1 && a.Int64() <= 1
	if !b.IsInt64() || !one && int64(a.BitLen()-1)*b.Int64() > maxDigits*10/3 || b.Int64() > 1<<20 {
		fail("an integer has more than %d digits", maxDigits)
	}

	return normalize(r.Exp(a, b, nil))
}

// floorDivide returns the quotient and the remainder of two floats as Python computes them.
func floorDivide(x, y float64) (quotient, remainder float64) {
	remainder = math.Mod(x, y)
	quotient = (x - remainder) / y
	if remainder != 0 {
		if (y < 0) != (remainder < 0) {
			remainder += y
			quotient--
		}
	} else {
		remainder = math.Copysign(0, y)
	}

	if quotient != 0 {
		floor := math.Floor(quotient)
		if quotient-floor > 0.5 {
			floor++
		}
		return floor, remainder
	}

	return math.Copysign(0, x/y), remainder
}

// power returns a power as a float. It supports only whole exponents, for which the result is exact up to
// the final rounding.
func power(a, b value) value {
	switch v := b.(type) {
	case *big.Int:
		if v.IsInt64() {
			b = v.Int64()
		}
	case bool:
		b = boolInt(v)
	}

	exponent := toFloat(b)
	if exponent != math.Trunc(exponent) || math.Abs(exponent) > 64 {
		fail("** with the exponent %s is not supported", floatText(exponent))
	}

	base := toExact(a)
	if base.Sign() == 0 && exponent < 0 {
		fail("0 cannot be raised to a negative power")
	}

	result := big.NewRat(1, 1)
	for range int(math.Abs(exponent)) {
		result.Mul(result, base)
	}

	if exponent < 0 {
		result.Inv(result)
	}

	f, _ := result.Float64()
	if f == 0 && math.Signbit(toFloatSafe(a)) && int(exponent)%2 != 0 {
		f = math.Copysign(0, -1)
	}

	return checkFloat(f)
}

// toFloatSafe returns a number as a float, or 0 if it is too large.
func toFloatSafe(v value) float64 {
	if f, ok := v.(float64); ok {
		return f
	}
	f, _ := new(big.Float).SetInt(toBig(v)).Float64()
	return f
}

// integerText returns the digits of an integer.
func integerText(v value) string {
	i := toBig(v)
	s := i.String()
	if len(s) > maxDigits+1 || len(s) > maxDigits && s[0] != '-' {
		fail("an integer has more than %d digits", maxDigits)
	}
	return s
}

// floatText formats a float like Python's repr.
func floatText(f float64) string {
	checkFloat(f)
	s := strconv.FormatFloat(f, 'e', -1, 64)
	exponent, _ := strconv.Atoi(s[strings.IndexByte(s, 'e')+1:])
	if exponent < -4 || exponent >= 16 {
		return s
	}

	s = strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}

	return s
}

// truncate returns a float as an integer, without its fraction.
func truncate(f float64) value {
	i, _ := new(big.Float).SetFloat64(checkFloat(f)).Int(nil)
	return normalize(i)
}

// round returns a number rounded to the given number of digits after the decimal point, as Python's round
// does.
func round(v value, digits int) value {
	if isInteger(v) {
		if digits >= 0 {
			return normalize(toBig(v))
		}
		return roundInteger(toBig(v), -digits)
	}

	f, ok := v.(float64)
	switch {
	case !ok:
		fail("%s cannot be rounded", describe(v))
	case digits < 0:
		fail("rounding a float to %d digits is not supported", digits)
	case digits > 300:
		return f
	}

	rounded, err := strconv.ParseFloat(strconv.FormatFloat(f, 'f', digits, 64), 64)
	if err != nil {
		fail("rounding %s: %v", floatText(f), err)
	}

	return rounded
}

// roundInteger rounds an integer to a multiple of a power of ten, with ties to even.
func roundInteger(i *big.Int, zeros int) value {
	if zeros > maxDigits {
		return int64(0)
	}

	unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(zeros)), nil)
	quotient, remainder := new(big.Int).DivMod(i, unit, new(big.Int))
	switch new(big.Int).Lsh(remainder, 1).Cmp(unit) {
	case 1:
		quotient.Add(quotient, big.NewInt(1))
	case 0:
		quotient.Add(quotient, big.NewInt(int64(quotient.Bit(0))))
	}

	return normalize(quotient.Mul(quotient, unit))
}

// checkDigits fails if a text contains digits other than 0 to 9, which Python also reads as numbers.
func checkDigits(s string) {
	for _, r := range s {
		if r > unicode.MaxASCII && unicode.IsDigit(r) {
			fail("converting %.40q to a number is not supported", s)
		}
	}
}

// parseInteger parses an integer like Python's int.
func parseInteger(s string, base int) (value, bool) {
	s = trim(s)
	checkDigits(s)
	sign := ""
	if s != "" && (s[0] == '-' || s[0] == '+') {
		sign, s = s[:1], s[1:]
	}

	if base != 0 && base != 10 {
		prefix := map[int]string{2: "0b", 8: "0o", 16: "0x"}[base]
		if prefix != "" && len(s) > 2 && strings.EqualFold(s[:2], prefix) {
			s = strings.TrimPrefix(s[2:], "_")
		}
	}

	if base < 2 || base > 36 {
		fail("converting to an integer with the base %d is not supported", base)
	}

	digits := strings.ReplaceAll(s, "_", "")
	if digits == "" || strings.Contains(s, "__") || s[0] == '_' || s[len(s)-1] == '_' ||
		strings.ContainsAny(digits, "+-") || len(digits) > maxDigits {
		return nil, false
	}

	i, ok := new(big.Int).SetString(sign+digits, base)
	if !ok {
		return nil, false
	}

	return normalize(i), true
}

// parseFloat parses a float like Python's float.
func parseFloat(s string) (float64, bool) {
	s = trim(s)
	checkDigits(s)
	rest := s
	if rest != "" && (rest[0] == '-' || rest[0] == '+') {
		rest = rest[1:]
	}

	switch strings.ToLower(rest) {
	case "inf", "infinity", "nan":
		fail("infinite numbers and NaN are not supported")
	}

	n := digits(rest, 0)
	fraction := 0
	if n < len(rest) && rest[n] == '.' {
		fraction = digits(rest, n+1)
		if n+fraction == 0 {
			return 0, false
		}
		n += 1 + fraction
	}

	if n == 0 {
		return 0, false
	}

	if n < len(rest) && (rest[n] == 'e' || rest[n] == 'E') {
		m := n + 1 + len(signAt(rest, n+1))
		d := digits(rest, m)
		if d == 0 {
			return 0, false
		}
		n = m + d
	}

	if n != len(rest) {
		return 0, false
	}

	f, _ := strconv.ParseFloat(strings.ReplaceAll(s, "_", ""), 64)
	return checkFloat(f), true
}
