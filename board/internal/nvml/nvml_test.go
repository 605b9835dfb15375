package nvml

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/sharedlib"
)

// TestCards checks that Cards returns the values reported by the library, and zeros for unsupported
// ones.
func TestCards(t *testing.T) {
	want := []Card{{0, "NVIDIA H100", "GPU-1", 612.5, 700, 60 << 30, 80 << 30, 0.97},
		{1, "NVIDIA H100", "GPU-2", 0, 0, 1 << 30, 80 << 30, 0}}
	l := Fake(want...)
	got, err := l.Cards()
	require.NoError(t, err)
	require.Equal(t, want, got)
	l.api.memory = func(h uintptr, _ *memory) result {
		if h == 1 {
			return 15 // lost
		}
		return 0
	}
	got, err = l.Cards()
	require.ErrorContains(t, err, "GPU 0: nvmlDeviceGetMemoryInfo: error 15")
	require.Len(t, got, 1)
	l.api.count = func(*uint32) result { return 1 }
	_, err = l.Cards()
	require.ErrorContains(t, err, "nvmlDeviceGetCount: error 1")
	require.NoError(t, l.Close())
	_, err = start(&api{initialize: func() result { return 9 }})
	require.ErrorContains(t, err, "is the driver loaded")
}

// TestOpen checks that the library of this computer can be read. If there is none, the error must
// mention the driver that contains it.
func TestOpen(t *testing.T) {
	l, err := Open()
	var missing *sharedlib.NotFoundError
	if errors.As(err, &missing) {
		require.ErrorContains(t, err, "comes with the driver")
		return
	}
	if err != nil {
		require.ErrorContains(t, err, "nvmlInit")
		return
	}
	_, err = l.Cards()
	require.NoError(t, err)
	require.NoError(t, l.Close())
}
