package gpu

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/op/kvcache"
)

// TestCacheTokens checks that the memory of a batcher has the pages of all its texts at their maximum length, of which
// each fills its last page only in part, unless the device is too small.
func TestCacheTokens(t *testing.T) {
	c := llm.Config{Vocab: 9, Dim: 16, Layers: 2, Heads: 2, Seq: 1080}.Default()
	const perText = (1080 + kvcache.PageTokens - 1) / kvcache.PageTokens
	require.GreaterOrEqual(t, cacheTokens(c, cudaops.BFloat16, 32, 1<<30)/kvcache.PageTokens, 32*perText)
	require.Equal(t, 1000, cacheTokens(c, cudaops.BFloat16, 32, 1000*2*2*2*16))

	c.Seq = 1 << 20
	require.Equal(t, 1<<20, cacheTokens(c, cudaops.Float32, 3, 1<<40))
}
