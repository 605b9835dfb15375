package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/hf/gguf"
	tokenizers "github.com/kasmina-go/kasmina/llm/tokenizer/hf"
	"github.com/kasmina-go/kasmina/optim"
)

func init() {
	flagRules["inspect"] = map[string]rule{"model": always}
}

func newInspect() *cobra.Command {
	var o common
	c := &cobra.Command{
		Use:   "inspect [--model] PATH",
		Short: "Describe a model folder or a file of weights",
		Long: `Describe a model folder: its configuration, tokenizer and tensors, and the memory that training
takes. If PATH is a safetensors or GGUF file, describe its header. No weights are read.`,
		Args: func(c *cobra.Command, args []string) error {
			if o.model != "" {
				return noArguments(c, args)
			}
			if len(args) == 0 {
				return flagError(c, errors.New("name a model folder or a file of weights"))
			}
			return cobra.ExactArgs(1)(c, args)
		},
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 1 {
				o.model = args[0]
			}
			return o.inspect(c.OutOrStdout())
		},
	}

	c.Flags().StringVarP(&o.model, "model", "m", "", "model `directory`, or file of weights")
	return c
}

func (o *common) inspect(w io.Writer) error {
	if info, err := os.Stat(o.model); err == nil && !info.IsDir() {
		return inspectFile(w, o.model)
	}

	f, err := openFolder(o.model)
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

	// Weights and gradients have four bytes per number, and so have most moments.
	var moments []string
	for _, choice := range optim.Choices() {
		o, err := choice.New(1)
		if err != nil {
			return err
		}
		bytes := optim.MomentBytes(o, c.Parameters(), 4)
		moments = append(moments, fmt.Sprintf("%s (%s)", sizeText(int64(bytes)), choice.Name))
	}

	row("training takes", "%s for weights and gradients, plus the optimizer's moments and the activations",
		sizeText(8*int64(params)))
	row("moments take", "%s", strings.Join(moments, ", "))

	fmt.Fprintln(t, "\ntensor\ttype\tshape\tbytes\tfile")
	total := int64(0)
	for _, x := range f.Tensors() {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\n", x.Name, x.Type, shapeOf(x.Shape), x.Bytes, x.File)
		total += x.Bytes
	}

	fmt.Fprintf(t, "all %d\t\t\t%d\t\n", len(f.Tensors()), total)
	return t.Flush()
}

// inspectFile describes the header of a safetensors or GGUF file.
func inspectFile(w io.Writer, path string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	field := func(name, value string) {
		fmt.Fprintf(t, "%s\t%s\n", name, strings.Map(func(r rune) rune {
			if r < ' ' {
				return ' '
			}
			return r
		}, fmt.Sprintf("%.160s", value)))
	}

	if strings.HasSuffix(path, ".gguf") {
		d, err := gguf.Describe(path)
		if err != nil {
			return err
		}
		for _, f := range d.Fields {
			field(f.Name, f.Value)
		}
		fmt.Fprintln(t, "\ntensor\ttype\tshape")
		for _, x := range d.Tensors {
			fmt.Fprintf(t, "%s\t%s\t%s\n", x.Name, x.Type, shapeOf(x.Shape))
		}
		return t.Flush()
	}

	f, err := safetensors.Open(path)
	if err != nil {
		return fmt.Errorf("%w; inspect takes a model's folder, a safetensors file, or a file with the "+
			"extension .gguf", err)
	}
	defer f.Close()

	metadata := f.Metadata()
	for _, name := range slices.Sorted(maps.Keys(metadata)) {
		field(name, metadata[name])
	}

	fmt.Fprintln(t, "\ntensor\ttype\tshape\tbytes")
	total := int64(0)
	for _, name := range f.Names() {
		dtype, shape, err := f.Info(name)
		if err != nil {
			return err
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\n", name, dtype, shapeOf(shape), f.Bytes(name))
		total += f.Bytes(name)
	}

	fmt.Fprintf(t, "all %d\t\t\t%d\n", len(f.Names()), total)
	return t.Flush()
}

// shapeOf formats a shape, such as 32×64.
func shapeOf(shape []int) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(shape), "[]"), " ", "×")
}
