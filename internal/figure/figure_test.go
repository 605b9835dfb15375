package figure

import (
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

// panel returns a panel with a line up to the given height. The labels of its vertical axis are wide
// if the height is large. The legend is the only part of the plot that is red.
func panel(t *testing.T, height, share float64) Panel {
	t.Helper()
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = "title", "x", "y"
	p.Legend.Top = true
	line, err := plotter.NewLine(plotter.XYs{{X: 0, Y: 0}, {X: 100, Y: height}})
	require.NoError(t, err)
	p.Add(line)
	red, err := plotter.NewLine(plotter.XYs{{X: 0, Y: 0}, {X: 1, Y: 0}})
	require.NoError(t, err)
	red.Color, red.Width = color.RGBA{R: 255, A: 255}, vg.Points(3)
	p.Legend.Add("a name of some length", red)
	return Panel{p, share}
}

// TestLayout checks that the frames of plots with labels of different widths have the same left and
// right edges, and that no part of a panel lies outside the figure.
func TestLayout(t *testing.T) {
	panels := []Panel{panel(t, 1.25, 3), panel(t, 10, 1), panel(t, 123456789, 2)}
	canvas := draw.New(vgimg.New(7*vg.Inch, 6*vg.Inch))
	all := Layout(canvas, panels...)
	require.Len(t, all, 3)

	first := panels[0].Plot.DataCanvas(all[0])
	bottom := canvas.Max.Y
	for i, p := range panels {
		frame := p.Plot.DataCanvas(all[i])
		require.InDelta(t, float64(first.Min.X), float64(frame.Min.X), 0.01, "panel %d", i)
		require.InDelta(t, float64(first.Max.X), float64(frame.Max.X), 0.01, "panel %d", i)
		require.GreaterOrEqual(t, all[i].Min.X, canvas.Min.X)
		require.LessOrEqual(t, all[i].Max.X, canvas.Max.X)
		require.LessOrEqual(t, all[i].Max.Y, bottom+0.01, "panel %d overlaps the one above", i)
		bottom = all[i].Min.Y
	}

	require.GreaterOrEqual(t, bottom, canvas.Min.Y)
}

// TestLegendInFrame checks where the pixels of legends are.
func TestLegendInFrame(t *testing.T) {
	for name, set := range map[string]func(*plot.Legend){
		"top right": func(*plot.Legend) {}, "top left": func(l *plot.Legend) { l.Left = true },
		"bottom right": func(l *plot.Legend) { l.Top = false },
	} {
		p := panel(t, 5, 1)
		set(&p.Plot.Legend)
		path := filepath.Join(t.TempDir(), "new", "figure.png")
		require.NoError(t, Write(path, 4*vg.Inch, 3*vg.Inch, p))
		f, err := os.Open(path)
		require.NoError(t, err)
		picture, err := png.Decode(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())

		// The frame in pixels, with the origin of pictures at the top.
		canvas := draw.New(vgimg.New(4*vg.Inch, 3*vg.Inch))
		frame := p.Plot.DataCanvas(Layout(canvas, p)[0])
		size := picture.Bounds().Size()
		scale := float64(size.X) / float64(canvas.Max.X)
		left, right := float64(frame.Min.X)*scale, float64(frame.Max.X)*scale
		top, bottom := float64(size.Y)-float64(frame.Max.Y)*scale, float64(size.Y)-float64(frame.Min.Y)*scale
		found := 0
		for y := range size.Y {
			for x := range size.X {
				r, g, b, _ := picture.At(x, y).RGBA()
				if r < 0xf000 || g > 0x1000 || b > 0x1000 {
					continue
				}
				found++
				require.True(t, float64(x) > left && float64(x) < right && float64(y) > top &&
					float64(y) < bottom, "%s: a pixel of the legend is at %d, %d", name, x, y)
			}
		}
		require.NotZero(t, found, name)
	}

	require.ErrorContains(t, Write("x.png", 1, 1), "no panels")
}
