// Package plot draws the curves of training runs. It is separate from package llm so that only
// programs that plot depend on fonts and a plotting library.
package plot

import (
	"errors"
	"fmt"
	"image/color"
	"math"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/figure"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/runlog"
)

// A CurveOption configures [LossCurve].
type CurveOption func(*lossCurve)

// WithLogSteps selects a logarithmic axis of steps.
func WithLogSteps() CurveOption {
	return func(c *lossCurve) { c.logSteps = true }
}

// LossCurve returns a callback that plots a run's losses over its steps, as a PNG image at path. It
// creates missing directories.
//
// The picture shows the training loss (thin), the smoothed training loss, and the held-out loss, all
// in nats per token. It is redrawn after each evaluation and at the end of the run. Concurrent
// readers of the file see either the old or the new picture, never a partial one.
//
// In a resumed run, the earlier points are taken from the log that [runlog.JSON] wrote to logPath. If
// logPath is empty, the curve starts with this process. If the picture cannot be written, the run
// fails with an error before its first step.
func LossCurve(path, logPath string, options ...CurveOption) llm.Callback {
	var c lossCurve
	for _, o := range options {
		o(&c)
	}
	return c.callback(path, logPath)
}

type lossCurve struct {
	train, heldOut curve
	logSteps       bool
}

func (c *lossCurve) callback(path, logPath string) llm.Callback {
	return func(e llm.Event) (err error) {
		switch e.Kind {
		case llm.RunStart:
			if err = errors.Join(atomicfile.Writable(path), c.restore(logPath)); err == nil {
				c.rewind(e.Step)
			}
		case llm.StepEnd:
			c.train.add(e.Step, e.Loss)
		case llm.EvalEnd:
			c.heldOut.add(e.Step, e.ValLoss)
			err = c.draw(path)
		case llm.RunEnd:
			err = c.draw(path)
		}
		if err != nil {
			return fmt.Errorf("plot: LossCurve: %w", err)
		}
		return nil
	}
}

// restore reads the points of earlier processes from the log.
func (c *lossCurve) restore(logPath string) error {
	if logPath == "" {
		return nil
	}

	c.rewind(-1)
	return runlog.Read(logPath, func(r runlog.Record) {
		switch {
		case r.Event == "start":
			c.rewind(r.Step)
		case r.Event == "step" && r.TrainLoss != nil:
			c.train.add(r.Step, float64(*r.TrainLoss))
		case r.Event == "eval" && r.ValLoss != nil:
			c.heldOut.add(r.Step, float64(*r.ValLoss))
		}
	})
}

// rewind removes the points that a run starting at step replaces: the points after the step, or all
// points if the run starts over.
func (c *lossCurve) rewind(step int) {
	if step == 0 {
		step = -1
	}
	c.train.rewind(step)
	c.heldOut.rewind(step)
}

// A curve holds losses in nats per token by step.
type curve struct{ plotter.XYs }

// add appends a loss unless it is NaN or so large that the axis could not show the other losses.
func (c *curve) add(step int, loss float64) {
	if math.Abs(loss) < 1e6 {
		c.XYs = append(c.XYs, plotter.XY{X: float64(step), Y: loss})
	}
}

func (c *curve) rewind(step int) {
	n := len(c.XYs)
	for n > 0 && c.XYs[n-1].X > float64(step) {
		n--
	}
	c.XYs = c.XYs[:n]
}

// smoothed returns the means over a centered window of about 4% of the points. Unlike a running mean,
// they do not lag. At the start, while the loss falls quickly, the window is narrower on both sides;
// at the end it lacks its right side.
func (c *curve) smoothed() plotter.XYs {
	sums := make([]float64, len(c.XYs)+1)
	for i, p := range c.XYs {
		sums[i+1] = sums[i] + p.Y
	}

	smooth := make(plotter.XYs, len(c.XYs))
	for i, p := range c.XYs {
		half := min(len(c.XYs)/50, i)
		lo, hi := i-half, min(i+half+1, len(c.XYs))
		smooth[i] = plotter.XY{X: p.X, Y: (sums[hi] - sums[lo]) / float64(hi-lo)}
	}

	return smooth
}

// maxDrawn limits the points of a line. It exceeds the width of the picture in pixels.
const maxDrawn = 2000

