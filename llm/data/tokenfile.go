package data

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"runtime"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// A TokenFile is an encoded text, stored as a file of token ids that are read on demand. It
// implements Tokens and is safe for concurrent use.
//
//	bytes 0 to 4095   "kasmina tokens 1\n", a line of JSON, "crc32c " and 8 hexadecimal digits for
//	                  that line, and spaces
//	from 4096 on      the ids, little-endian, of 2 bytes if the vocabulary has at most 65536
//	                  entries, else of 4
//
// The line of JSON identifies the text and the tokenizer, so a file is never used for another text or
// after the text has changed.
type TokenFile struct {
	f      *os.File
	header tokenHeader
	end    int // token that ends a document, or -1
}

type tokenHeader struct {
	Tokenizer   string `json:"tokenizer"`
	VocabSize   int    `json:"vocab_size"`
	Fingerprint string `json:"fingerprint"` // of the text and its tokenizer
	Width       int    `json:"width"`       // bytes in an id
	Count       int64  `json:"count"`       // number of ids
	CRC         uint32 `json:"crc32c"`      // of all ids
}

const (
	tokenMagic     = "kasmina tokens 1\n"
	tokenDataStart = 4096
	// portionSize is the number of bytes of text that are encoded at a time. It is large enough to
	// occupy a core and small enough that there are many portions.
	portionSize = 1 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// newTokenHeader returns the header of the tokens of the text, without their number and checksum.
func newTokenHeader(ctx context.Context, text *Text, tok tokenizer.Tokenizer) (tokenHeader, error) {
	h := tokenHeader{Tokenizer: tok.Name(), VocabSize: tok.VocabSize(), Width: 4}
	if h.VocabSize <= 1<<16 {
		h.Width = 2
	}

	// The prefix distinguishes these tokens from those returned by Tokenize, which adds no token at
	// the end of documents.
	fingerprint, err := text.Fingerprint(ctx, nil)
	h.Fingerprint = fingerprintOf("documents "+tok.Name(), fingerprint)
	return h, err
}

// CacheTokens returns the tokens of the text from the file at path. If the file doesn't exist, or if
// it belongs to another tokenizer or to a text that has changed, CacheTokens first writes it like
// [WriteTokens]. If the file is corrupted or of another kind, CacheTokens returns an error and does
// not overwrite it.
func CacheTokens(ctx context.Context, path string, text *Text, tok tokenizer.Tokenizer,
	progress func(bytes, total int64) error) (*TokenFile, error) {
	t, err := OpenTokens(ctx, path, text, tok)
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, ErrChanged) {
		return t, err
	}
	if err := WriteTokens(ctx, path, text, tok, progress); err != nil {
		return nil, err
	}
	return OpenTokens(ctx, path, text, tok)
}

// OpenTokens opens the file that [WriteTokens] wrote to path, after reading it once to verify it. The
// caller must close it. The error wraps ErrChanged if the file belongs to another text (see
// [Text.Fingerprint]) or another tokenizer. OpenTokens also returns an error if ctx is done.
func OpenTokens(ctx context.Context, path string, text *Text, tok tokenizer.Tokenizer) (
	*TokenFile, error) {
	f, size, err := regular.Open(path)
	if err != nil {
		return nil, fmt.Errorf("data: OpenTokens: %w", err)
	}

	want, err := newTokenHeader(ctx, text, tok)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("data: OpenTokens: %w", err)
	}

	t := &TokenFile{f: f, end: -1}
	if e, ok := tok.(tokenizer.DocumentEnder); ok {
		t.end = e.EndOfDocument()
	}

	err = t.readHeader()
	if err == nil {
		err = t.header.check(want)
	}

	if err == nil {
		err = t.verify(ctx, size)
	}

	if err != nil {
		f.Close()
		return nil, fmt.Errorf("data: OpenTokens: %s: %w", path, err)
	}

	return t, nil
}

func (t *TokenFile) readHeader() error {
	head := make([]byte, tokenDataStart)
	n, err := io.ReadFull(t.f, head)
	if err != nil && err != io.EOF && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}

	rest, ok := bytes.CutPrefix(head[:n], []byte(tokenMagic))
	if !ok {
		return fmt.Errorf("it starts with %q, want %q: it is not a token file, or has another "+
			"version's format", head[:min(n, len(tokenMagic))], tokenMagic)
	}

	line, rest, _ := bytes.Cut(rest, []byte("\n"))
	want := fmt.Sprintf("crc32c %08x\n", crc32.Checksum(line, castagnoli))
	if n < tokenDataStart || !bytes.HasPrefix(rest, []byte(want)) {
		return errors.New("it is corrupted: the header does not fit its checksum")
	}

	if err := json.Unmarshal(line, &t.header); err != nil {
		return fmt.Errorf("its header: %w", err)
	}

	return nil
}

