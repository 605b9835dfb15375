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
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
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
	duration, every               time.Duration

	batcher *llm.Batcher
	device  *cudaops.Device // nil on a CPU
	drawn   atomic.Int64    // number of generated tokens

	continues []*llm.Generator // the model, and the model with each of the adapters

	answered, busy, gone, invalid, failed atomic.Int64 // requests
	mu                                    sync.Mutex
	failures                              map[string]int // by kind
	examples                              []string       // of the first failures
}

// counts holds the number of requests for each outcome.
type counts struct {
	Answered int64 `json:"answered"`
	Busy     int64 `json:"busy"` // rejected with status 429
	Gone     int64 `json:"disconnected"`
	Invalid  int64 `json:"invalid"` // rejected, as they should be
	Failed   int64 `json:"failed"`
}

// A loadResult is the last line of output of the subcommand serve.
type loadResult struct {
	Bench   string  `json:"bench"`
	Seconds float64 `json:"seconds"`
	counts
	Failures map[string]int `json:"failures,omitempty"` // by kind
	Examples []string       `json:"examples,omitempty"` // of failures
	TokensPS float64        `json:"tok_s"`
	BarePS   []float64      `json:"bare_tok_s"` // of the decoder alone, with as many texts as slots, before and after
	Share    float64        `json:"share"`
	Before   resources      `json:"before"`
	After    resources      `json:"after"`
}

// A loadReport is a line of output during the load.
type loadReport struct {
	At float64 `json:"at_s"`
	counts
	TokensPS float64   `json:"tok_s"` // since the last report
	Now      resources `json:"now"`
}

// resources holds the use of resources that a server could leak.
type resources struct {
	Heap       float64 `json:"heap_mib"`
	Process    float64 `json:"process_mib,omitempty"`  // of physical memory; only on Linux
	Free       float64 `json:"gpu_free_gib,omitempty"` // on the GPU
	Goroutines int     `json:"goroutines"`
}

