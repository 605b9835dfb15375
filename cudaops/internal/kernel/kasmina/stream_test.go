package kasmina

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

// TestStreamConstants compares the constants of the launch with the source.
func TestStreamConstants(t *testing.T) {
	kerneltest.MatchSource(t, "kasmina_stream.cu",
		fmt.Sprintf("constexpr int kMaxLayers = %d;", MaxStreamLayers),
		fmt.Sprintf("__launch_bounds__(kThreads, %d)", streamBlocks),
		"constexpr unsigned long long kWatched = 1;", "constexpr unsigned long long kStop = 2;")
	require.EqualValues(t, 4*8, Word(7, false))
	require.EqualValues(t, 4*8+1, Word(7, true))
	require.EqualValues(t, 4*8+2, StopWord(7))
}

// TestStreamGrid checks that the blocks of random streams fit the GPU, that a team has the blocks of an
// ordinary launch, and that the memory is large enough.
func TestStreamGrid(t *testing.T) {
	device := gpu.DeviceInfo{SMs: 132}
	fits := 0
	for range kerneltest.Few(2000, 500) {
		chunk := []int{4, 4, 8, 64, 3, 2048}[rand.IntN(6)]
		l := Layer{Rows: 1 << rand.IntN(14), Chunk: chunk, Type: kerneltest.StorageTypes[rand.IntN(3)],
			State: State{Seeds: 8 * (1 + rand.IntN(200)), Slots: 1 + rand.IntN(9)}}
		s := Stream{Depth: 1 + rand.IntN(100)}
		for range 1 + rand.IntN(MaxStreamLayers) {
			s.Layers = append(s.Layers, l)
		}

		blocks := device.SMs * (1 + rand.IntN(maxBlocks))
		g := s.divide(device, blocks, streamBlocks*device.SMs)
		ordinary := newGrid(device, l, true, usage{telemetry: true}).divideRows(l, blocks)
		require.Equal(t, ordinary, g.grid)
		require.Equal(t, ordinary.tiles*ordinary.rowParts(), g.members)
		require.LessOrEqual(t, g.teams, s.Depth)
		require.LessOrEqual(t, g.teams*g.members+1+streamSpare, max(streamBlocks*device.SMs, 1+streamSpare))

		var c kernel.Carve
		s.memory(g, &c)
		require.LessOrEqual(t, int(c.At), s.MemoryBytes(device), "%+v", g)
		require.LessOrEqual(t, s.memory(g, &kernel.Carve{}).end, c.At)
		if s.Check(device) == nil {
			fits++
		}
	}
	require.Greater(t, fits, 50)
}

// TestStreamLaunch launches streams on a fake GPU. The launch must be cooperative, and chunks of many
// threads need a kernel that prepares their softmax.
func TestStreamLaunch(t *testing.T) {
	k, ctx, p := kerneltest.FakeGPU(t, 90, 227<<10)
	for want, chunk := range map[string]int{"kasmina_stream_quad_bf16": 4, "kasmina_stream_part_bf16": 16,
		"kasmina_stream_single_bf16": 3} {
		l := Layer{Weights: p, Scales: p, Rows: 64, Chunk: chunk, Type: gpu.BFloat16,
			State: State{Ptr: p, Seeds: 10, Slots: 3}}
		ctx.Trace = nil
		require.NoError(t, k.Launch(0, Stream{Layers: []Layer{l, l, l}, Depth: 3, Idle: time.Second,
			Memory: p}))
		last := ctx.Trace[len(ctx.Trace)-1]
		require.Equal(t, want, last.Name)
		require.True(t, last.Config.Cooperative)
	}

	l := Layer{Rows: 64, Chunk: 2048, Type: gpu.BFloat16, State: State{Seeds: 1, Slots: 3}}
	ctx.Trace = nil
	require.NoError(t, k.Launch(0, Stream{Layers: []Layer{l, l}, Depth: 2, Memory: p}))
	var names []string
	for _, o := range ctx.Trace {
		names = append(names, o.Name)
	}
	require.Equal(t, []string{"", "kasmina_softmax", "kasmina_softmax", "kasmina_stream_part_bf16"}, names)

	l.Rows = 0
	require.ErrorContains(t, k.Launch(0, Stream{Layers: []Layer{l}, Depth: 2}), "kernels.Stream: batches are empty")
}
