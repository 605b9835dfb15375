package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"os"

	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

const (
	bytesVocab = 256      // models with a vocabulary up to this size read bytes
	bpeText    = 16 << 20 // maximum bytes of text for training a byte-pair encoding
)

// openText returns a loader of a text.
func openText(s settings, folder, bpe string, seed uint64) (*data.Loader, error) {
	tokens, err := readText(folder, bpe, s.Model.Vocab)
	if err != nil {
		return nil, err
	}
	return data.NewLoader(tokens, data.LoaderConfig{Batch: s.Batch, Seq: s.Model.Seq, Seed: seed})
}

// writeText writes windows of a text, in the order of a loader.
func writeText(path string, s settings, loader *data.Loader) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, file.Close()) }()

	w := bufio.NewWriter(file)
	var id [4]byte
	put := func(i int) {
		binary.LittleEndian.PutUint32(id[:], uint32(i))
		w.Write(id[:]) // Flush returns its error
	}
	for range s.Rates {
		b, err := loader.Next()
		if err != nil {
			return err
		}
		for i, input := range b.Inputs {
			put(input)
			if (i+1)%s.Model.Seq == 0 {
				put(b.Targets[i])
			}
		}
	}

	return w.Flush()
}

// readText returns the training part of a text as tokens of a vocabulary.
func readText(folder, bpe string, vocab int) (data.Tokens, error) {
	var options []data.Option
	if folder == "go" {
		var err error
		if folder, err = data.GoSource(); err != nil {
			return nil, err
		}
		options = append(options, data.WithExtensions(".go"))
	}

	corpus, err := data.Open(folder, options...)
	if err != nil {
		return nil, err
	}

	if vocab <= bytesVocab {
		return data.Tokenize(context.Background(), corpus.Train, tokenizer.Bytes{})
	}

	progress := func(done, of int) error {
		if done%1000 == 0 || done == of {
			fmt.Fprintf(os.Stderr, "\rlearning an encoding: %d of %d", done, of)
		}
		return nil
	}

	sample := int(min(corpus.Train.Size(), bpeText))
	tok, err := tokenizer.LoadOrTrainBPE(context.Background(), bpe, corpus.Train,
		vocab, sample, progress)
	if err != nil {
		return nil, err
	}

	return data.Tokenize(context.Background(), corpus.Train, tok)
}
