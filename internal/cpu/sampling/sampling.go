// Package sampling draws tokens from logits. It defines the numbers that every implementation must
// reproduce, on CPUs and on GPUs.
//
// A token's weight, which is proportional to its probability, is an integer. Sums of integers don't
// depend on the order of the additions, so a GPU that adds up a vocabulary in parallel draws exactly
// the token that a CPU draws. The weights themselves come from float32 operations that round after
// every step.
package sampling

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// ErrNotFinite reports a logit that is NaN or +Inf.
var ErrNotFinite = errors.New("logits are not finite")

// A Rule describes how one token is drawn from logits.
type Rule struct {
	// Scale is log₂(e) divided by the temperature. It is 0 if the temperature is infinite.
	Scale float32
	// Greedy selects the most probable token and ignores the fields below that restrict or draw tokens.
	Greedy bool
	// TopK keeps only the most probable tokens; 0 keeps all.
	TopK int
	// TopP keeps the smallest set of most probable tokens with at least this share of the weight, in
	// units of 2⁻³². It applies after TopK; 0 keeps all.
	TopP uint64
	// MinWeight drops tokens with smaller weights after TopK and TopP.
	MinWeight uint64
	// Uniform is a random number, uniform in [0, 2⁶⁴).
	Uniform uint64

	// Vocab limits the tokens to smaller ids, unless it is 0. Allowed, unless it is nil, has a bit for every token that
	// may be drawn. It applies on CPUs only.
	Vocab   int
	Allowed []uint64

	// Repetition divides the positive logits of tokens that have occurred, and multiplies their negative
	// logits. Presence and Frequency are subtracted as [Entry.Drawn] describes.
	Repetition, Presence, Frequency float32
	// Entries lists changes to the logits of tokens, by increasing id.
	Entries []Entry
	// Pending lists tokens that have been drawn since Entries was made.
	Pending []int
}

// An Entry describes how the logit of a token changes.
type Entry struct {
	ID       int
	Occurred bool // in the text, so that Repetition applies
	// Drawn is the number of times that the token has been drawn. If it is positive, Presence and
	// Frequency times Drawn are subtracted from the logit.
	Drawn int
	Bias  float32 // added to the logit
}

// A Pass describes the tokens to draw in a pass over a model on a device.
type Pass struct {
	// From has an element for each of the first rows of the pass: the row of the preceding pass that
	// supplies the input token, or −1 if the host supplies the token.
	From []int
	// Rules has a rule for each of the first rows with logits, or nil for a row without a token.
	Rules []*Rule
	// Rows lists the rows of the pass that have logits. If a rule has a pending token, this token is the
	// input of the rule's row. A rule may have at most one.
	Rows []int
}

// MostEntries is the largest number of entries of all rules of a pass.
const MostEntries = 1 << 14

// One is the weight of the most probable token.
const One = 1 << 40

// smallest is the exponent below which a weight is 0.
const smallest = -41

// These coefficients approximate 2^f for 0 ≤ f ≤ 1 with a relative error below 3e-9, before rounding. The
// kernel in cudaops/internal/kernel/sample uses the same numbers.
const (
	exp1 = 0.6931469951055382
	exp2 = 0.24023005134917472
	exp3 = 0.05548165297234183
	exp4 = 0.00968310128987789
	exp5 = 0.001239498692757616
	exp6 = 0.0002187005903097338
)

// Weight returns the weight of a token. d ≤ 0 is the difference between the token's logit and the largest
// one.
func Weight(d, scale float32) uint64 {
	y := float32(d * scale)
	if !(y > smallest) {
		return 0
	}

	// The conversions keep the compiler from fusing a multiplication with an addition.
	n := int32(y)
	if float32(n) > y {
		n--
	}
	f := float32(y - float32(n))
	p := float32(exp6)
	p = float32(p*f) + exp5
	p = float32(p*f) + exp4
	p = float32(p*f) + exp3
	p = float32(p*f) + exp2
	p = float32(p*f) + exp1
	p = float32(p*f) + 1
	return uint64(int32(p*(1<<23))) << 17 >> (-n & 63)
}

// ScaleOf returns the Scale for a positive temperature.
func ScaleOf(temperature float64) float32 {
	return float32(min(math.Log2E/temperature, math.MaxFloat32))
}

// Narrow returns x as a float32. A finite number remains finite.
func Narrow(x float64) float32 {
	if x-x != 0 {
		return float32(x)
	}
	return float32(max(-math.MaxFloat32, min(x, math.MaxFloat32)))
}

// ShareOf returns the TopP for a share between 0 and 1. It is positive if the share is.
func ShareOf(p float64) uint64 {
	if p <= 0 {
		return 0
	}
	return max(1, uint64(math.RoundToEven(p*(1<<32))))
}

