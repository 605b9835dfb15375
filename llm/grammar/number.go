package grammar

import (
	"fmt"
	"math/big"
	"strings"
)

// The largest numbers of digits that generated numbers have before and after the decimal point, so that
// they end and other programs read them without loss.
const (
	integerDigits  = 18
	fractionDigits = 15
)

// A numberLexer accepts decimal numbers from low to high, without exponents. The bounds and all numbers are
// multiples of 10^-scale.
type numberLexer struct {
	scale     int
	digits    int           // before the decimal point
	low, high *big.Int      // in units of 10^-scale; nil without a bound
	texts     table[string] // by state; see shape
}

// newNumber returns a lexer for the multiples of 10^-scale between two bounds, either of which can be
// nil. An exclusive bound is not accepted itself.
func newNumber(scale int, low, high *big.Rat, exclusiveLow, exclusiveHigh bool) *numberLexer {
	n := &numberLexer{scale: scale, digits: integerDigits}
	unit := new(big.Rat).SetInt(power(scale))
	if low != nil {
		// The smallest multiple that is at least low.
		x := new(big.Rat).Mul(low, unit)
		n.low = new(big.Int).Neg(floor(new(big.Rat).Neg(x)))
		if exclusiveLow && x.IsInt() {
			n.low.Add(n.low, big.NewInt(1))
		}
	}
	if high != nil {
		x := new(big.Rat).Mul(high, unit)
		n.high = floor(x)
		if exclusiveHigh && x.IsInt() {
			n.high.Sub(n.high, big.NewInt(1))
		}
	}
	for _, bound := range []*big.Int{n.low, n.high} {
		if bound != nil {
			n.digits = max(n.digits, len(new(big.Int).Abs(bound).String())-scale)
		}
	}
	return n
}

// floor returns the largest integer that is at most x.
func floor(x *big.Rat) *big.Int { return new(big.Int).Div(x.Num(), x.Denom()) }

// power returns 10^n.
func power(n int) *big.Int { return new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(n)), nil) }

func (n *numberLexer) start() int {
	if !n.contains(new(big.Int).Neg(n.largest()), n.largest()) {
		return dead
	}
	return n.texts.id("")
}

// largest returns the largest number with the permitted digits.
func (n *numberLexer) largest() *big.Int {
	x := power(n.digits + n.scale)
	return x.Sub(x, big.NewInt(1))
}

// contains reports whether any number from low to high is within the bounds.
func (n *numberLexer) contains(low, high *big.Int) bool {
	return (n.low == nil || high.Cmp(n.low) >= 0) && (n.high == nil || low.Cmp(n.high) <= 0) &&
		(n.low == nil || n.high == nil || n.low.Cmp(n.high) <= 0)
}

// parse splits a text, which next has built, into its parts.
func (n *numberLexer) parse(text string) (negative bool, whole, fraction string, point bool) {
	text, negative = strings.CutPrefix(strings.TrimPrefix(text, free), "-")
	whole, fraction, point = strings.Cut(text, ".")
	return negative, whole, fraction, point
}

func (n *numberLexer) next(state int, b byte) int {
	text := n.texts.values[state]
	_, whole, fraction, point := n.parse(text)
	switch {
	case b == '-':
		if text != "" {
			return dead
		}
	case b == '.':
		if point || whole == "" || n.scale == 0 {
			return dead
		}
	case b < '0' || b > '9':
		return dead
	case point && len(fraction) == n.scale, !point && (whole == "0" || len(whole) == n.digits):
		return dead
	}

	text += string(b)
	possible, certain := n.possible(text)
	if !possible {
		return dead
	}
	if certain {
		text = shape(text)
	}
	return n.texts.id(text)
}

// free is the start of a shape.
const free = "*"

// shape returns the form of a number, with the same text for all numbers of that form. It replaces a
// number once every continuation is within the bounds, so that there are only a few states.
func shape(text string) string {
	digits := strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return '1'
		}
		return r
	}, strings.TrimPrefix(text, free))
	if strings.HasPrefix(text, "0") || strings.HasPrefix(text, "-0") || strings.HasPrefix(text, free+"0") ||
		strings.HasPrefix(text, free+"-0") {
		digits = strings.Replace(digits, "1", "0", 1)
	}
	return free + digits
}

// possible reports whether a number within the bounds starts with the text, and whether all numbers that do
// are certain to be within the bounds.
func (n *numberLexer) possible(text string) (possible, certain bool) {
	negative, whole, fraction, point := n.parse(text)
	if strings.HasPrefix(text, free) {
		return !(negative && whole == "0" && n.scale == 0), true
	}
	certain = true
	within := func(low, high *big.Int) bool {
		if negative {
			low, high = new(big.Int).Neg(high), new(big.Int).Neg(low)
		}
		possible = possible || n.contains(low, high)
		certain = certain && n.contains(low, low) && n.contains(high, high)
		return possible && !certain
	}

	one := big.NewInt(1)
	span := func(digits string, free int) (low, high *big.Int) {
		low, _ = new(big.Int).SetString(digits, 10)
		high = new(big.Int).Add(low, one)
		low, high = low.Mul(low, power(free)), high.Mul(high, power(free))
		return low, high.Sub(high, one)
	}

	switch {
	case whole == "" && n.scale == 0: // JSON knows -0, but not every program does
		within(one, n.largest())
		return possible, false
	case whole == "":
		within(new(big.Int), n.largest())
		return possible, false
	case negative && whole == "0" && n.scale == 0:
		return false, false
	case point:
		within(span(whole+fraction, n.scale-len(fraction)))
		return possible, certain
	}
	for more := 0; len(whole)+more <= n.digits; more++ {
		if enough := within(span(whole, more+n.scale)); enough || whole == "0" {
			break
		}
	}
	return possible, certain
}

func (n *numberLexer) accepts(state int) bool {
	negative, whole, fraction, point := n.parse(n.texts.values[state])
	if whole == "" || point && fraction == "" {
		return false
	}
	if strings.HasPrefix(n.texts.values[state], free) {
		return true
	}
	x, _ := new(big.Int).SetString(whole+fraction+strings.Repeat("0", n.scale-len(fraction)), 10)
	if negative {
		x.Neg(x)
	}
	return n.contains(x, x)
}

// Patterns of numbers without bounds.
var (
	integerPattern = fmt.Sprintf(`-?(0|[1-9][0-9]{0,%d})`, integerDigits-1)
	numberPattern  = integerPattern + fmt.Sprintf(`(\.[0-9]{1,%d})?([eE][-+]?[0-9]{1,2})?`, fractionDigits)
)
