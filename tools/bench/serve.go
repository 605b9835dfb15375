package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/serve"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

// A load is the load on a server, as the options of the subcommand serve describe it.
type load struct {
	model                         size
	clients, slots, queue, tokens int
	adapters                      int
	duration                      time.Duration

	batcher *llm.Batcher
	device  *cudaops.Device // nil on a CPU
	drawn   atomic.Int64    // tokens

	continues []*llm.Generator // the model, and the model with each of the adapters

	answered, busy, gone, invalid, failed atomic.Int64 // requests
	mu                                    sync.Mutex
	failures                              []string
}

// A loadResult is the line of output of the subcommand serve.
type loadResult struct {
	Bench     string   `json:"bench"`
	Seconds   float64  `json:"seconds"`
	Answered  int64    `json:"answered"`
	Busy      int64    `json:"busy"` // refused with the status 429
	Gone      int64    `json:"disconnected"`
	Invalid   int64    `json:"invalid"` // refused as intended
	Failed    int64    `json:"failed"`
	Failures  []string `json:"failures,omitempty"` // the first ones
	TokensPS  float64  `json:"tok_s"`
	BarePS    float64  `json:"bare_tok_s"` // of the decoder alone, with as many texts as slots
	Share     float64  `json:"share"`
	MiBBefore float64  `json:"heap_mib_before"`
	MiBAfter  float64  `json:"heap_mib_after"`
	GPUBefore float64  `json:"gpu_free_gib_before,omitempty"`
	GPUAfter  float64  `json:"gpu_free_gib_after,omitempty"`
	Before    int      `json:"goroutines_before"`
	After     int      `json:"goroutines_after"`
}

// serveLoad measures a server under load. Each client sends one request after the other. A third of the answers are
// streamed, a few clients disconnect early, and a few requests are invalid.
func serveLoad(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f := flag.NewFlagSet("serve", flag.ContinueOnError)
	f.SetOutput(stderr)
	name := f.String("model", "llama124M", "model")
	l := &load{}
	f.IntVar(&l.clients, "clients", 256, "clients")
	f.IntVar(&l.slots, "slots", 64, "requests in the batch")
	f.IntVar(&l.queue, "queue", 64, "requests that wait for a slot")
	f.IntVar(&l.tokens, "tokens", 64, "tokens of an answer")
	f.IntVar(&l.adapters, "adapters", 0, "adapters of rank 16 among which the texts choose, besides the model itself")
	f.DurationVar(&l.duration, "time", time.Minute, "duration of the load")
	on := f.String("device", "cuda", "device: cuda or cpu")
	precision := cudaops.BFloat16
	f.TextVar(&precision, "precision", precision, "precision on a GPU: bf16, f16 or f32; a CPU uses bf16")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 || l.clients < 1 || l.slots < 1 || l.queue < 1 || l.tokens < 1 {
		return errors.New("serve takes only options, with at least one client, slot, waiting request and token")
	}
	i := slices.IndexFunc(decodings, func(s size) bool { return s.name == *name })
	if i < 0 {
		return fmt.Errorf("there is no model %q", *name)
	}
	l.model = decodings[i]

	switch *on {
	case "cpu":
	case "cuda":
		device, err := cudaops.Open()
		if err != nil {
			return err
		}
		defer device.Close()
		l.device = device
	default:
		return fmt.Errorf("the device is %q, want cuda or cpu", *on)
	}

	r, err := l.measure(ctx, precision)
	if err != nil {
		return err
	}
	return json.NewEncoder(stdout).Encode(r)
}

// open loads the model with random weights.
func (l *load) open(ctx context.Context, p cudaops.Precision) (llm.Config, error) {
	c := l.model.config.Default()
	c.Seq = min(c.Seq, 1024)
	w := weightsOf{newDrawnNumbers(), map[string]int{}}
	for p := range c.Specs() {
		w.sizes[p.Name] = tensor.Shape(p.Shape).TotalSize()
	}

	adapters, err := drawnAdapters(c, l.adapters)
	if err != nil {
		return c, err
	}
	if err := l.openBatcher(ctx, p, c, w, adapters); err != nil {
		return c, err
	}
	l.continues = []*llm.Generator{l.batcher.Generator()}
	for k := range adapters {
		g, err := l.batcher.Adapted(k)
		if err != nil {
			return c, errors.Join(err, l.batcher.Close())
		}
		l.continues = append(l.continues, g)
	}
	return c, nil
}

