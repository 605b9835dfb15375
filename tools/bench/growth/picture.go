package growth

import (
	"fmt"
	"image/color"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/kasmina-go/kasmina/internal/figure"
)

var (
	staticColor = color.RGBA{120, 120, 120, 255}
	grownColor  = color.RGBA{0, 104, 55, 255}
	trialColor  = color.RGBA{140, 198, 140, 255}
)

// drawComparison draws the held-out losses of a comparison over time. Bars below them show when each
// block of the grown model was added.
func drawComparison(path string, c comparison) error {
	losses, blocks := plot.New(), plot.New()
	losses.Title.Text = title(c)
	losses.Y.Label.Text, blocks.Y.Label.Text = "held-out loss, nats per byte", "blocks"
	blocks.X.Label.Text = "share of the static model's time, % (light blocks are on trial)"
	losses.Legend.Top = true
	for _, p := range []*plot.Plot{losses, blocks} {
		p.X.Min, p.X.Max = 0, 100
		p.Add(plotter.NewGrid())
	}

	for _, run := range []struct {
		name  string
		of    *trained
		color color.Color
	}{{"static", c.static, staticColor}, {"grown", c.grown, grownColor}} {
		if run.of == nil {
			continue
		}
		if err := addLoss(losses, run.name, run.of, run.color); err != nil {
			return err
		}
	}

	if c.static != nil && c.grown != nil {
		if err := addCrossing(losses, c); err != nil {
			return err
		}
	}

	zoom(losses, c)
	if shown := c.grown; shown != nil {
		if err := addBlocks(blocks, shown); err != nil {
			return err
		}
	} else if err := addBlocks(blocks, c.static); err != nil {
		return err
	}

	return figure.Write(path, 7*vg.Inch, 6*vg.Inch, figure.Panel{Plot: losses, Height: 7},
		figure.Panel{Plot: blocks, Height: 3})
}

// title describes the result of a comparison.
func title(c comparison) string {
	switch {
	case c.static == nil || c.grown == nil:
		return fmt.Sprintf("Random seed %d", c.seed)
	case c.grown.loss >= c.static.loss:
		return fmt.Sprintf("Growth did not pay off: it ends %.3f nats per byte higher",
			c.grown.loss-c.static.loss)
	}
	return fmt.Sprintf("The grown model reaches the static model's loss in %.0f%% of its time,\n"+
		"and ends %.3f nats per byte lower", 100*c.grown.timeTo(c.static.loss),
		c.static.loss-c.grown.loss)
}

// addLoss draws the losses of a run.
func addLoss(p *plot.Plot, name string, r *trained, c color.Color) error {
	var loss plotter.XYs
	for _, at := range r.curve {
		if !math.IsNaN(at.loss) {
			loss = append(loss, plotter.XY{X: 100 * at.share, Y: at.loss})
		}
	}

	line, err := plotter.NewLine(loss)
	if err != nil {
		return err
	}

	line.Color, line.Width = c, vg.Points(2)
	p.Add(line)
	p.Legend.Add(fmt.Sprintf("%s, %d steps: %.4f", name, r.steps, r.loss), line)
	return nil
}

// addCrossing marks the final loss of the static run, and the time when the grown run reached it.
func addCrossing(p *plot.Plot, c comparison) error {
	lines := []plotter.XYs{{{X: 0, Y: c.static.loss}, {X: 100, Y: c.static.loss}}}
	if at := 100 * c.grown.timeTo(c.static.loss); at == at {
		lines = append(lines, plotter.XYs{{X: at, Y: 0}, {X: at, Y: c.static.loss}})
	}

	for _, xy := range lines {
		line, err := plotter.NewLine(xy)
		if err != nil {
			return err
		}
		line.Color, line.Dashes = staticColor, []vg.Length{vg.Points(4), vg.Points(3)}
		p.Add(line)
	}

	return nil
}

// zoom cuts off the steep start.
func zoom(p *plot.Plot, c comparison) {
	p.Y.Min, p.Y.Max = math.Inf(1), math.Inf(-1)
	for _, r := range []*trained{c.static, c.grown} {
		if r == nil {
			continue
		}
		for _, at := range r.curve {
			if math.IsNaN(at.loss) {
				continue
			}
			p.Y.Min = min(p.Y.Min, at.loss)
			if at.share >= 0.1 {
				p.Y.Max = max(p.Y.Max, at.loss)
			}
		}
	}

	margin := 0.05 * max(p.Y.Max-p.Y.Min, 1e-6)
	p.Y.Min, p.Y.Max = p.Y.Min-margin, p.Y.Max+margin
}

// addBlocks draws the blocks of a run from the bottom up. Blocks on trial are light.
func addBlocks(p *plot.Plot, r *trained) error {
	most, end := 0, 100*r.curve[len(r.curve)-1].share
	start, to := 0.0, 0.0
	for i := 0; i < len(r.curve); start = to {
		from := r.curve[i]
		for i++; i < len(r.curve) && r.curve[i].blocks == from.blocks &&
			r.curve[i].trial == from.trial; i++ {
		}
		if to = end; i < len(r.curve) {
			to = 100 * r.curve[i].share
		}
		most = max(most, from.blocks)
		for b := range from.blocks {
			y := float64(b)
			bar, err := plotter.NewPolygon(plotter.XYs{{X: start, Y: y + 0.1}, {X: to, Y: y + 0.1},
				{X: to, Y: y + 0.9}, {X: start, Y: y + 0.9}})
			if err != nil {
				return err
			}
			bar.LineStyle.Width = 0
			if bar.Color = grownColor; b >= from.blocks-from.trial {
				bar.Color = trialColor
			}
			p.Add(bar)
		}
	}

	p.Y.Min, p.Y.Max = 0, float64(most)
	return nil
}
