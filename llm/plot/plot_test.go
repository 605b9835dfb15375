package plot

import (
	"image"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot/plotter"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/internal/eventtest"
	"github.com/kasmina-go/kasmina/llm/runlog"
)

func decodePNG(t testing.TB, path string) image.Image {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	picture, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}

	return picture
}

// pixels counts the pixels with the given color.
func pixels(picture image.Image, c interface{ RGBA() (r, g, b, a uint32) }) (n int) {
	r, g, b, _ := c.RGBA()
	for y := range picture.Bounds().Dy() {
		for x := range picture.Bounds().Dx() {
			if pr, pg, pb, _ := picture.At(x, y).RGBA(); pr == r && pg == g && pb == b {
				n++
			}
		}
	}
	return n
}

func TestLossCurve(t *testing.T) {
	for name, options := range map[string][]CurveOption{"linear": nil,
		"logarithmic": {WithLogSteps()}} {
		dir := filepath.Join(t.TempDir(), "new")
		path := filepath.Join(dir, "loss.png")
		events := slices.DeleteFunc(eventtest.Run(0, 100), func(e llm.Event) bool {
			return e.Kind == llm.EvalEnd && e.Step%25 != 0
		})
		eventtest.Send(t, LossCurve(path, "", options...), events...)
		picture := decodePNG(t, path)
		if size := picture.Bounds().Size(); size.X < 600 || size.Y < 400 {
			t.Errorf("%s: the picture has %v pixels", name, size)
		}
		if train, held := pixels(picture, trainColor), pixels(picture, heldOutColor); train < 200 ||
			held < 200 {
			t.Errorf("%s: %d pixels of the training loss, %d of the held-out one", name, train,
				held)
		}
		if files, _ := os.ReadDir(dir); len(files) != 1 {
			t.Errorf("%s: the folder contains %v", name, files)
		}
	}
}

