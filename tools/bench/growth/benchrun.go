package growth

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
)

// evaluationShares lists the shares of the budget for evaluations: many at the start, where the loss
// falls fast, and every twentieth later.
var evaluationShares = []float64{0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4,
	0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1}

// epochs is the approximate number of epochs in a run of the largest model. Smaller models have more.
const epochs = 200

// trainingPoints is the number of training losses in a record.
const trainingPoints = 128

// train runs a job. If the run diverges, its record contains the reason.
//
// A model that grows follows the given decisions. If decisions is nil, its controller decides, and train records the
// decisions.
func (b *bench) train(ctx context.Context, j job, d *cudaops.Device, decisions *llm.Record) (r record, err error) {
	r = record{job: j, Device: "CPU", Parameters: 0}
	if d != nil {
		r.Device = fmt.Sprint(d)
	}

	t, err := b.trainer(j, d)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()

	if j.Arm.grows() {
		growth := llm.Growth{Replay: decisions, Rewarm: j.Arm.rewarm, FreshMoments: j.Arm.moments == "fresh"}
		if decisions == nil {
			f, err := b.createDecisions(j)
			if err != nil {
				return r, err
			}
			defer func() { err = errors.Join(err, f.Close()) }()
			growth.Controller, growth.Record = j.Arm.controller(), f
		}

		if err := t.Grow(growth); err != nil {
			return r, err
		}
	}

	watcher := &watcher{trainer: t, heldOut: b.text.heldOut, record: &r}
	t.On(watcher.watch)
	switch err := t.Run(ctx); {
	case errors.Is(err, llm.ErrDiverged):
		r.Failed = "diverged"
	case err != nil:
		return r, err
	}

	last := t.Last()
	r.Parameters, r.Steps, r.Tokens, r.FLOPs = last.Params, last.Step, last.RunTokens, last.Spent.FLOPs
	r.Seconds = (last.Elapsed - watcher.evaluating).Seconds()
	if r.Failed == "" {
		r.Weights, err = weightsSum(t.Model)
	}
	return r, err
}

// weightsSum returns the SHA-256 of the names and values of a model's parameters.
func weightsSum(m *llm.Model) (string, error) {
	done, err := m.Current()
	if err != nil {
		return "", err
	}
	defer done()

	const atATime = 1 << 20
	sum := sha256.New()
	for _, p := range m.Params {
		values, ok := p.Value.Data().([]float32)
		if !ok {
			return "", fmt.Errorf("the parameter %s has values of the type %T, want []float32", p.Name, p.Value.Data())
		}

		fmt.Fprintf(sum, "%s %d\n", p.Name, len(values))
		for part := range slices.Chunk(values, atATime) {
			if err := binary.Write(sum, binary.LittleEndian, part); err != nil {
				return "", err
			}
		}
	}

	return hex.EncodeToString(sum.Sum(nil)), nil
}

// trainer makes the trainer of a job.
func (b *bench) trainer(j job, d *cudaops.Device) (*llm.Trainer, error) {
	c := j.Arm.config(b.Largest)
	m, err := llm.NewModel(c, tensor.Float32, j.Seed)
	if err != nil {
		return nil, err
	}

	loader, err := data.NewLoader(b.text.tokens, data.LoaderConfig{Batch: b.Batch, Seq: c.Seq, Seed: j.Seed})
	if err != nil {
		return nil, err
	}

	o := b.options
	o.optimizer = j.Arm.optimizer
	optimizer, err := (&experiment{options: o}).newOptimizer(j.Arm.rate)
	if err != nil {
		return nil, err
	}

	flops := b.flops(j)
	train := llm.TrainConfig{Batch: b.Batch, Clip: 1, Budget: llm.Budget{FLOPs: flops}}
	if j.Equal == "time" {
		train.Budget = llm.Budget{Time: time.Duration(flops / b.Speed * float64(time.Second))}
	}

	steps := flops / b.Largest.FLOPs() / float64(b.Batch*c.Seq)
	train.Epoch = max(1, int(steps/epochs))
	if train.Schedule, err = optim.Warmup(j.Arm.rate, min(warmup, int(steps/20))); err != nil {
		return nil, err
	}

	if train.Annealing, err = j.Arm.annealing(); err != nil {
		return nil, err
	}

	if d != nil {
		train.Engine = gpu.Engine(d, b.precision)
	}

	return llm.NewTrainer(m, loader, optimizer, train)
}

// A watcher evaluates a run and writes its curves into the run's record.
type watcher struct {
	trainer    *llm.Trainer
	heldOut    *data.Evaluation
	record     *record
	evaluating time.Duration // so far; excluded from the time of the run

	losses float64 // sum of the training losses since the last point
	steps  int     // number of these losses
}

