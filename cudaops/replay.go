package cudaops

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// How a machine enqueues its program: as it is the first time, which loads what the kernels need, and then as what was captured of that.

// recording is what was captured of runs that do the same work.
type recording struct {
	loaded    bool // one of them was enqueued as it is, so that a capture loads no modules
	graph     *gpu.Graph
	monitored *gpu.Graph // with the monitor's marks
}

// recordings is how many kinds of runs are kept. Attendants seldom have more than two modes, and change them together.
const recordings = 16

// compute enqueues the program, or what was captured of it.
func (m *Machine) compute() error {
	defer func() { m.ran, m.read, m.gathered = true, false, len(m.program.sums) > 0 }()
	m.carried = m.scale.Scale
	var mode []byte
	for _, a := range m.attendants {
		mode = a.appendMode(mode)
	}
	if m.now = m.recorded[string(mode)]; m.now == nil {
		if len(m.recorded) == recordings {
			if err := m.forget(); err != nil {
				return err
			}
		}
		m.now = new(recording)
		m.recorded[string(mode)] = m.now
	}
	// The first run loads modules, which a capture does not allow; the second is recorded, and later ones replay it.
	run, capture := m.replay, !m.onHost()
	switch {
	case !m.now.loaded:
		run, capture = m.load, false
	case m.monitor != nil && !m.profiler.busy():
		run = m.monitor.compute
	}
	return m.profiler.around(capture, run, func() error { return m.profiler.run() })
}

// load enqueues the program as it is.
func (m *Machine) load() error {
	err := m.enqueue()
	m.now.loaded = err == nil
	return err
}

func (m *Machine) onHost() bool { return m.program.onHost() }

// onHost reports whether the run under way computes something on the host, so that it cannot be captured.
func (p *program) onHost() bool {
	return slices.ContainsFunc(p.tasks, func(t task) bool { return t.host || t.layer != nil && t.layer.hosted })
}

// replay enqueues the program, which has been loaded.
func (m *Machine) replay() error {
	if m.onHost() {
		return m.enqueue()
	}
	if m.now.graph == nil {
		var err error
		if m.now.graph, err = m.capture(m.enqueue); err != nil {
			return err
		}
	}
	return m.device.ctx.LaunchGraph(m.now.graph, m.stream)
}

func (m *Machine) enqueue() error {
	m.tuner.used = m.tuner.used[:0]
	if err := m.zero(); err != nil {
		return err
	}
	for _, t := range m.program.tasks {
		if err := t.run(); err != nil {
			return fmt.Errorf("%s: %w", describe(t.node), err)
		}
	}
	return nil
}

// capture records what is enqueued as a graph.
func (m *Machine) capture(enqueue func() error) (*gpu.Graph, error) {
	ctx := m.device.ctx
	if err := ctx.BeginCapture(m.stream); err != nil {
		return nil, err
	}
	m.capturing = true
	err := enqueue()
	m.capturing = false
	g, endErr := ctx.EndCapture(m.stream)
	if err != nil && g != nil { // a part of it
		endErr = ctx.DestroyGraph(g)
	}
	if err := joined(err, endErr); err != nil {
		return nil, err
	}
	return g, nil
}

// forget drops what was captured, since later runs differ from it.
func (m *Machine) forget() error {
	if len(m.recorded) == 0 {
		return nil
	}
	return errors.Join(m.device.ctx.SyncStream(m.stream), m.dropRecordings())
}

// dropRecordings is forget while the stream is idle.
func (m *Machine) dropRecordings() error {
	var errs []error
	for _, r := range m.recorded {
		for _, g := range []*gpu.Graph{r.graph, r.monitored} {
			if g != nil {
				errs = append(errs, m.device.ctx.DestroyGraph(g))
			}
		}
	}
	clear(m.recorded)
	m.now = nil
	return errors.Join(errs...)
}
