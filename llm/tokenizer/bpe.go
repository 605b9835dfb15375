package tokenizer

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/regular"
	"github.com/kasmina-go/kasmina/internal/splitmix"
)

// A BPE is a byte-level byte-pair encoding (Sennrich, Haddow and Birch, "Neural Machine Translation of
// Rare Words with Subword Units", 2016; on bytes as in Radford et al., "Language Models are Unsupervised
// Multitask Learners", 2019).
//
// Text is first divided into pieces, which are roughly words with the space before them, numbers,
// punctuation, and line ends with the indentation after them. Initially, each byte of a piece is a
// token. Encoding then repeatedly merges the neighboring pair that training merged first, the
// leftmost one if there are several, until no pair can be merged.
//
//	ids 0 to 255           the bytes
//	ids 256 to 255+merges  the merged pairs, in the order of training
//	id  256+merges         the end of a document: never produced by Encode, decoded as nothing
//
// A model's vocabulary may be larger than VocabSize, for example to make it a multiple of a size that
// suits the hardware. The additional ids are unused.
//
// The zero BPE contains no merges, so its tokens are the bytes and the end of a document. A BPE is
// safe for concurrent use.
type BPE struct {
	name   string
	merges []pair
	merged pairTable // ids of merged pairs

	encoders sync.Pool // holds *bpeEncoder, so that goroutines share no cache and need no lock
}

// A pair holds the ids of two neighboring tokens.
type pair struct{ left, right int32 }

// maxVocab is the largest vocabulary for TrainBPE and LoadBPE. A larger number is probably a mistake.
const maxVocab = 1 << 20

// newBPE returns the encoding with the given merges. It is an error if a merge uses a token that does
// not exist yet, produces a token longer than a piece, or occurs twice, none of which happens in
// training.
func newBPE(merges []pair) (*BPE, error) {
	b := &BPE{merges: merges, merged: newPairTable(merges)}
	sizes := make([]uint8, 256+len(merges)) // length of each token in bytes
	for i := range 256 {
		sizes[i] = 1
	}

	for i, m := range merges {
		id := int32(256 + i)
		if m.left < 0 || m.left >= id || m.right < 0 || m.right >= id {
			return nil, fmt.Errorf("merge %d joins tokens %d and %d, want ids in [0, %d)", i,
				m.left, m.right, id)
		}
		n := int(sizes[m.left]) + int(sizes[m.right])
		if n > maxPiece {
			return nil, fmt.Errorf("merge %d makes a token of %d bytes, want at most %d", i, n,
				maxPiece)
		}
		if first := b.merged.add(m, id); first != unmerged {
			return nil, fmt.Errorf("merge %d joins tokens %d and %d, as merge %d does", i, m.left,
				m.right, first-256)
		}
		sizes[id] = uint8(n)
	}

	sum := sha256.New()
	b.writeLines(sum)
	b.name = fmt.Sprintf("bpe-%d-%x", 257+len(merges), sum.Sum(nil)[:8])
	b.encoders.New = func() any { return &bpeEncoder{bpe: b, cache: map[string]span{}} }
	return b, nil
}

var withoutMerges = sync.OnceValue(func() *BPE {
	b, _ := newBPE(nil) // no merges, so no error
	return b
})

// orEmpty returns b, or the encoding without merges for a zero value.
func (b *BPE) orEmpty() *BPE {
	if b == nil || b.merged.ids == nil {
		return withoutMerges()
	}
	return b
}

// appendToken appends the bytes of a token by appending both tokens that were merged. They are
// shorter, so the depth of the recursion is at most the length of a piece. A table with the bytes of
// all tokens would take many times as much memory as the merges.
func (b *BPE) appendToken(text []byte, id int) []byte {
	switch {
	case id < 256:
		return append(text, byte(id))
	case id == b.EndOfDocument():
		return text
	}
	m := b.merges[id-256]
	return b.appendToken(b.appendToken(text, int(m.left)), int(m.right))
}

// Name returns "bpe-", the size of the vocabulary, and 16 hexadecimal digits of a hash of the merges.
func (b *BPE) Name() string { return b.orEmpty().name }

// VocabSize returns 257 plus the number of merges.
func (b *BPE) VocabSize() int { return 257 + len(b.orEmpty().merges) }

// EndOfDocument returns the id of the token between documents, the last id of the vocabulary.
func (b *BPE) EndOfDocument() int { return b.VocabSize() - 1 }

// Encode returns the tokens of a text. The time is proportional to the length of the text, even for
// hostile texts.
func (b *BPE) Encode(text []byte) []int {
	b = b.orEmpty()
	e := b.encoders.Get().(*bpeEncoder)
	defer b.encoders.Put(e)
	ids := make([]int, 0, len(text)/3)
	for len(text) > 0 {
		n := nextPiece(text)
		ids = e.append(ids, text[:n])
		text = text[n:]
	}
	return ids
}

