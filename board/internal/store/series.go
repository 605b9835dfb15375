package store

import (
	"slices"

	"github.com/kasmina-go/kasmina/board/api"
)

// maxPoints limits the points in a curve. A screen cannot show more.
const maxPoints = 1 << 14

// A point holds the values of one step, or of several consecutive steps of a long run.
type point struct{ step, time, loss, rate, norm, speed float64 }

// steps holds the points of a run.
//
// When there are maxPoints points, each pair of adjacent points is merged into one, and from then on
// a point represents twice as many steps. A merged point holds the mean loss and gradient norm of its
// steps, and the last step's other values.
type steps struct {
	points  []point
	stride  int // steps per point
	partial point
	count   int // steps in partial
	thinned int // counts the merges; after a merge, viewers need all points again
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

// join merges a, which represents n points, with the next point b.
func join(a, b point, n int) point {
	if n == 0 {
		return b
	}
	w := 1 / float64(n+1)
	mean := func(x, y float64) float64 { return x + w*(y-x) }
	return point{b.step, b.time, mean(a.loss, b.loss), b.rate, mean(a.norm, b.norm), b.speed}
}

// cut removes the points after a step, because a resumed run repeats those steps.
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

// since appends the points with index n and above to the columns of a series.
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

// An eval is the result of an evaluation.
type eval struct{ step, time, loss, bpb float64 }