func (l *load) openBatcher(ctx context.Context, p cudaops.Precision, c llm.Config, w weightsOf,
	adapters []*llm.Adapter) error {
	o := llm.BatcherOptions{Texts: l.slots, Rows: max(128, l.slots)}
	if l.device == nil {
		m, err := llm.LoadCompact(ctx, cpuops.BFloat16, c, w)
		if err != nil {
			return err
		}
		o.Adapters = adapters
		l.batcher, err = m.Inference().NewBatcher(o)
		return err
	}

	load := func() (*llm.Inference, error) { return gpu.Load(ctx, l.device, p, c, w) }
	if len(adapters) > 0 {
		load = func() (*llm.Inference, error) { return gpu.LoadAdapted(ctx, l.device, p, c, w, adapters) }
	}
	i, err := load()
	if err != nil {
		return err
	}
	if l.batcher, err = gpu.NewBatcher(l.device, p, c, i, o); err != nil {
		err = errors.Join(err, i.Close())
	}
	return err
}

// drawnAdapters returns n adapters with random numbers for all linear layers.
func drawnAdapters(c llm.Config, n int) (all []*llm.Adapter, err error) {
	targets, err := c.MatchLayers(llm.AllLinear)
	if err != nil {
		return nil, err
	}
	r := rand.New(rand.NewPCG(3, 4))
	for range n {
		a, err := llm.NewAdapter(c, llm.LoRA{Rank: 16, Alpha: 16, Targets: targets}, tensor.Float32)
		if err != nil {
			return nil, err
		}
		for _, p := range a.Params {
			x := p.Value.Float32s()
			for i := range x {
				x[i] = float32(r.NormFloat64() * 0.02)
			}
		}
		all = append(all, a)
	}
	return all, nil
}

// A counted generator counts the tokens of a load.
type counted struct {
	*load
	generator *llm.Generator
}

// Generate implements serve.Generator.
func (c counted) Generate(ctx context.Context, prompt []int, n int, s *sampler.Sampler) iter.Seq2[int, error] {
	return func(yield func(int, error) bool) {
		for id, err := range c.generator.Generate(ctx, prompt, n, s) {
			if err == nil {
				c.drawn.Add(1)
			}
			if !yield(id, err) {
				return
			}
		}
	}
}

func (l *load) measure(ctx context.Context, p cudaops.Precision) (r loadResult, err error) {
	c, err := l.open(ctx, p)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, l.batcher.Close()) }()

	text, config, err := tokenizers.Train(ctx, strings.NewReader(strings.Repeat("to be or not to be ", 50)), 300, "gpt2", nil)
	if err != nil {
		return r, err
	}
	tok, err := tokenizers.Parse(text, config)
	if err != nil {
		return r, err
	}
	var models []*serve.Model
	for i, g := range l.continues {
		models = append(models, &serve.Model{Name: fmt.Sprint(i), Generator: counted{l, g}, Tokenizer: tok, Context: c.Seq,
			Vocab: tok.VocabSize(), Sampling: sampler.Config{Temperature: 1}})
	}
	s, err := serve.New(serve.Options{Slots: l.slots, Queue: l.queue}, models...)
	if err != nil {
		return r, err
	}

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return r, err
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(running, listener) }()
	defer func() { stop(); err = errors.Join(err, <-ended) }()

	url := "http://" + listener.Addr().String() + "/v1/completions"
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: l.clients}}
	if err := l.check(ctx, client, url, tok); err != nil {
		return r, err
	}
	if _, err := l.bare(ctx, 2*time.Second); err != nil { // builds the graphs
		return r, err
	}
	client.CloseIdleConnections()
	r.MiBBefore, r.GPUBefore, r.Before, err = l.resources()
	if err != nil {
		return r, err
	}

	first, err := l.bare(ctx, min(10*time.Second, l.duration/4))
	if err != nil {
		return r, err
	}
	rate := l.serve(ctx, client, url)
	second, err := l.bare(ctx, min(10*time.Second, l.duration/4))
	if err != nil {
		return r, err
	}

	client.CloseIdleConnections()
	if r.MiBAfter, r.GPUAfter, r.After, err = l.resources(); err != nil {
		return r, err
	}
	r.Bench = fmt.Sprintf("serve %s, %d clients, %d slots, %d adapters", l.model.name, l.clients, l.slots, l.adapters)
	r.Seconds, r.TokensPS, r.BarePS = l.duration.Seconds(), rate, (first+second)/2
	r.Share = r.TokensPS / r.BarePS
	r.Answered, r.Busy, r.Gone = l.answered.Load(), l.busy.Load(), l.gone.Load()
	r.Invalid, r.Failed, r.Failures = l.invalid.Load(), l.failed.Load(), l.failures
	return r, nil
}

// resources returns the size of the heap in MiB, the free memory of the GPU in GiB, and the number of goroutines. It
// first waits a moment for connections to end.
func (l *load) resources() (mib, gib float64, goroutines int, err error) {
	time.Sleep(500 * time.Millisecond)
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if l.device != nil {
		free, _, err := l.device.Memory()
		if err != nil {
			return 0, 0, 0, err
		}
		gib = float64(free) / (1 << 30)
	}
	return float64(m.HeapAlloc) / (1 << 20), gib, runtime.NumGoroutine(), nil
}

