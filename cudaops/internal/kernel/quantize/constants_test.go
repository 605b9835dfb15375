package quantize

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

func TestConstantsMatchSources(t *testing.T) {
	kerneltest.MatchSource(t, "quantize_weights.cu",
		fmt.Sprintf("kThreads = %d, kColumns = 8, kGroups = 8, kTiles = %d;",
			WeightThreads, WeightColumns/(8*8)),
		fmt.Sprintf("kRows = kThreads / kGroups * %d;", WeightRows*8/WeightThreads))
}
