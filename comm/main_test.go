package comm

import (
	"testing"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestMain(m *testing.M) {
	randtest.OverlapWaits()
	m.Run()
}
