package forgetting

import (
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// palette has a color for each method of tuning.
var palette = []color.RGBA{{170, 170, 170, 255}, {120, 120, 120, 255}, {60, 60, 60, 255}, {148, 103, 189, 255}, {140, 86, 75, 255},
	{214, 39, 40, 255}, {255, 152, 30, 255}, {140, 198, 140, 255}, {0, 104, 55, 255}, {23, 190, 207, 255}, {31, 119, 180, 255}}

// draw draws the frontiers of all methods of tuning and seeds.
func draw(path string, records []record) error {
	p := plot.New()
	p.Title.Text = "learning against forgetting: below and to the left is better"
	p.X.Label.Text = "loss on the new text, nats per byte"
	p.Y.Label.Text = "rise of the loss on the old text, nats per byte"
	p.Legend.Top = true
	p.Add(plotter.NewGrid())

	curves := curvesOf(records)
	for i, a := range arms() {
		named := false
		for seed := range uint64(1000) {
			f := curves[a.name][seed]
			if len(f) < 2 {
				continue
			}
			var xy plotter.XYs
			for _, point := range f {
				xy = append(xy, plotter.XY{X: point.New, Y: point.Old})
			}
			line, marks, err := plotter.NewLinePoints(xy)
			if err != nil {
				return err
			}
			line.Color, marks.Color = palette[i], palette[i]
			line.Width, marks.Radius = vg.Points(1.2), vg.Points(1.5)
			p.Add(line, marks)
			if !named {
				p.Legend.Add(a.name, line)
				named = true
			}
		}
	}
	return p.Save(22*vg.Centimeter, 15*vg.Centimeter, path)
}
