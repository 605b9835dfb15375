package llm_test

import (
	"testing"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestMain(m *testing.M) {
	randtest.CollectRarely()
	randtest.OneProcessor()
	m.Run()
}