// check compares the header with the expected one.
func (h tokenHeader) check(want tokenHeader) error {
	switch {
	case h.Tokenizer != want.Tokenizer || h.VocabSize != want.VocabSize:
		return fmt.Errorf("%w: its tokens come from %q with a vocabulary of %d, want "+
			"%q with %d", ErrChanged, h.Tokenizer, h.VocabSize, want.Tokenizer, want.VocabSize)
	case h.Fingerprint != want.Fingerprint:
		return fmt.Errorf("%w: its tokens belong to another text", ErrChanged)
	case h.Width != want.Width:
		return fmt.Errorf("its header specifies ids of %d bytes, want ids of %d", h.Width, want.Width)
	}
	return nil
}

// verify reads all ids and compares their number, range and checksum with the header.
func (t *TokenFile) verify(ctx context.Context, size int64) error {
	h := t.header
	size -= tokenDataStart
	if size%int64(h.Width) != 0 || size/int64(h.Width) != h.Count {
		return fmt.Errorf("it is corrupted: %d bytes of ids, want %d ids of %d bytes", size, h.Count,
			h.Width)
	}

	var sum uint32
	raw := make([]byte, min(portionSize, size))
	ids := make([]int, len(raw)/h.Width)
	for at := int64(0); at < h.Count; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}

		n := int(min(int64(len(ids)), h.Count-at))
		if err := t.read(ids[:n], raw[:n*h.Width], at); err != nil {
			return err
		}

		sum = crc32.Update(sum, castagnoli, raw[:n*h.Width])
		for i, id := range ids[:n] {
			if id >= h.VocabSize {
				return fmt.Errorf("token %d has the id %d, outside the vocabulary [0, %d)",
					at+int64(i), id, h.VocabSize)
			}
		}
		at += int64(n)
	}

	if sum != h.CRC {
		return fmt.Errorf("it is corrupted: the checksum of the ids is %08x, want %08x", sum, h.CRC)
	}

	return nil
}

// read fills ids with the tokens starting at offset. raw is memory for their bytes.
func (t *TokenFile) read(ids []int, raw []byte, offset int64) error {
	if _, err := t.f.ReadAt(raw, tokenDataStart+offset*int64(t.header.Width)); err != nil {
		return err
	}

	for i := range ids {
		if t.header.Width == 2 {
			ids[i] = int(binary.LittleEndian.Uint16(raw[2*i:]))
		} else {
			ids[i] = int(binary.LittleEndian.Uint32(raw[4*i:]))
		}
	}

	return nil
}

// Len returns the number of tokens.
func (t *TokenFile) Len() int64 { return t.header.Count }

// ReadTokens fills dst with the tokens starting at offset. It returns an error if the file does not
// contain all of them.
func (t *TokenFile) ReadTokens(dst []int, offset int64) error {
	if offset < 0 || offset > t.Len()-int64(len(dst)) {
		return fmt.Errorf("data: TokenFile.ReadTokens: tokens %d to %d of %d: %w", offset,
			offset+int64(len(dst)), t.Len(), io.ErrUnexpectedEOF)
	}
	if err := t.read(dst, make([]byte, len(dst)*t.header.Width), offset); err != nil {
		return fmt.Errorf("data: TokenFile.ReadTokens: %w", err)
	}
	return nil
}

// Fingerprint identifies the text and its tokenizer.
func (t *TokenFile) Fingerprint() string { return t.header.Fingerprint }

// Tokenizer returns the name of the tokenizer.
func (t *TokenFile) Tokenizer() string { return t.header.Tokenizer }

// VocabSize returns the size of the tokenizer's vocabulary.
func (t *TokenFile) VocabSize() int { return t.header.VocabSize }

// EndOfDocument returns the token that follows each document, or -1 if the tokenizer has none.
func (t *TokenFile) EndOfDocument() int { return t.end }

// Close closes the file.
func (t *TokenFile) Close() error { return t.f.Close() }