// TestLossCurveTakesAnyLosses checks that a picture never makes a run fail, even if losses are not
// numbers, a step is 0, or there are fewer than two points.
func TestLossCurveTakesAnyLosses(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for name, losses := range randtest.Sample(t, 4, map[string][]float64{
		"none": {}, "one": {3}, "equal": {3, 3, 3}, "all bad": {nan, inf},
		"some bad":            {5, nan, 4, inf, 3},
		"nearly equal":        {3, math.Nextafter(3, 4), 3},
		"large, nearly equal": {999999, math.Nextafter(999999, 0)},
		"huge":                {1e308, -1e308, 1e300, 5}, "tiny": {5e-324, 0}, "negative": {-1, -2},
	}) {
		for _, logSteps := range []bool{false, true} {
			if logSteps && testing.Short() {
				continue // a picture takes long under the race detector
			}
			path := filepath.Join(t.TempDir(), "loss.png")
			c := lossCurve{logSteps: logSteps}
			for step, loss := range losses {
				c.heldOut.add(step, loss)
				c.train.add(step+1, loss)
			}
			if err := c.draw(path); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if _, err := os.Stat(path); err == nil {
				decodePNG(t, path)
			} else if name != "none" && name != "all bad" {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// TestLossCurveResumes checks that a run killed at step 15 and resumed from its checkpoint at step 10
// has the same curve as an uninterrupted run.
func TestLossCurveResumes(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(dir, "log.jsonl")
	for _, logFirst := range []bool{true, false} {
		os.Remove(log)
		older := eventtest.Run(0, 8) // an earlier run in the same directory
		eventtest.Send(t, runlog.JSON(log), slices.Insert(older, 1, llm.Event{Kind: llm.EvalEnd,
			ValLoss: 99})...)
		killed := eventtest.Run(0, 20)
		for i := range killed {
			if killed[i].Step > 10 {
				killed[i].Loss, killed[i].ValLoss = 99, 99 // replaced after the resumption
			}
		}
		for i, e := range killed {
			if e.Step == 16 {
				killed = killed[:i]
				break
			}
		}
		write := runlog.JSON(log)
		eventtest.Send(t, write, killed...)
		eventtest.Send(t, write, llm.Event{Kind: llm.RunEnd, Step: 15})

		var c lossCurve
		draw, write := c.callback(filepath.Join(dir, "loss.png"), log), runlog.JSON(log)
		for _, e := range eventtest.Run(10, 20) {
			if logFirst {
				eventtest.Send(t, write, e)
				eventtest.Send(t, draw, e)
			} else {
				eventtest.Send(t, draw, e)
				eventtest.Send(t, write, e)
			}
		}
		var straight lossCurve
		eventtest.Send(t, straight.callback(filepath.Join(dir, "straight.png"), ""),
			eventtest.Run(0, 20)...)
		if !slices.Equal(c.train.XYs, straight.train.XYs) || !slices.Equal(c.heldOut.XYs,
			straight.heldOut.XYs) {
			t.Errorf("log first %t: resumed %v, %v\nstraight %v, %v", logFirst, c.train, c.heldOut,
				straight.train, straight.heldOut)
		}
	}
}

func TestLossCurveReportsWhereItFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	c := LossCurve(filepath.Join(file, "loss.png"), "")
	err := c(llm.Event{Kind: llm.EvalEnd, Step: 1, ValLoss: 1})
	if err == nil || !strings.Contains(err.Error(), file) || !strings.HasPrefix(err.Error(),
		"plot: LossCurve: ") {
		t.Errorf("got %v", err)
	}
}

func TestRoundTicks(t *testing.T) {
	for _, c := range []struct {
		lo, hi float64
		want   string
	}{
		{0, 3000, "0 500 1000 1500 2000 2500 3000"}, {1.4, 9.2, "2 3 4 5 6 7 8 9"},
		{2.31, 2.52, "2.32 2.34 2.36 2.38 2.4 2.42 2.44 2.46 2.48 2.5 2.52"},
		{-1, 1, "-1 -0.8 -0.6 -0.4 -0.2 0 0.2 0.4 0.6 0.8 1"},
	} {
		var got []string
		for _, tick := range roundTicks(c.lo, c.hi) {
			got = append(got, tick.Label)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("from %v to %v: %q, want %q", c.lo, c.hi, strings.Join(got, " "), c.want)
		}
	}

	r := randtest.New(t)
	for range 1000 {
		lo := r.NormFloat64() * math.Pow(10, float64(r.IntN(12)-6))
		hi := lo + r.ExpFloat64()*math.Pow(10, float64(r.IntN(12)-6))
		if n := len(roundTicks(lo, hi)); n < 4 || n > 13 {
			t.Errorf("%d ticks from %v to %v", n, lo, hi)
		}
	}
}

func TestThinnedKeepsTheExtremes(t *testing.T) {
	r := randtest.New(t)
	points := make(plotter.XYs, 2*maxDrawn+r.IntN(5*maxDrawn))
	for i := range points {
		points[i] = plotter.XY{X: float64(i), Y: r.NormFloat64()}
	}

	spike := r.IntN(len(points))
	points[spike].Y = 1e6
	thin := thinned(points)
	if len(thin) > maxDrawn || !slices.Contains(thin, points[spike]) {
		t.Errorf("%d points, spike kept: %t", len(thin), slices.Contains(thin, points[spike]))
	}

	if !slices.IsSortedFunc(thin, func(a, b plotter.XY) int { return int(a.X - b.X) }) {
		t.Error("the points are out of order")
	}
}

func TestSmoothedIsTheCenteredMean(t *testing.T) {
	r := randtest.New(t)
	var c curve
	for i := range 500 {
		c.add(i, 3+0.01*float64(i)) // a straight line is its own centered mean
	}

	for i, p := range c.smoothed()[:490] {
		if p.X != c.XYs[i].X || math.Abs(p.Y-c.XYs[i].Y) > 1e-9 {
			t.Fatalf("point %d of a straight line becomes %v, was %v", i, p, c.XYs[i])
		}
	}

	c = curve{}
	for i := range 5000 {
		c.add(i, r.NormFloat64())
	}

	late, variance := c.smoothed()[500:], 0.0
	for _, p := range late {
		variance += p.Y * p.Y / float64(len(late))
	}

	if variance > 0.03 { // 1/201, with some tolerance
		t.Errorf("noise of variance 1 keeps a variance of %v", variance)
	}
}

// FuzzRestore checks that any log can be read, and that its points can be drawn.
func FuzzRestore(f *testing.F) {
	f.Add([]byte(`{"event":"start","step":0}` + "\n" + `{"event":"step","step":1,"train_loss":2}` +
		"\n" + `{"event":"eval"`))
	f.Add([]byte(`{"event":"step","step":-5,"train_loss":1e308}` + "\n" +
		`{"event":"step","step":9e15,"train_loss":-1e308}`))
	f.Add([]byte("null\n[]\n3\n{}\n"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(dir, "log.jsonl")
		if err := os.WriteFile(path, content, 0o666); err != nil {
			t.Fatal(err)
		}
		var c lossCurve
		bounded.Run(t, int64(len(content)), func() {
			if err := c.restore(path); err != nil {
				t.Fatal(err)
			}
		})
		for _, points := range [][]float64{xs(c.train), xs(c.heldOut)} {
			for _, x := range points {
				if math.IsNaN(x) || math.IsInf(x, 0) {
					t.Fatalf("a point at %v", x)
				}
			}
		}
	})
}

func xs(c curve) []float64 {
	var xs []float64
	for _, p := range c.XYs {
		xs = append(xs, p.X, p.Y)
	}
	return xs
}

// TestUnwritablePath checks that a run fails before its first step if the picture cannot be written.
func TestUnwritablePath(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file") // not a directory
	require.NoError(t, os.WriteFile(file, nil, 0o666))
	err := LossCurve(filepath.Join(file, "loss.png"), "")(llm.Event{Kind: llm.RunStart})
	require.ErrorContains(t, err, "plot: LossCurve: mkdir")
}

// TestUnits checks that both losses are drawn in nats per token, as all other parts of the project
// report them.
func TestUnits(t *testing.T) {
	c := lossCurve{}
	draw := c.callback(filepath.Join(t.TempDir(), "loss.png"), "")
	eventtest.Send(t, draw, eventtest.Run(0, 5)...)
	require.InDelta(t, 1.0, c.train.XYs[4].Y, 1e-12)
	require.InDelta(t, 1.5, c.heldOut.XYs[0].Y, 1e-12)
	require.Equal(t, "nats per token", newPlot().Y.Label.Text)
}