func (w *watcher) watch(e llm.Event) error {
	switch e.Kind {
	case llm.Reshaped:
		text := e.Text
		if e.Err != nil {
			text += ": " + e.Err.Error()
		}
		w.record.Growths = append(w.record.Growths, growth{Share: e.Share, Step: e.Step,
			Blocks: w.trainer.Model.Config.Layers, Text: text})
	case llm.Noted:
		w.record.Notes = append(w.record.Notes, e.Text)
	case llm.StepEnd:
		w.losses, w.steps = w.losses+e.Loss, w.steps+1
		if n := len(w.record.Training); e.Last || e.Share*trainingPoints >= float64(n+1) {
			w.record.Training = append(w.record.Training, [2]float64{e.Share, rounded(w.losses/float64(w.steps), 4)})
			w.losses, w.steps = 0, 0
		}
		if n := len(w.record.Curve); e.Last || n < len(evaluationShares) && e.Share >= evaluationShares[n] {
			return w.evaluate(e)
		}
	}

	return nil
}

// evaluate adds a point to the curve of held-out losses.
func (w *watcher) evaluate(e llm.Event) error {
	began := time.Now()
	_, bits, err := w.trainer.Evaluate(w.heldOut)
	if err != nil {
		return err
	}

	w.record.Loss = bits * math.Ln2
	w.record.Curve = append(w.record.Curve, curvePoint{Share: e.Share,
		Seconds: rounded((e.Elapsed - w.evaluating).Seconds(), 2), Tokens: e.RunTokens,
		Blocks: w.trainer.Model.Config.Layers, Loss: rounded(w.record.Loss, 5)})
	w.evaluating += time.Since(began)
	return nil
}

func rounded(v float64, digits int) float64 {
	scale := math.Pow10(digits)
	return math.Round(v*scale) / scale
}

// The speed of the largest static model is measured over speedTime, after speedWarmup steps.
const speedWarmup = 10

var speedTime = 2 * time.Second // shorter in tests

// measureSpeed measures how fast each device trains the largest static model, unless the study knows
// it. The study keeps the mean, so that runs of equal time have the same time on all devices.
func (b *bench) measureSpeed(ctx context.Context) error {
	if b.Speed > 0 {
		return nil
	}

	// A GPU that is named twice is measured once, alone.
	devices := slices.CompactFunc(slices.SortedFunc(slices.Values(b.devices), byOrdinal),
		func(x, y *cudaops.Device) bool { return byOrdinal(x, y) == 0 })
	speeds, errs := make([]float64, len(devices)), make([]error, len(devices))
	var all sync.WaitGroup
	for i, d := range devices {
		all.Go(func() { speeds[i], errs[i] = b.speedOf(ctx, d) })
	}

	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("the speed of the largest model: %w", err)
	}

	for _, speed := range speeds {
		b.Speed += speed / float64(len(speeds))
	}

	fmt.Fprintf(b.stderr, "speed     %.4g FLOPs per second for the largest model (on each device: %.4g)\n",
		b.Speed, speeds)
	return b.saveSettings()
}

// byOrdinal orders devices by their positions. The CPU comes first.
func byOrdinal(x, y *cudaops.Device) int {
	ordinal := func(d *cudaops.Device) int {
		if d == nil {
			return -1
		}
		return d.Ordinal()
	}
	return cmp.Compare(ordinal(x), ordinal(y))
}

// speedOf returns the FLOPs per second of the largest static model on a device.
func (b *bench) speedOf(ctx context.Context, d *cudaops.Device) (float64, error) {
	a, err := parseArm(fmt.Sprintf("blocks=%d,lr=0.001", b.Largest.Layers))
	if err != nil {
		return 0, err
	}

	t, err := b.trainer(job{Arm: a, Budget: 1e6, Equal: "flops", Seed: 1}, d)
	if err != nil {
		return 0, err
	}
	defer t.Close()

	var began time.Time
	var steps int
	enough := errors.New("the speed is known")
	t.On(func(e llm.Event) error {
		switch {
		case e.Kind != llm.StepEnd || e.Step < speedWarmup:
		case e.Step == speedWarmup:
			began = time.Now()
		case time.Since(began) >= speedTime:
			steps = e.Step - speedWarmup
			return enough
		}
		return nil
	})

	if err := t.Run(ctx); !errors.Is(err, enough) {
		return 0, errors.Join(err, errors.New("the run ended before it was timed"))
	}

	took := time.Since(began).Seconds()
	return float64(steps*b.Batch*b.Largest.Seq) * b.Largest.FLOPs() / took, nil
}
