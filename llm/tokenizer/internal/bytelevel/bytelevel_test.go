package bytelevel

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAlphabet(t *testing.T) {
	require.Equal(t, "Ġa!Ċé", string(AppendToken(nil, []byte(" a!\n\xe9"))))
	seen := map[string]bool{}
	for b := range 256 {
		token := string(AppendToken(nil, []byte{byte(b)}))
		require.False(t, seen[token])
		seen[token] = true
		bytes, ok := AppendBytes(nil, token)
		require.True(t, ok)
		require.Equal(t, []byte{byte(b)}, bytes)
	}

	for _, token := range []string{" ", "aŤ", "中", "\xff"} {
		bytes, ok := AppendBytes([]byte("x"), token)
		require.False(t, ok)
		require.Equal(t, "x", string(bytes))
	}
}
