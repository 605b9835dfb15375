package tasks

import (
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
)

// pythonRandom is Python's random.Random, seeded with a non-negative integer below 2³². With it, few-shot
// examples and bootstrap estimates are the same as in Python programs. The generator is MT19937 (Matsumoto and Nishimura, "Mersenne Twister", 1998).
type pythonRandom struct {
	state [624]uint32
	next  int
}

// newPythonRandom returns a generator like random.Random(seed).
func newPythonRandom(seed uint32) *pythonRandom {
	r := &pythonRandom{next: len(pythonRandom{}.state)}
	s := &r.state
	s[0] = 19650218
	for i := 1; i < len(s); i++ {
		s[i] = 1812433253*(s[i-1]^s[i-1]>>30) + uint32(i)
	}

	// Mix in the seed, which is a key of a single word.
	i := 1
	advance := func() {
		if i++; i == len(s) {
			s[0], i = s[len(s)-1], 1
		}
	}
	for range len(s) {
		s[i] = (s[i] ^ (s[i-1]^s[i-1]>>30)*1664525) + seed
		advance()
	}
	for range len(s) - 1 {
		s[i] = (s[i] ^ (s[i-1]^s[i-1]>>30)*1566083941) - uint32(i)
		advance()
	}
	s[0] = 1 << 31

	return r
}

// uint32 returns 32 random bits.
func (r *pythonRandom) uint32() uint32 {
	if r.next == len(r.state) {
		r.twist()
	}

	y := r.state[r.next]
	r.next++
	y ^= y >> 11
	y ^= y << 7 & 0x9d2c5680
	y ^= y << 15 & 0xefc60000
	return y ^ y>>18
}

// twist computes the next 624 words of the state.
func (r *pythonRandom) twist() {
	s := &r.state
	for i := range s {
		y := s[i]&(1<<31) | s[(i+1)%len(s)]&(1<<31-1)
		s[i] = s[(i+397)%len(s)] ^ y>>1 ^ y&1*0x9908b0df
	}
	r.next = 0
}

// float64 returns a number in [0, 1), like random.random().
func (r *pythonRandom) float64() float64 {
	a, b := r.uint32()>>5, r.uint32()>>6
	return (float64(a)*(1<<26) + float64(b)) / (1 << 53)
}

// below returns a number in [0, n), like random.randrange(n), for 1 ≤ n < 2³².
func (r *pythonRandom) below(n int) int {
	bits := 0
	for n>>bits > 0 {
		bits++
	}

	for {
		if v := int(r.uint32() >> (32 - bits)); v < n {
			return v
		}
	}
}

// sample returns k of the indices below n in random order, like random.sample(range(n), k), for k ≤ n.
func (r *pythonRandom) sample(n, k int) []int {
	// Python draws from a shrinking list if the list takes less memory than a set of the drawn indices.
	setSize := 21
	if k > 5 {
		setSize += int(math.Pow(4, math.Ceil(math.Log(float64(k*3))/math.Log(4))))
	}

	drawn := make([]int, 0, k)
	if n <= setSize {
		pool := make([]int, n)
		for i := range pool {
			pool[i] = i
		}
		for i := range k {
			j := r.below(n - i)
			drawn = append(drawn, pool[j])
			pool[j] = pool[n-i-1]
		}
		return drawn
	}

	for len(drawn) < k {
		if j := r.below(n); !slices.Contains(drawn, j) {
			drawn = append(drawn, j)
		}
	}
	return drawn
}

// shuffled returns the indices below n in random order, like random.shuffle.
func (r *pythonRandom) shuffled(n int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}

	for i := n - 1; i > 0; i-- {
		j := r.below(i + 1)
		order[i], order[j] = order[j], order[i]
	}
	return order
}

// isSpace reports whether a character is white space for Python's str.strip and for \s in regular
// expressions.
func isSpace(r rune) bool {
	switch {
	case r >= '\t' && r <= '\r', r >= 0x1c && r <= ' ', r == 0x85, r == 0xa0, r == 0x1680,
		r >= 0x2000 && r <= 0x200a, r == 0x2028, r == 0x2029, r == 0x202f, r == 0x205f, r == 0x3000:
		return true
	}
	return false
}

// spaces is the class of the characters of isSpace in regular expressions.
const spaces = `[\t-\r\x1c-\x20\x{85}\p{Z}]`

// strip returns text without leading and trailing white space, like str.strip.
func strip(text string) string { return strings.TrimFunc(text, isSpace) }

// capitalize returns text with a title-case first character and the rest in lower case, like
// str.capitalize.
func capitalize(text string) string {
	_, n := utf8.DecodeRuneInString(text)
	first, lower := text[:n], cases.Lower(language.Und)

	// The lower case of a character can depend on the characters before it.
	rest := strings.TrimPrefix(lower.String(text), lower.String(first))
	return cases.Title(language.Und).String(first) + rest
}

// countWords returns the number of parts of re.split(r"\s+", text).
func countWords(text string) int {
	words, inSpace := 1, false
	for _, r := range text {
		space := isSpace(r)
		if space && !inSpace {
			words++
		}
		inSpace = space
	}
	return words
}

// replaceInvalid returns text as valid UTF-8. Like the decoders of Rust and Python, it replaces each
// incomplete character by a single replacement character, however many bytes it has.
func replaceInvalid(text []byte) string {
	var out strings.Builder
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		if r == utf8.RuneError && n == 1 {
			n = brokenPart(text)
		}
		out.WriteRune(r)
		text = text[n:]
	}
	return out.String()
}

// brokenPart returns the length of the longest start of text, at least 1, that starts some character.
func brokenPart(text []byte) int {
	for n := min(3, len(text)); n > 1; n-- {
		if !utf8.FullRune(text[:n]) {
			return n
		}
	}
	return 1
}
