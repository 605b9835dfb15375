package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/serve"
)

type serveOptions struct {
	common
	addr    string
	context int
	maxBody int64 // MiB
	serve.Options
}

func init() {
	flagRules["serve"] = map[string]rule{"model": always, "lookup": always, "adapter": always, "addr": always, "api-key": always, "context": always, "slots": always,
		"queue": always, "timeout": always, "max-body": always, "cors": always, "device": always,
		"precision": always}
}

func newServe() *cobra.Command { return new(serveOptions).command() }

func (o *serveOptions) command() *cobra.Command {
	c := &cobra.Command{
		Use:   "serve --model DIR",
		Short: "Serve a model over the APIs of OpenAI and Anthropic, with a chat page",
		Long: `Serve a model over the APIs of OpenAI and Anthropic, with a chat page for the browser. The model is
named after its folder or GGUF file.

Each --adapter is offered as another model, named after its folder. A request chooses a model by its name.
The weights of the model are in memory only once.

Concurrent requests are computed in one batch, so the weights are read once per token for all of them.

Ctrl-C finishes the answers in progress and exits. Pressing it again exits at once.`,
		Example: "  kasmina serve --model tuned --api-key secret\n" +
			"  kasmina serve --model Llama-3.2-1B-Instruct --adapter support --adapter sales",
		Args:              noArguments,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(c *cobra.Command, args []string) error { return o.run(c) },
	}

	o.modelFlag(c)
	f := c.Flags()
	f.StringVar(&o.addr, "addr", "127.0.0.1:8080",
		"`address` to serve at; :8080 serves other computers too; with port 0 the system chooses a port")
	f.StringArrayVar(&o.Keys, "api-key", nil, "`key` that clients must send; can be given several times")
	f.IntVar(&o.context, "context", 0,
		"maximum number of tokens in a prompt and its answer together; 0 means the model's maximum")
	f.IntVar(&o.Slots, "slots", 32, "maximum number of requests in the batch")
	f.IntVar(&o.Queue, "queue", 128, "maximum number of requests waiting for a slot; further requests are rejected")
	f.DurationVar(&o.Timeout, "timeout", 10*time.Minute, "time limit for a request")
	f.Int64Var(&o.maxBody, "max-body", 8, "maximum size of a request in MiB")
	f.StringArrayVar(&o.Origins, "cors", nil,
		"`origin` of web pages, such as https://example.com, that can use the server; * permits all; can be "+
			"given several times")
	markRequired(c, "model")
	o.adapterFlags(c)
	o.inferenceFlags(c)
	o.lookupFlag(c)
	return c
}

// check returns an error for values that make no sense.
func (o *serveOptions) check() error {
	switch {
	case o.context < 0 || o.context == 1:
		return fmt.Errorf("--context is %d, want 0 or at least 2", o.context)
	case o.Slots < 1:
		return fmt.Errorf("--slots is %d, want at least 1", o.Slots)
	case o.Queue < 0:
		return fmt.Errorf("--queue is %d, want at least 0", o.Queue)
	case o.Timeout <= 0:
		return fmt.Errorf("--timeout is %v, want more than 0", o.Timeout)
	case o.maxBody < 1 || o.maxBody > 1<<20:
		return fmt.Errorf("--max-body is %d, want 1 to %d", o.maxBody, 1<<20)
	}

	for _, key := range o.Keys {
		if key == "" {
			return errors.New("--api-key is empty: give a key, or leave it out to let everybody use the server")
		}
	}
	for _, origin := range o.Origins {
		scheme, host, ok := strings.Cut(origin, "://")
		if origin != "*" && (!ok || scheme == "" || host == "" || strings.ContainsAny(host, "/ ")) {
			return fmt.Errorf("--cors is %q, want an origin such as https://example.com, or *", origin)
		}
	}
	return nil
}

func (o *serveOptions) run(c *cobra.Command) error {
	if err := errors.Join(o.check(), o.checkLookup()); err != nil {
		return err
	}
	o.MaxBody = o.maxBody << 20
	if o.Queue == 0 {
		o.Queue = -1
	}

	// The address is taken first, because loading a large model takes time.
	l, err := net.Listen("tcp", o.addr)
	if err != nil {
		return fmt.Errorf("--addr: %w; want an address such as 127.0.0.1:8080 that no other program uses", err)
	}
	defer l.Close()

	f, err := o.openModel(c.Context())
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.checkNames(); err != nil {
		return err
	}

	if o.context > f.Config.Seq {
		return fmt.Errorf("--context is %d, and the model has a context of %d tokens", o.context,
			f.Config.Seq)
	}
	tokens := cmp.Or(o.context, f.Config.Seq)
	g, err := o.generator(c, f, tokens, o.Slots)
	if err != nil {
		return err
	}
	defer g.close()

	models, err := o.models(f, g, tokens)
	if err != nil {
		return err
	}
	s, err := serve.New(o.Options, models...)
	if err != nil {
		return err
	}

	if g := f.Generation; g.Sample && len(g.Ignored) > 0 {
		fmt.Fprintf(c.ErrOrStderr(), "note      ignoring %q in generation_config.json, which serve does not support\n",
			g.Ignored)
	}
	o.introduce(c, l.Addr().String(), models)
	go func() {
		<-c.Context().Done()
		if running, waiting := s.Running(); running+waiting > 0 {
			fmt.Fprintf(c.ErrOrStderr(), "\nstopping  after %d answers; press Ctrl-C again to quit at once\n",
				running+waiting)
		}
	}()
	if err := s.Serve(c.Context(), l); err != nil {
		return err
	}
	return context.Cause(c.Context())
}

