package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/tasks"
	"github.com/kasmina-go/kasmina/llm/tokenizer/chat"
)

// evalOptions are the options of eval.
type evalOptions struct {
	common
	tasks    []string // files, each with "=" and a format if it has to be named
	examples []string // files of few-shot examples, one for each task or for all
	fewShot  int
	limit    int
	answer   int // most tokens of a generated answer
	chat     bool
}

// taskFlags adds the options of eval that concern tasks.
func (o *evalOptions) taskFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringSliceVar(&o.tasks, "tasks", nil, "task `FILE`s (JSON Lines, parquet, or the folder of a CORE bundle), "+
		"separated by commas; FILE=FORMAT names the format")
	f.IntVar(&o.fewShot, "few-shot", tasks.DefaultFewShot,
		"solved examples before each question; -1 means as many as lm-evaluation-harness uses")
	f.StringSliceVar(&o.examples, "examples", nil,
		"`FILE` to draw the examples from, or one for each task (default: the task's own file)")
	f.BoolVar(&o.chat, "chat", false, "apply the model's chat template to the prompts")
	f.IntVar(&o.limit, "limit", 0, "number of items of each task to use (default: all)")
	f.IntVar(&o.answer, "answer-tokens", 256, "maximum number of tokens in a generated answer")
	f.StringVarP(&o.out, "out", "o", "", "JSON `file` for the results; answers are collected next to it, so that the "+
		"same command continues after an interruption")
}

// evalTasks measures a model with tasks.
func (o *evalOptions) evalTasks(c *cobra.Command) (err error) {
	switch {
	case o.fewShot < tasks.DefaultFewShot:
		return fmt.Errorf("--few-shot is %d, want at least 0", o.fewShot)
	case o.limit < 0:
		return fmt.Errorf("--limit is %d, want at least 1, or 0 for all items", o.limit)
	case o.answer < 1:
		return fmt.Errorf("--answer-tokens is %d, want at least 1", o.answer)
	case len(o.examples) > 1 && len(o.examples) != len(o.tasks):
		return fmt.Errorf("--examples has %d files and --tasks %d, want one for all or one for each",
			len(o.examples), len(o.tasks))
	}

	f, err := o.openOne(c.Context())
	if err != nil {
		return err
	}
	defer f.Close()

	all, err := o.openTasks(f.texts())
	if err != nil {
		return err
	}
	for _, t := range all {
		for _, n := range t.Notes {
			fmt.Fprintf(c.ErrOrStderr(), "note      %s\n", n)
		}
	}

	if o.seq == 0 {
		o.seq = f.Config.Seq
	}
	if err := o.window(c.ErrOrStderr(), f.Config); err != nil {
		return err
	}

	tok, err := tokenizerOf(f.texts())
	if err != nil {
		return err
	}

	if o.out != "" {
		if err := os.MkdirAll(filepath.Dir(o.out), 0o777); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}

	identity, err := modelIdentity(append([]string{f.Dir}, f.dirs...), o.precision)
	if err != nil {
		return err
	}

	device, precision, err := o.openInference(c.ErrOrStderr())
	if err != nil {
		return err
	}
	if device != nil {
		defer device.Close()
	}

	i, err := o.inference(c.Context(), f, f.adapter(), o.seq, device, precision, c.ErrOrStderr())
	if err != nil {
		return err
	}
	defer i.Close()

	at, clear := bar(c.ErrOrStderr(), "measuring", false)
	s := tasks.Settings{Tokenizer: tok, Window: o.seq, Ends: f.Generation.End, Generate: o.answer,
		Log: o.logPath(), Model: identity, Progress: func(done, of int) { at(int64(done), int64(of)) }}
	model, parallel, release, err := answering(i, all)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	s.Parallel = parallel

	results, err := tasks.Evaluate(c.Context(), all, model, s)
	clear()
	if err != nil {
		return err
	}
	return o.report(c.OutOrStdout(), results)
}