// WeightOf returns the MinWeight for a share of the weight of the most probable token.
func WeightOf(p float64) uint64 { return uint64(math.Ceil(p * One)) }

// Needed returns the smallest weight that has at least a share of the total, which must be below 2⁵⁹.
func Needed(share, total uint64) uint64 {
	high, low := total>>32, total&(1<<32-1)
	return share*high + (share*low+(1<<32-1))>>32
}

// Chosen returns a number below total that is proportional to a random number.
func Chosen(uniform, total uint64) uint64 {
	high, _ := bits.Mul64(uniform, total)
	return high
}

// A Drawer draws tokens. It holds scratch memory. The zero value is ready for use.
type Drawer[T cpu.Float] struct {
	adjusted []T
	weights  []uint64
	choices  []choice[T]
}

// A choice is a token that may be drawn.
type choice[T cpu.Float] struct {
	id     int
	logit  T
	weight uint64
}

// moreProbable orders choices by decreasing probability. Of tokens with equal logits, the one with the
// smallest id counts as the most probable.
func moreProbable[T cpu.Float](a, b choice[T]) int {
	return cmp.Or(cmp.Compare(b.logit, a.logit), cmp.Compare(a.id, b.id))
}

// Draw returns the token that a rule draws from logits, without changing them. A logit of −Inf excludes
// a token. It is an error if a logit is NaN or +Inf, or if no token is left.
func (d *Drawer[T]) Draw(logits []T, r *Rule) (int, error) {
	if r.Vocab > 0 && r.Vocab < len(logits) {
		logits = logits[:r.Vocab]
	}

	x := d.adjust(logits, r)
	best, largest := -1, T(math.Inf(-1))
	for id, v := range x {
		if v <= largest { // false for NaN
			continue
		}
		if v-v != 0 {
			return 0, notFinite(id, v)
		}
		best, largest = id, v
	}

	switch {
	case best < 0:
		which := ""
		if r.Allowed != nil {
			which = " that the constraint allows"
		}
		return 0, fmt.Errorf("none of %d logits%s is more than -Inf", len(logits), which)
	case r.Greedy || r.TopK == 1:
		return best, nil
	case r.TopK > 0 && r.TopK < len(x):
		d.choices = mostProbable(d.choices[:0], x, r.TopK)
		return d.drawFew(r, largest), nil
	}

	total := d.weigh(x, largest, r.Scale)
	if r.TopP > 0 && Needed(r.TopP, total) < total {
		d.nucleus(x, largest, r.Scale, Needed(r.TopP, total))
		return drawFrom(d.choices, r), nil
	}
	return d.drawAny(r, total), nil
}

func notFinite[T cpu.Float](id int, v T) error {
	return fmt.Errorf("%w: logits[%d] is %v", ErrNotFinite, id, v)
}

// adjust returns the logits after penalties and bias.
func (d *Drawer[T]) adjust(logits []T, r *Rule) []T {
	if len(r.Entries) == 0 && len(r.Pending) == 0 && r.Allowed == nil {
		return logits
	}

	d.adjusted = append(d.adjusted[:0], logits...)
	x := d.adjusted
	pending := func(id int) (n int) {
		for _, p := range r.Pending {
			if p == id {
				n++
			}
		}
		return n
	}

	for _, e := range r.Entries {
		if e.ID < len(x) {
			n := pending(e.ID)
			x[e.ID] = adjusted(r, x[e.ID], Entry{e.ID, e.Occurred || n > 0, e.Drawn + n, e.Bias})
		}
	}

	for i, id := range r.Pending {
		_, listed := slices.BinarySearchFunc(r.Entries, id, func(e Entry, id int) int { return cmp.Compare(e.ID, id) })
		if !listed && !slices.Contains(r.Pending[:i], id) && id < len(x) {
			x[id] = adjusted(r, x[id], Entry{id, true, pending(id), 0})
		}
	}
	if r.Allowed != nil {
		for id := range x {
			if id/64 >= len(r.Allowed) || r.Allowed[id/64]>>(id%64)&1 == 0 {
				x[id] = T(math.Inf(-1))
			}
		}
	}
	return x
}

// adjusted returns a token's logit after penalties and bias.
func adjusted[T cpu.Float](r *Rule, logit T, e Entry) T {
	if logit-logit != 0 {
		return logit
	}

	if e.Occurred && r.Repetition != 0 && r.Repetition != 1 {
		if logit > 0 {
			logit /= T(r.Repetition)
		} else {
			logit *= T(r.Repetition)
		}
	}
	if e.Drawn > 0 {
		logit -= T(T(e.Drawn)*T(r.Frequency)) + T(r.Presence)
	}
	return logit + T(e.Bias)
}

