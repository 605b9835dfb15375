package data

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// Tokens is a text as token ids that can be read from any offset. A Loader needs nothing else from
// its data. The ids are within the vocabulary of the tokenizer that produced them. If a token ends
// each document, implement [tokenizer.DocumentEnder] as well. Methods may be called concurrently,
// because a Loader reads in the background.
type Tokens interface {
	Len() int64
	// Tokenizer returns the name of the tokenizer, and VocabSize the size of its vocabulary.
	Tokenizer() string
	VocabSize() int
	// ReadTokens fills dst with the tokens starting at offset.
	ReadTokens(dst []int, offset int64) error
	// Fingerprint identifies the text and its tokenizer, so that a run cannot be resumed with other
	// data.
	Fingerprint() string
}

// Tokenize returns the tokens of a text. With a tokenizer.Bytes they are read from the files of the
// text on demand. Any other tokenizer encodes the whole text at once, in sections of up to 1 MiB that
// end after a newline if they contain one, and the tokens are kept in memory at four bytes each.
//
// Tokenize needs the fingerprint of the text, which takes a pass over it unless [Text.Fingerprint]
// has already computed it. It returns an error if the text cannot be read, if the tokenizer produces
// an id outside its vocabulary, or if ctx is done.
func Tokenize(ctx context.Context, text *Text, tok tokenizer.Tokenizer) (Tokens, error) {
	fingerprint, err := text.Fingerprint(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("data: Tokenize: %w", err)
	}

	if _, ok := tok.(tokenizer.Bytes); ok {
		return byteTokens{text: text, fingerprint: fingerprint}, nil
	}

	t := &memoryTokens{tokenizer: tok.Name(), vocabSize: tok.VocabSize(),
		fingerprint: fingerprintOf(tok.Name(), fingerprint)}
	piece := make([]byte, 1<<20)
	for offset := int64(0); offset < text.Size(); {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("data: Tokenize: %w", context.Cause(ctx))
		}

		n := int(min(int64(len(piece)), text.Size()-offset))
		if _, err := text.ReadAt(piece[:n], offset); err != nil {
			return nil, fmt.Errorf("data: Tokenize: %w", err)
		}

		if newline := bytes.LastIndexByte(piece[:n], '\n'); newline >= 0 &&
			offset+int64(n) < text.Size() {
			n = newline + 1
		}

		for _, id := range tok.Encode(piece[:n]) {
			if err := checkID(id, tok.VocabSize()); err != nil {
				return nil, fmt.Errorf("data: Tokenize: tokenizer %s made %w", tok.Name(), err)
			}
			t.ids = append(t.ids, uint32(id))
		}

		offset += int64(n)
	}

	return t, nil
}

// fingerprintOf returns the fingerprint of tokens, given a description of how they are produced and
// the fingerprint of their text.
func fingerprintOf(method, text string) string {
	return fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "%s %s", method, text)))
}

func checkID(id, vocabSize int) error {
	if id < 0 || id >= vocabSize || int64(id) > math.MaxUint32 {
		return fmt.Errorf("id %d, outside its vocabulary [0, %d)", id, vocabSize)
	}
	return nil
}

// byteTokens holds the tokens of a tokenizer.Bytes.
type byteTokens struct {
	tokenizer.Bytes
	text        *Text
	fingerprint string
}

func (b byteTokens) Tokenizer() string   { return b.Name() }
func (b byteTokens) Len() int64          { return b.text.Size() }
func (b byteTokens) Fingerprint() string { return b.fingerprint }

func (b byteTokens) ReadTokens(dst []int, offset int64) error {
	raw := make([]byte, len(dst))
	if _, err := b.text.ReadAt(raw, offset); err != nil {
		return err
	}
	for i, b := range raw {
		dst[i] = int(b)
	}
	return nil
}

// starts implements documentStarts.
func (b byteTokens) starts(starts, _ []int, offset int64) {
	next, _ := slices.BinarySearch(b.text.ends, offset+1)
	start := 0
	for i := range starts {
		if offset+int64(i) == b.text.ends[next] {
			start, next = i, next+1
		}
		starts[i] = start
	}
}

type memoryTokens struct {
	ids         []uint32
	tokenizer   string
	vocabSize   int
	fingerprint string
}

func (m *memoryTokens) Tokenizer() string   { return m.tokenizer }
func (m *memoryTokens) VocabSize() int      { return m.vocabSize }
func (m *memoryTokens) Len() int64          { return int64(len(m.ids)) }
func (m *memoryTokens) Fingerprint() string { return m.fingerprint }

func (m *memoryTokens) ReadTokens(dst []int, offset int64) error {
	if offset < 0 || offset+int64(len(dst)) > m.Len() {
		return io.ErrUnexpectedEOF
	}
	for i := range dst {
		dst[i] = int(m.ids[offset+int64(i)])
	}
	return nil
}
