package cudaops_test

import (
	"testing"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestMain(m *testing.M) {
	randtest.CollectRarely()

	// Tests on a GPU measure times, so they use all processors.
	if d, err := cudaops.Open(); err == nil {
		_ = d.Close()
	} else {
		randtest.OneProcessor()
	}

	m.Run()
}
