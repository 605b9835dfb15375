package board

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/board/internal/nvml"
	"github.com/kasmina-go/kasmina/llm"
)

// scrape returns the metrics of a board.
func scrape(t *testing.T, b *Board) string {
	t.Helper()
	w := httptest.NewRecorder()
	b.metrics(w, nil)
	text, err := io.ReadAll(w.Body)
	require.NoError(t, err)
	return string(text)
}

// TestCards checks the gauges of GPUs. Values that a GPU does not report must be missing, and a
// board of logs must have no gauges.
func TestCards(t *testing.T) {
	b, err := New()
	require.NoError(t, err)
	b.cards.open = func() (*nvml.Library, error) {
		return nvml.Fake(nvml.Card{Name: `NVIDIA "H100"`, UUID: "GPU-1", Power: 560,
			PowerLimit: 700, Used: 1 << 30, Total: 80 << 30},
			nvml.Card{Name: "other", Total: 4 << 30, Busy: 0.5}), nil
	}
	require.NotContains(t, scrape(t, b), "kasmina_gpu")
	b.trainers = []*llm.Trainer{{}}
	text := scrape(t, b)
	const first, second = `{gpu="0",name="NVIDIA \"H100\"",uuid="GPU-1"} `,
		`{gpu="1",name="other",uuid=""} `
	for _, line := range []string{"kasmina_gpu_power_watts" + first + "560",
		"kasmina_gpu_power_ratio" + first + "0.8",
		"kasmina_gpu_memory_used_bytes" + first + "1.073741824e+09",
		"kasmina_gpu_memory_total_bytes" + second + "4.294967296e+09",
		"kasmina_gpu_busy_ratio" + second + "0.5"} {
		require.Contains(t, text, line+"\n")
	}

	require.NotContains(t, text, "kasmina_gpu_power_watts"+second)
	require.NotContains(t, text, "kasmina_gpu_busy_ratio"+first)
	require.Equal(t, 1, strings.Count(text, "# TYPE kasmina_gpu_memory_total_bytes gauge\n"))
	b.trainers = nil
	require.NoError(t, b.Close())
}

// TestNoCards checks that a missing NVML is logged once and that no gauges are shown.
func TestNoCards(t *testing.T) {
	var logged bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&logged,
		&slog.HandlerOptions{Level: slog.LevelDebug})))
	defer slog.SetDefault(before)
	b, err := New()
	require.NoError(t, err)
	b.cards.open = func() (*nvml.Library, error) { return nil, errors.New("no driver here") }
	b.trainers = []*llm.Trainer{{}}
	for range 3 {
		require.NotContains(t, scrape(t, b), "kasmina_gpu")
	}

	require.Equal(t, 1, strings.Count(logged.String(), "no driver here"))
	b.trainers = nil
	require.NoError(t, b.Close())
}
