package main

import (
	"fmt"
	"image/color"
	"math"
	"os"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
)

// drawGains draws, over the budget, by how much each arm that grows ends below the best static arm.
// Runs of equal FLOPs and of equal time have a panel each. An arm's learning rate, which may change
// with the budget, does not split its line.
func drawGains(path string, rows []row) error {
	var panels []*plot.Plot
	for _, equal := range []string{"flops", "time"} {
		lines, err := gainLines(rows, equal)
		if err != nil {
			return err
		}
		if lines != nil {
			panels = append(panels, lines)
		}
	}
	if len(panels) == 0 {
		return nil // nothing grew, or there is no static arm to compare with
	}

	img := vgimg.New(8*vg.Inch, vg.Length(len(panels))*4.5*vg.Inch)
	canvas := draw.New(img)
	height := canvas.Max.Y / vg.Length(len(panels))
	for i, p := range panels {
		above, below := vg.Length(i)*height, vg.Length(len(panels)-1-i)*height
		p.Draw(draw.Crop(canvas, 0, 0, below, -above))
	}
	return atomicfile.WriteMkdir(path, func(f *os.File) error {
		_, err := vgimg.PngCanvas{Canvas: img}.WriteTo(f)
		return err
	})
}

// gainLines returns the panel of runs with the same thing in common, nil if there is nothing to draw.
func gainLines(rows []row, equal string) (*plot.Plot, error) {
	lines, names := map[string]plotter.XYs{}, []string(nil)
	for _, r := range rows {
		if r.Equal != equal || r.Static || r.Gain == nil {
			continue
		}
		a := r.Arm
		a.rate = 0
		name := a.String()
		if lines[name] == nil {
			names = append(names, name)
		}

		// Of several rates at a budget the best one counts, which comes first.
		line := lines[name]
		if n := len(line); n == 0 || line[n-1].X != r.Budget {
			lines[name] = append(line, plotter.XY{X: r.Budget, Y: *r.Gain})
		}
	}
	if len(names) == 0 {
		return nil, nil
	}

	p := plot.New()
	p.Title.Text = fmt.Sprintf("Growth compared with the best static arm, equal %s", equal)
	p.X.Label.Text, p.Y.Label.Text = "tokens per parameter", "nats per byte below (above 0: growth pays)"
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, budgetTicks(rows)
	p.Legend.Top, p.Legend.TextStyle.Font.Size = true, vg.Points(7)
	p.Add(plotter.NewGrid())
	slices.Sort(names)
	for i, name := range names {
		line, points, err := plotter.NewLinePoints(lines[name])
		if err != nil {
			return nil, err
		}
		line.Color, points.Color = plotutil.Color(i), plotutil.Color(i)
		line.Dashes, points.Shape = plotutil.Dashes(i/7), plotutil.Shape(i)
		p.Add(line, points)
		p.Legend.Add(name, line, points)
	}

	zero := plotter.NewFunction(func(float64) float64 { return 0 })
	zero.Color = color.Gray{100}
	p.Add(zero)
	p.X.Min, p.X.Max = p.X.Min/1.1, p.X.Max*1.1
	p.Y.Min, p.Y.Max = math.Min(p.Y.Min, 0), math.Max(p.Y.Max, 0)
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
