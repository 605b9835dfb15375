package main

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/internal/stoptext"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/grammar"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

type generateOptions struct {
	common
	prompt      string
	n           int
	temperature float64
	topP        float64
	topK        int
	seed        uint64
	chat        bool
	schema      string // file
	stops       []string
}

func init() {
	flagRules["generate"] = map[string]rule{"model": always, "adapter": always, "prompt": always, "n": always, "chat": always, "device": always,
		"precision": always, "temperature": always, "top-k": checkedLater, "top-p": checkedLater, "seed": checkedLater,
		"json-schema": always, "stop": always, "lookup": always}
}

func newGenerate() *cobra.Command { return new(generateOptions).command() }

func (o *generateOptions) command() *cobra.Command {
	c := &cobra.Command{
		Use:   "generate --model DIR --prompt TEXT",
		Short: "Continue a text",
		Long: `Continue a text. Sampling follows generation_config.json unless options override it.

--model can also be a folder of adapters, if the folder contains the path of their model.

The prompt and the generated text are written to standard output, token by token, and nothing else is.
With --chat, only the answer is written. The text ends after --n tokens, at an end-of-text token,
or before a --stop text.`,
		Args:              noArguments,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(c *cobra.Command, args []string) error { return o.run(c) },
	}

	o.modelFlag(c)
	f := c.Flags()
	f.StringVarP(&o.prompt, "prompt", "p", "", "`text` to continue; - reads it from standard input")
	o.samplingFlags(c, 128)
	f.BoolVar(&o.chat, "chat", false,
		"take the prompt as a user's message, and apply the model's chat template")
	markRequired(c, "model")
	o.adapterFlag(c)
	o.inferenceFlags(c)
	o.lookupFlag(c)
	return c
}

// samplingFlags adds the flags for drawing up to n tokens.
func (o *generateOptions) samplingFlags(c *cobra.Command, n int) {
	f := c.Flags()
	f.IntVarP(&o.n, "n", "n", n, "maximum number of tokens to generate")
	f.Float64VarP(&o.temperature, "temperature", "t", -1,
		"divides the logits; 0 selects the most likely token; -1 uses generation_config.json")
	f.IntVar(&o.topK, "top-k", -1,
		"draw from this many of the most likely tokens; 0 means all; -1 uses generation_config.json")
	f.Float64Var(&o.topP, "top-p", -1,
		"draw from the most likely tokens that together reach this probability; 0 selects the most likely token; "+
			"-1 uses generation_config.json")
	f.Uint64VarP(&o.seed, "seed", "s", 1, "random seed")
	f.StringArrayVar(&o.stops, "stop", nil, "`text` before which the generated text ends; can be given several times")
	f.StringVar(&o.schema, "json-schema", "", "`file` with a JSON schema that the generated text must match")
}

// matcher returns the matcher for the texts that --json-schema permits, or nil without it.
func (o *generateOptions) matcher(t grammar.Tokenizer, tokens int, end []int) (*grammar.Matcher, error) {
	if o.schema == "" {
		return nil, nil
	}
	text, err := os.ReadFile(o.schema)
	if err != nil {
		return nil, fmt.Errorf("--json-schema: %w", err)
	}
	g, err := grammar.Schema(text)
	if err != nil {
		return nil, fmt.Errorf("--json-schema: %s: %w", o.schema, err)
	}
	return grammar.VocabularyOf(t, tokens, end).Matcher(g)
}

func (o *generateOptions) run(c *cobra.Command) error {
	if err := o.check(); err != nil {
		return err
	}

	if err := o.readPrompt(c.InOrStdin()); err != nil {
		return err
	}

	f, err := o.openOne(c.Context())
	if err != nil {
		return err
	}
	defer f.Close()

	tok, err := tokenizerOf(f.texts())
	if err != nil {
		return err
	}

	how := o.sampler(c, f.Generation, tok.VocabSize())
	if err := o.checkSampling(c, how); err != nil {
		return err
	}

	s, err := sampler.New(how)
	if err != nil {
		return err
	}

	before, _ := tok.Affixes()
	prompt, shown := append(before, tok.Encode([]byte(o.prompt))...), o.prompt
	if o.chat {
		text, err := o.message(f.texts())
		if err != nil {
			return err
		}
		prompt, shown = tok.Encode([]byte(text)), ""
	}

	if len(prompt) == 0 {
		return errors.New("--prompt is empty, and the tokenizer has no start-of-text token: " +
			"give some text")
	}

	if err := tok.check(prompt); err != nil {
		return fmt.Errorf("--prompt: %w", err)
	}

	s.Observe(prompt...)
	m, err := o.matcher(tok, tok.VocabSize(), f.Generation.End)
	if err != nil {
		return err
	}
	if m != nil {
		s.Constrain(m.New())
	}
	write := func(g *llm.Generator) error {
		return o.write(c, g.Generate(c.Context(), prompt, o.n, s), tok.NewDecoder(true), prompt, shown, f.Generation.End)
	}

	// A batcher prepares adapters once instead of for each token.
	if f.adapter() != nil || o.lookup > 0 {
		g, err := o.generator(c, f, f.Config.Seq, 1)
		if err != nil {
			return err
		}
		defer g.close()
		return write(g.first())
	}

	device, precision, err := o.openInference(c.ErrOrStderr())
	if err != nil {
		return err
	}

	if device != nil {
		defer device.Close()
	}

	i, err := o.inference(c.Context(), f, nil, f.Config.Seq, device, precision, c.ErrOrStderr())
	if err != nil {
		return err
	}
	defer i.Close()

	return write(llm.GeneratorOf(f.Config, i.Decoder))
}