// serveLoad measures a server under load.
//
// Each client sends one request after the other, each for one of the models. A third of the requests ask for a stream, and
// a fifth have stop texts. A few clients disconnect before or during their answer, and a few requests are invalid.
func serveLoad(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f := flag.NewFlagSet("serve", flag.ContinueOnError)
	f.SetOutput(stderr)
	name := f.String("model", "llama124M", "model")
	l := &load{}
	f.IntVar(&l.clients, "clients", 256, "clients")
	f.IntVar(&l.slots, "slots", 64, "requests in the batch")
	f.IntVar(&l.queue, "queue", 64, "requests that wait for a slot")
	f.IntVar(&l.tokens, "tokens", 64, "tokens of an answer")
	f.IntVar(&l.adapters, "adapters", 0, "adapters of rank 16 among which the texts choose, besides the model itself: low-rank\nadapters and chunk seeds in turns")
	f.DurationVar(&l.duration, "time", time.Minute, "duration of the load")
	f.DurationVar(&l.every, "every", time.Minute, "time between the lines of output during the load")
	on := f.String("device", "cuda", "device: cuda or cpu")
	precision := cudaops.BFloat16
	f.TextVar(&precision, "precision", precision, "precision on a GPU: bf16, f16 or f32; a CPU uses bf16")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 || l.clients < 1 || l.slots < 1 || l.queue < 1 || l.tokens < 1 || l.duration <= 0 ||
		l.every <= 0 {
		return errors.New("serve takes only options, with at least one client, slot, waiting request and token, and " +
			"times above 0")
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

	lines := json.NewEncoder(stdout)
	r, err := l.measure(ctx, precision, lines)
	if err != nil {
		return err
	}
	return lines.Encode(r)
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

// drawnAdapters returns n adapters of rank 16 with random numbers. Low-rank adapters of all linear layers alternate with
// chunk seeds after all blocks.
func drawnAdapters(c llm.Config, n int) (all []*llm.Adapter, err error) {
	const rank = 16
	targets, err := c.MatchLayers(llm.AllLinear)
	if err != nil {
		return nil, err
	}

	r := rand.New(rand.NewPCG(3, 4))
	for k := range n {
		if k%2 == 1 {
			a := &llm.Adapter{}
			for i := range c.Layers {
				w := make([]float32, 2*rank*c.Dim)
				for j := range w {
					w[j] = float32(r.NormFloat64() * 0.02)
				}
				a.Seeds = append(a.Seeds, llm.SeedLayer{Block: i, Chunks: 1, Seeds: []llm.ChunkSeed{{
					Kind: blueprints.LowRank.String(), Alpha: 1, Scale: 1,
					Weights: tensor.New(tensor.WithShape(len(w)), tensor.WithBacking(w))}}})
			}
			all = append(all, a)
			continue
		}

		a, err := llm.NewAdapter(c, llm.LoRA{Rank: rank, Alpha: rank, Targets: targets}, tensor.Float32)
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

// counted is a generator that counts the tokens of a load.
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

// nameOf returns the name of model k. Model 0 has no adapter, and model k > 0 has adapter k-1.
func (l *load) nameOf(k int) string {
	if k == 0 {
		return l.model.name
	}
	return fmt.Sprintf("adapter%d", k)
}

// measure measures the speed of the generator alone, then of the server under load, and then of the generator again.
// During the load, it writes reports to lines.
func (l *load) measure(ctx context.Context, p cudaops.Precision, lines *json.Encoder) (r loadResult, err error) {
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
		models = append(models, &serve.Model{Name: l.nameOf(i), Generator: counted{l, g}, Tokenizer: tok, Context: c.Seq,
			Vocab: tok.VocabSize(), Sampling: sampler.Config{Temperature: 1}})
	}
	s, err := serve.New(serve.Options{Slots: l.slots, Queue: l.queue}, models...)
	if err != nil {
		return r, err
	}

	// Start the server, and check its answers before the first measurement.
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return r, err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx)) // ends after the load
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
	if r.Before, err = l.settled(); err != nil {
		return r, err
	}

	brief := min(10*time.Second, l.duration/4)
	first, err := l.bare(ctx, brief)
	if err != nil {
		return r, err
	}
	began := time.Now()
	reporting, quiet := context.WithCancel(ctx)
	reported := make(chan error, 1)
	go func() { reported <- l.report(reporting, lines) }()
	rate := l.serve(ctx, client, url)
	quiet()
	if err := <-reported; err != nil {
		return r, err
	}
	r.Seconds = time.Since(began).Seconds()
	second, err := l.bare(ctx, brief)
	if err != nil {
		return r, err
	}

	client.CloseIdleConnections()
	if r.After, err = l.settled(); err != nil {
		return r, err
	}
	r.Bench = fmt.Sprintf("serve %s, %d clients, %d slots, %d adapters", l.model.name, l.clients, l.slots, l.adapters)
	r.TokensPS, r.BarePS = rate, []float64{first, second}
	r.Share = r.TokensPS / ((first + second) / 2)
	r.counts, r.Failures, r.Examples = l.counts(), l.failures, l.examples
	return r, nil
}

// counts returns the numbers of requests so far.
func (l *load) counts() counts {
	return counts{l.answered.Load(), l.busy.Load(), l.gone.Load(), l.invalid.Load(), l.failed.Load()}
}

// report writes a report at every interval until ctx is canceled.
func (l *load) report(ctx context.Context, lines *json.Encoder) error {
	ticks := time.NewTicker(l.every)
	defer ticks.Stop()
	began, last, before := time.Now(), time.Now(), l.drawn.Load()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}

		drawn, now := l.drawn.Load(), time.Now()
		r := loadReport{At: now.Sub(began).Seconds(), counts: l.counts(),
			TokensPS: float64(drawn-before) / now.Sub(last).Seconds()}
		last, before = now, drawn
		var err error
		if r.Now, err = l.resources(); err == nil {
			err = lines.Encode(r)
		}
		if err != nil {
			return err
		}
	}
}

// settled waits until connections have been closed and returns the current resources.
func (l *load) settled() (resources, error) {
	time.Sleep(500 * time.Millisecond)
	runtime.GC() // the second collection of resources frees what finalizers release
	return l.resources()
}

// resources returns the current resources.
func (l *load) resources() (r resources, err error) {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	r.Heap, r.Goroutines = float64(m.HeapAlloc)/(1<<20), runtime.NumGoroutine()

	var size, resident int
	if text, err := os.ReadFile("/proc/self/statm"); err == nil {
		if _, err := fmt.Sscan(string(text), &size, &resident); err == nil {
			r.Process = float64(resident*os.Getpagesize()) / (1 << 20)
		}
	}

	if l.device != nil {
		free, _, err := l.device.Memory()
		if err != nil {
			return r, err
		}
		r.Free = float64(free) / (1 << 30)
	}
	return r, nil
}

