// Package tokenizer converts text to token ids and back. The tokenizer [Bytes] has one token per byte. A
// [BPE] is a byte-level byte-pair encoding, which the package can train, save and load. Both are
// lossless. Package hf implements the tokenizers of published models.
package tokenizer

import "fmt"

// A Tokenizer converts text to token ids in [0, VocabSize) and back. The tokenizers of this package are
// lossless: Decode(Encode(text)) equals text for any bytes, even if they are not valid UTF-8. The
// tokenizers of package hf may change the text.
//
// For bits per byte, the number of bytes of some tokens is the length of the decoded text. Several
// goroutines may use a Tokenizer at the same time.
type Tokenizer interface {
	// Name identifies the tokenizer with its vocabulary: tokenizers with equal names produce equal ids
	// for every text. The checkpoints of a Trainer include the name.
	Name() string
	VocabSize() int
	Encode(text []byte) []int
	// Decode returns the bytes of the tokens. It returns an error that names the first id outside the
	// vocabulary.
	Decode(ids []int) ([]byte, error)
}

// Bytes is the tokenizer with one token per byte. The id is the value of the byte, and the vocabulary has
// 256 entries.
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

// DocumentEnder is implemented by tokenizers, and by tokens, with a token that ends each document.
type DocumentEnder interface {
	// EndOfDocument returns the id of that token, or a negative number if the vocabulary has no such
	// token.
	EndOfDocument() int
}
