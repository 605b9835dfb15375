package growth

import (
	"context"
	"fmt"
	"io"
	"path/filepath"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// A corpus is the text for training and evaluation.
type corpus struct {
	tokens  data.Tokens
	heldOut *data.Evaluation

	validation *data.Evaluation // separate text for judging blueprints at other sites than depth
}

const validationText = 4 << 10 // bytes

const tokenizerText = 16 << 20 // maximum bytes for training a byte-pair encoding

func openCorpus(ctx context.Context, o options, w io.Writer) (*corpus, error) {
	path, opts := o.data, []data.Option{}
	if path == "" {
		var err error
		if path, err = data.GoSource(); err != nil {
			return nil, err
		}
		opts = append(opts, data.WithExtensions(".go"))
	} else if o.ext != "" {
		opts = append(opts, data.WithExtensions(o.ext))
	}

	text, err := data.Open(path, opts...)
	if err != nil {
		return nil, err
	}

	c := &corpus{}
	tok, err := c.tokenize(ctx, o, text.Train, w)
	if err != nil {
		return nil, err
	}

	fmt.Fprintf(w, "data      %s: %.1f million tokens to train on\n", path,
		float64(c.tokens.Len())/1e6)
	more := 0
	if o.elsewhere() {
		more = validationText
	}

	held, err := text.HeldOut.Sample(int(o.heldOut) + more)
	if err != nil {
		return nil, err
	}

	if more = min(more, len(held)/2); more > 0 {
		if c.validation, err = data.NewEvaluation(held[:more], tok, o.batch, o.model.Seq); err != nil {
			return nil, err
		}
		held = held[more:]
	}

	c.heldOut, err = data.NewEvaluation(held, tok, o.batch, o.model.Seq)
	return c, err
}

// tokenize encodes the text as bytes, or with a byte-pair encoding and a file of tokens.
func (c *corpus) tokenize(ctx context.Context, o options, text *data.Text,
	w io.Writer) (tok tokenizer.Tokenizer, err error) {
	if o.vocab == 0 {
		c.tokens, err = data.Tokenize(ctx, text, tokenizer.Bytes{})
		return tokenizer.Bytes{}, err
	}

	fingerprint, err := text.Fingerprint(ctx, nil)
	if err != nil {
		return nil, err
	}

	fmt.Fprintf(w, "tokens    %d entries from %.1f MB; kept in %s\n", o.vocab,
		float64(text.Size())/1e6, o.cache)
	name := filepath.Join(o.cache, fmt.Sprintf("%.16s-%d", fingerprint, o.vocab))
	bpe, err := tokenizer.LoadOrTrainBPE(ctx, name+".bpe", text, o.vocab,
		int(min(text.Size(), tokenizerText)), nil)
	if err != nil {
		return nil, err
	}

	c.tokens, err = data.CacheTokens(ctx, name+".tokens", text, bpe, nil)
	return bpe, err
}

// Close closes the file of tokens, if there is one.
func (c *corpus) Close() error {
	if f, ok := c.tokens.(io.Closer); ok {
		return f.Close()
	}
	return nil
}
