package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/llm/hf/gguf"
)

// types maps the values of --precision to the names of types.
var types = map[string]string{"f32": "float32", "f16": "float16", "bf16": "bfloat16"}

type convertOptions struct {
	common
	shard float64
	gguf  string
}

func init() {
	flagRules["convert"] = map[string]rule{"model": always, "out": always, "gguf": always,
		"precision": notWith("gguf", "", "which has the type of the weights"),
		"shard":     notWith("gguf", "", "because a GGUF file is never divided")}
}

func newConvert() *cobra.Command {
	var o convertOptions
	c := &cobra.Command{
		Use:   "convert --model DIR --out NEW",
		Short: "Convert a model to another type of weights, or to GGUF",
		Long: `Write a model and its tokenizer to a new folder.

Without --precision, every tensor keeps its type and its bytes. With --gguf, the model becomes one file
for llama.cpp.`,
		Args:              noArguments,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(c *cobra.Command, args []string) error { return o.run(c) },
	}

	o.modelFlag(c)
	f := c.Flags()
	f.StringVarP(&o.out, "out", "o", "", "new `directory`, or new file with --gguf")
	f.StringVar(&o.gguf, "gguf", "", "write a GGUF file with weights of this `type`: f32, f16, bf16 or q8_0")
	f.StringVar(&o.precision, "precision", "", "`type` of the weights: f32, f16 or bf16")
	f.Float64Var(&o.shard, "shard", 5, "maximum size of a weights file in `GiB`")

	markRequired(c, "model", "out")
	completeFlag(c, "gguf", "f32", "f16", "bf16", "q8_0")
	completeFlag(c, "precision", "f32", "f16", "bf16")
	return c
}

func (o *convertOptions) run(c *cobra.Command) error {
	if !(o.shard*(1<<30) >= 1) || o.shard > 1<<20 {
		return fmt.Errorf("--shard is %v GiB, want more than 0, and at most %d", o.shard, 1<<20)
	}

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
		// Report an unusable --out before the model is loaded.
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

	model, adapted := o.model, hf.IsAdapter(o.model)
	if adapted {
		base, err := baseOf(o.model)
		if err != nil {
			return err
		}
		model = base
	}

	f, err := openFolder(model)
	if err != nil {
		return err
	}
	defer f.Close()

	if err := o.check(f, kind, opts); err != nil {
		return err
	}

	m, err := load(c.Context(), f, c.ErrOrStderr())
	if err == nil && adapted {
		m, err = hf.LoadAdapter(c.Context(), o.model, m, f)
	}
	if err != nil {
		return err
	}

	if adapted {
		if err := o.shiftOf(c, f, m); err != nil {
			return err
		}
	}

	at, erase := bar(c.ErrOrStderr(), "writing", true)
	defer erase()
	if o.gguf != "" {
		err = gguf.Save(c.Context(), o.out, f, m, kind, at)
	} else {
		err = hf.SavePretrained(c.Context(), o.out, m, append(opts, hf.Like(f), hf.WithSaveProgress(at))...)
	}
	if err != nil {
		return err
	}

	erase()
	if o.gguf != "" {
		if err := differencesOf(c.ErrOrStderr(), f); err != nil {
			return err
		}
	}

	o.report(c.ErrOrStderr())
	return nil
}

// check reports, before the weights are read, whether the model can be written.
func (o *convertOptions) check(f *hf.Folder, kind gguf.Type, opts []hf.SaveOption) error {
	if o.gguf != "" {
		return gguf.Check(f, f.Config, kind)
	}
	return hf.CheckSave(f.Config, append(opts, hf.Like(f))...)
}

// differencesOf reports texts that llama.cpp tokenizes differently from the model's tokenizer.
func differencesOf(w io.Writer, f *hf.Folder) error {
	all, err := gguf.Differences(f)
	for _, d := range all {
		fmt.Fprintf(w, "note      %s\n", d)
	}
	return err
}

// report prints the written files and commands to try next.
func (o *convertOptions) report(w io.Writer) {
	size, files := sizeOf(o.out)
	fmt.Fprintf(w, "saved     %s (%s, %s)\n", o.out, plural(files, "file"), sizeText(size))
	if o.gguf != "" {
		fmt.Fprintf(w, "next      kasmina chat -m %s    # or llama-cli -m %s\n", quoted(o.out), quoted(o.out))
		return
	}

	if _, err := os.Stat(filepath.Join(o.out, tokenizerName)); err != nil {
		fmt.Fprintf(w, "tokenizer %s has none to copy: put the model's tokenizer.json into %s before you use "+
			"it\n", o.model, o.out)
		return
	}

	fmt.Fprintf(w, "next      kasmina generate -m %s -p TEXT\n", quoted(o.out))
}
