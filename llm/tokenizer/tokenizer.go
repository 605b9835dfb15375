// Package tokenizer turns text into token ids and back. [Bytes] is one byte each. A [BPE] is a
// byte-level byte-pair encoding, which it also trains, saves and loads. All are lossless. It knows
// nothing of models or of where text comes from.
package tokenizer

import "fmt"

// A Tokenizer turns text into token ids in [0, VocabSize) and back. Those of this package are
// lossless: Decode(Encode(text)) equals text for any bytes, valid UTF-8 or not. One of package hf
// changes a text as its file says. The number of bytes that some tokens cover, which bits per byte
// are measured by, is the length of what they decode to. A Tokenizer may be used by several
// goroutines at once.
type Tokenizer interface {
	// Name identifies the tokenizer, its vocabulary included: equal names mean equal ids for every
	// text. The checkpoints of a Trainer record it.
	Name() string
	VocabSize() int
	Encode(text []byte) []int
	// Decode returns the bytes that the ids stand for, or an error that names the first id outside
	// the vocabulary.
	Decode(ids []int) ([]byte, error)
}

// Bytes makes one token of each byte: the id is the byte's value and the vocabulary has 256
// entries.
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

// DocumentEnder is a tokenizer, or tokens, of which one ends each document.
type DocumentEnder interface {
	// EndOfDocument returns its id, or a negative number if there is none after all.
	EndOfDocument() int
}
