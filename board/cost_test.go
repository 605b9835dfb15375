package board_test

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/board"
	"github.com/kasmina-go/kasmina/board/api"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/browsertest"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

// timing enables checks that require an idle computer.
var timing = flag.Bool("timing", false, "check how quickly the page loads and moves")

// Options of BenchmarkStep.
var (
	costLarge = flag.Bool("cost-124M", false, "train a model with 124M parameters in BenchmarkStep")
	costBatch = flag.Int("cost-batch", 1, "sequences in a batch of BenchmarkStep")
	costSeq   = flag.Int("cost-seq", 128, "tokens in a sequence of BenchmarkStep")
	costTurn  = flag.Int("cost-turn", 10, "steps in a turn of BenchmarkStep")
)

// viewersOf is an environment variable. In a process that acts as the viewers, it contains the URL
// of the page.
const viewersOf = "KASMINA_TEST_VIEWERS"

func TestMain(m *testing.M) {
	if url := os.Getenv(viewersOf); url != "" {
		view(url)
		return
	}
	randtest.OverlapWaits()
	os.Exit(browsertest.Run(m))
}

const viewers = 20

// view opens or closes the streams of all viewers, in turn, for each line that it reads.
func view(url string) {
	var open []io.Closer
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); fmt.Println("done") {
		if len(open) > 0 {
			for _, c := range open {
				c.Close()
			}
			open = nil
			continue
		}
		for range viewers {
			r, err := http.Get(url + "api/v1/stream")
			if err != nil {
				fmt.Println(err)
				return
			}
			open = append(open, r.Body)
			go io.Copy(io.Discard, r.Body)
		}
	}
}

// The variants of a turn.
const (
	without = iota
	boarded
	watched
	variants
)

// turnOrders lists the orders of the turns in successive rounds. The order varies because the position
// in a round may affect the duration.
var turnOrders = [][variants]int{{without, boarded, watched}, {watched, without, boarded},
	{boarded, watched, without}, {watched, boarded, without}, {without, watched, boarded},
	{boarded, without, watched}}

// turns divides the steps of a run into turns without a board, with a board, and with viewers, and
// measures their durations.
type turns struct {
	feed  llm.Callback
	look  func() // connects or disconnects the viewers
	round chan<- struct{}
	go_   <-chan struct{}

	variant, steps int
	made           int // number of turns
	last           time.Time
	times          [variants][]float64 // seconds per step
	means          [variants][]float64 // mean of each turn
	paid           time.Duration       // by the training goroutine, in turns with a board
	fed            int
}

// event is a callback. A step lasts from the end of the previous step and includes its events.
func (m *turns) event(e llm.Event) error {
	now := time.Now()
	if e.Kind == llm.StepEnd && !m.last.IsZero() {
		m.times[m.variant] = append(m.times[m.variant], now.Sub(m.last).Seconds())
	}

	if e.Kind == llm.StepEnd {
		m.last = now
		m.steps++
	}

	if m.variant != without || e.Kind == llm.RunStart || e.Kind == llm.Measured {
		if err := m.feed(e); err != nil {
			return err
		}
		m.paid += time.Since(now)
		m.fed++
	}

	if e.Kind == llm.StepEnd && m.steps%(*costTurn+1) == 0 {
		return m.next()
	}

	return nil
}

// next ends a turn. The first step of the following turn is not measured.
func (m *turns) next() error {
	all := m.times[m.variant]
	turn, sum := all[max(0, len(all)-*costTurn):], 0.0
	for _, s := range turn {
		sum += s
	}

	m.means[m.variant] = append(m.means[m.variant], sum/float64(len(turn)))
	if m.variant == watched {
		m.look()
	}

	if m.made++; m.made%variants == 0 {
		m.round <- struct{}{}
		if _, more := <-m.go_; !more {
			return errDone
		}
	}

	if m.variant = turnOrders[m.made/variants%len(turnOrders)][m.made%variants]; m.variant == watched {
		m.look()
	}

	m.last = time.Time{}
	return nil
}

var errDone = errors.New("the benchmark is over")

// BenchmarkStep measures what a board adds to the duration of a training step. Turns of steps
// without a board, with a board, and with 20 viewers in another process alternate, and an
// iteration is one turn of each. The metrics are the median durations of a step, the mean
// differences from turns without a board in percent, with their standard errors, and the time that
// the training goroutine itself spends on the events of a step.
func BenchmarkStep(b *testing.B) {
	b.Run("cpu", func(b *testing.B) { cost(b, nil) })
	b.Run("gpu", func(b *testing.B) {
		device, err := cudaops.Open()
		if errors.Is(err, cudaops.ErrNoDevice) {
			b.Skip(err)
		}
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, device.Close()) })
		cost(b, device)
	})
}

