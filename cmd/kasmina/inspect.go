package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/llm/hf"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
)

func newInspect() *cobra.Command {
	var o common
	c := &cobra.Command{Use: "inspect -model DIR", Short: "Say what a model's folder holds",
		Long: `Say what a model's folder holds: configuration, tokenizer, tensors, and the memory that
training takes. No weights are read.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 1 && o.model == "" {
				o.model, args = args[0], nil
			}
			if err := errors.Join(withoutWords(c, args), required(c, "model")); err != nil {
				return err
			}
			return o.inspect(c.OutOrStdout())
		}}
	o.modelFlag(c)
	return c
}

func (o *common) inspect(w io.Writer) error {
	f, err := hf.Open(o.model)
	if err != nil {
		return err
	}
	defer f.Close()
	c, params := f.Config, 0
	for _, shape := range c.Parameters() {
		n := 1
		for _, d := range shape {
			n *= d
		}
		params += n
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("family", "%s", f.Family)
	row("parameters", "%d", params)
	row("blocks", "%d of %d features, %d in the perceptron", c.Layers, c.Dim, c.FF)
	row("heads", "%d of %d features, %d of keys and values", c.Heads, c.HeadDim, c.KVHeads)
	row("context", "%d tokens", c.Seq)
	row("vocabulary", "%d", c.Vocab)
	if tok, err := tokenizers.Load(o.model); err != nil {
		row("tokenizer", "none: %v", err)
	} else {
		row("tokenizer", "%s", tok.Name())
	}
	// Master weights, gradients and two moments of AdamW, each of four bytes.
	row("training takes", "%s for weights, gradients and AdamW, and activations beside",
		size(16*int64(params)))
	fmt.Fprintln(t, "\ntensor\ttype\tshape\tbytes\tfile")
	total := int64(0)
	for _, x := range f.Tensors() {
		shape := strings.ReplaceAll(strings.Trim(fmt.Sprint(x.Shape), "[]"), " ", "×")
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\n", x.Name, x.Type, shape, x.Bytes, x.File)
		total += x.Bytes
	}
	fmt.Fprintf(t, "all %d\t\t\t%d\t\n", len(f.Tensors()), total)
	return t.Flush()
}

// size is a number of bytes as people read it.
func size(bytes int64) string {
	switch {
	case bytes >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
	case bytes >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%.1f KiB", float64(bytes)/(1<<10))
}
