package cudaops_test

import (
	"testing"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestMain(m *testing.M) {
	randtest.CollectRarely()
	if d, err := cudaops.Open(); err == nil {
		_ = d.Close() // the tests on a GPU measure times
	} else {
		randtest.OneProcessor()
	}
	m.Run()
}
