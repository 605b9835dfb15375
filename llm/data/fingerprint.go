package data

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/kasmina-go/kasmina/internal/atomicfile"
	"github.com/kasmina-go/kasmina/internal/regular"
)

// fingerprintPiece is the number of bytes one goroutine hashes at a time, so that large files are
// hashed on all cores.
const fingerprintPiece = 16 << 20

// fingerprinted is the fingerprint of a Text once it is known.
type fingerprinted struct {
	mu    sync.Mutex
	value string
}

// Fingerprint returns 64 hexadecimal digits that identify the contents of the text. They are a
// SHA-256 over the bytes of its documents, in order, and the end of each. File and directory names do
// not matter.
//
// Fingerprint reads the whole text once, on all cores. It stores the result in the user's cache
// directory together with the files' paths, sizes and times. As long as these do not change, later
// calls return it without reading the text.
//
// If progress is not nil, it is called with the number of bytes read and the total. It is not called
// if the fingerprint is already known. An error from progress aborts the computation. Fingerprint
// also returns an error if a file cannot be read or has changed (ErrChanged), or if ctx is done. It
// is safe for concurrent use.
func (t *Text) Fingerprint(ctx context.Context, progress func(bytes, total int64) error) (
	string, error) {
	if t == nil {
		return "", errors.New("data: Text.Fingerprint: the text is nil: Open finds some")
	}

	t.known.mu.Lock()
	defer t.known.mu.Unlock()

	if t.known.value != "" {
		return t.known.value, nil
	}

	began, table := time.Now(), t.table()
	cache := fingerprintCache()
	if value, ok := cache.get(table); ok && t.unchanged() {
		t.known.value = value
		return value, nil
	}

	value, err := t.hash(ctx, progress)
	if err != nil {
		return "", fmt.Errorf("data: Text.Fingerprint: %w", err)
	}

	if t.settled(began) {
		cache.put(table, value)
	}

	t.known.value = value
	return value, nil
}

// hash computes the fingerprint from the text.
func (t *Text) hash(ctx context.Context, progress func(bytes, total int64) error) (string, error) {
	type piece struct {
		at, size int64
		sum      [sha256.Size]byte
	}
	var pieces []piece
	for i, end := range t.ends {
		for at := end - t.docs[i].size; at < end; at += fingerprintPiece {
			pieces = append(pieces, piece{at: at, size: min(fingerprintPiece, end-at)})
		}
	}

	ctx, fail := context.WithCancelCause(ctx) // the first error stops the other goroutines
	defer fail(nil)
	var (
		all  sync.WaitGroup
		next = make(chan *piece)
		mu   sync.Mutex
		done int64
	)

	read := func(n int) error {
		mu.Lock()
		defer mu.Unlock()

		if done += int64(n); progress == nil || ctx.Err() != nil {
			return nil
		}
		return progress(done, t.Size())
	}

	for range min(runtime.GOMAXPROCS(0), len(pieces)) {
		all.Go(func() {
			buffer := make([]byte, 1<<20)
			for p := range next {
				h := sha256.New()
				if err := t.hashPiece(ctx, h, p.at, p.size, buffer, read); err != nil {
					fail(err)
				}
				h.Sum(p.sum[:0])
			}
		})
	}

	for i := range pieces {
		next <- &pieces[i]
	}

	close(next)
	all.Wait()
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}

	whole, at := sha256.New(), 0
	for _, d := range t.docs {
		fmt.Fprintf(whole, "document of %d bytes\n", d.size)
		for left := d.size; left > 0; left -= fingerprintPiece {
			whole.Write(pieces[at].sum[:])
			at++
		}
	}

	return hex.EncodeToString(whole.Sum(nil)), nil
}

func (t *Text) hashPiece(ctx context.Context, h hash.Hash, at, size int64, buffer []byte,
	read func(n int) error) error {
	for end := at + size; at < end; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		b := buffer[:min(int64(len(buffer)), end-at)]
		if _, err := t.ReadAt(b, at); err != nil && err != io.EOF {
			return err
		}
		h.Write(b)
		at += int64(len(b))
		if err := read(len(b)); err != nil {
			return err
		}
	}

	return nil
}

// table returns a hash of the paths, sizes and times of the files in the text.
func (t *Text) table() string {
	h := sha256.New()
	for _, d := range t.docs {
		fmt.Fprintf(h, "%q %d %d %d %d %s\n", t.file(d), d.offset, d.size, d.fileSize,
			d.modified.UnixNano(), d.identity)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// file returns the path of the document's file. It is absolute if the system can determine that.
func (t *Text) file(d document) string {
	name := filepath.Join(t.root, filepath.FromSlash(d.name))
	if abs, err := filepath.Abs(name); err == nil {
		return abs
	}
	return name
}

// fingerprintSettle is the minimum age of a file's times for caching its fingerprint. File systems
// record times in steps of up to two seconds, so a write could leave more recent times unchanged.
var fingerprintSettle = 3 * time.Second

// settled reports whether the times of all files were at least fingerprintSettle old at began.
func (t *Text) settled(began time.Time) bool {
	return !slices.ContainsFunc(t.docs, func(d document) bool {
		return began.Sub(d.modified) < fingerprintSettle || began.Sub(d.changed) < fingerprintSettle
	})
}

// unchanged reports whether all files are still as Open found them.
func (t *Text) unchanged() bool {
	return !slices.ContainsFunc(t.docs, func(d document) bool {
		info, err := os.Stat(t.file(d))
		if err != nil {
			return true
		}
		now := newDocument(d.name, info)
		return now.fileSize != d.fileSize || !now.modified.Equal(d.modified) ||
			now.identity != d.identity
	})
}

// fingerprints is the path of the file of known fingerprints in the user's cache directory, or "" if
// there is no such directory. If the file can't be read or written, fingerprints are computed again.
type fingerprints string

const (
	fingerprintsMost  = 256     // maximum number of texts in the file
	fingerprintsBytes = 1 << 20 // maximum size of the file
)

// knownText is an entry of the file. The most recent entry is the last one.
type knownText struct {
	Table       string `json:"table"`
	Fingerprint string `json:"fingerprint"`
}

func fingerprintCache() fingerprints {
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return fingerprints(filepath.Join(dir, "kasmina", "fingerprints.json"))
}

func (f fingerprints) read() (all []knownText) {
	file, size, err := regular.Open(string(f))
	if err != nil {
		return nil
	}

	defer file.Close()

	if size > fingerprintsBytes {
		return nil
	}

	d := json.NewDecoder(io.LimitReader(file, size))
	if t, err := d.Token(); err != nil || t != json.Delim('[') {
		return nil
	}

	for d.More() && len(all) < fingerprintsMost {
		var k knownText
		if d.Decode(&k) != nil {
			return nil
		}
		all = append(all, k)
	}

	return all
}

func (f fingerprints) get(table string) (string, bool) {
	for _, k := range f.read() {
		if sum, err := hex.DecodeString(k.Fingerprint); k.Table == table && err == nil &&
			len(sum) == sha256.Size {
			return k.Fingerprint, true
		}
	}
	return "", false
}

func (f fingerprints) put(table, fingerprint string) {
	if f == "" {
		return
	}

	all := slices.DeleteFunc(f.read(), func(k knownText) bool { return k.Table == table })
	all = append(all, knownText{table, fingerprint})
	text, err := json.Marshal(all[max(0, len(all)-fingerprintsMost):])
	if err != nil {
		return
	}

	// Without the entry, the text is merely hashed again.
	_ = atomicfile.WriteMkdir(string(f), func(w *os.File) error {
		_, err := w.Write(text)
		return err
	})
}
