package safetensors

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestHugeHeaders opens files with headers of the maximum size that are as expensive as possible to
// parse.
func TestHugeHeaders(t *testing.T) {
	if testing.Short() {
		t.Skip("headers of 99 MB")
	}

	room := 8_000_000
	if randtest.Long() {
		room = 99_000_000 // almost as much as a header may have
	}

	repeated := func(open string, item func(b *bytes.Buffer, i int), end string) func() []byte {
		return func() []byte { return header(room, open, item, end) }
	}
	const empty = `":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`
	for name, c := range map[string]struct {
		file   func() []byte
		faults string // empty if the file is valid
	}{
		"tensors": {repeated("{", func(b *bytes.Buffer, i int) {
			fmt.Fprintf(b, `"%x%s`, i, empty)
		},
			"}"), ""},
		"dimensions": {repeated(`{"a":{"dtype":"U8","shape":[`, func(b *bytes.Buffer,
			_ int) {
			b.WriteByte('0')
		}, `],"data_offsets":[0,0]}}`), "more than 16"},
		"shapes": {repeated("{", func(b *bytes.Buffer, i int) {
			fmt.Fprintf(b, `"%x":{"dtype":"U8","shape":[%s0],"data_offsets":[0,0]}`,
				i, strings.Repeat("0,",
					maxRank-1))
		}, "}"), ""},
		"metadata": {repeated(`{"__metadata__":{`, func(b *bytes.Buffer,
			i int) {
			fmt.Fprintf(b, `"%x":""`, i)
		}, "}}"), "more than 1024 entries"},
		"a long name": {repeated(`{"`, func(b *bytes.Buffer, _ int) { b.WriteString(`\u00e4`) },
			empty[:len(empty)-1]), "JSON"},
		"a long value": {repeated(`{"__metadata__":{"a":"`, func(b *bytes.Buffer,
			_ int) {
			b.WriteString(`\"`)
		}, `"}}`), ""},
		"no field": {repeated(`{"a":{"`, func(b *bytes.Buffer, _ int) { b.WriteString(`a`) },
			`":0}}`), "unknown field"},
		"names without fields": {repeated(`{"`, func(b *bytes.Buffer, _ int) {
			b.WriteString(`"dtype"`)
		},
			`}`), "JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			file := c.file()
			start := time.Now()
			bounded.Run(t, int64(len(file)), func() {
				_, err := NewFile("file", bytes.NewReader(file), int64(len(file)))
				if c.faults == "" {
					require.NoError(t, err)
					return
				}
				require.ErrorIs(t, err, ErrCorrupt)
				require.ErrorContains(t, err, c.faults)
				require.Less(t, len(err.Error()), 500)
			})
			t.Log(time.Since(start))
		})
	}
}

// header returns a file consisting of a header of about the given number of bytes, mostly items.
func header(room int, open string, item func(b *bytes.Buffer, i int), end string) []byte {
	var b bytes.Buffer
	b.Grow(room + 200)
	b.Write(make([]byte, 8))
	b.WriteString(open)
	for i := 0; b.Len() < room; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		item(&b, i)
	}

	b.WriteString(end)
	binary.LittleEndian.PutUint64(b.Bytes(), uint64(b.Len()-8))
	return b.Bytes()
}

// TestHole opens sparse files that are much larger than their stored contents.
func TestHole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hole")
	const size = 40 << 30
	one := fmt.Sprintf(`{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%[1]d]}}`, size)
	for name, content := range map[string][]byte{"nothing": nil, "one tensor": file(one, 0)} {
		require.NoError(t, os.WriteFile(path, content, 0o666))
		if err := os.Truncate(path, size+max(8, int64(len(content)))); err != nil {
			t.Skip("this file system has no holes:", err)
		}
		bounded.Run(t, 0, func() {
			f, err := Open(path)
			if name == "nothing" {
				require.ErrorIs(t, err, ErrCorrupt)
				return
			}
			require.NoError(t, err)
			defer f.Close()
			require.EqualValues(t, size, f.Bytes("a"))
			require.ErrorIs(t, f.Read(t.Context(), "a", []byte{1}), ErrInvalid)
		})
	}
}

