package hf

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/data"
)

// TestSameAsRust compares ids with Rust's tokenizers, for texts of megabytes and the tokenizers of
// published models. compare.py and fetch.sh put them into the folder KASMINA_TOKENIZERS.
func TestSameAsRust(t *testing.T) {
	folder := os.Getenv("KASMINA_TOKENIZERS")
	if folder == "" {
		t.Skip("KASMINA_TOKENIZERS names no folder: see fetch.sh and compare.py")
	}

	tokenizers, err := filepath.Glob(filepath.Join(folder, "*", "tokenizer.json"))
	require.NoError(t, err)
	texts, err := filepath.Glob(filepath.Join(folder, "*.txt"))
	require.NoError(t, err)
	require.NotEmpty(t, texts)
	for _, path := range tokenizers {
		t.Run(filepath.Base(filepath.Dir(path)), func(t *testing.T) {
			begin := time.Now()
			tok, err := Load(filepath.Dir(path))
			require.NoError(t, err)
			t.Logf("loaded in %v", time.Since(begin).Round(time.Millisecond))
			for _, name := range texts {
				compareText(t, tok, filepath.Dir(path), name)
			}
			compareLlamaCpp(t, tok, filepath.Dir(path))
			timeCorpus(t, tok, texts)
		})
	}
}

// timeCorpus measures how long it takes to tokenize the concatenated texts for training, on all available
// cores.
func timeCorpus(t *testing.T, tok *Tokenizer, texts []string) {
	var all []byte
	for _, name := range texts {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		all = append(all, text...)
	}

	dir := t.TempDir()
	path := filepath.Join(dir, "all.txt")
	require.NoError(t, os.WriteFile(path, all, 0o600))
	corpus, err := data.Open(path)
	require.NoError(t, err)
	begin := time.Now()
	require.NoError(t, data.WriteTokens(t.Context(), filepath.Join(dir, "tokens"), corpus.Train, tok,
		nil))
	t.Logf("%d bytes of all texts are encoded and written at %.1f MB/s on %d cores",
		corpus.Train.Size(), float64(corpus.Train.Size())/time.Since(begin).Seconds()/1e6,
		runtime.GOMAXPROCS(0))
}

// compareLlamaCpp compares with the files of llama.cpp's vocabulary tests, if the folder has them.
func compareLlamaCpp(t *testing.T, tok *Tokenizer, folder string) {
	texts, err := os.ReadFile(filepath.Join(folder, "llama.cpp.inp"))
	if err != nil {
		t.Log(err)
		return
	}

	ids, err := os.ReadFile(filepath.Join(folder, "llama.cpp.out"))
	require.NoError(t, err)
	all := strings.Split(string(texts), "\n__ggml_vocab_test__\n")
	lines := strings.Split(string(ids), "\n")
	for i, text := range all {
		var want []int
		for _, id := range strings.Fields(lines[i]) {
			n, err := strconv.Atoi(id)
			require.NoError(t, err)
			want = append(want, n)
		}
		require.Equal(t, want, append([]int(nil), tok.Encode([]byte(text))...), "%q", text)
	}

	t.Logf("llama.cpp: the same ids for %d texts", len(all))
}

func compareText(t *testing.T, tok *Tokenizer, folder, path string) {
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	name := filepath.Base(path)
	raw, err := os.ReadFile(filepath.Join(folder, name[:len(name)-len("txt")]+"ids"))
	require.NoError(t, err)
	want := make([]int, len(raw)/4)
	for i := range want {
		want[i] = int(binary.LittleEndian.Uint32(raw[4*i:]))
	}

	begin := time.Now()
	ids := tok.Encode(text)
	encode := time.Since(begin)
	begin = time.Now()
	back, err := tok.DecodeWhole(ids)
	require.NoError(t, err)
	decode := time.Since(begin)
	rate := func(d time.Duration) float64 { return float64(len(text)) / d.Seconds() / 1e6 }
	t.Logf("%s: %d bytes, %d ids, encoded at %.1f MB/s, decoded at %.1f MB/s", name, len(text),
		len(ids), rate(encode), rate(decode))
	for i := range min(len(ids), len(want)) {
		if ids[i] != want[i] {
			before, _ := tok.DecodeWhole(ids[max(0, i-5):i])
			ours, _ := tok.DecodeWhole(ids[i:min(len(ids), i+8)])
			rust, _ := tok.DecodeWhole(want[i:min(len(want), i+8)])
			t.Fatalf("%s: id %d is %d, want %d, after %q: %q, want %q", name, i, ids[i], want[i],
				before, ours, rust)
		}
	}

	require.Len(t, ids, len(want), name)
	if tok.decoding.replaced != nil { // two characters may become the same one
		text = tok.decoding.replaced[0].apply(text)
	}

	if tok.model.byteLevel && slices.Contains(tok.model.bytes[:], none) {
		return // the vocabulary has no token for some bytes
	}

	if slices.Contains(tok.normalizers, normalizer(prepend("▁"))) &&
		bytes.Contains(text, []byte("<s>")) {
		return // a space is added after a token in the text
	}

	require.True(t, bytes.Equal(tok.normalizedForm(text), back), "%s: decoding gives another text",
		name)
}

func (r replace) apply(text []byte) []byte {
	return bytes.ReplaceAll(text, []byte(r.old), []byte(r.new))
}

// normalizedForm returns the NFC form of a text, as a tokenizer with NFC decodes it.
func (t *Tokenizer) normalizedForm(text []byte) []byte {
	for _, n := range t.normalizers {
		if _, ok := n.(nfc); ok {
			text = n.normalize(text)
		}
	}
	return text
}
