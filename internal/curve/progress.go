package curve

import "fmt"

// Progress is where a run was when an epoch ended.
type Progress struct {
	Epoch int     `json:"epoch"` // epochs that had ended
	Share float64 `json:"share"` // of the run's budget that was spent
	Loss  float64 `json:"loss"`  // the host's, as the metrics had it
}

// MaxLength bounds a curve of a run.
const MaxLength = 512

// Add returns a curve with a point more. A full one first loses every second point, so that
// those that stay lie evenly over the run.
func Add(curve []Progress, p Progress) []Progress {
	if len(curve) >= MaxLength {
		for i := range MaxLength / 2 {
			curve[i] = curve[2*i+1]
		}
		curve = curve[:MaxLength/2]
	}
	return append(curve, p)
}

// Check returns an error unless a run that has come to the given epoch can have the curve.
func Check(curve []Progress, epoch uint32) error {
	if len(curve) > MaxLength {
		return fmt.Errorf("the curve has %d points, want at most %d", len(curve), MaxLength)
	}
	last := 0
	for i, p := range curve {
		if p.Epoch <= last || int64(p.Epoch) > int64(epoch) || !(p.Share >= 0 && p.Share <= 1) ||
			p.Loss-p.Loss != 0 {
			return fmt.Errorf("point %d of the curve is %+v", i, p)
		}
		last = p.Epoch
	}
	return nil
}