func TestNoFiles(t *testing.T) {
	for _, path := range []string{"/dev/zero", t.TempDir()} {
		_, err := Open(path)
		require.Error(t, err)
		require.Contains(t, err.Error(), path)
	}
}

// TestContext cancels reads in the middle of a tensor.
func TestContext(t *testing.T) {
	const size = 3 * chunk
	b := file(fmt.Sprintf(`{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%[1]d]}}`, size), size)
	r := &counting{ReaderAt: bytes.NewReader(b)}
	f, err := NewFile("file", r, int64(len(b)))
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	errEnough := errors.New("enough")
	r.after, r.call = r.reads+1, func() { cancel(errEnough) }
	require.ErrorIs(t, f.Verify(ctx, "a"), errEnough)
	_, err = f.Tensor(ctx, "a")
	require.ErrorIs(t, err, errEnough)
	require.ErrorIs(t, f.Read(ctx, "a", make([]byte, size)), errEnough)
	require.Equal(t, r.after, r.reads)
}

// counting is a reader that calls a function after a given number of reads.
type counting struct {
	io.ReaderAt
	reads, after int
	call         func()
}

func (c *counting) ReadAt(b []byte, at int64) (int, error) {
	if c.reads++; c.reads == c.after {
		c.call()
	}
	return c.ReaderAt.ReadAt(b, at)
}

// TestSaveWithinLimits checks that Save rejects files that could not be read.
func TestSaveWithinLimits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	shape := make([]int, maxRank+1)
	err := Save(path, []Tensor{{"a", U8, shape, []uint8{}}}, nil)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "17 dimensions, want at most 16")
	require.NoError(t, Save(path, []Tensor{{"a", U8, shape[1:], []uint8{}}}, nil))
	many := map[string]string{}
	for i := range maxMetadata - 1 {
		many[fmt.Sprint(i)] = ""
	}

	err = Save(path, nil, many)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "1023 entries of metadata, want at most 1022")
	delete(many, "0")
	require.NoError(t, Save(path, nil, many))
	_, metadata, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, many, metadata)
}

// FuzzScanner compares decoded strings with encoding/json.
func FuzzScanner(f *testing.F) {
	for _, s := range []string{`""`, `"a"`, `"\u0061\ud83d\ude00\ud83d\n\/"`,
		`"\`, `"\x"`, "\"\x01\"",
		`"a" `, `"\ude00\ud83d"`, `"\ud83d\u0061"`} {
		f.Add(s)
	}

	f.Fuzz(func(t *testing.T, text string) {
		if !strings.HasPrefix(text, `"`) || strings.ToValidUTF8(text, "") != text {
			return
		}

		s := scanner{text: text}
		got, err := s.string()
		if err == nil {
			err = s.end()
		}
		var want string
		if wrong := json.Unmarshal([]byte(text), &want); (err == nil) != (wrong == nil) ||
			err == nil &&
				got != want {
			t.Errorf("%q is %q, %v; encoding/json makes it %q, %v", text, got, err, want, wrong)
		}
	})
}

// FuzzOpen opens arbitrary files, with and without a correct header length. Accepted files must
// contain JSON and valid tensors, and it must be possible to save them.
func FuzzOpen(f *testing.F) {
	f.Add(small(f), false)
	f.Add([]byte(plain+strings.Repeat("\x00", 9)), true)
	f.Add([]byte("{}"), true)
	f.Add([]byte{}, false)
	f.Fuzz(func(t *testing.T, b []byte, behind bool) {
		if behind {
			b = file(string(b), 0)
			n := bytes.LastIndexByte(b, '}') + 1
			binary.LittleEndian.PutUint64(b, uint64(max(0, n-8)))
		}

		bounded.Run(t, int64(len(b)), func() {
			if err := loadBytes(b); err != nil && !errors.Is(err, ErrCorrupt) {
				t.Error(err)
			}
		})
		if loadBytes(b) == nil && !json.Valid(b[8:][:binary.LittleEndian.Uint64(b)]) {
			t.Errorf("a header that is not JSON: %q", b)
		}
	})
}