// cost runs the benchmark on a device, or on the CPU if device is nil.
func cost(b *testing.B, device *cudaops.Device) {
	tr := costTrainer(b, device)
	shown, err := board.New()
	require.NoError(b, err)
	defer shown.Close()
	url, err := shown.Listen("127.0.0.1:0")
	require.NoError(b, err)
	round, goOn := make(chan struct{}), make(chan struct{})
	m := &turns{feed: shown.Feed(tr), look: lookers(b, url), round: round, go_: goOn}
	tr.On(llm.Ceilings(tr), m.event)
	ended := make(chan error, 1)
	go func() { ended <- tr.Run(context.Background()) }()
	<-round // loads kernels and fills caches
	m.times, m.means, m.paid, m.fed, m.made = [variants][]float64{}, [variants][]float64{}, 0, 0, 0
	for b.Loop() {
		goOn <- struct{}{}
		<-round
	}

	close(goOn)
	require.ErrorIs(b, <-ended, errDone)
	for variant, name := range []string{"without", "board", "viewers"} {
		slices.Sort(m.times[variant])
		b.ReportMetric(1e3*m.times[variant][len(m.times[variant])/2], name+"-ms/step")
		if variant != without {
			mean, spread := differences(m.means[variant], m.means[without])
			b.ReportMetric(100*mean, name+"-%")
			b.ReportMetric(100*spread, name+"-±%")
		}
	}

	steps := len(m.times[boarded]) + len(m.times[watched])
	b.ReportMetric(float64(m.paid.Microseconds())/float64(steps), "paid-µs/step")
	var r api.Run
	get(b, url+"api/v1/runs/0", &r)
	require.Zero(b, r.Dropped)
	b.ReportMetric(float64(r.Ceiling)/1e12, "ceiling-TFLOP/s")
	b.ReportMetric(100*float64(r.CeilingShare), "share-%")
}

// TestGPU checks that the board of a run on a GPU shows the GPU, and the fraction of its peak that
// the run reaches.
func TestGPU(t *testing.T) {
	device, err := cudaops.Open()
	if errors.Is(err, cudaops.ErrNoDevice) {
		t.Skip(err)
	}

	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, device.Close()) })
	tr := costTrainer(t, device)
	tr.Config.Steps = 20
	_, url := listen(t, tr)
	tr.On(llm.Ceilings(tr))
	require.NoError(t, tr.Run(t.Context()))
	var r api.Run
	require.Eventually(t, func() bool {
		get(t, url+"api/v1/runs/0", &r)
		return r.State == "ended"
	}, patience, 10*time.Millisecond)
	require.Greater(t, float64(r.Ceiling), 1e12)
	require.Greater(t, float64(r.CeilingShare), 0.0)
	require.Less(t, float64(r.CeilingShare), 1.0)
	var cards []api.Card
	get(t, url+"api/v1/cards", &cards)
	require.NotEmpty(t, cards)
	require.Greater(t, float64(cards[0].Power), 10.0)
	require.Greater(t, cards[0].Used, uint64(1<<20))
	t.Logf("%+v, %v of %v FLOP/s", cards[0], r.FLOPs, r.Ceiling)
}

// differences returns the mean of a/b − 1 and its standard error.
func differences(a, b []float64) (mean, spread float64) {
	for i := range a {
		mean += (a[i]/b[i] - 1) / float64(len(a))
	}
	for i := range a {
		spread += math.Pow(a[i]/b[i]-1-mean, 2)
	}
	return mean, math.Sqrt(spread / float64(len(a)) / float64(max(1, len(a)-1)))
}

// lookers starts a process that acts as the viewers of a page. Each call of the returned function
// connects or disconnects the viewers; at first they are not connected.
func lookers(b *testing.B, url string) func() {
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), viewersOf+"="+url)
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	require.NoError(b, err)
	out, err := c.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, c.Start())
	b.Cleanup(func() { require.NoError(b, errors.Join(in.Close(), c.Wait())) })
	lines := bufio.NewScanner(out)
	return func() {
		_, err := io.WriteString(in, "\n")
		if err != nil || !lines.Scan() || lines.Text() != "done" {
			panic(fmt.Sprint("the viewers: ", err, lines.Text()))
		}
	}
}

// costTrainer returns a trainer with seeds in all blocks. Its epochs are half as long as a turn.
func costTrainer(b testing.TB, device *cudaops.Device) *llm.Trainer {
	c := llm.Config{Vocab: 256, Dim: 64, Layers: 2, Heads: 2, FF: 128, Seeds: 16, Seq: *costSeq}
	if *costLarge {
		c.Vocab, c.Dim, c.Layers, c.Heads, c.FF = 50304, 768, 12, 12, 2048
	}

	for block := range c.Layers {
		c.Kasmina = append(c.Kasmina, block)
	}

	m, err := llm.NewModel(c.Default(), tensor.Float32, 1, state.WithoutGates())
	require.NoError(b, err)
	corpus, err := data.Open(texttest.Files(b, texttest.Numbered(1000)))
	require.NoError(b, err)
	tokens, err := data.Tokenize(b.Context(), corpus.Train, tokenizer.Bytes{})
	require.NoError(b, err)
	loader, err := data.NewLoader(tokens, data.LoaderConfig{Batch: *costBatch, Seq: c.Seq, Seed: 1})
	require.NoError(b, err)
	adamw, err := optim.NewAdamW(optim.WithLR(1e-5))
	require.NoError(b, err)
	config := llm.TrainConfig{Steps: math.MaxInt32 - 1, Batch: *costBatch, Epoch: max(1, *costTurn/2),
		Schedule: optim.Constant(1e-5)}
	if device != nil {
		config.Engine = gpu.Engine(device, cudaops.BFloat16)
	}

	tr, err := llm.NewTrainer(m, loader, adamw, config)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, tr.Close()) })
	return tr
}