// Decode returns the bytes of the tokens. The end-of-document token decodes to nothing.
func (b *BPE) Decode(ids []int) ([]byte, error) {
	b = b.orEmpty()
	var text []byte
	for i, id := range ids {
		if id < 0 || id >= b.VocabSize() {
			return nil, fmt.Errorf("tokenizer: BPE.Decode: ids[%d] is %d, outside the vocabulary "+
				"[0, %d)", i, id, b.VocabSize())
		}
		text = b.appendToken(text, id)
	}
	return text, nil
}

// A bpeEncoder holds the buffers for encoding in one goroutine and a cache with the tokens of earlier
// pieces. Most text consists of a few frequent pieces.
type bpeEncoder struct {
	bpe   *BPE
	cache map[string]span
	slab  []int32 // tokens of all pieces in the cache
	parts []int32 // tokens of a piece during merging
	next  []int32 // next[i] is the token that parts[i] and parts[i+1] merge into, or unmerged
}

type span struct{ lo, hi int32 }

const (
	maxCached = 1 << 16 // pieces; a few megabytes
	unmerged  = math.MaxInt32
)

// append appends the tokens of a piece to ids.
func (e *bpeEncoder) append(ids []int, piece []byte) []int {
	at, ok := e.cache[string(piece)]
	tokens := e.slab[at.lo:at.hi]
	if !ok {
		tokens = e.merge(piece)
		if len(e.cache) == maxCached {
			clear(e.cache)
			e.slab = e.slab[:0]
		}
		lo := int32(len(e.slab))
		e.slab = append(e.slab, tokens...)
		e.cache[string(piece)] = span{lo, int32(len(e.slab))}
	}

	for _, id := range tokens {
		ids = append(ids, int(id))
	}

	return ids
}

// merge returns the tokens of a piece, valid until the next call. Pieces are short, so searching all
// pairs for the next merge is the fastest method, although it takes quadratic time.
func (e *bpeEncoder) merge(piece []byte) []int32 {
	e.parts, e.next = e.parts[:0], e.next[:0]
	for _, c := range piece {
		e.parts = append(e.parts, int32(c))
	}

	for i := range e.parts[1:] {
		e.next = append(e.next, e.becomes(i))
	}

	for {
		best, at := int32(unmerged), 0
		for i, id := range e.next {
			if id < best {
				best, at = id, i
			}
		}
		if best == unmerged {
			return e.parts
		}
		e.parts[at] = best
		e.parts = slices.Delete(e.parts, at+1, at+2)
		e.next = slices.Delete(e.next, at, at+1)
		if at > 0 {
			e.next[at-1] = e.becomes(at - 1)
		}
		if at < len(e.next) {
			e.next[at] = e.becomes(at)
		}
	}
}

// becomes returns the token that parts[i] and parts[i+1] merge into, or unmerged.
func (e *bpeEncoder) becomes(i int) int32 {
	return e.bpe.merged.find(pair{e.parts[i], e.parts[i+1]})
}

// A pairTable maps pairs to the ids of their merges, using open addressing. A map would take three
// times as much memory. The hash has a random key, so that a file cannot make all pairs collide.
type pairTable struct {
	merges []pair
	// 0 means empty; the length is a power of two, and at most half of the entries are used
	ids []int32
	key uint64
}

func newPairTable(merges []pair) pairTable {
	return pairTable{merges, make([]int32, 1<<bits.Len(uint(2*len(merges)))), rand.Uint64()}
}

// find returns the id of a merged pair, or unmerged.
func (t *pairTable) find(p pair) int32 {
	if id := t.ids[t.slot(p)]; id > 0 {
		return id
	}
	return unmerged
}

// add adds a pair. If the table has the pair already, add returns its id.
func (t *pairTable) add(p pair, id int32) (before int32) {
	at := t.slot(p)
	if t.ids[at] > 0 {
		return t.ids[at]
	}
	t.ids[at] = id
	return unmerged
}

// slot returns the index of a pair, or the index where it would be added.
func (t *pairTable) slot(p pair) uint64 {
	mask := uint64(len(t.ids) - 1)
	at := splitmix.Mix(uint64(uint32(p.left))<<32|uint64(uint32(p.right))^t.key) & mask
	for t.ids[at] > 0 && t.merges[t.ids[at]-256] != p {
		at = (at + 1) & mask
	}
	return at
}

// bpeHeader is the first line of the file of a BPE. Its number increases when the format or the
// division of text into pieces changes, because both affect the ids of a text.
const bpeHeader = "kasmina bpe 1\n"

// Save writes the encoding to a text file. It replaces an existing file atomically, so the file is
// either the old or the new one even if the process is killed. Save creates missing directories.
//
//	kasmina bpe 1        the format
//	merges N
//	LEFT RIGHT           N lines: merge i joins these ids to id 256+i
//	sha256 HEX           of all lines above
func (b *BPE) Save(path string) error {
	b = b.orEmpty()
	err := atomicfile.WriteMkdir(path, func(f *os.File) error {
		sum := sha256.New()
		w := bufio.NewWriter(f)
		b.writeLines(io.MultiWriter(w, sum))
		fmt.Fprintf(w, "sha256 %x\n", sum.Sum(nil))
		return w.Flush() // also returns earlier errors
	})
	if err != nil {
		return fmt.Errorf("tokenizer: BPE.Save: %w", err)
	}

	return nil
}

