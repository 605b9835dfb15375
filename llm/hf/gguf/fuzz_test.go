package gguf

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
	"github.com/kasmina-go/kasmina/internal/processor"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/hf"
)

// FuzzTokenizer checks that any text can serve as a tokenizer.json without a crash.
func FuzzTokenizer(f *testing.F) {
	dir := f.TempDir()
	require.NoError(f, os.CopyFS(dir, os.DirFS(filepath.Join("..", "testdata", "tiny"))))
	folder, err := hf.Open(dir)
	require.NoError(f, err)
	defer folder.Close()
	text := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(f, err)
		return b
	}
	names := []string{"tokenizer.json", "tokenizer_config.json"}
	f.Add(text(names[0]), text(names[1]))
	f.Add([]byte(`{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"model":`+
		`{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}}`), []byte("{}"))
	const model = 512 // tokens
	f.Fuzz(func(t *testing.T, tokenizer, config []byte) {
		for i, b := range [][]byte{tokenizer, config} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, names[i]), b, 0o666))
		}
		bounded.Run(t, int64(2*len(tokenizer)+len(config)), func() {
			_ = addTokenizer(&fields{}, folder, model)
		})
	})
}

// FuzzDescribe reads headers of arbitrary bytes.
func FuzzDescribe(f *testing.F) {
	path := filepath.Join(f.TempDir(), "m.gguf")
	for _, head := range heads() {
		f.Add(head)
	}
	f.Fuzz(func(t *testing.T, head []byte) {
		require.NoError(t, os.WriteFile(path, head, 0o666))
		bounded.Run(t, int64(len(head)), func() { _, _ = Describe(path) })
	})
}

// heads returns the beginnings of files.
func heads() (all [][]byte) {
	number := func(b []byte, numbers ...uint64) []byte {
		for _, n := range numbers {
			b = binary.LittleEndian.AppendUint64(b, n)
		}
		return b
	}
	begin := func(tensors, fields uint64) []byte {
		return number(append([]byte("GGUF"), 3, 0, 0, 0), tensors, fields)
	}
	kind := func(b []byte, kinds ...uint32) []byte {
		for _, k := range kinds {
			b = binary.LittleEndian.AppendUint32(b, k)
		}
		return b
	}
	// Arrays of every type, longer than any file.
	for k := range uint32(14) {
		all = append(all, number(kind(number(begin(0, 1), 0), kindArray, k), 1<<60))
	}
	all = append(all, number(kind(number(kind(number(begin(0, 1), 0), kindArray, kindArray), 1<<59),
		kindString), 1<<59))
	field := kind(append(number(begin(1, 1), 1), 'x'), 4, 7)
	tensor := kind(append(number(field, 1), 'y'), 2) // a matrix
	return append(all, number(kind(number(tensor, 3, 4), 0), 0))
}

// TestDescribeHoles reads headers that announce as much as possible, followed by 40 GB of zeros.
func TestDescribeHoles(t *testing.T) {
	for i, head := range append(heads(), nil) {
		path := texttest.Hole(t, head)
		begin := processor.Time(t)
		bounded.Run(t, maxHead, func() {
			_, err := Describe(path)
			require.Equal(t, i == len(heads())-1, err == nil, "%d: %v", i, err)
		})
		require.Less(t, processor.Time(t)-begin, time.Minute)
	}
}
