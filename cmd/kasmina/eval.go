package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
)

// maxText limits the bytes of a text, because all of its tokens are held in memory.
const maxText = 1 << 30

func init() {
	flagRules["eval"] = map[string]rule{"model": always, "adapter": always, "data": notWith("tasks", "[]", "which replaces the text by tasks"),
		"seq": always, "device": always, "precision": always, "tasks": always, "few-shot": tasksOnly,
		"examples": tasksOnly, "chat": tasksOnly, "limit": tasksOnly, "answer-tokens": tasksOnly, "out": tasksOnly}
}

func newEval() *cobra.Command {
	var o evalOptions
	c := &cobra.Command{
		Use:   "eval --model DIR (--data FILE | --tasks FILE[=FORMAT],...)",
		Short: "Measure a model on a text or with tasks",
		Long: `Measure the loss of a model on a text, which is a file or all text files of a folder, or measure how
well the model solves tasks.

The tokens of the text are cut into windows of --seq tokens that do not overlap, and all but the first
token of each window are scored. If the tokenizer adds a start-of-text token, the first window
starts with it.

The last line of output is a JSON object with loss (nats per token), tokens (the number of scored
tokens) and bpb (bits per byte of the text that the scored tokens stand for).

With --tasks, the command reads files with questions in the formats of HellaSwag, ARC, PIQA, WinoGrande,
BoolQ, MMLU, GSM8K, LAMBADA or WikiText, files with running text (format perplexity), or the folder of
nanochat's CORE bundle. The metrics are the same as in lm-evaluation-harness. The command prints a table,
and the last line of output is a JSON object with the results.`,
		Args:              noArguments,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case len(o.tasks) > 0:
				return o.evalTasks(c)
			case o.data == "":
				return errors.New("nothing to measure: give --data or --tasks")
			}
			return o.eval(c)
		},
	}

	o.modelFlag(c)
	o.dataFlag(c)
	c.Flags().IntVar(&o.seq, "seq", 0,
		"tokens per window (default: the model's longest context, but at most 2048 for --data)")
	o.taskFlags(c)
	o.adapterFlag(c)
	o.inferenceFlags(c)
	markRequired(c, "model")
	return c
}

// A score is the JSON object on the last line of output.
type score struct {
	Loss   float64 `json:"loss"`
	Tokens int     `json:"tokens"`
	BPB    float64 `json:"bpb"`
}

func (o *common) eval(c *cobra.Command) error {
	f, err := o.openOne(c.Context())
	if err != nil {
		return err
	}
	defer f.Close()

	if err := o.window(c.ErrOrStderr(), f.Config); err != nil {
		return err
	}

	tok, err := tokenizerOf(f.texts())
	if err != nil {
		return err
	}

	text, err := readText(o.data)
	if err != nil {
		return fmt.Errorf("--data: %w", err)
	}

	windows, bytes, err := cut(tok, text, o.seq)
	if err != nil {
		return fmt.Errorf("--data %s: %w", o.data, err)
	}

	// The first window is the longest, so it limits the sequences of the graph.
	o.seq = len(windows[0])

	device, precision, err := o.openInference(c.ErrOrStderr())
	if err != nil {
		return err
	}

	if device != nil {
		defer device.Close()
	}

	model, err := o.inference(c.Context(), f, f.adapter(), o.seq, device, precision, c.ErrOrStderr())
	if err != nil {
		return err
	}
	defer model.Close()

	sum, n := 0.0, 0 // of the losses, in nats, and of the scored tokens
	showProgress, erase := bar(c.ErrOrStderr(), "measuring", false)
	err = batches(windows, o.seq, func(b data.Batch, done int) error {
		loss, err := model.LossContext(c.Context(), b)
		sum, n = sum+loss*float64(b.Count), n+b.Count
		showProgress(int64(done), int64(len(windows)))
		return err
	})

	erase()
	if err != nil {
		return err
	}

	// JSON cannot represent a loss that is NaN or infinite.
	line, err := json.Marshal(score{sum / float64(n), n, sum / math.Ln2 / float64(bytes)})
	if err != nil {
		return fmt.Errorf("the loss is %v: %w", sum/float64(n), err)
	}

	_, err = fmt.Fprintln(c.OutOrStdout(), string(line))
	return err
}

// readText returns the text of a file, or of all text files in a folder.
func readText(path string) ([]byte, error) {
	if info, err := os.Stat(path); err == nil && !info.IsDir() {
		return regular.Read(path, maxText, "a text to measure on has")
	}

	text, err := data.OpenText(path)
	if err != nil {
		return nil, err
	}

	if text.Size() > maxText {
		return nil, fmt.Errorf("the texts in %s have %d bytes, want at most %d", path, text.Size(), maxText)
	}

	return io.ReadAll(text.Reader())
}

// window sets --seq to its default, or checks it.
func (o *common) window(stderr io.Writer, c llm.Config) error {
	switch {
	case o.seq == 0:
		o.seq = min(c.Seq, 2048)
	case o.seq < 2:
		return fmt.Errorf("--seq is %d, want at least 2: the first token of a window is not scored",
			o.seq)
	case o.seq > c.Seq:
		fmt.Fprintf(stderr, "note      --seq is %d, but the model is meant for at most %d positions\n", o.seq, c.Seq)
	}

	return nil
}

// cut divides the tokens of a text into windows, and returns them with the number of bytes encoded by the
// scored tokens.
func cut(tok vocabulary, text []byte, seq int) (windows [][]int, bytes int, err error) {
	start, _ := tok.Affixes() // the start-of-text token, if there is one
	ids := append(start, tok.EncodeOrdinary(text)...)
	if err := tok.check(ids); err != nil {
		return nil, 0, err
	}

	for w := range slices.Chunk(ids, seq) {
		if len(w) < 2 {
			continue
		}

		// The first token is not scored, so its bytes do not count.
		all, err := tok.Decode(w)
		if err != nil {
			return nil, 0, err
		}
		first, err := tok.Decode(w[:1])
		if err != nil {
			return nil, 0, err
		}

		windows, bytes = append(windows, w), bytes+len(all)-len(first)
	}

	if bytes < 1 {
		return nil, 0, fmt.Errorf("its %d bytes have %d tokens, and no token can be scored",
			len(text), len(ids))
	}

	return windows, bytes, nil
}

// batchTokens is the approximate number of tokens in a batch.
const batchTokens = 4096

// batches arranges windows in batches of equal size and calls f with each batch and the number of windows so
// far. The target −1 excludes the rest of a row after a short window and the unused rows of the last batch
// from the loss.
func batches(windows [][]int, seq int, f func(b data.Batch, done int) error) error {
	size := min(max(1, batchTokens/seq), len(windows)) // windows in a batch
	for done := 0; done < len(windows); done += size {
		b := data.Batch{Inputs: make([]int, size*seq), Targets: make([]int, size*seq)}
		for i := range b.Targets {
			b.Targets[i] = -1
		}

		// Each token of a window is the target of the one before it.
		for row, w := range windows[done:min(done+size, len(windows))] {
			copy(b.Inputs[row*seq:], w[:len(w)-1])
			b.Count += copy(b.Targets[row*seq:], w[1:])
		}

		if err := f(b, min(done+size, len(windows))); err != nil {
			return err
		}
	}

	return nil
}
