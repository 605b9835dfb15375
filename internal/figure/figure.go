// Package figure draws plots one below the other, with aligned axes and legends within their frames.
package figure

import (
	"errors"
	"os"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
)

// Distances of a figure.
const (
	margin = vg.Length(8) // around the figure
	gap    = vg.Length(8) // between a legend and its frame
)

// A Panel is a plot of a figure.
type Panel struct {
	Plot   *plot.Plot
	Height float64 // relative to the other panels
}

// Write draws panels, the first one on top, as a PNG picture of the given size at path. It creates
// missing directories. Concurrent readers of the file see either the old or the new picture.
func Write(path string, width, height vg.Length, panels ...Panel) error {
	if len(panels) == 0 {
		return errors.New("figure: Write: no panels")
	}

	image := vgimg.New(width, height)
	canvas := draw.New(image)
	canvas.SetColor(panels[0].Plot.BackgroundColor)
	canvas.Fill(canvas.Rectangle.Path())
	for i, c := range Layout(canvas, panels...) {
		panels[i].Plot.Draw(c)
	}

	return atomicfile.WriteMkdir(path, func(f *os.File) error {
		_, err := vgimg.PngCanvas{Canvas: image}.WriteTo(f)
		return err
	})
}

// Layout divides a canvas into one canvas for each panel, so that the frames of all plots have the
// same left and right edge. It moves the legends of the plots into their frames.
func Layout(canvas draw.Canvas, panels ...Panel) []draw.Canvas {
	canvas = draw.Crop(canvas, margin, -margin, margin, -margin)
	total := 0.0
	for _, p := range panels {
		total += p.Height
	}

	all := make([]draw.Canvas, len(panels))
	top, height := vg.Length(0), canvas.Max.Y-canvas.Min.Y
	for i, p := range panels {
		share := height * vg.Length(p.Height/total)
		all[i] = draw.Crop(canvas, 0, 0, height-top-share, -top)
		top += share
	}

	align(all, panels)
	for i, p := range panels {
		moveLegend(p.Plot, all[i])
	}

	return all
}

// align narrows the canvases until their frames have the same edges. The width of a plot's labels
// depends slightly on the width of its canvas, so one pass does not suffice.
func align(all []draw.Canvas, panels []Panel) {
	for range 4 {
		left, right := all[0].Min.X, all[0].Max.X
		for i, p := range panels {
			frame := p.Plot.DataCanvas(all[i])
			left, right = max(left, frame.Min.X), min(right, frame.Max.X)
		}
		for i, p := range panels {
			frame := p.Plot.DataCanvas(all[i])
			all[i] = draw.Crop(all[i], left-frame.Min.X, right-frame.Max.X, 0, 0)
		}
	}
}

// moveLegend moves the legend of a plot from the edge of the canvas to the edge of the frame. Between
// the two, the plot reserves space for labels and for points at its border.
func moveLegend(p *plot.Plot, c draw.Canvas) {
	frame := p.DataCanvas(c)
	if p.Title.Text != "" {
		c.Max.Y -= p.Title.TextStyle.Rectangle(p.Title.Text).Size().Y + p.Title.Padding
	}

	p.Legend.XOffs = frame.Max.X - c.Max.X - gap
	if p.Legend.Left {
		p.Legend.XOffs = gap
	}

	p.Legend.YOffs = gap
	if p.Legend.Top {
		p.Legend.YOffs = frame.Max.Y - c.Max.Y - gap
	}
}
