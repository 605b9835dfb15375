package lower

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOutputChunk checks that chunks respect the memory limit and consist of whole tiles, except for the
// last, and that they fill the GPU at the sizes of common models.
func TestOutputChunk(t *testing.T) {
	for _, c := range []struct{ rows, vocab, d, want int }{
		{32768, 50304, 768, 11008}, {16384, 50304, 1024, 8192}, {16384, 50304, 2048, 4096},
		{16384, 128256, 2048, 2048}, {16384, 151936, 2048, 2048},
		{7, 19, 18, 7},
		{300, 1 << 24, 8, 128},
	} {
		got := outputChunk(c.rows, c.vocab, c.d, 2, 132)
		require.Equal(t, c.want, got, "%d rows, %d columns, vocabulary of %d", c.rows, c.d, c.vocab)
	}
}
