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
	digits    int      // before the decimal point
	low, high *big.Int // in units of 10^-scale; nil without a bound
	texts     []string
	ids       map[string]int
}

// newNumber returns a lexer for multiples of 10^-scale. A nil bound is none. An exclusive bound is not
// accepted itself.
func newNumber(scale int, low, high *big.Rat, exclusiveLow, exclusiveHigh bool) *numberLexer {
	n := &numberLexer{scale: scale, digits: integerDigits, ids: map[string]int{}}
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

func (n *numberLexer) intern(text string) int {
	id, ok := n.ids[text]
	if !ok {
		id = len(n.texts)
		n.texts = append(n.texts, text)
		n.ids[text] = id
	}
	return id
}

func (n *numberLexer) start() int {
	if !n.contains(new(big.Int).Neg(n.largest()), n.largest()) {
		return dead
	}
	return n.intern("")
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
	text, negative = strings.CutPrefix(text, "-")
	whole, fraction, point = strings.Cut(text, ".")
	return negative, whole, fraction, point
}

func (n *numberLexer) next(state int, b byte) int {
	text := n.texts[state]
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
	if !n.possible(text) {
		return dead
	}
	return n.intern(text)
}

// possible reports whether a number within the bounds starts with the text.
func (n *numberLexer) possible(text string) bool {
	negative, whole, fraction, point := n.parse(text)
	within := func(low, high *big.Int) bool {
		if negative {
			low, high = new(big.Int).Neg(high), new(big.Int).Neg(low)
		}
		return n.contains(low, high)
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
		return within(one, n.largest())
	case whole == "":
		return within(new(big.Int), n.largest())
	case negative && whole == "0" && n.scale == 0:
		return false
	case point:
		return within(span(whole+fraction, n.scale-len(fraction)))
	}
	for more := 0; len(whole)+more <= n.digits; more++ {
		if within(span(whole, more+n.scale)) {
			return true
		}
		if whole == "0" {
			break
		}
	}
	return false
}

func (n *numberLexer) accepts(state int) bool {
	negative, whole, fraction, point := n.parse(n.texts[state])
	if whole == "" || point && fraction == "" {
		return false
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
