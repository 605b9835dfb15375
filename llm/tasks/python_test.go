package tasks

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPythonRandom compares random numbers with those of Python's random.Random.
func TestPythonRandom(t *testing.T) {
	r := newPythonRandom(1234)
	require.Equal(t, []uint32{4150886329, 3342196574, 1892932127}, []uint32{r.uint32(), r.uint32(), r.uint32()})
	require.Equal(t, 0.11685051774599753, r.float64())
	require.Equal(t, []int{2, 29, 25}, r.sample(30, 3))
	require.Equal(t, []int{596, 35, 687, 709, 85, 100, 784}, r.sample(1000, 7))
	require.Equal(t, []int{22, 15, 1, 37, 36, 39, 30}, r.sample(40, 7))
	for _, want := range []int{615, 148, 183, 114} {
		require.Equal(t, want, int(r.float64()*1000))
	}
	require.Equal(t, []int{6, 0, 1, 4, 10, 7, 3, 11, 2, 5, 8, 9}, newPythonRandom(1337).shuffled(12))
}

// TestPythonText compares functions of text with Python's str.capitalize, re.split and bytes.decode.
func TestPythonText(t *testing.T) {
	for text, want := range map[string]string{"": "", "éTÉ": "Été", "ßen": "Ssen", "ﬁN": "Fin", "ǆX": "ǅx",
		"東京": "東京", "ΑΣ": "Ας"} {
		require.Equal(t, want, capitalize(text))
	}
	for text, want := range map[string]int{"": 1, " ": 2, "a": 1, "a b": 2, " a\u3000\x1cb\u0085": 4} {
		require.Equal(t, want, countWords(text), "%q", text)
	}
	require.Equal(t, "a\ufffd\ufffd\ufffdb\ufffd\ufffd\ufffd\ufffd\ufffd",
		replaceInvalid([]byte("a\xe4\xba\xff\xf0\x9f\x98b\xc0\x80\xed\xa0\x80")))
	require.Equal(t, "a b\u200b", strip("\x1f\u2003a b\u200b \u0085"))
}