// mostProbable appends the k most probable tokens to choices, in any order.
func mostProbable[T cpu.Float](choices []choice[T], x []T, k int) []choice[T] {
	bound := T(math.Inf(-1)) // the smallest logit of the choices once there are k choices
	for id, v := range x {
		if v <= bound {
			continue // later ids lose ties
		}
		c := choice[T]{id: id, logit: v}
		if len(choices) < k {
			choices = append(choices, c)
			if len(choices) == k {
				for at := k/2 - 1; at >= 0; at-- {
					sink(choices, at)
				}
				bound = choices[0].logit
			}
			continue
		}
		choices[0] = c
		sink(choices, 0)
		bound = choices[0].logit
	}
	return choices
}

// sink restores a heap that has the least probable choice at its root, after the choice at an index has
// become more probable.
func sink[T cpu.Float](heap []choice[T], at int) {
	for {
		least := at
		for child := 2*at + 1; child <= 2*at+2 && child < len(heap); child++ {
			if moreProbable(heap[child], heap[least]) > 0 {
				least = child
			}
		}
		if least == at {
			return
		}
		heap[at], heap[least] = heap[least], heap[at]
		at = least
	}
}

// drawFew draws one of the choices that remain after TopK.
func (d *Drawer[T]) drawFew(r *Rule, largest T) int {
	total := uint64(0)
	for i := range d.choices {
		c := &d.choices[i]
		c.weight = Weight(float32(c.logit-largest), r.Scale)
		total += c.weight
	}
	if r.TopP > 0 {
		d.choices = atLeast(d.choices, Needed(r.TopP, total))
	}
	return drawFrom(d.choices, r)
}

// atLeast returns the most probable choices that together have a given weight.
func atLeast[T cpu.Float](choices []choice[T], weight uint64) []choice[T] {
	slices.SortFunc(choices, moreProbable)
	sum := uint64(0)
	for i, c := range choices {
		if sum += c.weight; sum >= weight {
			return choices[:i+1]
		}
	}
	return choices
}

// drawFrom draws one of the choices with at least MinWeight, in proportion to their weights.
func drawFrom[T cpu.Float](choices []choice[T], r *Rule) int {
	kept := slices.DeleteFunc(choices, func(c choice[T]) bool { return c.weight < r.MinWeight })
	slices.SortFunc(kept, func(a, b choice[T]) int { return cmp.Compare(a.id, b.id) })
	total := uint64(0)
	for _, c := range kept {
		total += c.weight
	}

	rest := Chosen(r.Uniform, total)
	for _, c := range kept {
		if rest < c.weight {
			return c.id
		}
		rest -= c.weight
	}
	panic("unreachable: the weights add up to the total")
}

// weigh computes the weights of all tokens and returns their sum.
func (d *Drawer[T]) weigh(x []T, largest T, scale float32) (total uint64) {
	d.weights = slices.Grow(d.weights[:0], len(x))[:len(x)]
	for i, v := range x {
		w := Weight(float32(v-largest), scale)
		d.weights[i] = w
		total += w
	}
	return total
}

// drawAny draws one of the tokens with at least MinWeight.
func (d *Drawer[T]) drawAny(r *Rule, total uint64) int {
	if r.MinWeight > 0 {
		total = 0
		for i, w := range d.weights {
			if w < r.MinWeight {
				d.weights[i] = 0
			}
			total += d.weights[i]
		}
	}

	rest := Chosen(r.Uniform, total)
	for id, w := range d.weights {
		if rest < w {
			return id
		}
		rest -= w
	}
	panic("unreachable: the weights add up to the total")
}

// bucketsPerBit is the number of buckets of nucleus for each halving of the weight.
const bucketsPerBit = 16

// nucleus selects the most probable tokens that together have a given weight. It sorts only the tokens of
// one bucket, as most of the vocabulary is either in or out.
func (d *Drawer[T]) nucleus(x []T, largest T, scale float32, needed uint64) {
	var sums [-smallest*bucketsPerBit + 1]uint64
	bucketOf := func(v T) int { return int(-float32(v-largest) * scale * bucketsPerBit) }
	for i, w := range d.weights {
		if w > 0 {
			sums[bucketOf(x[i])] += w
		}
	}

	last := 0
	for ; sums[last] < needed; last++ {
		needed -= sums[last]
	}

	d.choices = d.choices[:0]
	for i, w := range d.weights {
		if w > 0 && bucketOf(x[i]) == last {
			d.choices = append(d.choices, choice[T]{i, x[i], w})
		}
	}
	d.choices = atLeast(d.choices, needed)

	for i, w := range d.weights {
		if w > 0 && bucketOf(x[i]) < last {
			d.choices = append(d.choices, choice[T]{i, x[i], w})
		}
	}
}
