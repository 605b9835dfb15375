package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/internal/stoptext"
	"github.com/kasmina-go/kasmina/llm/grammar"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/serve"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

type chatOptions struct {
	generateOptions
	system string
}

func init() {
	flagRules["chat"] = map[string]rule{"model": always, "adapter": always, "system": always, "n": always, "device": always, "precision": always,
		"temperature": always, "top-k": checkedLater, "top-p": checkedLater, "seed": checkedLater, "json-schema": always, "stop": always, "lookup": always}
}

func newChat() *cobra.Command { return new(chatOptions).command() }

func (o *chatOptions) command() *cobra.Command {
	c := &cobra.Command{
		Use:   "chat --model DIR",
		Short: "Talk to a model in the terminal",
		Long: `Talk to a model in the terminal. Each line is a message, and the model sees the whole conversation.
Sampling follows generation_config.json unless options override it.

Ctrl-C stops an answer, Ctrl-D or /exit exits, and /new starts a new conversation. In a terminal, the arrow
keys edit a message and recall earlier ones, and a pasted message can have several lines. If the model has
no chat template, it continues each line as it is.`,
		Args:              noArguments,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(c *cobra.Command, args []string) error { return o.run(c) },
	}

	o.modelFlag(c)
	c.Flags().StringVar(&o.system, "system", "", "system message: `text` that tells the model how to behave")
	o.samplingFlags(c, 1024)
	markRequired(c, "model")
	o.adapterFlag(c)
	o.inferenceFlags(c)
	o.lookupFlag(c)
	return c
}

func (o *chatOptions) run(c *cobra.Command) error {
	if err := o.check(); err != nil {
		return err
	}

	f, err := o.openOne(c.Context())
	if err != nil {
		return err
	}
	defer f.Close()

	g, err := o.generator(c, f, f.Config.Seq, 1)
	if err != nil {
		return err
	}
	defer g.close()
	m, err := f.served(g.first(), f.Config.Seq)
	if err != nil {
		return err
	}

	how := o.sampler(c, f.Generation, m.Vocab)
	if err := o.checkSampling(c, how); err != nil {
		return err
	}
	matcher, err := o.matcher(m.Tokenizer, m.Vocab, m.End)
	if err != nil {
		return err
	}
	t := &talk{model: m, matcher: matcher, system: o.system, stops: o.stops, n: o.n, sampling: how, out: c.OutOrStdout(), err: c.ErrOrStderr()}
	if m.Template == nil {
		if o.system != "" {
			return fmt.Errorf("--system needs a chat template, and the model has none that can be used: %w",
				m.NoTemplate)
		}
		fmt.Fprintf(t.err, "note      the model continues each text as it is: %v\n", m.NoTemplate)
	}
	return t.run(c.Context(), c.InOrStdin())
}

// A talk is a conversation in the terminal.
type talk struct {
	model    *serve.Model
	matcher  *grammar.Matcher // of the answers, or nil
	system   string
	stops    []string // texts before which an answer ends
	n        int      // largest number of tokens of an answer
	sampling sampler.Config
	out, err io.Writer

	messages []talkMessage
}

type talkMessage struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// maxLine is the largest number of bytes of a message.
const maxLine = 1 << 20

// run answers the lines of in until it ends.
func (t *talk) run(ctx context.Context, in io.Reader) error {
	lines, interactive := newLineReader(in, t.err)
	if interactive {
		fmt.Fprintf(t.err, "%s: %s\n", t.model.Name, chatKeys)
	}
	return t.converse(ctx, lines, interactive)
}

// chatKeys describes what the user can do besides writing messages.
const chatKeys = "Ctrl-C stops an answer, Ctrl-D or /exit exits, /new starts a new conversation"

// converse answers messages until they end.
func (t *talk) converse(ctx context.Context, lines lineReader, interactive bool) error {
	var answering interrupts
	defer answering.watch(func() {})()
	for {
		line, err := lines.next()
		switch {
		case errors.Is(err, errNoLine):
			fmt.Fprintln(t.err, "Ctrl-D exits")
			continue
		case errors.Is(err, io.EOF):
			if interactive {
				fmt.Fprintln(t.err)
			}
			return nil
		case err != nil:
			return fmt.Errorf("reading a message: %w", err)
		}

		switch line = strings.TrimSpace(line); {
		case line == "":
		case line == "/new":
			t.messages = nil
			if interactive {
				fmt.Fprintln(t.err, "a new conversation")
			}
		case line == "/exit" || line == "/quit":
			return nil
		case command.MatchString(line):
			fmt.Fprintf(t.err, "note      there is no command %s: %s\n", line, chatKeys)
		default:
			err := answering.do(ctx, func(ctx context.Context) error { return t.answer(ctx, line) })
			if err != nil && !errors.Is(err, errInterrupted) {
				return err
			}
			fmt.Fprintln(t.out)
		}
	}
}

