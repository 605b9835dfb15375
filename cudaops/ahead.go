package cudaops

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
)

// vainRuns bounds what runs that were begun in vain may cost: one in so many, and one more.
const vainRuns = 128

// Start begins with the run that the next [Machine.RunAll] is expected to ask for, so that the device need not wait until it
// does. RunAll takes the run over if the values of inputs and the lattices of Kasmina layers would make the same of it then, and
// otherwise computes what they are by then: the bits are those of a program without Start, and lattices hear of no runs but those
// that RunAll was called for. Until that call, [Machine.Value] returns the outputs and gradients of the run that has been begun;
// [Machine.Upload], [Machine.Bind], [Machine.DropGradients] and [Machine.StartProfile] abandon it, and [Machine.Update] is an
// error. What a program has changed at an [Machine.Address] is not looked at.
//
// Start returns false, and has done nothing, where no run can begin early: in a machine with a loss scale, with nodes that the
// host computes, with memory of another machine or program, and while it holds gathered gradients; also while one has begun, and
// when too many have begun in vain. After an error nothing has begun either, and RunAll meets its cause again.
func (m *Machine) Start() (begun bool, err error) {
	if begun, err = m.start(); err != nil {
		return false, fmt.Errorf("cudaops.Machine.Start: %w", err)
	}
	return begun, nil
}

func (m *Machine) start() (bool, error) {
	switch {
	case m.closed:
		return false, errClosed
	case m.begun || m.gathered || m.lost > 1+m.runs/vainRuns || !m.startable():
		return false, nil
	}
	m.begun = true
	if err := m.begin("Start"); errors.Is(err, errNotAhead) {
		return false, m.abandon()
	} else if err != nil {
		return false, joined(err, m.abandon())
	}
	return true, nil
}

// startable reports whether what a run computes is known before RunAll asks for it.
func (m *Machine) startable() bool {
	return m.program.scale == nil && m.config.lone == nil && m.config.share == nil && !m.bound && !m.onHost()
}

// take makes the run that Start has begun that of RunAll, or abandons it if it is not what RunAll asks for.
func (m *Machine) take() (taken bool, err error) {
	defer m.profiler.call("RunAll")()
	same := m.holdsInputs()
	for _, a := range m.attendants {
		if !same || err != nil {
			break
		}
		same, err = a.unchanged()
	}
	if !same || err != nil {
		m.lost++
		return false, errors.Join(err, m.abandon())
	}
	m.begun = false
	for _, a := range m.attendants {
		a.take()
	}
	return true, nil
}

// holdsInputs reports whether the inputs have the values that were sent last.
func (m *Machine) holdsInputs() bool {
	for _, in := range m.program.inputs {
		if in.constant {
			continue
		}
		v, n := in.node.Value(), in.array.extent()
		m.compared = slices.Grow(m.compared[:0], n)[:n]
		if v == nil || encode(m.compared, in.array.elem, v, in.array.len()) != nil || !bytes.Equal(m.compared, in.staging[:n]) {
			return false
		}
	}
	return true
}

// abandon drops the run that Start has begun, if any.
func (m *Machine) abandon() error {
	if !m.begun {
		return nil
	}
	err := m.complete() // what attendants wait for
	m.begun = false     // also after an error, as Start says
	m.profiler.again()
	for _, a := range m.attendants {
		a.abandon()
	}
	return joined(err, m.clearSums())
}
