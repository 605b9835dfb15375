package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/hf/gguf"
)

// types are what --precision of convert takes.
var types = map[string]string{"f32": "float32", "f16": "float16", "bf16": "bfloat16"}

type convertOptions struct {
	common
	shard float64
	gguf  string
}

func newConvert() *cobra.Command {
	var o convertOptions
	c := &cobra.Command{
		Use:   "convert --model DIR --out NEW",
		Short: "Write a model with another type of weights, or as GGUF",
		Long: `Write a model and its tokenizer to a new folder.

Without --precision, every tensor keeps its type and its bytes. With --gguf, the model becomes one file
for llama.cpp.`,
		Args:              oneDashHint(cobra.NoArgs),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(c *cobra.Command, args []string) error { return o.run(c) },
	}
	o.modelFlag(c)
	f := c.Flags()
	f.StringVarP(&o.out, "out", "o", "", "new `directory`, or new file with --gguf")
	f.StringVar(&o.gguf, "gguf", "", "write a GGUF file with weights of this `type`: f32, f16, bf16 or q8_0")
	f.StringVar(&o.precision, "precision", "", "`type` of the weights: f32, f16 or bf16")
	f.Float64Var(&o.shard, "shard", 5, "largest size of a weights file in `GiB`")

	markRequired(c, "model", "out")
	completeFlag(c, "gguf", "f32", "f16", "bf16", "q8_0")
	completeFlag(c, "precision", "f32", "f16", "bf16")
	return c
}

func (o *convertOptions) run(c *cobra.Command) error {
	opts := []hf.SaveOption{hf.WithShardSize(int64(o.shard * (1 << 30)))}
	if o.precision != "" {
		name, ok := types[o.precision]
		if !ok {
			return fmt.Errorf("--precision is %q, want f32, f16 or bf16", o.precision)
		}
		opts = append(opts, hf.WithDtype(name))
	}
	var kind gguf.Type
	if o.gguf != "" {
		var err error
		if kind, err = gguf.ParseType(o.gguf); err != nil {
			return fmt.Errorf("--gguf: %w", err)
		}
		// What is wrong with --out is found out now rather than after the model has been loaded.
		if _, err := os.Lstat(o.out); err == nil {
			return fmt.Errorf("--out: %s exists: name a new file, or remove that one", o.out)
		}
		if err := atomicfile.Writable(o.out); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}
	if o.gguf == "" {
		if err := atomicfile.Vacant(o.out); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}

	f, err := hf.Open(o.model)
	if err != nil {
		return err
	}
	defer f.Close()
	m, err := load(c.Context(), f, c.ErrOrStderr())
	if err != nil {
		return err
	}
	at, clear := bar(c.ErrOrStderr(), "writing", true)
	defer clear()
	if o.gguf != "" {
		return gguf.Save(c.Context(), o.out, f, m, kind, at)
	}
	return hf.SavePretrained(c.Context(), o.out, m,
		append(opts, hf.Like(f), hf.WithSaveProgress(at))...)
}
