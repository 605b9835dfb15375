package cudaops

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/optime"
)

// OpTime is what the nodes of one op took in a run.
type OpTime = optime.OpTime

// Table is the times of ops for people: a line each, with their shares of the whole.
func Table(times []OpTime) string { return optime.Table(times) }

// Profile is where the time of one step went: see [Machine.StartProfile].
type Profile = optime.Profile

// plainSteps is how many steps a profile times as they are, beside one more before these, which is not looked at; markedSteps is
// how many have marks.
const plainSteps, markedSteps = 7, 4

// ProfileSteps is how many steps a profile takes.
const ProfileSteps = 1 + plainSteps + markedSteps

// StartProfile makes the machine profile the [ProfileSteps] steps that follow, of which the last ones run with a time stamp after
// every kernel; all compute the same bits as ever. A step ends with [Machine.Update], in a machine without an optimiser with
// [Machine.RunAll]. The machine must have run before. Then [Machine.Profile] has the profile.
func (m *Machine) StartProfile() error {
	err := errClosed
	switch {
	case m.closed:
	case !m.ran:
		err = errors.New("the machine has not run: profile it after a few steps")
	default:
		if err = joined(m.profiler.close(), m.device.ctx.SyncStream(m.stream)); err == nil {
			m.profiler = &profiler{m: m, pieces: map[pieceKey]*markedPiece{}}
		}
	}
	if err != nil {
		return fmt.Errorf("cudaops.Machine.StartProfile: %w", err)
	}
	return nil
}

// Profile returns the profile that [Machine.StartProfile] has begun, nil while steps are lacking. It measures the card's
// ceilings, which takes a fraction of a second and up to a GiB of memory that is free.
func (m *Machine) Profile() (*Profile, error) {
	p, err := m.profile()
	if err != nil {
		return nil, fmt.Errorf("cudaops.Machine.Profile: %w", err)
	}
	return p, nil
}

func (m *Machine) profile() (*Profile, error) {
	switch p := m.profiler; {
	case m.closed:
		return nil, errClosed
	case p == nil:
		return nil, errors.New("no profile was begun with StartProfile")
	case !p.done:
		return nil, nil
	}
	r, err := m.profiler.result()
	err = joined(err, m.profiler.close())
	m.profiler = nil
	if err != nil {
		return nil, err
	}
	if err := m.measureCeilings(r); err != nil {
		return nil, err
	}
	r.SetShares()
	return r, nil
}

// byOp gathers tasks by their ops; add adds what is known of one.
func byOp(tasks []task, add func(i int, t *OpTime)) (times []OpTime) {
	at := map[string]int{}
	for i, t := range tasks {
		name := opName(t)
		if _, ok := at[name]; !ok {
			at[name] = len(times)
			times = append(times, OpTime{Op: name})
		}
		o := &times[at[name]]
		o.Tasks++
		o.Bytes += t.bytes
		o.FLOPs += t.flops
		add(i, o)
	}
	return times
}

// opName is the name of this module's ops, and the description of others.
func opName(t task) string {
	if t.op != "" {
		return t.op
	}
	if o, ok := t.node.Op().(interface{ Name() string }); ok {
		return o.Name()
	}
	return fmt.Sprint(t.node.Op())
}

// attentionFLOPs is the operations of so many products of an attention, of which a causal mask leaves half.
func attentionFLOPs(s kernels.AttentionShape, products int) float64 {
	n := 2 * float64(products) * float64(s.Batch*s.Heads) * float64(s.Seq) * float64(s.Seq) * float64(s.HeadDim)
	if s.Causal {
		n /= 2
	}
	return n
}
