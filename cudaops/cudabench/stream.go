package cudabench

import (
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

const (
	streamBatches = 10000
	streamSlots   = 128 // batches that lie in memory at once
)

// streams measures a layer over 10,000 batches of 64×4000 with 1000 seeds, end to end by the wall clock, a batch: by a launch
// each, by a CUDA graph each, and by the kernel that stays; in device memory and, host, straight from and to pinned memory.
// With latency, a batch is waited for before the next one is handed over.
func streams(b *bench) {
	l := newKasmina(b, 64, 1000, false)
	size := 2 * l.elements
	memory := map[string][]gpu.Ptr{"": b.alloc2(streamSlots, l.elements)}
	host, err := b.ctx.AllocHost(2 * streamSlots * size)
	if err != nil {
		b.do(err)
		return
	}
	for i := range host {
		host[i] = byte(i * 7 % 64) // finite numbers
	}
	for i := range 2 * streamSlots {
		memory["_host"] = append(memory["_host"], gpu.Ptr(uintptr(unsafe.Pointer(&host[i*size]))))
	}
	for _, where := range []string{"", "_host"} {
		for _, latency := range []bool{false, true} {
			name := "kasmina_%s_64x4000_s1000" + where
			if latency {
				name += "_latency"
			}
			l.launched(fmt.Sprintf(name, "launches"), memory[where], latency)
			l.replayed(fmt.Sprintf(name, "graph"), memory[where], latency)
			l.streamed(fmt.Sprintf(name, "stream"), memory[where], latency)
		}
	}
	b.do(b.ctx.SyncStream(b.stream))
	b.do(b.ctx.FreeHost(host))
}

// alloc2 returns memory for inputs, which are random, and as many outputs.
func (b *bench) alloc2(slots, elements int) (at []gpu.Ptr) {
	for range slots {
		at = append(at, b.normal(elements, bf16))
	}
	for range slots {
		at = append(at, b.alloc(elements, bf16))
	}
	return at
}

// forward launches the layer on the batch of a slot.
func (l *kasminaLayer) forward(memory []gpu.Ptr, slot int) error {
	f := kernels.KasminaForward{KasminaLayer: l.KasminaLayer, Y: memory[streamSlots+slot], Bad: l.bad, Workspace: l.forwardWork}
	f.X = memory[slot]
	return l.KasminaForward(l.stream, f)
}

// wall reports what a batch takes of all of them; batch hands one over.
func (l *kasminaLayer) wall(name string, batch func(i int) error, end func() error) {
	if l.err != nil {
		return
	}
	run := func(n int) (time.Duration, error) {
		runtime.GC() // which would count
		start := time.Now()
		for i := range n {
			if err := batch(i); err != nil {
				return 0, err
			}
		}
		err := end()
		return time.Since(start) / time.Duration(n), err
	}
	_, err := run(streamBatches / 10)
	took := time.Duration(0)
	if err == nil {
		took, err = run(streamBatches)
	}
	if err != nil {
		l.do(fmt.Errorf("%s: %w", name, err))
		return
	}
	l.do(l.report(Measurement{Name: name, Time: took, Bytes: 4 * float64(l.elements)}))
}

func (l *kasminaLayer) sync() error { return l.ctx.SyncStream(l.stream) }

func (l *kasminaLayer) launched(name string, memory []gpu.Ptr, latency bool) {
	l.wall(name, func(i int) error {
		err := l.forward(memory, i%streamSlots)
		if latency {
			err = errors.Join(err, l.sync())
		}
		return err
	}, l.sync)
}

func (l *kasminaLayer) replayed(name string, memory []gpu.Ptr, latency bool) {
	if l.err != nil {
		return
	}
	var graphs []*gpu.Graph
	for slot := range streamSlots {
		l.do(l.ctx.BeginCapture(l.stream))
		l.do(l.forward(memory, slot))
		g, err := l.ctx.EndCapture(l.stream)
		if l.do(err); l.err != nil {
			return
		}
		graphs = append(graphs, g)
	}
	l.wall(name, func(i int) error {
		err := l.ctx.LaunchGraph(graphs[i%streamSlots], l.stream)
		if latency {
			err = errors.Join(err, l.sync())
		}
		return err
	}, l.sync)
	for _, g := range graphs {
		l.do(l.ctx.DestroyGraph(g))
	}
}

func (l *kasminaLayer) streamed(name string, memory []gpu.Ptr, latency bool) {
	if l.err != nil {
		return
	}
	c := kernels.KasminaStreamConfig{Depth: streamSlots, Idle: 20 * time.Millisecond, Blocks: 3}
	s, err := l.NewKasminaStream(l.stream, l.KasminaLayer, c)
	if err != nil {
		l.do(err)
		return
	}
	var last uint64
	l.wall(name, func(i int) (err error) {
		if last, err = s.Submit(memory[i%streamSlots], memory[streamSlots+i%streamSlots]); err == nil && latency {
			err = s.Wait(last)
		}
		return err
	}, func() error { return s.Wait(last) })
	_, err = s.Close()
	l.do(err)
}
