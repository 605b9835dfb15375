package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/parquetjson"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// keepSelf is the value of --keep that makes the model generate the text itself.
const keepSelf = "self"

// generatedName is the name of the file with the generated text in the run's folder.
const generatedName = "keep.json"

// Limits on the tokens of the old text. Generated text costs a pass over the model per token.
const (
	keepTokens      = 1 << 14
	generatedTokens = 1 << 11
)

// retentionOptions holds the options that limit forgetting.
type retentionOptions struct {
	keep     string
	forget   float64
	growRank bool
}

func (r *retentionOptions) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&r.keep, "keep", "", "`file` (text, JSON Lines or parquet) with text of the kind that the model must not forget, or self "+
		"for text that the model generates before training")
	f.Float64Var(&r.forget, "forget", 0.02, "maximum rise of the loss on the text of --keep, in nats per token; if it is "+
		"exceeded, the run returns to the last evaluation within it")
	f.BoolVar(&r.growRank, "grow-rank", false, "grow the ranks of the adapters during training where they lower the loss most, "+
		"or with --keep, where they lower it most relative to what the model forgets; there are at most as many "+
		"parameters as with --rank on all layers")
}

// errGrowRankProcesses is the error of --grow-rank with several processes.
var errGrowRankProcesses = errors.New("--grow-rank needs a single process: leave out --gpus")

// checkRetention returns an error for invalid options. It is called before any file is read.
func (o *finetuneOptions) checkRetention() error {
	switch {
	case !(o.forget > 0) || math.IsInf(o.forget, 0):
		return fmt.Errorf("--forget is %v, want a finite number above 0", o.forget)
	case o.growRank && o.gpus > 1:
		return errGrowRankProcesses
	}
	return nil
}

// checkRetentionData returns an error for options that have no effect on the data or do not fit it.
func (o *finetuneOptions) checkRetentionData(c *cobra.Command, prefers bool) error {
	if unused := given(c, "keep", "grow-rank"); prefers && len(unused) > 0 {
		return fmt.Errorf("%s no effect on preference pairs, whose loss keeps the model close to what it was: leave it "+
			"out, and see --beta", have(unused))
	}
	return nil
}

// fixesDirections reports whether the matrices a of growing adapters stay fixed. If they learned,
// directions chosen because the old text hardly uses them would drift toward directions that it does use.
func (o *finetuneOptions) fixesDirections() bool { return o.growRank && o.keep != "" }

// useRetention adds the parts that grow ranks and limit forgetting.
func (o *finetuneOptions) useRetention(t *llm.Trainer, old *data.Evaluation) error {
	if o.growRank {
		growth, err := llm.NewRankGrowth(llm.RankGrowthConfig{Old: old})
		if err != nil {
			return err
		}
		if err := t.Use(growth); err != nil {
			return err
		}
	}
	if old == nil {
		return nil
	}

	retention, err := llm.NewRetention(llm.RetentionConfig{Text: old, Budget: o.forget, Every: o.evalEvery})
	if err != nil {
		return err
	}
	return t.Use(retention)
}

// oldText returns the text of --keep, or nil without --keep. m is the model before tuning, without
// adapters.
func (o *finetuneOptions) oldText(c *cobra.Command, on machines, s stage, m *llm.Model,
	d *tuningData) (*data.Evaluation, error) {
	if o.keep == "" {
		return nil, nil
	}

	var all []chatdata.Sequence
	var err error
	if o.keep == keepSelf {
		if err := on.atFirst(func() error { return o.generate(c, s, m, d) }); err != nil {
			return nil, err
		}
		all, err = o.generated()
	} else {
		all, err = o.readOld(c.Context(), d)
	}
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("%s has no text", o.keep)
	}
	if err != nil {
		return nil, fmt.Errorf("--keep: %w", err)
	}
	return d.encoder.Evaluation(all, o.train.Batch, o.seq)
}

// readOld reads the file of --keep, as examples or as plain text. It takes samples from all parts of a long file.
func (o *finetuneOptions) readOld(ctx context.Context, d *tuningData) (all []chatdata.Sequence, err error) {
	examples, err := hasExamples(o.keep)
	if err != nil {
		return nil, err
	}
	if examples {
		report, err := d.encoder.Check(chatdata.ReadFile(o.keep, nil), o.keep, func(int) error { return ctx.Err() })
		if err != nil {
			return nil, err
		}
		if n := len(report.Problems); n > 0 {
			return nil, fmt.Errorf("%s has %s:%s", o.keep, plural(n, "problem"), summaryOf(report.Problems))
		}
		for _, s := range report.Sequences {
			all = append(all, o.cut(s)...)
		}
		return spread(all, keepTokens), nil
	}

	text, err := data.OpenText(o.keep)
	if err != nil {
		return nil, err
	}
	const bytesPerToken = 4
	documents, err := text.SampleDocuments(bytesPerToken * keepTokens)
	if err != nil {
		return nil, err
	}
	for _, document := range documents {
		s := chatdata.Sequence{File: o.keep, Line: 1, IDs: d.encoder.Tokenizer.Encode(document)}
		all = append(all, o.cut(learned(s))...)
	}
	return spread(all, keepTokens), nil
}

