package llm

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/bounded"
)

// FuzzLoaderState gives a loader any place: it is refused and nothing has changed, or batches
// follow whose tokens are the text's, and the place after them is one that a loader takes.
func FuzzLoaderState(f *testing.F) {
	l := mustLoader(f, upTo(100), LoaderConfig{Batch: 2, Seq: 9, Seed: 3})
	whole, err := json.Marshal(l.State())
	require.NoError(f, err)
	f.Add(whole)
	f.Add([]byte(`{"seed":1,"epoch":9223372036854775807,"next":0,"seq":9,"data":"up to 100"}`))
	f.Add([]byte(`{"seed":1,"epoch":4611686018427387904,"next":10,"seq":9,"data":"up to 100"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var s LoaderState
		if json.Unmarshal(text, &s) != nil {
			return
		}
		before := l.State()
		if err := l.SetState(s); err != nil {
			require.Equal(t, before, l.State())
			return
		}
		for range 6 {
			b, err := l.Next()
			require.NoError(t, err)
			for i, id := range b.Inputs {
				require.True(t, id >= 0 && id < 99 && b.Targets[i] == id+1)
			}
		}
		if l.State().Epoch <= maxEpoch { // which is far beyond where runs get to
			require.NoError(t, l.SetState(l.State()))
		}
	})
}

// FuzzSamplerState gives a sampler any state: it is refused, or is the one that it then has.
func FuzzSamplerState(f *testing.F) {
	s, err := NewSampler(SamplerConfig{Temperature: 1})
	require.NoError(f, err)
	whole, err := s.State()
	require.NoError(f, err)
	f.Add(whole)
	f.Add(whole[:5])
	f.Fuzz(func(t *testing.T, state []byte) {
		before, err := s.State()
		require.NoError(t, err)
		if s.SetState(state) == nil {
			before = state
		}
		after, err := s.State()
		require.NoError(t, err)
		require.Equal(t, before, after)
		_, err = Sample(s, []float64{1, 2, 3})
		require.NoError(t, err)
	})
}

// FuzzCorpus gives OpenCorpus files of any contents and names: it says what is wrong, or its two
// parts are all that they hold.
func FuzzCorpus(f *testing.F) {
	f.Add("a.txt", []byte("some text"), "b", []byte{0, 1})
	f.Add(".hidden", []byte("x"), "b/c", []byte("yy"))
	f.Add("a", []byte("x"), "a", []byte(""))
	f.Fuzz(func(t *testing.T, name1 string, text1 []byte, name2 string, text2 []byte) {
		dir := t.TempDir()
		for name, text := range map[string][]byte{name1: text1, name2: text2} {
			if filepath.IsLocal(name) && len(name) < 100 {
				_ = os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o777)
				_ = os.WriteFile(filepath.Join(dir, name), text, 0o666) // which may be no name here
			}
		}
		c, err := OpenCorpus(dir)
		if err != nil {
			return
		}
		for _, part := range []*Text{c.Train, c.HeldOut} {
			text, err := part.Sample(int(part.Size()))
			require.NoError(t, err)
			require.Len(t, text, int(part.Size()))
			documents, err := part.SampleDocuments(int(part.Size()))
			require.NoError(t, err)
			require.Len(t, documents, part.Documents())
		}
		require.LessOrEqual(t, c.Train.Size()+c.HeldOut.Size(), int64(len(text1)+len(text2)))
	})
}

// FuzzFingerprints gives the cache of fingerprints any file: what it then remembers comes back,
// whatever was there.
func FuzzFingerprints(f *testing.F) {
	sum := strings.Repeat("ab", 32)
	f.Add([]byte(`[{"table":"a","fingerprint":"` + sum + `"}]`))
	f.Add([]byte(`[{"table":"a","fingerprint":"ab"},{},null,3]`))
	f.Add([]byte("[" + strings.Repeat("{},", 1000) + "{}]"))
	path := filepath.Join(f.TempDir(), "fingerprints.json")
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(path, b, 0o666))
		cache := fingerprints(path)
		bounded.Run(t, int64(len(b)), func() { cache.get("a") })
		cache.put("b", sum)
		got, ok := cache.get("b")
		require.True(t, ok)
		require.Equal(t, sum, got)
		require.LessOrEqual(t, len(cache.read()), fingerprintsMost)
	})
}

// TestManyFingerprints wants a file with more than is remembered to cost no more than that.
func TestManyFingerprints(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fingerprints.json")
	b := []byte("[" + strings.Repeat("{},", fingerprintsBytes/3-2) + "{}]")
	require.NoError(t, os.WriteFile(path, b, 0o666))
	bounded.Run(t, int64(len(b)), func() {
		require.Len(t, fingerprints(path).read(),
			fingerprintsMost)
	})
}