// writeLines writes all lines of the file except the last one. Encodings are equal if these lines are.
// Errors are left to the writer.
func (b *BPE) writeLines(w io.Writer) {
	fmt.Fprintf(w, "%smerges %d\n", bpeHeader, len(b.merges))
	var line []byte
	for _, m := range b.merges {
		line = append(strconv.AppendInt(line[:0], int64(m.left), 10), ' ')
		line = append(strconv.AppendInt(line, int64(m.right), 10), '\n')
		w.Write(line)
	}
}

// maxBPEFile is the size of the largest valid file, which contains the maximum number of merges, each
// as long as "1048575 1048575\n".
const maxBPEFile = 16*maxVocab + 256

// LoadBPE reads a file written by Save. If the file is corrupted or has a different format, the error
// describes the problem.
func LoadBPE(path string) (*BPE, error) {
	text, err := regular.Read(path, maxBPEFile, "a byte-pair encoding has")
	if err != nil {
		return nil, fmt.Errorf("tokenizer: LoadBPE: %w", err)
	}
	b, err := parseBPE(text)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: LoadBPE: %s: %w", path, err)
	}
	return b, nil
}

func parseBPE(text []byte) (*BPE, error) {
	if !bytes.HasPrefix(text, []byte(bpeHeader)) {
		return nil, fmt.Errorf("header is %q, want %q: not a byte-pair encoding file, or one of an "+
			"unsupported version", text[:min(len(text), len(bpeHeader))], bpeHeader)
	}

	end := bytes.LastIndexByte(text[:len(text)-1], '\n') + 1
	if sum := fmt.Sprintf("sha256 %x\n", sha256.Sum256(text[:end])); string(text[end:]) != sum {
		return nil, fmt.Errorf("file is corrupted: last line is %.80q, want %q", text[end:], sum)
	}

	// The checksum is correct, so any problem from here on was already there when the file was written.
	second, rest, _ := bytes.Cut(text[len(bpeHeader):end], []byte("\n"))
	lines := bytes.Count(rest, []byte("\n"))
	number, ok := strings.CutPrefix(string(second[:min(len(second), 40)]), "merges ")
	n, err := strconv.Atoi(number)
	if !ok || err != nil || n != lines || n > maxVocab-257 {
		return nil, fmt.Errorf("its second line is %.80q, want \"merges %d\", the number of lines "+
			"below, which must be at most %d", second, lines, maxVocab-257)
	}

	merges := make([]pair, n)
	for i := range merges {
		var line []byte
		line, rest, _ = bytes.Cut(rest, []byte("\n"))
		left, right, _ := bytes.Cut(line, []byte(" "))
		l, errLeft := strconv.ParseInt(string(left), 10, 32)
		r, errRight := strconv.ParseInt(string(right), 10, 32)
		if errLeft != nil || errRight != nil {
			return nil, fmt.Errorf("merge %d is %.80q, want two ids", i, line)
		}
		merges[i] = pair{int32(l), int32(r)}
	}

	return newBPE(merges)
}

// Text is a source of samples for LoadOrTrainBPE, such as a data.Text.
type Text interface {
	// Sample returns up to limit bytes, spread evenly over the text.
	Sample(limit int) ([]byte, error)
}

// LoadOrTrainBPE loads the encoding from the file at path. If the file doesn't exist, it trains an
// encoding on up to sample bytes, spread evenly over the text, and saves it.
//
// It returns an error before training if the file could not be written. It also returns an error if the
// vocabulary in the file is larger than vocab. A smaller vocabulary is accepted, because training ends
// early if a text has too few pairs. Canceling the context ends the training.
func LoadOrTrainBPE(ctx context.Context, path string, text Text, vocab, sample int,
	progress func(merges, total int) error) (*BPE, error) {
	b, err := LoadBPE(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := atomicfile.Writable(path); err != nil { // fail before training
			return nil, fmt.Errorf("tokenizer: LoadOrTrainBPE: %w", err)
		}
		raw, err := text.Sample(sample)
		if err != nil {
			return nil, err
		}
		if b, err = TrainBPE(ctx, bytes.NewReader(raw), vocab, progress); err != nil {
			return nil, err
		}
		if err := b.Save(path); err != nil {
			return nil, err
		}
		return b, nil
	case err != nil:
		return nil, err
	case b.VocabSize() > vocab:
		return nil, fmt.Errorf("tokenizer: LoadOrTrainBPE: %s has a vocabulary of %d, want at "+
			"most %d: allow a larger vocabulary, or name another file to train a smaller one", path,
			b.VocabSize(), vocab)
	}

	return b, nil
}