// body returns a request with prompt k, for one of the models.
func (l *load) body(k int, more string) string {
	return fmt.Sprintf(`{"model":%q,"prompt":[%d,6,7,8,9,10,11,12],"max_tokens":%d,"seed":%d,"ignore_eos":true%s}`,
		l.nameOf(k%len(l.continues)), k%250+5, l.tokens, k, more)
}

// check compares an answer of each model with the text that its generator returns.
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

// timed calls run in n goroutines and returns the number of tokens per second until d has passed. run must return soon
// after its context is done.
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

// stopsJSON and stops are the stop texts of some requests. With random weights, one of them occurs in about a quarter of
// the answers.
const stopsJSON = `["q","zz","\u0000\u0001"]`

var stops = []string{"q", "zz", "\x00\x01"}

// request sends request n of a client.
func (l *load) request(ctx context.Context, client *http.Client, url string, n int) {
	more, stream, ends := "", n%3 == 0, n%5 == 1
	if stream {
		more += `,"stream":true`
	}
	if ends {
		more += `,"stop":` + stopsJSON
	}
	body := l.body(n, more)
	switch {
	case n%37 == 5:
		soon, leave := context.WithTimeout(ctx, time.Duration(n%7)*time.Millisecond)
		_, _, _ = post(soon, client, url, body)
		leave()
		l.gone.Add(1)
		return
	case n%37 == 9:
		l.leave(ctx, client, url, l.body(n, `,"stream":true`))
		return
	case n%53 == 6:
		body = body[:len(body)/2]
	}

	status, text, err := post(ctx, client, url, body)
	switch {
	case err != nil:
		l.fail("connection", err.Error())
	case status == http.StatusTooManyRequests:
		l.wait()
	case n%53 == 6 && status == http.StatusBadRequest:
		l.invalid.Add(1)
	case status != http.StatusOK:
		l.fail(fmt.Sprintf("status %d", status), string(text))
	default:
		if kind := fault(text, stream, ends); kind != "" {
			l.fail(kind, string(text))
			return
		}
		l.answered.Add(1)
	}
}

// wait counts a request that the server had no room for, and waits before the next one.
func (l *load) wait() {
	l.busy.Add(1)
	time.Sleep(50 * time.Millisecond)
}

// leave requests a stream and disconnects after its first event.
func (l *load) leave(ctx context.Context, client *http.Client, url, body string) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		l.fail("request", err.Error())
		return
	}
	answer, err := client.Do(r)
	if err != nil {
		l.fail("connection", err.Error())
		return
	}
	defer answer.Body.Close()

	first := make([]byte, 6)
	switch _, err := io.ReadFull(answer.Body, first); {
	case answer.StatusCode == http.StatusTooManyRequests:
		l.wait()
	case err != nil || answer.StatusCode != http.StatusOK || string(first) != "data: ":
		l.fail(fmt.Sprintf("status %d of a stream", answer.StatusCode), fmt.Sprint(string(first), err))
	default:
		l.gone.Add(1)
	}
}

// fail counts a failed request.
func (l *load) fail(kind, text string) {
	l.failed.Add(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failures == nil {
		l.failures = map[string]int{}
	}
	l.failures[kind]++
	if len(l.examples) < 5 {
		l.examples = append(l.examples, fmt.Sprintf("%s: %.200s", kind, text[max(0, len(text)-200):]))
	}
}

// fault describes the error in an answer, or returns "". ends is true if the request had stop texts.
func fault(text []byte, stream, ends bool) string {
	type choice struct {
		Text   string
		Reason string `json:"finish_reason"`
	}
	var whole choice
	parts := [][]byte{text}
	if stream {
		var complete bool
		if text, complete = bytes.CutSuffix(text, []byte("data: [DONE]\n\n")); !complete {
			return "stream without an end"
		}
		parts = bytes.Split(bytes.TrimSuffix(text, []byte("\n\n")), []byte("\n\n"))
	}
	for _, part := range parts {
		var answer struct{ Choices []choice }
		if err := json.Unmarshal(bytes.TrimPrefix(part, []byte("data: ")), &answer); err != nil || len(answer.Choices) != 1 {
			return "answer without a choice"
		}
		whole.Text += answer.Choices[0].Text
		whole.Reason += answer.Choices[0].Reason
	}

	switch {
	case whole.Reason != "length" && (whole.Reason != "stop" || !ends):
		return "ended by " + whole.Reason
	case ends && slices.ContainsFunc(stops, func(stop string) bool { return strings.Contains(whole.Text, stop) }):
		return "stop text in an answer"
	case !ends && whole.Text == "":
		return "empty answer"
	}
	return ""
}