// openTasks opens the tasks in the files. The chat template is that of a folder.
func (o *evalOptions) openTasks(f *hf.Folder) (all []*tasks.Task, err error) {
	options := tasks.Options{FewShot: o.fewShot, Limit: o.limit}
	if o.chat {
		template, err := chatTemplate(f)
		if err != nil {
			return nil, err
		}
		options.Chat = func(m []chat.Message) (string, error) {
			return template.Render(m, chat.Options{AddGenerationPrompt: true})
		}
	}

	for i, path := range o.tasks {
		options.Format = ""
		if at := strings.LastIndexByte(path, '='); at >= 0 {
			if _, err := os.Stat(path); err != nil {
				path, options.Format = path[:at], path[at+1:]
			}
		}
		if len(o.examples) > 0 {
			options.Examples = o.examples[min(i, len(o.examples)-1)]
		}
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("--tasks: %w: give a file with the questions, which are not downloaded", err)
		}
		opened, err := tasks.Open(path, options)
		if err != nil {
			return nil, fmt.Errorf("--tasks: %w", err)
		}
		all = append(all, opened...)
	}
	return all, nil
}

// logPath returns the path of the file with the answers to each item, or "" without --out.
func (o *evalOptions) logPath() string {
	if o.out == "" {
		return ""
	}
	return strings.TrimSuffix(o.out, ".json") + ".items.jsonl"
}

// parallelAnswers is the number of answers that a CPU generates at the same time.
const parallelAnswers = 16

// answering returns a model that answers tasks, and the number of texts that it can continue at the same
// time. On the CPU, answers are generated together. Call release after use.
func answering(i *llm.Inference, all []*tasks.Task) (m tasks.Model, parallel int, release func() error, err error) {
	generates := slices.ContainsFunc(all, func(t *tasks.Task) bool {
		return t.Items[0].Requests[0].Kind == tasks.Generation
	})
	if !i.OnCPU() || !generates {
		return i, 1, func() error { return nil }, nil
	}

	b, err := i.NewBatcher(llm.BatcherOptions{Texts: parallelAnswers})
	if err != nil {
		return nil, 0, nil, err
	}
	return batchedModel{i, b}, parallelAnswers, b.Close, nil
}

// A batchedModel scores texts with an inference and continues them with a batcher.
type batchedModel struct {
	*llm.Inference
	batcher *llm.Batcher
}

// Decoder implements tasks.Model.
func (m batchedModel) Decoder() (func(context.Context, []int) (any, error), error) {
	return m.batcher.Decoder()
}

// modelIdentity returns a hash that changes when the files of a model change.
func modelIdentity(dirs []string, precision string) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, precision)
	for _, dir := range dirs {
		if err := hashFolder(h, dir); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// hashFolder hashes the settings in a folder, and the names, the sizes and the times of its weights. The model may
// also be a file.
func hashFolder(h io.Writer, dir string) error {
	if info, err := os.Stat(dir); err == nil && info.Mode().IsRegular() {
		fmt.Fprintln(h, info.Name(), info.Size(), info.ModTime().UnixNano())
		return nil
	}

	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}

	for _, e := range entries {
		switch filepath.Ext(e.Name()) {
		case ".safetensors":
			info, err := os.Stat(filepath.Join(dir, e.Name()))
			if err != nil {
				return err
			}
			fmt.Fprintln(h, e.Name(), info.Size(), info.ModTime().UnixNano())
		case ".json", ".jinja":
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			} else if err != nil {
				return err
			}
			fmt.Fprintln(h, e.Name(), len(text))
			h.Write(text)
		}
	}
	return nil
}

// report prints the results as a table and as a line of JSON, and writes them to --out.
func (o *evalOptions) report(stdout io.Writer, results []tasks.Result) error {
	byTask := map[string]tasks.Result{}
	for _, r := range results {
		byTask[r.Task] = r
	}

	line, err := json.Marshal(map[string]any{"results": byTask})
	if err != nil {
		return err
	}

	if o.out != "" {
		if err := atomicfile.Write(o.out, func(f *os.File) error {
			_, err := fmt.Fprintf(f, "%s\n", line)
			return err
		}); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}

	if err := tasks.WriteTable(stdout, results); err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "\n%s\n", line)
	return err
}
