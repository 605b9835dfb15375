package cudabench

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kasmina"
	"github.com/kasmina-go/kasmina/cudaops/internal/stream"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// The size of the batches of a stream, how many are timed, and how many are in memory.
const (
	streamRows    = 64
	streamSeeds   = 1000
	streamColumns = 4 * streamSeeds
	streamBatches = 10000
	streamDepth   = 128
)

// streams times chains of Kasmina layers over small batches, per batch and by the wall clock: with one
// launch per layer, with one CUDA graph per batch, and with a kernel that stays on the GPU. Batches are in
// device memory or, with "host", in pinned memory. With "wait", each batch is waited for before the next
// one is submitted. With "telemetry", the figures of all layers reach pinned memory.
func streams(b *timer) {
	batches := streamBatches
	if b.size < cacheBytes { // a test
		batches = 2
	}
	for _, layers := range []int{1, 4} {
		for _, host := range []bool{false, true} {
			s := newStreamBench(b, layers, batches, host)
			for _, telemetry := range []bool{false, true} {
				for _, wait := range []bool{false, true} {
					s.measure(telemetry, wait)
				}
			}
			s.free()
		}
	}
}

// streamBench is a chain of layers, and places for its batches.
type streamBench struct {
	*timer
	batches int
	host    bool
	layers  []kasmina.Layer
	pinned  []byte // batches, if host is set
	report  []byte // pinned; the figures of a batch
	x, y    gpu.Ptr
	figures gpu.Ptr
	between [2]gpu.Ptr
	counts  gpu.Ptr
	work    gpu.Ptr
}

func newStreamBench(b *timer, layers, batches int, host bool) *streamBench {
	s := &streamBench{timer: b, batches: batches, host: host}
	slots := streamSeeds + 1
	for range layers {
		l := kasmina.Layer{Weights: b.normal(4*slots, f32), Scales: b.normal(slots, f32),
			State: kasmina.State{Seeds: streamSeeds, Slots: slots}, Rows: streamRows, Chunk: 4, Eps: 1e-8,
			Stability: seed.Adaptive, Type: bf16}
		data := make([]byte, l.State.Bytes())
		do(l.State.Encode(data, func(i int) seed.Seed { return seedAt(b, i, false) }))
		l.State.Ptr = b.upload(data)
		s.layers = append(s.layers, l)
	}

	const n = streamRows * streamColumns
	size := kasmina.Stream{Layers: s.layers}.BatchBytes()
	s.x = b.normal(streamDepth*size/2, bf16)
	s.y = b.bytes(streamDepth * size)
	if host {
		s.pinned = must(b.Ctx.AllocHost(2 * streamDepth * size))
		at := must(b.Ctx.PinnedAddress(s.pinned))
		do(b.Ctx.CopyToHost(s.pinned[:streamDepth*size], s.x, b.stream))
		s.x, s.y = at, at.Offset(streamDepth*size)
	}

	s.between = [2]gpu.Ptr{b.room(n, bf16), b.room(n, bf16)}
	s.counts = b.zeros(streamSeeds)
	s.figures = b.room(kasmina.ForwardFigures*streamSeeds*layers, f32)
	s.report = must(b.Ctx.AllocHost(4 * kasmina.ForwardFigures * streamSeeds * layers))
	s.work = b.bytes(kasmina.Forward{Layer: s.layers[0]}.WorkspaceBytes(b.Info))
	do(b.Ctx.SyncStream(b.stream))
	return s
}

func (s *streamBench) free() {
	s.timer.free()
	do(s.Ctx.FreeHost(s.report))
	if s.host {
		do(s.Ctx.FreeHost(s.pinned))
	}
}

// forward enqueues the launches for the batch at a place.
func (s *streamBench) forward(place int, telemetry bool) {
	at := place * kasmina.Stream{Layers: s.layers}.BatchBytes()
	x := s.x.Offset(at)
	for i, l := range s.layers {
		l.X = x
		x = s.between[i%2]
		if i == len(s.layers)-1 {
			x = s.y.Offset(at)
		}
		s.launch(kasmina.Forward{Layer: l, Y: x, Telemetry: telemetry, Bad: s.counts,
			Figures:   s.figures.Offset(4 * kasmina.ForwardFigures * streamSeeds * i),
			Workspace: s.work})
	}
	if telemetry {
		do(s.Ctx.CopyToHost(s.report, s.figures, s.stream))
	}
}

func (s *streamBench) measure(telemetry, wait bool) {
	sync := func() { do(s.Ctx.SyncStream(s.stream)) }
	s.wall("launches", telemetry, wait, func(i int) {
		s.forward(i%streamDepth, telemetry)
		if wait {
			sync()
		}
	}, sync)

	var graphs []gpu.Graph
	for place := range streamDepth {
		do(s.Ctx.BeginCapture(s.stream))
		s.forward(place, telemetry)
		graphs = append(graphs, must(s.Ctx.EndCapture(s.stream)))
	}
	s.wall("graph", telemetry, wait, func(i int) {
		do(s.Ctx.LaunchGraph(graphs[i%streamDepth], s.stream))
		if wait {
			sync()
		}
	}, sync)
	for _, g := range graphs {
		do(s.Ctx.DestroyGraph(g))
	}

	k := must(stream.New(s.Ctx, s.Set, s.stream, stream.Config{Layers: s.layers, Depth: streamDepth,
		Idle: 20 * time.Millisecond, X: s.x, Y: s.y}))
	await := func(batch uint64) { do(k.Wait(context.Background(), batch)) }
	s.wall("stream", telemetry, wait, func(int) {
		if n := k.Next(); n >= streamDepth {
			await(n - streamDepth)
		}
		batch := must(k.Submit(telemetry))
		if wait {
			await(batch)
		}
	}, func() { await(k.Next() - 1) })
	do(k.Close())
}

// wall reports the time per batch. Function batch submits a batch, and end waits for all batches.
func (s *streamBench) wall(how string, telemetry, wait bool, batch func(i int), end func()) {
	name := fmt.Sprintf("kasmina_%s_%dx%d_s%d_l%d", how, streamRows, streamColumns, streamSeeds,
		len(s.layers))
	for _, o := range []struct {
		on   bool
		name string
	}{{telemetry, "_telemetry"}, {s.host, "_host"}, {wait, "_wait"}} {
		if o.on {
			name += o.name
		}
	}

	s.timing = name
	once := func(n int) time.Duration {
		runtime.GC() // so that a collection is less likely to fall into the measured time
		start := time.Now()
		for i := range n {
			batch(i)
		}
		end()
		return time.Since(start)
	}
	once(max(1, s.batches/10))
	m := Measurement{Name: name, Time: max(1, once(s.batches)/time.Duration(s.batches)),
		Bytes: 4 * streamRows * streamColumns}
	do(s.timer.report(m))
	s.timing = ""
}
