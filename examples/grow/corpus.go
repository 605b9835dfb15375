package main

import "github.com/kasmina-go/kasmina/llm"

// corpus is what both models learn from and are judged by.
type corpus struct {
	path       string
	train      *llm.Text
	tokens     llm.Tokens
	validation *llm.Evaluation // for the controller
	test       *llm.Evaluation // for the comparison
}

const (
	validationBytes = 8 << 10
	testBytes       = 128 << 10

	validationBatches = 16 // about: the share of them in which a blueprint helps is its stability
)

func openText(o options) (*corpus, error) {
	t := &corpus{path: o.data}
	var opts []llm.CorpusOption
	if t.path == "" {
		var err error
		if t.path, err = llm.GoSource(); err != nil {
			return nil, err
		}
		opts = append(opts, llm.WithExtensions(".go"))
	}
	c, err := llm.OpenCorpus(t.path, opts...)
	if err != nil {
		return nil, err
	}
	t.train = c.Train
	if t.tokens, err = llm.Tokenize(t.train, llm.ByteTokenizer{}); err != nil {
		return nil, err
	}
	held, err := c.HeldOut.Sample(validationBytes + testBytes)
	if err != nil {
		return nil, err
	}
	cut := min(validationBytes, len(held)/2)
	if t.validation, err = llm.NewEvaluation(held[:cut], llm.ByteTokenizer{}, max(1, cut/o.model.Seq/validationBatches), o.model.Seq); err != nil {
		return nil, err
	}
	t.test, err = llm.NewEvaluation(held[cut:], llm.ByteTokenizer{}, o.train.Batch, o.model.Seq)
	return t, err
}
