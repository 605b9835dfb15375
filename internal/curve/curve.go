// Package curve describes how the loss of a run falls as the run spends its budget.
package curve

import "math"

// Point is the loss, Y, after X has been spent.
type Point struct{ X, Y float64 }

// Trend fits
//
//	Y = level − fall·ln(X)
//
// by least squares to the part of a curve from two thirds of its last X onward, because the loss of a
// run falls by about the same amount each time the spending grows by the same factor. ok is false if
// fewer than four points have a positive X, or if all share one X.
func Trend(points []Point) (fall, level float64, ok bool) {
	if len(points) == 0 {
		return 0, 0, false
	}

	from := points[len(points)-1].X * 2 / 3
	var n, sx, sy, sxx, sxy float64
	for _, p := range points {
		if p.X < from || p.X <= 0 {
			continue
		}
		x := math.Log(p.X)
		n, sx, sy, sxx, sxy = n+1, sx+x, sy+p.Y, sxx+x*x, sxy+x*p.Y
	}

	if spread := n*sxx - sx*sx; n >= 4 && spread > 1e-12*n*n {
		fall = -(n*sxy - sx*sy) / spread
		return fall, (sy + fall*sx) / n, true
	}

	return 0, 0, false
}

// Law predicts the loss of a run as a function of its spending:
//
//	Y(X) = level + gain·X^(−power)
//
// The losses of language models follow such laws in time, tokens and FLOPs (Kaplan et al., "Scaling
// Laws for Neural Language Models", 2020).
type Law struct{ level, gain, power, until float64 }

// At returns the loss at X. Beyond one and a half times the last point it predicts no further
// decrease, because the points do not support the law any further.
func (l Law) At(x float64) float64 { return l.level + l.gain*math.Pow(min(x, l.until), -l.power) }

// Fit tries the given number of powers in this range. With the smallest power, the law is a
// logarithm up to rounding.
const leastPower, mostPower, powers = 0.02, 3, 64

// Fit returns the law that best fits, by least squares, the points from a third of the last X onward.
//
// ok is false if there are fewer than eight such points, if they all share about the same X, or if
// the loss does not fall. It is also false if a law fitted to the first two thirds would have failed
// to predict the last third, as happens early in a run or after a change of the learning rate, when
// the loss does not follow a law yet.
func Fit(points []Point) (best Law, ok bool) {
	if best, ok = fit(points); !ok {
		return best, false
	}

	end := points[len(points)-1].X
	var before, after []Point
	for _, p := range points {
		if p.X <= end*2/3 {
			before = append(before, p)
		} else {
			after = append(after, p)
		}
	}

	told, ok := fit(before)
	if !ok || len(after) == 0 {
		return best, false
	}

	missed, fell := 0.0, 0.0
	for _, p := range after {
		missed += (p.Y - told.At(p.X)) / float64(len(after))
		fell += (best.At(end*2/3) - best.At(p.X)) / float64(len(after))
	}

	return best, math.Abs(missed) <= mostMissed*fell
}

// mostMissed is the largest tolerated error of such a prediction, as a fraction of the fall in the
// last third.
const mostMissed = 0.5

// fit implements Fit without checking the prediction of the last third.
func fit(points []Point) (best Law, ok bool) {
	if len(points) == 0 {
		return best, false
	}

	from := points[len(points)-1].X / 3
	var used []Point
	for _, p := range points {
		if p.X >= from && p.X > 0 {
			used = append(used, p)
		}
	}

	if len(used) < 8 || used[len(used)-1].X < 1.5*used[0].X {
		return best, false
	}

	least := math.Inf(1)
	for i := range powers {
		power := leastPower * math.Pow(mostPower/leastPower, float64(i)/(powers-1))
		if l, squares := fitPower(used, power); squares < least {
			best, least = l, squares
		}
	}

	return best, best.gain > 0
}

// fitPower returns the best law with the given power, and the sum of its squared errors.
func fitPower(points []Point, power float64) (Law, float64) {
	var mx, my float64
	n := float64(len(points))
	for _, p := range points {
		mx += math.Pow(p.X, -power) / n
		my += p.Y / n
	}

	var xx, xy float64
	for _, p := range points {
		x := math.Pow(p.X, -power) - mx
		xx += x * x
		xy += x * (p.Y - my)
	}

	l := Law{my - xy/xx*mx, xy / xx, power, points[len(points)-1].X * 3 / 2}
	squares := 0.0
	for _, p := range points {
		e := p.Y - l.At(p.X)
		squares += e * e
	}

	return l, squares
}
