package comm

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestWaiting checks the reports of waiting ranks: rank 0 names the missing rank, and a rank with another
// secret learns that rank 0 does not accept it.
func TestWaiting(t *testing.T) {
	defer func(first, later time.Duration) { firstReport, laterReport = first, later }(firstReport, laterReport)
	firstReport, laterReport = 50*time.Millisecond, 50*time.Millisecond
	p := places(t, 2)
	p[1].Secret = NewSecret()

	const stranger = "does not know this run's secret" // reported once rank 0 listens
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	texts := make([]string, 2)
	errs := everywhere(2, func(rank int) error {
		w, err := Join(ctx, p[rank], Options{Timeout: patience, Waiting: func(text string) {
			mu.Lock()
			defer mu.Unlock()
			texts[rank] = text
			if texts[0] != "" && strings.Contains(texts[1], stranger) {
				cancel()
			}
		}})
		if err == nil {
			err = errors.Join(errors.New("joined"), w.Close())
		}
		return err
	})

	cancel()
	for _, err := range errs {
		require.ErrorIs(t, err, context.Canceled)
	}

	require.Contains(t, texts[0], "for rank 1 of 2 to join at 127.0.0.1")
	require.Contains(t, texts[1], "for rank 0 at 127.0.0.1")
	require.Contains(t, texts[1], stranger)
}
