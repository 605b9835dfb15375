// Package tokenizer converts text to token ids and back. The tokenizer [Bytes] uses one token per
// byte. A [BPE] is a byte-level byte-pair encoding that can be trained, saved and loaded. Both are
// lossless. Package hf implements the tokenizers of published models.
package tokenizer

import "fmt"

// A Tokenizer converts text to token ids in [0, VocabSize) and back. The tokenizers of this package are
// lossless: Decode(Encode(text)) equals text for any bytes, even if they are not valid UTF-8. The
// tokenizers of package hf may change the text.
//
// For bits per byte, the number of bytes represented by tokens is the length of the decoded text. A
// Tokenizer is safe for concurrent use.
type Tokenizer interface {
	// Name identifies the tokenizer and its vocabulary. Tokenizers with equal names produce equal ids
	// for every text. The checkpoints of a Trainer include the name.
	Name() string
	VocabSize() int
	Encode(text []byte) []int
	// Decode returns the bytes of the tokens. It returns an error that names the first id outside the
	// vocabulary.
	Decode(ids []int) ([]byte, error)
}

// Bytes is a tokenizer with one token per byte. The id is the value of the byte, so the vocabulary
// has 256 entries.
type Bytes struct{}

// Name returns "bytes".
func (Bytes) Name() string { return "bytes" }

// VocabSize returns 256.
func (Bytes) VocabSize() int { return 256 }

// Encode returns the values of the bytes.
func (Bytes) Encode(text []byte) []int {
	ids := make([]int, len(text))
	for i, b := range text {
		ids[i] = int(b)
	}
	return ids
}

// Decode returns the ids as bytes.
func (Bytes) Decode(ids []int) ([]byte, error) {
	text := make([]byte, len(ids))
	for i, id := range ids {
		if id < 0 || id > 255 {
			return nil, fmt.Errorf("tokenizer: Bytes.Decode: ids[%d] is %d, outside the "+
				"vocabulary [0, 256)", i, id)
		}
		text[i] = byte(id)
	}
	return text, nil
}

// DocumentEnder is implemented by tokenizers, and by tokens, that end each document with a special
// token.
type DocumentEnder interface {
	// EndOfDocument returns the id of that token, or a negative number if there is no such token.
	EndOfDocument() int
}
