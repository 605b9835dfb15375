package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/hf"
	"github.com/kasmina-go/kasmina/state"
)

// An origin provides the model that a run trains: a model directory, or the sizes of a new model.
type origin interface {
	// shape returns the configuration of the model without the additions of the run.
	shape() llm.Config
	vocabulary() vocabulary
	// model returns the model. The function change adapts its configuration to the run.
	model(ctx context.Context, stderr io.Writer, change func(*llm.Config),
		lattice ...state.Option) (*llm.Model, error)
	// saving returns the options for saving the trained model in the format of transformers.
	saving() []hf.SaveOption
	// persist writes files that a later process needs to continue the run. It is called before the first
	// checkpoint.
	persist() error
	Close() error
}

// origin opens the origin selected by the options.
func (o *trainOptions) origin(c *cobra.Command, m machines, s stage, text *data.Text) (origin, error) {
	if o.model == "" {
		return o.fromScratch(c, m, s, text)
	}

	f, err := openFolder(o.model)
	if err != nil {
		return nil, err
	}

	tok, err := tokenizerOf(f)
	if err != nil {
		f.Close()
		return nil, err
	}

	return published{f, tok}, nil
}

// published is the origin of a run that continues the training of a model in a directory.
type published struct {
	*hf.Folder
	tok vocabulary
}

func (p published) shape() llm.Config { return p.Config }

func (p published) vocabulary() vocabulary { return p.tok }

func (p published) model(ctx context.Context, stderr io.Writer, change func(*llm.Config),
	lattice ...state.Option) (*llm.Model, error) {
	return load(ctx, p.Folder, stderr, hf.WithConfig(change, lattice...))
}

func (p published) saving() []hf.SaveOption { return []hf.SaveOption{hf.Like(p.Folder)} }

func (p published) persist() error { return nil }
