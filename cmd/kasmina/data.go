package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

func init() {
	flagRules["data"] = map[string]rule{}
	flagRules["data check"] = map[string]rule{"model": always, "seq": always, "show": always, "list": always}
}

func newData() *cobra.Command {
	c := &cobra.Command{
		Use:   "data",
		Short: "Check data for fine-tuning",
		Args:  cobra.NoArgs,
	}
	c.AddCommand(new(dataCheck).command())
	return c
}

// dataCheck holds the options of "kasmina data check".
type dataCheck struct {
	common
	show    int
	listing int
}

func (o *dataCheck) command() *cobra.Command {
	c := &cobra.Command{
		Use:   "check FILE --model DIR",
		Short: "Show a data file as the model sees it, and list every problem",
		Long: `Show a file of JSON Lines, or a parquet file, as the model sees it, and list every problem with its
location.

Each line is a JSON object with one of

  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  {"prompt": "...", "completion": "..."}
  {"text": "..."}
  {"prompt": "...", "chosen": "...", "rejected": "..."}

A parquet file has columns with these names, and rows instead of lines. Other columns are not read.

Conversations are rendered with the model's chat template. The model learns the assistant's words and
the token that ends each of its turns. On a terminal those tokens are green, and the shade changes from
token to token. Elsewhere, ⟦ and ⟧ enclose them.

The last line of output is a JSON object with the numbers of examples, sequences, tokens, learned tokens,
problems and warnings. The exit code is 1 if there are problems.`,
		Example: "  kasmina data check chat.jsonl --model Llama-3.2-1B-Instruct --seq 2048",
		Args:    cobra.ExactArgs(1),
		RunE:    func(c *cobra.Command, args []string) error { return o.run(c, args[0]) },
	}

	o.modelFlag(c)
	f := c.Flags()
	f.SortFlags = false
	f.IntVar(&o.seq, "seq", 0, "maximum number of tokens in a sequence (default: the model's longest context)")
	f.IntVar(&o.show, "show", 2, "number of examples to show")
	f.IntVar(&o.listing, "list", 20, "number of problems and of warnings to list; 0 lists all")
	markRequired(c, "model")
	return c
}

// checked is the JSON object on the last line of output.
type checked struct {
	Examples  int `json:"examples"`
	Sequences int `json:"sequences"`
	Tokens    int `json:"tokens"`
	Learned   int `json:"learned"`
	Longest   int `json:"longest"`
	Rows      int `json:"rows"` // number of packed sequences of --seq tokens
	Problems  int `json:"problems"`
	Warnings  int `json:"warnings"`
}

func (o *dataCheck) run(c *cobra.Command, path string) error {
	if o.show < 0 || o.listing < 0 || o.seq < 0 {
		return errors.New("--seq, --show and --list must not be negative")
	}

	e, err := o.encoder()
	if err != nil {
		return err
	}

	at, erase := bar(c.ErrOrStderr(), "checking", true)
	report, err := e.Check(chatdata.ReadFile(path, at), path, func(int) error { return c.Context().Err() })
	erase()
	if err != nil {
		return err
	}

	out := bufio.NewWriter(c.OutOrStdout())
	o.print(out, e, report, isTerminal(c.OutOrStdout()))
	if err := out.Flush(); err != nil {
		return err
	}

	if n := len(report.Problems); n > 0 {
		return fmt.Errorf("%s has %s", path, plural(n, "problem"))
	}

	return nil
}

// encoder returns an encoder for the model. It needs a chat template only for conversations.
func (o *dataCheck) encoder() (*chatdata.Encoder, error) {
	f, err := openFolder(o.model)
	if err != nil {
		return nil, err
	}
	defer f.Close()

	tok, err := tokenizerOf(f)
	if err != nil {
		return nil, err
	}

	template, err := f.Template()
	if err != nil && !errors.Is(err, chat.ErrNoTemplate) {
		return nil, err
	}

	end := slices.Clone(f.Generation.End)
	if id := tok.EndOfDocument(); id >= 0 {
		// Texts end with the tokenizer's end-of-text token. A turn can end with any end token.
		end = append([]int{id}, slices.DeleteFunc(end, func(e int) bool { return e == id })...)
	}

	if len(end) == 0 {
		return nil, fmt.Errorf("%s names no end-of-text token: set eos_token in %s", o.model,
			filepath.Join(o.model, "tokenizer_config.json"))
	}

	if o.seq == 0 {
		o.seq = f.Config.Seq
	}

	return &chatdata.Encoder{Tokenizer: tok, Template: template, End: end, MaxTokens: o.seq + 1,
		Now: time.Now()}, nil
}

