package control

import (
	"math"

	"github.com/kasmina-go/kasmina/state"
)

// An outlook predicts the end of a run by the law
//
//	L(S, T) = level + gain·(1/√T + 1/√S)
//
// for a model of size S that has seen T tokens: the size of the model limits the loss in the same way as
// a text of S tokens would. Level and gain are fitted to the curve of the run. The exponents and the
// size of a block come from earlier runs (docs/lab/growth.md). Which prediction is the lowest does not
// depend on level and gain.
type outlook struct {
	level, gain float64

	size float64 // of the current model, in tokens
	seen float64 // tokens so far
	rest float64 // tokens that the current model could still see
}

// blockSize returns the size that a block with the given number of parameters adds to a model, in tokens. Up
// to fittedBlock, the size of the blocks to which the law was fitted, it is proportional to the number of
// parameters. Wider blocks add less for each parameter: models of 124 million parameters gain from more
// blocks after far fewer tokens for each parameter.
func blockSize(parameters float64) float64 {
	wider := max(1, parameters/fittedBlock)
	return saturation * parameters / wider * math.Pow(wider, widerPower)
}

// A block with at most fittedBlock parameters adds saturation tokens for each parameter. Beyond that, its
// size grows with the power widerPower of the number of parameters.
const (
	saturation  = 27
	fittedBlock = 0.81e6
	widerPower  = 0.25
)

// term returns the contribution of a number of tokens to the loss, relative to gain.
func term(tokens float64) float64 { return 1 / math.Sqrt(tokens) }

// loss returns the loss for a value of the parenthesized sum in the law.
func (o outlook) loss(terms float64) float64 { return o.level + o.gain*terms }

// stay returns the final loss without growth.
func (o outlook) stay() float64 { return o.loss(term(o.seen+o.rest) + term(o.size)) }

// A growthOption is a growth that a model could make: its number of blocks grows by factor, and each
// token then costs the run cost times as much of its budget.
type growthOption struct {
	size         int // of the blueprint
	factor, cost float64
	next         []growthOption // growths of the grown model
}

// worth returns the number of tokens that the grown model would have had to see from the start to reach
// the loss of the current model after the given number of tokens.
func (o outlook) worth(tokens float64, g growthOption) float64 {
	terms := term(tokens) + term(o.size) - term(g.factor*o.size)
	return 1 / (terms * terms)
}

// grow returns the final loss of a run that grows after further tokens, followed by the growths in
// g.next, each at the best time, if they lower the loss.
func (o outlook) grow(g growthOption, further float64) float64 {
	grown := o
	grown.size, grown.seen, grown.rest = g.factor*o.size, o.worth(o.seen+further, g), (o.rest-further)/g.cost
	loss := grown.stay()
	for _, n := range g.next {
		if wait := max(0, grown.best(n)-grown.seen); wait < grown.rest {
			loss = min(loss, grown.grow(n, wait))
		}
	}
	return loss
}

// fromStart returns the lowest final loss of a model that has had more blocks since the start of the run, and that
// number of blocks as a multiple of the current one. The candidates are the models to which the given growths, and
// the growths that can follow them, would lead. tokens is the number of tokens that the current model would see in
// the whole run.
func (o outlook) fromStart(all []growthOption, tokens float64) (loss, factor float64) {
	loss = math.Inf(1)
	for _, g := range all {
		deeper := outlook{level: o.level, gain: o.gain, size: g.factor * o.size, rest: tokens / g.cost}
		if l := deeper.stay(); l < loss {
			loss, factor = l, g.factor
		}
		if l, further := deeper.fromStart(g.next, deeper.rest); l < loss {
			loss, factor = l, g.factor*further
		}
	}
	return loss, factor
}

// delays are the delays that the method later tries, as multiples of the number of tokens seen so
// far.
var delays = []float64{0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32}

// later returns the lowest final loss of a run that grows later, and the number of tokens before that
// growth. The loss is infinite if the run ends before any of the delays.
func (o outlook) later(g growthOption) (loss, further float64) {
	loss = math.Inf(1)
	for _, d := range delays {
		if wait := d * o.seen; wait < o.rest {
			if l := o.grow(g, wait); l < loss {
				loss, further = l, wait
			}
		}
	}
	return loss, further
}

// best returns the number of tokens after which growth lowers the loss the most, for any budget. Beyond
// that point, a token lowers the loss of the current model by less than it costs.
func (o outlook) best(g growthOption) float64 {
	root := (math.Cbrt(g.cost) - 1) / (term(o.size) - term(g.factor*o.size))
	return root * root
}

// leastLevel returns the minimum level of a fit to a curve that started at the loss start and has reached the given
// loss: 0.12 times start, but at least 0.25 and at most 0.4 times loss. Without this minimum, the steep start of the
// curve would make predictions far too low.
func leastLevel(start, loss float64) float64 { return max(0.25*loss, min(0.12*start, 0.4*loss)) }

// fitLaw fits level and gain to a part of a curve that started at a loss of start, using only the second half of
// its tokens. tokens returns the number of tokens after a number of epochs. ok is false unless the curve falls.
func (o *outlook) fitLaw(start float64, points []state.Point, tokens func(epochs int) float64) (ok bool) {
	if len(points) < 2 {
		return false
	}

	first, last := points[0].Epoch-1, points[len(points)-1].Epoch
	half := (tokens(first) + tokens(last)) / 2

	var n, mx, my float64
	for _, p := range points {
		if t := tokens(p.Epoch); t >= half {
			n, mx, my = n+1, mx+term(t), my+p.Loss
		}
	}

	mx, my = mx/n, my/n
	var xx, xy float64
	for _, p := range points {
		if t := tokens(p.Epoch); t >= half {
			x := term(t) - mx
			xx, xy = xx+x*x, xy+x*(p.Loss-my)
		}
	}

	if n < 4 || !(xx > 0) || !(xy > 0) {
		return false
	}

	// Limit the gain: early in a run, the steep start would make the fit far too optimistic.
	end := term(tokens(points[len(points)-1].Epoch))
	loss := my + xy/xx*(end-mx)
	o.gain = min(xy/xx, (loss-leastLevel(start, loss))/(end+term(o.size)))
	o.level = loss - o.gain*(end+term(o.size))
	return o.gain > 0
}
