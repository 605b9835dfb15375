package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/sampler"
)

// decodings lists the shapes that the subcommand decode times.
var decodings = []size{sizes[0], sizes[3], {name: "llama3.1-8B", config: llm.Config{Vocab: 128256,
	Dim: 4096, Layers: 32, Heads: 32, KVHeads: 8, FF: 14336, Seq: 4096, Base: 5e5, Untied: true}}}

// decode times the generation of tokens with random weights.
func decode(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f := flag.NewFlagSet("decode", flag.ContinueOnError)
	f.SetOutput(stderr)
	models := f.String("models", "llama124M,llama3.2-1B,llama3.1-8B", "models, separated by commas")
	position := f.Int("position", 1024, "tokens before the timed ones")
	tokens := f.Int("tokens", 200, "tokens to time")
	texts := f.Int("texts", 1, "texts to continue at the same time")
	variants := f.String("variants", "", "rules for the variants of kernels, separated by commas")
	tune := cudaops.TuneOff
	f.TextVar(&tune, "tune", tune, "how the fastest kernels are found: off, cached or full")
	weights := cpuops.BFloat16
	f.Func("weights", "type of the weights of linear layers: bf16 (the default, for that of the precision), f8 or nf4",
		func(s string) error { return weights.UnmarshalText([]byte(s)) })
	precision := cudaops.BFloat16
	f.TextVar(&precision, "precision", precision, "precision: bf16, f16 or f32")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 || *position < 2 || *tokens < 1 || *texts < 1 {
		return errors.New("decode takes only options, with a position of at least 2, a token and a text")
	}

	device, err := cudaops.Open()
	if err != nil {
		return err
	}
	defer device.Close()

	opts := []cudaops.MachineOption{cudaops.WithTuning(tune)}
	if *variants != "" {
		opts = append(opts, cudaops.WithVariants(strings.Split(*variants, ",")...))
	}

	for _, s := range decodings {
		if !slices.Contains(strings.Split(*models, ","), s.name) {
			continue
		}
		d := decoding{device: device, precision: precision, size: s, position: *position, tokens: *tokens, texts: *texts,
			opts: opts, stored: weights}
		r, err := d.time(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		if err := json.NewEncoder(stdout).Encode(r); err != nil {
			return err
		}
	}

	return nil
}

// A decodeResult is a line of output of the subcommand decode.
type decodeResult struct {
	Bench       string  `json:"bench"`
	Us          float64 `json:"us"`            // for each token
	TokensPS    float64 `json:"tok_s"`         // if nothing waits for the tokens
	GBps        float64 `json:"gbps"`          // of weights, keys and values
	HostTokens  float64 `json:"tok_s_host"`    // as programs see them
	Prefill     float64 `json:"prefill_tok_s"` // of a prompt with the same number of tokens
	Forward     float64 `json:"forward_tok_s"` // of the forward pass of training, for one text of that length
	Fingerprint string  `json:"fingerprint"`   // the first tokens and logits
}

// drawnNumbers are random numbers that serve as the weights of models.
type drawnNumbers struct{ numbers []byte }

func newDrawnNumbers() drawnNumbers {
	r := rand.New(rand.NewPCG(1, 2))
	w := drawnNumbers{make([]byte, 8<<20)}
	for i := 0; i < len(w.numbers); i += 2 {
		x := math.Float32bits(float32(r.NormFloat64() * 0.02))
		w.numbers[i], w.numbers[i+1] = byte(x>>16), byte(x>>24)
	}
	return w
}

// read passes n numbers to put.
func (w drawnNumbers) read(name string, n int, put func(part []byte, dtype string) error) error {
	at := 0
	for _, c := range name {
		at = (at*31 + int(c)) % (len(w.numbers) / 2)
	}
	if strings.Contains(name, "norm") {
		ones := make([]byte, 2*n)
		for i := range n {
			ones[2*i], ones[2*i+1] = 0x80, 0x3f
		}
		return put(ones, "bfloat16")
	}

	for n > 0 {
		part := min(n, len(w.numbers)/2-at)
		if err := put(w.numbers[2*at:2*(at+part)], "bfloat16"); err != nil {
			return err
		}
		n, at = n-part, 0
	}
	return nil
}

// weightsOf are the random weights of a model. They implement gpu.Weights.
type weightsOf struct {
	drawnNumbers
	sizes map[string]int
}

func (w weightsOf) Read(_ context.Context, name string, put func([]byte, string) error) error {
	return w.read(name, w.sizes[name], put)
}

// A decoding is a measurement of a model.
type decoding struct {
	size
	device                  *cudaops.Device
	precision               cudaops.Precision
	position, tokens, texts int
	opts                    []cudaops.MachineOption
	stored                  cpuops.WeightType

	weights int        // numbers that a token reads, except packed ones
	packed  int        // bytes of packed weights
	step    llm.Runner // the graph that computes one token of every text
}

// load loads the model with random weights.
func (d *decoding) load(ctx context.Context) (*llm.Inference, error) {
	c := d.config.Default()
	c.Seq = d.position + d.tokens + 32
	d.config = c
	w := weightsOf{newDrawnNumbers(), map[string]int{}}
	packed := new(cpuops.Weights)
	for p := range c.Specs() {
		n := tensor.Shape(p.Shape).TotalSize()
		w.sizes[p.Name] = n
		if d.stored != cpuops.BFloat16 && len(p.Shape) == 2 && strings.Contains(p.Name, ".layers.") {
			if err := d.pack(packed, w, p); err != nil {
				return nil, err
			}
			continue
		}
		d.weights += n
	}
	d.packed = packed.Bytes()
	opts := append(slices.Clone(d.opts), cudaops.WithWeights(packed))
	if c.Untied { // only one row of the embeddings is read for each token
		d.weights -= c.Vocab * c.Dim
	}

	i, err := gpu.Load(ctx, d.device, d.precision, c, w, opts...)
	if err != nil {
		return nil, err
	}
	newMachine := i.Make
	i.Make = func(g *llm.Graph) (llm.Machine, error) {
		m, err := newMachine(g)
		if rows := g.IDs.Shape()[0]; rows == d.texts && (g.Position != nil || g.Pages != nil) {
			d.step = llm.Runner{Graph: g, Machine: m}
		}
		return m, err
	}
	return i, nil
}

// pack adds a parameter to the packed weights. On the host, all layers share the matrices of the first one.
func (d *decoding) pack(to *cpuops.Weights, w weightsOf, p llm.ParamSpec) error {
	before, after, _ := strings.Cut(p.Name, ".layers.")
	_, part, _ := strings.Cut(after, ".")
	if first := before + ".layers.0." + part; first != p.Name {
		return to.Alias(p.Name, first)
	}
	return to.Add(d.stored, p.Name, p.Shape[0], p.Shape[1], func(put func([]float32) error) error {
		return w.read(p.Name, w.sizes[p.Name], func(part []byte, _ string) error {
			numbers := make([]float32, len(part)/2)
			for i := range numbers {
				numbers[i] = math.Float32frombits(uint32(part[2*i])<<16 | uint32(part[2*i+1])<<24)
			}
			return put(numbers)
		})
	})
}

// A text is a text that is continued greedily, by the host or on the device.
type text struct {
	next   func(ctx context.Context, tokens []int) (any, error)
	draw   llm.DrawFunc // on the device; nil if the host draws
	greedy *sampler.Sampler
	tokens []int
	drawn  []string // the first tokens and their logits
}

func (t *text) extend(ctx context.Context, last bool) error {
	if t.draw != nil {
		id, err := t.draw(ctx, t.tokens, t.greedy, last)
		if err == nil && len(t.drawn) < 8 {
			t.drawn = append(t.drawn, fmt.Sprint(id))
		}
		t.tokens = append(t.tokens, id)
		return err
	}

	logits, err := t.next(ctx, t.tokens)
	if err != nil {
		return err
	}
	x, best := logits.([]float32), 0
	for i, v := range x {
		if v > x[best] {
			best = i
		}
	}
	if len(t.drawn) < 8 {
		t.drawn = append(t.drawn, fmt.Sprintf("%d:%.4g", best, x[best]))
	}
	t.tokens = append(t.tokens, best)
	return nil
}

// extendAll extends texts by n tokens each, at the same time.
func extendAll(ctx context.Context, texts []*text, n int) error {
	errs := make([]error, len(texts))
	var all sync.WaitGroup
	for i, t := range texts {
		all.Go(func() {
			for k := range n {
				if errs[i] = t.extend(ctx, k == n-1); errs[i] != nil {
					return
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// time takes the measurement.
func (d *decoding) time(ctx context.Context) (r decodeResult, err error) {
	model, err := d.load(ctx)
	if err != nil {
		return r, err
	}

	newText, newDraw, closer := model.Decoder, model.Drawer, model.Close
	if d.texts > 1 {
		b, err := gpu.NewBatcher(d.device, d.precision, d.config, model, llm.BatcherOptions{Texts: d.texts,
			Rows: max(512, d.texts)})
		if err != nil {
			return r, errors.Join(err, model.Close())
		}
		newText, newDraw, closer = b.Decoder, b.Drawer, b.Close
	}
	defer func() { err = errors.Join(err, closer()) }()

	var texts []*text
	for i := range d.texts {
		t := &text{tokens: make([]int, d.position)}
		for j := range t.tokens {
			t.tokens[j] = (j*7919 + 13 + i*i) % d.config.Vocab
		}
		if t.draw, err = newDraw(); err != nil {
			return r, err
		}
		if t.next, err = newText(); err != nil {
			return r, err
		}
		if t.greedy, err = sampler.New(sampler.Config{}); err != nil {
			return r, err
		}
		texts = append(texts, t)
	}
	if err := extendAll(ctx, texts, 8); err != nil {
		return r, err
	}

	began := time.Now()
	if err := extendAll(ctx, texts, d.tokens); err != nil {
		return r, err
	}
	r.HostTokens = float64(d.tokens*d.texts) / time.Since(began).Seconds()

	if _, err := d.repeat(ctx, 10); err != nil {
		return r, err
	}
	took, err := d.repeat(ctx, d.tokens)
	if err != nil {
		return r, err
	}

	if r.Prefill, err = d.prefill(ctx, texts[0]); err != nil {
		return r, err
	}
	if r.Forward, err = d.forward(ctx, model); err != nil {
		return r, err
	}

	each := took.Seconds() / float64(d.tokens)
	element := 2
	if d.precision == cudaops.Float32 {
		element = 4
	}
	c := d.config
	bytes := d.packed + element*(d.weights+2*c.Layers*c.KVHeads*c.HeadDim*(d.position+d.tokens+8)*d.texts)
	r.Bench = fmt.Sprintf("decode_%s_%d_%d", d.name, d.position, d.texts)
	if d.stored != cpuops.BFloat16 {
		r.Bench += "_" + d.stored.String()
	}
	r.Us, r.TokensPS, r.GBps = each*1e6, float64(d.texts)/each, float64(bytes)/each/1e9
	r.Fingerprint = strings.Join(texts[0].drawn, " ")
	return r, nil
}

// prefill returns the speed of reading a text, in tokens per second. It makes four passes over different tokens, and times
// the last one.
func (d *decoding) prefill(ctx context.Context, t *text) (float64, error) {
	var took time.Duration
	for i := range 4 {
		tokens := make([]int, d.position)
		for j := range tokens {
			tokens[j] = (j*7907 + i + 1) % d.config.Vocab
		}
		began := time.Now()
		if _, err := t.next(ctx, tokens); err != nil {
			return 0, err
		}
		took = time.Since(began)
	}
	return float64(d.position) / took.Seconds(), nil
}

// forward returns the speed of the forward pass of training for one text, including its loss, in tokens per second.
func (d *decoding) forward(ctx context.Context, model *llm.Inference) (speed float64, err error) {
	g, err := llm.BuildGraph(llm.Outline(d.config), llm.ForLoss, 1, llm.WithWindow(d.position))
	if err != nil {
		return 0, err
	}
	machine, err := model.Make(g)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, machine.Close()) }()

	batch := data.Batch{Inputs: make([]int, d.position), Targets: make([]int, d.position)}
	for j := range batch.Inputs {
		batch.Inputs[j], batch.Targets[j] = (j*7907+1)%d.config.Vocab, (j*7919+1)%d.config.Vocab
	}
	var took time.Duration
	for range 4 { // the first runs load kernels and record a CUDA graph
		began := time.Now()
		if _, err := (llm.Runner{Graph: g, Machine: machine}).RunContext(ctx, batch); err != nil {
			return 0, err
		}
		took = time.Since(began)
	}
	return float64(d.position) / took.Seconds(), nil
}

// repeat computes the last token of every text again, n times.
func (d *decoding) repeat(ctx context.Context, n int) (time.Duration, error) {
	if d.step.Machine == nil {
		return 0, fmt.Errorf("no graph has computed one token of %d texts: choose more tokens", d.texts)
	}

	began := time.Now()
	for range n {
		if err := d.step.Machine.Run(ctx); err != nil {
			return 0, err
		}
	}
	_, err := d.step.Machine.Value(d.step.IDs) // waits
	return time.Since(began), err
}