// models describes the model and the model with each of the adapters.
func (o *serveOptions) models(f *openedModel, g generator, tokens int) ([]*serve.Model, error) {
	if len(g.adapted) == 0 || f.adapted {
		m, err := f.served(g.first(), tokens)
		return []*serve.Model{m}, err
	}

	base, err := serve.NewModel(f.Folder, g, tokens)
	if err != nil {
		return nil, err
	}
	models := []*serve.Model{base}
	for i, dir := range f.dirs {
		m, err := serve.NewAdaptedModel(f.Folder, dir, g.adapted[i], tokens)
		if err != nil {
			return nil, err
		}
		models = append(models, m)
	}
	return models, nil
}

// introduce prints where the model is served, and a command to try.
func (o *serveOptions) introduce(c *cobra.Command, addr string, models []*serve.Model) {
	m := models[0]
	host, port, _ := net.SplitHostPort(addr)
	ip := net.ParseIP(host)
	if ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	url := "http://" + net.JoinHostPort(host, port)
	names := make([]string, len(models))
	for i, m := range models {
		names[i] = m.Name
	}
	fmt.Fprintf(c.OutOrStdout(), "serving   %s at %s/v1; open %s/ to chat\n", strings.Join(names, ", "), url, url)

	path, body := "chat/completions", `{"messages":[{"role":"user","content":"Hello"}]}`
	if m.Template == nil {
		path, body = "completions", `{"prompt":"Once upon a time","max_tokens":50}`
		fmt.Fprintf(c.ErrOrStderr(), "note      the model only continues texts: %v\n", m.NoTemplate)
	}
	key := ""
	if len(o.Keys) > 0 {
		key = " -H 'Authorization: Bearer KEY'"
	}
	fmt.Fprintf(c.OutOrStdout(), "try       curl %s/v1/%s%s -d '%s'\n", url, path, key, body)

	if len(o.Keys) == 0 && (ip == nil || !ip.IsLoopback()) {
		fmt.Fprintln(c.ErrOrStderr(), "note      everybody who can reach this computer can use the server: --api-key "+
			"sets a key")
	}
}

// A generator continues texts on a CPU or a GPU. If it was created for a single text, only one goroutine may use it
// at a time.
type generator struct {
	*llm.Generator
	adapted []*llm.Generator // one for each adapter that texts can choose
	close   func() error
}

// first returns the generator of the first adapter, or of the model itself if texts cannot choose adapters.
func (g generator) first() *llm.Generator {
	if len(g.adapted) > 0 {
		return g.adapted[0]
	}
	return g.Generator
}

// generator loads a model and its adapters for continuing several texts of up to seq tokens at the same time.
func (o *common) generator(c *cobra.Command, f *openedModel, seq, texts int) (generator, error) {
	device, precision, err := o.openInference(c.ErrOrStderr())
	if err != nil {
		return generator{}, err
	}
	if device != nil {
		return o.generatorOnGPU(c.Context(), f, seq, texts, device, precision, c.ErrOrStderr())
	}

	own, chosen := (*llm.Adapter)(nil), f.adapters
	if f.merges() {
		own, chosen = f.adapter(), nil
	}
	i, err := o.inference(c.Context(), f, own, seq, nil, precision, c.ErrOrStderr())
	if err != nil {
		return generator{}, err
	}
	b, err := i.NewBatcher(llm.BatcherOptions{Texts: texts, Rows: max(128, texts), Adapters: chosen,
		Lookup: o.lookup})
	if err != nil {
		return generator{}, err
	}

	g := generator{Generator: b.Generator(), close: b.Close}
	if err := g.adapt(b, len(chosen)); err != nil {
		return generator{}, errors.Join(err, b.Close())
	}
	return g, nil
}

// adapt adds generators for a batcher's n adapters.
func (g *generator) adapt(b *llm.Batcher, n int) error {
	for k := range n {
		adapted, err := b.Adapted(k)
		if err != nil {
			return err
		}
		g.adapted = append(g.adapted, adapted)
	}
	return nil
}

func (o *common) generatorOnGPU(ctx context.Context, f *openedModel, seq, texts int, device *cudaops.Device,
	p cudaops.Precision, stderr io.Writer) (generator, error) {
	own, chosen := f.adapter(), []*llm.Adapter(nil)
	if !f.alone || f.seeded() {
		own, chosen = nil, f.adapters
	}
	i, err := o.adaptedInference(ctx, f, own, chosen, seq, device, p, stderr)
	if err != nil {
		return generator{}, errors.Join(err, device.Close())
	}
	config := f.Config
	config.Seq = seq
	if texts == 1 && o.lookup == 0 && len(chosen) == 0 {
		return generator{Generator: llm.GeneratorOf(config, i.Decoder),
			close: func() error { return errors.Join(i.Close(), device.Close()) }}, nil
	}

	b, err := gpu.NewBatcher(device, p, config, i, llm.BatcherOptions{Texts: texts, Rows: max(128, texts),
		Lookup: o.lookup})
	if err != nil {
		return generator{}, errors.Join(err, i.Close(), device.Close())
	}
	g := generator{Generator: b.Generator(), close: func() error { return errors.Join(b.Close(), device.Close()) }}
	if err := g.adapt(b, len(chosen)); err != nil {
		return generator{}, errors.Join(err, g.close())
	}
	return g, nil
}