// check returns an error for impossible values.
func (o *generateOptions) check() error {
	switch {
	case o.n < 0:
		return fmt.Errorf("--n is %d, want at least 0", o.n)
	case o.temperature != automatic && !(o.temperature >= 0) || math.IsInf(o.temperature, 1):
		return fmt.Errorf("--temperature is %v, want a finite number of at least 0", o.temperature)
	case o.topK < automatic:
		return fmt.Errorf("--top-k is %d, want at least 0", o.topK)
	case o.topP != automatic && !(o.topP >= 0 && o.topP <= 1):
		return fmt.Errorf("--top-p is %v, want 0 to 1", o.topP)
	case slices.Contains(o.stops, ""):
		return errors.New("--stop is empty: give a text, or leave it out")
	}

	return o.checkLookup()
}

// maxPrompt limits the bytes of a prompt from standard input.
const maxPrompt = 64 << 20

// readPrompt reads the prompt from standard input if it is "-".
func (o *generateOptions) readPrompt(stdin io.Reader) error {
	if o.prompt != "-" {
		return nil
	}

	text, err := io.ReadAll(io.LimitReader(stdin, maxPrompt+1))
	switch {
	case err != nil:
		return fmt.Errorf("--prompt -: reading standard input: %w", err)
	case len(text) > maxPrompt:
		return fmt.Errorf("--prompt -: standard input has more than %d bytes", maxPrompt)
	}

	o.prompt = string(text)
	return nil
}

// write prints the prompt, followed by each token as it is drawn, up to an end-of-text token or a stop text.
func (o *generateOptions) write(c *cobra.Command, drawn iter.Seq2[int, error],
	d *tokenizers.Decoder, prompt []int, shown string, end []int) error {
	// Some tokenizers drop the space of a text's first token, so the decoder must process the prompt as
	// well.
	if err := d.Prime(prompt); err != nil {
		return err
	}

	if _, err := io.WriteString(c.OutOrStdout(), shown); err != nil {
		return err
	}

	cutter := stoptext.Cutter{Stops: o.stops}
	for id, err := range drawn {
		if err != nil {
			return err
		}
		if slices.Contains(end, id) {
			break
		}
		text, err := d.Next(id)
		if err != nil {
			return err
		}
		released, _, found := cutter.Add(string(text))
		if _, err := io.WriteString(c.OutOrStdout(), released); err != nil {
			return err
		}
		if found {
			_, err := fmt.Fprintln(c.OutOrStdout())
			return err
		}
	}

	released, _, _ := cutter.Add(string(d.Flush()))
	_, err := fmt.Fprintf(c.OutOrStdout(), "%s%s\n", released, cutter.Rest())
	return err
}

// sampler combines the options with generation_config.json.
func (o *generateOptions) sampler(c *cobra.Command, g hf.Generation, vocab int) sampler.Config {
	s := sampler.Config{Vocab: vocab, Seed: o.seed, TopK: g.TopK, TopP: sampler.Nucleus(g.TopP),
		MinP: g.MinP, Repetition: g.Repetition}
	if g.Sample {
		s.Temperature = g.Temperature
	}

	// Zero is a valid value of each of these options, so -1 means that it was not given.
	if o.temperature != automatic {
		s.Temperature = o.temperature
	}

	if o.topK != automatic {
		s.TopK = o.topK
	}

	if o.topP != automatic {
		s.TopP = sampler.Nucleus(o.topP)
	}

	if len(g.Ignored) > 0 {
		fmt.Fprintf(c.ErrOrStderr(), "note      ignoring %q in generation_config.json, which %s does not support\n",
			g.Ignored, c.Name())
	}

	return s
}

// checkSampling returns an error if sampling options are given although nothing is sampled. If the
// command line itself sets the temperature to 0, it only prints a note, because the text is as requested.
func (o *generateOptions) checkSampling(c *cobra.Command, s sampler.Config) error {
	unused := given(c, "top-k", "top-p", "seed")
	if s.Temperature != 0 || len(unused) == 0 {
		return nil
	}
	if len(given(c, "temperature")) > 0 {
		fmt.Fprintf(c.ErrOrStderr(), "note      %s no effect at --temperature 0\n", have(unused))
		return nil
	}
	return fmt.Errorf("%s no effect, because the model's generation_config.json does not enable "+
		"sampling: add a --temperature above 0", have(unused))
}

// message renders the prompt with the chat template of a folder.
func (o *generateOptions) message(f *hf.Folder) (string, error) {
	t, err := chatTemplate(f)
	if err != nil {
		return "", err
	}
	return t.Render([]chat.Message{{Role: "user", Content: o.prompt}},
		chat.Options{AddGenerationPrompt: true})
}

// chatTemplate returns the chat template of a folder, for --chat.
func chatTemplate(f *hf.Folder) (*chat.Template, error) {
	t, err := f.Template()
	switch {
	case errors.Is(err, chat.ErrNoTemplate):
		return nil, fmt.Errorf("--chat: the model %s has no chat template: leave --chat out", f.Name())
	case err != nil:
		return nil, fmt.Errorf("--chat: %w", err)
	}
	return t, nil
}
