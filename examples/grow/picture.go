package main

import (
	"fmt"
	"image/color"
	"math"
	"os"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
)

var (
	staticColor = color.RGBA{120, 120, 120, 255}
	grownColor  = color.RGBA{0, 104, 55, 255}
)

// draw makes a picture of a comparison: the held-out losses over the time, and below them the
// blocks of each model.
func drawComparison(path string, c comparison) error {
	losses, blocks := plot.New(), plot.New()
	losses.Title.Text = fmt.Sprintf("Grown and static in equal time, random seed %d", c.seed)
	losses.Y.Label.Text, blocks.Y.Label.Text = "held-out loss, nats a byte", "blocks"
	blocks.X.Label.Text = "share of the time, %"
	losses.Legend.Top = true
	for _, run := range []struct {
		name  string
		of    *trained
		color color.Color
	}{{"static", c.static, staticColor}, {"grown", c.grown, grownColor}} {
		if run.of == nil {
			continue
		}
		if err := addRun(losses, blocks, run.name, run.of, run.color); err != nil {
			return err
		}
	}
	for _, p := range []*plot.Plot{losses, blocks} {
		p.X.Min, p.X.Max = 0, 100
		p.Add(plotter.NewGrid())
	}
	blocks.Y.Min = 0
	return save(path, losses, blocks)
}

// addRun draws one run into both plots.
func addRun(losses, blocks *plot.Plot, name string, r *trained, c color.Color) error {
	var loss, depth plotter.XYs
	for _, p := range r.curve {
		x := 100 * p.share
		if !math.IsNaN(p.loss) {
			loss = append(loss, plotter.XY{X: x, Y: p.loss})
		}
		if n := len(depth); n == 0 {
			depth = append(depth, plotter.XY{X: 0, Y: float64(p.blocks)})
		} else if depth[n-1].Y != float64(p.blocks) {
			depth = append(depth, plotter.XY{X: x, Y: depth[n-1].Y})
		}
		depth = append(depth, plotter.XY{X: x, Y: float64(p.blocks)})
	}
	for _, l := range []struct {
		p  *plot.Plot
		xy plotter.XYs
	}{{losses, loss}, {blocks, depth}} {
		line, err := plotter.NewLine(l.xy)
		if err != nil {
			return err
		}
		line.Color, line.Width = c, vg.Points(2)
		l.p.Add(line)
		if l.p == losses {
			l.p.Legend.Add(fmt.Sprintf("%s, %d steps: %.4f", name, r.steps, r.loss), line)
		}
	}
	return nil
}

// save writes the two plots as a PNG, one below the other.
func save(path string, losses, blocks *plot.Plot) error {
	img := vgimg.New(7*vg.Inch, 6*vg.Inch)
	canvas := draw.New(img)
	split := 1.8 * vg.Inch
	upper := draw.Crop(canvas, 0, 0, split, 0)
	lower := draw.Crop(canvas, 0, 0, 0, split-canvas.Max.Y)
	losses.Draw(upper)
	blocks.Draw(lower)
	return atomicfile.WriteMkdir(path, func(f *os.File) error {
		_, err := vgimg.PngCanvas{Canvas: img}.WriteTo(f)
		return err
	})
}