// thinned divides a line of more than maxDrawn points into maxDrawn/2 spans and returns the lowest
// and the highest point of each span. The result looks the same.
func thinned(points plotter.XYs) plotter.XYs {
	if len(points) <= maxDrawn {
		return points
	}

	thin := make(plotter.XYs, 0, maxDrawn)
	for i := range maxDrawn / 2 {
		span := points[i*len(points)/(maxDrawn/2) : (i+1)*len(points)/(maxDrawn/2)]
		least, greatest := 0, 0
		for j, p := range span {
			if p.Y < span[least].Y {
				least = j
			}
			if p.Y > span[greatest].Y {
				greatest = j
			}
		}
		thin = append(thin, span[min(least, greatest)], span[max(least, greatest)])
	}

	return thin
}

var (
	rawColor     = color.RGBA{R: 0xb8, G: 0xcf, B: 0xe6, A: 0xff}
	trainColor   = color.RGBA{R: 0x1f, G: 0x5f, B: 0xa8, A: 0xff}
	heldOutColor = color.RGBA{R: 0xd9, G: 0x4f, B: 0x1e, A: 0xff}
	gridColor    = color.Gray{Y: 0xe4}
)

// newPlot returns an empty plot with a grid.
func newPlot() *plot.Plot {
	p := plot.New()
	p.Title.Text = "Loss"
	p.X.Label.Text = "step"
	p.Y.Label.Text = "nats per token"
	p.Title.Padding = vg.Points(6)
	p.X.Label.Padding, p.Y.Label.Padding = vg.Points(6), vg.Points(6)
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(roundTicks), plot.TickerFunc(roundTicks)
	p.Legend.Top = true
	p.Legend.Padding = vg.Points(3)

	for _, style := range []*text.Style{&p.Title.TextStyle, &p.Legend.TextStyle,
		&p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label} {
		style.Font.Variant = "Sans"
	}

	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = gridColor, gridColor
	p.Add(grid)
	return p
}

// roundTicks returns ticks between lo and hi at multiples of 1, 2 or 5 times a power of ten. It
// chooses the distance so that there are five to thirteen ticks.
func roundTicks(lo, hi float64) (ticks []plot.Tick) {
	unit := math.Pow(10, math.Floor(math.Log10((hi-lo)/5)))
	step := unit
	for _, multiple := range []float64{2, 5} {
		if multiple*unit <= (hi-lo)/5 {
			step = multiple * unit
		}
	}

	first := math.Ceil(lo / step)
	// Counted from 0: first + 1 may equal first when lo and hi are very close.
	for i := 0.0; i <= math.Floor(hi/step)-first; i++ {
		value := (first + i) * step
		ticks = append(ticks, plot.Tick{Value: value, Label: strconv.FormatFloat(value, 'g', 6,
			64)})
	}

	return ticks
}

// draw writes the picture, unless there are no points yet.
func (c *lossCurve) draw(path string) error {
	if len(c.train.XYs)+len(c.heldOut.XYs) == 0 {
		return nil
	}

	p := newPlot()
	for _, l := range []struct {
		name   string
		points plotter.XYs
		color  color.Color
		width  vg.Length
		dots   bool
	}{
		{"training", thinned(c.train.XYs), rawColor, vg.Points(0.6), false},
		{"training, smoothed", thinned(c.train.smoothed()), trainColor, vg.Points(1.6), false},
		{"held out", c.heldOut.XYs, heldOutColor, vg.Points(1.6), true},
	} {
		if c.logSteps {
			l.points = slices.DeleteFunc(slices.Clone(l.points), func(p plotter.XY) bool {
				return p.X < 1
			})
		}
		if len(l.points) == 0 {
			continue
		}

		line, dots, err := plotter.NewLinePoints(l.points)
		if err != nil {
			return err
		}
		line.Color, line.Width = l.color, l.width
		dots.Color, dots.Radius, dots.Shape = l.color, vg.Points(2.5), draw.CircleGlyph{}
		p.Add(line)
		p.Legend.Add(l.name, line)
		if l.dots {
			p.Add(dots)
		}
	}

	if c.logSteps {
		// The axis needs a range even if fewer than two points have a logarithm.
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		p.X.Min, p.X.Max = 1, max(p.X.Max, 10)
	}

	return figure.Write(path, 8*vg.Inch, 5*vg.Inch, figure.Panel{Plot: p, Height: 1})
}
