package growth

import (
	"fmt"
	"image/color"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"

	"github.com/kasmina-go/kasmina/internal/figure"
)

// drawGains draws the final losses of the best static and the best growing arm of each optimizer,
// relative to the best static arm, over the budget. Equal FLOPs and equal time have separate panels.
// The table names the arms.
func drawGains(path string, rows []row) error {
	var panels []figure.Panel
	for _, equal := range []string{"flops", "time"} {
		lines, err := gainLines(rows, equal)
		if err != nil {
			return err
		}
		if lines != nil {
			panels = append(panels, figure.Panel{Plot: lines, Height: 1})
		}
	}

	if len(panels) == 0 {
		return nil // nothing grew, or no static arm exists for a comparison
	}

	return figure.Write(path, 8*vg.Inch, vg.Length(len(panels))*4.5*vg.Inch, panels...)
}

// gainLines returns the panel for equal FLOPs or equal time, or nil if it would be empty.
func gainLines(rows []row, equal string) (*plot.Plot, error) {
	lines, names := map[string]plotter.XYs{}, []string(nil)
	grows := false
	for _, r := range rows {
		if r.Equal != equal || r.Gain == nil && !r.Best {
			continue
		}
		name := r.Arm.optimizer + ", static"
		if !r.Static {
			name, grows = r.Arm.optimizer+", grown", true
		}
		if lines[name] == nil {
			names = append(names, name)
		}

		point := plotter.XY{X: r.Budget}
		if r.Gain != nil {
			point.Y = *r.Gain
		}
		line := lines[name]
		if n := len(line); n == 0 || line[n-1].X != r.Budget {
			lines[name] = append(line, point)
		} else {
			line[n-1].Y = max(line[n-1].Y, point.Y)
		}
	}

	if !grows {
		return nil, nil
	}

	p := plot.New()
	p.Title.Text = fmt.Sprintf("The best arms compared with the best static arm, equal %s", equal)
	p.X.Label.Text, p.Y.Label.Text = "tokens per parameter", "nats per byte below the best static arm"
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, budgetTicks(rows)
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	slices.Sort(names)
	for i, name := range names {
		line, points, err := plotter.NewLinePoints(lines[name])
		if err != nil {
			return nil, err
		}
		line.Color, points.Color = plotutil.Color(i), plotutil.Color(i)
		points.Shape = plotutil.Shape(i)
		p.Add(line, points)
		p.Legend.Add(name, line, points)
	}

	zero := plotter.NewFunction(func(float64) float64 { return 0 })
	zero.Color = color.Gray{100}
	p.Add(zero)

	// Leave room around the points, and above them for the legend.
	margin := 0.1 * max(p.Y.Max-p.Y.Min, 1e-3)
	p.X.Min, p.X.Max = p.X.Min/1.1, p.X.Max*1.1
	p.Y.Min, p.Y.Max = p.Y.Min-margin, p.Y.Max+5*margin
	return p, nil
}

// budgetTicks returns a tick for each budget.
func budgetTicks(rows []row) plot.ConstantTicks {
	var ticks plot.ConstantTicks
	for _, g := range grouped(rows) {
		b := g[0].Budget
		if !slices.ContainsFunc(ticks, func(t plot.Tick) bool { return t.Value == b }) {
			ticks = append(ticks, plot.Tick{Value: b, Label: formatNumber(b)})
		}
	}
	return ticks
}