// WriteTokens encodes the text on all cores and writes its tokens to the file at path. It replaces
// the file atomically, so that path holds either the old file or the new one even if the process is
// killed. Missing directories are created.
//
// Documents are encoded separately, in portions of up to 1 MiB that end after a newline if they
// contain one. If the tokenizer is a [tokenizer.DocumentEnder] with an end-of-document token, that
// token follows each document. The file depends only on the text and the tokenizer, not on the number
// of cores. WriteTokens needs memory for only a few portions.
//
// If progress is not nil, it is called with the number of bytes encoded so far and the total.
// WriteTokens stops if progress returns an error or ctx is done.
func WriteTokens(ctx context.Context, path string, text *Text, tok tokenizer.Tokenizer,
	progress func(bytes, total int64) error) error {
	header, err := newTokenHeader(ctx, text, tok)
	if err != nil {
		return fmt.Errorf("data: WriteTokens: %w", err)
	}

	err = atomicfile.WriteMkdir(path, func(f *os.File) error {
		// The number and the checksum of the ids are known last. The header is therefore written
		// last, into the space left for it.
		if _, err := f.Seek(tokenDataStart, io.SeekStart); err != nil {
			return err
		}

		w := bufio.NewWriterSize(f, portionSize)
		var done int64
		err := encodeDocuments(text, tok, header.Width, func(p portion) error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}

			header.Count += int64(len(p.ids) / header.Width)
			header.CRC = crc32.Update(header.CRC, castagnoli, p.ids)
			if _, err := w.Write(p.ids); err != nil {
				return err
			}
			if done += int64(len(p.text)); progress != nil {
				return progress(done, text.Size())
			}
			return nil
		})

		if err != nil {
			return err
		}
		if err := w.Flush(); err != nil {
			return err
		}

		head, err := header.encode()
		if err != nil {
			return err
		}
		_, err = f.WriteAt(head, 0)
		return err
	})

	if err != nil {
		return fmt.Errorf("data: WriteTokens: %w", err)
	}

	return nil
}

// encode returns the header as the first 4096 bytes of the file.
func (h tokenHeader) encode() ([]byte, error) {
	line, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}

	head := fmt.Appendf(nil, "%s%s\ncrc32c %08x\n", tokenMagic, line,
		crc32.Checksum(line, castagnoli))
	if len(head) > tokenDataStart {
		return nil, fmt.Errorf("the tokenizer's name has %d bytes, too many for the header",
			len(h.Tokenizer))
	}

	return append(head, bytes.Repeat([]byte(" "), tokenDataStart-len(head))...), nil
}

// A portion is a section of a document, with its encoded ids.
type portion struct {
	text []byte
	last bool   // of the document
	ids  []byte // as stored in the file
	err  error
}

// encodeDocuments calls write for the portions of the text in order, while later portions are being
// encoded. The queue contains a channel for each portion in progress and has room for as many as
// there are cores.
func encodeDocuments(text *Text, tok tokenizer.Tokenizer, width int,
	write func(portion) error) error {
	queue := make(chan chan portion, runtime.GOMAXPROCS(0))
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		defer close(queue)
		eachPortion(text, func(p portion) bool {
			result := make(chan portion, 1) // buffered, so that the goroutine never waits
			go func() {
				p.encode(tok, width)
				result <- p
			}()
			select {
			case queue <- result:
				return true
			case <-stop:
				return false
			}
		})
	}()

	for result := range queue {
		p := <-result
		if p.err != nil {
			return p.err
		}
		if err := write(p); err != nil {
			return err
		}
	}

	return nil
}

// eachPortion calls f for the portions of the text until f returns false or the text cannot be
// read. In the latter case the last portion contains the error.
func eachPortion(text *Text, f func(portion) bool) {
	for i, end := range text.ends {
		for at := end - text.docs[i].size; at < end; {
			p := portion{text: make([]byte, min(portionSize, end-at))}
			_, p.err = text.ReadAt(p.text, at)
			if newline := bytes.LastIndexByte(p.text, '\n'); newline >= 0 &&
				at+int64(len(p.text)) < end {
				p.text = p.text[:newline+1]
			}
			at += int64(len(p.text))
			p.last = at == end
			if !f(p) || p.err != nil {
				return
			}
		}
	}
}

// encode encodes the text of the portion and sets its ids or its error.
func (p *portion) encode(tok tokenizer.Tokenizer, width int) {
	if p.err != nil {
		return
	}

	ids := tok.Encode(p.text)
	if e, ok := tok.(tokenizer.DocumentEnder); ok && p.last && e.EndOfDocument() >= 0 {
		ids = append(ids, e.EndOfDocument())
	}

	p.ids = make([]byte, 0, len(ids)*width)
	for _, id := range ids {
		if err := checkID(id, tok.VocabSize()); err != nil {
			p.err = fmt.Errorf("tokenizer %s made %w", tok.Name(), err)
			return
		}
		if width == 2 {
			p.ids = binary.LittleEndian.AppendUint16(p.ids, uint16(id))
		} else {
			p.ids = binary.LittleEndian.AppendUint32(p.ids, uint32(id))
		}
	}
}
