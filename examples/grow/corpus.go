package main

import (
	"context"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// corpus is what both models learn from and are judged by.
type corpus struct {
	path       string
	train      *data.Text
	tokens     data.Tokens
	validation *data.Evaluation // for the controller
	test       *data.Evaluation // for the comparison
}

const (
	validationBytes = 8 << 10
	testBytes       = 128 << 10

	validationBatches = 16 // about: the share of them in which a blueprint helps is its stability
)

func openText(ctx context.Context, o options) (*corpus, error) {
	t := &corpus{path: o.data}
	var opts []data.Option
	if t.path == "" {
		var err error
		if t.path, err = data.GoSource(); err != nil {
			return nil, err
		}
		opts = append(opts, data.WithExtensions(".go"))
	}
	c, err := data.Open(t.path, opts...)
	if err != nil {
		return nil, err
	}
	t.train = c.Train
	if t.tokens, err = data.Tokenize(ctx, t.train, tokenizer.Bytes{}); err != nil {
		return nil, err
	}
	held, err := c.HeldOut.Sample(validationBytes + testBytes)
	if err != nil {
		return nil, err
	}
	cut := min(validationBytes, len(held)/2)
	if t.validation, err = data.NewEvaluation(held[:cut], tokenizer.Bytes{}, max(1, cut/o.model.Seq/validationBatches), o.model.Seq); err != nil {
		return nil, err
	}
	t.test, err = data.NewEvaluation(held[cut:], tokenizer.Bytes{}, o.train.Batch, o.model.Seq)
	return t, err
}
