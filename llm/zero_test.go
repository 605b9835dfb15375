package llm

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestZeroBPE wants the zero value, and none at all, to be the encoding that merges nothing.
func TestZeroBPE(t *testing.T) {
	none := mustBPE(t)
	for _, b := range []*BPE{{}, nil} {
		require.Equal(t, 257, b.VocabSize())
		require.Equal(t, 256, b.EndOfDocument())
		require.Equal(t, none.Name(), b.Name())
		require.Equal(t, []int{'a', 0xff}, b.Encode([]byte("a\xff")))
		text, err := b.Decode([]int{'a', 256, 'b'})
		require.NoError(t, err)
		require.Equal(t, "ab", string(text))
		_, err = b.Decode([]int{257})
		require.ErrorContains(t, err, "ids[0] is 257")
		path := filepath.Join(t.TempDir(), "bpe")
		require.NoError(t, b.Save(path))
		loaded, err := LoadBPE(path)
		require.NoError(t, err)
		require.Equal(t, none.Name(), loaded.Name())
	}
}

func mustBPE(t *testing.T) *BPE {
	t.Helper()
	b, err := newBPE(nil)
	require.NoError(t, err)
	return b
}

// TestZeroValues wants what nobody has made to say who makes it, and nothing to panic.
func TestZeroValues(t *testing.T) {
	second := func(_ any, err error) error { return err }
	var m Model
	for name, err := range map[string]error{
		"NewGenerator makes one": second(collect(new(Generator).Generate(t.Context(), []int{1}, 1,
			nil))),
		"NewSampler makes one":         second(new(Sampler).State()),
		"TrainOrder2 makes an Order2":  second(new(Order2).BitsPerByte([]byte("text"))),
		"NewLoader makes one":          second(new(Loader).Next()),
		"SetState: the loader is nil":  new(Loader).SetState(LoaderState{}),
		"needs a Graph and a Machine":  second(Runner{}.Run(Batch{})),
		"Runner needs a Graph":         second(Runner{}.Next(t.Context(), []int{1})),
		"an Inference needs a Model":   second(new(Inference).Loss(Batch{})),
		"which NewModel and LoadModel": second((&Inference{Model: &m}).Decoder()),
		"NewModel and LoadModel make":  second(NewGenerator(&m)),
		"tokens 1 to 2 of 0":           new(TokenFile).ReadTokens(make([]int, 1), 1),
	} {
		require.ErrorContains(t, err, name)
	}
	require.NoError(t, new(Generator).Close())
	require.Error(t, new(TokenFile).Close())
	require.NoError(t, new(Inference).Close())
	id, err := Sample(new(Sampler), []float32{1, 3, 2})
	require.NoError(t, err)
	require.Equal(t, 1, id, "the zero sampler is greedy")
	require.NoError(t, new(Sampler).SetState(mustState(t)))
	require.Zero(t, new(Text).Size())
	_, err = new(Text).SampleDocuments(3)
	require.NoError(t, err)
	for range new(Evaluation).Batches() {
		t.Error("a batch of nothing")
	}
}

func mustState(t *testing.T) []byte {
	t.Helper()
	s, err := NewSampler(SamplerConfig{})
	require.NoError(t, err)
	state, err := s.State()
	require.NoError(t, err)
	return state
}
