package comm

import (
	"testing"

	"github.com/kasmina-go/kasmina/comm/internal/channel"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

func TestMain(m *testing.M) {
	// No test may fail because another program delays a rank for some seconds.
	channel.HandshakeTimeout, farewell = patience, patience

	randtest.OverlapWaits()
	m.Run()
}
