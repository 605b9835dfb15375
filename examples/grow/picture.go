package main

import (
	"fmt"
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/state"
)

// history is the stage of every seed at the end of every epoch.
type history struct {
	network *state.Network
	every   int // steps of an epoch
	stages  [][]state.Stage
}

func (h *history) observe(e llm.Event) error {
	if e.Kind != llm.StepEnd || e.Step%h.every != 0 {
		return nil
	}
	var column []state.Stage
	for _, r := range h.network.Report() {
		for _, s := range r.Seeds {
			column = append(column, s.Stage)
		}
	}
	h.stages = append(h.stages, column)
	return nil
}

// colours of the stages, from asleep by way of growing to fossilized, and the three bad ends.
var colours = []color.Color{
	color.RGBA{238, 238, 238, 255}, // Dormant
	color.RGBA{214, 234, 175, 255}, // Germinated
	color.RGBA{158, 202, 225, 255}, // Training
	color.RGBA{49, 130, 189, 255},  // Grafting
	color.RGBA{8, 69, 148, 255},    // Stabilization
	color.RGBA{253, 208, 98, 255},  // Evaluating
	color.RGBA{120, 198, 121, 255}, // FineTuning
	color.RGBA{0, 104, 55, 255},    // Fossilized
	color.RGBA{203, 24, 29, 255},   // Culled
	color.RGBA{150, 150, 150, 255}, // Cancelled
	color.RGBA{251, 106, 74, 255},  // RolledBack
}

// draw makes a picture of the history: a row for each seed, the first at the top, and a column for
// each epoch.
func (h *history) draw(path, title string) error {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, "epoch", "layer.seed"
	p.Title.Padding, p.X.Padding, p.Y.Padding = vg.Points(6), 0, vg.Points(4)
	p.Add(h)
	var names []plot.Tick
	rows := h.network.Seeds()
	for layer, l := range h.network.Lattices() {
		for seed := range l.Seeds() {
			rows--
			names = append(names, plot.Tick{Value: float64(rows) + 0.5, Label: fmt.Sprintf("%d.%d", layer, seed)})
		}
	}
	p.Y.Tick.Marker = plot.ConstantTicks(names)
	p.X.Tick.Marker = plot.TickerFunc(func(lo, _ float64) (ticks []plot.Tick) {
		for _, t := range (plot.DefaultTicks{}).Ticks(lo, float64(max(1, len(h.stages)))) {
			if t.Label != "" && t.Value <= float64(len(h.stages)) {
				ticks = append(ticks, plot.Tick{Value: t.Value, Label: fmt.Sprintf("%.0f", t.Value)})
			}
		}
		return ticks
	})
	for _, style := range []*text.Style{&p.Title.TextStyle, &p.Legend.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle,
		&p.X.Tick.Label, &p.Y.Tick.Label} {
		style.Font.Variant = "Sans"
	}
	for stage := state.Dormant; stage <= state.RolledBack; stage++ {
		p.Legend.Add(stage.String(), swatch{colours[stage]})
	}
	p.Legend.Top, p.Legend.Padding = true, vg.Points(2)
	height := max(11, h.network.Seeds()) // of rows; the legend has eleven
	return p.Save(8*vg.Inch, vg.Length(1.2+0.22*float64(height))*vg.Inch, path)
}

// Plot draws the history; it is a plot.Plotter.
func (h *history) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	rows := h.network.Seeds()
	for row := range rows {
		top := float64(rows - row)
		for from := 0; from < len(h.stages); {
			to, stage := from+1, h.stages[from][row]
			for to < len(h.stages) && h.stages[to][row] == stage {
				to++
			}
			c.FillPolygon(colours[stage], []vg.Point{{X: x(float64(from)), Y: y(top - 0.9)}, {X: x(float64(to)), Y: y(top - 0.9)},
				{X: x(float64(to)), Y: y(top)}, {X: x(float64(from)), Y: y(top)}})
			from = to
		}
	}
}

// DataRange returns the epochs, with room for the legend behind them, and the rows; it makes h a
// plot.DataRanger.
func (h *history) DataRange() (xmin, xmax, ymin, ymax float64) {
	return 0, 1.25 * float64(max(1, len(h.stages))), 0, float64(h.network.Seeds())
}

// swatch is a colour in the legend.
type swatch struct{ color.Color }

func (s swatch) Thumbnail(c *draw.Canvas) {
	c.FillPolygon(s, []vg.Point{c.Min, {X: c.Max.X, Y: c.Min.Y}, c.Max, {X: c.Min.X, Y: c.Max.Y}})
}