// hasExamples reports whether a file contains examples, as opposed to plain text: whether it is a parquet file, or starts
// with a brace like JSON Lines.
func hasExamples(path string) (bool, error) {
	file, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer file.Close()

	start := make([]byte, 64)
	n, err := io.ReadFull(file, start)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return false, err
	}
	start = bytes.TrimSpace(start[:n])
	return bytes.HasPrefix(start, []byte("{")) || bytes.HasPrefix(start, []byte(parquetjson.Magic)), nil
}

// learned returns the sequence with every token except the first marked as learned.
func learned(s chatdata.Sequence) chatdata.Sequence {
	s.Learn = make([]bool, len(s.IDs))
	for i := range s.Learn {
		s.Learn[i] = i > 0
	}
	return s
}

// cut divides a sequence into parts that fit a row. It drops parts without tokens to learn.
func (o *finetuneOptions) cut(s chatdata.Sequence) (parts []chatdata.Sequence) {
	for from := 0; from < len(s.IDs)-1; from += o.seq {
		to := min(len(s.IDs), from+o.seq+1)
		p := chatdata.Sequence{File: s.File, Line: s.Line, Parquet: s.Parquet, IDs: s.IDs[from:to], Learn: append([]bool(nil),
			s.Learn[from:to]...)}
		p.Learn[0] = false // nothing precedes the first token of a part
		if p.Learned() > 0 {
			parts = append(parts, p)
		}
	}
	return parts
}

// spread returns evenly spaced sequences with about the given number of tokens in total, or all sequences
// if they have no more.
func spread(all []chatdata.Sequence, most int) []chatdata.Sequence {
	tokens := 0
	for _, s := range all {
		tokens += len(s.IDs)
	}
	if tokens <= most {
		return all
	}

	n := max(1, len(all)*most/tokens)
	some := make([]chatdata.Sequence, n)
	for i := range some {
		some[i] = all[i*len(all)/n]
	}
	return some
}

// generate makes the model write the text, and saves it. A run that resumes from a checkpoint must use
// the text written at its start, so generate then keeps the existing file.
func (o *finetuneOptions) generate(c *cobra.Command, s stage, m *llm.Model, d *tuningData) (err error) {
	if _, err := os.Stat(o.in(generatedName)); s == saved && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if !o.quiet {
		fmt.Fprintf(c.ErrOrStderr(), "keep      the model generates %d tokens of text that it must not forget\n",
			generatedTokens)
	}

	g, err := llm.NewGenerator(m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	draw, err := sampler.New(sampler.Config{Vocab: m.Config.Vocab, Temperature: 1, Seed: o.seed})
	if err != nil {
		return err
	}

	var start []int
	if e, ok := d.encoder.Tokenizer.(tokenizer.DocumentEnder); ok && e.EndOfDocument() >= 0 {
		start = []int{e.EndOfDocument()}
	} else {
		start = d.encoder.Tokenizer.Encode([]byte("\n"))
	}
	if len(start) == 0 {
		return errors.New("--keep self: the tokenizer has no token to start a text with: name a file instead")
	}

	var texts [][]int
	for tokens := 0; tokens < generatedTokens; {
		text := append([]int(nil), start...)
		for id, err := range g.Generate(c.Context(), start, min(o.seq, generatedTokens-tokens), draw) {
			if err != nil {
				return err
			}
			text = append(text, id)
		}
		texts = append(texts, text)
		tokens += len(text) - len(start)
	}

	return atomicfile.Write(o.in(generatedName), func(f *os.File) error { return json.NewEncoder(f).Encode(texts) })
}

// generated reads the text that generate has saved.
func (o *finetuneOptions) generated() (all []chatdata.Sequence, err error) {
	text, err := os.ReadFile(o.in(generatedName))
	if err != nil {
		return nil, err
	}
	var texts [][]int
	if err := json.Unmarshal(text, &texts); err != nil {
		return nil, fmt.Errorf("%s: %w: remove the folder, and start a new run", o.in(generatedName), err)
	}
	for i, ids := range texts {
		all = append(all, o.cut(learned(chatdata.Sequence{File: keepSelf, Line: i + 1, IDs: ids}))...)
	}
	return all, nil
}

// addRetention adds the figures of the old text to the result.
func (r *tuned) addRetention(f llm.RetentionFigures) {
	if f.IsZero() {
		return
	}
	rise := f.Rise()
	r.KeepLoss, r.KeepRise, r.Rollbacks = &f.Loss, &rise, &f.Rollbacks
}