// body returns a request for an answer to prompt k.
func (l *load) body(k int, more string) string {
	return fmt.Sprintf(`{"model":"%d","prompt":[%d,6,7,8,9,10,11,12],"max_tokens":%d,"seed":%d,"ignore_eos":true%s}`,
		k%len(l.continues), k%250+5, l.tokens, k, more)
}

// check compares answers with the texts that the generators make.
func (l *load) check(ctx context.Context, client *http.Client, url string, tok *tokenizers.Tokenizer) (err error) {
	for k := range l.continues {
		err = errors.Join(err, l.checkModel(ctx, client, url, tok, k))
	}
	return err
}

func (l *load) checkModel(ctx context.Context, client *http.Client, url string, tok *tokenizers.Tokenizer, k int) error {
	s, err := sampler.New(sampler.Config{Vocab: tok.VocabSize()})
	if err != nil {
		return err
	}
	var ids []int
	for id, err := range l.continues[k].Generate(ctx, []int{k%250 + 5, 6, 7, 8, 9, 10, 11, 12}, l.tokens, s) {
		if err != nil {
			return err
		}
		ids = append(ids, id)
	}
	want, err := tok.Decode(ids)
	if err != nil {
		return err
	}

	status, text, err := post(ctx, client, url, l.body(k, `,"temperature":0`))
	if err != nil {
		return err
	}
	var answer struct{ Choices []struct{ Text string } }
	if err := json.Unmarshal(text, &answer); err != nil || status != http.StatusOK || len(answer.Choices) != 1 {
		return fmt.Errorf("the server answers %d %.300s", status, text)
	}
	if got := answer.Choices[0].Text; got != string([]rune(string(want))) {
		return fmt.Errorf("the server answers %q, and the generator %q", got, want)
	}
	return nil
}

func post(ctx context.Context, client *http.Client, url, body string) (status int, text []byte, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	answer, err := client.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer answer.Body.Close()
	text, err = io.ReadAll(answer.Body)
	return answer.StatusCode, text, err
}

// bare returns the tokens per second of the decoder with as many texts as slots.
func (l *load) bare(ctx context.Context, d time.Duration) (float64, error) {
	errs := make([]error, l.slots)
	return l.timed(ctx, d, l.slots, func(ctx context.Context, k int) {
		for n := 0; ctx.Err() == nil && errs[k] == nil; n++ {
			s, err := sampler.New(sampler.Config{Temperature: 1, Seed: uint64(k + n), Vocab: 300})
			if err != nil {
				errs[k] = err
				return
			}
			g := counted{l, l.continues[(k+n)%len(l.continues)]}
			for _, err := range g.Generate(context.WithoutCancel(ctx), []int{k%250 + 5, 6, 7, 8, 9, 10, 11, 12}, l.tokens, s) {
				errs[k] = err
			}
		}
	}), errors.Join(errs...)
}

// timed runs n goroutines until d has passed, and returns the tokens per second up to then.
func (l *load) timed(ctx context.Context, d time.Duration, n int, run func(ctx context.Context, k int)) float64 {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	var all sync.WaitGroup
	before, began := l.drawn.Load(), time.Now()
	for k := range n {
		all.Go(func() { run(ctx, k) })
	}
	<-ctx.Done()
	rate := float64(l.drawn.Load()-before) / time.Since(began).Seconds()
	all.Wait()
	return rate
}

// serve puts the load on the server and returns its tokens per second.
func (l *load) serve(ctx context.Context, client *http.Client, url string) float64 {
	return l.timed(ctx, l.duration, l.clients, func(ctx context.Context, k int) {
		for n := k; ctx.Err() == nil; n++ {
			l.request(context.WithoutCancel(ctx), client, url, n)
		}
	})
}

// request sends request n of a client.
func (l *load) request(ctx context.Context, client *http.Client, url string, n int) {
	body, stream := l.body(n, ""), n%3 == 0
	if stream {
		body = l.body(n, `,"stream":true`)
	}
	switch {
	case n%37 == 5: // disconnects
		soon, leave := context.WithTimeout(ctx, time.Duration(n%7)*time.Millisecond)
		_, _, _ = post(soon, client, url, body)
		leave()
		l.gone.Add(1)
		return
	case n%53 == 6:
		body = body[:len(body)/2]
	}

	status, text, err := post(ctx, client, url, body)
	switch {
	case err == nil && status == http.StatusTooManyRequests:
		l.busy.Add(1)
		time.Sleep(50 * time.Millisecond)
	case err == nil && n%53 == 6 && status == http.StatusBadRequest:
		l.invalid.Add(1)
	case err == nil && status == http.StatusOK && (!stream || bytes.HasSuffix(text, []byte("data: [DONE]\n\n"))):
		l.answered.Add(1)
	default:
		l.failed.Add(1)
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.failures) < 5 {
			l.failures = append(l.failures, fmt.Sprintf("%d %.200s %v", status, text[max(0, len(text)-200):], err))
		}
	}
}
