package main

import (
	"context"
	"fmt"
	"io"
	"math"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/hf"
)

// baseFlag adds --base.
func (o *finetuneOptions) baseFlag(c *cobra.Command) {
	c.Flags().StringVar(&o.baseType, "base", "f32", "type in which the frozen linear layers are stored in memory: f32, bf16, "+
		"f8 or nf4 (QLoRA)")
	completeFlag(c, "base", "f32", "bf16", "f8", "nf4")
}

// weights returns the type of --base.
func (o *finetuneOptions) weights() (t cpuops.WeightType, err error) {
	if err := t.UnmarshalText([]byte(o.baseType)); err != nil || t == cpuops.Q8 {
		return t, fmt.Errorf("--base is %.40q, want f32, bf16, f8 or nf4", o.baseType)
	}
	if t != cpuops.Float32 && o.method == methodFull {
		return t, fmt.Errorf("--base %v is for frozen weights, but with --method full, all weights learn: leave it out", t)
	}
	if t != cpuops.Float32 && o.method == methodSeeds {
		return t, fmt.Errorf("--base %v does not work with --method seeds, which needs float32 weights: leave it out", t)
	}
	return t, nil
}

// loadBase loads the model, without adapters.
func (o *finetuneOptions) loadBase(c *cobra.Command, f *hf.Folder) (*llm.Model, error) {
	t, err := o.weights()
	if err != nil {
		return nil, err
	}
	if t == cpuops.Float32 {
		return load(c.Context(), f, c.ErrOrStderr(), hf.WithConfig(func(c *llm.Config) {
			c.Seq, c.Documents = o.seq, true
		}))
	}

	var tuned []string
	if o.method == methodLast {
		if tuned, err = f.Config.LastBlocks(o.blocks); err != nil {
			return nil, fmt.Errorf("--blocks: %w", err)
		}
	}
	config := f.Config
	config.Seq, config.Documents = o.seq, true
	return loadFrozen(c.Context(), t, config, f, c.ErrOrStderr(), tuned...)
}

// loadFrozen calls llm.LoadFrozen for a folder, with a progress bar.
func loadFrozen(ctx context.Context, t cpuops.WeightType, c llm.Config, f *hf.Folder, stderr io.Writer,
	tuned ...string) (*llm.Model, error) {
	at, erase := bar(stderr, "loading", true)
	defer erase()
	return llm.LoadFrozen(ctx, t, c, newCounted(f, at), tuned...)
}

// whole replaces the compact frozen weights of a trained model with the float32 weights of its folder, and
// prints how much this changes the logits for the given tokens.
func (o *finetuneOptions) whole(c *cobra.Command, m *llm.Model, f *hf.Folder, tokens []int) (*llm.Model, error) {
	if m.BaseType() == cpuops.Float32 {
		return m, nil
	}

	base, err := load(c.Context(), f, c.ErrOrStderr(), hf.WithConfig(func(c *llm.Config) {
		c.Seq, c.Documents = m.Config.Seq, m.Config.Documents
	}))
	if err != nil {
		return nil, err
	}
	whole, err := m.Rebase(base)
	if err != nil || o.quiet {
		return whole, err
	}
	return whole, printShift(c.Context(), c.ErrOrStderr(), m, whole, tokens)
}

// printPlan prints the memory that the run needs on each GPU, and a note if that exceeds --memory. It returns false if the
// engine has no memory plan.
func (o *trainOptions) printPlan(w io.Writer, t *llm.Trainer) bool {
	p, ok := t.MemoryPlan()
	if !ok {
		return false
	}
	where := "the GPU"
	if o.gpus > 1 {
		where = "each GPU, not counting what the GPUs exchange"
	}
	size := func(bytes int) string { return sizeText(int64(bytes)) }
	fmt.Fprintf(w, "memory    %s on %s: %s of weights, %s of summed gradients, %s of optimizer state, %s for a batch "+
		"and %s of workspace\n", size(p.Total()), where, size(p.Weights), size(p.Gradients), size(p.Moments), size(p.Run),
		size(p.Workspace))
	if o.engine.memory > 0 && p.Total()-p.Workspace > o.engine.memoryBytes() {
		advice := "lower --batch or --seq"
		if !o.train.Recompute {
			advice = "add --recompute, or " + advice
		}
		fmt.Fprintf(w, "note      without the workspace, the run needs more than --memory %v in any case: for less, %s\n",
			o.engine.memory, advice)
	}
	return true
}

// mostShift is the maximum number of tokens that printShift uses.
const mostShift = 64

// printShift prints how much the logits differ between a model with compact frozen weights, m, and the same
// model with float32 weights, whole.
func printShift(ctx context.Context, w io.Writer, m, whole *llm.Model, tokens []int) error {
	tokens = tokens[:min(len(tokens), mostShift, m.Config.Seq)]
	from, err := llm.AllLogits(ctx, m, tokens)
	if err != nil {
		return err
	}
	to, err := llm.AllLogits(ctx, whole, tokens)
	if err != nil {
		return err
	}

	x, y, vocab := from.Float32s(), to.Float32s(), from.Shape()[1]
	sum, most, same := 0.0, 0.0, 0
	for i := range x {
		d := math.Abs(float64(x[i]) - float64(y[i]))
		sum, most = sum+d, max(most, d)
	}
	for row := range tokens {
		if likeliest(x[row*vocab:][:vocab]) == likeliest(y[row*vocab:][:vocab]) {
			same++
		}
	}

	fmt.Fprintf(w, "merged    into the weights of the model's files; compared with the %v weights used in training, the "+
		"logits differ by %.3g on average and by at most %.3g, and the likeliest next token is the same at %d of %d "+
		"positions\n", m.BaseType(),
		sum/float64(len(x)), most, same, len(tokens))
	return nil
}

// likeliest returns the index of the largest logit.
func likeliest(logits []float32) (best int) {
	for i, x := range logits {
		if x > logits[best] {
			best = i
		}
	}
	return best
}

// shiftOf calls printShift for merged adapters that were trained on weights of a compact type.
func (o *convertOptions) shiftOf(c *cobra.Command, f *hf.Folder, merged *llm.Model) error {
	t, err := hf.AdapterWeights(o.model)
	if err != nil || t == cpuops.Float32 {
		return err
	}

	frozen, err := loadFrozen(c.Context(), t, f.Config, f, c.ErrOrStderr())
	if err != nil {
		return err
	}
	m, err := hf.LoadAdapter(c.Context(), o.model, frozen, f)
	if err != nil {
		return err
	}
	return printShift(c.Context(), c.ErrOrStderr(), m, merged, o.shiftTokens(f))
}

// shiftText is the sample that convert uses to compare logits.
const shiftText = "The committee met on Tuesday to discuss the new library. Most members agreed that it should open " +
	"in the evening, but they could not decide who would pay for it."

// shiftTokens returns the tokens of shiftText, or the first tokens of the vocabulary if the text cannot
// be encoded.
func (o *convertOptions) shiftTokens(f *hf.Folder) []int {
	if tok, err := tokenizerOf(f); err == nil {
		if ids := tok.Encode([]byte(shiftText)); len(ids) > 0 && tok.check(ids) == nil {
			return ids
		}
	}

	ids := make([]int, min(mostShift, f.Config.Vocab))
	for i := range ids {
		ids[i] = i
	}
	return ids
}