// command matches messages that are likely to be meant as commands.
var command = regexp.MustCompile(`^/[a-z?]+$`)

// answer writes the answer to a message, and adds both to the conversation.
func (t *talk) answer(ctx context.Context, text string) error {
	t.messages = append(t.messages, talkMessage{"user", text})
	prompt, err := t.prompt(text)
	if err != nil {
		// The message may be at fault, so the conversation goes on without it.
		t.messages = t.messages[:len(t.messages)-1]
		fmt.Fprintf(t.err, "note      %v\n", err)
		return nil
	}

	decoder := t.model.Tokenizer.NewDecoder(true)
	if err := decoder.Prime(prompt); err != nil {
		return err
	}

	var answer strings.Builder
	write := func(text string) error {
		answer.WriteString(text)
		_, err := io.WriteString(t.out, text)
		return err
	}
	defer func() { t.messages = append(t.messages, talkMessage{"assistant", answer.String()}) }()

	// Use a different seed for every answer.
	draw, err := sampler.New(t.sampling)
	if err != nil {
		return err
	}
	t.sampling.Seed++
	draw.Observe(prompt...)
	if t.matcher != nil {
		draw.Constrain(t.matcher.New())
	}

	cutter := stoptext.Cutter{Stops: t.stops}
	n := min(t.n, t.model.Context-len(prompt))
	drawn := 0
	for id, err := range t.model.Generator.Generate(ctx, prompt, n, draw) {
		if err != nil {
			return err
		}
		if drawn++; slices.Contains(t.model.End, id) {
			break
		}
		text, err := decoder.Next(id)
		if err != nil {
			return err
		}
		released, _, found := cutter.Add(string(text))
		if err := write(released); err != nil || found {
			return err
		}
	}

	if drawn == n && n < t.n {
		fmt.Fprint(t.err, "\nnote      the conversation fills the model's context: older messages will be left out")
	}
	released, _, _ := cutter.Add(string(decoder.Flush()))
	return write(released + cutter.Rest())
}

// prompt returns the tokens of the conversation. To leave room for an answer, it drops the oldest messages
// of a conversation that fills more than half of the model's context.
func (t *talk) prompt(text string) ([]int, error) {
	m := t.model
	for {
		var ids []int
		if m.Template == nil {
			before, _ := m.Tokenizer.Affixes()
			ids = append(before, m.Tokenizer.Encode([]byte(text))...)
		} else {
			all := t.messages
			if t.system != "" {
				all = append([]talkMessage{{"system", t.system}}, all...)
			}
			raw, err := json.Marshal(all)
			if err != nil {
				return nil, err
			}
			rendered, err := m.Template.RenderJSON(raw, chat.Options{AddGenerationPrompt: true})
			if err != nil {
				return nil, fmt.Errorf("the chat template does not accept the conversation: %w", err)
			}
			ids = m.Tokenizer.Encode([]byte(rendered))
		}

		// A turn consists of a message and its answer.
		if m.Template != nil && len(ids) > m.Context/2 && len(t.messages) > 2 {
			t.messages = t.messages[2:]
			continue
		}
		switch {
		case len(ids) == 0:
			return nil, errors.New("the text has no tokens")
		case len(ids) >= m.Context:
			return nil, fmt.Errorf("the message has %d tokens, and the model's context has %d for the message "+
				"and the answer together: shorten it", len(ids), m.Context)
		}
		for _, id := range ids {
			if id >= m.Vocab {
				token, _ := m.Tokenizer.Token(id)
				return nil, fmt.Errorf("the text has the token %.60q, which the model does not know: leave it out",
					token)
			}
		}
		return ids, nil
	}
}

// errInterrupted is the cause of the end of an answer that the user has stopped.
var errInterrupted = errors.New("stopped by the user")

// interrupts lets Ctrl-C stop an answer, rather than the program.
type interrupts struct {
	mu   sync.Mutex
	stop func() // ends the answer in progress
}

// watch handles interrupts until the returned function is called. It calls idle for an interrupt between
// answers.
func (i *interrupts) watch(idle func()) (end func()) {
	signals, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, os.Interrupt)
	go func() {
		for {
			select {
			case <-signals:
			case <-done:
				return
			}

			i.mu.Lock()
			stop := i.stop
			i.mu.Unlock()
			if stop == nil {
				stop = idle
			}
			stop()
		}
	}()

	return func() {
		signal.Stop(signals)
		close(done)
	}
}

// do calls f with a context that an interrupt cancels.
func (i *interrupts) do(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	set := func(stop func()) {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.stop = stop
	}
	set(func() { cancel(errInterrupted) })
	defer set(nil)
	return f(ctx)
}
