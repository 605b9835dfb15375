package curve

import "fmt"

// Progress is the state of a run at the end of an epoch.
type Progress struct {
	Epoch int     `json:"epoch"` // number of epochs that have ended
	Share float64 `json:"share"` // fraction of the run's budget spent
	Loss  float64 `json:"loss"`  // the host's loss, as reported in the metrics
}

// MaxLength is the maximum length of a run's curve.
const MaxLength = 512

// Add returns the curve with an additional point. If the curve is full, every second point is
// dropped first, so that the remaining ones are spread evenly over the run.
func Add(curve []Progress, p Progress) []Progress {
	if len(curve) >= MaxLength {
		for i := range MaxLength / 2 {
			curve[i] = curve[2*i+1]
		}
		curve = curve[:MaxLength/2]
	}
	return append(curve, p)
}

// Check returns an error unless the curve is possible for a run at the given epoch.
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
