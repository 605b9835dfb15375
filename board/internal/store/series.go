package store

import (
	"slices"

	"github.com/kasmina-go/kasmina/board/api"
)

// maxPoints bounds a curve: what is more, a screen does not show.
const maxPoints = 1 << 14

// A point is a step.
type point struct{ step, time, loss, rate, norm, speed float64 }

// steps are the points of a run. Once they are maxPoints, each two become one, and from then on
// each stands for twice as many steps. It has their mean loss and gradient norm, and the last of
// all else.
type steps struct {
	points  []point
	stride  int // steps of a point
	partial point
	count   int // steps in partial
	thinned int // how often two have become one: then viewers need all of them again
}

func (s *steps) add(p point) {
	s.stride = max(s.stride, 1)
	s.partial = join(s.partial, p, s.count)
	if s.count++; s.count < s.stride {
		return
	}
	s.points = append(s.points, s.partial)
	s.partial, s.count = point{}, 0
	if len(s.points) < maxPoints {
		return
	}
	for i := range len(s.points) / 2 {
		s.points[i] = join(s.points[2*i], s.points[2*i+1], 1)
	}
	s.points = s.points[:len(s.points)/2]
	s.stride, s.thinned = 2*s.stride, s.thinned+1
}

// join returns a point for n others, whose means are in a, and b.
func join(a, b point, n int) point {
	if n == 0 {
		return b
	}
	w := 1 / float64(n+1)
	mean := func(x, y float64) float64 { return x + w*(y-x) }
	return point{b.step, b.time, mean(a.loss, b.loss), b.rate, mean(a.norm, b.norm), b.speed}
}

// cut drops the points beyond a step: a resumed run makes them again.
func (s *steps) cut(step int) {
	n, _ := slices.BinarySearchFunc(s.points, float64(step)+0.5, func(p point, at float64) int {
		if p.step < at {
			return -1
		}
		return 1
	})
	if n < len(s.points) || s.count > 0 && s.partial.step > float64(step) {
		s.points, s.partial, s.count = s.points[:n], point{}, 0
		s.thinned++
	}
}

// since returns the points from number n on as columns.
func (s *steps) since(n int, to *api.Series) {
	to.Stride = max(s.stride, 1)
	for _, p := range s.points[min(n, len(s.points)):] {
		to.Step = append(to.Step, api.Float(p.step))
		to.Time = append(to.Time, api.Float(p.time))
		to.Loss = append(to.Loss, api.Float(p.loss))
		to.LearningRate = append(to.LearningRate, api.Float(p.rate))
		to.GradNorm = append(to.GradNorm, api.Float(p.norm))
		to.TokensPerS = append(to.TokensPerS, api.Float(p.speed))
	}
}

// eval is an evaluation.
type eval struct{ step, time, loss, bpb float64 }