// print writes the report.
func (o *dataCheck) print(w io.Writer, e *chatdata.Encoder, r *chatdata.Report, color bool) {
	for i, s := range r.Sequences[:min(o.show, len(r.Sequences))] {
		fmt.Fprintf(w, "%s (%d tokens, %d learned)\n", s.Location(), len(s.IDs), s.Learned())
		if color {
			fmt.Fprintln(w, colored(e, s))
		} else {
			fmt.Fprintln(w, e.Show(s))
		}
		if i+1 < o.show {
			fmt.Fprintln(w)
		}
	}

	o.printHistogram(w, r)
	o.list(w, "problem", r.Problems)
	o.list(w, "warning", r.Warnings)

	lengths, examples := make([]int, len(r.Sequences)), 0
	for i, s := range r.Sequences {
		lengths[i] = len(s.IDs) - 1
	}

	for _, n := range r.Examples {
		examples += n
	}

	line, _ := json.Marshal(checked{examples, len(r.Sequences), r.Tokens, r.Learned, r.Longest(),
		len(chatdata.Pack(lengths, o.seq)), len(r.Problems), len(r.Warnings)})
	fmt.Fprintln(w, string(line))
}

// printHistogram draws a bar for each range of lengths.
func (o *dataCheck) printHistogram(w io.Writer, r *chatdata.Report) {
	const width = 50
	buckets, most := r.Histogram(), 0
	for _, b := range buckets {
		most = max(most, b.Sequences)
	}

	if most == 0 {
		return
	}

	fmt.Fprintln(w, "\n  tokens  sequences")
	for _, b := range buckets {
		fmt.Fprintf(w, "%8s  %9d %s\n", fmt.Sprintf("≤ %d", b.Tokens), b.Sequences,
			strings.Repeat("█", (b.Sequences*width+most-1)/most))
	}

	fmt.Fprintln(w)
}

// list writes problems or warnings. The first ones include their conversations.
func (o *dataCheck) list(w io.Writer, kind string, all []*chatdata.Problem) {
	if len(all) == 0 {
		return
	}

	fmt.Fprintf(w, "%s:\n", plural(len(all), kind))
	listed := all
	if o.listing > 0 && len(all) > o.listing {
		listed = all[:o.listing]
	}

	for i, p := range listed {
		fmt.Fprintf(w, "  %v\n", p)
		if p.Show != "" && i < o.show {
			fmt.Fprintf(w, "    %s\n", strings.ReplaceAll(strings.TrimRight(p.Show, "\n"), "\n", "\n    "))
		}
	}

	if more := len(all) - len(listed); more > 0 {
		fmt.Fprintf(w, "  and %d more (--list 0 lists all)\n", more)
	}

	fmt.Fprintln(w)
}

// colored returns a line for a terminal: learned tokens are green, and the background alternates between
// tokens.
func colored(e *chatdata.Encoder, s chatdata.Sequence) string {
	var text strings.Builder
	for i, id := range s.IDs {
		part, err := e.Tokenizer.DecodeWhole([]int{id})
		if err != nil {
			part = fmt.Appendf(nil, "[%d]", id)
		}
		foreground := 245 // gray
		if s.Learn[i] {
			foreground = 46 // green
		}
		// Show line breaks and start a new line, without extending the background to the margin.
		for j, line := range strings.Split(string(part), "\n") {
			if j > 0 {
				text.WriteString("\x1b[38;5;240m⏎\x1b[0m\n")
			}
			if line != "" {
				fmt.Fprintf(&text, "\x1b[38;5;%d;48;5;%dm%s\x1b[0m", foreground, 234+2*(i%2),
					strings.ToValidUTF8(line, "�"))
			}
		}
	}

	return text.String()
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// plural returns a number with its noun, such as "1 problem" and "2 problems".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
